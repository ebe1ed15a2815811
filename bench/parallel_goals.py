"""Goals for ranks on GPUs, and the measurements of vLLM 0.26. All are of H200s with NVLink; for GPUs with slower links
they are rescaled, and the result reports it.
"""

from __future__ import annotations

from typing import NamedTuple

KIND, LINK = "H200", 391.0  # the GPUs of the goals, and 10^9 bytes a second of their copies in one direction
EXCHANGE_US = {2: (5.5, 8.0, 14.0, 35.0), 4: (6.0, 10.0, 22.0, 55.0)}  # at exchange.ROWS rows of 16 KB
ROW = 16_384  # bytes


class Goal(NamedTuple):
    """A goal: `value` by number of ranks, in `unit`, and vLLM's measurement. `low`: lower is better. `steps`: the
    number of tokens whose rows are exchanged for each token that is counted."""

    value: dict[int, float]
    peer: dict[int, float] = {}  # noqa: RUF012
    low: bool = False
    steps: float = 1.0


LARGE = {  # Llama-3-70B, by workload
    "fixed:128:128@1": Goal({2: 17.9, 4: 10.2}, {2: 21.3, 4: 12.4}, low=True),
    "fixed:1000:128@32": Goal({2: 5900, 4: 11_000}, {2: 5364, 4: 9272}),
    "fixed:1024:128@512": Goal({2: 8300, 4: 15_700}, {2: 7403, 4: 14_265}),
    "fixed:128:1024@256": Goal({2: 5900, 4: 10_400}, {2: 5141, 4: 8990}, steps=1152 / 1024),
    "fixed:8191:1@8": Goal({2: 9000, 4: 17_000}),
}
SMALL = {"fixed:128:128@1": Goal({1: 3.93, 2: 2.5, 4: 1.65}, low=True)}  # Llama-3-8B
GAINS = {2: 1.8, 4: 3.05}  # speedup in tokens a second over one GPU, of Llama-3-8B at fixed:1024:128@512
EXCHANGES = {"small": (65, 8192), "large": (161, ROW)}  # exchanges of a step, and bytes of a row
START = {"nothing cached": 45.0, "warm": 20.0}  # seconds to the first token
PEER_START = {2: 154.0, 4: 156.0}
HIDDEN = 60.0  # % of a sum that overlaps with computation, in prompts
IDLE = 1.0  # maximum % of a step in which a rank runs no kernel
DETERMINISTIC = 1.05  # maximum slowdown


def seconds_more(ranks: int, nbytes: float, link: float | None) -> float:
    """Return how many seconds longer than over NVLink an exchange of `nbytes` takes if copies have `link` 10^9 bytes a
    second: each rank sends and receives 2 (ranks - 1) / ranks of them."""
    if link is None or link >= LINK or ranks < 2:
        return 0.0
    return 2 * (ranks - 1) / ranks * nbytes * (1 / link - 1 / LINK) / 1e9


def rescaled(goal: Goal, ranks: int, which: str, link: float | None) -> float | None:
    """Return the goal of a model's workload, rescaled to the given link."""
    value = goal.value.get(ranks)
    if value is None:
        return None
    count, row = EXCHANGES[which]
    more = count * seconds_more(ranks, row, link) * goal.steps
    return value + 1e3 * more if goal.low else 1 / (1 / value + more)


def exchange_goal(ranks: int, index: int, rows: int, link: float | None) -> float | None:
    """Return the microseconds for the index-th number of rows in exchange.ROWS."""
    given = EXCHANGE_US.get(ranks)
    return None if given is None else given[index] + 1e6 * seconds_more(ranks, rows * ROW, link)
