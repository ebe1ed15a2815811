"""Token masks within JSON strings of limited length (`minLength`, `maxLength`).

In such a string llguidance would walk through nearly all of a large vocabulary. But a token of plain characters is
allowed exactly if it has at most as many characters as are left, and other tokens that begin with the same number of
plain characters and continue alike are all allowed or all not. So llguidance is asked about one token per class, over a
vocabulary of these classes and of single bytes, by which the output so far is fed to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from quire.text.grammars.strings import PLAIN_CHARS, StringTokens

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from quire.text.grammars.vocabulary import GrammarVocabulary

MIN_VOCAB = 1 << 14  # smaller vocabularies are fast without classes
LETTER = b"q"  # replaces any plain character
MAX_RUN = 64  # characters of the longest token that is a run of LETTER


class TokenClasses:
    """A vocabulary for llguidance.TokenizerWrapper: an end token, single bytes, runs of LETTER, and one token per class
    of `tokens`. `class_ids` has the class of each of `tokens`."""

    bos_token_id, eos_token_id, special_token_ids = None, 0, (0,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = [b"<end>", *(bytes([each]) for each in range(256)), *(n * LETTER for n in range(2, MAX_RUN + 1))]
        ids = {token: id for id, token in enumerate(self.tokens) if id}
        kinds = [ids.setdefault(_token_class(token), len(ids) + 1) for token in tokens]
        self.class_ids = np.array(kinds, dtype=np.int64)
        self.tokens = [self.tokens[0], *ids]

    def __call__(self, text: str) -> list[int]:
        """Return the tokens of a text, one per byte."""
        if not isinstance(text, str):
            raise TypeError("texts are strings")  # llguidance tests whether bytes are accepted
        return byte_tokens(text.encode())


def byte_tokens(text: bytes) -> list[int]:
    """Return single-byte tokens of the class vocabulary."""
    return [1 + each for each in text]


def _char_tokens(characters: int) -> list[int]:
    """Return tokens of `characters` plain characters."""
    ids = [1 + LETTER[0], *range(257, 256 + MAX_RUN)]
    return characters // MAX_RUN * ids[-1:] + ([ids[characters % MAX_RUN - 1]] if characters % MAX_RUN else [])


def _token_class(token: bytes) -> bytes:
    """Return the token's class: its leading plain characters are replaced by LETTER."""
    text = token.decode(errors="surrogateescape")  # invalid bytes become surrogates
    whole = next((i for i, each in enumerate(text) if "\udc80" <= each <= "\udcff"), len(text))
    plain = PLAIN_CHARS.match(text[:whole])
    count = plain.end() if plain else 0
    return LETTER * count + text[count:].encode(errors="surrogateescape")


class CountedStrings:
    """Masks within counted strings, over one vocabulary. `token_chars` has the number of characters of each plain
    token."""

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
        self._fitting = dict[int, np.ndarray]()  # masks of plain tokens, by the number of characters left

    def feed(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Advance `matcher` by tokens of the full vocabulary. Return False if they are not allowed."""
        return matcher.consume_tokens(byte_tokens(b"".join(map(self.vocabulary.tokens.__getitem__, tokens))))

    def feed_chars(self, matcher: LLMatcher, characters: int) -> bool:
        """Advance `matcher` by `characters` plain characters within a string. Return False if they are not allowed."""
        return matcher.consume_tokens(_char_tokens(characters))

    def mask(self, matcher: LLMatcher, chars_left: int) -> bytes:
        """Return the mask in a string with at most `chars_left` more characters, at least one."""
        chars_left = min(chars_left, self._longest)
        if (fitting := self._fitting.get(chars_left)) is None:
            bits = (self._lengths > 0) & (self._lengths <= chars_left)
            fitting = self._fitting[chars_left] = np.packbits(bits, bitorder="little")
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        ids, mask = self._other_ids[allowed[self._class_ids] > 0], fitting.copy()
        np.bitwise_or.at(mask, ids >> 3, (1 << (ids & 7)).astype(np.uint8))
        return mask.tobytes()
