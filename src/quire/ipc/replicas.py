"""Several engines behind one client. A router chooses the engine of each request; all other messages go to all engines,
and their replies become one.

An engine that ends is left out. Its requests without an output are sent to others, and the others fail."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from quire.core.outputs import BranchOutput
from quire.errors import EngineDead, Overloaded, StartupError
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
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
    ListPrefixes,
    NewRequest,
    QueueSizes,
    RegisterPrefix,
    ReleasePrefix,
    Reply,
    RequestsFailed,
    SnapshotRequest,
    StepOutputs,
    StopBranch,
    sum_metrics,
    sum_queue_sizes,
)
from quire.ipc.process_client import ProcessEngineClient
from quire.router.router import Router, WorkCosts

COSTS = WorkCosts(1.0, 3.5)  # only their ratio counts, which is 3.0 to 4.8 in the calibrations of GPUs
RETRY_AFTER = 5  # seconds
OWN_KEYS = 1 << 20  # the last ones below MAX_NUMBER are keys and numbers of messages that are made here
log = logging.getLogger("quire.ipc")


class SentRequest:
    """A request in flight. `message` can send it again, and is None from its first output on."""

    __slots__ = ("message", "replica", "request")

    def __init__(self, message: AddRequests, request: NewRequest, replica: int) -> None:
        self.message: AddRequests | None = message
        self.request, self.replica = request, replica


class PendingAdd:
    """An AddRequests that waits for its reply, and the replicas that have refused it."""

    def __init__(self, message: AddRequests) -> None:
        self.message, self.replica = message, -1
        self.refused = set[int]()


class PendingBroadcast:
    """A message that all replicas were sent, those that have yet to reply, and the replies of the others."""

    def __init__(self, message: ClientMessage, replicas: Collection[int]) -> None:
        self.message, self.waiting = message, set(replicas)
        self.replies = dict[int, Reply]()


class ReplicatedEngineClient:
    """A connection to engines of one model, in processes of their own, which are ready. `policy` is the router's. With
    `restart` an engine that ends is started again, once."""

    is_in_process, engine = False, None

    def __init__(self, replicas: Sequence[ProcessEngineClient], policy: str, restart: bool = False) -> None:
        self.replicas = list(replicas)
        self.ready = _join_ready([replica.ready for replica in replicas])
        keys = self.ready.prompt_keys if policy == "prefix" else None
        self._prompt_keys = keys
        page_tokens = keys.run_tokens / keys.run_pages if keys is not None else 1.0
        self.router = Router(len(replicas), policy, COSTS, page_tokens)
        self._alive, self._can_restart = set(range(len(replicas))), set(range(len(replicas)) if restart else ())
        self._restarting = set[int]()
        self._lock = threading.RLock()
        self._requests = dict[int, SentRequest]()  # by number
        self._adds = dict[int, PendingAdd]()  # by key, the client's and our own
        self._broadcasts = dict[int, PendingBroadcast]()  # by key
        self._prefix_computations = dict[int, set[int]]()  # by number: replicas that compute the prefix
        self._prefixes = dict[str, RegisterPrefix]()  # registered
        self._own_keys = itertools.count()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = False
        self._receive: Callable[[EngineMessage | RequestsFailed], None]

    def start(self, receive: Callable[[EngineMessage | RequestsFailed], None]) -> None:
        """Pass the engines' messages to `receive`."""
        self._receive = receive
        for i, replica in enumerate(self.replicas):
            replica.start(partial(self._on_message, i))

    def attach_event_loop(self) -> None:
        """Read the connections on the running event loop."""
        self._loop = asyncio.get_running_loop()
        for i in list(self._alive):
            self.replicas[i].attach_event_loop()

    @property
    def queue_sizes(self) -> QueueSizes:
        """The queue sizes of all engines together."""
        return sum_queue_sizes([self.replicas[i].queue_sizes for i in list(self._alive)] or [QueueSizes()])

    @property
    def metrics(self) -> EngineMetrics:
        """The metrics of all engines together, also of those that have ended."""
        return sum_metrics([replica.metrics for replica in self.replicas])

    def health(self) -> Health:
        """Return the health of the engines that serve: one that stalls, if there is one."""
        alive = list(self._alive)
        if not alive:
            return Health(True, True, time.monotonic(), "all replicas have ended, and are being started again")
        found = {i: self.replicas[i].health() for i in alive}
        stalled = next((i for i, health in found.items() if health.stalled), None)
        if stalled is None:
            return min(found.values(), key=lambda health: health.beat)
        return found[stalled]._replace(why=f"replica {stalled}: {found[stalled].why}")

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
            return all(threads.map(lambda replica: replica.close(timeout), self.replicas))

    # Messages to the engines, from any thread

    def send(self, message: ClientMessage) -> bool:
        """Send a message to one engine or to all. Return False if no engine takes more."""
        if isinstance(message, AddRequests):
            with self._lock:
                pending = self._adds[message.key] = PendingAdd(message)
                if self._add(pending):
                    return True
                del self._adds[message.key]
                if not self._restarting:
                    return False
            self._receive(Reply(message.key, Overloaded("the replicas are being started again", RETRY_AFTER)))
            return True
        with self._lock:
            if isinstance(message, StopBranch):
                if (sent := self._requests.get(message.number)) is not None:
                    self.replicas[sent.replica].send(message)
                return True
            if isinstance(message, AbortRequests):
                self._abort(message)
                return True
            if isinstance(message, SnapshotRequest):
                return any(self.replicas[i].send(message) for i in sorted(self._alive)[:1])
            return self._broadcast(message)

    def forget(self, number: int) -> int | None:
        """Forget a request that has ended for its caller. Return its replica, or None if that has ended."""
        with self._lock:
            sent = self._requests.pop(number, None)
            if sent is None:
                return None
            self.router.finish(number)
            return sent.replica

    def _keys(self, message: AddRequests, request: NewRequest) -> Sequence[bytes]:
        if self._prompt_keys is None:
            return ()
        return self._prompt_keys.of_prompt(request.prompt, message.salt, request.media)

    def _add(self, pending: PendingAdd) -> bool:
        """Send requests to the replica that the router chooses. Return False if no replica is left for them."""
        message = pending.message
        keys = [self._keys(message, request) for request in message.requests]
        length = sum(len(request.prompt) for request in message.requests)
        while (at := self.router.choose(keys[0], length, pending.refused)) is not None:
            if self.replicas[at].send(message):
                break
            pending.refused.add(at)  # it is ending
        if at is None:
            return False
        pending.replica = at
        for request, of_prompt in zip(message.requests, keys):
            self._requests[request.number] = SentRequest(message, request, at)
            most = message.params.max_tokens
            most = self.ready.limits.max_len - len(request.prompt) if most is None else most
            self.router.add(request.number, at, of_prompt, len(request.prompt), max(most, 1) * message.params.n)
        return True

    def _abort(self, message: AbortRequests) -> None:
        if message.numbers is None:
            for i in self._alive:
                self.replicas[i].send(message)
            return
        for number in message.numbers:
            if (sent := self._requests.get(number)) is not None:
                self.replicas[sent.replica].send(AbortRequests((number,)))
            for i in self._prefix_computations.get(number, ()):
                self.replicas[i].send(AbortRequests((number,)))

    def _broadcast(self, message: RegisterPrefix | ReleasePrefix | ListPrefixes | AdminRequest) -> bool:
        if not self._alive:
            return False
        self._broadcasts[message.key] = PendingBroadcast(message, self._alive)
        if isinstance(message, RegisterPrefix):
            self._prefix_computations[message.number] = set(self._alive)
        for i in self._alive:
            self.replicas[i].send(message)
        return True

    def _own_key(self) -> int:
        return MAX_NUMBER - next(self._own_keys) % OWN_KEYS

    # Messages of the engines

    def _on_message(self, replica: int, message: EngineMessage) -> None:
        passed: list[EngineMessage | RequestsFailed] = []
        with self._lock:
            match message:
                case StepOutputs():
                    passed.append(self._on_step(replica, message))
                case Reply():
                    passed += self._on_reply(replica, message)
                case CacheUpdate(stored, dropped):
                    self.router.update_keys(replica, stored, dropped)
                case EngineExited(error):
                    passed += self._on_exit(replica, error)
        for each in passed:
            self._receive(each)

    def _on_step(self, replica: int, message: StepOutputs) -> StepOutputs:
        """Count new tokens, and leave out outputs of a prefix that other replicas compute still."""
        left_out = set[int]()
        for number, output in message.outputs:
            sent = self._requests.get(number)
            if sent is not None and sent.replica == replica:
                sent.message = None
                self.router.record_tokens(number, len(output.tokens))
            elif number in self._prefix_computations and not self._ends_prefix(replica, number, output):
                left_out.add(number)
        if not left_out:
            return message
        return message._replace(
            progress=[one for one in message.progress if one.number not in left_out],
            outputs=[(number, output) for number, output in message.outputs if number not in left_out],
        )

    def _ends_prefix(self, replica: int, number: int, output: BranchOutput) -> bool:
        """Return True if an output is the last one of the last replica that computes a prefix."""
        computing = self._prefix_computations[number]
        if output.done:
            computing.discard(replica)
        if computing or not output.done:
            return False
        del self._prefix_computations[number]
        return True

    def _on_reply(self, replica: int, reply: Reply) -> list[EngineMessage | RequestsFailed]:
        if (broadcast := self._broadcasts.get(reply.key)) is not None:
            broadcast.waiting.discard(replica)
            broadcast.replies[replica] = reply
            return self._finish_broadcast(reply.key, broadcast)
        pending = self._adds.get(reply.key)
        if pending is None or pending.replica != replica:
            # A snapshot's, or one that nobody waits for
            return [reply] if reply.key <= MAX_NUMBER - OWN_KEYS else []
        if isinstance(reply.error, Overloaded) and self._add_elsewhere(pending):
            return []
        del self._adds[reply.key]
        return self._end_add(pending, reply.error)

    def _add_elsewhere(self, pending: PendingAdd) -> bool:
        pending.refused.add(pending.replica)
        self._forget_all(pending)
        return self._add(pending)

    def _forget_all(self, pending: PendingAdd) -> None:
        for request in pending.message.requests:
            self.forget(request.number)

    def _end_add(self, pending: PendingAdd, error: Exception | None) -> list[EngineMessage | RequestsFailed]:
        """Return what the client is sent of an add's reply: of a request that was moved, only a failure."""
        if error is not None:
            self._forget_all(pending)
        key = pending.message.key
        if key <= MAX_NUMBER - OWN_KEYS:
            return [Reply(key, error)]
        numbers = [request.number for request in pending.message.requests]
        return [] if error is None else [RequestsFailed(numbers, error)]

    def _finish_broadcast(self, key: int, broadcast: PendingBroadcast) -> list[EngineMessage | RequestsFailed]:
        """Return the reply to a message, once all replicas have replied; undo what some did if others couldn't."""
        if broadcast.waiting:
            return []
        del self._broadcasts[key]
        message, replies = broadcast.message, broadcast.replies
        error = next((reply.error for reply in replies.values() if reply.error is not None), None)
        if error is not None:
            done = [i for i, reply in replies.items() if reply.error is None]
            self._undo(message, [i for i in done if i in self._alive])
            return [Reply(key, error)]
        if isinstance(message, RegisterPrefix):
            self._prefixes[message.name] = message
        elif isinstance(message, ReleasePrefix):
            self._prefixes.pop(message.name, None)
        return [_join_replies(message, [replies[i] for i in sorted(replies)])]

    def _undo(self, message: ClientMessage, replicas: Sequence[int]) -> None:
        match message:
            case RegisterPrefix(number=number, name=name):
                self._prefix_computations.pop(number, None)
                for i in replicas:
                    self.replicas[i].send(AbortRequests((number,)))
                    self.replicas[i].send(ReleasePrefix(self._own_key(), name))
            case AdminRequest(what="sleep"):
                for i in replicas:
                    self.replicas[i].send(AdminRequest(self._own_key(), "wake"))

    # The end of an engine

    def _on_exit(self, replica: int, error: BaseException) -> list[EngineMessage | RequestsFailed]:
        """Leave a replica out: move its requests, and fail those that have an output."""
        self._alive.discard(replica)
        self.router.replace(replica)
        self.router.replicas[replica].is_draining = True
        if self._closing:
            return [] if self._alive else [EngineExited(error)]
        log.error("replica %d ended: %s", replica, error)
        if replica in self._can_restart:
            self._can_restart.remove(replica)
            self._restarting.add(replica)
            threading.Thread(target=self._restart, args=(replica,), name="quire-restart", daemon=True).start()
        if not self._alive and not self._restarting:
            return [EngineExited(error)]
        passed: list[EngineMessage | RequestsFailed] = []
        waiting = [pending for pending in self._adds.values() if pending.replica == replica]
        unanswered = {request.number for pending in waiting for request in pending.message.requests}
        lost = {number: sent for number, sent in self._requests.items() if sent.replica == replica}
        for number in lost:
            del self._requests[number]
        moved = [sent for number, sent in lost.items() if number not in unanswered and sent.message is not None]
        for sent in moved:
            assert sent.message is not None, "it has no output yet"
            message = sent.message._replace(key=self._own_key(), requests=(sent.request,))
            self._adds[message.key] = pending = PendingAdd(message)
            waiting.append(pending)
        for pending in waiting:
            pending.refused.clear()
            if not self._add(pending):
                del self._adds[pending.message.key]
                passed += self._end_add(pending, Overloaded("the replicas are being started again", RETRY_AFTER))
        failed = [number for number, sent in lost.items() if sent.message is None]
        if failed:
            passed.append(RequestsFailed(failed, EngineDead(f"replica {replica} ended: {error}")))
        log.warning("%d of its requests were moved, and %d failed", len(waiting), len(failed))
        for key, broadcast in list(self._broadcasts.items()):
            broadcast.waiting.discard(replica)
            if not broadcast.waiting and not broadcast.replies:
                broadcast.replies[replica] = Reply(key, EngineDead(f"replica {replica} ended: {error}"))
            passed += self._finish_broadcast(key, broadcast)
        for number, computing in list(self._prefix_computations.items()):
            computing.discard(replica)
            if not computing:
                del self._prefix_computations[number]
                passed.append(RequestsFailed([number], EngineDead(f"replica {replica} ended: {error}")))
        return passed

    def _restart(self, replica: int) -> None:
        """Start an engine again, on a thread of its own."""
        try:
            replacement = self.replicas[replica].start_replacement()
        except StartupError as error:
            if not self._closing:
                log.error("replica %d can't be started again: %s", replica, error)
            with self._lock:
                self._restarting.discard(replica)
                is_last = not self._alive and not self._restarting
            if is_last:
                self._receive(EngineExited(error))
            return
        assert self._loop is not None, "its connection was read"
        try:
            self._loop.call_soon_threadsafe(self._replace, replica, replacement)
        except RuntimeError:  # the loop is closed
            replacement.close(0.0)

    def _replace(self, replica: int, replacement: ProcessEngineClient) -> None:
        """Let a new engine serve. Called on the event loop."""
        with self._lock:
            self._restarting.discard(replica)
            if self._closing:
                replacement.close(0.0)
                return
            self.replicas[replica] = replacement
            self.router.replace(replica)
            self._alive.add(replica)
            prefixes = list(self._prefixes.values())
        replacement.start(partial(self._on_message, replica))
        replacement.attach_event_loop()
        for prefix in prefixes:
            replacement.send(prefix._replace(key=self._own_key(), number=self._own_key()))
        log.warning("replica %d was started again", replica)


def _join_ready(ready: Sequence[EngineReady]) -> EngineReady:
    """Return what a client must know of all engines. Raise StartupError if they serve unlike models."""
    first = ready[0]
    for i, other in enumerate(ready):
        for what, mine, theirs in (
            ("vocabulary", first.limits.vocab_size, other.limits.vocab_size),
            ("cache keys", first.prompt_keys, other.prompt_keys),
        ):
            if mine != theirs:
                raise StartupError(f"replicas 0 and {i} have unlike models: the {what} differ", "Serve one model")
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
