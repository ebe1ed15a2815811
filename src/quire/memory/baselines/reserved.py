"""Reserved memory: the systems before paging (PagedAttention §3.1, §6.1). Each sequence gets one contiguous run of
pages, for all that it may become, when it is admitted, and keeps it until its end.

Four rules say how much is reserved: Orca's three (placed by a buddy allocator) and FasterTransformer's equal slots. A
run is a page table that counts upwards, so every paged kernel computes over it. Nothing is shared: a fork copies, as
those systems did. Nothing is short once a sequence was admitted, so nobody is ever preempted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from quire.config import EngineConfig
from quire.memory.answers import Account, Admission, Deferred, Placement, Sharing, Usage
from quire.memory.baselines.buddy import BuddyAllocator, block_units
from quire.memory.page_layout import MemorySize, build_kv_config
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, PageOp, PageOps, Poison, TableWrite

ReservationRule = Callable[[int, int, int], int]
"""(prompt, output, longest) -> tokens to reserve: lengths in tokens, the output's true one, the model's longest."""


def _oracle(prompt: int, output: int, max_len: int) -> int:
    """Orca (Oracle): the output's length is known."""
    return prompt + output


def _pow2(prompt: int, output: int, max_len: int) -> int:
    """Orca (Pow2): the output's length is overestimated by less than twice; 32 for 25."""
    return min(prompt + (block_units(output) if output else 0), max_len)


def _max(prompt: int, output: int, max_len: int) -> int:
    """Orca (Max) and FasterTransformer: as much as any sequence may need."""
    return max_len


RESERVATION_RULES: dict[str, ReservationRule] = {
    "orca-oracle": _oracle,
    "orca-pow2": _pow2,
    "orca-max": _max,
    "ft": _max,
}
STATIC_BATCH_MEMORIES = ("ft",)


