"""Token histories of sequences on the device, with counts of generated tokens, for penalties and bad words.

Only sequences whose parameters need it have a row. Nothing in this file waits for the device. The penalties are those
of vLLM (repetition: CTRL, Keskar et al. 2019, §4.1; frequency and presence: OpenAI's API).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.forward_batch import to_device

INITIAL_CAPACITY = 256  # tokens of a row
PENALTY_BATCH_TOKENS = 2**22  # tokens that are penalised together: a bound for temporaries


class PhraseTable(NamedTuple):
    """Token sequences, laid end to end, so that the cost is proportional to their tokens."""

    tokens: np.ndarray  # [T]
    from_end: np.ndarray  # [T]: distance from the phrase's end, 1 for its last token
    phrase_indices: np.ndarray  # [T]: the token's phrase
    num_phrases: int

    @classmethod
    def from_phrases(cls, phrases: Sequence[Sequence[int]]) -> PhraseTable:
        return cls(
            np.array([token for phrase in phrases for token in phrase], dtype=np.int64),
            np.array([place for phrase in phrases for place in range(len(phrase), 0, -1)], dtype=np.int64),
            np.repeat(np.arange(len(phrases)), [len(phrase) for phrase in phrases]),
            len(phrases),
        )


class TokenHistory:
    """Token histories, one row for each slot that needs it, in tables that double when they are full.

    `tokens` [rows, capacity] int64: prompt and output, padded with the first token; `counts` [rows, vocab] float32
    (exact up to 2**24): occurrences of a token in the output. A prompt may have tokens beyond the vocabulary, which
    stand for images and have no logit.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.tokens = torch.zeros(0, INITIAL_CAPACITY, dtype=torch.int64, device=device)
        self.counts = torch.zeros(0, vocab_size, device=device)
        self._row_by_slot: dict[int, int] = {}
        self._free_rows: list[int] = []
        self._has_image_tokens = False  # some prompt since the last time without rows has such tokens
        self._lengths: dict[int, int] = {}  # by slot; known even if the tokens' values are only on the device

    def __contains__(self, slot: int) -> bool:
        return slot in self._row_by_slot

    def init_slot(self, slot: int, history: Sequence[int], prompt_len: int) -> None:
        """Set the tokens of `slot`: `history`, at least one, of which `prompt_len` are its prompt."""
        row = self._allocate_row(slot, len(history))
        padded = np.full(self.tokens.shape[1], history[0], dtype=np.int64)
        padded[: len(history)] = history
        self._has_image_tokens |= int(padded.max()) >= self.vocab_size
        self.tokens[row] = to_device(padded, self.device)
        outputs = self.tokens[row, prompt_len : len(history)]
        self.counts[row].zero_().scatter_add_(0, outputs, torch.ones_like(outputs, dtype=torch.float32))

    def fork(self, parent: int, slot: int) -> None:
        """Copy the tokens of `parent` to `slot`, including those whose values are only on the device."""
        source, row = self._row_by_slot[parent], self._allocate_row(slot, self._lengths[parent])
        self.tokens[row] = self.tokens[source]
        self.counts[row] = self.counts[source]

    def drop(self, slot: int) -> None:
        """Free the row of `slot`, if it has one. With the last row, shrink the table to its initial width."""
        row = self._row_by_slot.pop(slot, None)
        if row is None:
            return
        self._free_rows.append(row)
        self._has_image_tokens &= bool(self._row_by_slot)
        if not self._row_by_slot and self.tokens.shape[1] > INITIAL_CAPACITY:
            self.tokens = self.tokens.new_zeros(len(self.tokens), INITIAL_CAPACITY)

    def truncate(self, lengths: Mapping[int, int]) -> None:
        """Drop the output tokens of each slot after its first `lengths[slot]` tokens."""
        longer = {slot: length for slot, length in lengths.items() if length < self._lengths.get(slot, 0)}
        if not longer:
            return
        kept, counts = np.array(list(longer.values())), [self._lengths[slot] - n for slot, n in longer.items()]
        rows = self._rows_of(np.repeat(list(longer), counts).tolist())
        places = np.repeat(kept, counts) + np.concatenate([np.arange(count) for count in counts])
        index = rows, to_device(places, self.device)
        dropped = self.tokens[index]
        once = torch.full(dropped.shape, -1.0, device=self.device)
        self.counts.index_put_((rows, dropped), once, accumulate=True)
        self.tokens.index_put_(index, self.tokens[rows, 0])
        self._lengths.update(longer)

    def record(self, slots: Sequence[int], tokens: Tensor) -> None:
        """Append one output token to each of `slots`, which must be distinct and have rows; tokens [len(slots)]."""
        rows, lengths = self._rows_of(slots), np.array([self._lengths[slot] for slot in slots])
        self._reserve(int(lengths.max()) + 1)
        self.tokens.index_put_((rows, to_device(lengths, self.device)), tokens)
        self.counts.index_put_((rows, tokens), torch.ones_like(tokens, dtype=torch.float32), accumulate=True)
        for slot in slots:
            self._lengths[slot] += 1

    def apply_penalties(self, logits: Tensor, slots: Sequence[int], penalties: np.ndarray) -> Tensor:
        """Return new logits [R, V] of `slots` with penalties [R, 3]: repetition, frequency, presence."""
        rows, longest = self._rows_of(slots), max(self._lengths[slot] for slot in slots)
        factors = to_device(penalties.astype(np.float32), self.device)
        batch_rows = max(1, PENALTY_BATCH_TOKENS // longest)
        splits = logits.split(batch_rows), rows.split(batch_rows), factors.split(batch_rows)
        penalised = [self._apply_to_rows(x, index, penalty, longest) for x, index, penalty in zip(*splits)]
        return penalised[0] if len(penalised) == 1 else torch.cat(penalised)

    def _apply_to_rows(self, logits: Tensor, rows: Tensor, factors: Tensor, longest: int) -> Tensor:
        repetition, frequency, presence = factors[:, 0:1], factors[:, 1:2], factors[:, 2:3]
        # Only tokens of the sequence change. A token that occurs twice is computed twice, with equal results.
        seen = self.tokens[:, :longest].index_select(0, rows)
        counts = self.counts[rows[:, None], seen.clamp(max=self.vocab_size - 1) if self._has_image_tokens else seen]
        if self._has_image_tokens:  # image tokens get an additional column, which is dropped
            logits, seen = F.pad(logits, (0, 1)), seen.clamp(max=self.vocab_size)
        changed = logits.gather(1, seen)
        changed = torch.where(changed > 0, changed / repetition, changed * repetition)
        changed = changed - counts * frequency
        changed = changed - counts.clamp(max=1) * presence
        penalised = logits.scatter(1, seen, changed)
        return penalised[:, :-1].contiguous() if self._has_image_tokens else penalised

    def ends_with(self, slots: Sequence[int], phrases: Sequence[PhraseTable]) -> Tensor:
        """Return bool [sum of num_phrases]: for each phrase of phrases[i], if slots[i] ends with it."""
        sizes = [len(table.tokens) for table in phrases]
        counts = np.array([table.num_phrases for table in phrases])
        rows = np.repeat([self._row_by_slot[slot] for slot in slots], sizes)
        lengths = np.repeat([self._lengths[slot] for slot in slots], sizes)
        places = lengths - np.concatenate([table.from_end for table in phrases])
        indices = np.concatenate([table.phrase_indices for table in phrases])
        indices = indices + np.repeat(counts.cumsum() - counts, sizes)
        expected = np.concatenate([table.tokens for table in phrases])
        expected[places < 0] = -1  # no token: the sequence is shorter than the phrase
        latest = self.tokens[to_device(rows, self.device), to_device(places.clip(min=0), self.device)]
        differs = (latest != to_device(expected, self.device)).to(torch.int32)
        num_different = torch.zeros(int(counts.sum()), dtype=torch.int32, device=self.device)
        return num_different.index_add_(0, to_device(indices, self.device), differs) == 0

    def _rows_of(self, slots: Sequence[int]) -> Tensor:
        return to_device(np.array([self._row_by_slot[slot] for slot in slots], dtype=np.int64), self.device)

    def _allocate_row(self, slot: int, length: int) -> int:
        self.drop(slot)
        self._reserve(length)
        if not self._free_rows:
            count = len(self.counts)
            more = max(4, count)
            self._free_rows.extend(range(count + more - 1, count - 1, -1))
            self.counts = torch.cat((self.counts, self.counts.new_zeros(more, self.vocab_size)))
            self.tokens = torch.cat((self.tokens, self.tokens.new_zeros(more, self.tokens.shape[1])))
        self._row_by_slot[slot] = row = self._free_rows.pop()
        self._lengths[slot] = length
        return row

    def _reserve(self, length: int) -> None:
        capacity = self.tokens.shape[1]
        if length > capacity:
            padding = self.tokens[:, :1].expand(-1, max(capacity, length - capacity))
            self.tokens = torch.cat((self.tokens, padding), 1)
