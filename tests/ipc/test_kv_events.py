"""KV events: a subscriber that decodes them as routers for vLLM do knows what the engine has cached."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import echo_service
import msgspec
import pytest
import zmq
from waiting import wait_until

from quire import LLM
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig, KVEventsConfig
from quire.errors import StartupError
from quire.ipc import kv_events
from quire.ipc.engine_loop import EngineLoop
from quire.ipc.kv_events import BlockStored, KVEventPublisher, block_hash, make_events, replica_endpoint
from quire.ipc.messages import CacheUpdate, EngineMessage
from quire.memory.cache_log import CacheChanges, PageContent
from quire.memory.paged import PagedMemory
from quire.protocol.sampling_params import SamplingParams
from quire.startup.engine_process import launch_replicas

TIMEOUT = 30_000  # milliseconds
END = (1 << 64) - 1  # the number of the end of a replay


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """The base class of vLLM's events, as in its release 0.23."""


class Stored(Event, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Asks for replays, and keeps the blocks that the engine has: hash -> (hash of the block before it, tokens)."""

    def __init__(self, endpoint: str, block_size: int = 4, rank: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(endpoint)
        self.block_size, self.rank = block_size, rank
        self.known = dict[int, tuple[int | None, list[int]]]()
        self.next_number = self.num_removed = 0

    def replay(self, first: int) -> list[tuple[int, EventBatch]]:
        """Return the messages from a number on, and their numbers."""
        self.socket.send_multipart((b"", first.to_bytes(8)))
        messages = []
        while True:
            assert self.socket.poll(TIMEOUT), "no answer"
            empty, number, payload = self.socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(number) == END:
                assert payload == b""
                return messages
            messages.append((int.from_bytes(number), msgspec.msgpack.decode(payload, type=EventBatch)))

    def update(self) -> None:
        """Apply the messages that were not applied yet. The engine has sent all that was published before."""
        for number, batch in self.replay(self.next_number):
            assert (number, batch.data_parallel_rank) == (self.next_number, self.rank)
            self.next_number += 1
            for event in batch.events:
                self.apply(event)

    def apply(self, event: Event) -> None:
        assert isinstance(event, Stored | Removed)
        assert event.medium == "GPU"
        if isinstance(event, Removed):
            self.num_removed += len(event.block_hashes)
            for block in event.block_hashes:
                del self.known[block]
            return
        size, parent = event.block_size, event.parent_block_hash
        assert size == self.block_size
        assert len(event.token_ids) == size * len(event.block_hashes)
        for i, block in enumerate(event.block_hashes):
            assert block not in self.known
            self.known[block] = parent, event.token_ids[i * size : (i + 1) * size]
            parent = block

    def prefix(self, block: int) -> list[int] | None:
        """Return the tokens up to the end of a block; None if a block before it was dropped."""
        tokens, at = list[int](), block
        while True:
            if at not in self.known:
                return None
            parent, own = self.known[at]
            tokens = [*own, *tokens]
            if parent is None:
                return tokens
            at = parent

    def close(self) -> None:
        self.context.destroy(linger=0)


@contextmanager
def publishing(tmp_path: Path, **more: Any) -> Iterator[tuple[KVEventPublisher, Subscriber]]:
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", **more)
    publisher = KVEventPublisher(config)
    subscriber = Subscriber(publisher.replay_endpoint)
    try:
        yield publisher, subscriber
    finally:
        publisher.close()
        subscriber.close()
        assert not publisher._thread.is_alive()


def page(number: int) -> bytes:
    return number.to_bytes(32)


def changes(stored: Sequence[int] = (), dropped: Sequence[int] = ()) -> CacheChanges:
    """Return changes of pages that have no page before them, and four tokens."""
    contents = {page(n): PageContent(None, [n] * 4) for n in stored}
    return CacheChanges(list(map(page, dropped)), list(contents), contents)


# An engine's events


@pytest.mark.parametrize("report_cache", [True, False])
def test_a_subscriber_knows_the_cached_pages(tmp_path: Path, report_cache: bool) -> None:
    """Little memory, so that pages are dropped and stored again."""
    engine, rng = echo_service.built(text=False, kv_tokens=192).engine, random.Random(2)
    memory, own = engine.scheduler.memory, set[bytes]()
    assert isinstance(memory, PagedMemory)
    log, group = memory.prefix_cache.log(with_contents=True), memory.prefix_cache.routed_group()
    assert log is not None
    assert group is not None

    def receive(client: int, message: EngineMessage) -> None:
        if isinstance(message, CacheUpdate):
            assert own >= set(message.dropped)
            own.difference_update(message.dropped)
            own.update(message.stored)

    prompts = [[1 + i % 3] * 24 + [rng.randrange(10, 500) for _ in range(rng.randrange(4, 40))] for i in range(60)]
    with publishing(tmp_path) as (publisher, subscriber):
        loop = EngineLoop(engine, receive, cache_log=log, report_cache=report_cache, kv_events=publisher)
        prefixes, complete = 0, 0
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, SamplingParams(max_tokens=8, ignore_eos=True))
            while engine.has_unfinished_requests and (i % 3 == 2 or i == len(prompts) - 1):
                loop._run_once()
            subscriber.update()
            index = memory.page_pool.index[group]
            assert set(subscriber.known) == set(map(block_hash, index))
            for key in index:
                if (tokens := subscriber.prefix(block_hash(key))) is not None:
                    prefixes += 1
                    complete += any(prompt[: len(tokens)] == tokens for prompt in prompts)
                    assert log.keys.of_prompt([*tokens, 0])[-1] == key
                    assert any(prompt == tokens[: len(prompt)] or prompt[: len(tokens)] == tokens for prompt in prompts)
        assert prefixes > complete > 100
        assert subscriber.num_removed > 100
        assert own == (set(index) if report_cache else set())
        assert engine.reset_prefix_cache()
        loop._report_cache(log)
        subscriber.update()
        assert subscriber.known == {}


def test_a_step_that_changes_nothing_sends_nothing(tmp_path: Path) -> None:
    with publishing(tmp_path) as (publisher, subscriber):
        publisher.publish(changes())
        assert subscriber.replay(0) == []


# Messages


def test_the_message_that_decoders_of_arrays_read(tmp_path: Path) -> None:
    """A subscription starts at some time after `connect`, so the same page comes and goes until a message arrives."""
    with publishing(tmp_path, topic="kv@pod@model") as (publisher, subscriber):
        listener = subscriber.context.socket(zmq.SUB)
        listener.connect(publisher.endpoint)
        listener.subscribe("kv@")
        last = -1
        while not listener.poll(20):
            publisher.publish(changes(stored=[1]))
            subscriber.update()
            publisher.publish(changes(dropped=[1]))
            subscriber.update()
        while last + 1 < subscriber.next_number:
            last = int.from_bytes(listener.recv_multipart()[1])
        first, second = 2**64 - 2, 7
        keys = {b"a" * 24 + first.to_bytes(8): PageContent(None, [5, 6]), page(second): PageContent(b"x" * 32, [7, 8])}
        publisher.publish(CacheChanges([page(9)], list(keys), keys))
        assert listener.poll(TIMEOUT)
        topic, number, payload = listener.recv_multipart()
        time, events, rank = msgspec.msgpack.decode(payload)
        assert (topic, int.from_bytes(number), rank) == (b"kv@pod@model", subscriber.next_number, 0)
        assert isinstance(time, float)
        parent = int.from_bytes(b"x" * 8)
        assert events == [
            ["BlockRemoved", [9], "GPU"],
            ["BlockStored", [first], None, [5, 6], 2, None, "GPU", None],
            ["BlockStored", [second], parent, [7, 8], 2, None, "GPU", None],
        ]


def test_replay_from_a_number(tmp_path: Path) -> None:
    with publishing(tmp_path, buffer_steps=4) as (publisher, subscriber):
        for n in range(7):
            publisher.publish(changes(stored=[n]))
            assert subscriber.replay(n)[-1][0] == n  # so the next page has a message of its own
        for first, numbers in ((0, [3, 4, 5, 6]), (4, [4, 5, 6]), (6, [6]), (7, []), (END, [])):
            messages = subscriber.replay(first)
            assert [number for number, _ in messages] == numbers
            assert [batch.events[0].block_hashes for _, batch in messages] == [[n] for n in numbers]  # type: ignore[union-attr]


def test_a_wrong_request_for_a_replay_has_no_answer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with publishing(tmp_path) as (publisher, subscriber):
        publisher.publish(changes(stored=[1]))
        subscriber.socket.send_multipart((b"\0" * 8,))
        assert len(subscriber.replay(0)) == 1
        assert "a request for a replay of KV events has 2 frames, not 3" in caplog.text
        subscriber.socket.send_multipart((b"", b"\0" * 1000))  # ends the connection, and ZeroMQ makes a new one
        other = Subscriber(publisher.replay_endpoint)
        assert len(other.replay(0)) == 1
        other.close()


def test_changes_that_wait_are_merged(tmp_path: Path) -> None:
    """The thread hangs in a message meanwhile: `publish` returns, and no change is lost."""
    with publishing(tmp_path, max_queue_size=1) as (publisher, subscriber):
        encode, entered, released = publisher._encode, threading.Event(), threading.Event()

        def hang(message: Any) -> bytes:
            entered.set()
            assert released.wait(60)
            return encode(message)

        publisher._encode = hang
        publisher.publish(changes(stored=range(10)))
        assert entered.wait(60)
        for n in range(10, 5_000):
            publisher.publish(changes(stored=[n], dropped=[n - 10]))
        publisher.publish(changes(stored=[3], dropped=[4_999]))
        assert len(publisher._stored) == 9
        assert len(publisher._dropped) == 9
        released.set()
        subscriber.update()
        assert set(subscriber.known) == {3, *range(4_990, 4_999)}
        assert subscriber.next_number == 2


def test_what_waits_is_sent_at_the_end(tmp_path: Path) -> None:
    listener = zmq.Context().socket(zmq.PULL)  # stands for a subscriber, which would have to be connected first
    with publishing(tmp_path) as (publisher, _):
        publisher._pub.close()
        publisher._pub = publisher._context.socket(zmq.PUSH)
        listener.bind(f"ipc://{tmp_path}/pulled")
        publisher._pub.connect(f"ipc://{tmp_path}/pulled")
        publisher.publish(changes(stored=[1]))
        publisher.close()
        publisher.publish(changes(stored=[2]))  # is ignored
    assert msgspec.msgpack.decode(listener.recv_multipart()[2], type=EventBatch).events[0].block_hashes == [1]  # type: ignore[union-attr]
    listener.close()
    listener.context.term()


# Events of changes


def test_a_page_comes_after_the_page_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page 2 was dropped and stored again, after pages 3 and 4."""
    monkeypatch.setattr(kv_events, "MAX_MESSAGE_BLOCKS", 3)
    pages = {n: PageContent(page(n - 1) if n > 1 else None, [n]) for n in range(1, 8)}
    stored = {page(n): pages[n] for n in (1, 3, 4, 2, 6, 7)}
    runs = [event for event in make_events({}, stored) if isinstance(event, BlockStored)]
    hashes = [(run.block_hashes, run.parent_block_hash) for run in runs]
    assert hashes == [([1, 2, 3], None), ([4], 3), ([6, 7], 5)]
    assert [run.token_ids for run in runs] == [[1, 2, 3], [4], [6, 7]]
    removed = list(make_events(dict.fromkeys(map(page, range(7))), {}))
    assert [event.block_hashes for event in removed] == [[0, 1, 2], [3, 4, 5], [6]]


def test_many_changes_are_sent_in_several_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_MESSAGE_BLOCKS", 5)
    with publishing(tmp_path) as (publisher, subscriber):
        publisher.publish(changes(stored=range(100, 112), dropped=range(7)))
        messages = subscriber.replay(0)
        sizes = [sum(len(event.block_hashes) for event in batch.events) for _, batch in messages]  # type: ignore[union-attr]
        assert max(sizes) == 5
        assert sum(sizes) == 19


# Settings


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ([], r"--kv-events-config is '\[\]'. It must be an object. It may have: enable_kv_cache_events, publisher,"),
        ({"buffer": 3}, "--kv-events-config has 'buffer'. It may have: enable_kv_cache_events, publisher,"),
        ({"enable_kv_cache_events": 1}, "enable_kv_cache_events of --kv-events-config is '1'. It must be true or fal"),
        ({"publisher": "nats"}, "publisher of --kv-events-config is 'nats'. Choose one of: zmq, null"),
        ({"endpoint": "*:5557"}, r"endpoint of --kv-events-config is '\*:5557'. It must be tcp://HOST:PORT or ipc://P"),
        ({"endpoint": "tcp://*:0"}, "It must be tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": ""}, "endpoint of --kv-events-config is ''. It must be tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": 5557}, "endpoint of --kv-events-config is '5557'. It must be printable"),
        ({"replay_endpoint": "inproc://x"}, "replay_endpoint of --kv-events-config is 'inproc://x'. It must be tcp:"),
        ({"buffer_steps": -1}, "buffer_steps of --kv-events-config is -1. It must be between 0 and 16777216"),
        ({"buffer_steps": "9"}, "buffer_steps of --kv-events-config is '9'. It must be a whole number between 0 and"),
        ({"hwm": 0}, "hwm of --kv-events-config is 0. It must be between 1 and 16777216"),
        ({"max_queue_size": True}, "max_queue_size of --kv-events-config is True. It must be a whole number between"),
        ({"topic": "\ud800"}, "topic of --kv-events-config is '.*'. It must be printable text of up to 1024 char"),
    ],
)
def test_invalid_settings(given: Any, cause: str) -> None:
    with pytest.raises(StartupError, match=cause):
        EngineConfig(kv_events_config=given)


