"""A grammar of nothing but numbers: what may follow is drawn from what came before, sometimes one token alone or a run
of them, now and then the end."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from memories import VOCAB

END = 0


class NumberMatcher:
    """A Matcher whose place is the tokens so far."""

    def __init__(self, seed: int, tokens: tuple[int, ...] = ()) -> None:
        self.seed, self.tokens = seed, tokens
        self.queue: tuple[int, ...] = ()
        self._look()

    def _look(self) -> None:
        if self.free():
            self.allowed = set(range(VOCAB))
            return
        rng = random.Random(f"{self.seed} {self.tokens}")
        self.allowed = set(rng.sample(range(1, VOCAB), rng.choice((2, 5, 40))))
        if rng.random() < 0.2:
            self.allowed.add(END)
        if not self.queue and rng.random() < 0.4:
            self.queue = tuple(rng.choices(range(1, VOCAB), k=rng.choice((1, 3, 8))))
            if rng.random() < 0.1:
                self.queue += (END,)

    def accept(self, token: int) -> str:
        """See Matcher."""
        if token not in ({self.queue[0]} if self.queue else self.allowed):
            return f"token {token} can't follow"
        self.tokens, self.queue = (*self.tokens, token), self.queue[1:]
        self._look()
        return ""

    def forced(self) -> tuple[int, ...]:
        """See Matcher."""
        return self.queue

    def free(self) -> bool:
        """See Matcher. Every other one is from its fifth token on, unless a run was to follow."""
        return self.seed % 2 > 0 and len(self.tokens) >= 5 and not self.queue

    def copy(self) -> NumberMatcher:
        """See Matcher."""
        other = NumberMatcher(self.seed, self.tokens)
        other.queue = self.queue
        return other


class NumberGrammar:
    """A Grammar."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def matcher(self) -> NumberMatcher:
        """See Grammar."""
        return NumberMatcher(self.seed)

    def masks(self, matchers: Sequence[NumberMatcher]) -> list[bytes]:
        """See Grammar."""
        found = []
        for matcher in matchers:
            bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.bool_)
            bits[[matcher.queue[0]] if matcher.queue else sorted(matcher.allowed)] = True
            found.append(np.packbits(bits, bitorder="little").tobytes())
        return found
