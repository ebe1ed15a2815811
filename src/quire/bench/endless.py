"""A named workload as an endless sequence of requests, of which a trace takes the first ones: at a higher rate the same
requests arrive faster, followed by more. (`name@N` differs: it samples N prompts, then N outputs, so each N has other
requests.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from quire.bench.workloads import ASKED, MAX_REQUESTS, RequestSpec, Workload, parse
from quire.errors import StartupError

BLOCK = 4096  # requests of a block
ARTICLES = 16  # documents of a block, for workloads where each request may have its own


@dataclass(frozen=True)
class Endless(Workload):
    """The first `requests` requests of the endless workload `name`, which has no "@N"."""

    name: str
    requests: int

    @classmethod
    def lasting(cls, name: str, rate: float, seconds: float) -> Endless:
        """Return the requests that arrive in `seconds` at `rate` a second. Raise StartupError if
        these are more than MAX_REQUESTS."""
        wanted = rate * seconds
        if wanted > MAX_REQUESTS:
            raise StartupError(
                f"{rate:.6g} requests/s for {seconds:g} seconds are {wanted:,.0f} requests, more than {MAX_REQUESTS:,}",
                "Give a smaller --seconds",
            )
        return cls(name, max(1, -int(-wanted // 1)))

    @cached_property
    def block(self) -> int:
        """Return the number of requests of a block."""
        return ASKED * ARTICLES if self.name == "arxiv-qa" else BLOCK

    def specs(self, seed: int = 0) -> list[RequestSpec]:
        """Return the first requests, without their tokens; block i is drawn from `seed` + i and has documents of its
        own."""
        found: list[RequestSpec] = []
        for i in range(-(-self.requests // self.block)):
            for one in parse(f"{self.name}@{self.block}").specs(seed + i):
                own = i > 0 and one.prefix_id.startswith("document")
                found.append(one._replace(prefix_id=f"{one.prefix_id} of block {i}") if own else one)
        return found[: self.requests]
