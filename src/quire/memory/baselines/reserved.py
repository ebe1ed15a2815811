"""Reserved memory: the systems before paging (PagedAttention §3.1, §6.1).

At its admission each sequence gets one contiguous run of pages, enough for all of its tokens, and holds it to its end.
A rule computes the size: one of Orca's three (placed by a buddy allocator), or FasterTransformer's equal slots. A run
is a page table with consecutive ids, so every paged kernel computes over it. Nothing is shared: a fork copies, as in
those systems. No sequence is ever preempted, since an admitted one needs no more memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace

from quire.config import EngineConfig
from quire.memory.answers import Account, Admission, Deferred, EvictionLimit, Placement, Sharing, Usage
from quire.memory.baselines.buddy import BuddyAllocator, block_units
from quire.memory.page_layout import MemorySize, build_kv_config
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheLayout
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, PageOp, PageOps, Poison, TableWrite

ReservationRule = Callable[[int, int, int], int]
"""(prompt length, true output length, maximum length of the model) -> tokens to reserve."""


def _oracle(prompt: int, output: int, max_len: int) -> int:
    """Orca (Oracle): the output length is known."""
    return prompt + output


def _pow2(prompt: int, output: int, max_len: int) -> int:
    """Orca (Pow2): the output length is rounded up to a power of two: 32 for 25."""
    return min(prompt + (block_units(output) if output else 0), max_len)


def _max(prompt: int, output: int, max_len: int) -> int:
    """Orca (Max) and FasterTransformer: the maximum length."""
    return max_len


RESERVATION_RULES: dict[str, ReservationRule] = {
    "orca-oracle": _oracle,
    "orca-pow2": _pow2,
    "orca-max": _max,
    "ft": _max,
}
STATIC_BATCH_MEMORIES = ("ft",)


class EqualSlots:
    """Equal blocks in `total` units: the buffers of a static batch. The interface is that of BuddyAllocator."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.available = total
        self.free_bases = [i * size for i in reversed(range(total // size))]
        self.allocated: dict[int, int] = {}  # base -> size

    def can_hold(self, block_sizes: Iterable[int]) -> bool:
        """Return True if there are slots for all of these at once."""
        sizes = list(block_sizes)
        return len(sizes) <= self.total // self.size and max(sizes, default=0) <= self.size

    def count_allocatable(self, units: int) -> int:
        """Return the number of free slots."""
        return len(self.free_bases)

    def count_unusable(self, units: int) -> int:
        """Return the units after the last slot."""
        return self.total % self.size

    def allocate(self, units: int) -> int | None:
        """Return the base of a free slot, or None."""
        if not self.free_bases:
            return None
        base = self.free_bases.pop()
        self.allocated[base] = self.size
        self.available -= self.size
        return base

    def free(self, base: int) -> None:
        """Release a slot."""
        self.available += self.allocated.pop(base)
        self.free_bases.append(base)

    def check(self) -> None:
        """Assert that each slot is either free or allocated."""
        assert sorted([*self.free_bases, *self.allocated]) == [i * self.size for i in range(self.total // self.size)]
        assert self.available == self.total - len(self.allocated) * self.size, "the count of free units is wrong"


class RequestReservation:
    """The reservation of a request for its branches: as many blocks of one size as it has branches at once at most. All
    of them stay until its last branch ends, since others may fork again."""

    __slots__ = ("live_branches", "max_total_len", "pending_branches", "reserved_tokens", "spare_bases", "units")

    def __init__(self, units: int, reserved_tokens: int, max_total_len: int, spare_bases: list[int]) -> None:
        self.units = units  # logical pages of each run
        self.reserved_tokens = reserved_tokens  # tokens for which a run is reserved
        self.max_total_len = max_total_len  # the most tokens of each sequence, as given at the admission
        self.spare_bases = spare_bases  # blocks that no branch uses now
        self.pending_branches = len(spare_bases)  # branches that were announced and not forked yet
        self.live_branches = 0


class Reservation:
    """The slot and the run of a sequence in memory."""

    __slots__ = ("base", "request_reservation", "requested_tokens", "slot")

    def __init__(self, slot: int, base: int, request_reservation: RequestReservation) -> None:
        self.slot, self.base, self.request_reservation = slot, base, request_reservation
        self.requested_tokens = 0  # tokens that are or will be written: the largest length passed to `grow`


class ReservedMemory:
    """Implement KVMemory with a contiguous reservation for each sequence.

    `rule` is a value of RESERVATION_RULES, and `max_len` the most tokens of a sequence. With `static` equal slots are
    allocated, not blocks of the buddy allocator. A unit is one page of each group; a run of n units at base b has, for
    group g, the n pages from 1 + b * groups + g * n on.

    The reservation depends on the maximum length that a sequence gives (§6.1: Orca (Oracle) "has the knowledge of the
    lengths of the outputs"). Prefixes are not shared, and nothing is swapped."""

    prefix_cache = prefix_demand = None

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
        assert all(other.ids == group.ids for other in kv_config.groups), "all groups must have the same pages"
        self.page_tokens, self.page_bytes = group.page_tokens, group.page_bytes
        self.num_groups = len(kv_config.groups)
        units = len(group.ids) // self.num_groups
        self.allocator: BuddyAllocator | EqualSlots = (
            EqualSlots(units, -(-max_len // self.page_tokens)) if static else BuddyAllocator(units)
        )
        self.free_slots = list(range(kv_config.slots - 1, 0, -1))
        self.seq_pages: dict[int, Reservation] = {}
        self.page_ops: list[PageOp] = []
        self.releases = 0  # times that a run or a slot was released
        self.last_refused = (-1, -1, 0)  # the last admission that failed for lack of room: (sequence, releases, units)
        self.batch_units = 0  # units that the current batch has allocated at most
        self.copies = 0  # pages copied by forks

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: MemorySize) -> ReservedMemory:
        """Make a memory of `size` with the rule that `config.memory` names, and the pages of PagedMemory."""
        kv_config = build_kv_config(replace(config, swap_gib=0), spec, size, KVCacheLayout.PAGED)
        static = config.memory in STATIC_BATCH_MEMORIES
        return cls(kv_config, RESERVATION_RULES[config.memory], max_len=size.max_len, static=static, debug=config.debug)

    # Admission

    def fits(self, lengths: Seq[int], shared_prefix_len: int = 0, images: Seq[ImageItem] = ()) -> bool:
        """As KVMemory.fits; `shared_prefix_len` is taken as the length of the prompts. 0: the worst prompt length."""
        assert not images, "reserved memory holds no images"
        if len(lengths) >= self.kv_config.slots or max(lengths, default=0) > self.max_len:
            return False
        return self.allocator.can_hold(
            -(-self._max_reservation(length, shared_prefix_len) // self.page_tokens) for length in lengths
        )

    def _max_reservation(self, length: int, prompt: int) -> int:
        """Return the tokens to reserve for a sequence of `length` tokens with a prompt of `prompt`; 0: of any."""
        if prompt:
            return self.rule(min(prompt, length), max(length - prompt, 0), self.max_len)
        # Rules exceed the output length the most just above a power of two.
        outputs = [0, *(over for k in range(length.bit_length()) if (over := 2**k + 1) <= length)]
        return max(self.rule(length - output, output, self.max_len) for output in outputs)

    def admit(
        self, seqs: Seq[Sequence], budget: int, limit: EvictionLimit | None = None
    ) -> list[Admission] | Deferred | None:
        first = seqs[0]
        assert not any(seq.id in self.seq_pages for seq in seqs), f"sequence {first.id} is admitted twice"
        if len(self.free_slots) < len(seqs) or self.last_refused[:2] == (first.id, self.releases):
            return None
        final = first.max_total_len or self.max_len  # branches have the same prompt and length
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
        assert base is not None, "a run that was counted for an admission is missing"
        return base

    def _attach(self, seq: Sequence, request_reservation: RequestReservation, base: int) -> None:
        """Give a sequence its slot, and a table of its whole run, which does not change any more."""
        reservation = Reservation(self.free_slots.pop(), base, request_reservation)
        request_reservation.live_branches += 1
        self.seq_pages[seq.id] = reservation
        for g in range(self.num_groups):
            pages = tuple(self._pages(reservation, g))
            if self.debug:
                self.page_ops += [Poison(g, page) for page in pages]
            self.page_ops.append(TableWrite(reservation.slot, g, 0, pages))
        self.batch_units = max(self.batch_units, self.allocator.total - self.allocator.available)

    def _pages(self, reservation: Reservation, group: int) -> range:
        first = 1 + reservation.base * self.num_groups + group * reservation.request_reservation.units
        return range(first, first + reservation.request_reservation.units)

    # Changes after admission

    def grow(self, seq: Sequence, length: int) -> bool:
        reservation = self.seq_pages[seq.id]
        if length > reservation.request_reservation.reserved_tokens:
            return False
        reservation.requested_tokens = max(reservation.requested_tokens, length)
        return True

    def commit(self, seq: Sequence) -> None:
        """Do nothing: nothing is published, and nothing is dropped before the end."""

    def commit_drafts(self, seq: Sequence) -> None:
        reservation = self.seq_pages[seq.id]
        reservation.requested_tokens = min(reservation.requested_tokens, seq.planned)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give the child a run that was set aside for it, and a copy of every computed page (§4.4)."""
        assert parent.not_in_flight, f"sequence {parent.id} is forked while in flight"
        source = self.seq_pages[parent.id]
        request = source.request_reservation
        base = None
        if self.free_slots:
            base = request.spare_bases.pop() if request.spare_bases else self.allocator.allocate(request.units)
        if base is None:
            return False
        request.pending_branches = max(request.pending_branches - 1, 0)
        self._attach(child, request, base)
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
        reservation = self.seq_pages.pop(seq.id)
        request = reservation.request_reservation
        request.spare_bases.append(reservation.base)
        request.live_branches -= 1
        if not request.live_branches:
            for base in request.spare_bases:
                self.allocator.free(base)
        self.free_slots.append(reservation.slot)
        self.releases += 1
        if not self.seq_pages:
            self.batch_units = 0

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        return False  # there is no host memory

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        return False

    # Page operations and accounting

    def slot(self, seq: Sequence) -> int:
        return self.seq_pages[seq.id].slot

    def count_held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        runs = [self.seq_pages[seq.id] for seq in seqs]
        pages = sum(reservation.request_reservation.units for reservation in runs) * self.num_groups
        return pages * self.page_bytes, sum(reservation.requested_tokens for reservation in runs)

    def plan_encoding(self, seq: Sequence, length: int, max_parts: int) -> tuple[int, int]:
        return length, 0  # it has no images

    def undo_encoding(self) -> None:
        pass

    def discard_contents(self) -> None:
        assert not self.seq_pages, "sequences have pages"
        self.take_page_ops()

    def take_page_ops(self) -> tuple[PageOps, PageOps]:
        page_ops, self.page_ops = tuple(self.page_ops), []
        return page_ops, ()

    def get_placement(self, seq: Sequence) -> Placement:
        reservation = self.seq_pages[seq.id]
        return Placement(reservation.slot, tuple(tuple(self._pages(reservation, g)) for g in range(self.num_groups)))

    def account(self) -> Account:
        runs = sum(reservation.request_reservation.units for reservation in self.seq_pages.values())
        return Account(self._usage(), Sharing(runs * self.num_groups * self.page_bytes, 0, self.copies))

    def _usage(self) -> Usage:
        """Return the bytes by category (Figures 2 and 3).

        `reserved`: token slots to come, by the given lengths. `internal`: the rest of what a rule reserved, and the
        runs of ended branches and of ended members of a static batch. `external`: what the allocator rounds up, and
        free pages that are not contiguous enough for the sequence that was refused last."""
        taken = self.allocator.total - self.allocator.available
        used = sum(reservation.requested_tokens for reservation in self.seq_pages.values())
        reserved = sum(
            max(reservation.request_reservation.max_total_len - reservation.requested_tokens, 0)
            for reservation in self.seq_pages.values()
        )
        runs = 0
        for request in self._request_reservations():
            runs += request.units * (request.live_branches + len(request.spare_bases))
            reserved += request.pending_branches * request.max_total_len
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
        return {reservation.request_reservation for reservation in self.seq_pages.values()}

    def check(self) -> None:
        self.allocator.check()
        blocks, requests = self.allocator.allocated, self._request_reservations()
        bases = [reservation.base for reservation in self.seq_pages.values()]
        bases += [base for request in requests for base in request.spare_bases]
        assert sorted(bases) == sorted(blocks), "a block is lost, or has two owners"
        for reservation in self.seq_pages.values():
            request = reservation.request_reservation
            assert request.units <= blocks[reservation.base], "a run is longer than its block"
            assert reservation.requested_tokens <= request.reserved_tokens <= request.units * self.page_tokens, (
                "a run is shorter than needed"
            )
        for request in requests:
            members = sum(reservation.request_reservation is request for reservation in self.seq_pages.values())
            assert members == request.live_branches, "the branches of a request are miscounted"
            assert request.pending_branches <= len(request.spare_bases), "a pending branch has no run"
        held = {reservation.slot for reservation in self.seq_pages.values()}
        assert len(held) == len(self.seq_pages), "a slot is used twice"
        assert not held & set(self.free_slots), "a slot is free and used"
        assert held | set(self.free_slots) == set(range(1, self.kv_config.slots)), "a slot is lost"
