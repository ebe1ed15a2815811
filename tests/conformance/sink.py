"""A layer type that only tests have, to show what one takes: layers that attend to the first tokens of a sequence and
to nothing else ("attention sinks"). Their pages have a length of their own, which doesn't grow with the sequence's.

What the memory must know is one policy; what a data plane must know is one rule. Nothing else names the kind.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from bench.echo_pages import RULES, EchoPages, States
from quire.memory.policies import POLICIES, FullPolicy
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence

KEPT = 5
"""The tokens that are kept."""


class SinkPolicy(FullPolicy):
    """Pages of the first KEPT tokens; later ones read them and write nothing."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(self.group.num_pages(min(end, KEPT)))

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        return (
            range(self.group.num_full_pages(start), self.group.num_pages(min(end, KEPT))) if start < KEPT else range(0)
        )


class Sink:
    """What a token sees: the states of the first KEPT positions before it."""

    def expected_visible(
        self, group: KVCacheGroup, number: int, tokens: Seq[int], states: States, position: int, prompt: int
    ) -> bytes:
        return (states[: min(position, KEPT)] ^ number).tobytes()

    def read_visible(self, pages: EchoPages, slot: int, position: int) -> bytes:
        return (pages.read_states(slot, 0, min(position, KEPT)) ^ pages.group_index).tobytes()

    def write(self, pages: EchoPages, slot: int, position: int, token: int, state: int) -> None:
        if position < KEPT:
            pages.write_state(slot, position, state)


WITH_SINKS = {**POLICIES, "sink": SinkPolicy}
RULES["sink"] = Sink()
