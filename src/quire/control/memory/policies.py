"""What a layer type keeps: one small object a type (Jenga §5.2, "layer-specific caching rules").

`live` alone says which pages a computation needs. So what to allocate, what to drop and which prefixes can be reused
cannot disagree. Pages here are logical: page i holds tokens [i * page_tokens, (i + 1) * page_tokens).
"""

from __future__ import annotations

from typing import Protocol


class LayerPolicy(Protocol):
    """The rules of one group of layers."""

    page_tokens: int

    def live(self, start: int, end: int) -> range:
        """The logical pages needed to compute tokens [start, end), their own included."""
        ...

    def peak(self, length: int, chunk: int) -> int:
        """The most pages held at once by a sequence that grows to `length` in steps of up to `chunk` tokens."""
        ...


class FullPolicy:
    """Full attention: every token sees all before it."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens

    def live(self, start: int, end: int) -> range:
        return range(-(-end // self.page_tokens))

    def peak(self, length: int, chunk: int) -> int:
        return -(-length // self.page_tokens)


class WindowPolicy:
    """Sliding-window attention: the token at p sees positions > p - window."""

    def __init__(self, page_tokens: int, window: int) -> None:
        self.page_tokens, self.window = page_tokens, window

    def live(self, start: int, end: int) -> range:
        return range(max(0, start - self.window + 1) // self.page_tokens, -(-end // self.page_tokens))

    def peak(self, length: int, chunk: int) -> int:
        # Two steps of `chunk` may be held: one whose result is awaited and the next one.
        held = self.window + 2 * chunk
        return min(-(-length // self.page_tokens), -(-held // self.page_tokens) + 1)
