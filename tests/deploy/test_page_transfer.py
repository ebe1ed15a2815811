"""Pages that replicas hand over between hosts: tokens are those of one engine, whatever fails falls back, strangers get
nothing, and no page stays held. The replicas listen on other addresses of the loopback interface."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import echo_service
import psutil
import pytest
from echo_service import HOST_BYTES, Echo
from relayed import Handle, ray_serve, replicas
from waiting import wait_until, wait_until_async

from quire.async_llm import AsyncLLM
from quire.deploy import page_transfer
from quire.deploy.page_transfer import (
    CHUNK_BYTES,
    HELLO,
    KINDS,
    PULL,
    PULL_BODY,
    PageInbox,
    PageServer,
    read_sources,
    write_sources,
)
from quire.deploy.replica_client import ServeReplicaClient
from quire.deploy.serve_config import ENGINE, PREFILL
from quire.distributed.secure_channel import SecureChannel, connect
from quire.errors import StartupError
from quire.ipc import frames
from quire.ipc.frames import FrameCodec, write_json
from quire.ipc.messages import AddRequests, HandOver, NewRequest, PageImport, PageSource
from quire.ipc.replicas import ReplicatedEngineClient
from quire.protocol.columns import WireError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.shared_host import SharedHostMemory, SharedPage
from quire.startup.engine_process import create_shared_memory

ADDRESS = "127.0.0.2"
SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
PROMPTS = [[(i * 7 + k) % 300 + 3 for i in range(80 + 9 * k)] for k in range(8)]
SWAP_GIB = HOST_BYTES / 2**30


@dataclass
class Setup:
    """Replicas, `p` for prompts, and `a` and `b` that decode, with their ingress."""

    llm: AsyncLLM
    client: ReplicatedEngineClient
    handle: Handle

    async def complete_all(self, prompts: list[list[int]] = PROMPTS) -> list[tuple[list[int], int]]:
        """Return the tokens of each prompt, and how many of its own were cached."""
        return await asyncio.gather(*map(self.complete, prompts))

    async def complete(self, prompt: list[int]) -> tuple[list[int], int]:
        tokens, cached = list[int](), 0
        async for output in await self.llm.submit(prompt, SHORT):
            tokens += output.tokens
            cached = output.cached_tokens
        return tokens, cached

    async def released(self) -> None:
        """Wait until nothing is held by any replica."""
        client = self.client

        def held() -> list[Any]:
            found = [*client._imports, *client._computations, *client._requests, *client.router.requests]
            for one in self.handle.replicas.values():
                if one._error is None:
                    found += [*one._imports, *one._prompts, *one._ends, *one._adds]
                    found += one._inbox._taken if one._inbox is not None else ()
                    found += one._pages.numbers if one._pages is not None else ()
            return found

        await wait_until_async(lambda: not held(), lambda: f"nothing is held: {held()}")


async def ingress(handle: Handle) -> Setup:
    """Connect a new ingress: the replica `p` joins later, as in Serve."""
    source = page_transfer.source_from_json([*handle.replicas["p"]._pages.source])
    decode = [await ServeReplicaClient.connect(handle, name) for name in handle.replicas if name != "p"]
    client = ReplicatedEngineClient(decode[:1], "prefix", elastic=True, min_prefill_tokens=4)
    model = echo_service.built(Echo(), kv_tokens=4096)
    llm = AsyncLLM.over(client, echo_service.input_processor(model, client.ready.limits))
    client.attach_event_loop()
    for one in decode[1:]:
        client.take_in(one)
    client.take_in(await ServeReplicaClient.connect(handle, "p", source), is_prefill=True)
    return Setup(llm, client, handle)


def separated(work: Callable[[Setup], Awaitable[None]], names: str = "ab", **built: Any) -> None:
    """Run a coroutine function over these replicas, and check that all is released at the end."""
    settings: dict[str, Any] = {"kv_tokens": 1024, "swap_gib": SWAP_GIB, **built}

    async def run() -> None:
        handle = Handle(**replicas("p", PREFILL, ADDRESS, **settings), **replicas(names, ENGINE, **settings))
        setup = await ingress(handle)
        try:
            await work(setup)
            await setup.released()
        finally:
            await asyncio.to_thread(setup.llm.close)
            for one in handle.replicas.values():
                await asyncio.to_thread(one.__del__)

    asyncio.run(run())


def alone(prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    """Return the tokens of one engine."""
    engine = echo_service.built().engine
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, SHORT)
    while engine.has_unfinished_requests:
        for output in engine.step():
            found[output.request_id] += output.tokens
    return list(found.values())


def test_pages_arrive_and_tokens_are_those_of_one_engine() -> None:
    """An echo computes its tokens from the pages."""

    async def work(setup: Setup) -> None:
        found = await setup.complete_all()
        assert [tokens for tokens, _ in found] == alone()
        assert [cached for _, cached in found] == [0] * 8, "nobody had computed them before"
        await setup.released()
        counts = setup.client.handover_counts
        assert (counts.handovers, counts.fallbacks) == (8, 0)
        assert counts.page_bytes
        longer = [*PROMPTS[0], *range(200, 260)]
        tokens, cached = await setup.complete(longer)
        assert [tokens] == alone([longer])
        assert cached == 80, "those that the prefill replica found"
        decode = [replica.metrics for replica in setup.client.replicas[:2]]
        assert sum(one.account.sharing.hits for one in decode) >= sum((len(one) - 1) // 4 * 4 for one in PROMPTS)
        assert setup.client.replicas[2].metrics.stats.generated_tokens == 0
        connections = [one._inbox._sources for one in setup.handle.replicas.values() if one._inbox]
        assert max(map(len, connections)) == 1, "one is kept"

    separated(work)


@pytest.mark.parametrize("is_killed", [True, False])
def test_the_source_is_lost_while_it_sends(monkeypatch: pytest.MonkeyPatch, is_killed: bool) -> None:
    """Requests whose pages have not arrived are computed by the replicas that decode."""
    read_chunks, sent = page_transfer.read_chunks, list[int]()

    async def work(setup: Setup) -> None:
        server = setup.handle.replicas["p"]._pages

        def losing(memory: memoryview, runs: list[tuple[int, int]]) -> Iterator[bytes]:
            for chunk in read_chunks(memory, runs):
                yield chunk[: len(chunk) // 2]
                sent.append(len(chunk))
                server.close()
                if is_killed:
                    os.kill(setup.handle.replicas["p"]._client.child.process.pid, signal.SIGKILL)

        monkeypatch.setattr(page_transfer, "read_chunks", losing)
        assert [tokens for tokens, _ in await setup.complete_all()] == alone()
        await setup.released()
        assert sent
        assert setup.client.handover_counts.handovers == 0
        assert setup.client.handover_counts.fallbacks
        assert setup.client._alive == ({0, 1} if is_killed else {0, 1, 2})

    separated(work)


def test_a_full_inbox() -> None:
    async def work(setup: Setup) -> None:
        for name in "ab":
            inbox = setup.handle.replicas[name]._inbox
            inbox._part = inbox._part[: 22 * inbox._page_bytes[0]]  # the first prompt fits, alone
        assert [tokens for tokens, _ in await setup.complete_all()] == alone()
        await setup.released()
        counts = setup.client.handover_counts
        assert counts.fallbacks
        assert counts.handovers + counts.fallbacks == 8

    separated(work)


def test_pages_that_were_released_meanwhile_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have been overwritten while they were read."""
    read_chunks = page_transfer.read_chunks

    async def work(setup: Setup) -> None:
        server = setup.handle.replicas["p"]._pages

        def releasing(memory: memoryview, runs: list[tuple[int, int]]) -> Iterator[bytes]:
            for chunk in read_chunks(memory, runs):
                yield bytes(len(chunk))
            for number in server.numbers:
                server.remove(number)

        monkeypatch.setattr(page_transfer, "read_chunks", releasing)
        assert [tokens for tokens, _ in await setup.complete_all(PROMPTS[:3])] == alone(PROMPTS[:3])
        await setup.released()
        assert setup.client.handover_counts.handovers == 0
        assert setup.client.handover_counts.fallbacks == 3

    separated(work, "a")


