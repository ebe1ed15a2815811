"""The messages between the control plane and the data plane: one StepPlan down, one StepResult up, a step.

Immutable plain values (tuples of integers, strings and floats): they can be sent to other ranks, logged, replayed and
diffed. PagedAttention §4.6: "the scheduler first prepares the message with input token IDs ... and the block table".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.protocol.images import ImageItem

LAST_SAMPLED = -1
"""In `Row.tokens`: this slot's most recent sample, which only the device has seen."""


class DeviceSamplingParams(NamedTuple):
    """How tokens are drawn: of a request's parameters (vocabulary.params) what the data plane reads, in numbers
    and token ids only. Methods, stop strings and whatever else decides what a token means stay above."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # masked with the model's end tokens while there are fewer than min_tokens
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    candidates_only: bool = False  # a method chooses among the likeliest tokens: none is drawn
    prompt_logprobs: int = -1  # most likely tokens to return with each token to score; -1: none is scored
    logprob_token_ids: tuple[int, ...] = ()  # to return with each sample, in place of the most likely ones
    pooling: str = ""  # "mean" or "last": nothing is drawn, hidden states of the prompt are returned (Sampled.pooled)

    @property
    def greedy(self) -> bool:
        """The most likely token is chosen; no noise is drawn."""
        return self.candidates_only or self.temperature < 1e-5

    @property
    def needs_history(self) -> bool:
        """The sampler must know the tokens so far: penalties and multi-token bad words."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or any(len(word) > 1 for word in self.bad_word_ids)
        )


class SlotInit(NamedTuple):
    """A sequence gets a slot (on admission, fork or swap-in): all that the device must know of it.

    A slot's next birth is its death. With `parent_slot` >= 0 the child starts with the parent slot's sampling state,
    and `sampling` is None: it is the parent's. `history` is the tokens so far (prompt first, `prompt_len` of them), and
    given only when `sampling` needs it.
    """

    slot: int
    seq_id: int
    parent_slot: int
    sampling: DeviceSamplingParams | None
    seed: int
    prompt_len: int
    history: tuple[int, ...] = ()
    num_logprobs: int = -1  # most likely tokens to return with each sample; -1: no log-probabilities at all
    images: tuple[ImageItem, ...] = ()  # the pictures of its prompt, in order; a fork's too


class SeqSlice(NamedTuple):
    """One sequence's share of a step: compute `tokens` at positions start, start + 1, ...

    `num_samples` tokens are drawn from the logits of the last position (0: none; n > 1: one for each branch to be
    forked, the i-th with the seed of branch i). `score_tokens[i]` is a prompt token whose log-probability after
    tokens[i] is wanted. `draft_tokens` tokens were guessed to follow `tokens`: they are computed too, and as many of
    them are accepted as sampling would have drawn.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    num_samples: int
    score_tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()


# Journal entries: effects on tables and pages, in order.


class TableWrite(NamedTuple):
    """tables[group][slot, at : at + len(pages)] = pages."""

    slot: int
    group: int
    first_page: int
    pages: tuple[int, ...]


class PageCopy(NamedTuple):
    """Copy the content of page `src` to page `dst`, all layers of the group."""

    group: int
    src: int
    dst: int


class SwapOut(NamedTuple):
    """Copy page `page` to host page `host_page`."""

    group: int
    page: int
    host_page: int


class SwapIn(NamedTuple):
    """Copy host page `host_page` to page `page`."""

    group: int
    host_page: int
    page: int


class Poison(NamedTuple):
    """Debug mode: page `page` is given out anew; fill it with NaN, so that reading before writing shows."""

    group: int
    page: int


class ImageEncoding(NamedTuple):
    """Encode parts first .. first + parts - 1 of the `image_index`-th picture of the sequence in `slot`, before the
    step's rows. Parts come in order, in one step or in several ones; with first = 0 what this slot had of the picture
    is void.

    With the last part its rows are written, row 0 first; where depends on `group`. Of a "cross" group keys and values
    of the rows, of a "vision" group the rows themselves: to the pages that the slot's table names from its page
    `first_page` on, run_tokens rows a page. Group -1 (`--vision-cache off`): nowhere, they are for the rows of this
    step. Else (`inside`) they lie in pages of keys and values of the group that aren't written yet: the row of position
    p in the page behind its token's, p // run_tokens + 1 of the slot's (that of the first row is `first_page`), from
    byte p % run_tokens * row_bytes on. A row is read by the step that computes its position, before that step writes
    keys and values. The first `skip_embeds` rows aren't needed, and aren't written: there may be keys and values in
    their places.
    """

    group: int
    slot: int
    image_index: int
    first_page: int
    first_part: int
    num_parts: int
    skip_embeds: int = 0


PageOp = TableWrite | PageCopy | SwapOut | SwapIn | Poison | ImageEncoding
PageOps = tuple[PageOp, ...]


class TokenBitmask(NamedTuple):
    """What the row of `slot` may draw in this step: `allowed` has a bit a token, 32 to a little-endian word, lowest bit
    first. Bits beyond the vocabulary are 0."""

    slot: int
    allowed: bytes


class StepPlan(NamedTuple):
    """One step: births, then the journal in order, then the rows, a tuple or, of a plan that was read, arrays that are
    equal to it (vocabulary.rows). `overlapped_page_ops` is journal work to do while it computes. Rows of slots without
    one of `masks` may draw any token; all masks have one length."""

    new_slots: tuple[SlotInit, ...]
    page_ops: PageOps
    slices: Sequence[SeqSlice]
    overlapped_page_ops: PageOps = ()
    masks: tuple[TokenBitmask, ...] = ()


class TopLogprobs(NamedTuple):
    """The log-probability of one token, its rank (1 is the most likely), and the k most likely alternatives; or, beside
    a sample whose `DeviceSamplingParams` has logprob_token_ids, these and no others, in their order."""

    token: int
    logprob: float
    rank: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class SliceResult(NamedTuple):
    """What a row produced: `tokens` drawn (one a branch; of a row with a draft the run that was accepted: some of the
    draft, and one token after it), `top_logprobs` beside each when log-probabilities were asked for, and
    `prompt_logprobs`, one for each of the row's `score` tokens. `error` is set when the row's logits, or what is
    pooled, were not finite.

    `pooled` [hidden], of a row of a sequence with `pooling`: the sum of the hidden states of its tokens ("mean"), or
    that of the prompt's last one, from the row that has it."""

    tokens: tuple[int, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    error: str = ""
    pooled: tuple[float, ...] = ()


class MappingStats(NamedTuple):
    """What a runner of virtual memory did since its start: `mapped_bytes` lie in sequences' places now, a page that
    lies in several counted in each; pages mapped and unmapped, those of each buffer counted; of these `overlapped`
    while a step computed, in `overlap_seconds` seconds of whoever launched it; and the seconds that steps waited for
    the others."""

    mapped_bytes: int = 0
    maps: int = 0
    unmaps: int = 0
    overlapped: int = 0
    stall_seconds: float = 0.0
    overlap_seconds: float = 0.0


class RankUsage(NamedTuple):
    """What a rank in a process of its own uses: processor time since its start, in seconds, and memory now."""

    cpu_seconds: float
    memory_bytes: int


class StepResult(NamedTuple):
    """One Sampled a row, in plan order, the step's duration, and how long the device was idle before it though the step
    before was not collected yet: it waited for the host."""

    slice_results: tuple[SliceResult, ...]
    seconds: float
    idle_seconds: float = 0.0
