"""An application of Ray Serve: an ingress with the API of `quire serve`, and replicas with an engine each.

Serve calls `build_app`, and runs the ingress and the replicas in processes of Ray. A replica starts its engine as
`quire serve` does, in a process of its own, and relays its frames. Prefill replicas are a deployment of their own; the
others fetch the pages that they hand over (quire.deploy.page_transfer)."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any

import ray.util
from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

import quire
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.deploy.page_transfer import PageInbox, PageServer, read_sources, source_from_json
from quire.deploy.replica_client import ReplicaLost, ServeReplicaClient
from quire.deploy.serve_config import API, ENGINE, PREFILL
from quire.errors import EngineDead, StartupError
from quire.ipc import frames
from quire.ipc.engine_loop import MAX_UPDATE_KEYS
from quire.ipc.handshake import write_heartbeat, write_ready
from quire.ipc.messages import (
    MAX_CLIENT_NUMBER,
    AbortRequests,
    AddRequests,
    CacheUpdate,
    ClientMessage,
    EngineExited,
    EngineMessage,
    HandOver,
    ImportPages,
    ListPrefixes,
    PageSource,
    ReleaseHandOver,
    Reply,
    StepOutputs,
)
from quire.ipc.process_client import ProcessEngineClient
from quire.ipc.replicas import ReplicatedEngineClient, check_reusable
from quire.server.api_server import make_tracer
from quire.server.app import create_app
from quire.server.frontend_worker import options_from_json
from quire.server.options import (
    ADMIN_KEY_VARIABLE,
    MAX_INT_DIGITS,
    configure_logging,
    raise_descriptor_limit,
    read_chat_template,
    read_keys,
    set_chat_template,
)
from quire.server.shutdown import log_stalls, log_status
from quire.startup.checkpoint import Checkpoint
from quire.startup.engine_process import launch_engine_process, read_input_processor

ROUTER = "quire.deploy.request_router:NamedReplicaRouter"
HEARTBEAT_SECONDS = 1.0  # between two frames of an idle replica
DISCOVERY_SECONDS = 1.0  # between two looks for new replicas
DESCRIBE_SECONDS = 10.0  # for all replicas to reply
SETTLE_SECONDS = 30.0  # for an engine to end the requests of an ingress that is gone
CLOSE_SECONDS = 10.0  # for an engine to end
POLL_SECONDS = 0.02
SHARED_PARTS = {PREFILL: 1, ENGINE: 2}  # of host memory, if there are prefill replicas: others have an inbox
SETTINGS = "set of engine settings"  # what the API server compares with its own: a replica may be of an older version
BARRIER_KEY = MAX_CLIENT_NUMBER + 1  # of a message of the replica itself
log = logging.getLogger("quire.deploy")


def describe_model(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Return what must be the same in all replicas. The revision of a model of the hub is its commit."""
    path, revision, sizes = checkpoint.path, str(config.revision), list[tuple[str, int]]()
    if path is not None:
        revision = path.name if path.parent.name == "snapshots" else revision
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        sizes = [(file.name, file.stat().st_size) for file in files]
    return {
        "version of quire": quire.__version__,
        "model": checkpoint.name,
        "revision": revision,
        "configuration": digest(checkpoint.config),
        "set of weight files": digest(sizes),
        SETTINGS: digest(config.flat()),
    }


def digest(value: object) -> str:
    """Return a short digest of a JSON value."""
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


def check_same_model(name: str, first: dict[str, str], other: dict[str, str]) -> None:
    """Raise StartupError if a replica has another model than the first one."""
    for what in first.keys() | other.keys():
        if first.get(what) != other.get(what):
            raise StartupError(
                f"replica {name} has another model: its {what} is {other.get(what)}, that of the others "
                f"{first.get(what)}", "Give all nodes one revision of the model and of quire"
            )  # fmt: skip


