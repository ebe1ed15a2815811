"""The messages between the engine and the runner: for each step one StepPlan down and one StepResult up.

Immutable plain values (tuples of integers, strings and floats): they can be sent to other ranks, logged, replayed and
diffed. PagedAttention §4.6: "the scheduler first prepares the message with input token IDs ... and the block table".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.images import ImageItem

LAST_SAMPLED = -1
"""In `SeqSlice.tokens`: the slot's most recent sample, which only the device has."""
FIRST_DRAFT = -2
"""In `SeqSlice.draft_tokens`: FIRST_DRAFT - i is the i-th token, from 0, that the draft model, or the speculation head,
proposed for the slot in the slot's step before; only the device has it."""

MAX_STEP_DRAFTS = 256
"""The most draft tokens of a step. Each has logits over the whole vocabulary."""
MAX_SPLIT_TOKENS = 4
"""A draft slice of up to this many tokens is computed as rows of one token, as in decode steps."""


def max_verified_tokens(max_seqs: int, max_drafts: int) -> int:
    """Return the most tokens that slices with draft tokens have in a step: `max_drafts` draft tokens, and one more."""
    return min(max_seqs * max_drafts, MAX_STEP_DRAFTS) + (min(max_seqs, MAX_STEP_DRAFTS) if max_drafts else 0)


def max_sampled_rows(max_seqs: int, max_drafts: int) -> int:
    """Return the most rows of a step that sample: one of each sequence, and one for each draft token."""
    return max_seqs + min(max_seqs * max_drafts, MAX_STEP_DRAFTS)


class SlotInit(NamedTuple):
    """The start of a sequence in a slot (on admission, fork or swap-in), with all that the device must know of it. It
    ends the slot's previous sequence.

    With `parent_slot` >= 0 the child starts with the parent slot's sampling state, and `sampling` is None. `history` is
    the tokens so far, the first `prompt_len` of which are the prompt; only if `sampling` needs it.
    """

    slot: int
    seq_id: int
    parent_slot: int
    sampling: DeviceSamplingParams | None
    seed: int
    prompt_len: int
    history: tuple[int, ...] = ()
    num_logprobs: int = -1  # likeliest tokens to return with each sample; -1: no log-probabilities
    images: tuple[ImageItem, ...] = ()  # of its prompt, in order; a fork's too


class SeqSlice(NamedTuple):
    """The part of a step for one sequence: compute `tokens` at positions start, start + 1, ...

    `num_samples` tokens are sampled from the logits of the last position (0: none; n > 1: one for each branch to fork,
    the i-th with the seed of branch i). The log-probability of the prompt token `score_tokens[i]` after tokens[i] is
    returned. `draft_tokens` are guesses of the tokens that follow, in a slice with one sample: they are computed too,
    a token is sampled from the logits of each position, and draft tokens are accepted as far as they are equal to these
    samples. The noise of a sample depends only on its seed and position, so the accepted tokens are those that steps of
    one token would have sampled.
    """

    slot: int
    tokens: tuple[int, ...]
    start: int
    num_samples: int
    score_tokens: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] = ()


# Page operations: changes of page tables and pages, in order.


class TableWrite(NamedTuple):
    """tables[group][slot, first_page : first_page + len(pages)] = pages."""

    slot: int
    group: int
    first_page: int
    pages: tuple[int, ...]


class PageCopy(NamedTuple):
    """Copy the content of page `src` to page `dst`, for all layers of the group."""

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
    """Debug mode: fill page `page`, which is newly allocated, with NaN, so that reads before writes are noticed."""

    group: int
    page: int


