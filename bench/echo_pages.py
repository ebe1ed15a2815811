"""The pages of an EchoRunner: one array of bytes, in which each kind of layer group stores its tokens' states by its
rule, and the same rules over a plain list of states, which are the oracle.

A token takes `token_bytes`, all of which repeat its state, so that a partial copy of a page is detected. If a page does
not hold whole tokens, the bytes of one continue in the next page.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt

from quire.protocol.kv_cache_config import KVCacheGroup

Bytes = npt.NDArray[np.uint8]
States = npt.NDArray[np.int64]
POISON = 0xFF
STATE_BYTES = 8  # of a state


def state_digest(data: bytes) -> int:
    """Return a state of 63 bits."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=STATE_BYTES).digest(), "little") >> 1


class EchoRule:
    """Defines what one kind of group stores of a sequence, and what a token at a position attends to. This one is for
    groups of image embeddings, which bench.echo_images reads and writes."""

    def expected_visible(
        self, group: KVCacheGroup, number: int, tokens: Seq[int], states: States, position: int, prompt: int
    ) -> bytes:
        """Return what the token at `position` attends to, given all tokens, of which `prompt` are the prompt, and the
        states of the positions before it."""
        return b""

    def read_visible(self, pages: EchoPages, slot: int, position: int) -> bytes:
        """Return the same, read from pages."""
        return b""

    def write(self, pages: EchoPages, slot: int, position: int, token: int, state: int) -> None:
        """Write to the pages what later positions need of this one."""

    def save(self, pages: EchoPages, slot: int, start: int, end: int) -> dict[int, Bytes]:
        """Return the content, by page, that writing the positions [start, end) would destroy though the tokens before
        them need it. Nothing, where each position has a place of its own."""
        return {}