def test_requests_that_are_left_while_their_pages_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    read_chunks, may_go_on = page_transfer.read_chunks, threading.Event()

    def waiting(memory: memoryview, runs: list[tuple[int, int]]) -> Iterator[bytes]:
        may_go_on.wait(30)
        yield from read_chunks(memory, runs)

    async def work(setup: Setup) -> None:
        monkeypatch.setattr(page_transfer, "read_chunks", waiting)
        tasks = [asyncio.ensure_future(setup.llm.submit(prompt, SHORT)) for prompt in PROMPTS[:4]]
        decode = setup.handle.replicas["a"]
        await wait_until_async(lambda: len(decode._imports) == 4, "all are being fetched")
        assert (await asyncio.wait_for(setup.complete([5, 6, 7]), 30))[0], "others are served meanwhile"
        for id in list(setup.llm._streams_by_id):
            setup.llm.abort(id)
        await asyncio.sleep(0.05)
        may_go_on.set()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(end) for end in ends] == ["the request was aborted"] * 4
        await setup.released()
        assert [(await setup.complete(PROMPTS[6]))[0]] == alone(PROMPTS[6:7])

    separated(work, "a")


def test_the_next_ingress_finds_no_pages_held() -> None:
    """Neither those of prompts that were handed over and never fetched, nor those of prompts that are computed."""

    async def work(setup: Setup) -> None:
        prefill = setup.handle.replicas["p"]
        setup.client._add = lambda pending: True  # type: ignore[assignment]  # this ingress ends before the next step
        tasks = [asyncio.ensure_future(setup.llm.submit(prompt, SHORT)) for prompt in PROMPTS[:3]]
        await wait_until_async(lambda: len(prefill._pages.numbers) == 3, "they are handed over")
        following = await ingress(setup.handle)
        await following.released()
        assert [tokens for tokens, _ in await following.complete_all()] == alone()
        await following.released()
        counts = following.client.handover_counts
        assert (counts.handovers, counts.fallbacks) == (8, 0)
        for task in tasks:
            task.cancel()
        setup.client._computations.clear()
        setup.client._requests.clear()
        setup.client.router.requests.clear()
        await asyncio.to_thread(following.llm.close)

    separated(work)


