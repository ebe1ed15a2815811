"""Requests and their sequences: what is asked for, and how far each branch of it has come.

Nothing here knows where tokens are kept: memory facts live in the memory.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quire.protocol.images import ImageItem
from quire.protocol.method import Method
from quire.protocol.sampling_params import MAX_TOKENS, SamplingParams
from quire.protocol.step_plan import TopLogprobs
from quire.protocol.structured_output import GrammarMatcher


def common_prefix_len(a: list[int], b: list[int], limit: int) -> int:
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


class RequestStatus(Enum):
    """Where a request is. All its live sequences are in memory together, or swapped together, or absent together."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    DONE = "done"


class Sequence:
    """One branch of a request: its tokens, and how far they are computed.

    computed <= planned <= len(tokens) + pending. tokens[:computed] have valid state in memory, confirmed by a collected
    result; `planned` counts tokens handed to the runner; `pending_samples` counts samples that the host has not seen
    yet.
    """

    __slots__ = (
        "branch_index",
        "cache_salt",
        "computed",
        "cumulative_logprob",
        "finish_reason",
        "id",
        "images",
        "matcher",
        "max_prefix_hit",
        "max_total_len",
        "num_forks",
        "page_keys",
        "pending_samples",
        "planned",
        "pooled",
        "prefix_source",
        "prompt_len",
        "prompt_logprobs",
        "seed",
        "stop_reason",
        "tokens",
        "top_logprobs",
    )  # fmt: skip

    def __init__(
        self, id: int, tokens: list[int], *, seed: int = 0, cache_salt: str = "", branch_index: int = 0
    ) -> None:
        self.id = id
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.computed = 0
        self.planned = 0
        self.pending_samples = 0
        self.branch_index = branch_index
        self.num_forks = 0  # siblings that will be forked from this one
        self.max_total_len = 0  # tokens that it will have at most, its prompt included; 0: that isn't known
        self.seed = seed
        self.cache_salt = cache_salt
        self.images: tuple[ImageItem, ...] = ()  # the pictures of its prompt, in order
        self.max_prefix_hit = MAX_TOKENS  # the longest prefix hit allowed; 0 when prompt log-probabilities are wanted
        self.page_keys: list[bytes] = []  # chained page keys: facts about tokens, filled by the memory as pages fill
        self.cumulative_logprob = 0.0
        self.top_logprobs: list[TopLogprobs] = []  # of its own tokens, where they are kept: methods, best_of
        self.prefix_source: Sequence | None = None  # computes what this one shares and hasn't computed itself
        self.prompt_logprobs: list[TopLogprobs] = []
        self.matcher: GrammarMatcher | None = None  # its place in the grammar of its output, behind `tokens`
        self.pooled: tuple[float, ...] = ()  # hidden states of its prompt: their sum so far, or the last one
        self.finish_reason: str | None = None  # why it ended; it may still be in flight
        self.stop_reason: int | str | None = None

    def __len__(self) -> int:
        """Tokens known or drawn, those still unseen by the host included."""
        return len(self.tokens) + self.pending_samples

    @property
    def not_in_flight(self) -> bool:
        """No step in flight names this sequence; only then may it be freed, forked or swapped."""
        return self.planned == self.computed

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far, unseen ones included."""
        return len(self.tokens) + self.pending_samples - self.prompt_len

    def fork(self, id: int, branch_index: int, seed: int) -> Sequence:
        """A child with the same tokens and the same computed state. The parent must be quiet."""
        assert self.not_in_flight, f"sequence {self.id} is forked while in flight"
        assert not self.pending_samples, f"sequence {self.id} is forked with a sample unseen"
        child = Sequence(id, list(self.tokens), seed=seed, cache_salt=self.cache_salt, branch_index=branch_index)
        child.prompt_len, child.computed, child.planned = self.prompt_len, self.computed, self.planned
        child.max_total_len, child.max_prefix_hit, child.page_keys = (
            self.max_total_len,
            self.max_prefix_hit,
            list(self.page_keys),
        )
        child.images = self.images
        child.cumulative_logprob, child.top_logprobs = self.cumulative_logprob, list(self.top_logprobs)
        child.matcher = None if self.matcher is None else self.matcher.copy()
        child.prompt_logprobs = self.prompt_logprobs  # one prompt, scored once, before it is forked
        return child


class Request:
    """The unit of scheduling and of preemption: one prompt and the branches that grow from it."""

    __slots__ = (
        "aborted",
        "agreed_tokens",
        "arrival_time",
        "batch_id",
        "cached_tokens",
        "candidates",
        "client",
        "device_params",
        "finished_seqs",
        "first_token_time",
        "id",
        "images",
        "live_seqs",
        "max_tokens",
        "method",
        "num_logprobs",
        "num_reported",
        "order",
        "params",
        "preemptions",
        "prefix_name",
        "prompt_len",
        "results",
        "scheduled_time",
        "seed",
        "status",
        "stop_ids",
    )  # fmt: skip

    def __init__(
        self, id: str, first_seq: Sequence, params: SamplingParams, *, arrival_time: float, max_tokens: int
    ) -> None:
        self.id = id
        self.params = params
        self.device_params = params.to_device_params()  # what the device must know of them
        self.arrival_time = arrival_time
        self.max_tokens = max_tokens  # resolved: what params ask for, cut to what model and memory allow
        self.seed = first_seq.seed
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.num_logprobs: int | None = None  # most likely tokens that its rows return, once that is known
        self.prompt_len = first_seq.prompt_len
        self.method: Method | None = None  # how its branches go on, if not each for itself
        self.candidates: dict[int, TopLogprobs] = {}  # what a method still waits for, by sequence
        self.results: list[tuple[float, Sequence]] = []  # a method's, best first
        self.agreed_tokens = 0  # tokens that all branches of a method agree on, and that were told
        self.prefix_name: str | None = None  # register its prompt under this name
        self.images: tuple[ImageItem, ...] = ()
        self.client, self.batch_id = "", 0  # whose it is, and what came with it
        self.order = 0  # among all requests of the scheduler that has it: of two the lesser is served first
        self.live_seqs = [first_seq]
        self.finished_seqs: list[Sequence] = []
        self.status = RequestStatus.WAITING
        self.aborted = False
        self.cached_tokens = 0
        self.preemptions = 0
        self.num_reported = 0  # branches whose end was told
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None

    @property
    def max_slots(self) -> int:
        """Slots that it holds or may come to hold."""
        if self.method is not None:
            return self.method.width
        return len(self.live_seqs) + sum(seq.num_forks for seq in self.live_seqs)


class SeqEvent(NamedTuple):
    """What one step did to one sequence: `tokens` it gained; the sequence says whether it ended. Without a sequence:
    the request's method took a step, or all branches of a request ended."""

    request: Request
    seq: Sequence | None
    tokens: tuple[int, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