class EqualSlots:
    """Blocks of one size, as many as a pool of `total` units holds: the buffers of a static batch. As Buddy."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.available = total
        self.free_bases = [i * size for i in reversed(range(total // size))]
        self.allocated: dict[int, int] = {}  # base -> size

    def can_hold(self, block_sizes: Iterable[int]) -> bool:
        """Are there slots for all of these at once?"""
        sizes = list(block_sizes)
        return len(sizes) <= self.total // self.size and max(sizes, default=0) <= self.size

    def count_allocatable(self, units: int) -> int:
        """Free slots."""
        return len(self.free_bases)

    def count_unusable(self, units: int) -> int:
        """Units behind the last slot."""
        return self.total % self.size

    def allocate(self, units: int) -> int | None:
        """The base of a free slot."""
        if not self.free_bases:
            return None
        base = self.free_bases.pop()
        self.allocated[base] = self.size
        self.available -= self.size
        return base

    def free(self, base: int) -> None:
        """Take a slot back."""
        self.available += self.allocated.pop(base)
        self.free_bases.append(base)

    def check(self) -> None:
        """Assert that each slot is free or taken."""
        assert sorted([*self.free_bases, *self.allocated]) == [i * self.size for i in range(self.total // self.size)]
        assert self.available == self.total - len(self.allocated) * self.size, "the count of free units is wrong"


class RequestReservation:
    """What a request reserved for its branches: as many blocks of one size as it has at once at most. All of them stay
    until its last branch ends, since others may fork again."""

    __slots__ = ("live_branches", "max_total_len", "pending_branches", "reserved_tokens", "spare_bases", "units")

    def __init__(self, units: int, reserved_tokens: int, max_total_len: int, spare_bases: list[int]) -> None:
        self.units = units  # logical pages of each run
        self.reserved_tokens = reserved_tokens  # tokens that a run has been reserved for
        self.max_total_len = max_total_len  # tokens that each sequence will have, at most, as far as it was told
        self.spare_bases = spare_bases  # blocks that no branch has now
        self.pending_branches = len(spare_bases)  # branches that were announced and are not there yet
        self.live_branches = 0


class Reservation:
    """A sequence in memory: its slot and its run."""

    __slots__ = ("base", "request_reservation", "requested_tokens", "slot")

    def __init__(self, slot: int, base: int, request_reservation: RequestReservation) -> None:
        self.slot, self.base, self.request_reservation = slot, base, request_reservation
        self.requested_tokens = 0  # tokens that are or will be written, as far as asked for


class ReservedMemory:
    """See KVMemory. `rule` is a value of RULES; `max_len` the most tokens of a sequence. With `static`, equal slots are
    given out, not blocks of the buddy allocator. A unit is one page of each group; a run of n units at base b is, for
    group g, the pages from 1 + b * groups + g * n on.

    What is reserved depends on the length that a sequence says it will have at most (§6.1: Orca (Oracle) "has the
    knowledge of the lengths of the outputs"). Prefixes are not shared, and nothing is swapped."""

    prefix_cache = None

    def __init__(
        self,
        kv_config: KVCacheConfig,
        rule: ReservationRule,
        *,
        max_len: int,
        static: bool = False,
        debug: bool = False,
    ) -> None:
        self.kv_config, self.rule, self.max_len, self.static, self.debug = kv_config, rule, max_len, static, debug
        group = kv_config.groups[0]
        assert all(other.ids == group.ids for other in kv_config.groups), "runs are of pages that any group may have"
        self.page_tokens, self.page_bytes = group.page_tokens, group.page_bytes
        self.num_groups = len(kv_config.groups)
        units = len(group.ids) // self.num_groups
        self.allocator: BuddyAllocator | EqualSlots = (
            EqualSlots(units, -(-max_len // self.page_tokens)) if static else BuddyAllocator(units)
        )
        self.free_slots = list(range(kv_config.slots - 1, 0, -1))
        self.seq_pages: dict[int, Reservation] = {}
        self.page_ops: list[PageOp] = []
        self.releases = 0  # times that a run or a slot came back
        self.last_refused = (-1, -1, 0)  # the last admission that failed for shortage: (sequence, releases, units)
        self.batch_units = 0  # units that the batch under way has taken
        self.copies = 0  # pages copied by forks

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: MemorySize) -> ReservedMemory:
        """A memory of `size` by the rule that `config.memory` names, in pages as PagedMemory has them."""
        geometry = build_kv_config(replace(config, swap_gib=0), spec, size, KVCacheLayout.PAGED)
        static = config.memory in STATIC_BATCH_MEMORIES
        return cls(geometry, RESERVATION_RULES[config.memory], max_len=size.max_len, static=static, debug=config.debug)

    # Admission

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        """As in KVMemory; `shared_prefix_len` is taken as the length of the prompts. Without it, the prompt is the "
        "worst one."""
        assert not images, "pictures have no place in this memory"
        if len(lengths) >= self.kv_config.slots or max(lengths, default=0) > self.max_len:
            return False
        return self.allocator.can_hold(
            -(-self._max_reservation(length, shared_prefix_len) // self.page_tokens) for length in lengths
        )

    def _max_reservation(self, length: int, prompt: int) -> int:
        """Tokens to reserve for a sequence that will have `length`, whose prompt is `prompt` or, if that is 0, any."""
        if prompt:
            return self.rule(min(prompt, length), max(length - prompt, 0), self.max_len)
        # Rules exceed an output the most just above a power of two.
        outputs = [0, *(over for k in range(length.bit_length()) if (over := 2**k + 1) <= length)]
        return max(self.rule(length - output, output, self.max_len) for output in outputs)

    def admit(self, seqs: Seq[Sequence], budget: int) -> list[Admission] | Deferred | None:
        first = seqs[0]
        assert not any(seq.id in self.seq_pages for seq in seqs), f"sequence {first.id} is admitted twice"
        if len(self.free_slots) < len(seqs) or self.last_refused[:2] == (first.id, self.releases):
            return None
        final = first.max_total_len or self.max_len  # branches have one prompt, and one length
        reserve = self.rule(first.prompt_len, final - first.prompt_len, self.max_len)
        units = -(-reserve // self.page_tokens)
        assert max(len(seq.tokens) for seq in seqs) <= reserve <= self.max_len, f"{reserve} tokens are reserved"
        if self.allocator.count_allocatable(units) < sum(1 + seq.num_forks for seq in seqs):
            self.last_refused = (first.id, self.releases, units)
            return None
        for seq in seqs:
            base, *spares = (self._allocate(units) for _ in range(1 + seq.num_forks))
            self._attach(seq, RequestReservation(units, reserve, final, spares), base)
        return [Admission(0)] * len(seqs)

    def _allocate(self, units: int) -> int:
        base = self.allocator.allocate(units)
        assert base is not None, "a run counted for an admission was not there"
        return base

    def _attach(self, seq: Sequence, request_reservation: RequestReservation, base: int) -> None:
        """Give a slot, and a table of the whole run, once for all."""
        resident = Reservation(self.free_slots.pop(), base, request_reservation)
        request_reservation.live_branches += 1
        self.seq_pages[seq.id] = resident
        for g in range(self.num_groups):
            pages = tuple(self._pages(resident, g))
            if self.debug:
                self.page_ops += [Poison(g, page) for page in pages]
            self.page_ops.append(TableWrite(resident.slot, g, 0, pages))
        self.batch_units = max(self.batch_units, self.allocator.total - self.allocator.available)

    def _pages(self, reservation: Reservation, group: int) -> range:
        first = 1 + reservation.base * self.num_groups + group * reservation.request_reservation.units
        return range(first, first + reservation.request_reservation.units)

    # Life

    def grow(self, seq: Sequence, length: int) -> bool:
        resident = self.seq_pages[seq.id]
        if length > resident.request_reservation.reserved_tokens:
            return False
        resident.requested_tokens = max(resident.requested_tokens, length)
        return True

    def commit(self, seq: Sequence) -> None:
        pass  # nothing is published, and nothing is dropped before the end

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """The child gets a run that was set aside for it, and a copy of every computed page (§4.4: what sharing
        saves)."""
        assert parent.not_in_flight, f"sequence {parent.id} is forked while in flight"
        source = self.seq_pages[parent.id]
        family = source.request_reservation
        base = None
        if self.free_slots:
            base = family.spare_bases.pop() if family.spare_bases else self.allocator.allocate(family.units)
        if base is None:
            return False
        family.pending_branches = max(family.pending_branches - 1, 0)
        self._attach(child, family, base)
        copy = self.seq_pages[child.id]
        copy.requested_tokens = parent.computed
        count = -(-parent.computed // self.page_tokens)
        for g in range(self.num_groups):
            pairs = zip(self._pages(source, g)[:count], self._pages(copy, g))
            self.page_ops += [PageCopy(g, old, new) for old, new in pairs]
        self.copies += count * self.num_groups
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.not_in_flight, f"sequence {seq.id} is freed while in flight"
        resident = self.seq_pages.pop(seq.id)
        family = resident.request_reservation
        family.spare_bases.append(resident.base)
        family.live_branches -= 1
        if not family.live_branches:
            for base in family.spare_bases:
                self.allocator.free(base)
        self.free_slots.append(resident.slot)
        self.releases += 1
        if not self.seq_pages:
            self.batch_units = 0

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        return False  # there is no host memory

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        return False

    # Facts

    def slot(self, seq: Sequence) -> int:
        return self.seq_pages[seq.id].slot

    def count_held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        runs = [self.seq_pages[seq.id] for seq in seqs]
        pages = sum(resident.request_reservation.units for resident in runs) * self.num_groups
        return pages * self.page_bytes, sum(resident.requested_tokens for resident in runs)

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        return length, 0  # it has no pictures

    def undo_encoding(self) -> None:
        pass

    def discard_contents(self) -> None:
        assert not self.seq_pages, "sequences have pages"
        self.take_page_ops()

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        journal, self.page_ops = tuple(self.page_ops), []
        return journal, ()

    def get_placement(self, seq: Sequence) -> Placement:
        resident = self.seq_pages[seq.id]
        return Placement(resident.slot, tuple(tuple(self._pages(resident, g)) for g in range(self.num_groups)))

    def account(self) -> Account:
        runs = sum(resident.request_reservation.units for resident in self.seq_pages.values())
        return Account(self._usage(), Sharing(runs * self.num_groups * self.page_bytes, 0, self.copies))

    def _usage(self) -> Usage:
        """Figures 2 and 3. `reserved`: slots of tokens to come, as far as lengths were told. `internal`: the rest of
        what a rule reserved, and the runs of branches and of a static batch's members that ended. `external`: what the
        allocator rounds up to, and free pages too few in a row for the sequence that was refused last."""
        taken = self.allocator.total - self.allocator.available
        used = sum(resident.requested_tokens for resident in self.seq_pages.values())
        reserved = sum(
            max(resident.request_reservation.max_total_len - resident.requested_tokens, 0)
            for resident in self.seq_pages.values()
        )
        runs = 0
        for family in self._request_reservations():
            runs += family.units * (family.live_branches + len(family.spare_bases))
            reserved += family.pending_branches * family.max_total_len
        ended = self.batch_units - taken if self.static else 0
        unusable = 0
        if self.static:
            unusable = self.allocator.count_unusable(0)
        elif self.last_refused[1] == self.releases:
            unusable = self.allocator.count_unusable(self.last_refused[2])
        unit_bytes = self.num_groups * self.page_bytes
        token_bytes = sum(group.token_bytes for group in self.kv_config.groups)
        return Usage(
            used * token_bytes,
            0,
            reserved * token_bytes,
            (runs + ended) * unit_bytes - (used + reserved) * token_bytes,
            (taken - runs + unusable) * unit_bytes,
            (self.allocator.available - ended - unusable) * unit_bytes,
        )

    def _request_reservations(self) -> set[RequestReservation]:
        return {resident.request_reservation for resident in self.seq_pages.values()}

    def check(self) -> None:
        self.allocator.check()
        blocks, families = self.allocator.allocated, self._request_reservations()
        bases = [resident.base for resident in self.seq_pages.values()]
        bases += [base for family in families for base in family.spare_bases]
        assert sorted(bases) == sorted(blocks), "a block is lost, or has two owners"
        for resident in self.seq_pages.values():
            family = resident.request_reservation
            assert family.units <= blocks[resident.base], "a run is longer than its block"
            assert resident.requested_tokens <= family.reserved_tokens <= family.units * self.page_tokens, (
                "a run is shorter than needed"
            )
        for family in families:
            members = sum(resident.request_reservation is family for resident in self.seq_pages.values())
            assert members == family.live_branches, "a family has lost a member"
            assert family.pending_branches <= len(family.spare_bases), "a branch to come has no run"
        held = {resident.slot for resident in self.seq_pages.values()}
        assert len(held) == len(self.seq_pages), "a slot is used twice"
        assert not held & set(self.free_slots), "a slot is free and used"
        assert held | set(self.free_slots) == set(range(1, self.kv_config.slots)), "a slot is lost"
