"""Messages between clients and the engine. One thread of the engine handles the messages of all clients in order, and
sends each client its outputs once a step.

A client numbers its requests; the numbers are its own. A message with a `key` is answered by the Reply with the same
key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from typing import NamedTuple

from quire.core.engine import Engine
from quire.core.outputs import BranchOutput, EngineStats
from quire.core.validation import EngineLimits
from quire.memory.answers import Account, Sharing, TypeUsage, Usage
from quire.memory.page_keys import PromptKeys
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.shared_host import SharedPage
from quire.protocol.step_plan import MappingStats, RankUsage

MAX_NUMBER = 2**32 - 1  # the largest number or key
MAX_CLIENT_NUMBER = 2**31 - 1  # the largest of a RequestTracker; larger ones are those of quire.ipc.replicas
MAX_REQUESTS = 1 << 16  # in a message
MAX_ID_CHARS = 1024  # characters of a request's id
MAX_TAGS = 16  # in a wake-up
MAX_SHARED_PAGES = 1 << 18  # in a message
ADMIN_OPERATIONS = ("reset", "sleep", "wake", "rest")
SLEEP_MODES = ("refuse", "wait", "abort")


class NewRequest(NamedTuple):
    """A request: the client's number for it, its id, unique among all clients, its prompt, and the images in the
    prompt."""

    number: int
    id: str
    prompt: Sequence[int]
    media: tuple[ImageItem, ...] = ()


class AddRequests(NamedTuple):
    """Queue all of these requests, or none. Their parameters are resolved: words are token ids. `pixels` has each of
    their images once. `client`, at most MAX_CLIENT_CHARS characters, names the API client, among which the engine is
    shared fairly. With `hands_over` each request ends in a HandOver, without outputs."""

    key: int
    requests: tuple[NewRequest, ...]
    params: SamplingParams
    salt: str = ""
    pixels: tuple[ImagePixels, ...] = ()
    client: str = ""
    hands_over: bool = False


class ImportPages(NamedTuple):
    """Copy pages that other engines have handed over into the prefix cache. The reply, 0 if there is no room for them,
    else 1, comes once they are not read any more."""

    key: int
    pages: Sequence[SharedPage]


class ReleaseHandOver(NamedTuple):
    """Release the pages of a HandOver. Ignore unknown numbers."""

    number: int


class AbortRequests(NamedTuple):
    """End requests whose callers left; None: all of this client's."""

    numbers: tuple[int, ...] | None


class StopBranch(NamedTuple):
    """End a branch, because its text has a stop string. Once the engine has handled it, it sends no more output of
    the branch; the client drops what is still on its way."""

    number: int
    branch: int
    reason: str


class RegisterPrefix(NamedTuple):
    """Compute a prefix and keep it. Its progress and output are those of a request with that number."""

    key: int
    number: int
    name: str
    tokens: Sequence[int]


class ReleasePrefix(NamedTuple):
    """Release a prefix. The reply is whether it was registered."""

    key: int
    name: str


class ListPrefixes(NamedTuple):
    """Ask which prefixes are registered."""

    key: int


class SnapshotRequest(NamedTuple):
    """Ask what is in memory, page by page. The reply is JSON (quire.core.snapshot), which begins with `took`, the
    seconds of processor time to take the snapshot, write this reply, and send the previous one; and `busy`, the
    engine's processor time per second since the previous snapshot."""

    key: int


class AdminRequest(NamedTuple):
    """Do `what`, one of ADMIN_OPERATIONS. "reset" drops cached prefixes; the reply is how many pages were emptied.
    "sleep" and "wake" are those of quire.core.sleep, for a `level` and `tags`; the reply to them and to "rest" is JSON
    with the resulting state. A sleep with requests in flight is refused, waits for their end, or aborts them, as
    `mode`, one of SLEEP_MODES, says."""

    key: int
    what: str
    level: int = 0
    mode: str = "refuse"
    tags: tuple[str, ...] = ()


ClientMessage = (
    AddRequests | AbortRequests | StopBranch | RegisterPrefix | ReleasePrefix | ListPrefixes | SnapshotRequest
    | AdminRequest | ImportPages | ReleaseHandOver
)  # fmt: skip


