"""A vocabulary as llguidance reads one: the bytes of each token, and how the tokenizer itself would spell a text.

From tokenizer.json it would make the same, but for seconds in which no other thread of Python runs."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """What llguidance.TokenizerWrapper asks of a tokenizer. None of the tokens `eos_ids` is text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, min(eos_ids)
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(id for id in {*tokenizer.special_ids, *eos_ids} if id < vocab_size)
        self._special = frozenset(self.special_token_ids)
        self._ids = {token: id for id, token in enumerate(self.tokens) if token and id not in self._special}
        self._longest = max(map(len, self._ids), default=1)

    def token_id(self, text: bytes) -> int | None:
        """The token of just these bytes, if there is one."""
        return self._ids.get(text)

    def __call__(self, text: str) -> list[int]:
        """Tokens that spell `text`: the tokenizer's, where they are no special tokens and their bytes are the text's.
        Some put a space before it, or change it; then the longest token that fits is taken each time."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance finds out whether bytes will do
        data = text.encode()
        found = self.tokenizer.encode(text, add_special_tokens=False)
        plain = all(id < len(self.tokens) and id not in self._special for id in found)
        if plain and b"".join(self.tokens[id] for id in found) == data:
            return found
        found, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return []  # no token has this byte: nothing is said of how to spell the text
            found.append(self._ids[data[at:end]])
            at = end
        return found
