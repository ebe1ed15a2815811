"""Several engines behind one client. A router chooses the engine of each request; all other messages go to all engines,
and their replies become one.

An engine that ends is left out. Its requests without an output are sent to others, and the others fail. Engines that
are started later can be taken in, and engines can be drained (quire.deploy).

With prefill replicas a request takes two engines. One of these computes its prompt and hands over the pages
(quire.ipc.page_handover); then the request is sent, whole, to a decode replica, after the message that makes it copy
these pages into its prefix cache. So the decode replica serves it as any request, with a prefix hit, and whatever of
the handover fails, it computes the prompt itself."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Protocol

from quire.core.outputs import BranchOutput
from quire.errors import EngineDead, Overloaded, StartupError
from quire.ipc.engine_client import EngineClient
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
    MAX_CLIENT_NUMBER,
    MAX_NUMBER,
    AbortRequests,
    AddRequests,
    AdminRequest,
    CacheUpdate,
    ClientMessage,
    EngineExited,
    EngineMessage,
    EngineMetrics,
    EngineReady,
    HandOver,
    HandoverCounts,
    ImportPages,
    ListPrefixes,
    NewRequest,
    PageImport,
    PageSource,
    QueueSizes,
    RegisterPrefix,
    ReleaseHandOver,
    ReleasePrefix,
    Reply,
    RequestProgress,
    RequestsFailed,
    SnapshotRequest,
    StepOutputs,
    StopBranch,
    ended_metrics,
    sum_metrics,
    sum_queue_sizes,
)
from quire.ipc.process_client import ProcessEngineClient
from quire.protocol.sampling_params import SamplingParams
from quire.router.router import Router, WorkCosts

COSTS = WorkCosts(1.0, 3.5)  # an output token costs 3.0 to 4.8 times as much as a prompt token in the calibrations
RETRY_AFTER = 5  # seconds
PROMPT_PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)  # of prompts for prefill replicas
MIN_PREFILL_TOKENS = 64  # of a prompt; a decode replica computes so few beside its other work
MAX_MOVES = 1  # of a request, after the ends of its replicas: it may be what ended them
log = logging.getLogger("quire.ipc")


class ReplicaClient(EngineClient, Protocol):
    """A connection to one engine. `page_source` is where other hosts fetch the pages that it hands over."""

    queue_sizes: QueueSizes
    metrics: EngineMetrics

    @property
    def page_source(self) -> PageSource | None: ...
    def add_requests(self, message: AddRequests, imports: Sequence[PageImport]) -> bool: ...
    def start_replacement(self) -> ReplicaClient: ...


class SentRequest:
    """A request in flight. `message`, which it was sent in, is None from its first output on. `cached_tokens` are those
    of the replica that computed its prompt, if that was another one."""

    __slots__ = ("cached_tokens", "message", "moves", "replica", "request")

    def __init__(
        self, message: AddRequests, request: NewRequest, replica: int, moves: int, cached_tokens: int | None
    ) -> None:
        self.message: AddRequests | None = message
        self.request, self.replica, self.moves, self.cached_tokens = request, replica, moves, cached_tokens


class PendingAdd:
    """An AddRequests that waits for its reply from `replica`. `keys` are those of its prompts, `refused` the replicas
    that have refused it. `handovers` are those of prefill replicas, for the replica that it is sent to, and
    `cached_tokens` those that these replicas found, by number of the request."""

    def __init__(self, message: AddRequests, keys: Sequence[Sequence[bytes]], moves: int = 0) -> None:
        self.message, self.keys, self.moves = message, keys, moves
        self.replica: int | None = None
        self.refused = set[int]()
        self.handovers = list[tuple[int, HandOver]]()
        self.cached_tokens = dict[int, int]()

    @property
    def numbers(self) -> list[int]:
        """The numbers of its requests."""
        return [request.number for request in self.message.requests]


class PromptComputation:
    """The prompts of an AddRequests, which a prefill replica computes. `numbers` are those of the caller's requests by
    the numbers of the prompts that have yet to be handed over. Requests in `forgotten` have ended for their caller.
    Pages that were computed before a reset of the caches are `is_stale`."""

    def __init__(self, pending: PendingAdd, replica: int, numbers: dict[int, int]) -> None:
        self.pending, self.replica, self.numbers = pending, replica, numbers
        self.forgotten = set[int]()
        self.is_stale = False


class PendingImport:
    """Pages of a prefill replica that a decode replica copies. `handover` is released afterwards."""

    def __init__(self, prefill: int, decode: int, handover: HandOver) -> None:
        self.prefill, self.decode, self.handover = prefill, decode, handover


class PendingBroadcast:
    """A message that several replicas were sent, those that have yet to reply, and the replies of the others."""

    def __init__(self, message: ClientMessage, replicas: Collection[int]) -> None:
        self.message, self.waiting = message, set(replicas)
        self.replies = dict[int, Reply]()


class PrefixComputation:
    """A prefix that replicas compute, and the last outputs of those that have ended it."""

    def __init__(self, message: RegisterPrefix, replicas: Collection[int]) -> None:
        self.message, self.computing = message, set(replicas)
        self.ends = dict[int, BranchOutput]()
        self.is_aborted = False


Passed = list[EngineMessage | RequestsFailed]  # to the client's user


class ReplicatedEngineClient:
    """A connection to engines of one model, in processes of their own, which are ready. `policy` is the router's. With
    `restart` an engine that ends is started again, once. The first `num_prefill` engines compute prompts for the
    others, unless no more than a page, or `min_prefill_tokens`, is missing there. With `elastic` engines may be taken
    in later, so the client does not end with its last engine."""

    is_in_process, engine = False, None

    def __init__(
        self, replicas: Sequence[ReplicaClient], policy: str, restart: bool = False, num_prefill: int = 0,
        min_prefill_tokens: int = MIN_PREFILL_TOKENS, elastic: bool = False,
    ) -> None:  # fmt: skip
        self.replicas = list(replicas)
        self.ready = _join_ready([replica.ready for replica in replicas])
        self._prompt_keys = keys = self.ready.prompt_keys if policy == "prefix" else None
        page_tokens = keys.page_tokens if keys is not None else 1.0
        self.router = Router(len(replicas), policy, COSTS, page_tokens)
        self._prefill_replicas, self._min_prefill_tokens = set(range(num_prefill)), float(min_prefill_tokens)
        if num_prefill:
            check_reusable(self.ready, f"--prefill-replicas is {num_prefill}")
        if self.ready.prompt_keys is not None:  # the last tokens of a prompt, up to a page, are always missing
            self._min_prefill_tokens = max(self._min_prefill_tokens, self.ready.prompt_keys.page_tokens)
        self._computations = dict[int, PromptComputation]()  # by key of the AddRequests to the prefill replica
        self._imports = dict[int, PendingImport]()  # by key of the PageImport
        self.handover_counts = HandoverCounts()
        self._alive, self._can_restart = set(range(len(replicas))), set(range(len(replicas)) if restart else ())
        self._restarting, self._elastic = set[int](), elastic
        self._replaced = list[EngineMetrics]()  # of engines in whose place others are
        self._lock = threading.RLock()
        self._requests = dict[int, SentRequest]()  # by number
        self._aborted = set[int]()  # numbers of requests
        self._adds = dict[int, PendingAdd]()  # by key, the client's and our own
        self._broadcasts = dict[int, PendingBroadcast]()  # by key
        self._prefix_computations = dict[int, PrefixComputation]()  # by number
        self._prefixes = dict[str, RegisterPrefix]()  # computed
        self._sleep: AdminRequest | None = None  # what all replicas were put to sleep with
        self._own_numbers = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._receive: Callable[[EngineMessage | RequestsFailed], None]

    def start(self, receive: Callable[[EngineMessage | RequestsFailed], None]) -> None:
        """Pass the engines' messages to `receive`."""
        self._receive = receive
        for i, replica in enumerate(self.replicas):
            replica.start(partial(self._on_message, i))

    def attach_event_loop(self) -> None:
        """Read the connections on the running event loop, unless an open loop reads them already."""
        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.get_running_loop()
        for i in list(self._alive):
            self.replicas[i].attach_event_loop()

    @property
    def queue_sizes(self) -> QueueSizes:
        """The queue sizes of all engines together."""
        return sum_queue_sizes([self.replicas[i].queue_sizes for i in list(self._alive)] or [QueueSizes()])

    @property
    def metrics(self) -> EngineMetrics:
        """The metrics of all engines together. The counters include those of engines that have ended."""
        return sum_metrics([*(replica.metrics for replica in self.replicas), *self._replaced])

    def health(self) -> Health:
        """Return the health of an engine that serves: of one that moves on, if there is one."""
        found = {i: self.replicas[i].health() for i in list(self._alive)}
        if not found:
            return Health(True, True, time.monotonic(), "all replicas have ended, and are being started again")
        i = min(found, key=lambda i: (found[i].stalled, found[i].beat))
        return found[i]._replace(why=f"replica {i}: {found[i].why}") if found[i].stalled else found[i]

    def start_replacement(self) -> ReplicatedEngineClient:
        """Raise StartupError: an engine that ends is started again while the others serve."""
        raise StartupError("all replicas have ended, and none can be started again", "The log says why they ended")

    def cancel_replacement(self) -> None:
        """Do nothing: see `start_replacement`."""

    def close(self, timeout: float) -> bool:
        """End the processes. Return True if all ended by themselves within `timeout` seconds."""
        with self._lock:
            self._closing = True
        for i in list(self._restarting):
            self.replicas[i].cancel_replacement()
        with ThreadPoolExecutor(len(self.replicas)) as threads:
            ended = all(threads.map(lambda replica: replica.close(timeout), self.replicas))
        first = self.replicas[0]
        if isinstance(first, ProcessEngineClient) and first.child.shared_memory is not None:
            first.child.shared_memory.close()
        return ended

    # Engines that come and go. Called on the event loop

    def take_in(self, client: ReplicaClient, is_prefill: bool = False) -> int:
        """Let an engine serve that was started later, to compute prompts for the others or to decode, and return its
        index: that of an engine that has ended, if there is one. Raise StartupError if it serves another model than the
        others."""
        _join_ready([self.ready, client.ready])
        if client.ready.limits.max_len < self.ready.limits.max_len:
            cause = f"the longest sequence of a new replica is {client.ready.limits.max_len} tokens"
            raise StartupError(
                f"{cause}, that of the others {self.ready.limits.max_len}", "Give all replicas one --max-model-len"
            )
        with self._lock:
            unused = (i for i in range(len(self.replicas)) if i not in self._alive | self._restarting)
            i = next(unused, len(self.replicas))
            if i == len(self.replicas):
                self.replicas.append(client)
                self.router.add_replica()
            else:
                self._replaced = [sum_metrics([self.replicas[i].metrics, *self._replaced])]
                self.replicas[i] = client
            self._prefill_replicas.discard(i)
            if is_prefill:
                self._prefill_replicas.add(i)
            self._begin_serving(i)
        return i

    def drain(self, client: ReplicaClient) -> None:
        """Send an engine no more requests. Those that it has go on."""
        with self._lock:
            self.router.drain(self.replicas.index(client))

    # Messages to the engines, from any thread

    def send(self, message: ClientMessage) -> bool:
        """Send a message to one engine or to all. Return False if no engine takes more."""
        assert not isinstance(message, ImportPages | ReleaseHandOver), "only this client hands pages over"
        if isinstance(message, AddRequests):
            keys = [self._keys(message, request) for request in message.requests]
        with self._lock:
            if isinstance(message, AddRequests):
                pending = PendingAdd(message, keys)
                is_sent = self._compute_prompts(pending) or self._add(pending)
            elif isinstance(message, StopBranch):
                if (sent := self._requests.get(message.number)) is not None:
                    self.replicas[sent.replica].send(message)
                return True
            elif isinstance(message, AbortRequests):
                self._abort(message)
                return True
            else:
                is_sent = self._broadcast(message)
            if is_sent or not self._expects_engines:
                return is_sent
        self._receive(Reply(message.key, _overloaded()))
        return True

    def forget(self, number: int) -> int | None:
        """Forget a request that has ended for its caller. Return its replica, or None if that has ended."""
        with self._lock:
            self._aborted.discard(number)
            sent = self._requests.pop(number, None)
            if sent is None:
                for computation in self._computations.values():
                    if number in computation.pending.numbers:
                        computation.forgotten.add(number)
                return None
            self.router.finish(number)
            self.replicas[sent.replica].forget(number)
            return sent.replica

    @property
    def _expects_engines(self) -> bool:
        """True if engines may serve later that do not now."""
        return self._elastic or bool(self._restarting)

    def _keys(self, message: AddRequests, request: NewRequest) -> Sequence[bytes]:
        if self._prompt_keys is None:
            return ()
        return self._prompt_keys.of_prompt(request.prompt, message.salt, request.media)

    def _add(self, pending: PendingAdd) -> bool:
        """Send requests to the replica that the router chooses. Return False if none takes them."""
        message = pending.message
        length = sum(len(request.prompt) for request in message.requests)
        excluded = set(self._prefill_replicas) if self._alive - self._prefill_replicas else set()
        stalled = self._stalled()
        if not stalled >= self._alive - excluded - pending.refused:
            excluded |= stalled
        keys = pending.keys[0] if pending.keys else ()
        while (at := self.router.choose(keys, length, pending.refused | excluded)) is not None:
            if self.replicas[at].add_requests(message, self._begin_imports(at, pending)):
                break
            pending.refused.add(at)  # it is ending
        if at is None:
            return False
        pending.replica = at
        self._adds[message.key] = pending
        for request, of_prompt in zip(message.requests, pending.keys):
            cached_tokens, to_compute = pending.cached_tokens.get(request.number), len(request.prompt)
            self._requests[request.number] = SentRequest(message, request, at, pending.moves, cached_tokens)
            most = message.params.max_tokens
            most = self.ready.limits.max_len - len(request.prompt) if most is None else most
            if cached_tokens is not None:  # the replica copies its pages, and will report them
                of_prompt, to_compute = (), 1
            self.router.add(request.number, at, of_prompt, to_compute, max(most, 1) * message.params.n)
        if aborted := tuple(self._aborted.intersection(pending.numbers)):
            self.replicas[at].send(AbortRequests(aborted))
        return True

    def _stalled(self) -> set[int]:
        return {i for i in self._alive if self.replicas[i].health().stalled}

    # Prompts that prefill replicas compute

    def _compute_prompts(self, pending: PendingAdd) -> bool:
        """Send the prompts of an AddRequests to a prefill replica. Return False if there is none, or if the requests
        are better served by a decode replica alone."""
        message, params = pending.message, pending.message.params
        decode = self._alive - self._prefill_replicas
        needs_all_logits = params.prompt_logprobs is not None or params.pooling is not None
        if not self._prefill_replicas or not decode or needs_all_logits or message.pixels:
            return False
        stalled, length = self._stalled(), sum(len(request.prompt) for request in message.requests)
        target = self.router.choose(pending.keys[0], length, self._prefill_replicas | stalled)
        each = list(zip(message.requests, pending.keys))
        if target is not None:
            missing = sum(self.router.missing_tokens(target, keys, len(request.prompt)) for request, keys in each)
            if missing <= self._min_prefill_tokens * len(each):
                return False
        at = self.router.choose(
            pending.keys[0], length, {*range(len(self.replicas))} - self._prefill_replicas | stalled
        )
        numbers = {self._own_number(): request.number for request in message.requests}
        prompts = tuple(NewRequest(own, request.id, request.prompt) for own, request in zip(numbers, message.requests))
        sent = AddRequests(self._own_number(), prompts, PROMPT_PARAMS, message.salt, (), message.client, True)
        if at is None or not self.replicas[at].send(sent):
            self._count_fallbacks(len(each))
            return False
        self._computations[sent.key] = PromptComputation(pending, at, numbers)
        for own, (request, keys) in zip(numbers, each):
            self.router.add(own, at, keys, len(request.prompt), 1)
        return True

    def _on_hand_over(self, replica: int, message: HandOver) -> Passed:
        for key, computation in self._computations.items():
            if computation.replica == replica and (number := computation.numbers.pop(message.number, None)) is not None:
                self.router.remove(message.number)
                if message.pages:
                    computation.pending.cached_tokens[number] = message.cached_tokens
                    computation.pending.handovers.append((replica, message))
                elif number not in self._aborted:
                    self._count_fallbacks(1)
                return [] if computation.numbers else self._end_computation(key)
        self._release_pages([(replica, message)])  # it is not waited for any more
        return []

    def _end_computation(self, key: int) -> Passed:
        """Send the requests whose prompts were computed, or could not be, to a decode replica."""
        computation = self._computations.pop(key)
        pending = computation.pending
        self._count_fallbacks(len(computation.numbers))
        for own in computation.numbers:
            if own in self.router.requests:
                self.router.remove(own)
        if computation.is_stale:
            self._count_fallbacks(len(pending.handovers))
            self._release_pages(pending.handovers)
            pending.handovers, pending.cached_tokens = [], {}
        passed: Passed = []
        if not self._add(pending):
            self._release_pages(pending.handovers)
            passed = self._end_add(pending, _overloaded())
        for number in computation.forgotten:
            if (sent := self._requests.get(number)) is not None:
                self.replicas[sent.replica].send(AbortRequests((number,)))
                self.forget(number)
        return passed

    def _begin_imports(self, replica: int, pending: PendingAdd) -> list[PageImport]:
        """Return what a replica is to copy before the requests that it is sent next."""
        handovers, pending.handovers = pending.handovers, []
        imports = list[PageImport]()
        for prefill, handover in handovers:
            imports.append(PageImport(self._own_number(), handover, self.replicas[prefill].page_source))
            self._imports[imports[-1].key] = PendingImport(prefill, replica, handover)
        return imports

    def _end_import(self, key: int, is_imported: bool) -> None:
        ended = self._imports.pop(key)
        if is_imported:
            handovers, page_bytes, fallbacks = self.handover_counts
            page_bytes += ended.handover.page_bytes
            self.handover_counts = HandoverCounts(handovers + 1, page_bytes, fallbacks)
        else:
            self._count_fallbacks(1)
        self._release_pages([(ended.prefill, ended.handover)])

    def _count_fallbacks(self, count: int) -> None:
        self.handover_counts = self.handover_counts._replace(fallbacks=self.handover_counts.fallbacks + count)

    def _release_pages(self, handovers: Iterable[tuple[int, HandOver]]) -> None:
        for prefill, handover in handovers:
            if handover.pages:
                self.replicas[prefill].send(ReleaseHandOver(handover.number))

    def _end_handovers(self, replica: int) -> Passed:
        """Wait no longer for prompts and copies of a replica that has ended."""
        for key, one in list(self._imports.items()):
            if one.decode == replica:
                self._end_import(key, False)
        passed: Passed = []
        for key, computation in list(self._computations.items()):
            if computation.replica == replica:  # its pages may be overwritten once it is started again
                computation.pending.handovers, computation.pending.cached_tokens = [], {}
                passed += self._end_computation(key)
        return passed

    def _abort(self, message: AbortRequests) -> None:
        for prompts in self._computations.values():
            numbers = prompts.pending.numbers
            aborted = set(numbers if message.numbers is None else message.numbers).intersection(numbers)
            self._aborted |= aborted
            if computing := tuple(own for own, number in prompts.numbers.items() if number in aborted):
                self.replicas[prompts.replica].send(AbortRequests(computing))
        if message.numbers is None:
            self._aborted.update(self._requests)
            for i in self._alive:
                self.replicas[i].send(message)
            return
        for number in message.numbers:
            if (sent := self._requests.get(number)) is not None:
                self._aborted.add(number)
                self.replicas[sent.replica].send(AbortRequests((number,)))
            if (computation := self._prefix_computations.get(number)) is not None:
                computation.is_aborted = True
                for i in computation.computing:
                    self.replicas[i].send(AbortRequests((number,)))

    def _broadcast(
        self, message: RegisterPrefix | ReleasePrefix | ListPrefixes | SnapshotRequest | AdminRequest
    ) -> bool:
        """Send a message to all replicas; a snapshot is that of the first one."""
        to = {i for i in self._alive if not self.router.replicas[i].is_draining}
        if isinstance(message, SnapshotRequest):
            to = set(sorted(to)[:1])
        if not to:
            return False
        self._broadcasts[message.key] = PendingBroadcast(message, to)
        if isinstance(message, RegisterPrefix):
            self._prefix_computations[message.number] = PrefixComputation(message, to)
        elif isinstance(message, ReleasePrefix):
            self._prefixes.pop(message.name, None)
        elif isinstance(message, AdminRequest) and message.what in ("reset", "sleep"):
            for prompts in self._computations.values():
                prompts.is_stale = True
        for i in to:
            self.replicas[i].send(message)
        return True

    def _own_number(self) -> int:
        """Return the number or key of a request or message that comes from here, not from the client's user."""
        return MAX_NUMBER - (next(self._own_numbers) & MAX_CLIENT_NUMBER)

    # Messages of the engines

    def _on_message(self, replica: int, message: EngineMessage) -> None:
        passed: Passed = []
        with self._lock:
            match message:
                case StepOutputs():
                    passed = [self._on_step(replica, message)]
                case Reply():
                    passed = self._on_reply(replica, message)
                case HandOver():
                    passed = self._on_hand_over(replica, message)
                case CacheUpdate(stored, dropped):
                    self.router.update_keys(replica, stored, dropped)
                case EngineExited(error):
                    passed = self._on_exit(replica, error)
        for each in passed:
            self._receive(each)

    def _on_step(self, replica: int, message: StepOutputs) -> StepOutputs:
        """Count new tokens. Of the outputs of a prefix only the last one of all replicas is passed on."""
        outputs = list[tuple[int, BranchOutput]]()
        for number, output in message.outputs:
            sent, computation = self._requests.get(number), self._prefix_computations.get(number)
            if sent is not None and sent.replica == replica:
                sent.message = None
                self.router.record_tokens(number, len(output.tokens))
            if computation is None:
                if sent is not None and sent.cached_tokens is not None:
                    output = output._replace(cached_tokens=sent.cached_tokens)
                outputs.append((number, output))
            elif output.done:
                computation.computing.discard(replica)
                computation.ends[replica] = output
                if not computation.computing:
                    outputs.append((number, self._end_prefix(number, computation)))
        held = self._prefix_computations
        progress = [one for one in message.progress if one.number not in held] if held else message.progress
        if self._prefill_replicas:
            progress = list(map(self._with_cached_tokens, progress))
        return message._replace(progress=progress, outputs=outputs)

    def _with_cached_tokens(self, progress: RequestProgress) -> RequestProgress:
        """Return the progress with the tokens that the replica found that computed the prompt."""
        sent = self._requests.get(progress.number)
        cached_tokens = None if sent is None else sent.cached_tokens
        return progress if cached_tokens is None else progress._replace(cached_tokens=cached_tokens)

    def _end_prefix(self, number: int, computation: PrefixComputation) -> BranchOutput:
        """Return the output that ends a prefix for its caller. If one replica failed, it is that one's, and the others
        release the prefix."""
        del self._prefix_computations[number]
        ends, prefix = computation.ends, computation.message
        failed = next((output for output in ends.values() if output.finish_reason in ("abort", "error")), None)
        if failed is None and not computation.is_aborted:
            self._prefixes[prefix.name] = prefix
            return next(iter(ends.values()))
        self._release(prefix.name, [i for i, output in ends.items() if output.finish_reason not in ("abort", "error")])
        return failed if failed is not None else next(iter(ends.values()))._replace(finish_reason="abort")

    def _release(self, prefix: str, replicas: Iterable[int]) -> None:
        for i in self._alive.intersection(replicas):
            self.replicas[i].send(ReleasePrefix(self._own_number(), prefix))

    def _on_reply(self, replica: int, reply: Reply) -> Passed:
        if (broadcast := self._broadcasts.get(reply.key)) is not None:
            broadcast.waiting.discard(replica)
            broadcast.replies[replica] = reply
            return self._finish_broadcast(reply.key, broadcast)
        if reply.key in self._imports:
            self._end_import(reply.key, reply.error is None and bool(reply.value))
        if reply.key in self._computations:
            return [] if reply.error is None else self._end_computation(reply.key)
        pending = self._adds.get(reply.key)
        if pending is None or pending.replica != replica:
            if reply.error is not None:
                log.error("replica %d: %s", replica, reply.error)
            return []
        del self._adds[reply.key]
        if isinstance(reply.error, Overloaded):
            pending.refused.add(replica)
            self._remove(pending)
            if self._add(pending):
                return []
        return self._end_add(pending, reply.error)

    def _remove(self, pending: PendingAdd) -> None:
        """Forget that requests were sent to a replica, which has refused them."""
        for number in pending.numbers:
            if self._requests.pop(number, None) is not None:
                self.router.remove(number)

    def _end_add(self, pending: PendingAdd, error: Exception | None) -> Passed:
        """Return what the client's user gets of an add's reply: of a request that was moved, only a failure."""
        if error is not None:
            self._remove(pending)
        if pending.message.key <= MAX_CLIENT_NUMBER:
            return [Reply(pending.message.key, error)]
        return [] if error is None else [RequestsFailed(pending.numbers, error)]

    def _finish_broadcast(self, key: int, broadcast: PendingBroadcast) -> Passed:
        """Return the reply to a message, once all replicas have replied. If some failed, the others undo it."""
        if broadcast.waiting:
            return []
        del self._broadcasts[key]
        message, replies = broadcast.message, broadcast.replies
        error = next((reply.error for reply in replies.values() if reply.error is not None), None)
        if error is not None:
            self._undo(message, self._alive.intersection(i for i, reply in replies.items() if reply.error is None))
            return [Reply(key, error)]
        if isinstance(message, AdminRequest) and message.what in ("sleep", "wake"):
            self._sleep = message if message.what == "sleep" else None
        return [_join_replies(message, [replies[i] for i in sorted(replies)])]

    def _undo(self, message: ClientMessage, replicas: Collection[int]) -> None:
        match message:
            case RegisterPrefix(number=number, name=name):
                self._prefix_computations.pop(number, None)
                for i in replicas:
                    self.replicas[i].send(AbortRequests((number,)))
                self._release(name, replicas)
            case AdminRequest(what="sleep") if self._sleep is None:
                for i in replicas:
                    self.replicas[i].send(AdminRequest(self._own_number(), "wake"))

    # The end of an engine

    def _on_exit(self, replica: int, error: BaseException) -> Passed:
        """Leave a replica out: move its requests, and fail those that can't be."""
        ended, client = EngineDead(f"replica {replica} ended: {error}"), self.replicas[replica]
        was_drained = self.router.replicas[replica].is_draining
        client.queue_sizes, client.metrics = QueueSizes(), ended_metrics(client.metrics)
        self._alive.discard(replica)
        self.router.leave_out(replica)
        lost = {number: sent for number, sent in self._requests.items() if sent.replica == replica}
        for number in lost:
            del self._requests[number]
        if was_drained and not lost:
            log.info("replica %d was drained", replica)
        elif not self._closing:
            log.error("replica %d ended: %s", replica, error)
            if replica in self._can_restart:
                self._can_restart.remove(replica)
                self._restarting.add(replica)
                threading.Thread(target=self._restart, args=(replica,), name="quire-restart", daemon=True).start()
        if not self._alive and not self._expects_engines:
            return self._end(error)
        return [*self._move(replica, lost, ended), *self._end_waits(replica, ended), *self._end_handovers(replica)]

    def _end(self, error: BaseException) -> Passed:
        """Return that all engines have ended. The client's user fails all that waits."""
        self._adds.clear()
        self._broadcasts.clear()
        self._prefix_computations.clear()
        self._computations.clear()
        self._imports.clear()
        return [EngineExited(error)]

    def _move(self, replica: int, lost: Mapping[int, SentRequest], ended: EngineDead) -> Passed:
        """Send the requests of a replica that has ended to others. Those with an output fail, and so do those that were
        moved MAX_MOVES times."""
        waiting = [pending for pending in self._adds.values() if pending.replica == replica]
        unanswered = {number for pending in waiting for number in pending.numbers}
        accepted = {number: sent for number, sent in lost.items() if number not in unanswered}
        failed = [number for number, sent in accepted.items() if sent.message is None]
        for sent in accepted.values():
            if (message := sent.message) is not None:
                shown = {image.key for image in sent.request.media}
                pixels = tuple(one for one in message.pixels if one.key in shown)
                message = message._replace(key=self._own_number(), requests=(sent.request,), pixels=pixels)
                waiting.append(PendingAdd(message, [self._keys(message, sent.request)], sent.moves))
        passed: Passed = [RequestsFailed(failed, ended)] if failed else []
        num_moved = 0
        for pending in waiting:
            self._adds.pop(pending.message.key, None)
            pending.refused.clear()
            pending.cached_tokens.clear()
            pending.moves += 1
            if pending.moves <= MAX_MOVES and not self._closing and self._add(pending):
                num_moved += len(pending.message.requests)
            else:
                can_come_back = pending.moves <= MAX_MOVES and self._expects_engines
                passed += self._end_add(pending, _overloaded() if can_come_back else ended)
        if not self._closing and (lost or waiting):
            log.warning("%d of its requests were moved, %d failed", num_moved, len(lost) - num_moved)
        return passed

    def _end_waits(self, replica: int, ended: EngineDead) -> Passed:
        """Wait no longer for what a replica was to reply and compute."""
        passed: Passed = []
        for key, broadcast in list(self._broadcasts.items()):
            if replica in broadcast.waiting:
                broadcast.waiting.discard(replica)
                if not broadcast.waiting and not broadcast.replies:
                    broadcast.replies[replica] = Reply(key, ended)
                passed += self._finish_broadcast(key, broadcast)
        for number, computation in list(self._prefix_computations.items()):
            computation.computing.discard(replica)
            computation.ends.pop(replica, None)
            if computation.computing:
                continue
            if computation.ends:
                output = self._end_prefix(number, computation)
                passed.append(StepOutputs(time.monotonic(), self.queue_sizes, 0, (), [(number, output)]))
            else:
                del self._prefix_computations[number]
                passed.append(RequestsFailed([number], ended))
        return passed

    def _restart(self, replica: int) -> None:
        """Start an engine again, on a thread of its own."""
        try:
            replacement = self.replicas[replica].start_replacement()
            try:
                assert self._loop is not None, "its connection was read"
                self._loop.call_soon_threadsafe(self._replace, replica, replacement)
            except BaseException:  # the loop is closed
                replacement.close(0.0)
                raise
        except Exception as error:
            if not self._closing:
                log.error("replica %d can't be started again: %s", replica, error)
            with self._lock:
                self._restarting.discard(replica)
                passed = self._end(error) if not self._alive and not self._expects_engines else []
            for each in passed:
                self._receive(each)

    def _replace(self, replica: int, replacement: ReplicaClient) -> None:
        """Let a new engine serve. Called on the event loop."""
        with self._lock:
            if not self._closing and any(one.prefill == replica for one in self._imports.values()):
                assert self._loop is not None, "this runs on it"
                self._loop.call_later(0.05, self._replace, replica, replacement)  # its pages are still read
                return
            self._restarting.discard(replica)
            if self._closing:
                replacement.close(0.0)
                return
            self._replaced = [sum_metrics([self.replicas[replica].metrics, *self._replaced])]
            self.replicas[replica] = replacement
            self._begin_serving(replica)
        log.warning("replica %d was started again", replica)

    def _begin_serving(self, replica: int) -> None:
        """Give a new engine the prefixes and the sleep of the others, and then requests."""
        client = self.replicas[replica]
        self.router.take_in(replica)
        client.start(partial(self._on_message, replica))
        client.attach_event_loop()
        computing = [one.message for one in self._prefix_computations.values() if not one.is_aborted]
        for prefix in [*self._prefixes.values(), *computing]:
            client.send(prefix._replace(key=self._own_number(), number=self._own_number()))
        if self._sleep is not None:  # once it has computed the prefixes
            client.send(self._sleep._replace(key=self._own_number(), mode="wait"))
        self._alive.add(replica)


