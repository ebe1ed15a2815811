"""What a layer type keeps: one small object a group of layers (Jenga §5.2, "layer-specific caching rules").

A policy says which pages a computation reads, which ones it writes, and which are worth keeping. All else follows from
that, here and in the memory: what is allocated (what is read and isn't there), copied on write (what is written and
shared), dropped (what the next token doesn't read), published and hit, and how much a sequence holds at once.
Pages here are logical: page i of a group is the i-th of a sequence's table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from quire.control.request import Sequence
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


class WindowPolicy(FullPolicy):
    """Sliding-window attention: the token at p sees positions > p - window."""

    def reads(self, seq: Sequence | None, start: int, end: int) -> range:
        assert self.group.window is not None, "a window has a length"
        return range(self.group.whole(max(0, start - self.group.window + 1)), self.group.pages(end))


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


LayerPolicy = FullPolicy
Policies = Mapping[str, Callable[[Group], LayerPolicy]]
POLICIES: Policies = {"full": FullPolicy, "window": WindowPolicy, "budget": BudgetPolicy, "uniform": UniformPolicy}
"""By the kind of a group."""


def forgets(policy: LayerPolicy) -> bool:
    """Whether pages are dropped before the sequence's end."""
    return policy.shrinks or policy.reads(None, FAR, FAR + 1).start > 0


def grows(policy: LayerPolicy) -> bool:
    """Whether a sequence needs more pages of the group as it gets longer, however long it is."""
    return policy.reads(None, 2 * FAR, 2 * FAR + 1).stop > policy.reads(None, FAR, FAR + 1).stop


def most_at_once(policy: LayerPolicy, chunk: int) -> int:
    """The most pages that a sequence holds, however long it is, when it grows by up to `chunk` tokens a step and a step
    may be planned before the one before it is confirmed."""
    if not forgets(policy):
        return FAR
    ends = range(FAR, FAR + policy.group.run_tokens)
    return max(
        policy.reads(None, end - chunk, end).stop - policy.reads(None, end - 2 * chunk, end - chunk).start
        for end in ends
    )


def peak(policy: LayerPolicy, length: int, most: int) -> int:
    """The most pages held at once by a sequence that grows to `length` tokens; `most` as `most_at_once` says."""
    return min(policy.reads(None, 0, length).stop, most)