class Reply(NamedTuple):
    """The reply to the message with that key: an error, or a value."""

    key: int
    error: Exception | None = None
    value: int | str | tuple[dict[str, int], tuple[str, ...]] | None = None


class RequestProgress(NamedTuple):
    """The progress of a request, sent with its first output and with its last, unless the client ended it by
    StopBranch. Times are seconds of CLOCK_MONOTONIC."""

    number: int
    max_tokens: int
    scheduled: float | None
    first_token: float | None
    cached_tokens: int
    preemptions: int


class QueueSizes(NamedTuple):
    """How many requests wait for their first step, are in memory, or are in host memory; `deferred` is how many of
    those that wait do so for another request that computes a common prefix; `batches` is how many batches those that
    wait belong to."""

    waiting: int = 0
    running: int = 0
    swapped: int = 0
    deferred: int = 0
    batches: int = 0


class EngineMetrics(NamedTuple):
    """The current state of the engine, and its counters since the start."""

    account: Account
    stats: EngineStats
    preempted: Mapping[str, int]  # requests, by how they were preempted
    seconds: float = 0.0  # processor time of the engine's process, or of its thread if it has no process of its own
    mapped: MappingStats = MappingStats()
    ranks: tuple[RankUsage, ...] = ()  # if the model is in processes of its own
    asleep: int = 0  # the sleep level; 0: awake


class StepOutputs(NamedTuple):
    """The outputs of a step for one client, at `now`, in seconds of CLOCK_MONOTONIC. `outputs` have the client's
    numbers of the requests. Only the first client gets `computed`, the number of tokens that were computed."""

    now: float
    queues: QueueSizes
    computed: int
    progress: Sequence[RequestProgress]
    outputs: Sequence[tuple[int, BranchOutput]]
    facts: EngineMetrics | None = None


class CacheUpdate(NamedTuple):
    """The keys of pages that a step stored and dropped (quire.memory.cache_log), for a client that asked for them."""

    stored: Sequence[bytes]
    dropped: Sequence[bytes]


class HandOver(NamedTuple):
    """The end of a request that hands over: the `pages` of its prompt, `page_bytes` in all, of whose tokens
    `cached_tokens` were not computed. There are none if nothing can be reused, the host pages are used up, or the
    request failed. They stay until a ReleaseHandOver."""

    number: int
    cached_tokens: int
    page_bytes: int
    pages: Sequence[SharedPage]


class PageSource(NamedTuple):
    """Where engines of other hosts fetch what an engine hands over (quire.deploy.page_transfer): its address and port,
    the certificate (PEM) that it shows, and the token that it asks for."""

    address: str
    port: int
    certificate: str
    token: str


class PageImport(NamedTuple):
    """What an engine is to copy before it gets requests. `key` is that of the reply. `source` is None if the pages are
    in memory that it shares with the engine that handed them over."""

    key: int
    handover: HandOver
    source: PageSource | None


class EngineExited(NamedTuple):
    """The engine's loop ended, with the reason. No message follows."""

    error: BaseException


EngineMessage = Reply | StepOutputs | CacheUpdate | HandOver | EngineExited


class RequestsFailed(NamedTuple):
    """Requests that were lost with one of several engines, and the error for their callers."""

    numbers: Sequence[int]
    error: BaseException


class HandoverCounts(NamedTuple):
    """Prompts that prefill replicas handed over, the bytes of their pages, and prompts that were to be handed over and
    were computed by the replica that decodes."""

    handovers: int = 0
    page_bytes: int = 0
    fallbacks: int = 0


class EngineReady(NamedTuple):
    """What a client must know of a new engine. `lines` are its memory plan, `notices` are shown at start; `cache`
    describes the KV memory by vLLM's names; `prompt_keys` makes the keys of prompts, if prefixes are cached;
    `page_bytes` are the bytes of a page of each group."""

    limits: EngineLimits
    lines: tuple[str, ...]
    notices: tuple[str, ...]
    cache: Mapping[str, object]
    facts: EngineMetrics
    prompt_keys: PromptKeys | None = None
    page_bytes: tuple[int, ...] = ()


