"""A step's rows as arrays for the sampler, and samples that are being copied to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.worker.logprobs import LogprobLayout


class SamplingBatch(NamedTuple):
    """The rows of a step as int64 arrays: R rows with D samples in all."""

    slots: np.ndarray  # [R]
    positions: np.ndarray  # [R]
    num_samples: np.ndarray  # [R]
    first_sample: np.ndarray  # [R]: index of the row's first sample
    sample_to_row: np.ndarray  # [D]

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, int, int]]) -> SamplingBatch:
        numbers = np.fromiter(chain.from_iterable(rows), np.int64, 3 * len(rows)).reshape(-1, 3)
        slots, positions, counts = numbers.T.copy()
        return cls(slots, positions, counts, np.cumsum(counts) - counts, np.repeat(np.arange(len(rows)), counts))


class PendingSamples(NamedTuple):
    """The samples of a step of R rows and D samples."""

    tokens: Tensor | np.ndarray  # [D] int64, on the device
    host_results: Tensor | np.ndarray  # [D + R] int64: the tokens, and a fault of each row
    logprob_details: Tensor | None  # float64: the details of each layout in rising order, sample by sample
    ready_event: torch.cuda.Event | None  # after which the results on the host are valid
    num_samples: np.ndarray  # [R]
    num_logprobs: np.ndarray  # [R]: alternatives that are returned; -1: no log-probabilities at all
    logprob_layouts: tuple[LogprobLayout | None, ...] | None  # by row; None if no row has log-probabilities
    accepted: Tensor | np.ndarray | None = None  # int64, on the host once ready: see Verification

    @classmethod
    def on_device(cls, tokens: Tensor | np.ndarray) -> PendingSamples:
        """Return samples that are not copied to the host."""
        none = np.zeros(0, dtype=np.int64)
        return cls(tokens, none, None, None, none, none, None)

    @classmethod
    def merge(cls, parts: Sequence[tuple[np.ndarray, PendingSamples]]) -> PendingSamples:
        """Return the samples of all rows on a CPU, given parts: the rows of each in rising order, and its samples. At
        most one part has details."""
        count = sum(len(rows) for rows, _ in parts)
        num_samples, num_logprobs = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        layouts: list[LogprobLayout | None] = [None] * count
        details = next((part.logprob_details for _, part in parts if part.logprob_details is not None), None)
        for rows, part in parts:
            num_samples[rows], num_logprobs[rows] = part.num_samples, part.num_logprobs
            for row, layout in zip(rows, part.logprob_layouts or ()):
                layouts[row] = layout
        sample_to_row = np.repeat(np.arange(count), num_samples)
        tokens, faults = torch.empty(len(sample_to_row), dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        for rows, part in parts:
            tokens[torch.from_numpy(np.isin(sample_to_row, rows))] = torch.as_tensor(part.tokens)
            faults[torch.from_numpy(rows)] = torch.as_tensor(part.host_results[len(part.tokens) :])
        host_results = torch.cat((tokens, faults))
        layouts_or_none = None if details is None else tuple(layouts)
        return cls(tokens, host_results, details, None, num_samples, num_logprobs, layouts_or_none)

    def details_by_layout(self) -> dict[LogprobLayout, Iterator[list[float]]]:
        """Return the rows of `logprob_details` by their layout."""
        if self.logprob_details is None or self.logprob_layouts is None:
            return {}
        by_layout, end, values = {}, 0, self.logprob_details.numpy()
        counts = self.num_samples.tolist()
        for layout in sorted({layout for layout in self.logprob_layouts if layout is not None}):
            columns = 2 + 2 * layout.num_alternatives
            begin = end
            end += columns * sum(count for count, other in zip(counts, self.logprob_layouts) if other == layout)
            by_layout[layout] = iter(values[begin:end].reshape(-1, columns).tolist())
        return by_layout
