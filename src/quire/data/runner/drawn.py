"""A step's rows as the sampler takes them, and its samples on their way to the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.data.runner.logprobs import Width


class Asked(NamedTuple):
    """The rows of a step as arrays: of each row `slots`, `positions`, `draws`, and `first`, the number of its first
    draw; of each draw `owner`, its row."""

    slots: np.ndarray
    positions: np.ndarray
    draws: np.ndarray
    first: np.ndarray
    owner: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int]]) -> Asked:
        numbers = np.fromiter(chain.from_iterable(rows), np.int64, 3 * len(rows)).reshape(-1, 3)
        slots, positions, draws = numbers.T.copy()
        return cls(slots, positions, draws, np.cumsum(draws) - draws, np.repeat(np.arange(len(rows)), draws))


class Drawn(NamedTuple):
    """A step's samples. `tokens` [sum of draws] int64, on the device, row by row; the rest is for `Sampler.finish`."""

    tokens: Tensor | np.ndarray
    host: Tensor | np.ndarray  # int64: the tokens, and a fault for each row
    details: Tensor | None  # float64: the details of each width in rising order, draw by draw
    ready: torch.cuda.Event | None  # after which `host` and `details` are there
    draws: np.ndarray  # of each row
    tops: np.ndarray  # of each row: how many alternatives it returns; -1: no log-probabilities at all
    widths: tuple[Width | None, ...] | None  # of each row; None if nobody asked for log-probabilities

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[np.ndarray, Drawn]]) -> Drawn:
        """The samples of all rows on a CPU, given those of some and which they are, in rising order. At most one part
        has details."""
        count = sum(len(rows) for rows, _ in parts)
        draws, tops = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
        widths: list[Width | None] = [None] * count
        details = next((part.details for _, part in parts if part.details is not None), None)
        for rows, part in parts:
            draws[rows], tops[rows] = part.draws, part.tops
            for row, width in zip(rows, part.widths or ()):
                widths[row] = width
        owner = np.repeat(np.arange(count), draws)
        tokens, faults = torch.empty(len(owner), dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        for rows, part in parts:
            tokens[torch.from_numpy(np.isin(owner, rows))] = part.tokens
            faults[torch.from_numpy(rows)] = part.host[len(part.tokens) :]
        host = torch.cat((tokens, faults))
        return cls(tokens, host, details, None, draws, tops, None if details is None else tuple(widths))

    def details_by_width(self) -> dict[Width, Iterator[list[float]]]:
        """The rows of `details`, by their width."""
        if self.details is None or self.widths is None:
            return {}
        details, end, numbers = {}, 0, self.details.numpy()
        draws = self.draws.tolist()
        for width in sorted({width for width in self.widths if width is not None}):
            columns = 2 + 2 * width.alternatives
            begin, end = end, end + columns * sum(n for n, other in zip(draws, self.widths) if other == width)
            details[width] = iter(numbers[begin:end].reshape(-1, columns).tolist())
        return details
