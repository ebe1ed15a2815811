"""Requests and their sequences: what is asked for, and how far each branch of it has come.

Nothing here knows where tokens are kept: memory facts live in the memory.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quire.vocabulary.media import Medium
from quire.vocabulary.method import Method
from quire.vocabulary.params import MAX_TOKENS, SamplingParams
from quire.vocabulary.plan import Top
from quire.vocabulary.structured import Matcher


def common_prefix(a: list[int], b: list[int], limit: int) -> int:
    """The length of the longest common prefix, at most `limit`; found by halving, a slice at a time."""
    high = min(limit, len(a), len(b))
    if a[:high] == b[:high]:
        return high
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Status(Enum):
    """Where a request is. All its live sequences are in memory together, or swapped together, or absent together."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    DONE = "done"


class Sequence:
    """One branch of a request: its tokens, and how far they are computed.

    computed <= planned <= len(tokens) + pending. tokens[:computed] have valid state in memory, confirmed by a collected
    result; `planned` counts tokens handed to the runner; `pending` counts samples that the host has not seen yet.
    """

    __slots__ = (
        "branches", "computed", "cumulative_logprob", "final", "finish", "id", "index", "keys", "matcher", "media",
        "pending", "planned", "pooled", "prompt_len", "prompt_tops", "reusable", "salt", "seed", "sibling",
        "stop_reason", "tokens", "tops",
    )  # fmt: skip

    def __init__(self, id: int, tokens: list[int], *, seed: int = 0, salt: str = "", index: int = 0) -> None:
        self.id = id
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.computed = 0
        self.planned = 0
        self.pending = 0
        self.index = index
        self.branches = 0  # siblings that will be forked from this one
        self.final = 0  # tokens that it will have at most, its prompt included; 0: that isn't known
        self.seed = seed
        self.salt = salt
        self.media: tuple[Medium, ...] = ()  # the pictures of its prompt, in order
        self.reusable = MAX_TOKENS  # the longest prefix hit allowed; 0 when prompt log-probabilities are wanted
        self.keys: list[bytes] = []  # chained page keys: facts about tokens, filled by the memory as pages fill
        self.cumulative_logprob = 0.0
        self.tops: list[Top] = []  # of its own tokens, where they are kept: methods, best_of
        self.sibling: Sequence | None = None  # computes what this one shares and hasn't computed itself
        self.prompt_tops: list[Top] = []
        self.matcher: Matcher | None = None  # its place in the grammar of its output, behind `tokens`
        self.pooled: tuple[float, ...] = ()  # hidden states of its prompt: their sum so far, or the last one
        self.finish: str | None = None  # why it ended; it may still be in flight
        self.stop_reason: int | str | None = None

    def __len__(self) -> int:
        """Tokens known or drawn, those still unseen by the host included."""
        return len(self.tokens) + self.pending

    @property
    def quiet(self) -> bool:
        """No step in flight names this sequence; only then may it be freed, forked or swapped."""
        return self.planned == self.computed

    @property
    def outputs(self) -> int:
        """Tokens generated so far, unseen ones included."""
        return len(self.tokens) + self.pending - self.prompt_len

    def fork(self, id: int, index: int, seed: int) -> Sequence:
        """A child with the same tokens and the same computed state. The parent must be quiet."""
        assert self.quiet, f"sequence {self.id} is forked while in flight"
        assert not self.pending, f"sequence {self.id} is forked with a sample unseen"
        child = Sequence(id, list(self.tokens), seed=seed, salt=self.salt, index=index)
        child.prompt_len, child.computed, child.planned = self.prompt_len, self.computed, self.planned
        child.final, child.reusable, child.keys = self.final, self.reusable, list(self.keys)
        child.media = self.media
        child.cumulative_logprob, child.tops = self.cumulative_logprob, list(self.tops)
        child.matcher = None if self.matcher is None else self.matcher.copy()
        child.prompt_tops = self.prompt_tops  # one prompt, scored once, before it is forked
        return child


class Request:
    """The unit of scheduling and of preemption: one prompt and the branches that grow from it."""

    __slots__ = (
        "aborted", "arrival", "batch", "cached_tokens", "candidates", "client", "done", "first_token", "id", "live",
        "max_tokens", "media", "method", "order", "params", "preemptions", "prefix", "prompt_len", "reported",
        "results", "sampling", "scheduled", "seed", "settled", "status", "stop_ids", "top",
    )  # fmt: skip

    def __init__(self, id: str, first: Sequence, params: SamplingParams, *, arrival: float, max_tokens: int) -> None:
        self.id = id
        self.params = params
        self.sampling = params.sampling()  # what the device must know of them
        self.arrival = arrival
        self.max_tokens = max_tokens  # resolved: what params ask for, cut to what model and memory allow
        self.seed = first.seed
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.top: int | None = None  # most likely tokens that its rows return, once that is known
        self.prompt_len = first.prompt_len
        self.method: Method | None = None  # how its branches go on, if not each for itself
        self.candidates: dict[int, Top] = {}  # what a method still waits for, by sequence
        self.results: list[tuple[float, Sequence]] = []  # a method's, best first
        self.settled = 0  # tokens that all branches of a method agree on, and that were told
        self.prefix: str | None = None  # register its prompt under this name
        self.media: tuple[Medium, ...] = ()
        self.client, self.batch = "", 0  # whose it is, and what came with it
        self.order = 0  # among all requests of the scheduler that has it: of two the lesser is served first
        self.live = [first]
        self.done: list[Sequence] = []
        self.status = Status.WAITING
        self.aborted = False
        self.cached_tokens = 0
        self.preemptions = 0
        self.reported = 0  # branches whose end was told
        self.scheduled: float | None = None
        self.first_token: float | None = None

    @property
    def width(self) -> int:
        """Slots that it holds or may come to hold."""
        if self.method is not None:
            return self.method.width
        return len(self.live) + sum(seq.branches for seq in self.live)


class Event(NamedTuple):
    """What one step did to one sequence: `tokens` it gained; the sequence says whether it ended. Without a sequence:
    the request's method took a step, or all branches of a request ended."""

    request: Request
    seq: Sequence | None
    tokens: tuple[int, ...] = ()
    tops: tuple[Top, ...] = ()
