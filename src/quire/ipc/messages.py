"""What fronts and the engine tell each other. One engine's thread works off what all fronts send, in order, and tells
each front once a step what the step brought for it.

A front numbers its requests; numbers are its own. `key` names a question: its Answer has the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from quire.core.engine import Engine
from quire.core.outputs import BranchOutput, EngineStats
from quire.core.validation import EngineLimits
from quire.memory.answers import Account
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import MappingStats, RankUsage

MAX_NUMBER = 2**32 - 1  # of a request or a question
MAX_REQUESTS = 1 << 16  # of one message
MAX_ID_CHARS = 1024  # characters of a request's name
MAX_TAGS = 16  # of a wake-up


class NewRequest(NamedTuple):
    """A request: its number, its name among all, its prompt, and the pictures in that."""

    number: int
    id: str
    prompt: Sequence[int]
    media: tuple[ImageItem, ...] = ()


class AddRequests(NamedTuple):
    """Queue all of these, or none. Their parameters are resolved: words are token ids. `pixels` are those of all their
    pictures, each once. `client`, at most MOST_CLIENT characters, is whoever has a common share of the engine."""

    key: int
    requests: tuple[NewRequest, ...]
    params: SamplingParams
    salt: str = ""
    pixels: tuple[ImagePixels, ...] = ()
    client: str = ""


class AbortRequests(NamedTuple):
    """End requests whose clients left; None: all of this front's."""

    numbers: tuple[int, ...] | None


class StopBranch(NamedTuple):
    """A branch's text has a stop string: end it. It isn't told any more."""

    number: int
    branch: int
    reason: str


class RegisterPrefix(NamedTuple):
    """Compute a prefix and keep it; it is told of as a request of that number."""

    key: int
    number: int
    name: str
    tokens: Sequence[int]


class ReleasePrefix(NamedTuple):
    """Let go of a prefix. The answer says whether there was one."""

    key: int
    name: str


class ListPrefixes(NamedTuple):
    """Which prefixes are there?"""

    key: int


class SnapshotRequest(NamedTuple):
    """What is in memory, page by page? The answer is JSON (control.scene), which begins with `took`, the seconds of
    processor time that looking took, and writing the answer, and sending the one before; and `busy`, the engine's
    processor time a second since somebody looked before."""

    key: int


class AdminRequest(NamedTuple):
    """Look after the engine: do `what`, one of CARES. "reset" forgets cached prefixes; the answer is how many pages
    were emptied. "sleep" and "wake" are those of control.rest, for a `level` and `tags`; the answer to them and to
    "rest" is JSON, how it is then. A sleep with requests under way is refused, or waits for their end, or has them end,
    as `mode`, one of MODES, says."""

    key: int
    what: str
    level: int = 0
    mode: str = "refuse"
    tags: tuple[str, ...] = ()


ADMIN_OPERATIONS = ("reset", "sleep", "wake", "rest")
SLEEP_MODES = ("refuse", "wait", "abort")
ClientMessage = (
    AddRequests
    | AbortRequests
    | StopBranch
    | RegisterPrefix
    | ReleasePrefix
    | ListPrefixes
    | SnapshotRequest
    | AdminRequest
)


class Reply(NamedTuple):
    """Of a question: what went wrong, if anything did; else what was asked."""

    key: int
    error: Exception | None = None
    value: int | str | tuple[dict[str, int], tuple[str, ...]] | None = None


class RequestProgress(NamedTuple):
    """How far a request has come, in seconds of CLOCK_MONOTONIC: told with its first output, and with its last."""

    number: int
    max_tokens: int
    scheduled: float | None
    first_token: float | None
    cached_tokens: int
    preemptions: int


