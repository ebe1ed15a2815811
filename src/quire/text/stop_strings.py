"""Detection of stop strings in text that arrives in pieces. No part of a stop string is ever emitted.

An Aho-Corasick automaton (Aho and Corasick, CACM 1975): one transition per character, independent of the number of stop
strings. It is built once per request; its branches share it and keep only their own state.
"""

from __future__ import annotations

from collections import deque

from quire.errors import InputError


class StopAutomaton:
    """The trie of `stops` with its failure links, immutable once built. Node 0 is the empty text."""

    __slots__ = ("_fail", "_next", "depth", "first_chars", "match", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise InputError("a stop string must not be empty", "stop")
        self.stops = stops
        self.first_chars = frozenset(stop[0] for stop in stops)
        self.match: list[str | None] = [None]  # by node: the longest stop that its text ends with
        self.depth = [0]  # by node: the length of its text
        self._next: list[dict[str, int]] = [{}]
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
                self.match.append(None)
                self.depth.append(self.depth[node] + 1)
                self._fail.append(0)
            node = self._next[node][character]
        self.match[node] = stop

    def _link(self) -> None:
        """Set the failure links, breadth first: each node's longest proper suffix that is also a node."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], character)
                queue.append(child)
            if self.match[node] is None:
                self.match[node] = self.match[self._fail[node]]

    def step(self, node: int, character: str) -> int:
        """Return the node of the longest suffix of `node`'s text plus `character` that is a prefix of a stop."""
        while node and character not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(character, 0)


class StopChecker:
    """Searches one output for the stops of an automaton. The match that completes first wins, and of several that
    complete together the longest, so the result does not depend on how the text was split. With `include_stop` the stop
    stays in the text.
    """

    __slots__ = ("_automaton", "_found_stop", "_held", "_include_stop", "_state")

    def __init__(self, automaton: StopAutomaton, include_stop: bool = False) -> None:
        self._automaton, self._include_stop = automaton, include_stop
        self._held = ""  # the suffix of the text that is a prefix of a stop
        self._found_stop: str | None = None
        self._state = 0  # the node of `_held`

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """Return the text that can be emitted now, and the stop string if one was found; text after it is dropped.
        Unless it `may_end`, no stop ends within `text`, but one that begins there may end in later text."""
        if self._found_stop is not None:
            return "", self._found_stop
        automaton, state = self._automaton, self._state
        if not state and automaton.first_chars.isdisjoint(text):
            return text, None
        whole = self._held + text
        for end, character in enumerate(text, len(self._held) + 1):
            state = automaton.step(state, character)
            stop = automaton.match[state] if may_end else None
            if stop is not None:
                self._found_stop, self._held = stop, ""
                return whole[: end if self._include_stop else end - len(stop)], stop
        shown = len(whole) - automaton.depth[state]
        self._state, self._held = state, whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """Return the text held back, at the end of an output without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
