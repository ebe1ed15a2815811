"""Stop strings, found in text that arrives in pieces and never leaked.

An Aho-Corasick automaton (Aho and Corasick, CACM 1975): one transition a character, however many stops there are.
"""

from __future__ import annotations

from collections import deque

from quire.errors import InputError


class StopStrings:
    """Watches one output for `stops`. The match that completes first counts, and of those that complete together the
    longest: so the result doesn't depend on how the text was cut. `include` leaves the stop string in the text."""

    __slots__ = ("_depth", "_fail", "_firsts", "_found", "_held", "_include", "_match", "_next", "_state")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        if not all(stops):
            raise InputError("a stop string must not be empty", "stop")
        self._include = include
        self._held = ""  # a suffix of the text that begins some stop: never longer than the longest stop - 1
        self._found: str | None = None
        self._state = 0  # the node that spells `held`
        self._firsts = frozenset(stop[0] for stop in stops)
        self._next: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]
        self._depth = [0]
        self._fail = [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def _insert(self, stop: str) -> None:
        node = 0
        for character in stop:
            if character not in self._next[node]:
                self._next[node][character] = len(self._next)
                self._next.append({})
                self._match.append(None)
                self._depth.append(self._depth[node] + 1)
                self._fail.append(0)
            node = self._next[node][character]
        self._match[node] = stop

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper suffix of a node that is a node too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self._step(self._fail[node], character)
                queue.append(child)
            if self._match[node] is None:
                self._match[node] = self._match[self._fail[node]]

    def _step(self, node: int, character: str) -> int:
        while node and character not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(character, 0)

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string once one is found; what comes after it is dropped."""
        if self._found is not None:
            return "", self._found
        if not self._state and self._firsts.isdisjoint(text):
            return text, None
        whole, state = self._held + text, self._state
        for end, character in enumerate(text, len(self._held) + 1):
            state = self._step(state, character)
            stop = self._match[state]
            if stop is not None:
                self._found, self._held = stop, ""
                return whole[: end if self._include else end - len(stop)], stop
        shown = len(whole) - self._depth[state]
        self._state, self._held = state, whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """The text held back, when the output ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