def queue_sizes(engine: Engine) -> QueueSizes:
    """Return the current queue sizes."""
    scheduler = engine.scheduler
    waiting = scheduler.waiting
    return QueueSizes(
        len(waiting), len(scheduler.running), len(scheduler.swapped), scheduler.num_prefix_waiters, waiting.num_batches
    )


def collect_metrics(engine: Engine, seconds: float = 0.0) -> EngineMetrics:
    """Return the current metrics. Must be called on the engine's thread."""
    scheduler = engine.scheduler
    mapped = getattr(engine.runner, "mapping_stats", None) or MappingStats()
    ranks = getattr(engine.runner, "used", ())
    return EngineMetrics(
        scheduler.memory.account(), engine.stats.copy(), dict(scheduler.preemption_counts), seconds, mapped, ranks,
        engine.sleep_controller.level,
    )  # fmt: skip


def sum_metrics(metrics: Sequence[EngineMetrics]) -> EngineMetrics:
    """Return the metrics of several engines together. All of them have the same registered prefixes."""
    accounts, stats = [one.account for one in metrics], [one.stats for one in metrics]
    each = [account.sharing for account in accounts]
    alike = {name: max(getattr(one, name) for one in each) for name in ("prefixes", "prefix_tokens", "prefix_capacity")}
    sharing = Sharing(*map(sum, zip(*each)))._replace(**alike)
    types = [
        TypeUsage(same[0].layer_type, *(sum(sizes) for sizes in zip(*(one[1:] for one in same))))
        for same in zip(*(account.types for account in accounts if account.types))
    ]
    plain = [field.name for field in fields(EngineStats) if field.name not in ("finished", "accepted_per_pos")]
    summed = EngineStats(**{name: sum(getattr(one, name) for one in stats) for name in plain})
    summed.finished = dict(sum((Counter(one.finished) for one in stats), Counter()))
    summed.accepted_per_pos = list(map(sum, zip(*(one.accepted_per_pos for one in stats))))
    return EngineMetrics(
        Account(Usage(*map(sum, zip(*(account.usage for account in accounts)))), sharing, tuple(types)), summed,
        dict(sum((Counter(one.preempted) for one in metrics), Counter())), sum(one.seconds for one in metrics),
        MappingStats(*map(sum, zip(*(one.mapped for one in metrics)))),
        tuple(chain.from_iterable(one.ranks for one in metrics)), max(one.asleep for one in metrics),
    )  # fmt: skip


def ended_metrics(metrics: EngineMetrics) -> EngineMetrics:
    """Return the metrics of an engine that has ended: its counters, and nothing in memory."""
    account = Account(Usage(0, 0, 0, 0, 0, 0), metrics.account.sharing._replace(tables=0, saved=0, host_pages_used=0,
                      host_pages=0, prefixes=0, prefix_tokens=0), ())  # fmt: skip
    return metrics._replace(account=account, ranks=(), mapped=metrics.mapped._replace(mapped_bytes=0))


def sum_queue_sizes(sizes: Iterable[QueueSizes]) -> QueueSizes:
    """Return the queue sizes of several engines together."""
    return QueueSizes(*map(sum, zip(*sizes)))


def engine_ready(engine: Engine, lines: list[str], notices: tuple[str, ...]) -> EngineReady:
    """Return what clients must know of a new engine."""
    memory = engine.scheduler.memory
    cache = kv_cache_info(memory.kv_config, engine.limits.max_len, memory.account())
    keys = memory.prefix_cache.prompt_keys() if memory.prefix_cache is not None else None
    page_bytes = tuple(group.page_bytes for group in memory.kv_config.groups)
    return EngineReady(engine.limits, tuple(lines), notices, cache, collect_metrics(engine), keys, page_bytes)


def kv_cache_info(geometry: KVCacheConfig, max_len: int, account: Account) -> dict[str, object]:
    """Describe the KV memory by vLLM's names and ours: `num_blocks` and `page_bytes` of each pool of pages, or, if all
    groups of layers share the memory in large pages of `large_page_bytes`, of each group. `num_gpu_blocks` times
    `block_size` is the size in tokens, each of which takes a slot in every layer."""
    pools = {group.ids: group for group in geometry.groups}  # pages of different kinds have one pool each
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
