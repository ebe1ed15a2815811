"""The encoder cache: which pages hold the encoded images, what is still to be encoded, and what can be reused.

It knows neither pixels nor the encoder: an ImageEncoding among the page operations says when and where to encode. An
image is found by its key, whatever the text around it, and always as a whole: its pages are cached together and evicted
together. A sequence that needs an image which another one is encoding shares its pages, and waits until it is
encoded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from operator import add
from typing import NamedTuple, Protocol

from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import SCRATCH, PagePool
from quire.memory.policies import ImagePolicy, ImageSpan, InlineImagePolicy, LayerPolicy
from quire.memory.seq_pages import EncodingState, ImageRef, SeqPages, Tables
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import ImageEncoding, PageOp, TableWrite


class TableOwner(Protocol):
    """What an encoder cache uses of the page tables that it belongs to."""

    kv_config: KVCacheConfig
    policies: list[LayerPolicy]
    page_pool: PagePool | TwoLevelPagePool | PoolView
    seq_pages: dict[int, SeqPages]
    page_ops: list[PageOp]

    def allocate_pages(self, group: int, count: int, owner: int, slot: int = 0, at: int = 0) -> list[int]:
        """Return private pages for logical pages `at`, `at` + 1, ... of a slot."""
        ...


class ImageNeeds(NamedTuple):
    """What images need: new pages of each group; and the pages that are found, as (group, page)."""

    new_pages: list[int]
    cached_pages: list[tuple[int, int]]


def encoding_key(g: int, image: ImageItem, count: int) -> tuple[int, bytes]:
    """Return the key of an encoding of an image to `count` pages of group g: sizes differ even if image keys do not."""
    return g, image.key + count.to_bytes(4) + image.num_parts.to_bytes(4)


def page_keys(key: bytes, count: int) -> list[bytes]:
    """Return the keys of an image's pages."""
    return [key + i.to_bytes(4) for i in range(count)]


