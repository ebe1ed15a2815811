"""What a layer type keeps: one small object a group of layers (Jenga §5.2, "layer-specific caching rules").

A policy says which pages a computation reads, which ones it writes, and which are worth keeping. All else follows from
that, here and in the memory: what is allocated (what is read and isn't there), copied on write (what is written and
shared), dropped (what the next token doesn't read), published and hit, and how much a sequence holds at once.
Pages here are logical: page i of a group is the i-th of a sequence's table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from typing import NamedTuple

from quire.errors import StartupError
from quire.protocol.images import ImageItem
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.sequence import Sequence

FAR = 2**40  # tokens: further than any sequence gets


class FullPolicy:
    """Full attention: every token sees all before it. Other layer types are subclasses that differ in what they say.

    `seq` is the sequence; None stands for any, and then the answer is for one that needs the most.
    """

    shrinks = False  # whether a prompt's pages change once more, and some go, when its last token is computed
    media = False  # whether the pages are of a sequence's pictures, see MediaPolicy

    def __init__(self, group: KVCacheGroup) -> None:
        self.group = group

    @property
    def unit(self) -> int:
        """A prefix can end after a multiple of so many tokens: where a page ends. 0: what the pages hold doesn't depend
        on the sequence's tokens, and they aren't found by them."""
        return self.group.run_tokens

    @property
    def border(self) -> int:
        """Behind a multiple of so many pages nothing before it is read: a prefix may end there, whatever of it is
        there. 0: there is no such place."""
        return 0

    def starts(self) -> range:
        """Tokens from FAR on, one of which is such that a step that starts with it makes a sequence hold the most."""
        return range(FAR, FAR + self.group.run_tokens)

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        """The pages that computing tokens [start, end) looks at, those that it changes among them. Later tokens never
        read earlier pages again."""
        return range(self.group.num_pages(end))

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        """The pages that it changes: they must belong to this sequence alone."""
        return range(self.group.num_full_pages(start), self.group.num_pages(end))

    def gone(self, seq: Sequence) -> int:
        """Tokens of its prompt that have no place any more once all of them are computed."""
        return 0

    def room(self, seq: Sequence, pages: int) -> int:
        """Tokens, of those that have a place, that can be computed in the first `pages` pages."""
        return self.group.tokens_in_pages(pages)

    def keeps(self, seq: Sequence, page: int) -> bool:
        """Whether a page that is full is worth finding again."""
        return True

    def required(self, seq: Sequence | None, hit: int) -> range:
        """The pages that must be there for a prefix of `hit` tokens to be used."""
        reads = self.reads(seq, hit, hit + 1)
        stop = min(self.group.num_pages(hit), reads.stop)
        return range(min(reads.start, stop), stop)

    def needed(self, first: int, last: int) -> range:
        """The pages that prefixes need which end at `first` or behind it, and at `last` at most."""
        return range(self.reads(None, first, first + 1).start, self.group.num_pages(last))


class WindowPolicy(FullPolicy):
    """Sliding-window attention: the token at p sees positions > p - window."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.window is not None, "a window has a length"
        return range(self.group.num_full_pages(self.group.first_visible(start)), self.group.num_pages(end))


class ChunkedPolicy(FullPolicy):
    """Chunked-local attention: the token at p sees positions >= p - p % chunk. Behind a chunk's border nothing before
    it is read again."""

    @property
    def border(self) -> int:
        assert self.group.chunk is not None, "a chunk has a length"
        return self.group.num_full_pages(math.lcm(self.group.chunk, self.group.run_tokens))

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.chunk is not None, "a chunk has a length"
        return range(self.group.num_full_pages(self.group.first_visible(start)), self.group.num_pages(end))

    def starts(self) -> range:
        assert self.group.chunk is not None, "a chunk has a length"
        first = self.group.first_visible(FAR) + self.group.chunk - 1  # a chunk's last token: all of the chunk is held
        return range(first, first + self.group.chunk * self.group.run_tokens, self.group.chunk)