def test_a_refused_request_ends_its_call() -> None:
    async def work(setup: Setup) -> None:
        for name, hands_over in (("p", True), ("a", False)):
            replica = setup.handle.replicas[name]
            message = AddRequests(77, (NewRequest(78, "x", [10**6]),), SHORT, hands_over=hands_over)
            data = FrameCodec().encode(*frames.write_client_message(message))
            assert await asyncio.wait_for(replica.add(name, data), 30)

    separated(work)


def test_an_index_is_used_again_for_another_role() -> None:
    async def work(setup: Setup) -> None:
        os.kill(setup.handle.replicas["a"]._client.child.process.pid, signal.SIGKILL)
        await wait_until_async(lambda: setup.client._alive == {1, 2}, "it has ended")
        setup.handle.replicas |= replicas("q", PREFILL, "127.0.0.3", kv_tokens=1024, swap_gib=SWAP_GIB)
        source = setup.handle.replicas["q"]._pages.source
        new = await ServeReplicaClient.connect(setup.handle, "q", source)
        assert setup.client.take_in(new, is_prefill=True) == 0
        assert [tokens for tokens, _ in await setup.complete_all()] == alone()
        await setup.released()
        counts = setup.client.handover_counts
        assert (counts.handovers, counts.fallbacks) == (8, 0)
        assert len(setup.handle.replicas["b"]._inbox._sources) == 2, "both computed prompts"

    separated(work)


def test_a_model_whose_prompts_cannot_be_reused_is_refused() -> None:
    async def run() -> None:
        with pytest.raises(
            StartupError, match="--prefill-replicas is given, and no prompt of this model can be reused"
        ):
            replicas("p", PREFILL, ADDRESS, enable_prefix_caching=False, swap_gib=SWAP_GIB)

    asyncio.run(run())


# The server and the inbox, without engines

SIZES = (4096, 6144)  # bytes of a page of each group
PAGES = [SharedPage(i % 3 == 0, (5 * i) % 64 + 1, i.to_bytes(4)) for i in range(60)]