class QueueSizes(NamedTuple):
    """Requests that wait for their first step, are in memory, or in host memory; `deferred` of those that wait, until
    another one has computed a common prefix; `batches` that those that wait are of."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    deferred: int = 0
    batches: int = 0


class EngineMetrics(NamedTuple):
    """What is so, and what was counted since the start."""

    account: Account
    stats: EngineStats
    preempted: Mapping[str, int]  # requests, by the way it was done
    seconds: float = 0.0  # of processor time, of the engine's thread, or of its process where it has one
    mapped: MappingStats = MappingStats()
    ranks: tuple[RankUsage, ...] = ()  # where the model is in processes of its own
    asleep: int = 0  # the level; 0: it is awake


class StepOutputs(NamedTuple):
    """What a step brought for one front, at `now` of CLOCK_MONOTONIC. `outputs` are by the requests' numbers. The first
    front learns how many tokens were `computed`."""

    now: float
    queues: QueueSizes
    computed: int
    progress: Sequence[RequestProgress]
    outputs: Sequence[tuple[int, BranchOutput]]
    facts: EngineMetrics | None = None


class EngineExited(NamedTuple):
    """The engine's loop ended, and why. Nothing follows."""

    error: BaseException


EngineMessage = Reply | StepOutputs | EngineExited


class EngineReady(NamedTuple):
    """What a front must know of an engine that was built. `lines` are its memory plan, `notices` what is said at start;
    `cache` are facts of the KV memory by vLLM's names."""

    limits: EngineLimits
    lines: tuple[str, ...]
    notices: tuple[str, ...]
    cache: Mapping[str, object]
    facts: EngineMetrics


def queue_sizes(engine: Engine) -> QueueSizes:
    """As they are now."""
    scheduler = engine.scheduler
    waiting = scheduler.waiting
    return QueueSizes(
        len(waiting), len(scheduler.running), len(scheduler.swapped), scheduler.num_prefix_waiters, waiting.num_batches
    )


def collect_metrics(engine: Engine, seconds: float = 0.0) -> EngineMetrics:
    """As they are now; asked on the engine's thread."""
    scheduler = engine.scheduler
    mapped = getattr(engine.runner, "mapping_stats", None) or MappingStats()
    ranks = getattr(engine.runner, "used", ())
    return EngineMetrics(scheduler.memory.account(), engine.stats.copy(), dict(scheduler.preemption_counts), seconds,
    mapped, ranks,
                 engine.sleep_controller.level)  # fmt: skip


def engine_ready(engine: Engine, lines: list[str], notices: tuple[str, ...]) -> EngineReady:
    """What fronts must know of an engine."""
    memory = engine.scheduler.memory
    cache = kv_cache_info(memory.kv_config, engine.limits.max_len, memory.account())
    return EngineReady(engine.limits, tuple(lines), notices, cache, collect_metrics(engine))


def kv_cache_info(geometry: KVCacheConfig, max_len: int, account: Account) -> dict[str, object]:
    """vLLM's names, and ours: `num_blocks` and `page_bytes` of each pool of pages, or of each group of layers where all
    have all of the memory in common, in large pages of `large_page_bytes`. `num_gpu_blocks` times `block_size`
    is the size in tokens, of which every layer takes a place."""
    pools = {group.ids: group for group in geometry.groups}  # unlike pages have one each
    users = Counter(group.ids for group in geometry.groups)
    shape = {
        "block_size": [group.run_tokens for group in pools.values()],
        "num_blocks": [len(ids) for ids in pools],
        "page_bytes": [group.page_bytes for group in pools.values()],
    }
    if geometry.large_bytes:
        tokens = geometry.tokens_in_large_pages()
    else:
        tokens = min(len(ids) // users[ids] // group.run_pages * group.run_tokens for ids, group in pools.items())
    facts: dict[str, object] = {name: ",".join(map(str, dict.fromkeys(sizes))) for name, sizes in shape.items()}
    if geometry.large_bytes:
        facts["large_page_bytes"] = geometry.large_bytes
    return facts | {
        "layout": geometry.layout.value,
        "num_gpu_blocks": tokens // min(shape["block_size"]),
        "num_cpu_blocks": account.sharing.host_pages,
        "kv_cache_size_tokens": tokens,
        "kv_cache_max_concurrency": f"{tokens / max_len:.2f}",
        "kv_cache_memory_bytes": account.usage.total,
    }