class BudgetPolicy(FullPolicy):
    """PyramidKV: all of a prompt is there while it is computed. The step that computes its last token leaves `budget`
    tokens of it, one behind another in the first pages, and later tokens follow them: that a token is at p doesn't say
    in which page it lies. What is kept depends on all of the prompt, so no part of it can be found again."""

    shrinks = True

    @property
    def unit(self) -> int:
        return 0

    def gone(self, seq: Sequence) -> int:
        assert self.group.budget is not None, "a budget has a number"
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
    """Layers with unlike budgets in the same pages, all of which stay to the end (PagedAttention): in layers of the
    least budget later tokens lie closest to the front."""

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.budget is not None, "a budget has a number"
        gone = 0 if seq is None or end < seq.prompt_len else max(seq.prompt_len - self.group.budget, 0)
        if seq is not None and gone and start < seq.prompt_len:
            return self.reads(seq, start, end)
        return range(self.group.num_full_pages(start - gone), self.group.num_pages(end))


class ImageSpan(NamedTuple):
    """A picture, and its pages in a table: from the first one up to `stop`."""

    image: ImageItem
    first: int
    stop: int


class ImagePolicy(FullPolicy):
    """Rows that the pictures of a sequence are encoded to: pages of each picture's own, one picture's behind another's.
    They come all at once when a token needs one, found by the picture's key or encoded, and no token changes them. No
    prefix requires them: a picture that isn't found costs an encoder run. Of any sequence (None) there is none."""

    media = True

    @property
    def unit(self) -> int:
        return 0

    def image_spans(self, seq: Sequence) -> Iterator[ImageSpan]:
        """Where the pages of its pictures are."""
        first = 0
        for medium in seq.images:
            stop = first + self.group.num_pages(medium.num_embeds)
            yield ImageSpan(medium, first, stop)
            first = stop

    def first_needed_page(self, spans: list[ImageSpan], start: int) -> int:
        """The first page that a token from `start` on needs, of pictures some of which begin behind it."""
        raise NotImplementedError

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        if seq is None or not seq.images:
            return range(0)
        spans = [span for span in self.image_spans(seq) if span.image.start < end]
        return range(self.first_needed_page(spans, start), spans[-1].stop) if spans else range(0)

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(0)

    def required(self, seq: Sequence | None, hit: int) -> range:
        """None. It begins where the picture does whose pages are needed next: all of these will be looked for."""
        if seq is None or not seq.images:
            return range(0)
        begin = self.reads(seq, hit, hit + 1).start
        begin = next((span.first for span in self.image_spans(seq) if span.stop > begin), begin)
        return range(begin, begin)

    def room(self, seq: Sequence, pages: int) -> int:
        spans = self.image_spans(seq)
        return next((m.start for m, _, stop in spans if stop > pages and m.start >= seq.planned), FAR)

    def next_drop(self, seq: Sequence) -> int:
        """Computed tokens from which on fewer pages are needed than now."""
        raise NotImplementedError


class CrossPolicy(ImagePolicy):
    """Cross attention: a token sees the latest picture that begins before it or with it, and no other one."""

    def first_needed_page(self, spans: list[ImageSpan], start: int) -> int:
        return next((span.first for span in reversed(spans) if span.image.start <= start), 0)

    def next_drop(self, seq: Sequence) -> int:
        return next((medium.start for medium in seq.images if medium.start > seq.computed), FAR)


class VisionPolicy(ImagePolicy):
    """Rows that take the places of a picture's tokens: each is read once, when its token is computed."""

    def first_needed_page(self, spans: list[ImageSpan], start: int) -> int:
        for medium, first, _ in spans:
            if medium.end > start:
                return first + self.group.num_full_pages(max(start - medium.start, 0))
        return spans[-1].stop

    def next_drop(self, seq: Sequence) -> int:
        medium = next((medium for medium in seq.images if medium.end > seq.computed), None)
        if medium is None:
            return FAR
        full = self.group.num_full_pages(max(seq.computed - medium.start, 0)) + 1
        return min(medium.end, medium.start + full * self.group.run_tokens)


class InlineImagePolicy(FullPolicy):
    """Full attention whose pages hold, until they are written, the rows of a picture: each those of the page before it
    (Jenga §6.2). So while a picture is computed a page behind its last token's is there."""

    def _last_page(self, image: ImageItem) -> int:
        return (image.end - 1) // self.group.run_tokens + 1

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        pages = super().reads(seq, start, end)
        if seq is None or not seq.images:
            return pages
        behind = [self._last_page(m) + 1 for m in seq.images if m.start < end and m.end > start]
        return range(pages.start, max(pages.stop, *behind) if behind else pages.stop)

    def room(self, seq: Sequence, pages: int) -> int:
        short = (m.start for m in seq.images if m.end > seq.planned and self._last_page(m) >= pages)
        return min(super().room(seq, pages), next(short, FAR))


