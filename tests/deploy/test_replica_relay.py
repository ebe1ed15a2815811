"""Engines in replicas of Serve behind one client, without Serve."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import echo_service
import pytest
from echo_service import Echo
from relayed import MODEL, Handle, complete, ray_serve, replicas
from waiting import wait_until_async

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.deploy import replica_client
from quire.deploy.replica_client import ReplicaLost, ServeReplicaClient
from quire.errors import EngineDead, StartupError
from quire.ipc.replicas import ReplicatedEngineClient

Work = Callable[[AsyncLLM, ReplicatedEngineClient, Handle], Awaitable[None]]


def served(work: Work, names: str = "ab", **built: Any) -> None:
    """Run a coroutine function with an AsyncLLM over replicas of these names, then end them."""

    async def run() -> None:
        handle = Handle(**replicas(names, echo=built, max_num_seqs=2))
        clients = [await ServeReplicaClient.connect(handle, name) for name in names]
        client = ReplicatedEngineClient(clients, "prefix", elastic=True)
        model = echo_service.built(Echo(), kv_tokens=4096)
        llm = AsyncLLM.over(client, echo_service.input_processor(model, client.ready.limits))
        try:
            await work(llm, client, handle)
        finally:
            await asyncio.to_thread(llm.close)
            for one in handle.replicas.values():
                await asyncio.to_thread(one.__del__)

    asyncio.run(run())


def test_replicas_come_and_go() -> None:
    """A new one gets requests, one that is drained ends those that it has, and its index is used again."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient, handle: Handle) -> None:
        handle.replicas |= replicas("c", echo={"pause": 0.01}, max_num_seqs=2)
        third = await ServeReplicaClient.connect(handle, "c")
        assert client.take_in(third) == 2
        other = third.ready._replace(limits=third.ready.limits._replace(max_len=9))
        with pytest.raises(StartupError, match="the longest sequence of a new replica is 9 tokens, that of the others"):
            client.take_in(SimpleNamespace(ready=other))  # type: ignore[arg-type]
        tasks = [asyncio.ensure_future(complete(llm, [5 + i] * 20, 40)) for i in range(9)]
        await wait_until_async(lambda: len(third._calls) == 3, "each has three")
        client.drain(third)
        third.drain()
        handle.draining.add("c")
        assert not third.has_ended, "its requests go on"
        tasks += [asyncio.ensure_future(complete(llm, [5] * 20, 40)) for _ in range(3)]
        assert [len(tokens) for tokens in await asyncio.gather(*tasks)] == [40] * 12
        assert third.has_ended
        assert handle.calls.count("add") == 12
        handle.replicas |= replicas("d", max_num_seqs=2)
        assert client.take_in(await ServeReplicaClient.connect(handle, "d")) == 2
        assert len(await complete(llm, [5] * 20, 40)) == 40
        assert not client._requests

    served(work, pause=0.01)


