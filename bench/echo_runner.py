"""A runner that applies plans as a GPU runner must, and computes hashes instead of a model. Without torch.

The state of a position is a hash of its token and of the states that are visible there in each layer group; it is
stored at the address that the page tables give, and tokens are hashes of it. So a wrong address, a missed copy or a
stale prefix changes the output.

A draft model is imitated likewise: its states are in the groups of its layers, and each says whether the token that
is proposed there is the one that the model samples.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial

import numpy as np

from bench.echo_images import EchoImages
from bench.echo_pages import POISON, EchoPages, state_digest
from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.seeds import branch_seed
from quire.protocol.shared_host import SharedHostMemory
from quire.protocol.step_plan import (  # fmt: skip
    FIRST_DRAFT,
    LAST_SAMPLED,
    ImageEncoding,
    PageCopy,
    PageOp,
    Poison,
    SeqSlice,
    SliceResult,
    SlotInit,
    StepPlan,
    StepResult,
    SwapIn,
    SwapOut,
    TableWrite,
    TokenBitmask,
    TopLogprobs,
)
from quire.protocol.wire import PAGE_OP_CODES

CONSTANT_TOKEN = 7
DRAFT_ACCEPTANCE = 0.7  # the share of right tokens among those that the draft model proposes


def echo_state(token: int, position: int, seen: Seq[bytes]) -> int:
    """Return the state of a position from the visible states of each group."""
    return state_digest(struct.pack("<qq", token, position) + b"".join(seen))


def draw_token(state: int, seed: int, history: Seq[int] | None, vocab_size: int, mask: bytes | None = None) -> int:
    """Return a token for (state, seed), and the history if the parameters need it, that `mask` allows."""
    past = b"" if history is None else array("q", history).tobytes()
    digest = state_digest(struct.pack("<qq", state, seed) + past)
    token = digest % vocab_size
    if mask is None or mask[token // 8] >> token % 8 & 1:  # it is what is drawn, and drafted, without a mask
        return token
    allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size])
    assert len(allowed), "a mask allows no token"
    return int(allowed[digest % len(allowed)])


def fake_top(state: int, token: int, k: int, vocab_size: int, named: tuple[int, ...] = ()) -> TopLogprobs:
    """Return artificial negative log-probabilities after `state`: that of `token`, its rank, and those of the `k` best
    tokens or, if given, of `named`. They are multiples of 1/1024, so that sums are exact in any order."""
    digest = hashlib.shake_128(struct.pack("<q", state)).digest(2 * vocab_size)
    scores = np.frombuffer(digest, dtype="<u2")
    order = [int(i) for i in np.argsort(scores, kind="stable")]
    ids = named or tuple(order[:k])
    logprobs = [-(int(scores[i]) + 1) / 1024 for i in (token, *ids)]
    return TopLogprobs(token, logprobs[0], order.index(token) + 1, ids, tuple(logprobs[1:]))


def digest_of_later(tokens: Seq[int]) -> bytes:
    """Return a digest of a prompt's later tokens, for attention both ways."""
    return struct.pack("<q", state_digest(array("q", tokens).tobytes()))


def is_right_draft(draft_state: int) -> bool:
    """Return True if the draft model proposes the token that will be sampled."""
    return draft_state % 1000 < 1000 * DRAFT_ACCEPTANCE


class EchoSlot:
    """The sampling state of the sequence in a slot."""

    __slots__ = ("history", "last", "proposals", "sampling", "seed", "seq", "top")

    def __init__(self, init: SlotInit, parent: EchoSlot | None) -> None:
        sampling = init.sampling if init.sampling is not None else parent.sampling if parent is not None else None
        assert sampling is not None, f"slot {init.slot} has no sampling parameters"
        self.sampling: DeviceSamplingParams = sampling
        self.seq, self.seed, self.top = init.seq_id, init.seed, init.num_logprobs
        self.last: int | None = parent.last if parent is not None else None
        self.proposals: tuple[int, ...] = ()  # of the draft model, for the slot's next slice
        self.history: list[int] | None = None
        if sampling.needs_history:
            history = init.history or (parent.history if parent is not None else None)
            assert history, f"slot {init.slot} has penalties and no history"
            self.history = list(history)