def test_settings() -> None:
    assert EngineConfig().kv_events is None
    assert EngineConfig(kv_events_config={"topic": "x"}).kv_events is None
    enabled = {"enable_kv_cache_events": True, "publisher": None, "replay_endpoint": None}
    assert EngineConfig(kv_events_config=enabled).kv_events == KVEventsConfig(enable_kv_cache_events=True)
    assert EngineConfig(kv_events_config={**enabled, "publisher": "null"}).kv_events is None
    with pytest.raises(StartupError, match="--memory is virtual, which caches no pages"):
        EngineConfig(kv_events_config=enabled, memory="virtual")
    with pytest.raises(StartupError, match="prefix caching is off"):
        EngineConfig(kv_events_config=enabled, enable_prefix_caching=False)
    with pytest.raises(StartupError, match="only an engine with a process of its own publishes events"):
        LLM(kv_events_config=enabled)


def test_endpoints_of_replicas() -> None:
    assert replica_endpoint("tcp://*:5557", 0) == "tcp://*:5557"
    assert replica_endpoint("tcp://[::]:5557", 3) == "tcp://[::]:5560"
    assert replica_endpoint("tcp://127.0.0.1:*", 3) == "tcp://127.0.0.1:*"
    assert replica_endpoint("ipc:///tmp/events", 3) == "ipc:///tmp/events_dp3"


