"""The policies of layer types: one small object for each group of layers (Jenga §5.2, "layer-specific caching rules").

A policy says which pages a computation reads, which it writes, and which are worth caching. All else follows from that,
here and in the memory: what is allocated (read and missing), copied on write (written and shared), dropped (not read by
the next token), published and hit, and how much a sequence holds at once. Pages here are logical: page i of a group is
the i-th of a sequence's table."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from quire.errors import StartupError
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence

FAR = 2**40  # tokens: longer than any sequence


class FullPolicy:
    """Full attention: every token attends to all tokens before it. Other layer types are subclasses.

    `seq` is the sequence; None stands for any sequence, and the result is for one that needs the most."""

    shrinks = False  # True if the prompt is pruned, and its pages rewritten, when its last token is computed
    media = False  # True if the pages hold the images of a sequence, see ImagePolicy

    def __init__(self, group: KVCacheGroup) -> None:
        self.group = group

    @property
    def unit(self) -> int:
        """The tokens of a page: a prefix can end after a multiple of them. 0: the content of the pages does not depend
        on the sequence's tokens, and they are not found by them."""
        return self.group.run_tokens

    @property
    def border(self) -> int:
        """After a multiple of this number of pages no earlier page is read, so a prefix may end there whatever is
        cached of it. 0: there is no such place."""
        return 0

    def starts(self) -> range:
        """Return positions from FAR on; a step that starts at one of them makes a sequence hold the most pages."""
        return range(FAR, FAR + self.group.run_tokens)

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        """Return the pages that computing tokens [start, end) reads or writes. Later tokens read no earlier pages."""
        return range(self.group.num_pages(end))

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        """Return the pages that computing tokens [start, end) writes: they must be private to the sequence."""
        return range(self.group.num_full_pages(start), self.group.num_pages(end))

    def gone(self, seq: Sequence) -> int:
        """Return the number of prompt tokens that are removed when the whole prompt is computed."""
        return 0

    def room(self, seq: Sequence, pages: int) -> int:
        """Return how many tokens, without the removed ones, can be computed in the first `pages` pages."""
        return self.group.tokens_in_pages(pages)

    def keeps(self, seq: Sequence, page: int) -> bool:
        """Return True if a full page is worth caching."""
        return True

    def required(self, seq: Sequence | None, hit: int) -> range:
        """Return the pages that must be present to reuse a prefix of `hit` tokens."""
        reads = self.reads(seq, hit, hit + 1)
        stop = min(self.group.num_pages(hit), reads.stop)
        return range(min(reads.start, stop), stop)

    def needed(self, first: int, last: int) -> range:
        """Return the pages needed by the prefixes that end at `first` to `last` tokens."""
        return range(self.reads(None, first, first + 1).start, self.group.num_pages(last))