class Pair:
    """A server with the pages of HandOver 7, and an inbox on another memory."""

    def __init__(self, stack: ExitStack, sizes: tuple[int, ...] = SIZES) -> None:
        memories = [stack.enter_context(create_shared_memory()) for _ in range(2)]
        self.memory = SharedHostMemory(memories[0].fileno(), 0, 1, 2**19)
        self.data = memoryview(self.memory.map(SIZES))
        self.data[:] = os.urandom(len(self.data))
        self.server = stack.enter_context(closing(PageServer(ADDRESS, self.memory, SIZES)))
        self.server.add(HandOver(7, 0, 1, PAGES))
        shared = SharedHostMemory(memories[1].fileno(), 1, 2, 2**19)
        self.inbox = stack.enter_context(closing(PageInbox(shared, sizes)))
        self.arrived = memoryview(shared.map(sizes))

    def fetch(self, *keys: int, number: int = 7, source: PageSource | None = None) -> list[Any]:
        """Fetch pages, all at once."""

        async def run() -> list[Any]:
            source_ = source or self.server.source
            return await asyncio.gather(*(self.inbox.fetch(key, source_, number, PAGES) for key in keys))

        return asyncio.run(run())

    def check(self, placed: list[SharedPage]) -> None:
        """The bytes are those of the server, in part 1."""
        assert [(page.group, page.key) for page in placed] == [(page.group, page.key) for page in PAGES]
        for there, here in zip(PAGES, placed):
            size = SIZES[there.group]
            start = (here.host_page - 1) * size
            assert start >= len(self.arrived) // 2
            assert self.arrived[start : start + size] == self.data[(there.host_page - 1) * size :][:size]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack)