class EchoPages:
    """The pages of group `group_index` in the buffer of all groups, through its tables [slots, pages of a sequence]."""

    def __init__(self, group: KVCacheGroup, number: int, buffer: Bytes, host: Bytes, slots: int) -> None:
        self.group, self.group_index = group, number
        self.table = np.zeros((slots, group.table_width), dtype=np.int64)
        size = group.page_bytes
        self.pages = buffer[: len(buffer) // size * size].reshape(-1, size)
        self.host_pages = host[: len(host) // size * size].reshape(-1, size)  # page `id` is row id - 1
        self.used_page_bytes = group.payload_bytes  # of tokens in a page
        self.rule = RULES[group.kind]
        self.prompt_lens: dict[int, int] = {}  # by slot

    def page_at(self, slot: int, logical: int) -> int:
        """Return the page of a logical page of a slot; assert that it is a real one."""
        page = int(self.table[slot, logical])
        assert page, f"slot {slot} uses its page {logical}, which is the scratch page"
        assert page in self.group.ids, f"slot {slot} uses page {page}, which is none of group {self.group_index}"
        return page

    def read_states(self, slot: int, first: int, last: int) -> States:
        """Return the states of tokens first .. last - 1 of a slot."""
        size, full = self.group.token_bytes, self.used_page_bytes
        begin, end = first * size // full, -(-last * size // full)
        page_ids = [self.page_at(slot, i) for i in range(begin, end)]
        cells = self.pages[page_ids, :full].reshape(-1)[first * size - begin * full : last * size - begin * full]
        cells = cells.reshape(last - first, size)
        assert (cells[:, STATE_BYTES:] == cells[:, : size - STATE_BYTES]).all(), f"a token of slot {slot} is torn"
        states: States = np.ascontiguousarray(cells[:, :STATE_BYTES]).view(np.int64).reshape(-1)
        return states ^ self.group_index

    def write_state(self, slot: int, position: int, state: int) -> None:
        """Write the state of the token at a position."""
        size, full = self.group.token_bytes, self.used_page_bytes
        cell = np.resize(np.frombuffer(struct.pack("<q", state ^ self.group_index), dtype=np.uint8), size)
        begin = position * size
        while len(cell):
            logical, offset = divmod(begin, full)
            count = min(full - offset, len(cell))
            self.pages[self.page_at(slot, logical), offset : offset + count] = cell[:count]
            cell, begin = cell[count:], begin + count


class AttentionRule(EchoRule):
    """Full, sliding-window and chunked attention: the states of all earlier positions, or of the visible ones."""

    def expected_visible(
        self, group: KVCacheGroup, number: int, tokens: Seq[int], states: States, position: int, prompt: int
    ) -> bytes:
        return (states[group.first_visible(position) : position] ^ number).tobytes()

    def read_visible(self, pages: EchoPages, slot: int, position: int) -> bytes:
        return (pages.read_states(slot, pages.group.first_visible(position), position) ^ pages.group_index).tobytes()

    def write(self, pages: EchoPages, slot: int, position: int, token: int, state: int) -> None:
        pages.write_state(slot, position, state)


class RecurrentStateRule(EchoRule):
    """A running state: a hash of all tokens so far, with their number, in the page of the latest one. The page that is
    read may differ from the one that is written. Advancing a state twice is detected."""

    def expected_visible(
        self, group: KVCacheGroup, number: int, tokens: Seq[int], states: States, position: int, prompt: int
    ) -> bytes:
        state = 0
        for i in range(position):
            state = self._advance(state, i, tokens[i])
        return struct.pack("<q", state)

    @staticmethod
    def _advance(state: int, position: int, token: int) -> int:
        return state_digest(struct.pack("<qqq", state, position, token))

    @staticmethod
    def _read_state(pages: EchoPages, slot: int, position: int) -> int:
        """Read the state after the tokens before `position`."""
        if position == 0:
            return 0
        page = pages.page_at(slot, (position - 1) // pages.group.run_tokens)
        count, state = struct.unpack("<qq", pages.pages[page, : 2 * STATE_BYTES].tobytes())
        assert count == position, f"slot {slot} needs the state of {position} tokens, its page has that of {count}"
        return int(state)

    def read_visible(self, pages: EchoPages, slot: int, position: int) -> bytes:
        return struct.pack("<q", self._read_state(pages, slot, position))

    def write(self, pages: EchoPages, slot: int, position: int, token: int, state: int) -> None:
        after = self._advance(self._read_state(pages, slot, position), position, token)
        page = pages.page_at(slot, position // pages.group.run_tokens)
        pages.pages[page] = np.resize(
            np.frombuffer(struct.pack("<qq", position + 1, after), np.uint8), pages.used_page_bytes
        )

    def save(self, pages: EchoPages, slot: int, start: int, end: int) -> dict[int, Bytes]:
        run = pages.group.run_tokens
        logical = range(max(start - 1, 0) // run, (end - 1) // run + 1) if end > start else ()
        page_ids = [pages.page_at(slot, i) for i in logical]
        return {page: pages.pages[page].copy() for page in page_ids}


class BudgetRule(EchoRule):
    """Pruned attention: of a complete prompt, the smallest states, at the first positions, followed by those of later
    tokens."""

    @staticmethod
    def _select(group: KVCacheGroup, states: States) -> States:
        assert group.budget is not None, "a group with this rule has a budget"
        selected: States = states[np.sort(np.argsort(states, kind="stable")[: group.budget])]
        return selected

    @staticmethod
    def _index_of(pages: EchoPages, slot: int, position: int) -> int:
        prompt, budget = pages.prompt_lens[slot], pages.group.budget
        assert budget is not None, "a group with this rule has a budget"
        return position if position < prompt else position - max(prompt - budget, 0)

    def expected_visible(
        self, group: KVCacheGroup, number: int, tokens: Seq[int], states: States, position: int, prompt: int
    ) -> bytes:
        visible = states[:position]
        if position >= prompt:
            visible = np.concatenate((self._select(group, states[:prompt]), states[prompt:position]))
        return (visible ^ number).tobytes()

    def read_visible(self, pages: EchoPages, slot: int, position: int) -> bytes:
        return (pages.read_states(slot, 0, self._index_of(pages, slot, position)) ^ pages.group_index).tobytes()

    def write(self, pages: EchoPages, slot: int, position: int, token: int, state: int) -> None:
        pages.write_state(slot, self._index_of(pages, slot, position), state)
        if position == pages.prompt_lens[slot] - 1:
            selected = self._select(pages.group, pages.read_states(slot, 0, position + 1))
            for index, selected_state in enumerate(selected.tolist()):
                pages.write_state(slot, index, selected_state)


RULES: dict[str, EchoRule] = {
    "full": AttentionRule(), "uniform": AttentionRule(), "window": AttentionRule(), "chunked": AttentionRule(),
    "budget": BudgetRule(), "state": RecurrentStateRule(), "cross": EchoRule(), "vision": EchoRule(),
}  # fmt: skip
"""The rules by kind of group."""
