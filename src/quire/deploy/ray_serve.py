"""An application of Ray Serve: an ingress with the API of `quire serve`, and replicas with an engine each.

Serve calls `build_app`, and runs the ingress and the replicas in processes of Ray. A replica starts its engine as
`quire serve` does, in a process of its own, and relays its frames."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from hashlib import sha256
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

import quire
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.deploy.replica_client import ReplicaLost, ServeReplicaClient
from quire.deploy.serve_config import API, ENGINE
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
    ListPrefixes,
    Reply,
    StepOutputs,
)
from quire.ipc.process_client import ProcessEngineClient
from quire.ipc.replicas import ReplicatedEngineClient
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
    EngineConfig, `serving` those of ServeOptions."""

    async def __init__(self, engine: dict[str, Any], serving: dict[str, Any]) -> None:  # type: ignore[misc]
        configure_logging(options_from_json(serving))
        config = EngineConfig.of(**engine)
        client, prompts, checkpoint = await asyncio.to_thread(launch_engine_process, config, report_cache=True)
        prompts.close()  # the ingress has its own
        name = serve.get_replica_context().replica_id.unique_id
        self._set_up(name, client, await asyncio.to_thread(describe_model, config, checkpoint))

    @classmethod
    def over(cls, name: str, client: ProcessEngineClient, model: dict[str, str]) -> EngineReplica:
        """Return a replica, outside of Serve, with an engine that is ready."""
        self = cls.__new__(cls)
        self._set_up(name, client, model)
        return self

    def _set_up(self, name: str, client: ProcessEngineClient, model: dict[str, str]) -> None:
        self._name, self._client, self._model = name, client, model
        self._ingress: IngressConnection | None = None
        self._cached = dict[bytes, None]()  # keys of the pages that the engine has
        self._ends = dict[int, asyncio.Future[None]]()  # of requests in flight, by number
        self._error: BaseException | None = None
        self._barrier, self._idle = asyncio.Event(), asyncio.Event()
        client.start(self._on_message)
        client.attach_event_loop()

    async def describe(self) -> bytes:
        """Return, as JSON, the name of this replica and its model, or None if the engine has ended."""
        return json.dumps([self._name, self._model if self._error is None else None]).encode()

    async def connect(self, name: str) -> AsyncIterator[bytes]:
        """Yield the engine's frames for an ingress, which takes the place of the one before it."""
        if name != self._name or self._error is not None:
            return
        if self._ingress is not None:
            self._ingress.close()
            self._ingress = None
            await self._end_requests()
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
        """Abort the requests of the ingress before, whose numbers the next one may use, and wait until none is left."""
        self._barrier.clear()
        self._client.send(AbortRequests(None))
        self._client.send(ListPrefixes(BARRIER_KEY))
        async with asyncio.timeout(SETTLE_SECONDS):
            await self._barrier.wait()
            await self._idle.wait()

    async def add(self, name: str, frame: bytes) -> bool:
        """Queue requests, and wait for their end. If the call is cancelled, they are aborted. Return False if this is
        another replica, or its engine has ended."""
        if name != self._name or self._error is not None:
            return False
        message = read_message(frame)
        assert isinstance(message, AddRequests), "another message"
        loop = asyncio.get_running_loop()
        ends = {request.number: loop.create_future() for request in message.requests}
        self._ends.update(ends)
        self._client.send(message)
        try:
            await asyncio.wait(ends.values())
        except asyncio.CancelledError:
            self._client.send(AbortRequests(tuple(ends)))
            raise
        finally:
            for number in ends:
                self._ends.pop(number, None)
        return True

    async def send(self, name: str, frame: bytes) -> bool:
        """Send the engine another message. Return False if this is another replica."""
        return name == self._name and self._client.send(read_message(frame))

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
        client: ProcessEngineClient | None = vars(self).get("_client")  # None: it could not be started
        if client is not None:
            client.close(CLOSE_SECONDS)


def read_message(frame: bytes) -> ClientMessage:
    """Return the message in a frame."""
    return frames.read_client_message(next(frames.FrameCodec().decode(frame)))


class ApiServer:
    """The ingress: the API server, and the router of its requests. `engines` is the handle of EngineReplica. There is
    one, because a router must know of all requests."""

    async def __init__(  # type: ignore[misc]
        self, engines: DeploymentHandle[Any], engine: dict[str, Any], serving: dict[str, Any]
    ) -> None:
        options, config = options_from_json(serving), EngineConfig.of(**engine)
        configure_logging(options)
        raise_descriptor_limit()
        sys.set_int_max_str_digits(MAX_INT_DIGITS)
        keys, template = read_keys(options.api_key_file), read_chat_template(options.chat_template)
        admin_keys = read_keys(options.admin_key_file, "--admin-key-file", ADMIN_KEY_VARIABLE)
        self._engines, self._settings = engines, digest(config.flat())
        self._model = dict[str, str]()  # of the first replica with the settings of this server
        self._clients = dict[str, ServeReplicaClient]()  # by name of a replica
        self._refused = set[str]()  # names of replicas with other models
        while not (new := await self._find_replicas()):
            await asyncio.sleep(DISCOVERY_SECONDS)
        self._client = ReplicatedEngineClient(new[:1], options.router, elastic=True)
        prompts, checkpoint = await asyncio.to_thread(read_input_processor, config, self._client)
        if template is not None:
            set_chat_template(prompts, template)
        self._llm = AsyncLLM.over(self._client, prompts)
        self._client.attach_event_loop()
        for client in new[1:]:
            self._take_in(client)
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
            try:
                for client in await self._find_replicas():
                    self._take_in(client)
            except Exception:
                log.exception("the replicas can't be found")

    async def _find_replicas(self) -> list[ServeReplicaClient]:
        """Return connections to new replicas. Drain those that Serve sends no more calls."""
        try:
            replies: list[Any] = await self._engines.broadcast("describe").results_async(
                timeout_s=DESCRIBE_SECONDS, return_exceptions=True
            )
        except (DeploymentUnavailableError, TimeoutError):  # there is none
            return []
        found: dict[str, dict[str, str] | None] = dict(map(json.loads, filter(is_bytes, replies)))
        if len(found) == len(replies):
            for name in self._clients.keys() - found.keys():
                client = self._clients.pop(name)
                if not client.has_ended:
                    self._client.drain(client)
                    client.drain()
        new = list[ServeReplicaClient]()
        for name, model in found.items():
            is_connected = name in self._clients and not self._clients[name].has_ended
            if model is None or is_connected or name in self._refused:
                continue
            try:
                check_same_model(name, self._model or {**model, SETTINGS: self._settings}, model)
                self._model = model
                new.append(await ServeReplicaClient.connect(self._engines, name))
                self._clients[name] = new[-1]
            except ReplicaLost as error:
                log.warning("%s", error)
            except StartupError as error:
                self._refuse(name, error)
        return new

    def _take_in(self, client: ServeReplicaClient) -> None:
        try:
            index = self._client.take_in(client)
            log.info("replica %d is %s", index, client.name)
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
    if args.keys() != {"engine", "serving"}:
        raise StartupError(f"args has {', '.join(args) or 'nothing'}", "It has engine and serving")
    router = RequestRouterConfig.model_validate({"request_router_class": ROUTER})
    engines = serve.deployment(name=ENGINE, request_router_config=router, **options.get(ENGINE, {}))(EngineReplica)
    api = serve.deployment(name=API, **options.get(API, {}))(serve.ingress()(ApiServer))
    return api.bind(engines.bind(**args), **args)
