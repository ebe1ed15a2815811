"""Layer types as Jenga's paper writes them, by the method names of its Figure 9a."""

from __future__ import annotations

from collections.abc import Sequence

from quire.jenga import Evictor, Request


class SelfAttention:
    def __init__(self) -> None:
        self.evictor = Evictor()

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(1, r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def set_prefix_length(self, r: Request) -> None:
        for i in range(1, r.len + 1):
            self.evictor.set_prefix_length(r.page[i], i)

    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        return {p for p in range(1, len(is_hit) + 1) if all(is_hit[:p])}


class SlidingWindow(SelfAttention):
    """Figure 9b, and what it leaves out: the beginning of a request has fewer tokens than a window."""

    def __init__(self, sliding: int) -> None:
        super().__init__()
        self.sliding = sliding

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(max(r.len - self.sliding + 1, 1), r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def get_possible_prefix(self, is_hit: Sequence[bool]) -> set[int]:
        return {p for p in range(1, len(is_hit) + 1) if all(is_hit[max(p - self.sliding, 0) : p])}
