"""The sampler turns a step's logits into its next tokens, for all rows at once and without waiting for the device.

It has the sampling parameters and token histories of slots, and does not depend on requests, stop rules or memory. The
parameters mean the same as in vLLM; `Sampler.sample` defines the order in which they act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.rows import has_kernels
from quire.kernels.forward_batch import to_device
from quire.protocol.device_params import DeviceSamplingParams
from quire.protocol.sampling_params import MAX_LOGPROBS
from quire.protocol.seeds import branch_seed
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, TokenBitmask, TopLogprobs
from quire.worker.gumbel import MAX_VOCAB, best_scores, keep_tokens, truncates
from quire.worker.logprobs import LogprobLayout, log_normalizer, logprob_details, to_top_logprobs
from quire.worker.penalties import PhraseTable, TokenHistory
from quire.worker.pending_samples import PendingSamples, SamplingBatch
from quire.worker.sampling_kernels import Epilogue, NativeSampling, TritonSampling
from quire.worker.token_bitmasks import TokenBitmasks

EPILOGUES = ("greedy", "random", "cut")
FAULT_MESSAGES = (
    "",
    "the model's logits are not finite (NaN or infinite)",
    "the request's masks leave no token to sample",
)


@dataclass(frozen=True, slots=True)
class LogitRules:
    """A slot's changes to logits of single tokens. Derived from `sampling` alone, so forks share it."""

    sampling: DeviceSamplingParams
    biased_ids: np.ndarray  # token ids with a logit_bias, or that are one-token bad words
    biases: np.ndarray  # float32, added to their logits; -inf for bad words
    min_tokens_ids: np.ndarray  # token ids masked below min_tokens
    allowed_mask: Tensor | None  # [vocab] bool, on the device
    bad_word_prefixes: PhraseTable  # of bad words of several tokens
    bad_word_last_ids: np.ndarray  # the tokens that complete them

    @property
    def changes_logits(self) -> bool:
        """True if logits change at every position, or the slot's tokens must be recorded."""
        return self.allowed_mask is not None or len(self.biased_ids) > 0 or self.sampling.needs_history

    @classmethod
    def from_sampling(
        cls, sampling: DeviceSamplingParams, vocab_size: int, eos_ids: tuple[int, ...], device: torch.device
    ) -> LogitRules:
        bias = dict(sampling.logit_bias)
        words = [word for word in sampling.bad_word_ids if word and max(word) < vocab_size]
        bias.update((word[0], -np.inf) for word in words if len(word) == 1)
        phrases = [word for word in words if len(word) > 1]
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
            PhraseTable.from_phrases([word[:-1] for word in phrases]),
            np.array([word[-1] for word in phrases], dtype=np.int64),
        )


