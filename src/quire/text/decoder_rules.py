"""The bytes of a vocabulary piece, by the rules of a tokenizer's decoder.

Supported are byte-level BPE, SentencePiece with byte fallback, Metaspace, WordPiece and plain words. The rules are read
once; the bytes of a piece then depend only on the piece and on whether it begins the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import Decoder

from quire.errors import StartupError
from quire.text.tokenizers_guard import flatten_steps

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# WordPiece's cleanup, in this order, as BERT's detokenizer does it.
CLEANUPS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" do not", " don't"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's mapping of characters to bytes: printable Latin-1 bytes map to themselves, the others to U+0100
    and up."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """A decoder's rules. The text of pieces is their joined bytes, decoded as UTF-8, without what `strip` removes from
    the start."""

    alphabet: dict[str, int] | None = None  # byte-level: each character is one byte
    byte_fallback: bool = False  # "<0x0A>" is one byte, and undecodable bytes become one U+FFFD each
    replacements: tuple[tuple[str, str], ...] = ()
    opening_space: str = ""  # Metaspace's space mark, which is dropped from the first piece
    spaced: bool = False  # words are separated by spaces
    continuation_prefix: str = ""  # WordPiece's "##": no space before the piece
    cleanup: bool = False  # WordPiece: no space before punctuation and clitics
    strip: tuple[str, int] = ("", 0)  # a character, and the number of it to remove from the text's start

    @classmethod
    def from_decoder(cls, decoder: Decoder | None) -> DecoderRules:
        """Return the rules of a `tokenizers` decoder. Raise StartupError for an unsupported one."""
        if decoder is None:
            return cls(spaced=True)
        rules: dict[str, Any] = {"replacements": ()}
        fused = False
        for step in flatten_steps(decoder):
            match step:
                case {"type": "ByteLevel"} if not fused:
                    rules["alphabet"], fused = _byte_alphabet(), True
                case {"type": "ByteFallback"} if not fused:
                    rules["byte_fallback"] = True
                case {"type": "Replace", "pattern": {"String": old}, "content": new} if not fused:
                    rules["replacements"] += ((old, new),)
                case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme} if not fused:
                    rules["replacements"] += ((mark, " "),)
                    rules["opening_space"] = "" if scheme == "never" else mark
                case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup} if not fused:
                    rules |= {"spaced": True, "continuation_prefix": prefix, "cleanup": cleanup}
                case {"type": "Fuse"}:
                    fused = True
                case {"type": "Strip", "content": character, "start": start, "stop": 0} if fused:
                    rules["strip"] = (character, start)
                case _:
                    raise StartupError(
                        f"The tokenizer's decoder has a step that quire doesn't know: {str(step)[:100]}",
                        "Use a model with a byte-level, SentencePiece or WordPiece tokenizer",
                    )
        return cls(**rules)

    def bytes_of(self, piece: str, first: bool) -> bytes:
        """Return the bytes of a piece; `first`: it begins the text."""
        if self.alphabet is not None:
            values = [byte for character in piece if (byte := self.alphabet.get(character)) is not None]
            return bytes(values) if len(values) == len(piece) else piece.encode()
        if self.byte_fallback and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(match[1], 16),))
        if first and self.opening_space:
            piece = piece.replace(self.opening_space, "")
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.spaced and not first:
            glued = self.continuation_prefix and piece.startswith(self.continuation_prefix)
            piece = piece[len(self.continuation_prefix) :] if glued else " " + piece
        for old, new in CLEANUPS if self.cleanup else ():
            piece = piece.replace(old, new)
        return piece.encode()
