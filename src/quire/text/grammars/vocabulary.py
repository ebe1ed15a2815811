"""A tokenizer's vocabulary for llguidance: the bytes of each token, and the tokenization of a text.

llguidance could build it from tokenizer.json, but holds the GIL for seconds meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """The interface of llguidance.TokenizerWrapper. The tokens `eos_ids` are not text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Collection[int]) -> None:
        self.tokenizer, self.eos_token_id = tokenizer, min(eos_ids)
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        self.special_token_ids = sorted(id for id in {*tokenizer.special_ids, *eos_ids} if id < vocab_size)
        self._special = frozenset(self.special_token_ids)
        self._ids = {token: id for id, token in enumerate(self.tokens) if token and id not in self._special}
        self._longest = max(map(len, self._ids), default=1)

    def token_id(self, text: bytes) -> int | None:
        """Return the token of exactly these bytes, or None."""
        return self._ids.get(text)

    def __call__(self, text: str) -> list[int]:
        """Return tokens that spell `text`: the tokenizer's, if they are not special and their bytes are the text's.
        Some tokenizers add a space or change the text; then the longest matching token is taken repeatedly."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance tests whether bytes are accepted
        data = text.encode()
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        plain = all(id < len(self.tokens) and id not in self._special for id in ids)
        if plain and b"".join(self.tokens[id] for id in ids) == data:
            return ids
        ids, at = [], 0
        while at < len(data):
            ends = range(min(len(data), at + self._longest), at, -1)
            end = next((end for end in ends if data[at:end] in self._ids), None)
            if end is None:
                return []  # no token has this byte
            ids.append(self._ids[data[at:end]])
            at = end
        return ids