class WindowPolicy(FullPolicy):
    """Sliding-window attention: the token at p attends to positions > p - window."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.window is not None, "the group has no window"
        return range(self.group.num_full_pages(self.group.first_visible(start)), self.group.num_pages(end))


class ChunkedPolicy(FullPolicy):
    """Chunked-local attention: the token at p attends to positions >= p - p % chunk, and to no earlier chunk."""

    @property
    def border(self) -> int:
        assert self.group.chunk is not None, "the group has no chunk"
        return self.group.num_full_pages(math.lcm(self.group.chunk, self.group.run_tokens))

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.chunk is not None, "the group has no chunk"
        return range(self.group.num_full_pages(self.group.first_visible(start)), self.group.num_pages(end))

    def starts(self) -> range:
        assert self.group.chunk is not None, "the group has no chunk"
        first = self.group.first_visible(FAR) + self.group.chunk - 1  # a chunk's last token reads all of the chunk
        return range(first, first + self.group.chunk * self.group.run_tokens, self.group.chunk)


class BudgetPolicy(FullPolicy):
    """PyramidKV: the whole prompt is held while it is computed; then `budget` tokens of it stay.

    The step that computes the last prompt token moves the tokens that stay to the first pages, and later tokens follow
    them: a token's position does not determine its page. The choice depends on the whole prompt, so no part of it can
    be reused."""

    shrinks = True

    @property
    def unit(self) -> int:
        return 0

    def gone(self, seq: Sequence) -> int:
        assert self.group.budget is not None, "the group has no budget"
        return max(seq.prompt_len - self.group.budget, 0)

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        if seq is None:
            return super().reads(seq, start, end)
        left = end - self.gone(seq)
        return range(self.group.num_pages(left if start >= seq.prompt_len else max(left, min(end, seq.prompt_len))))

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        gone = 0 if seq is None else self.gone(seq)
        if seq is None or not gone or end < seq.prompt_len:
            return super().writes(seq, start, end)
        if start < seq.prompt_len:
            return self.reads(seq, start, end)
        return super().writes(seq, start - gone, end - gone)


class UniformPolicy(FullPolicy):
    """Layers with different budgets in the same pages, all of which stay to the end (PagedAttention). Later tokens lie
    nearest to the front in the layers with the least budget."""

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.budget is not None, "the group has no budget"
        gone = 0 if seq is None or end < seq.prompt_len else max(seq.prompt_len - self.group.budget, 0)
        if seq is not None and gone and start < seq.prompt_len:
            return self.reads(seq, start, end)
        return range(self.group.num_full_pages(start - gone), self.group.num_pages(end))


class ImageSpan(NamedTuple):
    """An image, and its pages [first, stop) in a table."""

    image: ImageItem
    first: int
    stop: int


class ImagePolicy(FullPolicy):
    """Embeddings of a sequence's images, in pages of their own, one image after another.

    All pages of an image are added when a token needs it, found by the image's key or encoded, and no token changes
    them. No prefix requires them: an image that is not found costs an encoder run. For any sequence (None) there are no
    images."""

    media = True

    @property
    def unit(self) -> int:
        return 0

    def image_spans(self, seq: Sequence) -> Iterator[ImageSpan]:
        """Iterate over the images of a sequence, with the pages of each."""
        first = 0
        for image in seq.images:
            stop = first + self.group.num_pages(image.num_embeds)
            yield ImageSpan(image, first, stop)
            first = stop

    def first_needed_page(self, spans: list[ImageSpan], start: int) -> int:
        """Return the first page that a token from `start` on needs; some images may begin after `start`."""
        raise NotImplementedError

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        if seq is None or not seq.images:
            return range(0)
        spans = [span for span in self.image_spans(seq) if span.image.start < end]
        return range(self.first_needed_page(spans, start), spans[-1].stop) if spans else range(0)

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(0)

    def required(self, seq: Sequence | None, hit: int) -> range:
        """Return an empty range at the first page of the image that is needed next, which is looked up as a whole."""
        if seq is None or not seq.images:
            return range(0)
        begin = self.reads(seq, hit, hit + 1).start
        begin = next((span.first for span in self.image_spans(seq) if span.stop > begin), begin)
        return range(begin, begin)

    def room(self, seq: Sequence, pages: int) -> int:
        spans = self.image_spans(seq)
        return next((m.start for m, _, stop in spans if stop > pages and m.start >= seq.planned), FAR)

    def next_drop(self, seq: Sequence) -> int:
        """Return the number of computed tokens at which fewer pages are needed than now."""
        raise NotImplementedError


class CrossPolicy(ImagePolicy):
    """Cross attention: a token attends to the last image that begins at or before it, and to no other."""

    def first_needed_page(self, spans: list[ImageSpan], start: int) -> int:
        return next((span.first for span in reversed(spans) if span.image.start <= start), 0)

    def next_drop(self, seq: Sequence) -> int:
        return next((image.start for image in seq.images if image.start > seq.computed), FAR)


class VisionPolicy(ImagePolicy):
    """Embeddings that replace the tokens of an image: each is read once, when its token is computed."""

    def first_needed_page(self, spans: list[ImageSpan], start: int) -> int:
        for image, first, _ in spans:
            if image.end > start:
                return first + self.group.num_full_pages(max(start - image.start, 0))
        return spans[-1].stop

    def next_drop(self, seq: Sequence) -> int:
        image = next((image for image in seq.images if image.end > seq.computed), None)
        if image is None:
            return FAR
        full = self.group.num_full_pages(max(seq.computed - image.start, 0)) + 1
        return min(image.end, image.start + full * self.group.run_tokens)


class InlineImagePolicy(FullPolicy):
    """Full attention whose pages hold, until their keys and values are written, the embeddings of an image, each page
    those of the page before it (Jenga §6.2). So while an image is computed a page after its last token's is held."""

    def _last_page(self, image: ImageItem) -> int:
        return (image.end - 1) // self.group.run_tokens + 1

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        pages = super().reads(seq, start, end)
        if seq is None or not seq.images:
            return pages
        last_pages = [self._last_page(m) + 1 for m in seq.images if m.start < end and m.end > start]
        return range(pages.start, max(pages.stop, *last_pages) if last_pages else pages.stop)

    def room(self, seq: Sequence, pages: int) -> int:
        short = (m.start for m in seq.images if m.end > seq.planned and self._last_page(m) >= pages)
        return min(super().room(seq, pages), next(short, FAR))