class IngressConnection:
    """What a replica has yet to send to its ingress. `heartbeat` returns the body of a frame for when there is
    nothing."""

    def __init__(self, heartbeat: Callable[[], bytes]) -> None:
        self._frames, self._heartbeat = frames.FrameCodec(), heartbeat
        self._chunks, self._wake = list[bytes](), asyncio.Event()
        self._is_open = True

    def send(self, kind: int, body: bytes) -> None:
        """Queue a frame."""
        self._chunks.append(self._frames.encode(kind, body))
        self._wake.set()

    def close(self) -> None:
        """End the stream."""
        self._is_open = False
        self._wake.set()

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield the frames that are queued, and a heartbeat every HEARTBEAT_SECONDS if there are none."""
        while self._is_open:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._wake.wait(), HEARTBEAT_SECONDS)
            self._wake.clear()
            if not self._chunks:
                self._chunks.append(self._frames.encode(frames.PONG, self._heartbeat()))
            chunks, self._chunks = self._chunks, []
            yield b"".join(chunks)


class EngineReplica:
    """A replica: an engine in a process of its own, whose frames it relays to one ingress. `engine` are settings of
    EngineConfig, `serving` those of ServeOptions. If there are prefill replicas, `role` is the name of its deployment:
    PREFILL, or ENGINE for those that decode."""

    async def __init__(  # type: ignore[misc]
        self, engine: dict[str, Any], serving: dict[str, Any], role: str = ""
    ) -> None:
        configure_logging(options_from_json(serving))
        config = EngineConfig.of(**engine)
        client, prompts, checkpoint = await asyncio.to_thread(
            launch_engine_process, config, report_cache=True, shared_parts=SHARED_PARTS.get(role, 0)
        )
        self._client = client
        prompts.close()  # the ingress has its own
        name = serve.get_replica_context().replica_id.unique_id
        model = await asyncio.to_thread(describe_model, config, checkpoint)
        address: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._set_up(name, client, model, role, address)

    @classmethod
    def over(
        cls, name: str, client: ProcessEngineClient, model: dict[str, str], role: str = "", address: str = ""
    ) -> EngineReplica:
        """Return a replica, outside of Serve, with an engine that is ready. A prefill replica listens on `address`."""
        self = cls.__new__(cls)
        self._set_up(name, client, model, role, address)
        return self

    def _set_up(self, name: str, client: ProcessEngineClient, model: dict[str, str], role: str, address: str) -> None:
        self._name, self._client, self._model = name, client, model
        self._pages: PageServer | None = None  # of a prefill replica
        self._inbox: PageInbox | None = None  # of a replica that decodes, if there are prefill replicas
        if role:
            memory = client.shared_host
            assert memory is not None, "the engine was started with shared memory"
            check_reusable(client.ready, "--prefill-replicas is given")
            if role == PREFILL:
                self._pages = PageServer(address, memory, client.ready.page_bytes)
            else:
                self._inbox = PageInbox(memory._replace(part=1), client.ready.page_bytes)
        self._adds = dict[int, list[int]]()  # numbers of the requests of an AddRequests without a reply, by its key
        self._prompts = set[int]()  # numbers of requests whose HandOver is to come
        self._imports = dict[int, asyncio.Task[None]]()  # by key of the ImportPages, until its reply
        self._ingress: IngressConnection | None = None
        self._has_old_requests = False  # of an ingress that is gone
        self._cached = dict[bytes, None]()  # keys of the pages that the engine has
        self._ends = dict[int, asyncio.Future[None]]()  # of requests in flight, by number
        self._error: BaseException | None = None
        self._barrier, self._idle = asyncio.Event(), asyncio.Event()
        client.start(self._on_message)
        client.attach_event_loop()

    async def describe(self) -> bytes:
        """Return, as JSON, the name of this replica, its model, or None if the engine has ended, and where others
        fetch its pages, or None."""
        source = None if self._pages is None else self._pages.source
        return json.dumps([self._name, self._model if self._error is None else None, source]).encode()

    async def connect(self, name: str) -> AsyncIterator[bytes]:
        """Yield the engine's frames for an ingress, which takes the place of the one before it."""
        if name != self._name or self._error is not None:
            return
        if self._ingress is not None:
            self._ingress.close()
            self._ingress, self._has_old_requests = None, True
        if self._has_old_requests:
            await self._end_requests()  # an earlier call may have waited for this too long
            self._has_old_requests = False
        connection = IngressConnection(lambda: write_heartbeat(self._client.health(), time.monotonic()))
        ready = self._client.ready._replace(facts=self._client.metrics)
        connection.send(frames.READY, write_ready(ready))
        keys = list(self._cached)
        for at in range(0, len(keys), MAX_UPDATE_KEYS):
            connection.send(*frames.write_engine_message(CacheUpdate(keys[at : at + MAX_UPDATE_KEYS], ())))
        self._ingress = connection
        async for data in connection.stream():
            yield data

    async def _end_requests(self) -> None:
        """Abort the requests of the ingress before, whose numbers the next one may use, and wait until none is left.
        Release the pages that were handed over to it."""
        self._barrier.clear()
        self._client.send(AbortRequests(None))
        self._client.send(ListPrefixes(BARRIER_KEY))
        async with asyncio.timeout(SETTLE_SECONDS):
            await self._barrier.wait()
            await self._idle.wait()
            while self._prompts or self._imports:
                await asyncio.sleep(POLL_SECONDS)
        for number in self._pages.numbers if self._pages is not None else ():
            self._release(number)

    def _release(self, number: int) -> bool:
        """Release the pages of a HandOver, once no other replica can be sent them any more."""
        if self._pages is not None:
            self._pages.remove(number)
        return self._client.send(ReleaseHandOver(number))

    async def add(self, name: str, data: bytes, sources: bytes = b"") -> bool:
        """Queue requests, and wait for their end. If the call is cancelled, they are aborted. Pages that they need are
        imported first, from `sources`. Return False if this is another replica, or its engine has ended."""
        if name != self._name or self._error is not None:
            return False
        *imports, message = map(frames.read_client_message, frames.FrameCodec().decode(data))
        assert isinstance(message, AddRequests), "another message"
        loop, ingress, is_queued = asyncio.get_running_loop(), self._ingress, False
        ends = {request.number: loop.create_future() for request in message.requests}
        self._ends.update(ends)
        try:
            if imports:
                await self._import_pages(imports, read_sources(sources))
                if self._ingress is not ingress:
                    return False
            is_queued = self._queue(message)
            await asyncio.wait(ends.values())
        except asyncio.CancelledError:
            if self._ingress is ingress:
                if not is_queued:
                    self._queue(message)  # so that the engine reports the abort
                self._client.send(AbortRequests(tuple(ends)))
            raise
        finally:
            for number in ends:
                self._ends.pop(number, None)
        return True

    def _queue(self, message: AddRequests) -> bool:
        numbers = [request.number for request in message.requests]
        self._adds[message.key] = numbers
        if message.hands_over:
            self._prompts.update(numbers)
        return self._client.send(message)

    async def _import_pages(self, imports: list[ClientMessage], sources: list[tuple[int, PageSource]]) -> None:
        """Fetch pages, and send the engine the messages that name them. If the call is cancelled, this goes on."""
        tasks = list[asyncio.Task[None]]()
        for message, (number, source) in zip(imports, sources, strict=True):
            assert isinstance(message, ImportPages), "another message"
            tasks.append(asyncio.create_task(self._import(message, number, source)))
            self._imports[message.key] = tasks[-1]
        await asyncio.wait(tasks)

    async def _import(self, message: ImportPages, number: int, source: PageSource) -> None:
        """Fetch the pages of a HandOver. If that fails, reply that they were not imported."""
        key, ingress = message.key, self._ingress
        pages = None if self._inbox is None else await self._inbox.fetch(key, source, number, message.pages)
        if pages is None or not self._client.send(ImportPages(key, pages)):
            self._end_import(key)
            if ingress is not None:
                ingress.send(*frames.write_engine_message(Reply(key, value=0)))

    def _end_import(self, key: int) -> None:
        if self._imports.pop(key, None) is not None and self._inbox is not None:
            self._inbox.free(key)

    async def send(self, name: str, frame: bytes) -> bool:
        """Send the engine another message. Return False if this is another replica."""
        if name != self._name:
            return False
        message = read_message(frame)
        assert not isinstance(message, AddRequests | ImportPages), "these are sent by `add`"
        if isinstance(message, ReleaseHandOver):
            return self._release(message.number)
        return self._client.send(message)

    def _on_message(self, message: EngineMessage) -> None:
        match message:
            case StepOutputs(queues=queues, outputs=outputs):
                for number, output in outputs:
                    if output.done:
                        self._end(number)
                if not (queues.waiting or queues.running or queues.swapped):
                    self._idle.set()
            case Reply(key=number) if number == BARRIER_KEY:
                self._barrier.set()
                self._idle.clear()
                return
            case Reply(key=number, error=failure):
                numbers = self._adds.pop(number, ())
                for one in numbers if failure is not None else ():
                    self._prompts.discard(one)
                    self._end(one)
                self._end_import(number)
            case HandOver(number=number, pages=pages):
                self._prompts.discard(number)
                self._end(number)
                if pages and self._pages is not None:
                    self._pages.add(message)
                if self._ingress is None:
                    self._release(number)
            case CacheUpdate(stored, dropped):
                for key in dropped:
                    self._cached.pop(key, None)
                self._cached.update(dict.fromkeys(stored))
            case EngineExited(error):
                self._error = error
                for number in list(self._ends):
                    self._end(number)
        if self._ingress is not None:
            self._ingress.send(*frames.write_engine_message(message))

    def _end(self, number: int) -> None:
        end = self._ends.pop(number, None)
        if end is not None and not end.done():
            end.set_result(None)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what the autoscaler counts (quire.deploy.autoscaling)."""
        queues = self._client.queue_sizes
        return {"waiting": queues.waiting, "running": queues.running + queues.swapped}

    async def check_health(self) -> None:
        """Raise EngineDead if the engine has ended or hangs: Serve then starts another replica."""
        health = self._client.health()
        if self._error is not None or not health.alive or health.stalled:
            raise EngineDead(f"the engine stopped: {self._error or health.why}")

    def __del__(self) -> None:
        """End the engine. Serve calls this once the calls have ended."""
        attributes = vars(self)  # some are missing if it could not be started
        for pages in (attributes.get("_pages"), attributes.get("_inbox")):
            if pages is not None:
                pages.close()
        client: ProcessEngineClient | None = attributes.get("_client")
        if client is not None:
            client.close(CLOSE_SECONDS)
            if client.child.shared_memory is not None:
                client.child.shared_memory.close()


def read_message(frame: bytes) -> ClientMessage:
    """Return the message in a frame."""
    return frames.read_client_message(next(frames.FrameCodec().decode(frame)))


class ApiServer:
    """The ingress: the API server, and the router of its requests. `engines` is the handle of EngineReplica, `prefill`
    that of its prefill replicas. There is one, because a router must know of all requests."""

    async def __init__(  # type: ignore[misc]
        self, engines: DeploymentHandle[Any], engine: dict[str, Any], serving: dict[str, Any],
        prefill: DeploymentHandle[Any] | None = None,
    ) -> None:  # fmt: skip
        options, config = options_from_json(serving), EngineConfig.of(**engine)
        configure_logging(options)
        raise_descriptor_limit()
        sys.set_int_max_str_digits(MAX_INT_DIGITS)
        keys, template = read_keys(options.api_key_file), read_chat_template(options.chat_template)
        admin_keys = read_keys(options.admin_key_file, "--admin-key-file", ADMIN_KEY_VARIABLE)
        self._engines, self._prefill, self._settings = engines, prefill, digest(config.flat())
        self._model = dict[str, str]()  # of the first replica with the settings of this server
        self._clients = dict[str, ServeReplicaClient]()  # by name of a replica
        self._refused = set[str]()  # names of replicas with other models
        while not (new := await self._find_replicas(engines)):
            await asyncio.sleep(DISCOVERY_SECONDS)
        self._client = ReplicatedEngineClient(new[:1], options.router, elastic=True)
        prompts, checkpoint = await asyncio.to_thread(read_input_processor, config, self._client)
        if template is not None:
            set_chat_template(prompts, template)
        self._llm = AsyncLLM.over(self._client, prompts)
        self._client.attach_event_loop()
        for client in new[1:]:
            self._take_in(client, False)
        names = options.served_model_name or (checkpoint.name,)
        self._tracer, self._shutdown_timeout = make_tracer(options, names[0]), options.shutdown_timeout
        self._app = create_app(
            self._llm, names, options, keys=keys, admin_keys=admin_keys, config=config, tracer=self._tracer
        )
        self._tasks = [asyncio.create_task(work) for work in
                       (self._follow_replicas(), log_stalls(self._llm), log_status(self._llm))]  # fmt: skip

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._app

    async def _follow_replicas(self) -> None:
        """Take in new replicas, and drain those that Serve ends."""
        while True:
            await asyncio.sleep(DISCOVERY_SECONDS)
            for handle in filter(None, (self._engines, self._prefill)):
                try:
                    for client in await self._find_replicas(handle):
                        self._take_in(client, handle is self._prefill)
                except Exception:
                    log.exception("the replicas can't be found")

    async def _find_replicas(self, handle: DeploymentHandle[Any]) -> list[ServeReplicaClient]:
        """Return connections to new replicas of a deployment. Drain those that Serve sends no more calls."""
        try:
            replies: list[Any] = await handle.broadcast("describe").results_async(
                timeout_s=DESCRIBE_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):  # there is none
            return []
        found: dict[str, Sequence[Any]] = {name: more for name, *more in map(json.loads, filter(is_bytes, replies))}
        if len(found) == len(replies):
            ours = {name for name, client in self._clients.items() if client.handle is handle}
            for name in ours - found.keys():
                client = self._clients.pop(name)
                if not client.has_ended:
                    self._client.drain(client)
                    client.drain()
        new = list[ServeReplicaClient]()
        for name, (model, *sources) in found.items():
            is_connected = name in self._clients and not self._clients[name].has_ended
            if model is None or is_connected or name in self._refused:
                continue
            try:
                check_same_model(name, self._model or {**model, SETTINGS: self._settings}, model)
                self._model = model
                source = source_from_json(sources[0]) if handle is self._prefill else None
                new.append(await ServeReplicaClient.connect(handle, name, source))
                self._clients[name] = new[-1]
            except ReplicaLost as error:
                log.warning("%s", error)
            except StartupError as error:
                self._refuse(name, error)
        return new

    def _take_in(self, client: ServeReplicaClient, is_prefill: bool) -> None:
        try:
            index = self._client.take_in(client, is_prefill)
            log.info("replica %d is %s%s", index, client.name, ", which computes prompts" * is_prefill)
        except StartupError as error:
            self._refuse(client.name, error)
            client.leave()

    def _refuse(self, name: str, error: StartupError) -> None:
        self._refused.add(name)
        log.error("replica %s gets no requests: %s", name, error)

    async def check_health(self) -> None:
        """Raise the error with which the client of the engines ended, if it did."""
        if self._llm.error is not None:
            raise EngineDead(str(self._llm.error))

    async def __del__(self) -> None:
        """Wait for the end of the requests, and close the connections."""
        for task in self._tasks:
            task.cancel()
        await self._llm.drain(self._shutdown_timeout)
        await asyncio.to_thread(self._llm.close)
        if self._tracer is not None:
            self._tracer.close()


def is_bytes(reply: object) -> bool:
    """Return True for a reply, False for an exception in its place."""
    return isinstance(reply, bytes)


def build_app(args: dict[str, Any]) -> serve.Application:
    """Return the application, for Serve's import_path. `args` are quire.deploy.serve_config's."""
    return bind(args, {})


def bind(args: dict[str, Any], options: dict[str, dict[str, Any]]) -> serve.Application:
    """Return the application. `options` are those of the deployments, by name."""
    settings = {name: value for name, value in args.items() if name != "has_prefill"}
    if settings.keys() != {"engine", "serving"}:
        raise StartupError(f"args has {', '.join(args) or 'nothing'}", "It has engine, serving and perhaps has_prefill")
    api = serve.deployment(name=API, **options.get(API, {}))(serve.ingress()(ApiServer))
    if not args.get("has_prefill"):
        return api.bind(bind_engines(ENGINE, options, settings), **settings)
    engines, prefill = (bind_engines(name, options, settings, role=name) for name in (ENGINE, PREFILL))
    return api.bind(engines, **settings, prefill=prefill)


def bind_engines(
    name: str, options: dict[str, dict[str, Any]], settings: dict[str, Any], role: str = ""
) -> serve.Application:  # fmt: skip
    """Return the deployment `name` of replicas with these settings."""
    router = RequestRouterConfig.model_validate({"request_router_class": ROUTER})
    engines = serve.deployment(name=name, request_router_config=router, **options.get(name, {}))(EngineReplica)
    return engines.bind(**settings, role=role)
