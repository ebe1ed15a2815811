"""The sampler: from a step's logits to its next tokens, for all rows at once and without waiting for the device.

It knows slots and their sampling parameters, and the tokens that it drew itself; it doesn't know requests, stop rules
or memory. The parameters mean what they mean in vLLM; `Sampler.sample` states the order in which they act.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.dispatch import has_kernels
from quire.kernels.forward_batch import to_device
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.protocol.seeds import branch_seed
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import DeviceSamplingParams, SeqSlice, SliceResult, SlotInit, TopLogprobs
from quire.worker.inverse_cdf import MAX_VOCAB, draw, token_weights, uniform_noise
from quire.worker.logprobs import LogprobLayout, log_normalizer, logprob_details, to_top_logprobs
from quire.worker.penalties import PhraseTable, TokenHistory
from quire.worker.pending_samples import PendingSamples, SamplingBatch
from quire.worker.sampling_kernels import Epilogue, NativeSampling, TritonSampling
from quire.worker.token_bitmasks import TokenBitmasks


@dataclass(frozen=True, slots=True)
class LogitRules:
    """What a slot's parameters do to logits, token by token. Derived from `sampling` alone, so forks share it."""

    sampling: DeviceSamplingParams
    biased_ids: np.ndarray  # token ids, and what is added to their logits: logit_bias, and -inf for one-token bad words
    biases: np.ndarray
    min_tokens_ids: np.ndarray  # token ids masked below min_tokens
    allowed_mask: Tensor | None  # [vocab] bool, on the device
    bad_word_prefixes: PhraseTable  # of bad words of several tokens, and the token that would complete each
    bad_word_last_ids: np.ndarray

    @property
    def changes_logits(self) -> bool:
        """Logits change, whatever the position; or the slot's tokens must be recorded."""
        return self.allowed_mask is not None or len(self.biased_ids) > 0 or self.sampling.needs_history

    @classmethod
    def from_sampling(
        cls, sampling: DeviceSamplingParams, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device
    ) -> LogitRules:
        bias = dict(sampling.logit_bias)
        words = [word for word in sampling.bad_word_ids if word and max(word) < vocab_size]
        bias.update((word[0], -np.inf) for word in words if len(word) == 1)
        longer = [word for word in words if len(word) > 1]
        ends = {*eos_ids, *sampling.stop_token_ids} if sampling.min_tokens else set()
        allowed = None
        if sampling.allowed_token_ids is not None:
            mask = np.zeros(vocab_size, dtype=np.bool_)
            mask[list(sampling.allowed_token_ids)] = True
            allowed = to_device(mask, device)
        return cls(
            sampling,
            np.array(list(bias), dtype=np.int64),
            np.array(list(bias.values()), dtype=np.float32),
            np.array(sorted(ends), dtype=np.int64),
            allowed,
            PhraseTable.from_phrases([word[:-1] for word in longer]),
            np.array([word[-1] for word in longer], dtype=np.int64),
        )


EPILOGUES = ("greedy", "random", "cut")
FAULT_MESSAGES = (
    "",
    "the model's logits are not finite (NaN or infinite)",
    "the request's masks leave no token to sample",
)


