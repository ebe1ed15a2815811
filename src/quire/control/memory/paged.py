"""Paged memory: fixed-size pages anywhere, a page table a sequence and layer group (PagedAttention §4.2-4.4).

Here is how sequences come in, with what they can share of the prefixes that are there: full pages are published under
chained keys, so that a later sequence with the same prefix finds them. What that takes (arrivals.py), tables, prefixes,
pictures and swapping have files of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from itertools import chain
from operator import add
from typing import Any

from quire.config import EngineConfig
from quire.control.memory.accounting import filled_in, sharing_of, types_of, usage_of
from quire.control.memory.answers import LATER, Account, Admitted, Later, Placement, Usage
from quire.control.memory.arrivals import Arrival, Arrivals
from quire.control.memory.followers import Followers
from quire.control.memory.layout import Size, geometry_of
from quire.control.memory.pages import Resting
from quire.control.memory.part import Part
from quire.control.memory.policies import POLICIES, Policies, faults, most_at_once, peak, policies_for
from quire.control.memory.prefix import Prefixes
from quire.control.memory.retention import SLACK, Retention
from quire.control.memory.swap import Swap
from quire.control.memory.tables import PageTables, Resident, Tables
from quire.control.request import Sequence
from quire.vocabulary.media import Medium
from quire.vocabulary.plan import Journal
from quire.vocabulary.specs import Geometry, ModelSpec


class PagedMemory(PageTables):
    """See KVMemory. `chunk` is the largest number of tokens computed in one step, `prefix_tokens` are kept for
    registered prefixes, `retention`, `slack` and `every` say what is kept behind windows (see Retention)."""

    def __init__(
        self,
        geometry: Geometry,
        *,
        chunk: int,
        caching: bool = True,
        model_id: str = "",
        debug: bool = False,
        order: Iterable[int] | None = None,
        prefix_tokens: int = 0,
        policies: Policies = POLICIES,
        association: str = "bulk",
        retention: str = "paper",
        slack: int = SLACK,
        every: int = 0,
        part: Part | None = None,
        **orders: Any,
    ) -> None:
        super().__init__(geometry, policies, order, debug, association, part, **orders)
        self.chunk, self.caching = chunk, caching and not geometry.budget
        # Where pages are dropped before a sequence's end it never holds all of them; or they change at a prompt's end.
        self.forgets = bool(geometry.budget) or len(self.keeping) < len(self.policies)
        self.retention = Retention(self.pages, self.policies, retention, slack, every)
        if self.caching:
            self.back = list(map(self.retention.back, self.policies))
        self.most = [most_at_once(policy, chunk, back) for policy, back in zip(self.policies, self.back)]
        self.edges = [self.pages.edges(g) for g in range(len(self.groups))]
        kept = [0 if policy.media else policy.group.pages(prefix_tokens) for policy in self.policies]
        self.prefixes = Prefixes(self, model_id, kept, self.caching)
        self.unit = self.prefixes.unit
        self.followers = Followers(self)
        self.swap = Swap(self, self.prefixes, chunk)
        self.gallery.caching = self.caching
        self.arrivals = Arrivals(self)
        if part is not None:
            part.holder = self
        self.sound = False  # once `check` found nothing that the policies contradict themselves in
        self.refused = (-1, -1)  # the last request that found no room: (its first sequence, releases at that time)

    @classmethod
    def build(cls, config: EngineConfig, spec: ModelSpec, size: Size, model_id: str = "") -> PagedMemory:
        """A memory of `size` for `spec`'s layers, grouped as `config.table_scope` says."""
        return cls.over(geometry_of(config, spec, size), config, model_id)

    @classmethod
    def over(
        cls, geometry: Geometry, config: EngineConfig, model_id: str = "", part: Part | None = None
    ) -> PagedMemory:
        """A memory of this geometry; in `part` of a ledger that several models have in common."""
        assert config.max_num_batched_tokens is not None, "a memory is built for a known number of tokens in a step"
        return cls(
            geometry,
            chunk=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
            model_id=model_id,
            debug=config.debug,
            prefix_tokens=config.prefix_tokens,
            policies=policies_for(group.kind for group in geometry.groups),
            association=config.association,
            part=part,
            retention=config.retention,
        )

    # Admission

    def fits(self, lengths: Seq[int], shared: int = 0, media: Seq[Medium] = ()) -> bool:
        seq = None
        if media:
            seq = Sequence(0, [])
            seq.media = tuple(media)
        needs = [
            sum(peak(policy, length, most + edges, seq) for length in lengths) + kept
            for policy, most, edges, kept in zip(self.policies, self.most, self.edges, self.prefixes.set_aside)
        ]
        if seq is not None:
            for g in self.gallery.policies:  # the same for all of the sequences
                needs[g] = self.gallery.peak(g, seq, 0)
                if len(lengths) == 1:
                    needs[g] = min(needs[g], self.gallery.peak(g, seq, 0, self.chunk) + self.edges[g])
        # What is common is shared, also when the sequences come back after a preemption, see `_common`.
        if not self.forgets:
            common = shared // self.prefixes.stride * self.prefixes.stride
            needs = [
                need - (len(lengths) - 1) * policy.required(None, common).stop
                for need, policy in zip(needs, self.policies)
            ]
        return (
            len(lengths) < self.geometry.slots
            and all(
                policy.reads(seq, 0, length).stop <= policy.group.table_width
                for policy in self.policies
                for length in lengths
            )
            and self.pages.affords(needs, margin=len(lengths) > 1, idle=True)
        )

    def admit(self, seqs: Seq[Sequence], budget: int) -> list[Admitted] | Later | None:
        first = seqs[0]
        assert not any(seq.id in self.residents for seq in seqs), f"sequence {first.id} is admitted twice"
        if len(self.slots) < len(seqs) or self.refused == (first.id, self.pages.releases):
            return None
        if self.prefixes.waits(first):
            return LATER  # as below, and nothing new was heard
        coming = self.arrivals.of(seqs, budget, self.caching)
        needs, resting, pictures = self.arrivals.needs(seqs, coming)
        if self.caching and self.prefixes.is_coming(first, coming[0].tokens, needs[-1]):
            return LATER  # the same prompt is being computed: a step later its pages can be shared
        if not self._reserve(needs, resting):
            if not self.residents:  # what is found, or registered, may lie in more large pages than it would fill
                self.prefixes.gather()
                self.gallery.clear(seqs)
                coming = self.arrivals.of(seqs, budget, look=False)
                needs, resting, pictures = self.arrivals.needs(seqs, coming)
            if self.residents or not self._reserve(needs, resting):
                self.refused = (first.id, self.pages.releases)
                return None
        self.gallery.hold(pictures)
        for one in coming:  # used from now on, so that they aren't evicted for a sequence's own tail
            for g, table in enumerate(one.found):
                for page in filter(None, table):
                    self.pages.share(g, page)
        residents: list[Resident] = []
        for seq, one in zip(seqs, coming):
            residents.append(self._come(seq, one, residents))
        for seq, one in zip(seqs, coming):
            if one.follows:
                self.followers.follow(seq, seqs[one.owner], one.common)
        self._share_common(coming, residents)
        self.gallery.let_go(pictures)
        return [Admitted(one.tokens, seqs[one.owner] if one.ready < one.tokens else None) for one in coming]

    def _reserve(self, needs: list[list[int]], resting: Resting) -> bool:
        """Whether there is room for each of these needs, the last of which are met next. A little stays free, unless
        one sequence is alone."""
        alone, promised = not self.residents, self.prefixes.promised
        return all(
            self.pages.reserve(list(map(add, need, promised)), resting, margin=not alone or i > 0)
            for i, need in enumerate(needs)
        )

    def _come(self, seq: Sequence, one: Arrival, before: list[Resident]) -> Resident:
        """Give it a slot and tables. References to pages that it has in common with others are not counted yet."""
        tables = one.found
        if one.common and not one.follows:
            owner = before[one.owner].tables
            stops = [policy.required(seq, one.common).stop for policy in self.policies]
            tables = [pages[:stop] + more for pages, stop, more in zip(owner, stops, tables)]
        if seq.media and not one.follows:
            tables = self.gallery.without(seq, tables, one.tokens)
        resident = self.reside(seq, tables, one.length, before[0].owner if before else seq.id)
        resident.committed = one.ready // self.prefixes.unit * self.prefixes.unit
        resident.room = self.room_of(seq, resident)
        resident.forked = one.tokens % self.prefixes.stride > 0
        resident.marks = (one.tokens, one.junction)
        self.prefixes.queries += len(seq.tokens)
        self.prefixes.hits += one.tokens
        self.prefixes.full_hits += max(one.tokens, one.junction)
        if self.caching:
            resident.expected = self.prefixes.expect(seq, one.tokens)
        if not one.follows:
            self._extend(seq, resident, one.length, one.tokens, reserved=True)
        return resident

    def _share_common(self, coming: list[Arrival], residents: list[Resident]) -> None:
        """Count the references to what sequences have in common, each page once for all who name it."""
        followers: dict[int, list[int]] = {}
        for one in coming:
            if one.common and not one.follows:
                followers.setdefault(one.owner, []).append(one.common)
        for owner, lengths in followers.items():
            for g, policy in enumerate(self.policies):
                first, stops = 0, sorted(policy.required(None, length).stop for length in lengths)
                for i, stop in enumerate(stops):
                    for page in residents[owner].tables[g][first:stop]:
                        self.pages.share(g, page, len(stops) - i)
                    first = stop

    # Life

    def commit(self, seq: Sequence) -> None:
        resident, computed, unit = self.residents[seq.id], seq.computed, self.unit
        if computed - resident.committed >= unit:
            end = computed // unit * unit
            if self.caching and not resident.stale:
                self.prefixes.publish(seq, resident.committed, end, resident.tables, resident.first)
                self._arrived(seq, resident, end // unit)
            resident.committed = end
        if seq.id in self.followers.behind:
            self.followers.passed(seq, computed)
        if computed >= resident.drops_at:  # a window's border and a page's are passed at different tokens
            if resident.pictures:
                self.gallery.commit(seq, resident)
            self._drop(seq, resident)
            if resident.pictures:
                resident.drops_at = 0

    def free(self, seq: Sequence) -> None:
        if seq.id in self.swap.residents:
            self.swap.free(seq)
            return
        resident = self.residents[seq.id]
        self._arrived(seq, resident, resident.expected[1])
        self.followers.leave(seq)
        super().free(seq)

    def _extend(self, seq: Sequence, resident: Resident, length: int, start: int, reserved: bool = False) -> bool:
        if seq.id in self.followers.ahead:
            needs = [
                max(policy.reads(seq, start, length).stop - policy.required(seq, start).stop, 0)
                for policy in self.policies
            ]
            if seq.media:
                firsts = [policy.required(seq, start).start for policy in self.policies]
                asked = self.gallery.asked(seq, firsts, list(map(add, firsts, needs)), set())
                for g in self.gallery.policies:
                    needs[g] = asked.fresh[g] + sum(at == g for at, _ in asked.found)
            if not self.pages.affords(needs):
                return False
            self.followers.catch_up(seq)
        return super()._extend(seq, resident, length, start, reserved)

    def _last_used(self, resident: Resident) -> Tables:
        return self.retention.renewed(resident)

    def _dropped(self, seq: Sequence, resident: Resident, group: int, pages: list[int]) -> None:
        if self.caching and self.retention.trails and self.policies[group].unit:
            first = resident.first[group] - len(pages)
            self.prefixes.chain(seq, seq.computed)  # behind a registered prefix that ends within a page more is named
            known = self.policies[group].group.whole(len(seq.keys) * self.unit)
            names = self.prefixes.names(group, seq.keys, first, min(first + len(pages), known))
            self.retention.left(seq, resident, group, first, pages, names)

    def _arrived(self, seq: Sequence, resident: Resident, full: int) -> None:
        start, end = resident.expected
        if start < end:
            self.prefixes.arrived(seq, start, min(full, end))
            resident.expected = (min(full, end), end)

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        if any(seq.id in self.followers.ahead for seq in seqs):
            return False  # there is nothing of it yet
        return self.swap.out(seqs)

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        if self.refused == (seqs[0].id, self.pages.releases):
            return False
        back = self.swap.back(seqs)
        if not back:
            self.refused = (seqs[0].id, self.pages.releases)
        return back

    def renew(self) -> None:
        assert not any(self.everybody()), "sequences have pages"
        assert not self.prefixes.registered, "registered prefixes have pages"
        self.prefixes.reset()
        self.take_journal()

    def everybody(self) -> Iterable[Resident]:
        return chain(self.residents.values(), self.swap.residents.values())

    # Facts

    def take_journal(self) -> tuple[Journal, Journal]:
        journal, self.entries = tuple(self.entries), []
        self.gallery.told()
        return journal, ()

    def encode(self, seq: Sequence, length: int, parts: int) -> tuple[int, int]:
        return self.gallery.encode(seq, self.residents[seq.id], length, parts)

    def unencode(self) -> None:
        self.gallery.take_back()

    def place(self, seq: Sequence) -> Placement:
        resident = self.residents[seq.id]
        return Placement(resident.slot, tuple(tuple(table) for table in resident.tables))

    def account(self) -> Account:
        filled = filled_in(self)
        return Account(self._usage(filled), sharing_of(self), types_of(self, filled))

    def _usage(self, filled: list[int]) -> Usage:
        return usage_of(self, filled)

    def references(self) -> list[dict[int, int]]:
        """How many tables of sequences and of registered prefixes name each page, a group."""
        counts = self.named()
        for (g, page), count in self.prefixes.pins.items():
            counts[g][page] = counts[g].get(page, 0) + count
        return counts

    def check(self) -> None:
        if not self.sound:
            for g, policy in enumerate(self.policies):
                fault = next(faults(policy, self.chunk, self.most[g]), None)
                assert fault is None, (
                    f"{type(policy).__name__}, of group {g} of the kind {policy.group.kind!r}, {fault}"
                )
            self.sound = True
        self.prefixes.check()
        self.followers.check()
        self.gallery.check()
        self.pages.check(self.references())
        self.swap.check()