class ImageEncoding(NamedTuple):
    """Encode parts first_part .. first_part + num_parts - 1 of the `image_index`-th image of the sequence in `slot`,
    before the step's slices. Parts come in order, in one or several steps; first_part = 0 discards the slot's earlier
    parts of the image.

    After the last part the image's embeddings are written, in order. Where depends on `group`:
    - a "cross" group: their keys and values; a "vision" group: the embeddings themselves. They go to the pages in the
      slot's page table from index `first_page` on, run_tokens embeddings a page;
    - -1 (`--vision-cache off`): nowhere, only this step's slices use them;
    - another group (`inside`): to its pages of keys and values that aren't written yet. The embedding of position p is
      put in the page after its token's, which has index p // run_tokens + 1 in the table (that of the first embedding
      is `first_page`), at byte p % run_tokens * row_bytes. The step that computes the position reads the embedding
      before it writes keys and values.

    The first `skip_embeds` embeddings aren't needed and aren't written, as keys and values may be in their places.
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
    """The tokens that may be sampled for `slot` in this step: `allowed` has one bit for each token, 32 in a
    little-endian word, lowest bit first. Bits after the vocabulary are 0. A slot whose slice has draft tokens has a
    mask for each position that samples, in their order."""

    slot: int
    allowed: bytes


class StepPlan(NamedTuple):
    """A step: start the new slots, do the page operations in order, then compute the slices: a tuple or, in a decoded
    plan, SeqSlices, which are equal to it. `overlapped_page_ops` are page operations to do while the step computes.
    Slots without a mask may sample any token; all masks have the same length.

    `draft_slices` are what the draft model computes after the slices, while the host processes the step's result: the
    known tokens of each, which may be none. With `num_samples` it then computes the tokens that the step has sampled
    and accepted for the slot, which follow, and proposes that many tokens after them for the slot's next slice. A
    speculation head instead computes all tokens of the slot's slice, from their hidden states, before it proposes; the
    draft slice starts after them, and has the next token if the step does not sample it."""

    new_slots: tuple[SlotInit, ...]
    page_ops: PageOps
    slices: Sequence[SeqSlice]
    overlapped_page_ops: PageOps = ()
    masks: tuple[TokenBitmask, ...] = ()
    draft_slices: Sequence[SeqSlice] = ()


class TopLogprobs(NamedTuple):
    """The log-probability of a token, its rank (1 is the most likely), and the k most likely alternatives; or, for a
    sample with logprob_token_ids (see DeviceSamplingParams), exactly these tokens, in their order."""

    token: int
    logprob: float
    rank: int
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class SliceResult(NamedTuple):
    """The result of a slice: the sampled `tokens` (one for each branch; with a draft, its accepted tokens and one
    more), `top_logprobs` for each of them if log-probabilities are wanted, and `prompt_logprobs` for each of the
    slice's score tokens. `error` is set if logits or pooled states were not finite; with a draft, those of the last
    token, which then has no `top_logprobs`.

    `pooled` [hidden], with pooling: the sum of the hidden states of the slice's tokens ("mean"), or the hidden state of
    the prompt's last token, in the slice that has it."""

    tokens: tuple[int, ...]
    top_logprobs: tuple[TopLogprobs, ...] = ()
    prompt_logprobs: tuple[TopLogprobs, ...] = ()
    error: str = ""
    pooled: tuple[float, ...] = ()


class MappingStats(NamedTuple):
    """Statistics of a runner with virtual memory since its start. `mapped_bytes`: bytes mapped for sequences now; a
    page that is mapped for several sequences counts for each. `maps` and `unmaps`: pages mapped and unmapped, counted
    in each buffer; `overlapped` of them while a step computed, which took `overlap_seconds` of the launching thread.
    Steps waited `stall_seconds` for the others."""

    mapped_bytes: int = 0
    maps: int = 0
    unmaps: int = 0
    overlapped: int = 0
    stall_seconds: float = 0.0
    overlap_seconds: float = 0.0


class RankUsage(NamedTuple):
    """The resources of a rank in a process of its own: processor seconds since its start, and memory now."""

    cpu_seconds: float
    memory_bytes: int


class StepResult(NamedTuple):
    """One SliceResult for each slice, in plan order; the step's duration in seconds; and the seconds that the device
    was idle before it, waiting for the host, while the previous step was not collected yet."""

    slice_results: tuple[SliceResult, ...]
    seconds: float
    idle_seconds: float = 0.0