class Sampler:
    """Samples for `slots` slots over a vocabulary of `vocab_size`; `eos_ids` are masked while min_tokens isn't reached.

    What a row draws is a function of its own logits, parameters, tokens, seed and position: of nothing else in the
    batch, nor of the slot. The caller gives `init_slot` before the first row of a slot, in the order of the plan.
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...]) -> None:
        assert vocab_size <= MAX_VOCAB, f"a vocabulary of {vocab_size} tokens, at most {MAX_VOCAB} can be sampled"
        self.vocab_size, self.device, self.eos_ids = vocab_size, device, eos_ids
        self._kernels: TritonSampling | NativeSampling | None = None
        if device.type == "cuda":
            self._kernels = TritonSampling(vocab_size, device)
        elif has_kernels(device, torch.float32):
            self._kernels = NativeSampling()
        self._pinned_buffers: list[Tensor] = []  # host memory for results, when none are on their way there
        self._rules: dict[int, LogitRules] = {}
        self._history = TokenHistory(vocab_size, device)
        # Parameters and seeds live on the host: a step gathers its rows' and sends them in one small copy.
        self._prompt_len = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        self._num_logprobs = np.full(
            slots, -1, dtype=np.int64
        )  # alternatives of each sample; -1: no log-probabilities at all
        self._params = np.zeros((slots, 4))  # temperature (0: greedy), min_p, top_k, top_p
        self._penalties = np.zeros((slots, 3))  # repetition, frequency, presence
        self._needs_processing = np.zeros(
            slots, dtype=np.bool_
        )  # logits change before they are drawn from, or a method chooses
        self._min_tokens_until = np.zeros(slots, dtype=np.int64)  # the position before which end tokens are masked
        self._slot_epilogue = [-1] * slots  # of TAILS; -1: a draw from the logits isn't all there is
        self._min_tokens_slots: set[int] = set()  # slots that have an `_until`
        self.bitmasks = TokenBitmasks(slots, vocab_size, device)
        self._ones, self._no_logprobs = (
            np.ones(slots, dtype=np.int64),
            np.full(slots, -1, dtype=np.int64),
        )  # of a graph's rows

    def warmup_tasks(self, dtypes: Iterable[torch.dtype], max_rows: int) -> Iterator[Callable[[], None]]:
        """On a GPU: what to call, from any threads, so that kernels for up to `max_rows` rows of logits of `dtypes` are
        compiled and loaded."""
        if isinstance(self._kernels, TritonSampling):
            for dtype in dtypes:
                for rows in dict.fromkeys(min(rows, max_rows) for rows in self._kernels.kernels.REPRESENTATIVE_ROWS):
                    yield partial(self._kernels.warmup, rows, dtype)

    def init_slot(self, init: SlotInit) -> None:
        """A sequence takes a slot. Its tokens are `init.history` or, if that is empty, those of the parent's slot.

        A parent that drew several branches at once has recorded the first one: the others need their history. What a
        child inherits is shared with the parent: nothing is sent to the device anew.
        """
        slot, parent = init.slot, self._rules.get(init.parent_slot) if init.parent_slot >= 0 else None
        rules = parent
        if init.sampling is not None:
            rules = LogitRules.from_sampling(init.sampling, self.vocab_size, self.eos_ids, self.device)
        assert rules is not None, f"slot {slot} is born without sampling parameters"
        sampling = rules.sampling
        if not sampling.needs_history:
            self._history.drop(slot)
        elif init.history or parent is None:
            assert init.history, f"slot {slot} has penalties and is born without its history"
            self._history.init_slot(slot, init.history, init.prompt_len)
        else:
            self._history.fork(init.parent_slot, slot)
        self._rules[slot], self._prompt_len[slot], self._seeds[slot] = rules, init.prompt_len, init.seed % 2**63
        self._num_logprobs[slot] = (
            len(sampling.logprob_token_ids) or init.num_logprobs if init.num_logprobs >= 0 else -1
        )
        top_k = sampling.top_k if sampling.top_k < self.vocab_size else 0
        temperature = 0.0 if sampling.greedy else sampling.temperature
        self._params[slot] = (temperature, sampling.min_p, top_k, sampling.top_p)
        self._penalties[slot] = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._needs_processing[slot] = rules.changes_logits or sampling.candidates_only
        self._min_tokens_until[slot] = init.prompt_len + sampling.min_tokens if len(rules.min_tokens_ids) else 0
        (self._min_tokens_slots.add if self._min_tokens_until[slot] else self._min_tokens_slots.discard)(slot)
        self._slot_epilogue[slot] = -1
        if init.num_logprobs < 0 and not self._needs_processing[slot]:
            self._slot_epilogue[slot] = 0 if temperature == 0 else 2 if top_k > 0 or sampling.top_p < 1 else 1

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        """By kernels: what may follow the logits in a graph or on a tape of up to `max_rows` rows, by the names of
        `epilogue_for`. The result is for `from_graph`; tokens are written to `last_sampled` [slots] too."""
        assert self._kernels is not None, "graphs sample by kernels"
        tails = self._kernels.epilogues(last_sampled, max_rows)
        if isinstance(self._kernels, NativeSampling):
            tails |= {f"masked {name}": self.bitmasks.wrap_epilogue(tails[name], max_rows) for name in EPILOGUES[1:]}
        return tails

    def epilogue_for(self, slices: Sequence[SeqSlice]) -> str:
        """The tail that samples `slices`: "greedy", "random", "cut", on a CPU the latter two "masked" too; or "" where
        that takes `sample`: for rows with several draws, log-probabilities, masks, biases, penalties, a method."""
        if self.bitmasks.has_masks and not isinstance(self._kernels, NativeSampling):
            return ""
        slices = SeqSlices.from_slices(slices)
        all_of_them, slots, samples = self._slot_epilogue, slices.slots, slices.num_samples
        tails = [all_of_them[slot] for slot in slots]
        if min(tails, default=0) < 0 or samples.count(1) < len(samples):
            return ""
        if self._min_tokens_slots and any(end < self._min_tokens_until[slot] for slot, end in zip(slots, slices.ends)):
            return ""
        kind = max(tails, default=0)
        return f"masked {EPILOGUES[max(kind, 1)]}" if self.bitmasks.has_masks else EPILOGUES[kind]

    def fill_epilogue(self, slices: Sequence[SeqSlice]) -> None:
        """Before the replay of a graph or tape whose tail is neither "greedy" nor "": give it what `slices` ask for,
        and their noise. A row's first draw has the seed of its own."""
        assert self._kernels is not None, "graphs sample by kernels"
        slices = SeqSlices.from_slices(slices)
        slots, ends = np.array((slices.slots, slices.ends), dtype=np.int64)
        self._kernels.fill_epilogue(self._params[slots], uniform_noise(self._seeds[slots], ends))
        if self.bitmasks.has_masks:
            self.bitmasks.fill_epilogue(slots)

    def from_graph(self, tokens: Tensor | np.ndarray, faults: Any, slices: Sequence[SeqSlice]) -> PendingSamples:
        """The samples of `slices` from what a tail left on the device, padding at the end. They are on their way to the
        host when this returns, so the tensors may be written again by later work."""
        count = len(slices)
        one, none = self._ones[:count], self._no_logprobs[:count]
        if isinstance(tokens, np.ndarray):  # of a CPU: NumPy's views and copies cost a tenth of torch's
            copied = np.concatenate((tokens[:count], faults[:count]))
            return PendingSamples(copied[:count], copied, None, None, one, none, None)
        host, ready = self._to_host(tokens[:count], faults[:count])
        return PendingSamples(tokens[:count], host, None, ready, one, none, None)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None = None
    ) -> PendingSamples:
        """Draw from logits [R, V]. A row is (slot, position, draws): `draws` >= 1 tokens for the index `position`.

        In this order: log-probabilities are taken from the unchanged logits; then the step's masks, allowed_token_ids,
        bad words (their earlier tokens are looked for in the prompt too), min_tokens, logit_bias; repetition, frequency
        and presence penalty; greedy rows take the most likely token, of equals the lowest id; the others temperature,
        min_p, top_k, top_p, and a draw. Tokens that are equally likely are kept or cut together by min_p, top_k and
        top_p. Draw i of a row uses the seed branch_seed(seed, i). A row with a fault gets token 0 and leaves the others
        as they were. The slot's Birth.top and logprob_token_ids say which log-probabilities come along. Those of a row
        whose request has a method are what the method chooses from, so they are of the masked, biased and penalised
        logits, normalised as the unchanged ones are (transformers' order); its token is the most likely one, whatever
        its temperature. With `last_sampled` [slots], the first draw of each row is written there too.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        asked = SamplingBatch.from_rows(rows)
        if self.bitmasks.has_masks:  # at once, unless the unchanged logits are still wanted
            self.bitmasks.apply(logits, np.where(self._num_logprobs[asked.slots] < 0, asked.slots, -1))
        if self._kernels is not None:
            tokens, faults, changed = self._sample_by_kernels(self._kernels, logits, asked, rows, last_sampled)
        else:
            tokens, faults, changed = self._sample_by_torch(logits.float(), asked, rows)
            if last_sampled is not None:
                last_sampled.index_copy_(
                    0, to_device(asked.slots, self.device), self._select(tokens, asked.first_sample)
                )
        counted = [i for i, slot in enumerate(asked.slots.tolist()) if slot in self._history]
        if counted:
            slots = asked.slots[counted].tolist()
            self._history.record(slots, self._select(tokens, asked.first_sample[counted]))
        return self._pack(logits, changed, tokens, faults, asked)

    def sampling_of(self, slot: int) -> DeviceSamplingParams:
        """What the slot was born with."""
        return self._rules[slot].sampling

    def process_logits(self, logits: Tensor, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Logits [R, V] after masks, biases and penalties: new ones, or `logits` itself if no row has any of these."""
        slots = [slot for slot, _, _ in rows]
        if not (
            self._needs_processing[slots] | (self._min_tokens_until[slots] > 0) | self.bitmasks.is_masked(slots)
        ).any():
            return logits
        changed = logits
        if self.bitmasks.is_masked(slots).any():
            changed = changed.clone()
            self.bitmasks.apply(changed, np.array(slots))
        allowed = [i for i, slot in enumerate(slots) if self._rules[slot].allowed_mask is not None]
        if allowed:
            masks = torch.stack([mask for i in allowed if (mask := self._rules[slots[i]].allowed_mask) is not None])
            index = to_device(np.array(allowed), self.device)
            kept = torch.where(masks, changed.index_select(0, index), -torch.inf)
            changed = changed.index_copy(0, index, kept)
        cells, shifts = self._logit_offsets(rows)
        if cells is not None:
            changed = changed.clone() if changed is logits else changed
            changed.view(-1).scatter_add_(0, cells, shifts)
        punished = np.flatnonzero((self._penalties[slots] != (1, 0, 0)).any(1))
        if len(punished) == len(rows) and rows:
            return self._history.apply_penalties(changed, slots, self._penalties[slots])
        if len(punished):
            index, some = to_device(punished, self.device), [slots[i] for i in punished]
            part = self._history.apply_penalties(changed.index_select(0, index), some, self._penalties[some])
            changed = changed.index_copy(0, index, part)
        return changed

    def collect(self, pending: PendingSamples) -> list[SliceResult]:
        """The samples on the host, a row each and in order, once the device has drawn them: the step's one wait.

        Once for each step: what carried the results is used again.
        """
        if pending.ready_event is not None:
            pending.ready_event.synchronize()
        count, rows = len(pending.tokens), len(pending.num_samples)
        numbers = pending.host_results[: count + rows].tolist()
        if pending.ready_event is not None:
            self._pinned_buffers.append(pending.host_results)
        tokens, faults = numbers[:count], numbers[count:]
        if count == rows and pending.logprob_layouts is None and not any(faults):
            return [SliceResult(own) for own in zip(tokens)]
        widths = pending.logprob_layouts or (None,) * rows
        details = pending.details_by_layout()
        samples, start = [], 0
        for draws, top, width, fault in zip(
            pending.num_samples.tolist(), pending.num_logprobs.tolist(), widths, faults
        ):
            own = tuple(tokens[start : start + draws])
            start += draws
            tops: tuple[TopLogprobs, ...] = ()
            if width is not None:
                tops = tuple(
                    to_top_logprobs(token, next(details[width]), top, width.uses_requested_ids) for token in own
                )
            samples.append(SliceResult(own, () if fault else tops, error=FAULT_MESSAGES[fault]))
        return samples

    def _needs_processing_rows(self, batch: SamplingBatch) -> np.ndarray:
        """Which rows [R] ask for more than draws: for log-probabilities, masks, biases, penalties or a method."""
        tails = np.array([self._slot_epilogue[slot] for slot in batch.slots.tolist()])
        return (
            self.bitmasks.is_masked(batch.slots) | (tails < 0) | (batch.positions < self._min_tokens_until[batch.slots])
        )

    def _select(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        return tensor.index_select(0, to_device(index, self.device))

    def _uniforms(self, batch: SamplingBatch) -> np.ndarray:
        """The noise of each draw."""
        branch = (np.arange(len(batch.sample_to_row)) - batch.first_sample[batch.sample_to_row]).astype(np.uint64)
        seeds = branch_seed(self._seeds[batch.slots][batch.sample_to_row], branch)
        return uniform_noise(seeds, batch.positions[batch.sample_to_row])

    def _sample_by_torch(
        self, raw_logits: Tensor, batch: SamplingBatch, rows: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [D], faults [R], and logits [R, V] after masks, biases and penalties."""
        processed = self.process_logits(raw_logits, rows)
        best, tokens = processed.max(-1)
        peak = best if processed is raw_logits else raw_logits.amax(-1)
        fault = torch.where(peak.isfinite(), 2 * (best == -torch.inf).long(), 1)
        tokens, failed = self._select(tokens, batch.sample_to_row), self._select(fault, batch.sample_to_row)
        shape = self._params[batch.slots]
        random = shape[:, 0] > 0
        if random.any():
            drawn = self._draw_random_rows(processed, best, shape, batch.sample_to_row, random, self._uniforms(batch))
            places = np.flatnonzero(random[batch.sample_to_row])
            tokens = tokens.index_copy(0, to_device(places, self.device), drawn)
        return torch.where(failed == 0, tokens, 0), fault, processed

    def _sample_by_kernels(
        self,
        kernels: TritonSampling | NativeSampling,
        logits: Tensor,
        batch: SamplingBatch,
        rows: Sequence[tuple[int, int, int]],
        last_sampled: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `_sample_by_torch`, but only the logits that are `_needs_processing`, row after row, or None. Those "
        "rows are drawn again."""
        ruled, owner = self._processed_rows(batch), batch.sample_to_row
        shape = self._params[batch.slots]
        chance = self._uniforms(batch) if (shape[:, 0] > 0).any() else np.zeros(len(owner))
        first = np.where(ruled[:, None], (0, 0, 0, 1), shape)  # tells the faults of those that are ruled
        tokens, faults = kernels.draw(logits, first, owner, chance, batch.slots, last_sampled)
        some = np.flatnonzero(ruled)
        if not len(some):
            return tokens, faults, None
        places, index = np.flatnonzero(ruled[owner]), to_device(some, self.device)
        changed = self.process_logits(logits.index_select(0, index).float(), [rows[i] for i in some])
        renumbered = (np.cumsum(ruled) - 1)[owner[places]]
        drawn, empty = kernels.draw(changed, shape[some], renumbered, chance[places])
        fault = torch.where(faults.index_select(0, index) != 0, 1, 2 * empty)
        drawn = torch.where(self._select(fault, renumbered) == 0, drawn, 0)
        faults.index_copy_(0, index, fault)
        tokens.index_copy_(0, to_device(places, self.device), drawn)
        if last_sampled is not None:
            slots = to_device(batch.slots[some], self.device)
            last_sampled.index_copy_(0, slots, self._select(tokens, batch.first_sample[some]))
        return tokens, faults, changed

    def _processed_rows(self, batch: SamplingBatch) -> np.ndarray:
        kept = self.bitmasks.is_masked(batch.slots) & (self._num_logprobs[batch.slots] >= 0)
        return self._needs_processing[batch.slots] | (batch.positions < self._min_tokens_until[batch.slots]) | kept

    def _draw_random_rows(
        self,
        logits: Tensor,
        row_max: Tensor,
        params: np.ndarray,
        sample_to_row: np.ndarray,
        random: np.ndarray,
        uniforms: np.ndarray,
    ) -> Tensor:
        """The tokens of those draws whose row is `random` [R]; owner and chance [D] are given for all draws."""
        if random.all():
            return draw(token_weights(logits, row_max, params), sample_to_row, uniforms)
        rows, places = np.flatnonzero(random), np.flatnonzero(random[sample_to_row])
        weights = token_weights(self._select(logits, rows), self._select(row_max, rows), params[rows])
        return draw(weights, (np.cumsum(random) - 1)[sample_to_row[places]], uniforms[places])

    def _logit_offsets(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Tensor | None, Tensor | None]:
        """What is added to single logits, as flat indices into [R, V] and numbers; -inf bans. None if nothing is."""
        ids: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        barred: list[int] = []  # slots with bad words of several tokens
        completing: list[np.ndarray] = []
        for i, (slot, position, _) in enumerate(rows):
            rules, offset = self._rules[slot], i * self.vocab_size
            if len(rules.biased_ids):
                ids.append(rules.biased_ids + offset)
                numbers.append(rules.biases)
            if len(rules.min_tokens_ids) and position - self._prompt_len[slot] < rules.sampling.min_tokens:
                ids.append(rules.min_tokens_ids + offset)
                numbers.append(np.full(len(rules.min_tokens_ids), -np.inf, dtype=np.float32))
            if len(rules.bad_word_last_ids):
                barred.append(slot)
                completing.append(rules.bad_word_last_ids + offset)
        if not ids and not barred:
            return None, None
        cells = to_device(np.concatenate(ids + completing), self.device)
        shifts = to_device(np.concatenate([*numbers, np.zeros(0, dtype=np.float32)]), self.device)
        if barred:
            said = self._history.ends_with(barred, [self._rules[slot].bad_word_prefixes for slot in barred])
            shifts = torch.cat((shifts, torch.where(said, -torch.inf, 0.0)))
        return cells, shifts

    def _logprob_layout(self, slot: int) -> LogprobLayout | None:
        """How wide the details of a slot's row are; up to MAX_LOGPROBS all are alike, and come at once."""
        top = int(self._num_logprobs[slot])
        if top < 0:
            return None
        sampling = self._rules[slot].sampling
        if sampling.logprob_token_ids:
            return LogprobLayout.for_token_ids(sampling.logprob_token_ids)
        return LogprobLayout(sampling.candidates_only, min(max(top, MAX_LOGPROBS), self.vocab_size) if top else 0)

    def _requested_ids(self, slots: np.ndarray, width: int) -> Tensor:
        """The tokens that the requests of `slots` name, [N, width]; what is left of a row is padding."""
        ids = np.zeros((len(slots), width), dtype=np.int64)
        for row, slot in zip(ids, slots.tolist()):
            wanted = self._rules[slot].sampling.logprob_token_ids
            row[: len(wanted)] = wanted
        return to_device(ids, self.device)

    def _pack(
        self, logits: Tensor, processed_logits: Tensor | None, tokens: Tensor, faults: Tensor, batch: SamplingBatch
    ) -> PendingSamples:
        """Everything that the host will want, on its way there. `processed_logits` are the logits of all rows or, by
        kernels, of those that are ruled."""
        tops, widths, details = self._num_logprobs[batch.slots], None, None
        if (tops >= 0).any():
            widths = tuple(self._logprob_layout(slot) for slot in batch.slots.tolist())
            place = np.cumsum(self._processed_rows(batch)) - 1 if self._kernels else np.arange(len(tops))
            parts = []
            for width in sorted({width for width in widths if width is not None}):
                places = np.array(
                    [i for i, row in enumerate(batch.sample_to_row) if widths[row] == width], dtype=np.int64
                )
                rows, total, named = batch.sample_to_row[places], None, None
                own, some = self._select(tokens, places), self._select(logits, rows).float()
                if width.processed:
                    assert processed_logits is not None, "what a method chooses from is processed"
                    total, some = log_normalizer(some), self._select(processed_logits, place[rows])
                if width.uses_requested_ids:
                    named = self._requested_ids(batch.slots[rows], width.num_alternatives)
                parts.append(logprob_details(some, own, width.num_alternatives, total, named).flatten())
            details = torch.cat(parts)
            if self.device.type == "cuda":
                details = torch.empty(details.shape, dtype=details.dtype, pin_memory=True).copy_(
                    details, non_blocking=True
                )
        host, ready = self._to_host(tokens, faults)
        return PendingSamples(tokens, host, details, ready, batch.num_samples, tops, widths)

    def _to_host(self, tokens: Tensor, faults: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Both, one after the other, in host memory that `collect` takes back; and when they will be there."""
        count, rows = len(tokens), len(faults)
        if self.device.type == "cpu":
            return torch.cat((tokens, faults)), None
        host = self._pinned_buffers.pop() if self._pinned_buffers else None
        if host is None or len(host) < count + rows:
            host = torch.empty(max(2048, 2 * (count + rows)), dtype=torch.int64, pin_memory=True)
        together = tokens.untyped_storage().data_ptr() == faults.untyped_storage().data_ptr()
        if together and tokens.data_ptr() + tokens.nbytes == faults.data_ptr():
            host[: count + rows].copy_(tokens.as_strided((count + rows,), (1,)), non_blocking=True)
        else:
            host[:count].copy_(tokens, non_blocking=True)
            host[count : count + rows].copy_(faults, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return host, ready
