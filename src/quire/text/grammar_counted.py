"""Strings of counted characters: which tokens fit into what is left of one.

llguidance would walk through nearly all of a large vocabulary where a string may have some characters more. But of
tokens whose characters stand for themselves those fit that have no more of them; and of two tokens that begin with as
many such characters and go on alike both may follow, or none. So it is asked about one of each kind, in a vocabulary
that has nothing else, but for single bytes, by which it is told what was spoken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from quire.text.grammar_strings import PLAIN, Tokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.text.grammar_tokens import Vocabulary

LEAST = 1 << 14  # tokens of a vocabulary: fewer are walked through soon
LETTER = b"q"  # in the place of any character that stands for itself
RUNS = 64  # characters that are told at once


class Kinds:
    """What llguidance.TokenizerWrapper asks of a vocabulary: an end token, single bytes, runs of LETTER, and a text of
    each kind of `tokens`, of which `kinds` says which it is."""

    bos_token_id, eos_token_id, special_token_ids = None, 0, (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [b"<end>", *(bytes([each]) for each in range(256)), *(n * LETTER for n in range(2, RUNS + 1))]
        ids = {token: id for id, token in enumerate(self.tokens) if id}
        kinds = [ids.setdefault(_kind(token), len(ids) + 1) for token in tokens]
        self.kinds = np.array(kinds, dtype=np.int64)
        self.tokens = [self.tokens[0], *ids]

    def __call__(self, text: str) -> list[int]:
        """The bytes of a text."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance finds out whether bytes will do
        return spelled(text.encode())


def spelled(text: bytes) -> list[int]:
    """A text by single bytes of the vocabulary of kinds."""
    return [1 + each for each in text]


def _run(characters: int) -> list[int]:
    """So many characters of a string."""
    ids = [1 + LETTER[0], *range(257, 256 + RUNS)]
    return characters // RUNS * ids[-1:] + ([ids[characters % RUNS - 1]] if characters % RUNS else [])


def _kind(token: bytes) -> bytes:
    """With LETTER for each character that it begins with and that stands for itself."""
    text = token.decode(errors="surrogateescape")  # a byte of no character becomes one that doesn't stand for itself
    whole = next((i for i, each in enumerate(text) if "\udc80" <= each <= "\udcff"), len(text))
    found = PLAIN.match(text[:whole])
    count = found.end() if found else 0
    return LETTER * count + text[count:].encode(errors="surrogateescape")


class Counted:
    """Masks within counted strings, over one vocabulary. `characters` are those of each plain token."""

    def __init__(self, words: Vocabulary, tokens: Tokens, ends: Iterable[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.words = words
        barred = {*words.special_token_ids, *ends}
        others = [id for id, token in enumerate(words.tokens) if token and not tokens.plain[id] and id not in barred]
        kinds = Kinds([words.tokens[id] for id in others])
        self._kinds, self._others = kinds.kinds, np.array(others, dtype=np.int64)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(kinds), n_vocab=len(kinds.tokens), slices=[])
        self.characters = [len(token.decode()) if it else 0 for token, it in zip(words.tokens, tokens.plain)]
        self._lengths = np.zeros(-(-len(words.tokens) // 32) * 32, dtype=np.int64)
        self._lengths[: len(words.tokens)] = self.characters
        self._longest = max(self.characters)
        self._fitting = dict[int, np.ndarray]()  # by how many characters there may be

    def tell(self, inner: LLMatcher, tokens: list[int]) -> bool:
        """Whether these tokens may follow; go on behind them."""
        return inner.consume_tokens(spelled(b"".join(map(self.words.tokens.__getitem__, tokens))))

    def pass_over(self, inner: LLMatcher, characters: int) -> bool:
        """The same of so many characters, within a string."""
        return inner.consume_tokens(_run(characters))

    def mask(self, inner: LLMatcher, room: int) -> bytes:
        """What may follow where a string may have `room` characters more, at least one."""
        room = min(room, self._longest)
        if (fitting := self._fitting.get(room)) is None:
            bits = (self._lengths > 0) & (self._lengths <= room)
            fitting = self._fitting[room] = np.packbits(bits, bitorder="little")
        allowed = np.unpackbits(np.frombuffer(inner.compute_bitmask(), np.uint8), bitorder="little")
        ids, found = self._others[allowed[self._kinds] > 0], fitting.copy()
        np.bitwise_or.at(found, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        return found.tobytes()
