"""A step's rows as the sampler takes them, and its samples on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.worker.logprobs import LogprobLayout


class SamplingBatch(NamedTuple):
    """The rows of a step as arrays: of each row `slots`, `positions`, `num_samples`, and `first_sample`, the number of
    its first draw; of each draw `sample_to_row`, its row."""

    slots: np.ndarray
    positions: np.ndarray
    num_samples: np.ndarray
    first_sample: np.ndarray
    sample_to_row: np.ndarray

    @classmethod
    def from_rows(cls, rows: Sequence[tuple[int, int, int]]) -> SamplingBatch:
        numbers = np.fromiter(chain.from_iterable(rows), np.int64, 3 * len(rows)).reshape(-1, 3)
        slots, positions, draws = numbers.T.copy()
        return cls(slots, positions, draws, np.cumsum(draws) - draws, np.repeat(np.arange(len(rows)), draws))


class PendingSamples(NamedTuple):
    """A step's samples. `tokens` [sum of draws] int64, on the device, row by row; the rest is for `Sampler.finish`."""

    tokens: Tensor | np.ndarray
    host_results: Tensor | np.ndarray  # int64: the tokens, and a fault for each row
    logprob_details: Tensor | None  # float64: the details of each width in rising order, draw by draw
    ready_event: torch.cuda.Event | None  # after which `host` and `details` are there
    num_samples: np.ndarray  # of each row
    num_logprobs: np.ndarray  # of each row: how many alternatives it returns; -1: no log-probabilities at all
    logprob_layouts: tuple[LogprobLayout | None, ...] | None  # of each row; None if nobody asked for log-probabilities

    @classmethod
    def merge(cls, parts: Sequence[tuple[np.ndarray, PendingSamples]]) -> PendingSamples:
        """The samples of all rows on a CPU, given those of some and which they are, in rising order. At most one part
        has details."""
        count = sum(len(rows) for rows, _ in parts)
        draws, tops = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        widths: list[LogprobLayout | None] = [None] * count
        details = next((part.logprob_details for _, part in parts if part.logprob_details is not None), None)
        for rows, part in parts:
            draws[rows], tops[rows] = part.num_samples, part.num_logprobs
            for row, width in zip(rows, part.logprob_layouts or ()):
                widths[row] = width
        owner = np.repeat(np.arange(count), draws)
        tokens, faults = torch.empty(len(owner), dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        for rows, part in parts:
            tokens[torch.from_numpy(np.isin(owner, rows))] = part.tokens
            faults[torch.from_numpy(rows)] = part.host_results[len(part.tokens) :]
        host = torch.cat((tokens, faults))
        return cls(tokens, host, details, None, draws, tops, None if details is None else tuple(widths))

    def details_by_layout(self) -> dict[LogprobLayout, Iterator[list[float]]]:
        """The rows of `logprob_details`, by their width."""
        if self.logprob_details is None or self.logprob_layouts is None:
            return {}
        details, end, numbers = {}, 0, self.logprob_details.numpy()
        draws = self.num_samples.tolist()
        for width in sorted({width for width in self.logprob_layouts if width is not None}):
            columns = 2 + 2 * width.num_alternatives
            begin, end = end, end + columns * sum(n for n, other in zip(draws, self.logprob_layouts) if other == width)
            details[width] = iter(numbers[begin:end].reshape(-1, columns).tolist())
        return details