class StatePolicy(FullPolicy):
    """A running state: a page holds the state after the last computed token of its `page_tokens` tokens.

    Computation continues from the state of the previous token, and leaves a state in each page that it passes. A full
    page is a checkpoint: a prefix can end there, and computation restart (Jenga §5.3). The page of the latest token
    changes with every token."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(self.group.num_full_pages(max(start - 1, 0)), self.group.num_pages(end))

    def starts(self) -> range:
        first = -(-FAR // self.group.run_tokens) * self.group.run_tokens  # it reads the page before too
        return range(first, first + 1)

    def needed(self, first: int, last: int) -> range:
        return range(max(self.group.num_full_pages(first) - 1, 0), self.group.num_full_pages(last))


class DraftPolicy(FullPolicy):
    """The layers of a draft model, where sequences without `drafts` have no pages. None stands for a sequence with
    `drafts`. `make_policy` combines this class with the policy of the layers' kind."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return super().reads(seq, start, end) if seq is None or seq.uses_draft_model else range(0)

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        return super().writes(seq, start, end) if seq is None or seq.uses_draft_model else range(0)

    def room(self, seq: Sequence, pages: int) -> int:
        return super().room(seq, pages) if seq.uses_draft_model else FAR

    def required(self, seq: Sequence | None, hit: int) -> range:
        return super().required(seq, hit) if seq is None or seq.uses_draft_model else range(0)


LayerPolicy = FullPolicy
Policies = Mapping[str, Callable[[KVCacheGroup], LayerPolicy]]
POLICIES: Policies = {
    "full": FullPolicy, "window": WindowPolicy, "chunked": ChunkedPolicy, "budget": BudgetPolicy,
    "uniform": UniformPolicy, "state": StatePolicy, "cross": CrossPolicy, "vision": VisionPolicy,
}  # fmt: skip
"""The policies by the kind of a group."""
ENTRY_POINT_GROUP = "quire.policies"
"""The group of entry points by which an installed package provides a policy; its name is the kind."""


def policies_for(kinds: Iterable[str]) -> Policies:
    """Return the policies for groups of these kinds: the built-in ones, and those of installed packages. StartupError
    for a kind without a policy."""
    missing = set(kinds) - set(POLICIES)
    offered = {found.name: found for found in entry_points(group=ENTRY_POINT_GROUP)} if missing else {}
    for kind in sorted(missing - set(offered)):
        raise StartupError(
            f"there is no policy for layers of the type {kind[:80]!r}",
            f"Install the package that offers it, as an entry point of the group {ENTRY_POINT_GROUP}",
        )
    return {**POLICIES, **{kind: offered[kind].load() for kind in missing}}


