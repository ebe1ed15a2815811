"""The pictures of a memory's sequences: which pages hold what they were encoded to, what is still to be encoded, and
what may be found again. It knows neither pixels nor how a picture is encoded: a journal's Encode says when and where.

A picture is found by its key, whatever the text around it, and always as a whole: its pages are cached together and
evicted together. Who needs one that another sequence has just got shares its pages, and waits until it is encoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from operator import add
from typing import TYPE_CHECKING, NamedTuple

from quire.memory.page_pool import SCRATCH
from quire.memory.policies import ImagePolicy, ImageSpan, InlineImagePolicy
from quire.memory.seq_pages import EncodingState, ImageRef
from quire.protocol.images import ImageItem
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import ImageEncoding, TableWrite

if TYPE_CHECKING:
    from quire.memory.page_tables import PageTables
    from quire.memory.seq_pages import SeqPages, Tables


class ImageNeeds(NamedTuple):
    """What pictures would take: pages of each group to be filled; and the pages that are found, as (group, page)."""

    new_pages: list[int]
    cached_pages: list[tuple[int, int]]


def encoding_key(g: int, image: ImageItem, count: int) -> tuple[int, bytes]:
    """A picture that is coming, in so many pages of a group: one of another size is another, whatever its key."""
    return g, image.key + count.to_bytes(4) + image.num_parts.to_bytes(4)


def page_keys(key: bytes, count: int) -> list[bytes]:
    """The names of a picture's pages."""
    return [key + i.to_bytes(4) for i in range(count)]