class StatePolicy(FullPolicy):
    """A running state, after the latest token of each run. Computing goes on from that of the token before, and leaves
    one in the page of each run that it passes through: where a run is full its page is a checkpoint, at which a prefix
    can end and computing start again (Jenga §5.3). The page of the latest token changes with every token."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(self.group.num_full_pages(max(start - 1, 0)), self.group.num_pages(end))

    def starts(self) -> range:
        first = -(-FAR // self.group.run_tokens) * self.group.run_tokens  # it goes on from the page before
        return range(first, first + 1)

    def needed(self, first: int, last: int) -> range:
        return range(max(self.group.num_full_pages(first) - 1, 0), self.group.num_full_pages(last))


LayerPolicy = FullPolicy
Policies = Mapping[str, Callable[[KVCacheGroup], LayerPolicy]]
POLICIES: Policies = {
    "full": FullPolicy, "window": WindowPolicy, "chunked": ChunkedPolicy, "budget": BudgetPolicy,
    "uniform": UniformPolicy, "state": StatePolicy, "cross": CrossPolicy, "vision": VisionPolicy,
}  # fmt: skip
"""By the kind of a group."""
ENTRY_POINT_GROUP = "quire.policies"
"""The group of entry points by which an installed package offers a policy, under the name of its kind."""


def policies_for(kinds: Iterable[str]) -> Policies:
    """Policies for groups of these kinds: ours, and of others those that installed packages offer. StartupError for a
    kind that nobody has a policy for."""
    missing = set(kinds) - set(POLICIES)
    offered = {found.name: found for found in entry_points(group=ENTRY_POINT_GROUP)} if missing else {}
    for kind in sorted(missing - set(offered)):
        raise StartupError(
            f"there is no policy for layers of the type {kind[:80]!r}",
            f"Install the package that offers it, as an entry point of the group {ENTRY_POINT_GROUP}",
        )
    return {**POLICIES, **{kind: offered[kind].load() for kind in missing}}


def drops_pages(policy: LayerPolicy) -> bool:
    """Whether pages are dropped before the sequence's end."""
    return policy.shrinks or policy.reads(None, FAR, FAR + 1).start > 0


def grows_with_length(policy: LayerPolicy) -> bool:
    """Whether a sequence needs more pages of the group as it gets longer, however long it is."""
    return policy.reads(None, 2 * FAR, 2 * FAR + 1).stop > policy.reads(None, FAR, FAR + 1).stop


def max_pages_at_once(policy: LayerPolicy, max_step_tokens: int, drop_delay: int = 0) -> int:
    """The most pages that a sequence holds, however long it is, when it grows by up to `max_step_tokens` tokens a step
    and a step may be planned before the one before it is confirmed, and pages are held `drop_delay` tokens longer than
    they are read."""
    if not drops_pages(policy):
        return FAR
    return max(
        policy.reads(None, start + max_step_tokens, start + 2 * max_step_tokens).stop
        - policy.reads(None, start - drop_delay, start + max_step_tokens).start
        for start in policy.starts()
    )


def find_contradictions(policy: LayerPolicy, max_step_tokens: int, max_pages: int) -> Iterator[str]:
    """What a policy says that can't be, of steps of one token and of `max_step_tokens` at places all along a table.
    `max_pages` as `max_pages_at_once` says."""
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
                yield f"requires {_format_range(needs)} of a prefix of {start} tokens, and reads {read} behind it"
            if later.start < reads.start:
                yield f"reads {_format_range(later)} after {step}, and of these {_format_range(reads)} alone were left"
            if later.stop - first.start > max_pages:
                yield f"holds {later.stop - first.start} pages in {step}, and {max_pages} are the most by its `starts`"
        if policy.border and (behind := policy.required(None, group.tokens_in_pages(policy.border * (start + 1)))):
            yield f"requires {_format_range(behind)} behind {start + 1} times its border of {policy.border} pages"


def _format_range(pages: range) -> str:
    return f"pages {pages.start} to {pages.stop}"


def peak_pages(policy: LayerPolicy, length: int, max_pages: int, seq: Sequence | None = None) -> int:
    """The most pages held at once by a sequence that grows to `length` tokens; `max_pages` as `max_pages_at_once` "
    "says."""
    return min(policy.reads(seq, 0, length).stop, max_pages)