def make_policy(policies: Policies, group: KVCacheGroup) -> LayerPolicy:
    """Return the policy of a group's kind; for a draft model's layers it inherits from DraftPolicy, too."""
    policy = policies[group.kind](group)
    if not group.is_draft:
        return policy
    kind: type[LayerPolicy] = type(f"Draft{type(policy).__name__}", (DraftPolicy, type(policy)), {})
    return kind(group)


def drops_pages(policy: LayerPolicy) -> bool:
    """Return True if pages are dropped before the sequence's end."""
    return policy.shrinks or policy.reads(None, FAR, FAR + 1).start > 0


def grows_with_length(policy: LayerPolicy) -> bool:
    """Return True if a sequence needs more pages as it grows, without a bound."""
    return policy.reads(None, 2 * FAR, 2 * FAR + 1).stop > policy.reads(None, FAR, FAR + 1).stop


def max_pages_at_once(policy: LayerPolicy, max_step_tokens: int, drop_delay: int = 0) -> int:
    """Return the most pages that a sequence of any length holds.

    It grows by up to `max_step_tokens` tokens in a step, a step may be planned before the previous one is confirmed,
    and pages are held `drop_delay` tokens longer than they are read."""
    if not drops_pages(policy):
        return FAR
    return max(
        policy.reads(None, start + max_step_tokens, start + 2 * max_step_tokens).stop
        - policy.reads(None, start - drop_delay, start + max_step_tokens).start
        for start in policy.starts()
    )


def find_contradictions(policy: LayerPolicy, max_step_tokens: int, max_pages: int) -> Iterator[str]:
    """Yield the contradictions in a policy, for steps of one and of `max_step_tokens` tokens all along a table.
    `max_pages` is the result of `max_pages_at_once`."""
    group = policy.group
    longest = group.tokens_in_pages(group.table_width)
    spread = [int(64 * 1.2**i) + 1 for i in range(80)]
    for start in (at for at in (*range(64), *spread, longest - max_step_tokens, longest - 1) if 0 <= at < longest):
        for end in (start + 1, min(start + max_step_tokens, longest)):
            reads, writes = policy.reads(None, start, end), policy.writes(None, start, end)
            later, needs = policy.reads(None, end, end + 1), policy.required(None, start)
            first, step = policy.reads(None, start, start + 1), f"tokens {start} to {end}"
            if not 0 <= reads.start <= reads.stop <= group.table_width:
                yield f"reads {_format_range(reads)} for {step}, of a table of {group.table_width}"
            if writes and not (reads.start <= writes.start and writes.stop <= reads.stop):
                yield f"writes {_format_range(writes)} for {step}, and reads {_format_range(reads)}"
            if needs and not (first.start <= needs.start and needs.stop <= min(first.stop, group.num_pages(start))):
                read = _format_range(first)
                yield f"requires {_format_range(needs)} of a prefix of {start} tokens, and reads {read} after it"
            if later.start < reads.start:
                yield f"reads {_format_range(later)} after {step}, when only {_format_range(reads)} are held"
            if later.stop - first.start > max_pages:
                yield f"holds {later.stop - first.start} pages in {step}, and {max_pages} are the most by its `starts`"
        if policy.border and (
            after_border := policy.required(None, group.tokens_in_pages(policy.border * (start + 1)))
        ):
            yield f"requires {_format_range(after_border)} after {start + 1} times its border of {policy.border} pages"


def _format_range(pages: range) -> str:
    return f"pages {pages.start} to {pages.stop}"


def peak_pages(policy: LayerPolicy, length: int, max_pages: int, seq: Sequence | None = None) -> int:
    """Return the most pages held at once by a sequence that grows to `length` tokens; see `max_pages_at_once`."""
    return min(policy.reads(seq, 0, length).stop, max_pages)