class EchoRunner:
    """A Runner (see quire.core.runner). Plans are applied when they are collected, as on a busy device.

    With `is_constant` it does no work and returns a constant token, to measure the engine alone.
    """

    def __init__(
        self, depth: int = 1, *, vocab_size: int = 512, is_constant: bool = False,
        shared_host: SharedHostMemory | None = None,
    ) -> None:  # fmt: skip
        self.shared_host = shared_host  # where the host pages are
        self.depth, self.vocab_size, self.is_constant = depth, vocab_size, is_constant
        self.queue: deque[StepPlan] = deque()
        self.submitted = self.collected = 0
        self.op_checksum = 0  # a hash over all page operations, in order
        self.slots: dict[int, EchoSlot] = {}
        self.masks: dict[int, list[bytes]] = {}  # of the current step, one for each position that samples
        self.groups: list[EchoPages] = []
        self.geometry: KVCacheConfig | None = None
        self.part: Callable[[int, int, int], int] | None = None  # see KVCacheConfig.clip_chunk
        self.images: EchoImages | None = None
        self.both_ways = False
        self.pixels: dict[bytes, ImagePixels] = {}
        self._constant_samples = SliceResult((CONSTANT_TOKEN,)), SliceResult(())

    def bind(self, geometry: KVCacheConfig) -> None:
        """Allocate the tables and the page store."""
        self.geometry = geometry
        if self.is_constant:
            return
        cells, host = np.zeros(geometry.bytes, dtype=np.uint8), np.full(geometry.host_bytes, POISON, dtype=np.uint8)
        if self.shared_host is not None:
            host = np.frombuffer(self.shared_host.map(group.page_bytes for group in geometry.groups), dtype=np.uint8)
        self.groups = [EchoPages(group, g, cells, host, geometry.slots) for g, group in enumerate(geometry.groups)]
        self.part, self.both_ways = geometry.clip_chunk, geometry.both_ways
        self.images = EchoImages(geometry, self.groups)

    def wait_for_swaps(self) -> None:
        """See core.runner.SharingRunner. Swaps are done when their plan is collected."""

    def sleep(self, level: int) -> None:
        """See core.runner.SleepableRunner. Drop all pages."""
        assert not self.queue, "a step is in flight"
        self.groups, self.images, self.slots = [], None, {}

    def wake(self, tags: Seq[str]) -> None:
        """Allocate empty pages. There are no weights."""
        if "kv_cache" in tags and self.geometry is not None:
            self.bind(self.geometry)

    def add_image(self, pixels: ImagePixels) -> None:
        """Add an image; only its key is used."""
        self.pixels[pixels.key] = pixels

    def remove_image(self, key: bytes) -> None:
        """Remove an image."""
        self.pixels.pop(key, None)

    def submit(self, plan: StepPlan) -> int:
        """Enqueue a plan, which `collect` applies."""
        assert len(self.queue) < self.depth, f"more than {self.depth} steps are in flight"
        self.queue.append(plan)
        self.submitted += 1
        return self.submitted

    def submit_without_masks(self, plan: StepPlan) -> int:
        """Enqueue a plan whose masks follow."""
        assert not plan.masks, "a plan that waits for masks has some"
        return self.submit(plan)

    def submit_masks(self, ticket: int, masks: tuple[TokenBitmask, ...]) -> int:
        """Set the masks of the last plan."""
        assert ticket == self.submitted, "a plan was submitted after one that waits for masks"
        self.queue.append(self.queue.pop()._replace(masks=masks))
        return ticket

    def proposed_tokens(self, ticket: int) -> dict[int, tuple[int, ...]]:
        """Return the draft tokens of the only plan in flight that the draft model has proposed, by slot."""
        assert ticket == self.submitted == self.collected + 1, "a step with draft tokens is not the only one in flight"
        return {
            row.slot: self.slots[row.slot].proposals[: len(row.draft_tokens)]
            for row in self.queue[-1].slices
            if row.draft_tokens and row.draft_tokens[0] <= FIRST_DRAFT
        }

    def collect(self, ticket: int) -> StepResult:
        """Apply the oldest plan: new slots, page operations, slices, draft slices."""
        self.collected += 1
        assert ticket == self.collected, f"step {ticket} is collected out of order, {self.collected} is due"
        plan = self.queue.popleft()
        if self.is_constant:
            one, none = self._constant_samples
            return StepResult(tuple(self._constant_sample(row, one, none) for row in plan.slices), 0.0)
        for init in plan.new_slots:
            self.init_slot(init)
        for op in plan.page_ops:
            self.apply(op)
        self.masks = {}
        for mask in plan.masks:
            self.masks.setdefault(mask.slot, []).append(mask.allowed)
        # In reverse order: no slice may depend on writes of another slice of the same step.
        samples = tuple([self.compute_row(row) for row in reversed(plan.slices)][::-1])
        sampled_tokens = {row.slot: sampled.tokens for row, sampled in zip(plan.slices, samples)}
        for row in reversed(plan.draft_slices):
            self.compute_draft(row, sampled_tokens.get(row.slot, ()))
        for op in plan.overlapped_page_ops:
            self.apply(op)
        if self.images is not None:
            self.images.transient_rows.clear()
        return StepResult(samples, 0.0)

    @staticmethod
    def _constant_sample(row: SeqSlice, one: SliceResult, none: SliceResult) -> SliceResult:
        if row.num_samples == 1:
            return one
        return none if row.num_samples == 0 else SliceResult((CONSTANT_TOKEN,) * row.num_samples)

    def init_slot(self, init: SlotInit) -> None:
        """Assign a slot to a sequence; a fork starts with its parent's sampling state."""
        self.slots[init.slot] = EchoSlot(init, self.slots[init.parent_slot] if init.parent_slot >= 0 else None)
        for group in self.groups:
            group.prompt_lens[init.slot] = init.prompt_len
        if self.images is not None:
            self.images.media[init.slot] = init.images

    def apply(self, op: PageOp) -> None:
        """Apply one operation to tables and pages."""
        # A hash of integers is the same in every process.
        self.op_checksum = hash((self.op_checksum, PAGE_OP_CODES[type(op)], op))
        if isinstance(op, ImageEncoding):
            assert self.images is not None, "an image is encoded before `bind`"
            self.images.encode(op)
            return
        group = self.groups[op.group]
        if isinstance(op, TableWrite):
            group.table[op.slot, op.first_page : op.first_page + len(op.pages)] = op.pages
        elif isinstance(op, PageCopy):
            group.pages[op.dst] = group.pages[op.src]
        elif isinstance(op, SwapOut):
            group.host_pages[op.host_page - 1] = group.pages[op.page]
        elif isinstance(op, SwapIn):
            group.pages[op.page] = group.host_pages[op.host_page - 1]
            group.host_pages[op.host_page - 1] = POISON
        elif isinstance(op, Poison):
            group.pages[op.page] = POISON

    def compute_draft(self, row: SeqSlice, sampled_tokens: tuple[int, ...]) -> None:
        """Write the draft model's states of known tokens and, before proposals, of those that the step sampled for the
        slot. Then it proposes what the model would sample without a mask, or another token. Its states of proposals are
        written, and so are the model's, on which they depend: both write them again if the proposals are accepted."""
        slot, position = self.slots[row.slot], row.start
        tokens = (*row.tokens, *sampled_tokens) if row.num_samples else row.tokens
        assert sampled_tokens or not row.num_samples, f"slot {row.slot} proposes tokens after no sample"
        draft_state = 0
        for position, token in enumerate(tokens, row.start):
            assert token >= 0, f"the draft model gets the token {token} of slot {row.slot}, which is not known"
            draft_state = self._compute_state(row.slot, token, position, is_draft=True)
        known, seed = None if slot.history is None else list(slot.history), branch_seed(slot.seed, 0)
        proposals, restore_states = list[int](), self._save_states(row.slot, position, position + row.num_samples)
        for i in range(row.num_samples):
            token = proposals[-1] if i else sampled_tokens[-1]
            if i:
                draft_state = self._compute_state(row.slot, token, position + i, is_draft=True)
            state = self._compute_state(row.slot, token, position + i)
            wrong = not is_right_draft(draft_state)
            proposals.append((draw_token(state, seed, known, self.vocab_size) + wrong) % self.vocab_size)
            if known is not None:
                known.append(proposals[-1])
        restore_states(())
        slot.proposals = tuple(proposals)

    def _compute_state(
        self, slot: int, token: int, position: int, more: Seq[bytes] = (), is_draft: bool = False
    ) -> int:
        """Compute and write the state of a position, from what is visible there and `more`; with `is_draft` in the
        groups of the draft model."""
        groups = [group for group in self.groups if group.group.is_draft == is_draft]
        state = echo_state(
            token, position, [*(group.rule.read_visible(group, slot, position) for group in groups), *more]
        )
        for group in groups:
            group.rule.write(group, slot, position, token, state)
        return state

    def compute_row(self, row: SeqSlice) -> SliceResult:
        """Write a state for each position of the slice, then sample from the last one; with draft tokens from each."""
        slot, count = self.slots[row.slot], len(row.tokens)
        prompt = self.groups[0].prompt_lens[row.slot]
        is_whole_chunk = self.part is None or self.part(prompt, row.start, count) == count
        assert is_whole_chunk, f"a prompt of slot {row.slot} ends in the wrong steps"
        # Like a model, read all image embeddings before anything is written.
        image_states = []
        if self.images is not None and self.images.media[row.slot]:
            reads = range(row.start, row.start + count + len(row.draft_tokens))
            image_states = [self.images.read_visible(row.slot, position) for position in reads]
        state, scores = 0, []
        for i, token in enumerate(row.tokens):
            if token == LAST_SAMPLED:
                assert slot.last is not None, f"slot {row.slot} has no last sample"
                token = slot.last
            more = image_states[i : i + 1]
            if self.both_ways and row.start + i < prompt:
                more = [*more, digest_of_later(row.tokens[i + 1 : prompt - row.start])]
            state = self._compute_state(row.slot, token, row.start + i, more)
            if i < len(row.score_tokens):
                num_logprobs = max(slot.sampling.prompt_logprobs, 0)
                scores.append(fake_top(state, row.score_tokens[i], num_logprobs, self.vocab_size))
        states = [state] * row.num_samples
        if row.draft_tokens:
            tokens, states = self._verify(row, state, image_states)
        else:
            [mask] = self.masks.get(row.slot, [None])
            seeds = [branch_seed(slot.seed, i) for i in range(row.num_samples)]
            tokens = tuple(draw_token(state, seed, slot.history, self.vocab_size, mask) for seed in seeds)
        slot.proposals = ()
        if tokens:
            slot.last = tokens[-1] if row.draft_tokens else tokens[0]
            if slot.history is not None:
                slot.history += tokens if row.draft_tokens else tokens[:1]
        tops: tuple[TopLogprobs, ...] = ()
        if slot.top >= 0:
            named = slot.sampling.logprob_token_ids
            tops = tuple(
                fake_top(state, token, slot.top, self.vocab_size, named) for state, token in zip(states, tokens)
            )
        return SliceResult(tokens, tops, tuple(scores))

    def _verify(self, row: SeqSlice, state: int, image_states: Seq[bytes]) -> tuple[tuple[int, ...], list[int]]:
        """Compute the draft tokens of a slice whose token has `state`, and sample at all positions. Return the samples
        up to the first one that differs from its draft token, that one included, and the states of their positions."""
        slot, masks = self.slots[row.slot], self.masks.get(row.slot, [None] * (1 + len(row.draft_tokens)))
        assert row.num_samples == len(row.tokens) == 1, f"slot {row.slot} has draft tokens after a prompt"
        assert len(masks) == 1 + len(row.draft_tokens), f"slot {row.slot} has {len(masks)} masks"
        drafts, states = tuple(map(partial(self._draft_token, row), range(len(row.draft_tokens)))), [state]
        restore_states = self._save_states(row.slot, row.start + 1, row.start + 1 + len(drafts))
        for i, draft in enumerate(drafts):
            states.append(self._compute_state(row.slot, draft, row.start + 1 + i, image_states[1 + i : 2 + i]))
        history = None if slot.history is None else list(slot.history)
        seed, samples, accepted = branch_seed(slot.seed, 0), list[int](), 0
        for i, state in enumerate(states):
            samples.append(draw_token(state, seed, history, self.vocab_size, masks[i]))
            if i < len(drafts):
                accepted += accepted == i and drafts[i] == samples[i]
                if history is not None:
                    history.append(drafts[i])
        restore_states(drafts[:accepted])
        return tuple(samples[: accepted + 1]), states[: accepted + 1]

    def _draft_token(self, row: SeqSlice, i: int) -> int:
        """Return the `i`-th draft token of a slice."""
        token, proposals = row.draft_tokens[i], self.slots[row.slot].proposals
        if token >= 0:
            return token
        assert token == FIRST_DRAFT - i, f"slot {row.slot} has {token} as its draft token {i}"
        assert i < len(proposals), f"slot {row.slot} has {len(proposals)} proposals, and verifies the one after them"
        return proposals[i]

    def _save_states(self, slot: int, start: int, end: int) -> Callable[[Seq[int]], None]:
        """Return a function that restores the running states before the positions `start` to `end` of a slot, and
        advances them over the tokens that it gets."""
        groups = [group for group in self.groups if not group.group.is_draft]
        saved = [(group, group.rule.save(group, slot, start, end)) for group in groups]

        def restore(tokens: Seq[int]) -> None:
            for group, pages in saved:
                for page, content in pages.items():
                    group.pages[page] = content
                for i, token in enumerate(tokens if pages else ()):
                    group.rule.write(group, slot, start + i, token, 0)

        return restore

    def close(self) -> None:
        """Drop the queued plans."""
        self.queue.clear()
