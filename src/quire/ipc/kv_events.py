"""Publish which pages of a prefix cache were stored and dropped, for routers outside of quire (KV events).

The messages and the replay of past ones are those of vLLM (vllm/distributed/kv_events.py). A message is (topic,
sequence number of 8 bytes, MessagePack of (time, events, replica)). The events are arrays, which vLLM sent up to
release 0.23: the decoders of llm-d and Dynamo accept them in every version, and maps only in later ones."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import chain, count
from typing import Any, NamedTuple

from quire.config import KVEventsConfig
from quire.errors import StartupError
from quire.memory.cache_log import CacheChanges, PageContent

MEDIUM = "GPU"  # the memory that the model computes with, on a CPU too: routers take "CPU" for a slower tier
MAX_MESSAGE_BLOCKS = 4096
MAX_REQUEST_BYTES = 64  # of a frame that asks for a replay
REPLAY_END = (-1).to_bytes(8, signed=True)
CLOSE_SECONDS = 2.0  # to send what is left at the end
log = logging.getLogger("quire.ipc")


class BlockStored(NamedTuple):
    """Pages that follow each other in a sequence, with their tokens; `parent_block_hash` is the page before the first
    one."""

    tag: str
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None


class BlockRemoved(NamedTuple):
    """Pages that were dropped."""

    tag: str
    block_hashes: list[int]
    medium: str = MEDIUM


KVEvent = BlockStored | BlockRemoved


def block_hash(key: bytes) -> int:
    """Return the last 8 bytes of a page's key, as vLLM shortens its hashes."""
    return int.from_bytes(key[-8:])


def make_events(dropped: Mapping[bytes, None], stored: Mapping[bytes, PageContent]) -> Iterator[KVEvent]:
    """Return the events of these pages: the dropped ones first, and a stored page after the page before it."""
    hashes = list(map(block_hash, dropped))
    for at in range(0, len(hashes), MAX_MESSAGE_BLOCKS):
        yield BlockRemoved("BlockRemoved", hashes[at : at + MAX_MESSAGE_BLOCKS])
    run = list[bytes]()
    for key in _parents_first(stored):
        if run and (stored[key].parent != run[-1] or len(run) == MAX_MESSAGE_BLOCKS):
            yield _stored_event(run, stored)
            run = []
        run.append(key)
    if run:
        yield _stored_event(run, stored)


def _parents_first(stored: Mapping[bytes, PageContent]) -> Iterator[bytes]:
    """Return all keys. A page that was dropped and stored again comes after its children in `stored`."""
    done = set[bytes]()
    for key in stored:
        ancestors, at = list[bytes](), key
        while at in stored and at not in done:
            done.add(at)
            ancestors.append(at)
            at = stored[at].parent or b""
        yield from reversed(ancestors)


def _stored_event(run: list[bytes], stored: Mapping[bytes, PageContent]) -> BlockStored:
    first, contents = stored[run[0]], [stored[key].tokens for key in run]
    parent = None if first.parent is None else block_hash(first.parent)
    hashes, tokens = list(map(block_hash, run)), list(chain.from_iterable(contents))
    return BlockStored("BlockStored", hashes, parent, tokens, len(first.tokens))


def replica_endpoint(endpoint: str, replica: int) -> str:
    """Return the endpoint of a replica: the port of the first one plus its index, or a path of its own."""
    address, _, port = endpoint.rpartition(":")
    if not replica or port == "*":
        return endpoint
    if not endpoint.startswith("tcp:"):
        return f"{endpoint}_dp{replica}"
    return f"{address}:{int(port) + replica}"


