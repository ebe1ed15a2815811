"""Stop strings, found in text that arrives in pieces and never leaked.

An Aho-Corasick automaton (Aho and Corasick, CACM 1975): one transition a character, however many stops there are. It is
built once for a request's parameters; its branches share it and keep only where they are in it.
"""

from __future__ import annotations

from collections import deque

from quire.errors import InputError


class StopAutomaton:
    """The trie of `stops` and its failure links; nothing changes once it is built. Node 0 is the empty text."""

    __slots__ = ("_fail", "_next", "depth", "first_chars", "match", "stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        if not all(stops):
            raise InputError("a stop string must not be empty", "stop")
        self.stops = stops
        self.first_chars = frozenset(stop[0] for stop in stops)
        self.match: list[str | None] = [None]  # the longest stop that the text of a node ends with
        self.depth = [0]  # its length
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
        """Failure links, breadth first: the longest proper suffix of a node that is a node too."""
        queue = deque(self._next[0].values())
        while queue:
            node = queue.popleft()
            for character, child in self._next[node].items():
                self._fail[child] = self.step(self._fail[node], character)
                queue.append(child)
            if self.match[node] is None:
                self.match[node] = self.match[self._fail[node]]

    def step(self, node: int, character: str) -> int:
        """The node of the longest suffix of `node`'s text and `character` that begins some stop."""
        while node and character not in self._next[node]:
            node = self._fail[node]
        return self._next[node].get(character, 0)


class StopChecker:
    """Watches one output for an automaton's stops. The match that completes first counts, and of those that complete
    together the longest: so the result doesn't depend on how the text was cut. `include_stop` leaves the stop in the
    text.
    """

    __slots__ = ("_automaton", "_found_stop", "_held", "_include_stop", "_state")

    def __init__(self, automaton: StopAutomaton, include_stop: bool = False) -> None:
        self._automaton, self._include_stop = automaton, include_stop
        self._held = ""  # a suffix of the text that begins some stop: never longer than the longest stop
        self._found_stop: str | None = None
        self._state = 0  # the node that spells `held`

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string once one is found; what comes after it is dropped. Unless
        it `may_end`, no stop ends in `text`; but one that begins there may end in what follows."""
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
        """The text held back, when the output ends without a stop string."""
        held, self._held, self._state = self._held, "", 0
        return held
