"""Arrivals: the times of requests in seconds from the start, by a name such as "poisson:2"; seeded, and the same for
every engine. PagedAttention (§6.1) uses Poisson arrivals, Jenga (Figure 15) one burst.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

import numpy as np

from quire.errors import StartupError

EXPECTED = "poisson:RATE, uniform:RATE, burst:N@EVERY or ramp:FROM:TO:SECONDS (rates are requests a second)"
LEAST, MOST = 1e-6, 1e6  # limits of rates and of seconds
MAX_BURST = 100_000
NUMBER = re.compile(r"\d{1,12}(\.\d{1,24})?([eE][+-]?\d{1,2})?", re.ASCII)


class Poisson(NamedTuple):
    """Poisson arrivals, `rate` a second on average."""

    rate: float

    def times(self, count: int, seed: int = 0) -> list[float]:
        """Return the arrival times of `count` requests, in ascending order, in seconds from the start."""
        return poisson(count, self.rate, seed)


class Uniform(NamedTuple):
    """One request every 1 / `rate` seconds, the first one at 0."""

    rate: float

    def times(self, count: int, seed: int = 0) -> list[float]:
        return [index / self.rate for index in range(count)]


class Burst(NamedTuple):
    """`size` requests at once every `every` seconds, the first of them at 0."""

    size: int
    every: float

    def times(self, count: int, seed: int = 0) -> list[float]:
        return [index // self.size * self.every for index in range(count)]


class Ramp(NamedTuple):
    """Poisson arrivals whose rate changes linearly from `first` to `last` within `seconds`, then stays at `last`."""

    first: float
    last: float
    seconds: float

    def times(self, count: int, seed: int = 0) -> list[float]:
        """Map arrivals of rate 1 through the inverse integral of the rate."""
        expected = np.array(poisson(count, 1.0, seed))
        within = (self.first + self.last) / 2 * self.seconds
        slope = (self.last - self.first) / self.seconds
        under = np.minimum(expected, within)
        reached = np.sqrt(np.maximum(self.first**2 + 2 * slope * under, 0.0))  # the rate at that time
        rising = 2 * under / np.maximum(self.first + reached, LEAST * LEAST)
        after = np.maximum(expected - within, 0.0) / self.last
        times: list[float] = np.maximum.accumulate(rising + after).tolist()  # rounding must not make them decrease
        return times


Arrivals = Poisson | Uniform | Burst | Ramp


def poisson(count: int, rate: float, seed: int = 0) -> list[float]:
    """Return the Poisson arrival times of `count` requests, in seconds from the start, `rate` a second on average."""
    gaps = np.random.default_rng(seed + 2).exponential(1 / rate, count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def parse_arrivals(text: str) -> Arrivals:
    """Return the arrivals of a name such as "ramp:1:4:60". Raise StartupError, with the expected form, if it is
    invalid."""
    kind, _, rest = text.partition(":")
    given = rest.split("@" if kind == "burst" else ":")
    if {"poisson": 1, "uniform": 1, "burst": 2, "ramp": 3}.get(kind) != len(given):
        raise StartupError(f"there are no arrivals {text[:60]!r}", f"Expected {EXPECTED}")
    if kind == "burst":
        size = _number(text, given[0], 1, MAX_BURST)
        if size != int(size):
            raise StartupError(f"{text[:60]!r} has bursts of {size} requests", "Give a whole number")
        return Burst(int(size), _number(text, given[1]))
    if kind == "ramp":
        least = 0.0 if given[0].strip("0.") == "" else LEAST  # a ramp may start at a rate of 0, but not end there
        return Ramp(_number(text, given[0], least), _number(text, given[1]), _number(text, given[2]))
    return (Poisson if kind == "poisson" else Uniform)(_number(text, given[0]))


def _number(text: str, given: str, least: float = LEAST, most: float = MOST) -> float:
    value = float(given) if NUMBER.fullmatch(given) else math.nan
    if not least <= value <= most:
        raise StartupError(
            f"{given[:20]!r} in the arrivals {text[:60]!r} is not a number from {least:g} to {most:g}",
            f"Expected {EXPECTED}",
        )
    return value
