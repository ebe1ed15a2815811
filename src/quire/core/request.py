"""Requests and their sequences: what is asked for, and how far each branch of it has come.

Nothing here knows where tokens are kept: memory facts live in the memory.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from quire.protocol.images import ImageItem
from quire.protocol.method import Method
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import TopLogprobs


class RequestStatus(Enum):
    """Where a request is. All its live sequences are in memory together, or swapped together, or absent together."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    DONE = "done"


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
