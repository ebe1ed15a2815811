"""Incremental detokenization: the text that each new token adds, never a partial character.

It works on the bytes of tokens, so each token is processed once and nothing is decoded again.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence

from quire.text.tokenizer import Tokenizer

_ESCAPED = re.compile("[\udc80-\udcff]")


class Detokenizer:
    """The text of one output. All pushes and the flush joined are the text that decoding prompt and output together
    adds to the prompt's own text; bytes of a character that the prompt left incomplete belong to the output.

    `prompt_tail` are the last tokens of the prompt: all, or 16. If none of them has text, the output begins the text
    and loses the leading space that SentencePiece adds.

    There is one difference from the `tokenizers` library, with byte fallback ("<0x0A>") only. If a run of byte tokens
    is not valid UTF-8, the library replaces all of it by U+FFFD, also the valid characters before the bad byte. Those
    may have been sent already, so they stay here; each undecodable byte becomes one U+FFFD, as in the library.
    """

    __slots__ = ("_at_start", "_byte_fallback", "_decoder", "_skip_ids", "_strip_char", "_strip_left", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], skip_special_tokens: bool = True) -> None:
        rules = tokenizer.decoder_rules
        self._tokenizer = tokenizer
        self._skip_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._byte_fallback = rules.byte_fallback
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if self._byte_fallback else "replace")
        self._at_start = True
        self._strip_char, self._strip_left = rules.strip
        self.push(prompt_tail)

    def push(self, ids: Iterable[int]) -> str:
        """Return the text that these tokens complete; "" while a character is incomplete."""
        if self._at_start:
            return self._push_first(ids)
        shown = b"".join(self._tokenizer.token_bytes(id) for id in ids if id not in self._skip_ids)
        return self._finish_text(self._decoder.decode(shown))

    def flush(self) -> str:
        """Return the rest: U+FFFD for the bytes of an incomplete character. Nothing may be pushed afterwards."""
        return self._finish_text(self._decoder.decode(b"", final=True))

    def _push_first(self, ids: Iterable[int]) -> str:
        """Push up to the first token with text, which has its own rule about spaces."""
        rest = iter(ids)
        for id in rest:
            if id not in self._skip_ids and self._tokenizer.has_id(id):
                self._at_start = False
                text = self._finish_text(self._decoder.decode(self._tokenizer.first_token_bytes(id)))
                return text + self.push(rest)
        return ""

    def _finish_text(self, text: str) -> str:
        if self._byte_fallback and not text.isascii():
            text = _ESCAPED.sub("\ufffd", text)
        if self._strip_left and text:
            dropped = min(len(text) - len(text.lstrip(self._strip_char)), self._strip_left)
            self._strip_left = 0 if dropped < len(text) else self._strip_left - dropped
            text = text[dropped:]
        return text
