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
from quire.control.memory.answers import Account, Admitted, Later, Placement, Sharing, Usage
from quire.control.memory.buddy import Buddy, block_units
from quire.control.memory.layout import Size, geometry_of
from quire.control.request import Sequence
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import Copy, Entry, Journal, Poison, Table
from quire.vocabulary.specs import Geometry, Layout, ModelSpec

Rule = Callable[[int, int, int], int]
"""(prompt, output, longest) -> tokens to reserve: lengths in tokens, the output's true one, the model's longest."""


def _oracle(prompt: int, output: int, longest: int) -> int:
    """Orca (Oracle): the output's length is known."""
    return prompt + output


def _pow2(prompt: int, output: int, longest: int) -> int:
    """Orca (Pow2): the output's length is overestimated by less than twice; 32 for 25."""
    return min(prompt + (block_units(output) if output else 0), longest)


def _max(prompt: int, output: int, longest: int) -> int:
    """Orca (Max) and FasterTransformer: as much as any sequence may need."""
    return longest


RULES: dict[str, Rule] = {"orca-oracle": _oracle, "orca-pow2": _pow2, "orca-max": _max, "ft": _max}
STATIC = ("ft",)


class EqualSlots:
    """Blocks of one size, as many as a pool of `total` units holds: the buffers of a static batch. As Buddy."""

    def __init__(self, total: int, size: int) -> None:
        self.total, self.size = total, size
        self.available = total
        self.bases = [i * size for i in reversed(range(total // size))]
        self.taken: dict[int, int] = {}  # base -> size

    def holds(self, asked: Iterable[int]) -> bool:
        """Are there slots for all of these at once?"""
        sizes = list(asked)
        return len(sizes) <= self.total // self.size and max(sizes, default=0) <= self.size

    def room(self, units: int) -> int:
        """Free slots."""
        return len(self.bases)

    def unusable(self, units: int) -> int:
        """Units behind the last slot."""
        return self.total % self.size

    def take(self, units: int) -> int | None:
        """The base of a free slot."""
        if not self.bases:
            return None
        base = self.bases.pop()
        self.taken[base] = self.size
        self.available -= self.size
        return base

    def give(self, base: int) -> None:
        """Take a slot back."""
        self.available += self.taken.pop(base)
        self.bases.append(base)

    def check(self) -> None:
        """Assert that each slot is free or taken."""
        assert sorted([*self.bases, *self.taken]) == [i * self.size for i in range(self.total // self.size)]
        assert self.available == self.total - len(self.taken) * self.size, "the count of free units is wrong"


class Family:
    """What a request reserved for its branches: as many blocks of one size as it has at once at most. All of them stay
    until its last branch ends, since others may fork again."""

    __slots__ = ("final", "members", "reserve", "spares", "unborn", "units")

    def __init__(self, units: int, reserve: int, final: int, spares: list[int]) -> None:
        self.units = units  # logical pages of each run
        self.reserve = reserve  # tokens that a run has been reserved for
        self.final = final  # tokens that each sequence will have, at most, as far as it was told
        self.spares = spares  # blocks that no branch has now
        self.unborn = len(spares)  # branches that were announced and are not there yet
        self.members = 0


class Reservation:
    """A sequence in memory: its slot and its run."""

    __slots__ = ("base", "family", "held", "slot")

    def __init__(self, slot: int, base: int, family: Family) -> None:
        self.slot, self.base, self.family = slot, base, family
        self.held = 0  # tokens that are or will be written, as far as asked for


class ReservedMemory:
    """See KVMemory. `rule` is a value of RULES; `longest` the most tokens of a sequence. With `static`, equal slots are
    given out, not blocks of the buddy allocator. A unit is one page of each group; a run of n units at base b is, for
    group g, the pages from 1 + b * groups + g * n on.

    What is reserved depends on the length that a sequence says it will have at most (§6.1: Orca (Oracle) "has the
    knowledge of the lengths of the outputs"). Prefixes are not shared, and nothing is swapped."""

    prefixes = None

    def __init__(
        self, geometry: Geometry, rule: Rule, *, longest: int, static: bool = False, debug: bool = False
    ) -> None:
        self.geometry, self.rule, self.longest, self.static, self.debug = geometry, rule, longest, static, debug
        group = geometry.groups[0]
        assert all(other.ids == group.ids for other in geometry.groups), "runs are of pages that any group may have"
        self.page_tokens, self.page_bytes = group.page_tokens, group.page_bytes
        self.groups = len(geometry.groups)
        units = len(group.ids) // self.groups
        self.pool: Buddy | EqualSlots = EqualSlots(units, -(-longest // self.page_tokens)) if static else Buddy(units)
        self.slots = list(range(geometry.slots - 1, 0, -1))
        self.residents: dict[int, Reservation] = {}
        self.entries: list[Entry] = []
        self.releases = 0  # times that a run or a slot came back
        self.refused = (-1, -1, 0)  # the last admission that failed for shortage: (sequence, releases, units)
        self.batch = 0  # units that the batch under way has taken
        self.copies = 0  # pages copied by forks

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: Size) -> ReservedMemory:
        """A memory of `size` by the rule that `config.memory` names, in pages as PagedMemory has them."""
        geometry = geometry_of(replace(config, swap_gib=0), spec, size, Layout.PAGED)
        static = config.memory in STATIC
        return cls(geometry, RULES[config.memory], longest=size.max_len, static=static, debug=config.debug)

    # Admission

    def fits(self, lengths: Seq[int], shared: int = 0, media: Seq[Medium] = ()) -> bool:
        """As in KVMemory; `shared` is taken as the length of the prompts. Without it, the prompt is the worst one."""
        assert not media, "pictures have no place in this memory"
        if len(lengths) >= self.geometry.slots or max(lengths, default=0) > self.longest:
            return False
        return self.pool.holds(-(-self._most(length, shared) // self.page_tokens) for length in lengths)

    def _most(self, length: int, prompt: int) -> int:
        """Tokens to reserve for a sequence that will have `length`, whose prompt is `prompt` or, if that is 0, any."""
        if prompt:
            return self.rule(min(prompt, length), max(length - prompt, 0), self.longest)
        # Rules exceed an output the most just above a power of two.
        outputs = [0, *(over for k in range(length.bit_length()) if (over := 2**k + 1) <= length)]
        return max(self.rule(length - output, output, self.longest) for output in outputs)

    def admit(self, seqs: Seq[Sequence], budget: int) -> list[Admitted] | Later | None:
        first = seqs[0]
        assert not any(seq.id in self.residents for seq in seqs), f"sequence {first.id} is admitted twice"
        if len(self.slots) < len(seqs) or self.refused[:2] == (first.id, self.releases):
            return None
        final = first.final or self.longest  # branches have one prompt, and one length
        reserve = self.rule(first.prompt_len, final - first.prompt_len, self.longest)
        units = -(-reserve // self.page_tokens)
        assert max(len(seq.tokens) for seq in seqs) <= reserve <= self.longest, f"{reserve} tokens are reserved"
        if self.pool.room(units) < sum(1 + seq.branches for seq in seqs):
            self.refused = (first.id, self.releases, units)
            return None
        for seq in seqs:
            base, *spares = (self._take(units) for _ in range(1 + seq.branches))
            self._reside(seq, Family(units, reserve, final, spares), base)
        return [Admitted(0)] * len(seqs)

    def _take(self, units: int) -> int:
        base = self.pool.take(units)
        assert base is not None, "a run counted for an admission was not there"
        return base

    def _reside(self, seq: Sequence, family: Family, base: int) -> None:
        """Give a slot, and a table of the whole run, once for all."""
        resident = Reservation(self.slots.pop(), base, family)
        family.members += 1
        self.residents[seq.id] = resident
        for g in range(self.groups):
            pages = tuple(self._pages(resident, g))
            if self.debug:
                self.entries += [Poison(g, page) for page in pages]
            self.entries.append(Table(resident.slot, g, 0, pages))
        self.batch = max(self.batch, self.pool.total - self.pool.available)

    def _pages(self, resident: Reservation, group: int) -> range:
        first = 1 + resident.base * self.groups + group * resident.family.units
        return range(first, first + resident.family.units)

    # Life

    def grow(self, seq: Sequence, length: int) -> bool:
        resident = self.residents[seq.id]
        if length > resident.family.reserve:
            return False
        resident.held = max(resident.held, length)
        return True

    def commit(self, seq: Sequence) -> None:
        pass  # nothing is published, and nothing is dropped before the end

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """The child gets a run that was set aside for it, and a copy of every computed page (§4.4: what sharing
        saves)."""
        assert parent.quiet, f"sequence {parent.id} is forked while in flight"
        source = self.residents[parent.id]
        family = source.family
        base = None
        if self.slots:
            base = family.spares.pop() if family.spares else self.pool.take(family.units)
        if base is None:
            return False
        family.unborn = max(family.unborn - 1, 0)
        self._reside(child, family, base)
        copy = self.residents[child.id]
        copy.held = parent.computed
        count = -(-parent.computed // self.page_tokens)
        for g in range(self.groups):
            pairs = zip(self._pages(source, g)[:count], self._pages(copy, g))
            self.entries += [Copy(g, old, new) for old, new in pairs]
        self.copies += count * self.groups
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.quiet, f"sequence {seq.id} is freed while in flight"
        resident = self.residents.pop(seq.id)
        family = resident.family
        family.spares.append(resident.base)
        family.members -= 1
        if not family.members:
            for base in family.spares:
                self.pool.give(base)
        self.slots.append(resident.slot)
        self.releases += 1
        if not self.residents:
            self.batch = 0

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        return False  # there is no host memory

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        return False

    # Facts

    def slot(self, seq: Sequence) -> int:
        return self.residents[seq.id].slot

    def held(self, seqs: Seq[Sequence]) -> tuple[int, int]:
        runs = [self.residents[seq.id] for seq in seqs]
        pages = sum(resident.family.units for resident in runs) * self.groups
        return pages * self.page_bytes, sum(resident.held for resident in runs)

    def encode(self, seq: Sequence, length: int, parts: int) -> tuple[int, int]:
        return length, 0  # it has no pictures

    def unencode(self) -> None:
        pass

    def renew(self) -> None:
        assert not self.residents, "sequences have pages"
        self.take_journal()

    def take_journal(self) -> tuple[Journal, Journal]:
        journal, self.entries = tuple(self.entries), []
        return journal, ()

    def place(self, seq: Sequence) -> Placement:
        resident = self.residents[seq.id]
        return Placement(resident.slot, tuple(tuple(self._pages(resident, g)) for g in range(self.groups)))

    def account(self) -> Account:
        runs = sum(resident.family.units for resident in self.residents.values())
        return Account(self._usage(), Sharing(runs * self.groups * self.page_bytes, 0, self.copies))

    def _usage(self) -> Usage:
        """Figures 2 and 3. `reserved`: slots of tokens to come, as far as lengths were told. `internal`: the rest of
        what a rule reserved, and the runs of branches and of a static batch's members that ended. `external`: what the
        allocator rounds up to, and free pages too few in a row for the sequence that was refused last."""
        taken = self.pool.total - self.pool.available
        used = sum(resident.held for resident in self.residents.values())
        reserved = sum(max(resident.family.final - resident.held, 0) for resident in self.residents.values())
        runs = 0
        for family in self._families():
            runs += family.units * (family.members + len(family.spares))
            reserved += family.unborn * family.final
        ended = self.batch - taken if self.static else 0
        unusable = 0
        if self.static:
            unusable = self.pool.unusable(0)
        elif self.refused[1] == self.releases:
            unusable = self.pool.unusable(self.refused[2])
        unit_bytes = self.groups * self.page_bytes
        token_bytes = sum(group.token_bytes for group in self.geometry.groups)
        return Usage(
            used * token_bytes,
            0,
            reserved * token_bytes,
            (runs + ended) * unit_bytes - (used + reserved) * token_bytes,
            (taken - runs + unusable) * unit_bytes,
            (self.pool.available - ended - unusable) * unit_bytes,
        )

    def _families(self) -> set[Family]:
        return {resident.family for resident in self.residents.values()}

    def check(self) -> None:
        self.pool.check()
        blocks, families = self.pool.taken, self._families()
        bases = [resident.base for resident in self.residents.values()]
        bases += [base for family in families for base in family.spares]
        assert sorted(bases) == sorted(blocks), "a block is lost, or has two owners"
        for resident in self.residents.values():
            family = resident.family
            assert family.units <= blocks[resident.base], "a run is longer than its block"
            assert resident.held <= family.reserve <= family.units * self.page_tokens, "a run is shorter than needed"
        for family in families:
            members = sum(resident.family is family for resident in self.residents.values())
            assert members == family.members, "a family has lost a member"
            assert family.unborn <= len(family.spares), "a branch to come has no run"
        held = {resident.slot for resident in self.residents.values()}
        assert len(held) == len(self.residents), "a slot is used twice"
        assert not held & set(self.slots), "a slot is free and used"
        assert held | set(self.slots) == set(range(1, self.geometry.slots)), "a slot is lost"