class Sampler:
    """Samples for `slots` slots over a vocabulary of `vocab_size`; `eos_ids` are masked until min_tokens is reached.

    The sample of a row is a function of its own logits, parameters, tokens, seed and position, not of the other rows
    of the batch or the slot. Call `init_slot` before the first row of a slot, in the order of the plan. A slot may have
    up to `max_rows` rows in a step, at consecutive positions, which verify draft tokens. A slot's history has the
    sample of a position until a row of the slot has this position again: samples after a rejected token are replaced.
    """

    def __init__(
        self, slots: int, vocab_size: int, device: torch.device, eos_ids: tuple[int, ...], max_rows: int = 1
    ) -> None:
        assert vocab_size <= MAX_VOCAB, f"a vocabulary of {vocab_size} tokens, at most {MAX_VOCAB} can be sampled"
        self.vocab_size, self.device, self.eos_ids = vocab_size, device, eos_ids
        self._kernels: TritonSampling | NativeSampling | None = None
        if device.type == "cuda":
            self._kernels = TritonSampling(vocab_size, device)
        elif has_kernels(device, torch.float32):
            self._kernels = NativeSampling()
        self._pinned_buffers: list[Tensor] = []  # host memory for results that is not in use
        self._rules: dict[int, LogitRules] = {}
        self._history = TokenHistory(vocab_size, device)
        # Parameters and seeds are on the host: a step gathers those of its rows and uploads them in one small copy.
        self._prompt_len = np.zeros(slots, dtype=np.int64)
        self._seeds = np.zeros(slots, dtype=np.uint64)
        # Alternatives of each sample; -1: no log-probabilities at all.
        self._num_logprobs = np.full(slots, -1, dtype=np.int64)
        self._params = np.zeros((slots, 4))  # temperature (0: greedy), min_p, top_k, top_p
        self._penalties = np.zeros((slots, 3))  # repetition, frequency, presence
        # Logits change before sampling, or a decoding method chooses the token.
        self._needs_processing = np.zeros(slots, dtype=np.bool_)
        self._min_tokens_until = np.zeros(slots, dtype=np.int64)  # the position before which end tokens are masked
        self._min_tokens_slots: set[int] = set()  # slots with such a position
        self._slot_epilogue = [-1] * slots  # index in EPILOGUES; -1: an epilogue cannot sample this slot
        self.bitmasks = TokenBitmasks(slots, vocab_size, device, max_rows)
        # `num_samples` and `num_logprobs` of rows that an epilogue samples.
        rows = max_rows * slots
        self._ones, self._no_logprobs = np.ones(rows, dtype=np.int64), np.full(rows, -1, dtype=np.int64)

    def warmup_tasks(self, dtypes: Iterable[torch.dtype], max_rows: int) -> Iterator[Callable[[], None]]:
        """On a GPU, yield functions that compile and load the kernels for up to `max_rows` rows of logits of `dtypes`.
        They may be called in any threads."""
        if isinstance(self._kernels, TritonSampling):
            for dtype in dtypes:
                for rows in dict.fromkeys(min(rows, max_rows) for rows in self._kernels.kernels.REPRESENTATIVE_ROWS):
                    yield partial(self._kernels.warmup, rows, dtype)

    def init_slot(self, init: SlotInit) -> None:
        """Assign a slot to a sequence. Its tokens are `init.history` or, if that is empty, those of the parent's slot.

        A parent that sampled several branches at once has recorded only the first one: the others need their history.
        A child shares what it inherits with the parent: nothing is uploaded again.
        """
        slot, parent = init.slot, self._rules.get(init.parent_slot) if init.parent_slot >= 0 else None
        rules = parent
        if init.sampling is not None:
            rules = LogitRules.from_sampling(init.sampling, self.vocab_size, self.eos_ids, self.device)
        assert rules is not None, f"slot {slot} has no sampling parameters"
        sampling = rules.sampling
        if not sampling.needs_history:
            self._history.drop(slot)
        elif init.history or parent is None:
            assert init.history, f"slot {slot} has penalties and no history"
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
            self._slot_epilogue[slot] = (
                0 if temperature == 0 else 2 if truncates(self._params[slot : slot + 1])[0] else 1
            )

    def sampling_of(self, slot: int) -> DeviceSamplingParams:
        """Return the sampling parameters of a slot."""
        return self._rules[slot].sampling

    def set_bitmasks(self, bitmasks: Sequence[TokenBitmask], slices: Sequence[SeqSlice]) -> None:
        """Set the masks of the rows of a step's `slices`; they hold until the next call."""
        self.bitmasks.set_bitmasks(bitmasks, slices)

    def sample(
        self, logits: Tensor, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None = None
    ) -> PendingSamples:
        """Sample from logits [R, V]. A row is (slot, position, count): `count` >= 1 tokens for the index `position`.

        The order: log-probabilities are taken from the unchanged logits; then the step's masks, allowed_token_ids, bad
        words (their earlier tokens may be in the prompt), min_tokens, logit_bias; repetition, frequency and presence
        penalty. Greedy rows take the most likely token, of equal ones the lowest id; the others apply temperature,
        min_p, top_k and top_p, and draw. min_p, top_k and top_p keep or cut equally likely tokens together. Sample i of
        a row uses the seed branch_seed(seed, i). A row with a fault gets token 0 and does not affect the others.

        The slot's SlotInit.num_logprobs and logprob_token_ids define which log-probabilities are returned. A row whose
        request has a decoding method returns those from which the method chooses: of the masked, biased and penalised
        logits, normalised like the unchanged ones (transformers' order). Its token is the most likely one at any
        temperature. With `last_sampled` [slots], the first sample of each row is also written there.
        """
        assert logits.shape == (len(rows), self.vocab_size), f"{tuple(logits.shape)} logits for {len(rows)} rows"
        batch = SamplingBatch.from_rows(rows)
        if self.bitmasks.has_masks:  # in place, except rows whose log-probabilities need the unchanged logits
            slots = np.where(self._num_logprobs[batch.slots] < 0, batch.slots, -1)
            self.bitmasks.apply(logits, slots, batch.positions)
        rounds = self._split_rounds(rows)
        if len(rounds) == 1:
            tokens, faults, changed = self._sample_round(logits, batch, rows, last_sampled)
            return self._pack(logits, changed, tokens, faults, batch)
        results = []
        for part in rounds:
            part_rows = [rows[i] for i in part]
            part_batch, part_logits = SamplingBatch.from_rows(part_rows), self._select(logits, np.array(part))
            results.append(self._sample_round(part_logits, part_batch, part_rows, last_sampled))

        def merge(parts: list[Tensor], places: np.ndarray) -> Tensor:
            return self._select(torch.cat(parts), np.argsort(places))

        row_order = np.concatenate(rounds)
        sample_order = np.concatenate([np.flatnonzero(np.isin(batch.sample_to_row, part)) for part in rounds])
        changed_order = row_order if self._kernels is None else row_order[self._processed_rows(batch)[row_order]]
        tokens, faults = merge([x for x, _, _ in results], sample_order), merge([x for _, x, _ in results], row_order)
        changed = merge([x for _, _, x in results if x is not None], changed_order)
        return self._pack(logits, changed, tokens, faults, batch)

    def _split_rounds(self, rows: Sequence[tuple[int, int, int]]) -> list[list[int]]:
        """Return the indices of the rows in rounds, to be sampled one after another: rows of one slot with a history
        are in different rounds. Drop what these slots recorded for the positions of their rows."""
        first_positions: dict[int, int] = {}
        num_seen: Counter[int] = Counter()
        rounds: list[list[int]] = [[]]
        for i, (slot, position, _) in enumerate(rows):
            number = 0
            if slot in self._history:
                first_positions.setdefault(slot, position)
                number = num_seen[slot]
                num_seen[slot] += 1
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(i)
        self._history.truncate(first_positions)
        return rounds

    def _sample_round(
        self, logits: Tensor, batch: SamplingBatch, rows: Sequence[tuple[int, int, int]], last_sampled: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample rows and record the tokens of slots with a history. Return tokens [D], faults [R], and logits after
        masks, biases and penalties: with kernels of `_processed_rows`, else of all rows."""
        changed: Tensor | None
        if self._kernels is not None:
            tokens, faults, changed = self._sample_by_kernels(self._kernels, logits, batch, rows, last_sampled)
        else:
            tokens, faults, changed = self._sample_by_torch(logits.float(), batch, rows)
            if last_sampled is not None:
                slots = to_device(batch.slots, self.device)
                last_sampled.index_copy_(0, slots, self._select(tokens, batch.first_sample))
        recorded = [i for i, slot in enumerate(batch.slots.tolist()) if slot in self._history]
        if recorded:
            recorded_tokens = self._select(tokens, batch.first_sample[recorded])
            self._history.record(batch.slots[recorded].tolist(), recorded_tokens)
        return tokens, faults, changed

    def _sample_by_kernels(
        self,
        kernels: TritonSampling | NativeSampling,
        logits: Tensor,
        batch: SamplingBatch,
        rows: Sequence[tuple[int, int, int]],
        last_sampled: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Do the same as `_sample_by_torch`, but return processed logits only of `_processed_rows`, or None. All rows
        are sampled once, and these rows a second time from their processed logits."""
        processed, sample_to_row = self._processed_rows(batch), batch.sample_to_row
        params = self._params[batch.slots]
        seeds, positions = self._sample_seeds(batch), batch.positions[sample_to_row]
        first_params = np.where(processed[:, None], (0, 0, 0, 1), params)  # greedy: only the faults are needed
        tokens, faults = kernels.draw(logits, first_params, sample_to_row, seeds, positions, batch.slots, last_sampled)
        row_indices = np.flatnonzero(processed).tolist()
        if not row_indices:
            return tokens, faults, None
        places, index = np.flatnonzero(processed[sample_to_row]), to_device(np.array(row_indices), self.device)
        changed = self.process_logits(logits.index_select(0, index).float(), [rows[i] for i in row_indices])
        renumbered = (np.cumsum(processed) - 1)[sample_to_row[places]]
        drawn, empty = kernels.draw(changed, params[row_indices], renumbered, seeds[places], positions[places])
        fault = torch.where(faults.index_select(0, index) != 0, 1, 2 * empty)
        drawn = torch.where(self._select(fault, renumbered) == 0, drawn, 0)
        faults.index_copy_(0, index, fault)
        tokens.index_copy_(0, to_device(places, self.device), drawn)
        if last_sampled is not None:
            slots = to_device(batch.slots[row_indices], self.device)
            last_sampled.index_copy_(0, slots, self._select(tokens, batch.first_sample[row_indices]))
        return tokens, faults, changed

    def _sample_by_torch(
        self, raw_logits: Tensor, batch: SamplingBatch, rows: Sequence[tuple[int, int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens [D], faults [R], and logits [R, V] after masks, biases and penalties."""
        processed = self.process_logits(raw_logits, rows)
        best, tokens = processed.max(-1)
        peak = best if processed is raw_logits else raw_logits.amax(-1)
        fault = torch.where(peak.isfinite(), 2 * (best == -torch.inf).long(), 1)
        tokens, failed = self._select(tokens, batch.sample_to_row), self._select(fault, batch.sample_to_row)
        params = self._params[batch.slots]
        is_random = params[:, 0] > 0
        if is_random.any():
            drawn = self._draw_random_rows(processed, best, batch, is_random)
            places = np.flatnonzero(is_random[batch.sample_to_row])
            tokens = tokens.index_copy(0, to_device(places, self.device), drawn)
        return torch.where(failed == 0, tokens, 0), fault, processed

    def _draw_random_rows(self, logits: Tensor, row_max: Tensor, batch: SamplingBatch, random: np.ndarray) -> Tensor:
        """Return the tokens of the samples whose row is `random` [R]."""
        rows, places = np.flatnonzero(random), np.flatnonzero(random[batch.sample_to_row])
        params = self._params[batch.slots[rows]]
        kept = keep_tokens(self._select(logits, rows), self._select(row_max, rows), params)
        of_rows = batch.sample_to_row[places]
        return best_scores(
            kept, params[:, 0], (np.cumsum(random) - 1)[of_rows], self._sample_seeds(batch)[places],
            batch.positions[of_rows],
        )[1]  # fmt: skip

    def _needs_processing_rows(self, batch: SamplingBatch) -> np.ndarray:
        """Return for each row [R] whether it needs more than sampling: log-probabilities, masks, biases, penalties or a
        decoding method."""
        epilogues = np.array([self._slot_epilogue[slot] for slot in batch.slots.tolist()])
        below_min_tokens = batch.positions < self._min_tokens_until[batch.slots]
        needs: np.ndarray = self.bitmasks.is_masked(batch.slots) | (epilogues < 0) | below_min_tokens
        return needs

    def _processed_rows(self, batch: SamplingBatch) -> np.ndarray:
        """Return for each row [R] if it is sampled from processed logits. Other masked rows were masked in place."""
        masked = self.bitmasks.is_masked(batch.slots) & (self._num_logprobs[batch.slots] >= 0)
        below_min_tokens = batch.positions < self._min_tokens_until[batch.slots]
        processed: np.ndarray = self._needs_processing[batch.slots] | below_min_tokens | masked
        return processed

    def process_logits(self, logits: Tensor, rows: Sequence[tuple[int, int, int]]) -> Tensor:
        """Return logits [R, V] after masks, biases and penalties; `logits` itself if no row has any of these."""
        slots, positions = [slot for slot, _, _ in rows], [position for _, position, _ in rows]
        masked = self.bitmasks.is_masked(slots)
        if not (self._needs_processing[slots] | (self._min_tokens_until[slots] > 0) | masked).any():
            return logits
        changed = logits
        if masked.any():
            changed = changed.clone()
            self.bitmasks.apply(changed, np.array(slots), np.array(positions))
        allowed = [i for i, slot in enumerate(slots) if self._rules[slot].allowed_mask is not None]
        if allowed:
            masks = torch.stack([mask for i in allowed if (mask := self._rules[slots[i]].allowed_mask) is not None])
            index = to_device(np.array(allowed), self.device)
            allowed_logits = torch.where(masks, changed.index_select(0, index), -torch.inf)
            changed = changed.index_copy(0, index, allowed_logits)
        if (offsets := self._logit_offsets(rows)) is not None:
            changed = changed.clone() if changed is logits else changed
            changed.view(-1).scatter_add_(0, *offsets)
        penalised = np.flatnonzero((self._penalties[slots] != (1, 0, 0)).any(1))
        if len(penalised) == len(rows) and rows:
            return self._history.apply_penalties(changed, slots, self._penalties[slots])
        if len(penalised):
            index, part_slots = to_device(penalised, self.device), [slots[i] for i in penalised]
            part = changed.index_select(0, index)
            part = self._history.apply_penalties(part, part_slots, self._penalties[part_slots])
            changed = changed.index_copy(0, index, part)
        return changed

    def _logit_offsets(self, rows: Sequence[tuple[int, int, int]]) -> tuple[Tensor, Tensor] | None:
        """Return flat indices into logits [R, V] and the values to add to them, -inf for banned tokens; or None."""
        indices: list[np.ndarray] = []
        values: list[np.ndarray] = []
        phrase_slots: list[int] = []  # slots with bad words of several tokens
        phrase_indices: list[np.ndarray] = []
        for i, (slot, position, _) in enumerate(rows):
            rules, offset = self._rules[slot], i * self.vocab_size
            if len(rules.biased_ids):
                indices.append(rules.biased_ids + offset)
                values.append(rules.biases)
            if len(rules.min_tokens_ids) and position - self._prompt_len[slot] < rules.sampling.min_tokens:
                indices.append(rules.min_tokens_ids + offset)
                values.append(np.full(len(rules.min_tokens_ids), -np.inf, dtype=np.float32))
            if len(rules.bad_word_last_ids):
                phrase_slots.append(slot)
                phrase_indices.append(rules.bad_word_last_ids + offset)
        if not indices and not phrase_slots:
            return None
        cells = to_device(np.concatenate(indices + phrase_indices), self.device)
        offsets = to_device(np.concatenate([*values, np.zeros(0, dtype=np.float32)]), self.device)
        if phrase_slots:
            prefixes = [self._rules[slot].bad_word_prefixes for slot in phrase_slots]
            matches = self._history.ends_with(phrase_slots, prefixes)
            offsets = torch.cat((offsets, torch.where(matches, -torch.inf, 0.0)))
        return cells, offsets

    def _pack(
        self, logits: Tensor, processed_logits: Tensor | None, tokens: Tensor, faults: Tensor, batch: SamplingBatch
    ) -> PendingSamples:
        """Enqueue the copy of a step's results to the host. `processed_logits` are those of all rows or, with sampling
        kernels, of `_processed_rows`."""
        num_logprobs, layouts, details = self._num_logprobs[batch.slots], None, None
        if (num_logprobs >= 0).any():
            layouts = tuple(self._logprob_layout(slot) for slot in batch.slots.tolist())
            details = self._logprob_details(logits, processed_logits, tokens, batch, layouts)
            if self.device.type == "cuda":
                pinned = torch.empty(details.shape, dtype=details.dtype, pin_memory=True)
                details = pinned.copy_(details, non_blocking=True)
        host, ready = self._to_host(tokens, faults)
        return PendingSamples(tokens, host, details, ready, batch.num_samples, num_logprobs, layouts)

    def _logprob_details(
        self, logits: Tensor, processed_logits: Tensor | None, tokens: Tensor, batch: SamplingBatch,
        layouts: Sequence[LogprobLayout | None],
    ) -> Tensor:  # fmt: skip
        """Return the details of each layout in rising order, sample by sample, in one tensor."""
        row_in_processed = np.cumsum(self._processed_rows(batch)) - 1 if self._kernels else np.arange(len(batch.slots))
        parts = []
        for layout in sorted({layout for layout in layouts if layout is not None}):
            samples = [i for i, row in enumerate(batch.sample_to_row) if layouts[row] == layout]
            places = np.array(samples, dtype=np.int64)
            rows, normalizer, requested_ids = batch.sample_to_row[places], None, None
            row_logits = self._select(logits, rows).float()
            if layout.processed:
                assert processed_logits is not None, "a method's candidates need processed logits"
                normalizer = log_normalizer(row_logits)
                row_logits = self._select(processed_logits, row_in_processed[rows])
            if layout.uses_requested_ids:
                requested_ids = self._requested_ids(batch.slots[rows], layout.num_alternatives)
            row_tokens = self._select(tokens, places)
            part = logprob_details(row_logits, row_tokens, layout.num_alternatives, normalizer, requested_ids)
            parts.append(part.flatten())
        return torch.cat(parts)

    def _logprob_layout(self, slot: int) -> LogprobLayout | None:
        """Return the layout of a slot's log-probabilities. Up to MAX_LOGPROBS, all slots share one layout."""
        num_logprobs = int(self._num_logprobs[slot])
        if num_logprobs < 0:
            return None
        sampling = self._rules[slot].sampling
        if sampling.logprob_token_ids:
            return LogprobLayout.for_token_ids(sampling.logprob_token_ids)
        width = min(max(num_logprobs, MAX_LOGPROBS), self.vocab_size) if num_logprobs else 0
        return LogprobLayout(sampling.candidates_only, width)

    def _requested_ids(self, slots: np.ndarray, width: int) -> Tensor:
        """Return the logprob_token_ids of `slots`, padded to [N, width]."""
        ids = np.zeros((len(slots), width), dtype=np.int64)
        for row, slot in zip(ids, slots.tolist()):
            requested = self._rules[slot].sampling.logprob_token_ids
            row[: len(requested)] = requested
        return to_device(ids, self.device)

    def _to_host(self, tokens: Tensor, faults: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Enqueue the copy of both to host memory, which `collect` reuses; return it and the event of its end."""
        count, rows = len(tokens), len(faults)
        if self.device.type == "cpu":
            return torch.cat((tokens, faults)), None
        host = self._pinned_buffers.pop() if self._pinned_buffers else None
        if host is None or len(host) < count + rows:
            host = torch.empty(max(2048, 2 * (count + rows)), dtype=torch.int64, pin_memory=True)
        one_storage = tokens.untyped_storage().data_ptr() == faults.untyped_storage().data_ptr()
        if one_storage and tokens.data_ptr() + tokens.nbytes == faults.data_ptr():
            host[: count + rows].copy_(tokens.as_strided((count + rows,), (1,)), non_blocking=True)
        else:
            host[:count].copy_(tokens, non_blocking=True)
            host[count : count + rows].copy_(faults, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return host, ready

    def _sample_seeds(self, batch: SamplingBatch) -> np.ndarray:
        """Return the seeds [D] of the samples, int64; 0 if all rows are greedy."""
        if not (self._params[batch.slots, 0] > 0).any():
            return np.zeros(len(batch.sample_to_row), dtype=np.int64)
        branch = (np.arange(len(batch.sample_to_row)) - batch.first_sample[batch.sample_to_row]).astype(np.uint64)
        seeds: np.ndarray = branch_seed(self._seeds[batch.slots][batch.sample_to_row], branch).astype(np.int64)
        return seeds

    def _select(self, tensor: Tensor, index: np.ndarray) -> Tensor:
        return tensor.index_select(0, to_device(index, self.device))

    def epilogues(self, last_sampled: Tensor, max_rows: int) -> dict[str, Epilogue]:
        """Return the functions that may follow the logits in a graph or recorded step of up to `max_rows` rows, by the
        names of `epilogue_for`. Their results are for `from_graph`; they also write tokens to `last_sampled` [slots].
        """
        assert self._kernels is not None, "graphs need sampling kernels"
        result = self._kernels.epilogues(last_sampled, max_rows)
        if isinstance(self._kernels, NativeSampling):
            result |= {f"masked {name}": self.bitmasks.wrap_epilogue(result[name], max_rows) for name in EPILOGUES[1:]}
        return result

    def epilogue_for(self, slices: Sequence[SeqSlice]) -> str:
        """Return the name of the epilogue that samples `slices`: "greedy", "random", "cut", or on a CPU "masked random"
        or "masked cut"; with masks greedy slices take "masked random". Return "" if only `sample` can: for several
        samples of a slice, log-probabilities, biases, penalties, a decoding method, `min_tokens` that are not reached
        yet, or on a GPU masks."""
        if self.bitmasks.has_masks and not isinstance(self._kernels, NativeSampling):
            return ""
        slices = SeqSlices.from_slices(slices)
        num_samples = slices.num_samples
        return "" if num_samples.count(1) < len(num_samples) else self.epilogue_of(slices.slots, slices.ends)

    def epilogue_of(self, slots: Sequence[int], ends: Sequence[int]) -> str:
        """Return the same for one sample each of `slots`, for the positions `ends`."""
        by_slot = self._slot_epilogue
        indices = [by_slot[slot] for slot in slots]
        if min(indices, default=0) < 0:
            return ""
        if self._min_tokens_slots and any(end < self._min_tokens_until[slot] for slot, end in zip(slots, ends)):
            return ""
        index = max(indices, default=0)
        return f"masked {EPILOGUES[max(index, 1)]}" if self.bitmasks.has_masks else EPILOGUES[index]

    def fill_epilogue(self, slices: Sequence[SeqSlice]) -> None:
        """Set parameters, seeds and positions of `slices` for the next replay of an epilogue other than "greedy"."""
        slices = SeqSlices.from_slices(slices)
        self.fill_rows(*np.array((slices.slots, slices.ends), dtype=np.int64))

    def epilogue_positions(self, max_rows: int) -> Tensor:
        """Return the positions [max_rows] on a GPU by which epilogues choose their noise, set by `fill_epilogue`."""
        assert isinstance(self._kernels, TritonSampling), "it is for graphs"
        return self._kernels.epilogue_inputs(max_rows)[2]

    def fill_rows(self, slots: np.ndarray, ends: np.ndarray) -> None:
        """Do the same for samples of `slots` for the positions `ends`."""
        assert self._kernels is not None, "graphs need sampling kernels"
        self._kernels.fill_epilogue(self._params[slots], self._seeds[slots].astype(np.int64), ends)
        if self.bitmasks.has_masks:
            self.bitmasks.fill_epilogue(slots, ends)

    def from_graph(self, tokens: Tensor | np.ndarray, faults: Any, slices: Sequence[SeqSlice]) -> PendingSamples:
        """Return the samples of `slices` from the results of an epilogue, which end with padding. Their copy to the
        host is enqueued on return, so later work may overwrite the results."""
        count = len(slices)
        ones, no_logprobs = self._ones[:count], self._no_logprobs[:count]
        if isinstance(tokens, np.ndarray):  # on a CPU: NumPy's views and copies cost a tenth of torch's
            copied = np.concatenate((tokens[:count], faults[:count]))
            return PendingSamples(copied[:count], copied, None, None, ones, no_logprobs, None)
        host, ready = self._to_host(tokens[:count], faults[:count])
        return PendingSamples(tokens[:count], host, None, ready, ones, no_logprobs, None)

    def collect(self, pending: PendingSamples) -> list[SliceResult]:
        """Wait for the samples of a step and return them, one result a row. This is the step's only wait.

        Call it once for each step: the buffer of the results is reused.
        """
        if pending.ready_event is not None:
            pending.ready_event.synchronize()
        count, rows = len(pending.tokens), len(pending.num_samples)
        values = pending.host_results[: count + rows].tolist()
        if isinstance(pending.host_results, Tensor) and pending.ready_event is not None:
            self._pinned_buffers.append(pending.host_results)
        tokens, faults = values[:count], values[count:]
        if count == rows and pending.logprob_layouts is None and not any(faults):
            return [SliceResult(token) for token in zip(tokens)]
        layouts = pending.logprob_layouts or (None,) * rows
        details = pending.details_by_layout()
        results, start = [], 0
        for num_samples, num_logprobs, layout, fault in zip(
            pending.num_samples.tolist(), pending.num_logprobs.tolist(), layouts, faults
        ):
            row_tokens = tuple(tokens[start : start + num_samples])
            start += num_samples
            logprobs: tuple[TopLogprobs, ...] = ()
            if layout is not None:
                logprobs = tuple(
                    to_top_logprobs(token, next(details[layout]), num_logprobs, layout.uses_requested_ids)
                    for token in row_tokens
                )
            results.append(SliceResult(row_tokens, () if fault else logprobs, error=FAULT_MESSAGES[fault]))
        return results