class KVEventPublisher:
    """Publishes the changes of a replica's prefix cache from a thread of its own. Raise StartupError if an endpoint
    can't be opened.

    What waits for the thread is one set of net changes, never more than the pages of the cache, so `publish` never
    waits and nothing is lost here. A subscriber that lags by more than `hwm` messages, or connects late, sees a gap in
    the sequence numbers, and asks for a replay."""

    def __init__(self, config: KVEventsConfig, replica: int = 0) -> None:
        try:
            import msgspec
            import zmq
        except ImportError as error:
            cause = f"--kv-events-config is given, and {error.name} isn't installed"
            raise StartupError(cause, "pip install 'quire[events]'") from error
        self._zmq, self._encode, self._replica = zmq, msgspec.msgpack.Encoder().encode, replica
        self._topic, self._numbers = config.topic.encode(), count()
        self._sent = deque[tuple[bytes, bytes]](maxlen=config.buffer_steps if config.replay_endpoint else 0)
        self._lock, self._is_awake, self._closing, self._is_warned = threading.Lock(), False, False, False
        self._dropped, self._stored = dict[bytes, None](), dict[bytes, PageContent]()
        self._context, self._replay = zmq.Context(), None
        try:
            self._pub = self._open(zmq.PUB, "endpoint", config.endpoint, config.hwm)
            if config.replay_endpoint:  # a replay fits, though ZeroMQ takes half a queue that was read for unread
                most = 2 * (config.buffer_steps + 2)
                self._replay = self._open(zmq.ROUTER, "replay_endpoint", config.replay_endpoint, most)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake_receiver, self._wake_sender = os.pipe()
        self.endpoint = self._pub.last_endpoint.decode()
        self.replay_endpoint = "" if self._replay is None else self._replay.last_endpoint.decode()
        self._thread = threading.Thread(target=self._run, name="quire-kv-events", daemon=True)
        self._thread.start()
        log.info("KV events of engine %d: %s %s", replica, self.endpoint, self.replay_endpoint)

    def _open(self, kind: int, name: str, first: str, most_queued: int) -> Any:
        endpoint = replica_endpoint(first, self._replica)
        opened = self._context.socket(kind)
        opened.sndhwm, opened.ipv6 = most_queued, "[" in endpoint
        try:
            if kind == self._zmq.ROUTER:
                opened.maxmsgsize = MAX_REQUEST_BYTES
            if kind == self._zmq.ROUTER or "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc:"):
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except self._zmq.ZMQError as error:
            cause = os.strerror(error.errno or 0)
            raise StartupError(
                f"{name} of --kv-events-config is {endpoint[:200]}, which can't be opened: {cause}",
                "Choose a free port; each replica takes the next one",
            ) from error
        return opened

    # Called on the engine's thread

    def publish(self, changes: CacheChanges) -> None:
        """Send these changes, merged with those that wait."""
        if not changes.dropped and not changes.stored:
            return
        with self._lock:
            if self._closing:
                return
            for key in changes.dropped:
                if self._stored.pop(key, None) is None:
                    self._dropped[key] = None
            for key in changes.stored:
                if key in self._dropped:
                    del self._dropped[key]
                else:
                    self._stored[key] = changes.contents[key]
            self._wake()

    def close(self) -> None:
        """Send what waits, and end the thread."""
        with self._lock:
            if not self._closing:
                self._closing = True
                self._wake()
        self._thread.join(CLOSE_SECONDS)

    def _wake(self) -> None:
        if not self._is_awake:
            self._is_awake = True
            os.write(self._wake_sender, b"\0")

    # The thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for source in (self._wake_receiver, self._replay):
            if source is not None:
                poller.register(source, self._zmq.POLLIN)
        try:
            closing = False
            while not closing:
                ready = dict(poller.poll())
                closing = self._send_waiting()
                if self._replay in ready:
                    self._serve_replay(self._replay)
        except Exception:
            log.exception("KV events are no longer published")
        with self._lock:
            self._closing = self._is_awake = True
        self._dropped, self._stored = {}, {}
        self._context.destroy(linger=1000)
        os.close(self._wake_receiver)
        os.close(self._wake_sender)

    def _send_waiting(self) -> bool:
        """Send the changes that wait. Return True if they are the last."""
        with self._lock:
            if self._is_awake:
                os.read(self._wake_receiver, 1)
                self._is_awake = False
            dropped, stored, closing = self._dropped, self._stored, self._closing
            self._dropped, self._stored = {}, {}
        batch, blocks = list[KVEvent](), 0
        for event in make_events(dropped, stored):
            if batch and blocks + len(event.block_hashes) > MAX_MESSAGE_BLOCKS:
                self._send(batch)
                batch, blocks = [], 0
            batch.append(event)
            blocks += len(event.block_hashes)
        if batch:
            self._send(batch)
        return closing

    def _send(self, events: list[KVEvent]) -> None:
        number, payload = next(self._numbers).to_bytes(8), self._encode((time.time(), events, self._replica))
        self._sent.append((number, payload))
        self._pub.send_multipart((self._topic, number, payload))

    def _serve_replay(self, replay: Any) -> None:
        """Send a subscriber the messages from a number on, as far as they are kept, and REPLAY_END."""
        frames = replay.recv_multipart()
        if len(frames) != 3:
            if not self._is_warned:
                log.warning("a request for a replay of KV events has %d frames, not 3", len(frames))
            self._is_warned = True
            return
        subscriber, empty, first = frames
        for number, payload in self._sent:
            if int.from_bytes(number) >= int.from_bytes(first):
                replay.send_multipart((subscriber, empty, number, payload))
        replay.send_multipart((subscriber, empty, REPLAY_END, b""))