def test_a_port_in_use_and_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(StartupError, match=f":{port}, which can't be opened: Address already in use. Choose a fre"):
            KVEventPublisher(KVEventsConfig(endpoint=f"tcp://*:{port}"))
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(StartupError, match=r"zmq isn't installed. pip install 'quire\[events\]'"):
        KVEventPublisher(KVEventsConfig())


# Engines in processes of their own


def consecutive_ports(count: int) -> int:
    """Return the first of `count` consecutive ports that are free."""
    while True:
        with socket.create_server(("", 0)) as server:
            first = int(server.getsockname()[1])
            try:
                for port in range(first + 1, first + count):
                    socket.create_server(("", port)).close()
            except (OSError, OverflowError):
                continue
            return first


def test_replicas_publish_on_ports_of_their_own() -> None:
    port = consecutive_ports(4)
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://127.0.0.1:{port + 2}",
    }
    config = EngineConfig(kv_events_config=events, skip_tokenizer_init=True, device="cpu")
    recipe = {"echo": {}, "text": False, "kv_tokens": 1024, "settings": {}}
    program = "-P", str(Path(echo_service.__file__).parent / "echo_engine.py"), json.dumps(recipe)
    client, processor, _ = launch_replicas(config, 2, "prefix", program=program)
    llm = AsyncLLM.over(client, processor)
    subscribers = [Subscriber(f"tcp://127.0.0.1:{port + 2 + i}", rank=i) for i in range(2)]
    prompts = [[i + 1] * 32 for i in range(4)]

    async def generate(prompt: list[int]) -> None:
        async for _ in llm.generate(prompt, sampling_params=SamplingParams(max_tokens=2, ignore_eos=True)):
            pass

    async def generate_all() -> None:
        await asyncio.gather(*map(generate, prompts))

    def cached_prompts() -> list[list[list[int]]]:
        for subscriber in subscribers:
            subscriber.update()
        prefixes = [list(map(subscriber.prefix, subscriber.known)) for subscriber in subscribers]
        return [[prompt for prompt in prompts if prompt in known] for known in prefixes]

    try:
        asyncio.run(generate_all())
        wait_until(lambda: sorted(chain.from_iterable(cached_prompts())) == prompts, "all prompts are published")
        assert all(cached_prompts())
    finally:
        llm.close()
        for subscriber in subscribers:
            subscriber.close()
