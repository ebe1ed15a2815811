"""A request: its parameters, its branches and their progress. Page tables belong to the memory."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quire.protocol.images import ImageItem
from quire.protocol.method import Method
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import TopLogprobs


class RequestStatus(Enum):
    """The state of a request. All its live sequences are in memory, all are swapped out, or none is stored."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    DONE = "done"


class DraftCounts(NamedTuple):
    """The numbers of draft tokens of a request that were verified so far, and of those that are in its outputs."""

    drafted: int = 0
    accepted: int = 0


NO_DRAFT_COUNTS = DraftCounts()


class Request:
    """The unit of scheduling and of preemption: one prompt and the branches that grow from it."""

    __slots__ = (
        "aborted", "agreed_tokens", "arrival_time", "batch_id", "cached_tokens", "candidates", "client",
        "device_params", "draft_counts", "finished_seqs", "first_token_time", "hands_over", "id", "images",
        "live_seqs", "max_tokens", "method", "num_logprobs", "num_reported", "order", "params", "preemptions",
        "prefix_name", "prompt_len", "results", "scheduled_time", "seed", "status", "stop_ids",
    )  # fmt: skip

    def __init__(
        self, id: str, first_seq: Sequence, params: SamplingParams, *, arrival_time: float, max_tokens: int
    ) -> None:
        self.id = id
        self.params = params
        self.device_params = params.to_device_params()  # the part that the device needs
        self.arrival_time = arrival_time
        self.max_tokens = max_tokens  # resolved: at most what model and memory allow
        self.seed = first_seq.seed
        self.stop_ids = frozenset(params.stop_token_ids or ())
        self.num_logprobs: int | None = None  # likeliest tokens that its slices return; None: not resolved yet
        self.prompt_len = first_seq.prompt_len
        self.method: Method | None = None  # None: branches are independent
        self.candidates: dict[int, TopLogprobs] = {}  # by sequence id, until the method's step is complete
        self.results: list[tuple[float, Sequence]] = []  # a method's scores and ended branches, best first
        self.agreed_tokens = 0  # reported tokens on which all branches of a method agree
        self.prefix_name: str | None = None  # registers its prompt under this name
        self.images: tuple[ImageItem, ...] = ()
        self.hands_over = False  # computes a prompt for another engine, which counts the request
        self.client, self.batch_id = "", 0  # see quire.core.request_queue
        self.order = 0  # in its scheduler; requests with lower numbers are served first
        self.live_seqs = [first_seq]
        self.finished_seqs: list[Sequence] = []
        self.status = RequestStatus.WAITING
        self.aborted = False
        self.cached_tokens = 0
        self.draft_counts = NO_DRAFT_COUNTS
        self.preemptions = 0
        self.num_reported = 0  # branches whose end was reported
        self.scheduled_time: float | None = None
        self.first_token_time: float | None = None

    @property
    def max_slots(self) -> int:
        """The most slots that its live branches and their forks need."""
        if self.method is not None:
            return self.method.width
        if len(self.live_seqs) == 1:
            return 1 + self.live_seqs[0].num_forks
        return len(self.live_seqs) + sum(seq.num_forks for seq in self.live_seqs)


class SeqEvent(NamedTuple):
    """The effect of a step on a sequence: the `tokens` that were appended. With `seq` None, the request's method took a
    step or all branches of the request have ended."""

    request: Request
    seq: Sequence | None
    tokens: tuple[int, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