class EncoderCache:
    """The pictures in a memory of these tables; with `caching` they are kept for others. `seed` says which one is
    evicted first where nothing else does."""

    caching = True

    def __init__(self, page_tables: PageTables, seed: int = 0) -> None:
        self.page_tables, self.page_pool = page_tables, page_tables.page_pool
        self.seed = seed.to_bytes(8, "little", signed=True)
        self.vision_cache = page_tables.kv_config.sight
        self.image_policies = {g: one for g, one in enumerate(page_tables.policies) if isinstance(one, ImagePolicy)}
        self.inline_policies = {
            g: one for g, one in enumerate(page_tables.policies) if isinstance(one, InlineImagePolicy)
        }
        self.encodings: dict[tuple[int, bytes], EncodingState] = {}
        self.unfinished: EncodingState | None = None  # the last one that a step left in parts
        self.page_counts: dict[tuple[int, bytes], int] = {}  # pages of each picture that can be found
        self.evicted_keys = {
            g: self.page_pool.track_evictions(g) for g in self.image_policies
        }  # keys of its pages that were evicted
        self.untaken_ops: list[tuple[ImageEncoding, EncodingState]] = []  # since the last journal was taken
        self.runs = self.parts_encoded = self.hits = 0  # pictures and parts that were encoded; pictures that needn't be

    # What is there, and what is missing

    def _find_pages(self, g: int, key: bytes, count: int) -> list[int] | None:
        """A picture's pages, if all of them are there."""
        index = self.page_pool.index[g]
        found = [index[name] for name in page_keys(key, count) if name in index]
        return found if len(found) == count else None

    def _images_between(self, g: int, seq: Sequence, first: int, stop: int) -> Iterator[tuple[int, ImageSpan]]:
        """The pictures whose pages are first .. stop of a table, and which ones they are."""
        return (
            (i, s) for i, s in enumerate(self.image_policies[g].image_spans(seq)) if first <= s.first and s.stop <= stop
        )

    def count_needs(
        self, seq: Sequence, firsts: Seq[int], stops: Seq[int], known: set[tuple[int, bytes]]
    ) -> ImageNeeds:
        """What it takes that a table has pages first .. stop of each group; what is `known` is counted already."""
        asked = ImageNeeds([0] * len(stops), [])
        for g in self.image_policies:
            for _, (medium, first, stop) in self._images_between(g, seq, firsts[g], stops[g]):
                picture = encoding_key(g, medium, stop - first)
                if picture in known or picture in self.encodings:
                    continue
                known.add(picture)
                pages = self._find_pages(g, medium.key, stop - first)
                if pages is None:
                    asked.new_pages[g] += stop - first
                else:
                    asked.cached_pages.extend((g, page) for page in pages)
        return asked

    def peak_pages(self, g: int, seq: Sequence, start: int, max_step_tokens: int | None = None) -> int:
        """The most pages that a sequence alone holds at once, of pictures from its token `start` on: those that two
        steps of `max_step_tokens` tokens read, as one may not be confirmed. Without a `max_step_tokens` all of them, a
        picture's once."""
        policy = self.image_policies[g]
        begin = policy.required(seq, start).start
        spans = [span for span in policy.image_spans(seq) if span.first >= begin]
        every = sum({medium.key: stop - first for medium, first, stop in spans}.values())
        if max_step_tokens is None:
            return every
        reach = [
            span.stop - policy.required(seq, max(span.image.start + 1 - 2 * max_step_tokens, 0)).start for span in spans
        ]
        return min(max(reach, default=0), every)

    def evict_images(self, seqs: Seq[Sequence]) -> None:
        """Nothing of these sequences' pictures is found, unless somebody uses it."""
        for g, policy in self.image_policies.items():
            for medium in (medium for seq in seqs for medium in seq.images):
                for name in page_keys(medium.key, policy.group.num_pages(medium.num_embeds)):
                    page = self.page_pool.find(g, name)
                    if page is not None and not self.page_pool.ref_count(g, page):
                        self.page_pool.evict(g, page)
        self.drop_incomplete()

    def reserve(self, seq: Sequence, tables: Tables, needs: list[int]) -> list[tuple[int, int]] | None:
        """Reserve pages for tables that are to be so many pages longer, and hold what is found of pictures among these:
        it is returned. None, and no change, if there is no room."""
        firsts = list(map(len, tables))
        asked = self.count_needs(seq, firsts, list(map(add, firsts, needs)), set())
        least = [asked.new_pages[g] if g in self.image_policies else need for g, need in enumerate(needs)]
        resting = self.page_pool.find_cached_hits(asked.cached_pages)
        if self.page_pool.reserve(list(map(add, least, resting.num_pages)), resting):
            self.incref_pages(asked.cached_pages)
            return asked.cached_pages
        for g, _ in asked.cached_pages:  # what is found may lie in more large pages than it would fill
            least[g] += 1
        if not asked.cached_pages or not self.page_pool.can_allocate(least):
            return None
        self.evict_images([seq])
        assert self.page_pool.reserve(least), "pages that can be had can't be reserved"
        return []

    # Into a table, and out of it

    def incref_pages(self, pages: list[tuple[int, int]]) -> None:
        """These pages are about to be used: until `decref_pages` they aren't evicted."""
        for g, page in pages:
            self.page_pool.incref(g, page)

    def decref_pages(self, pages: list[tuple[int, int]]) -> None:
        """They are used by whom they were held for."""
        for g, page in pages:
            self.page_pool.decref(g, (page,))

    def extend_table(self, seq: Sequence, seq_pages: SeqPages, g: int, stop: int) -> None:
        """The table has the pages of the next pictures too, up to `stop`. They were reserved, and what is found is held
        by somebody."""
        table = seq_pages.tables[g]
        at, fresh = len(table), list[int]()
        for i, (medium, first, last) in self._images_between(g, seq, at, stop):
            picture = encoding_key(g, medium, last - first)
            coming, pages = self.encodings.get(picture), self._find_pages(g, medium.key, last - first)
            if coming is None and pages is not None:
                self.hits += 1
            elif coming is None:
                pages = self.page_tables.allocate_pages(g, last - first, seq_pages.owner, seq_pages.slot, first)
                coming = self.encodings[picture] = EncodingState(medium.num_parts, pages)
            else:
                pages = list(coming.pages)
            if coming is not None:
                if coming.num_waiting:
                    self.incref_pages([(g, page) for page in pages])
                self._wait_for(seq_pages, (g, i), coming)
            else:
                self.incref_pages([(g, page) for page in pages])
            fresh += pages
        table += fresh
        self.page_tables.page_ops.append(TableWrite(seq_pages.slot, g, at, tuple(fresh)))

    @staticmethod
    def _wait_for(seq_pages: SeqPages, image_ref: ImageRef, encoding: EncodingState) -> None:
        seq_pages.pending_encodings[image_ref] = encoding
        seq_pages.drops_at = 0  # the next tokens that are computed are looked at
        encoding.num_waiting += 1

    def copy_waits(self, child: SeqPages, parent: SeqPages) -> None:
        """A fork needs what its parent does."""
        for place, coming in parent.pending_encodings.items():
            self._wait_for(child, place, coming)

    def decref_images(self, tables: Tables, images: Seq[ImageItem]) -> Tables:
        """One sequence fewer names the pages of its pictures: one picture after the other, so that they are evicted in
        the order of a random value each (Jenga §5.3), and before what its tokens left. Returns the other tables."""
        left = list(tables)
        order = sorted(
            range(len(images)), key=lambda i: hashlib.sha256(images[i].key + self.seed).digest(), reverse=True
        )
        for g, policy in self.image_policies.items():
            if tables[g]:
                stops = [0]
                for medium in images:
                    stops.append(stops[-1] + policy.group.num_pages(medium.num_embeds))
                for i in order:
                    self.page_pool.decref(g, tables[g][stops[i] : stops[i + 1]])
                left[g] = []
        return left

    def detach(self, seq_pages: SeqPages) -> None:
        """A sequence leaves its slot. What it was encoding another one begins anew, if one needs it; what no journal
        tells of yet isn't done."""
        self.undo_untaken(seq_pages.slot)
        for place, coming in seq_pages.pending_encodings.items():
            coming.num_waiting -= 1
            if not coming.is_complete and coming.assigned_to is not None and coming.assigned_to[0] == seq_pages.slot:
                coming.assigned_to, coming.parts_done = None, 0
            if not coming.num_waiting:
                self._drop_encoding(place[0], coming)
        seq_pages.pending_encodings = {}

    def _drop_encoding(self, g: int, encoding: EncodingState) -> None:
        for picture in [picture for picture, other in self.encodings.items() if other is encoding and picture[0] == g]:
            del self.encodings[picture]

    def drop_incomplete(self) -> None:
        """Of a picture of which a page was evicted nothing is found any more."""
        for g, torn in self.evicted_keys.items():
            for key in dict.fromkeys(name[:-4] for name in torn):
                for name in page_keys(key, self.page_counts.pop((g, key), 0)):
                    page = self.page_pool.find(g, name)
                    if page is None:
                        continue
                    if self.page_pool.ref_count(g, page):
                        self.page_pool.unpublish(g, page)
                    else:
                        self.page_pool.evict(g, page)
            torn.clear()

    def forget_keys(self) -> None:
        """No page has a name any more. Who needs a picture that is on its way gets it, and nobody new does."""
        for coming in self.encodings.values():
            coming.is_closed = True
        self.encodings.clear()
        self.page_counts.clear()
        for torn in self.evicted_keys.values():
            torn.clear()

    # Encoding

    def plan_encoding(self, seq: Sequence, seq_pages: SeqPages, end: int, max_parts: int) -> tuple[int, int]:
        """See KVMemory."""
        if self.vision_cache == "off":
            return self._plan_for_step_only(seq, seq_pages, end, max_parts)
        start, parts = seq.planned, 0
        for i, medium in enumerate(seq.images):
            if medium.start >= end:
                break
            needed = medium.end > start
            for g, host in self.inline_policies.items() if needed else ():
                if (g, i) not in seq_pages.pending_encodings:
                    self._wait_for(seq_pages, (g, i), EncodingState(medium.num_parts))
                at, skip = medium.start // host.group.run_tokens + 1, max(start - medium.start, 0)
                parts += self._plan_parts(seq_pages, (g, i), at, max_parts - parts, skip)
            for g in self.image_policies:
                if (g, i) in seq_pages.pending_encodings:
                    at = next(span.first for j, span in enumerate(self.image_policies[g].image_spans(seq)) if j == i)
                    parts += self._plan_parts(seq_pages, (g, i), at, max_parts - parts)
            if any(j == i and not coming.is_complete for (_, j), coming in seq_pages.pending_encodings.items()):
                return max(medium.start, start), parts
        return end, parts

    def _plan_for_step_only(self, seq: Sequence, seq_pages: SeqPages, end: int, max_parts: int) -> tuple[int, int]:
        """Encode pictures for this step alone: whole ones, all of a prompt's together where its tokens attend both
        ways. What comes first in a step is encoded however many parts it has, and then no more than `max_parts`."""
        told = {entry.image_index for entry, _ in self.untaken_ops if entry.slot == seq_pages.slot}
        needed = [(i, medium) for i, medium in enumerate(seq.images) if medium.start < end and medium.end > seq.planned]
        parts = 0
        for pictures in [needed] if self.page_tables.kv_config.both_ways and needed else [[one] for one in needed]:
            fresh = [(i, medium) for i, medium in pictures if i not in told]
            more = sum(medium.num_parts for _, medium in fresh)
            if self.untaken_ops and parts + more > max_parts:
                return max(pictures[0][1].start, seq.planned), parts
            for i, medium in fresh:
                self._append_op(
                    ImageEncoding(-1, seq_pages.slot, i, 0, 0, medium.num_parts), EncodingState(medium.num_parts)
                )
            parts += more
        return end, parts

    def _plan_parts(self, seq_pages: SeqPages, image_ref: ImageRef, at: int, max_parts: int, skip: int = 0) -> int:
        """Encode more parts of a picture, if that is this sequence's turn. Returns how many."""
        coming, (g, i) = seq_pages.pending_encodings[image_ref], image_ref
        if coming.assigned_to is None:
            coming.assigned_to = seq_pages.slot, i
        count = min(coming.num_parts - coming.parts_done, max_parts)
        if (
            coming.assigned_to != (seq_pages.slot, i)
            or count <= 0
            or (coming.parts_done + count < coming.num_parts and self._is_blocked(coming))
        ):
            return 0
        self._append_op(ImageEncoding(g, seq_pages.slot, i, at, coming.parts_done, count, skip), coming)
        if not coming.is_complete:
            self.unfinished = coming
        return count

    def _is_blocked(self, encoding: EncodingState) -> bool:
        """Another picture is encoded in part. A runner holds on to the features of such a one: of one at a time."""
        other = self.unfinished
        return other is not None and other is not encoding and 0 < other.parts_done < other.num_parts

    def _append_op(self, op: ImageEncoding, encoding: EncodingState) -> None:
        self.page_tables.page_ops.append(op)
        self.untaken_ops.append((op, encoding))
        encoding.parts_done += op.num_parts

    def undo_untaken(self, slot: int | None = None) -> None:
        """What no journal tells of yet isn't done, of this slot or of all."""
        for entry, coming in [one for one in self.untaken_ops if slot in (None, one[0].slot)]:
            self.page_tables.page_ops.remove(entry)
            self.untaken_ops.remove((entry, coming))
            coming.parts_done -= entry.num_parts

    def mark_taken(self) -> None:
        """The journal is taken: its pictures will be encoded."""
        for entry, coming in self.untaken_ops:
            self.parts_encoded += entry.num_parts
            self.runs += entry.first_part + entry.num_parts == coming.num_parts
        self.untaken_ops = []

    def commit(self, seq: Sequence, seq_pages: SeqPages) -> None:
        """Tokens were computed: the pictures that they read are encoded, and can be found by others."""
        for (g, i), coming in list(seq_pages.pending_encodings.items()):
            medium = seq.images[i]
            if not coming.is_complete or seq.computed <= medium.start:
                continue
            if g in self.inline_policies:
                if seq.computed < medium.end:
                    continue
            elif not coming.is_closed:
                coming.is_closed = True
                if self.caching:
                    for page, name in zip(coming.pages, page_keys(medium.key, len(coming.pages))):
                        self.page_pool.publish(g, page, name)
                    self.page_counts[g, medium.key] = max(len(coming.pages), self.page_counts.get((g, medium.key), 0))
                del self.encodings[encoding_key(g, medium, len(coming.pages))]
            del seq_pages.pending_encodings[g, i]
            coming.num_waiting -= 1

    def drop_image_tables(self, seq: Sequence, tables: Tables, tokens: int) -> Tables:
        """The tables of a sequence that goes on behind so many tokens, without pictures: these are looked for when it
        does. Pictures aren't swapped either."""
        return [
            [SCRATCH] * self.image_policies[g].required(seq, tokens).start if g in self.image_policies else table
            for g, table in enumerate(tables)
        ]

    def check(self) -> None:
        """Assert that what is coming is awaited by as many as it says, and that no picture is found in part. Models
        that have the memory in common may have taken pages since this one last did."""
        self.drop_incomplete()
        found: dict[int, int] = {}
        for resident in self.page_tables.seq_pages.values():
            for place, coming in resident.pending_encodings.items():
                found[id(coming)] = found.get(id(coming), 0) + 1
                for page in coming.pages:
                    assert page in resident.tables[place[0]], f"a picture's page {page} is in no table"
        for coming in self.encodings.values():
            assert found.get(id(coming), 0) == coming.num_waiting > 0, "who needs a picture is miscounted"
        for g in self.image_policies:
            there = sum(count for (group, _), count in self.page_counts.items() if group == g)
            assert there == len(self.page_pool.index[g]), "pages of a picture are lost, or found without it"