def check_reusable(ready: EngineReady, given: str) -> None:
    """Raise StartupError if prompts that another engine has computed can't be reused. `given` is what asks for it."""
    if ready.prompt_keys is None:
        raise StartupError(f"{given}, and no prompt of this model can be reused", "Leave --prefill-replicas out")


def _overloaded() -> Overloaded:
    return Overloaded("the replicas are being started again", RETRY_AFTER)


def _join_ready(ready: Sequence[EngineReady]) -> EngineReady:
    """Return what a client must know of all engines. Raise StartupError if they serve unlike models."""
    first = ready[0]
    for i, other in enumerate(ready):
        for what, mine, theirs in (
            ("sizes of vocabulary", first.limits.vocab_size, other.limits.vocab_size),
            ("keys of prefixes", first.prompt_keys, other.prompt_keys),
        ):
            if mine != theirs:
                raise StartupError(f"replicas 0 and {i} have unlike models: their {what} differ", "Serve one model")
    shortest = min(ready, key=lambda one: one.limits.max_len).limits
    limits = shortest._replace(max_queued=sum(one.limits.max_queued for one in ready))
    lines = (f"{len(ready)} replicas, each:", *first.lines)
    return first._replace(limits=limits, lines=lines, facts=sum_metrics([one.facts for one in ready]))


def _join_replies(message: ClientMessage, replies: Sequence[Reply]) -> Reply:
    """Return the reply of several engines to a message that all of them have carried out."""
    first = replies[0]
    match message:
        case ListPrefixes():
            found = [reply.value for reply in replies if isinstance(reply.value, tuple)]
            held = {name: length for lengths, _ in found for name, length in lengths.items()}
            ready = tuple(name for name in held if all(name in names for _, names in found))
            return Reply(first.key, value=(held, ready))
        case AdminRequest(what="reset"):
            return Reply(first.key, value=sum(int(reply.value) for reply in replies if isinstance(reply.value, int)))
        case AdminRequest():
            states = [json.loads(reply.value) for reply in replies if isinstance(reply.value, str)]
            return Reply(first.key, value=json.dumps(max(states, key=lambda state: state["level"])))
    return first
