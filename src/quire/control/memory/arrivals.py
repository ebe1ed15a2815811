"""Sequences that are about to come in: what of them needn't be computed, and the pages that they take. Nothing changes
here; PagedMemory does what is found."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

from quire.control.memory.gallery import Asked
from quire.control.memory.pages import Resting
from quire.control.memory.policies import FAR, peak
from quire.control.memory.prefix import Reuse
from quire.control.memory.tables import Tables
from quire.control.request import Sequence

if TYPE_CHECKING:
    from quire.control.memory.paged import PagedMemory


class Arrival(NamedTuple):
    """How a sequence would come in: with `tokens` tokens that it needn't compute, and room for `length`.

    The first `common` of them it has in common with an earlier sequence of its request, `owner` by its place among
    them, and names the same pages; `found` is the pages of the others, a table a group. `ready` of them are computed.
    `junction` is as in Reuse. One that `follows` has no pages yet, see Followers.
    """

    tokens: int
    found: Tables
    owner: int
    common: int
    ready: int
    length: int
    junction: int
    follows: bool = False


class Arrivals:
    """At the door of a memory."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory = memory

    def of(self, seqs: Seq[Sequence], budget: int, look: bool) -> list[Arrival]:
        """One sequence alone gets room for its next chunk, several for all of their tokens: only then can they share
        what one of them computes. With `look` cached pages are looked up."""
        coming: list[Arrival] = []
        owners: dict[bytes, int] = {}  # the first sequence that has the tokens which a key names
        for i, seq in enumerate(seqs):
            common, owner = self._common(seq, i, owners) if len(seqs) > 1 else (0, i)
            if self.memory.forgets and common and coming[owner].tokens >= common:
                common, owner = 0, i  # what it would need of that one may not be there
            ready = min(common, coming[owner].ready) if common else 0
            found = Reuse(common, self.memory.prefixes.nothing().tables)
            if look and ready == common:  # what is still to be computed isn't followed by what has been
                found = self.memory.prefixes.cached(seq, common)
            pinned = self.memory.prefixes.pinned(seq)
            if pinned.tokens >= max(found.tokens, 1):
                common, ready, found = 0, 0, pinned
            room = budget if len(seqs) == 1 else len(seq.tokens)
            if self.memory.forgets:
                room = min(room, self.memory.chunk)  # pages that are dropped are never all held at once
            if self.memory.forgets and common:
                own = self.memory.prefixes.cached(seq) if look else self.memory.prefixes.nothing()
                if own.tokens >= common:
                    common, ready, found = 0, 0, own
                else:
                    room = 0  # until what is common is computed
            tokens, tables, junction = found
            ready = tokens if ready == common else ready
            end = min(len(seq.tokens), tokens + room)
            coming.append(
                Arrival(tokens, tables, owner, common, ready, end, junction, self.memory.forgets and common > 0)
            )
        return coming

    def _common(self, seq: Sequence, index: int, owners: dict[bytes, int]) -> tuple[int, int]:
        """The tokens that a sequence has in common with one before it, and which one that is. Whole strides only: a
        page that both would write to can't be copied before it is written. None where prompts shrink."""
        if self.memory.geometry.budget:
            return 0, index
        prefixes = self.memory.prefixes
        end = (len(seq.tokens) - 1) // prefixes.stride * prefixes.stride
        prefixes.chain(seq, end)
        step = prefixes.stride // prefixes.unit
        keys = seq.keys[step - 1 : end // prefixes.unit : step]
        known = bisect(keys, False, key=lambda key: key not in owners)  # a key is known only if all before it are
        owners.update(dict.fromkeys(keys[known:], index))
        common = prefixes.useful(seq, known * prefixes.stride)
        return common, owners[keys[known - 1]] if common else index

    def needs(
        self, seqs: Seq[Sequence], coming: list[Arrival]
    ) -> tuple[list[list[int]], Resting, list[tuple[int, int]]]:
        """Pages of each group that must be free for the first of them to come in, for the first two, and so on: with
        what the last one needs to go on, and pages of its branches to come. What is found and no sequence uses yet is
        about to be, so it isn't free; it is told too, and of that the pages of pictures."""
        asked = self._pictures(seqs, coming) if seqs[0].media else []
        pictures = [page for one in asked for page in one.found]
        found = {(g, page) for one in coming for g, table in enumerate(one.found) for page in table if page}
        resting = self.memory.pages.resting(found.union(pictures))
        taken, all_needs = list(resting.pages), []
        for i, (seq, one) in enumerate(zip(seqs, coming)):
            needs = []
            for g, (policy, most) in enumerate(zip(self.memory.policies, self.memory.most)):
                if policy.media:
                    more = asked[i].fresh[g] if asked else 0
                    peaks = (
                        self.memory.gallery.peak(g, seq, one.tokens, self.memory.chunk)
                        if asked and len(seqs) == 1
                        else 0
                    )
                    needs.append(taken[g] + max(more, peaks - sum(at == g for at, _ in pictures)))
                    taken[g] += more
                    continue
                there = policy.required(seq, one.tokens)
                held = 0 if one.follows and policy not in self.memory.keeping else len(there)  # its window is its own
                more = policy.reads(seq, one.tokens, one.length).stop - there.stop
                writes = policy.writes(seq, one.tokens, one.length)
                copied = max(there.stop - writes.start, 0) if writes else 0
                whole = max(more, peak(policy, len(seq.tokens), most) - held)
                needs.append(taken[g] + whole + copied + seq.branches)
                taken[g] += more + copied
            all_needs.append(needs)
        return all_needs, resting, pictures

    def _pictures(self, seqs: Seq[Sequence], coming: list[Arrival]) -> list[Asked]:
        """What the pictures of these sequences take: of one alone those of its next chunk, of several all of them."""
        known: set[tuple[int, bytes]] = set()
        asked = []
        for seq, one in zip(seqs, coming):
            end = one.length if len(seqs) == 1 else FAR
            firsts = [policy.required(seq, one.tokens).start for policy in self.memory.policies]
            stops = [policy.reads(seq, one.tokens, end).stop for policy in self.memory.policies]
            asked.append(self.memory.gallery.asked(seq, firsts, stops, known))
        return asked