class EncoderCache:
    """The images in a memory with these tables. With `caching` they stay for other sequences. `seed` determines the
    order of eviction among images released together."""

    def __init__(self, page_tables: TableOwner, seed: int = 0, *, caching: bool = True) -> None:
        self.page_tables, self.page_pool, self.caching = page_tables, page_tables.page_pool, caching
        self.seed = seed.to_bytes(8, "little", signed=True)
        self.vision_cache = page_tables.kv_config.sight
        self.image_policies = {g: one for g, one in enumerate(page_tables.policies) if isinstance(one, ImagePolicy)}
        self.inline_policies = {
            g: one for g, one in enumerate(page_tables.policies) if isinstance(one, InlineImagePolicy)
        }
        self.encodings: dict[tuple[int, bytes], EncodingState] = {}
        self.unfinished: EncodingState | None = None  # the last one that a step left incomplete
        self.page_counts: dict[tuple[int, bytes], int] = {}  # (group, image key) -> pages, of images that can be found
        self.evicted_keys = {g: self.page_pool.track_evictions(g) for g in self.image_policies}  # of pages
        self.untaken_ops: list[tuple[ImageEncoding, EncodingState]] = []  # since page operations were taken last
        self.runs = self.parts_encoded = self.hits = 0  # images encoded, parts encoded, images found

    # Lookup and needs

    def _find_pages(self, g: int, key: bytes, count: int) -> list[int] | None:
        """Return an image's pages if all of them are present, else None."""
        index = self.page_pool.index[g]
        pages = [index[page_key] for page_key in page_keys(key, count) if page_key in index]
        return pages if len(pages) == count else None

    def _images_between(self, g: int, seq: Sequence, first: int, stop: int) -> Iterator[tuple[int, ImageSpan]]:
        """Iterate over the images with pages in [first, stop) of a table, with their indices."""
        return (
            (i, s) for i, s in enumerate(self.image_policies[g].image_spans(seq)) if first <= s.first and s.stop <= stop
        )

    def count_needs(
        self, seq: Sequence, firsts: Seq[int], stops: Seq[int], known: set[tuple[int, bytes]]
    ) -> ImageNeeds:
        """Return what images need in pages [first, stop) of each group's table; `known` ones are counted already."""
        image_needs = ImageNeeds([0] * len(stops), [])
        for g in self.image_policies:
            for _, (image, first, stop) in self._images_between(g, seq, firsts[g], stops[g]):
                key = encoding_key(g, image, stop - first)
                if key in known or key in self.encodings:
                    continue
                known.add(key)
                pages = self._find_pages(g, image.key, stop - first)
                if pages is None:
                    image_needs.new_pages[g] += stop - first
                else:
                    image_needs.cached_pages.extend((g, page) for page in pages)
        return image_needs

    def peak_pages(self, g: int, seq: Sequence, start: int, max_step_tokens: int | None = None) -> int:
        """Return the most pages that a sequence alone holds at once, of images from its token `start` on.

        Those are the pages that two steps of `max_step_tokens` tokens read, since one may not be confirmed; without
        `max_step_tokens` all pages, those of equal images once."""
        policy = self.image_policies[g]
        begin = policy.required(seq, start).start
        spans = [span for span in policy.image_spans(seq) if span.first >= begin]
        every = sum({image.key: stop - first for image, first, stop in spans}.values())
        if max_step_tokens is None:
            return every
        reach = [
            span.stop - policy.required(seq, max(span.image.start + 1 - 2 * max_step_tokens, 0)).start for span in spans
        ]
        return min(max(reach, default=0), every)

    def evict_images(self, seqs: Seq[Sequence]) -> None:
        """Evict the unused pages of these sequences' images."""
        for g, policy in self.image_policies.items():
            for image in (image for seq in seqs for image in seq.images):
                for page_key in page_keys(image.key, policy.group.num_pages(image.num_embeds)):
                    page = self.page_pool.find(g, page_key)
                    if page is not None and not self.page_pool.ref_count(g, page):
                        self.page_pool.evict(g, page)
        self.drop_incomplete()

    def reserve(self, seq: Sequence, tables: Tables, needs: list[int]) -> list[tuple[int, int]] | None:
        """Reserve needs[g] more pages for each table, and reference the image pages that are found among them.

        Return the found pages; or None, without any change, if there is no room."""
        firsts = list(map(len, tables))
        image_needs = self.count_needs(seq, firsts, list(map(add, firsts, needs)), set())
        least = [image_needs.new_pages[g] if g in self.image_policies else need for g, need in enumerate(needs)]
        cached_hits = self.page_pool.find_cached_hits(image_needs.cached_pages)
        if self.page_pool.reserve(list(map(add, least, cached_hits.num_pages)), cached_hits):
            self.incref_pages(image_needs.cached_pages)
            return image_needs.cached_pages
        for g, _ in image_needs.cached_pages:  # they may be spread over more large pages than they fill
            least[g] += 1
        if not image_needs.cached_pages or not self.page_pool.can_allocate(least):
            return None
        self.evict_images([seq])
        assert self.page_pool.reserve(least), "pages that can be allocated can't be reserved"
        return []

    # Tables

    def incref_pages(self, pages: list[tuple[int, int]]) -> None:
        """Reference pages that are about to be used, so that they are not evicted until `decref_pages`."""
        for g, page in pages:
            self.page_pool.incref(g, page)

    def decref_pages(self, pages: list[tuple[int, int]]) -> None:
        """Undo `incref_pages`: tables reference the pages now."""
        for g, page in pages:
            self.page_pool.decref(g, (page,))

    def extend_table(self, seq: Sequence, seq_pages: SeqPages, g: int, stop: int) -> None:
        """Extend a table by the pages of the next images, up to page `stop`. New pages are reserved, and found pages
        referenced, by the caller."""
        table = seq_pages.tables[g]
        at, new_pages = len(table), list[int]()
        for i, (image, first, last) in self._images_between(g, seq, at, stop):
            key = encoding_key(g, image, last - first)
            encoding, pages = self.encodings.get(key), self._find_pages(g, image.key, last - first)
            if encoding is None and pages is not None:
                self.hits += 1
            elif encoding is None:
                pages = self.page_tables.allocate_pages(g, last - first, seq_pages.owner, seq_pages.slot, first)
                encoding = self.encodings[key] = EncodingState(image.num_parts, pages)
            else:
                pages = list(encoding.pages)
            if encoding is not None:
                if encoding.num_waiting:
                    self.incref_pages([(g, page) for page in pages])
                self._wait_for(seq_pages, (g, i), encoding)
            else:
                self.incref_pages([(g, page) for page in pages])
            new_pages += pages
        table += new_pages
        self.page_tables.page_ops.append(TableWrite(seq_pages.slot, g, at, tuple(new_pages)))

    @staticmethod
    def _wait_for(seq_pages: SeqPages, image_ref: ImageRef, encoding: EncodingState) -> None:
        seq_pages.pending_encodings[image_ref] = encoding
        seq_pages.drops_at = 0  # so that `commit` is called after the next tokens
        encoding.num_waiting += 1

    def copy_waits(self, child: SeqPages, parent: SeqPages) -> None:
        """Let a fork wait for the images that its parent waits for."""
        for image_ref, encoding in parent.pending_encodings.items():
            self._wait_for(child, image_ref, encoding)

    def decref_images(self, tables: Tables, images: Seq[ImageItem]) -> Tables:
        """Release the pages of a sequence's images, and return its tables without them.

        One image is released after the other, so that they are evicted in an order by a random value of each (Jenga
        §5.3), and before the pages of the sequence's tokens."""
        left = list(tables)
        order = sorted(
            range(len(images)), key=lambda i: hashlib.sha256(images[i].key + self.seed).digest(), reverse=True
        )
        for g, policy in self.image_policies.items():
            if tables[g]:
                stops = [0]
                for image in images:
                    stops.append(stops[-1] + policy.group.num_pages(image.num_embeds))
                for i in order:
                    self.page_pool.decref(g, tables[g][stops[i] : stops[i + 1]])
                left[g] = []
        return left

    def detach(self, seq_pages: SeqPages) -> None:
        """Handle a sequence that leaves its slot. Encodings that were not taken are undone, and an image that it had
        not finished is encoded anew by another sequence that needs it."""
        self.undo_untaken(seq_pages.slot)
        for encoding in seq_pages.pending_encodings.values():
            encoding.num_waiting -= 1
            if (
                not encoding.is_complete
                and encoding.assigned_to is not None
                and encoding.assigned_to[0] == seq_pages.slot
            ):
                encoding.assigned_to, encoding.parts_done = None, 0
            if not encoding.num_waiting:
                for key in [key for key, other in self.encodings.items() if other is encoding]:
                    del self.encodings[key]
        seq_pages.pending_encodings = {}

    def drop_incomplete(self) -> None:
        """Evict or unpublish the other pages of images that have lost a page to eviction."""
        for g, evicted in self.evicted_keys.items():
            for key in dict.fromkeys(page_key[:-4] for page_key in evicted):
                for page_key in page_keys(key, self.page_counts.pop((g, key), 0)):
                    page = self.page_pool.find(g, page_key)
                    if page is None:
                        continue
                    if self.page_pool.ref_count(g, page):
                        self.page_pool.unpublish(g, page)
                    else:
                        self.page_pool.evict(g, page)
            evicted.clear()

    def forget_keys(self) -> None:
        """Forget the keys of all images. Sequences that wait for an encoding still get it; no new ones do."""
        for encoding in self.encodings.values():
            encoding.is_closed = True
        self.encodings.clear()
        self.page_counts.clear()
        for evicted in self.evicted_keys.values():
            evicted.clear()

    # Encoding

    def plan_encoding(self, seq: Sequence, seq_pages: SeqPages, end: int, max_parts: int) -> tuple[int, int]:
        """See KVMemory."""
        if self.vision_cache == "off":
            return self._plan_for_step_only(seq, seq_pages, end, max_parts)
        start, parts = seq.planned, 0
        for i, image in enumerate(seq.images):
            if image.start >= end:
                break
            needed = image.end > start
            for g, policy in self.inline_policies.items() if needed else ():
                if (g, i) not in seq_pages.pending_encodings:
                    self._wait_for(seq_pages, (g, i), EncodingState(image.num_parts))
                at, skip = image.start // policy.group.run_tokens + 1, max(start - image.start, 0)
                parts += self._plan_parts(seq_pages, (g, i), at, max_parts - parts, skip)
            for g in self.image_policies:
                if (g, i) in seq_pages.pending_encodings:
                    at = next(span.first for j, span in enumerate(self.image_policies[g].image_spans(seq)) if j == i)
                    parts += self._plan_parts(seq_pages, (g, i), at, max_parts - parts)
            if any(j == i and not encoding.is_complete for (_, j), encoding in seq_pages.pending_encodings.items()):
                return max(image.start, start), parts
        return end, parts

    def _plan_for_step_only(self, seq: Sequence, seq_pages: SeqPages, end: int, max_parts: int) -> tuple[int, int]:
        """Encode images for this step only, and store nothing.

        Images are encoded whole, and all of a prompt together if its attention is bidirectional. The first encoding of
        a step may have any number of parts; later ones stop at `max_parts` in all."""
        planned = {op.image_index for op, _ in self.untaken_ops if op.slot == seq_pages.slot}
        needed = [(i, image) for i, image in enumerate(seq.images) if image.start < end and image.end > seq.planned]
        parts = 0
        for together in [needed] if self.page_tables.kv_config.both_ways and needed else [[one] for one in needed]:
            unplanned = [(i, image) for i, image in together if i not in planned]
            more = sum(image.num_parts for _, image in unplanned)
            if self.untaken_ops and parts + more > max_parts:
                return max(together[0][1].start, seq.planned), parts
            for i, image in unplanned:
                self._append_op(
                    ImageEncoding(-1, seq_pages.slot, i, 0, 0, image.num_parts), EncodingState(image.num_parts)
                )
            parts += more
        return end, parts

    def _plan_parts(self, seq_pages: SeqPages, image_ref: ImageRef, at: int, max_parts: int, skip: int = 0) -> int:
        """Plan more parts of an image, if this sequence is the one that encodes it, and return their number."""
        encoding, (g, i) = seq_pages.pending_encodings[image_ref], image_ref
        if encoding.assigned_to is None:
            encoding.assigned_to = seq_pages.slot, i
        count = min(encoding.num_parts - encoding.parts_done, max_parts)
        if (
            encoding.assigned_to != (seq_pages.slot, i)
            or count <= 0
            or (encoding.parts_done + count < encoding.num_parts and self._is_blocked(encoding))
        ):
            return 0
        self._append_op(ImageEncoding(g, seq_pages.slot, i, at, encoding.parts_done, count, skip), encoding)
        if not encoding.is_complete:
            self.unfinished = encoding
        return count

    def _is_blocked(self, encoding: EncodingState) -> bool:
        """Return True if another image is partly encoded: a runner stores the features of one such image at a time."""
        other = self.unfinished
        return other is not None and other is not encoding and 0 < other.parts_done < other.num_parts

    def _append_op(self, op: ImageEncoding, encoding: EncodingState) -> None:
        self.page_tables.page_ops.append(op)
        self.untaken_ops.append((op, encoding))
        encoding.parts_done += op.num_parts

    def undo_untaken(self, slot: int | None = None) -> None:
        """Undo the encodings, of one slot or of all, whose page operations were not taken yet."""
        for op, encoding in [one for one in self.untaken_ops if slot in (None, one[0].slot)]:
            self.page_tables.page_ops.remove(op)
            self.untaken_ops.remove((op, encoding))
            encoding.parts_done -= op.num_parts

    def mark_taken(self) -> None:
        """Record that the page operations were taken: their images will be encoded."""
        for op, encoding in self.untaken_ops:
            self.parts_encoded += op.num_parts
            self.runs += op.first_part + op.num_parts == encoding.num_parts
        self.untaken_ops = []

    def commit(self, seq: Sequence, seq_pages: SeqPages) -> None:
        """Publish the images that the computed tokens have read: they are encoded."""
        for (g, i), encoding in list(seq_pages.pending_encodings.items()):
            image = seq.images[i]
            if not encoding.is_complete or seq.computed <= image.start:
                continue
            if g in self.inline_policies:
                if seq.computed < image.end:
                    continue
            elif not encoding.is_closed:
                encoding.is_closed = True
                if self.caching:
                    for page, page_key in zip(encoding.pages, page_keys(image.key, len(encoding.pages))):
                        self.page_pool.publish(g, page, page_key)
                    self.page_counts[g, image.key] = max(len(encoding.pages), self.page_counts.get((g, image.key), 0))
                del self.encodings[encoding_key(g, image, len(encoding.pages))]
            del seq_pages.pending_encodings[g, i]
            encoding.num_waiting -= 1

    def drop_image_tables(self, seq: Sequence, tables: Tables, tokens: int) -> Tables:
        """Return the tables without images for a sequence that continues after `tokens` tokens. Images are not swapped;
        they are looked up again when it continues."""
        return [
            [SCRATCH] * self.image_policies[g].required(seq, tokens).start if g in self.image_policies else table
            for g, table in enumerate(tables)
        ]

    def check(self) -> None:
        """Assert that encodings have the right number of waiting sequences, and that no image is found in part. Models
        that share the pool may have evicted pages since the last call."""
        self.drop_incomplete()
        waiting: dict[int, int] = {}
        for seq_pages in self.page_tables.seq_pages.values():
            for image_ref, encoding in seq_pages.pending_encodings.items():
                waiting[id(encoding)] = waiting.get(id(encoding), 0) + 1
                for page in encoding.pages:
                    assert page in seq_pages.tables[image_ref[0]], f"an image's page {page} is in no table"
        for encoding in self.encodings.values():
            assert waiting.get(id(encoding), 0) == encoding.num_waiting > 0, (
                "the sequences that wait for an image are miscounted"
            )
        for g in self.image_policies:
            there = sum(count for (group, _), count in self.page_counts.items() if group == g)
            assert there == len(self.page_pool.index[g]), "pages of an image are lost, or found without it"
