"""Workloads: seeded lists of prompts and output lengths that know nothing of an engine, so that two engines can run the
same work. The distributions are those of PagedAttention Figure 11 (sharegpt, alpaca) and Jenga Figure 15 (longdoc).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.errors import StartupError

Lengths = npt.NDArray[np.int64]

MAX_REQUESTS = 100_000
MAX_LENGTH = 2**21
MAX_PROMPT_TOKENS = 10**8
EDGE = 10  # token ids this near to either end of a vocabulary are not drawn: special tokens are there
EXPECTED = "sharegpt@N, alpaca@N, longdoc@N, fixed:IN:OUT@N or shared:PREFIX:OWN:OUT@N"


class Job(NamedTuple):
    """One request: a prompt as token ids, and how many tokens it generates."""

    prompt: list[int]
    output: int


class LogNormal(NamedTuple):
    """Lengths of mean `mean`; `sigma` is the deviation of their logarithm. `low` and `high` clip them."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Lengths:
        """`count` whole lengths, not clipped."""
        mu = np.log(self.mean) - self.sigma**2 / 2
        return rng.lognormal(mu, self.sigma, count).astype(np.int64)

    def clip(self, lengths: Lengths) -> Lengths:
        """Every length brought into [low, high]."""
        return np.clip(lengths, self.low, self.high)


class Uniform(NamedTuple):
    """Lengths from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Lengths:
        return rng.integers(self.low, self.high + 1, count)

    def clip(self, lengths: Lengths) -> Lengths:
        return lengths


# name -> lengths of prompts, lengths of outputs
DRAWN: dict[str, tuple[LogNormal | Uniform, LogNormal | Uniform]] = {
    "sharegpt": (LogNormal(161, 1.3, 4, 1024), LogNormal(338, 1.0, 4, 1024)),
    "alpaca": (LogNormal(19, 0.6, 4, 128), LogNormal(58, 0.9, 2, 512)),
    "longdoc": (Uniform(55_000, 110_000), Uniform(50, 100)),
}


class Workload(NamedTuple):
    """A workload by its name: `kind` with its numbers, and the number of requests."""

    name: str
    kind: str
    numbers: tuple[int, ...]
    requests: int

    def lengths(self, seed: int = 0) -> list[tuple[int, int]]:
        """(prompt, output) lengths of every request."""
        if self.kind in DRAWN:
            rng = np.random.default_rng(seed)
            prompts, outputs = (kind.clip(kind.draw(rng, self.requests)) for kind in DRAWN[self.kind])
            return list(zip(prompts.tolist(), outputs.tolist()))
        *prompt, output = self.numbers
        return [(sum(prompt), output)] * self.requests

    def jobs(self, vocab_size: int, seed: int = 0) -> list[Job]:
        """The requests, for a model of `vocab_size` tokens. `seed` gives the lengths, `seed` + 1 the tokens."""
        low, high = EDGE, vocab_size - EDGE
        if high <= low:
            raise StartupError(f"{self.name} needs a vocabulary of more than {2 * EDGE} tokens, this has {vocab_size}")
        lengths = self.lengths(seed)
        total = sum(prompt for prompt, _ in lengths)
        if total > MAX_PROMPT_TOKENS:
            raise StartupError(
                f"the prompts of {self.name} have {total:,} tokens", f"At most {MAX_PROMPT_TOKENS:,}: ask for fewer"
            )
        rng = np.random.default_rng(seed + 1)
        shared: list[int] = []
        if self.kind == "shared":
            shared = rng.integers(low, high, size=self.numbers[0]).tolist()
        return [
            Job(shared + rng.integers(low, high, size=prompt - len(shared)).tolist(), output)
            for prompt, output in lengths
        ]


def parse(name: str) -> Workload:
    """The workload of a name such as "sharegpt@1000". StartupError says what was expected."""
    what, at, count = name.partition("@")
    kind, *given = what.split(":")
    wanted = {"fixed": 2, "shared": 3, **dict.fromkeys(DRAWN, 0)}.get(kind)
    if not at or wanted is None or len(given) != wanted:
        raise StartupError(f"there is no workload {name[:60]!r}", f"Expected {EXPECTED}")
    numbers = tuple(_number(name, text, MAX_LENGTH) for text in given)
    return Workload(name, kind, numbers, _number(name, count, MAX_REQUESTS))


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= most):
        raise StartupError(
            f"{text[:20]!r} in the workload {name[:60]!r} is not a whole number from 1 to {most:,}",
            f"Expected {EXPECTED}",
        )
    return int(text)


def poisson(count: int, rate: float, seed: int = 0) -> list[float]:
    """Arrival times in seconds from the start of `count` requests, `rate` a second on average."""
    gaps = np.random.default_rng(seed + 2).exponential(1 / rate, count)
    times: list[float] = np.cumsum(gaps).tolist()
    return times
