"""What bytes a vocabulary piece stands for, by the rules of a tokenizer's decoder.

Byte-level BPE, SentencePiece with byte fallback, Metaspace, WordPiece and plain words are known. A decoder's rules are
read once; each piece is then a function of the piece and of whether it opens the text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from tokenizers.decoders import Decoder

from quire.errors import StartupError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the others follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@dataclass(frozen=True, slots=True)
class DecoderRules:
    """The rules. The text of pieces is their bytes joined, decoded as UTF-8, less what `strip` takes from its start."""

    alphabet: dict[str, int] | None = None  # byte-level: each character is one byte
    byte_fallback: bool = False  # "<0x0A>" is one byte, and undecodable bytes become one U+FFFD each
    replacements: tuple[tuple[str, str], ...] = ()
    opening_space: str = ""  # the space mark that Metaspace drops from the first piece
    spaced: bool = False  # words, separated by a space
    continuation_prefix: str = ""  # WordPiece's "##": glued to the piece before
    cleanup: bool = False  # WordPiece: no space before punctuation and clitics
    strip: tuple[str, int] = ("", 0)  # so many of this character at most leave the start of the text

    @classmethod
    def from_decoder(cls, decoder: Decoder | None) -> DecoderRules:
        """The rules of a `tokenizers` decoder. StartupError for one that works otherwise."""
        if decoder is None:
            return cls(spaced=True)
        rules: dict[str, Any] = {"replacements": ()}
        fused = False
        for step in _flat(json.loads(decoder.__getstate__())):
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
        """The bytes of a piece; `first`: no piece comes before it."""
        if self.alphabet is not None:
            values = [self.alphabet.get(character) for character in piece]
            return piece.encode() if None in values else bytes(values)  # type: ignore[arg-type]
        if self.byte_fallback and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(byte[1], 16),))
        if first and self.opening_space:
            piece = piece.replace(self.opening_space, "")
        for old, new in self.replacements:
            piece = piece.replace(old, new)
        if self.spaced and not first:
            glued = self.continuation_prefix and piece.startswith(self.continuation_prefix)
            piece = piece[len(self.continuation_prefix) :] if glued else " " + piece
        return (_clean(piece) if self.cleanup else piece).encode()


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step.get("type") != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flat(part)]


def _clean(piece: str) -> str:
    """WordPiece's cleanup, as BERT's detokeniser does it."""
    for mark in (".", "?", "!", ","):
        piece = piece.replace(" " + mark, mark)
    piece = piece.replace(" ' ", "'")
    for clitic in ("n't", "'m"):
        piece = piece.replace(" " + clitic, clitic)
    piece = piece.replace(" do not", " don't")
    for clitic in ("'s", "'ve", "'re"):
        piece = piece.replace(" " + clitic, clitic)
    return piece