def test_an_engine_ends_and_its_requests_move() -> None:
    """Those with a token fail, as with `quire serve --replicas`; of all engines none is left, and the API waits."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient, handle: Handle) -> None:
        tasks = [asyncio.ensure_future(complete(llm, [i + 3], 60)) for i in range(8)]
        await wait_until_async(
            lambda: sum(sent.message is None for sent in client._requests.values()) == 4, "two of each engine run"
        )
        handle.replicas["a"]._client.child.process.send_signal(signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [str(end) for end in ends if isinstance(end, EngineDead)]
        assert failed == ["replica 0 ended: its process was ended by signal 9 (SIGKILL)"] * 2
        assert sum(isinstance(end, list) and len(end) == 60 for end in ends) == 6
        with pytest.raises(EngineDead):
            await handle.replicas["a"].check_health()
        await handle.replicas["b"].check_health()
        assert json.loads(await handle.replicas["a"].describe()) == ["a", None, None]
        with pytest.raises(ReplicaLost):
            await ServeReplicaClient.connect(handle, "a")

    served(work, pause=0.01)


def test_requests_of_a_replica_that_falls_silent_move_or_fail_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_client, "LOST_SECONDS", 1.0)
    monkeypatch.setattr(ray_serve, "HEARTBEAT_SECONDS", 0.1)

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient, handle: Handle) -> None:
        tasks = [asyncio.ensure_future(complete(llm, [i + 3], 60)) for i in range(8)]
        await wait_until_async(
            lambda: sum(sent.message is None for sent in client._requests.values()) == 4, "two of each engine run"
        )
        client.replicas[0]._stream.work = _nothing()
        ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        failed = [str(end) for end in ends if isinstance(end, EngineDead)]
        assert failed == ["replica 0 ended: its replica has not been heard of for 1 s"] * 2
        assert sum(isinstance(end, list) and len(end) == 60 for end in ends) == 6

    served(work, pause=0.05)


async def _nothing() -> AsyncIterator[bytes]:
    await asyncio.sleep(1000)
    yield b""


def test_a_request_that_its_caller_leaves_is_cancelled() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient, handle: Handle) -> None:
        task = asyncio.ensure_future(complete(llm, [3], 200))
        await wait_until_async(lambda: any(sent.message is None for sent in client._requests.values()), "it runs")
        handle.draining.add("a")
        handle.draining.add("b")  # neither gets calls
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        for stream in list(llm._streams_by_id):
            llm.abort(stream)
        await wait_until_async(lambda: not any(one._ends for one in handle.replicas.values()), "the calls have ended")
        await wait_until_async(lambda: sum(client.queue_sizes) == 0, "the engines are idle")

    served(work, pause=0.02)


def test_the_next_ingress_finds_the_pages_and_none_of_the_requests() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient, handle: Handle) -> None:
        prefix = [*range(3, 103)]
        await complete(llm, prefix)
        stored = [replica.stored for replica in client.router.replicas]
        assert sum(map(bool, stored)) == 1
        left = [asyncio.ensure_future(complete(llm, [i + 3], 150)) for i in range(4)]
        await wait_until_async(
            lambda: sum(sent.message is None for sent in client._requests.values()) == 4, "all of them run"
        )
        clients = [await ServeReplicaClient.connect(handle, name) for name in "ab"]
        following = ReplicatedEngineClient(clients, "prefix", elastic=True)
        second = AsyncLLM.over(following, llm.prompts)
        following.attach_event_loop()
        assert len(await complete(second, [7] * 10)) == 5
        assert all(replica.stored >= before for replica, before in zip(following.router.replicas, stored))
        ends = await asyncio.gather(*left, return_exceptions=True)
        assert all(isinstance(end, Exception) for end in ends), ends
        await asyncio.to_thread(second.close)

    served(work, pause=0.01)


def test_a_call_for_a_replica_that_gets_none_goes_to_another() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient, handle: Handle) -> None:
        handle.draining.add("a")  # and the client doesn't know yet
        assert [len(await complete(llm, [i + 3])) for i in range(4)] == [5] * 4
        assert handle.calls.count("add") > 4

    served(work)


async def _stream(chunks: list[bytes]) -> AsyncIterator[bytes]:
    for chunk in chunks:
        yield chunk


def test_what_is_no_frame_ends_the_connection() -> None:
    class Broken:
        def connect(self, name: str) -> AsyncIterator[bytes]:
            """Yield what no replica sends."""
            return _stream([b"GET / HTTP/1.1\r\n\r\n"])

    async def run() -> None:
        with pytest.raises(ReplicaLost, match="version"):
            await ServeReplicaClient.connect(Handle(a=Broken()), "a")

    asyncio.run(run())


def test_unlike_models_are_refused_with_the_difference(tmp_path: Path) -> None:
    other = {**MODEL, "revision": "v2"}
    with pytest.raises(StartupError, match="replica x has another model: its revision is v2, that of the others None"):
        ray_serve.check_same_model("x", MODEL, other)
    ray_serve.check_same_model("x", MODEL, dict(MODEL))
    commit = tmp_path / "snapshots" / "abc"
    commit.mkdir(parents=True)
    source: Any = SimpleNamespace(name="m", path=commit, config={"a": 1})
    first = ray_serve.describe_model(EngineConfig(), source)
    assert first["revision"] == "abc"
    (commit / "model.safetensors").write_bytes(b"1")
    more = ray_serve.describe_model(EngineConfig(tp=2), source)
    assert {name for name in first if first[name] != more[name]} == {"set of weight files", "set of engine settings"}