@pytest.mark.parametrize("chunk", [1000, CHUNK_BYTES])
def test_the_bytes_of_pages_of_several_sizes(pair: Pair, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(page_transfer, "CHUNK_BYTES", chunk)
    [placed] = pair.fetch(1)
    pair.check(placed)
    assert pair.fetch(2) == [None], "there is room for one"
    pair.inbox.free(1)
    [placed] = pair.fetch(3)
    pair.check(placed)


def test_what_is_not_handed_over_is_refused_and_the_connection_goes_on(pair: Pair) -> None:
    assert pair.fetch(1, number=8) == [None]
    pair.check(pair.fetch(2)[0])
    pair.inbox.free(2)
    pair.server.remove(7)
    assert pair.fetch(3) == [None]
    assert not pair.inbox._taken
    assert len(pair.server._channels) == 1


def test_pages_of_other_sizes_are_not_fetched(caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack:
        pair = Pair(stack, (4096, 8192))
        assert pair.fetch(1) == [None]
        assert r"its pages have [4096, 6144] bytes, and ours [4096, 8192]" in caplog.text


def test_a_source_that_is_silent_or_gone_fails_and_is_tried_again_later(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_transfer, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(page_transfer, "RETRY_SECONDS", 0.5)
    send_pages, may_go_on = PageServer._send_pages, threading.Event()

    def silent(server: PageServer, channel: SecureChannel, request: Any) -> None:
        may_go_on.wait(30)
        send_pages(server, channel, request)

    monkeypatch.setattr(PageServer, "_send_pages", silent)
    started = time.monotonic()
    assert pair.fetch(1) == [None]
    assert pair.fetch(2) == [None]
    assert time.monotonic() - started < 0.4, "the second one fails at once"
    may_go_on.set()
    time.sleep(0.5)
    pair.check(pair.fetch(3)[0])
    pair.inbox.free(3)
    for channel in list(pair.server._channels):
        channel.interrupt()
    wait_until(lambda: not pair.server._channels, "the connection is lost")
    pair.check(pair.fetch(4)[0])


def admitted(pair: Pair) -> SecureChannel:
    """Return a connection with the token."""
    source = pair.server.source
    channel = connect(source.address, source.port, source.certificate, KINDS, CHUNK_BYTES)
    channel.send(HELLO, write_json({"token": source.token}))
    wait_until(channel.receive, "it is welcome")
    return channel


def closes(connection: socket.socket, data: bytes) -> bool:
    """Return True if a connection that sends this is closed without another frame."""
    connection.settimeout(30)
    with closing(connection), suppress(OSError):
        connection.sendall(data)
        while received := connection.recv(1 << 16):
            assert len(received) < 64, "an alert of TLS at most"
    return True


def test_strangers_are_refused_and_disturb_nobody(pair: Pair) -> None:
    source = pair.server.source
    with ExitStack() as idle:
        for _ in range(20):
            idle.enter_context(socket.create_connection((source.address, source.port)))
        assert closes(socket.create_connection((source.address, source.port)), os.urandom(512))
        for token in ("guess", "", 7, None):
            channel = connect(source.address, source.port, source.certificate, KINDS)
            assert closes(channel.connection, FrameCodec().encode(HELLO, write_json({"token": token})))
        channel = connect(source.address, source.port, source.certificate, KINDS)
        assert closes(channel.connection, FrameCodec().encode(PULL, PULL_BODY.pack(7))), "before its token"
        pair.check(pair.fetch(1)[0])
    sockets = psutil.Process().net_connections("tcp4")
    assert [s.laddr.ip for s in sockets if s.status == "LISTEN" and s.laddr.port == source.port] == [ADDRESS]


@pytest.mark.parametrize(
    "data",
    [
        FrameCodec().encode(PULL, b"1"),
        FrameCodec().encode(HELLO, PULL_BODY.pack(7)),
        b"\1\3\0\0\1\0\0\0\xff\xff\xff\x0f",
        os.urandom(64),
    ],
    ids=["short", "kind", "length", "noise"],
)
def test_bytes_that_are_no_request_end_their_connection_alone(pair: Pair, data: bytes) -> None:
    """The frame's number is 2, after HELLO, but for the noise."""
    other = admitted(pair)
    with closing(admitted(pair)) as channel:
        assert closes(channel.connection, data[:4] + b"\2" + data[5:])
    pair.check(pair.fetch(1)[0])
    other.send(PULL, PULL_BODY.pack(8))
    wait_until(other.receive, "the other one is answered")
    other.close()


def test_a_source_that_sends_something_else(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """More bytes than the pages have, or fewer: nothing is imported, and no other byte of the inbox is written."""
    monkeypatch.setattr(page_transfer, "RETRY_SECONDS", 0.0)
    read_chunks = page_transfer.read_chunks
    pair.arrived[:] = bytes(len(pair.arrived))
    for sent in (lambda chunks: [*chunks, b"more"], lambda chunks: chunks[:-1], lambda chunks: [chunks[0][:-1]]):
        monkeypatch.setattr(page_transfer, "read_chunks", lambda *given, sent=sent: sent(list(read_chunks(*given))))
        assert pair.fetch(1) == [None]
    taken = sum((count + 1) * size for count, size in zip((40, 20), SIZES))
    assert not any(pair.arrived[: len(pair.arrived) // 2])
    assert not any(pair.arrived[len(pair.arrived) // 2 + taken :])


def test_sources_cross_as_json() -> None:
    source = PageSource("10.0.0.1", 9000, "certificate", "token")
    imports = [PageImport(1, HandOver(5, 0, 1, PAGES), source), PageImport(2, HandOver(6, 0, 1, PAGES), source)]
    assert read_sources(write_sources(imports)) == [(5, source), (6, source)]
    for wrong in ([5, "a", 0, "", ""], [-1, "a", 1, "", ""], [5, "a", 1, ""], [5, "a", 1, "", 4], [], "a", [True]):
        with pytest.raises(WireError):
            read_sources(write_json({"sources": [wrong]}))


def test_gaps_of_an_inbox_are_used_again(pair: Pair) -> None:
    few, inbox = [SharedPage(0, 1, b"a")] * 8, pair.inbox
    starts = []
    while (placed := inbox._place(len(starts), few)) is not None:
        starts.append(placed[0].host_page)
    assert len(set(starts)) == len(starts) > 5
    inbox.free(3)
    assert inbox._place(99, [SharedPage(1, 1, b"a")] * 8) is None, "it is too small for these"
    assert inbox._place(99, few)[0].host_page == starts[3]  # type: ignore[index]
    assert inbox._place(100, [SharedPage(2, 1, b"a")]) is None, "there is no such group"
    assert inbox._place(100, []) is None
    assert ray_serve.SHARED_PARTS == {PREFILL: 1, ENGINE: 2}
