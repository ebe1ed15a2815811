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

from quire.text.grammars.strings import PLAIN_CHARS, StringTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.text.grammars.vocabulary import GrammarVocabulary

MIN_VOCAB = 1 << 14  # tokens of a vocabulary: fewer are walked through soon
LETTER = b"q"  # in the place of any character that stands for itself
MAX_RUN = 64  # characters that are told at once


class TokenClasses:
    """What llguidance.TokenizerWrapper asks of a vocabulary: an end token, single bytes, runs of LETTER, and a text of
    each kind of `tokens`, of which `class_ids` says which it is."""

    bos_token_id, eos_token_id, special_token_ids = None, 0, (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [b"<end>", *(bytes([each]) for each in range(256)), *(n * LETTER for n in range(2, MAX_RUN + 1))]
        ids = {token: id for id, token in enumerate(self.tokens) if id}
        kinds = [ids.setdefault(_token_class(token), len(ids) + 1) for token in tokens]
        self.class_ids = np.array(kinds, dtype=np.int64)
        self.tokens = [self.tokens[0], *ids]

    def __call__(self, text: str) -> list[int]:
        """The bytes of a text."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance finds out whether bytes will do
        return byte_tokens(text.encode())


def byte_tokens(text: bytes) -> list[int]:
    """A text by single bytes of the vocabulary of kinds."""
    return [1 + each for each in text]


def _char_tokens(characters: int) -> list[int]:
    """So many characters of a string."""
    ids = [1 + LETTER[0], *range(257, 256 + MAX_RUN)]
    return characters // MAX_RUN * ids[-1:] + ([ids[characters % MAX_RUN - 1]] if characters % MAX_RUN else [])


def _token_class(token: bytes) -> bytes:
    """With LETTER for each character that it begins with and that stands for itself."""
    text = token.decode(errors="surrogateescape")  # a byte of no character becomes one that doesn't stand for itself
    whole = next((i for i, each in enumerate(text) if "\udc80" <= each <= "\udcff"), len(text))
    found = PLAIN_CHARS.match(text[:whole])
    count = found.end() if found else 0
    return LETTER * count + text[count:].encode(errors="surrogateescape")


class CountedStrings:
    """Masks within counted strings, over one vocabulary. `token_chars` are those of each plain token."""

    def __init__(self, vocabulary: GrammarVocabulary, tokens: StringTokens, eos_ids: Iterable[int]) -> None:
        from llguidance import LLTokenizer, TokenizerWrapper

        self.vocabulary = vocabulary
        barred = {*vocabulary.special_token_ids, *eos_ids}
        others = [
            id for id, token in enumerate(vocabulary.tokens) if token and not tokens.is_plain[id] and id not in barred
        ]
        kinds = TokenClasses([vocabulary.tokens[id] for id in others])
        self._class_ids, self._other_ids = kinds.class_ids, np.array(others, dtype=np.int64)
        self.tokenizer: LLTokenizer = LLTokenizer(TokenizerWrapper(kinds), n_vocab=len(kinds.tokens), slices=[])
        self.token_chars = [len(token.decode()) if it else 0 for token, it in zip(vocabulary.tokens, tokens.is_plain)]
        self._lengths = np.zeros(-(-len(vocabulary.tokens) // 32) * 32, dtype=np.int64)
        self._lengths[: len(vocabulary.tokens)] = self.token_chars
        self._longest = max(self.token_chars)
        self._fitting = dict[int, np.ndarray]()  # by how many characters there may be

    def feed(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Whether these tokens may follow; go on behind them."""
        return matcher.consume_tokens(byte_tokens(b"".join(map(self.vocabulary.tokens.__getitem__, tokens))))

    def feed_chars(self, matcher: LLMatcher, characters: int) -> bool:
        """The same of so many characters, within a string."""
        return matcher.consume_tokens(_char_tokens(characters))

    def mask(self, matcher: LLMatcher, chars_left: int) -> bytes:
        """What may follow where a string may have `chars_left` characters more, at least one."""
        chars_left = min(chars_left, self._longest)
        if (fitting := self._fitting.get(chars_left)) is None:
            bits = (self._lengths > 0) & (self._lengths <= chars_left)
            fitting = self._fitting[chars_left] = np.packbits(bits, bitorder="little")
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ids, found = self._other_ids[allowed[self._class_ids] > 0], fitting.copy()
        np.bitwise_or.at(found, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        return found.tobytes()
