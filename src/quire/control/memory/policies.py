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

from quire.control.request import Sequence
from quire.errors import StartupError
from quire.vocabulary.specs import Group

FAR = 2**40  # tokens: further than any sequence gets


class FullPolicy:
    """Full attention: every token sees all before it. Other layer types are subclasses that differ in what they say.

    `seq` is the sequence; None stands for any, and then the answer is for one that needs the most.
    """

    shrinks = False  # whether a prompt's pages change once more, and some go, when its last token is computed

    def __init__(self, group: Group) -> None:
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
        return range(self.group.pages(end))

    def writes(self, seq: Sequence | None, start: int, end: int) -> range:
        """The pages that it changes: they must belong to this sequence alone."""
        return range(self.group.whole(start), self.group.pages(end))

    def gone(self, seq: Sequence) -> int:
        """Tokens of its prompt that have no place any more once all of them are computed."""
        return 0

    def keeps(self, seq: Sequence, page: int) -> bool:
        """Whether a page that is full is worth finding again."""
        return True

    def required(self, seq: Sequence | None, hit: int) -> range:
        """The pages that must be there for a prefix of `hit` tokens to be used."""
        reads = self.reads(seq, hit, hit + 1)
        stop = min(self.group.pages(hit), reads.stop)
        return range(min(reads.start, stop), stop)

    def needed(self, first: int, last: int) -> range:
        """The pages that prefixes need which end at `first` or behind it, and at `last` at most."""
        return range(self.reads(None, first, first + 1).start, self.group.pages(last))


class WindowPolicy(FullPolicy):
    """Sliding-window attention: the token at p sees positions > p - window."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.window is not None, "a window has a length"
        return range(self.group.whole(self.group.oldest(start)), self.group.pages(end))


class ChunkedPolicy(FullPolicy):
    """Chunked-local attention: the token at p sees positions >= p - p % chunk. Behind a chunk's border nothing before
    it is read again."""

    @property
    def border(self) -> int:
        assert self.group.chunk is not None, "a chunk has a length"
        return self.group.whole(math.lcm(self.group.chunk, self.group.run_tokens))

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.chunk is not None, "a chunk has a length"
        return range(self.group.whole(self.group.oldest(start)), self.group.pages(end))

    def starts(self) -> range:
        assert self.group.chunk is not None, "a chunk has a length"
        first = self.group.oldest(FAR) + self.group.chunk - 1  # a chunk's last token: all of the chunk is held
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
        return range(self.group.pages(left if start >= seq.prompt_len else max(left, min(end, seq.prompt_len))))

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
        return range(self.group.whole(start - gone), self.group.pages(end))


class StatePolicy(FullPolicy):
    """A running state, after the latest token of each run. Computing goes on from that of the token before, and leaves
    one in the page of each run that it passes through: where a run is full its page is a checkpoint, at which a prefix
    can end and computing start again (Jenga §5.3). The page of the latest token changes with every token."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        return range(self.group.whole(max(start - 1, 0)), self.group.pages(end))

    def starts(self) -> range:
        first = -(-FAR // self.group.run_tokens) * self.group.run_tokens  # it goes on from the page before
        return range(first, first + 1)

    def needed(self, first: int, last: int) -> range:
        return range(max(self.group.whole(first) - 1, 0), self.group.whole(last))


LayerPolicy = FullPolicy
Policies = Mapping[str, Callable[[Group], LayerPolicy]]
POLICIES: Policies = {
    "full": FullPolicy, "window": WindowPolicy, "chunked": ChunkedPolicy, "budget": BudgetPolicy,
    "uniform": UniformPolicy, "state": StatePolicy,
}  # fmt: skip
"""By the kind of a group."""
OFFERED = "quire.policies"
"""The group of entry points by which an installed package offers a policy, under the name of its kind."""


def policies_for(kinds: Iterable[str]) -> Policies:
    """Policies for groups of these kinds: ours, and of others those that installed packages offer. StartupError for a
    kind that nobody has a policy for."""
    missing = set(kinds) - set(POLICIES)
    offered = {found.name: found for found in entry_points(group=OFFERED)} if missing else {}
    for kind in sorted(missing - set(offered)):
        raise StartupError(
            f"there is no policy for layers of the type {kind[:80]!r}",
            f"Install the package that offers it, as an entry point of the group {OFFERED}",
        )
    return {**POLICIES, **{kind: offered[kind].load() for kind in missing}}


def forgets(policy: LayerPolicy) -> bool:
    """Whether pages are dropped before the sequence's end."""
    return policy.shrinks or policy.reads(None, FAR, FAR + 1).start > 0


def grows(policy: LayerPolicy) -> bool:
    """Whether a sequence needs more pages of the group as it gets longer, however long it is."""
    return policy.reads(None, 2 * FAR, 2 * FAR + 1).stop > policy.reads(None, FAR, FAR + 1).stop


def most_at_once(policy: LayerPolicy, chunk: int, back: int = 0) -> int:
    """The most pages that a sequence holds, however long it is, when it grows by up to `chunk` tokens a step and a step
    may be planned before the one before it is confirmed, and pages are held `back` tokens longer than they are read."""
    if not forgets(policy):
        return FAR
    return max(
        policy.reads(None, start + chunk, start + 2 * chunk).stop
        - policy.reads(None, start - back, start + chunk).start
        for start in policy.starts()
    )


def faults(policy: LayerPolicy, chunk: int, most: int) -> Iterator[str]:
    """What a policy says that can't be, of steps of one token and of `chunk` at places all along a table. `most` as
    `most_at_once` says."""
    group = policy.group
    longest = group.until(group.table_width)
    spread = [int(64 * 1.2**i) + 1 for i in range(80)]
    for start in (at for at in (*range(64), *spread, longest - chunk, longest - 1) if 0 <= at < longest):
        for end in (start + 1, min(start + chunk, longest)):
            reads, writes = policy.reads(None, start, end), policy.writes(None, start, end)
            later, needs = policy.reads(None, end, end + 1), policy.required(None, start)
            first, step = policy.reads(None, start, start + 1), f"tokens {start} to {end}"
            if not 0 <= reads.start <= reads.stop <= group.table_width:
                yield f"reads {_said(reads)} for {step}, of a table of {group.table_width}"
            if writes and not (reads.start <= writes.start and writes.stop <= reads.stop):
                yield f"writes {_said(writes)} for {step}, and reads {_said(reads)}"
            if needs and not (first.start <= needs.start and needs.stop <= min(first.stop, group.pages(start))):
                yield f"requires {_said(needs)} of a prefix of {start} tokens, and reads {_said(first)} behind it"
            if later.start < reads.start:
                yield f"reads {_said(later)} after {step}, and of these {_said(reads)} alone were left"
            if later.stop - first.start > most:
                yield f"holds {later.stop - first.start} pages in {step}, and {most} are the most by its `starts`"
        if policy.border and (behind := policy.required(None, group.until(policy.border * (start + 1)))):
            yield f"requires {_said(behind)} behind {start + 1} times its border of {policy.border} pages"


def _said(pages: range) -> str:
    return f"pages {pages.start} to {pages.stop}"


def peak(policy: LayerPolicy, length: int, most: int) -> int:
    """The most pages held at once by a sequence that grows to `length` tokens; `most` as `most_at_once` says."""
    return min(policy.reads(None, 0, length).stop, most)
