"""The pages that a prefill replica hands over, between hosts.

A prefill replica listens on an address of its node (PageServer), over TLS 1.3 with a certificate and a token of its
own, which reach the decode replicas through the ingress. A decode replica keeps a connection to each source. It asks
for a HandOver by its number, and gets the bytes of its pages in their order. They go to a part of the shared host
memory that its engine does not write (PageInbox). The engine copies them from there, like pages of an engine of its
own host."""

from __future__ import annotations

import asyncio
import logging
import select
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from quire.distributed.secure_channel import ChannelLost, SecureChannel, TokenListener, connect
from quire.errors import first_line
from quire.ipc.frames import Frame, read_field, read_json, write_json
from quire.ipc.messages import MAX_NUMBER, MAX_SHARED_PAGES, HandOver, PageImport, PageSource
from quire.protocol.columns import WireError
from quire.protocol.shared_host import SharedHostMemory, SharedPage

KINDS = range(1, 7)
(
    HELLO,  # decode replica: the token
    WELCOME,  # prefill replica: the bytes of a page of each group
    PULL,  # decode replica: the number of a HandOver
    PAGES,  # prefill replica: the next bytes of its pages
    DONE,  # prefill replica: these were all, and the pages were not released meanwhile
    REFUSED,  # prefill replica: there is no such HandOver, or its pages were released
) = KINDS
PULL_BODY = struct.Struct("<I")
CHUNK_BYTES = 1 << 20  # of a PAGES frame
CERTIFICATE_DAYS = 3650  # a replica may run for years, and it alone has the key
MAX_CONNECTIONS = 1024  # of a prefill replica
MAX_SOURCES = 64  # connections of a decode replica
MAX_PULLS = 16  # threads of a decode replica, one a source
SEND_SECONDS = 10.0  # for the other end to read a frame
SILENCE_SECONDS = 5.0  # without a frame during a pull
PULL_SECONDS = 20.0  # for a pull, with those of the same source that are before it
RETRY_SECONDS = 5.0  # after a failure all pulls from a source fail
log = logging.getLogger("quire.deploy")


def write_sources(imports: Sequence[PageImport]) -> bytes:
    """Return, for each import, the number of its HandOver and its source."""
    sources = [[one.handover.number, *one.source] for one in imports if one.source is not None]
    assert len(sources) == len(imports), "pages come from an engine that no other host reaches"
    return write_json({"sources": sources})


def read_sources(body: bytes) -> list[tuple[int, PageSource]]:
    """Read what `write_sources` wrote. Raise WireError if it is malformed."""
    sources = read_field(read_json(body), "sources", list)
    return [(_check_number(one), source_from_json(one[1:])) for one in sources]


def _check_number(data: Any) -> int:
    if type(data) is not list or not data or type(data[0]) is not int or not 0 <= data[0] <= MAX_NUMBER:
        raise WireError("sources", "one does not begin with a number")
    return int(data[0])


def source_from_json(data: Any) -> PageSource:
    """Return a source that was written as a list. Raise WireError if it is malformed."""
    if type(data) is not list or list(map(type, data)) != [str, int, str, str] or not 0 < data[1] < 1 << 16:
        raise WireError("source", "not an address, a port, a certificate and a token")
    return PageSource(*data)


def byte_runs(pages: Iterable[SharedPage], page_bytes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the first byte and the end of the pages in shared host memory, in order, with neighbours joined."""
    runs = list[tuple[int, int]]()
    for group, host_page, _ in pages:
        start, end = (host_page - 1) * page_bytes[group], host_page * page_bytes[group]
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((start, end))
    return runs


def read_chunks(memory: memoryview, runs: Iterable[tuple[int, int]]) -> Iterator[bytes]:
    """Yield the bytes of runs in pieces of CHUNK_BYTES. The last one may be shorter."""
    pieces, size = list[memoryview](), 0
    for start, end in runs:
        while start < end:
            pieces.append(memory[start : min(end, start + CHUNK_BYTES - size)])
            start, size = start + len(pieces[-1]), size + len(pieces[-1])
            if size == CHUNK_BYTES:
                yield b"".join(pieces)
                pieces, size = [], 0
    if pieces:
        yield b"".join(pieces)


class PageServer(TokenListener):
    """Sends the pages of `memory` that are handed over at the moment to replicas that have the token. Each connection
    has a thread."""

    def __init__(self, address: str, memory: SharedHostMemory, page_bytes: Sequence[int]) -> None:
        """Listen on a free port of `address`. `page_bytes` are the bytes of a page of each group. Raise StartupError
        if that is impossible."""
        self._page_bytes, self._memory = page_bytes, memoryview(memory.map(page_bytes))
        self._handovers = dict[int, HandOver]()  # by number
        self._channels, self._lock = set[SecureChannel](), threading.Lock()
        super().__init__(address, KINDS, HELLO, MAX_CONNECTIONS, CERTIFICATE_DAYS, CHUNK_BYTES)
        self.source = PageSource(address, self.port, self.certificate, self.token)

    @property
    def numbers(self) -> list[int]:
        """The numbers of what is handed over."""
        return list(self._handovers)

    def add(self, handover: HandOver) -> None:
        """Send the pages of `handover` to replicas that ask for them."""
        self._handovers[handover.number] = handover

    def remove(self, number: int) -> None:
        """Stop sending the pages of a HandOver, before they are released. Ignore unknown numbers."""
        self._handovers.pop(number, None)

    def close(self) -> None:
        """Close the port and all connections."""
        super().close()
        with self._lock:
            for channel in self._channels:
                channel.interrupt()

    def _on_hello(self, channel: SecureChannel, body: dict[str, Any]) -> bool:
        with self._lock:
            if self._closed or len(self._channels) >= MAX_CONNECTIONS:
                return False
            self._channels.add(channel)
        threading.Thread(target=self._serve, args=(channel,), name="quire-pages", daemon=True).start()
        return True

    def _serve(self, channel: SecureChannel) -> None:
        """Answer one replica until it leaves, or sends something else than one request at a time."""
        poll = select.poll()
        poll.register(channel, select.POLLIN)
        try:
            channel.send(WELCOME, write_json({"page_bytes": list(self._page_bytes)}), SEND_SECONDS)
            while True:
                poll.poll()
                frames = channel.receive()
                if len(frames) > 1:
                    raise WireError("frames", "more than one request at a time")
                for frame in frames:
                    self._send_pages(channel, frame)
        except (OSError, WireError) as error:
            log.debug("a replica that fetches pages has left: %s", error)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()

    def _send_pages(self, channel: SecureChannel, request: Frame) -> None:
        if request.kind != PULL or len(request.body) != PULL_BODY.size:
            raise WireError("kind", f"{request.kind} with {len(request.body)} bytes is not a request")
        (number,) = PULL_BODY.unpack(request.body)
        handover = self._handovers.get(number)
        for chunk in read_chunks(self._memory, byte_runs(handover.pages, self._page_bytes)) if handover else ():
            if self._handovers.get(number) is not handover:
                break
            channel.send(PAGES, chunk, SEND_SECONDS)
        # A page that was released may have been overwritten before it was read
        is_whole = handover is not None and self._handovers.get(number) is handover
        channel.send(DONE if is_whole else REFUSED, b"", SEND_SECONDS)


class PageRefused(Exception):
    """The source does not hand these pages over any more."""


class RunWriter:
    """Writes what arrives to runs of `memory`, in order."""

    def __init__(self, memory: memoryview, runs: Sequence[tuple[int, int]]) -> None:
        self._targets = [memory[start:end] for start, end in reversed(runs)]  # the next one last
        self.missing = sum(end - start for start, end in runs)

    def write(self, data: memoryview) -> None:
        """Write the next bytes. Raise WireError for more than the runs hold."""
        if len(data) > self.missing:
            raise WireError("pages", f"{len(data)} bytes, and {self.missing} are missing")
        self.missing -= len(data)
        while data:
            target = self._targets.pop()
            size = min(len(target), len(data))
            target[:size] = data[:size]
            if size < len(target):
                self._targets.append(target[size:])
            data = data[size:]


class SourceConnection:
    """The connection of a decode replica to `source`, opened for the first pull. `lock` is held during a pull."""

    def __init__(self, source: PageSource, page_bytes: Sequence[int]) -> None:
        self.source, self._page_bytes = source, page_bytes
        self.lock = asyncio.Lock()
        self._channel: SecureChannel | None = None
        self._retry_at, self.failure = 0.0, ""  # since the last pull that worked

    def pull(self, number: int, memory: memoryview, runs: Sequence[tuple[int, int]], end: float) -> None:
        """Write the pages of a HandOver to runs of memory, until the monotonic time `end`. Raise OSError or WireError
        if the source fails, PageRefused if it has none. Called on a thread."""
        if time.monotonic() < self._retry_at:
            raise ChannelLost(f"it failed before: {self.failure}")
        was_open = self._channel is not None
        try:
            try:
                self._pull(number, RunWriter(memory, runs), end)
            except ChannelLost:
                if not was_open:
                    raise
                self.close()  # it may have been lost long ago
                self._pull(number, RunWriter(memory, runs), end)
            self.failure = ""
        except PageRefused:
            raise
        except BaseException as error:
            self.close()
            self._retry_at, self.failure = time.monotonic() + RETRY_SECONDS, first_line(error)
            raise

    def close(self) -> None:
        """Close the connection, if it is open. No pull may be under way."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def interrupt(self) -> None:
        """Let the pull that is under way fail, if there is one. Called on another thread."""
        if (channel := self._channel) is not None:
            channel.interrupt()

    def _pull(self, number: int, writer: RunWriter, end: float) -> None:
        channel = self._channel or self._open(end)
        channel.send(PULL, PULL_BODY.pack(number), SEND_SECONDS)
        while True:
            frames = _receive(channel, end)
            for frame in frames:
                if frame.kind == PAGES:
                    writer.write(frame.body)
                elif frame.kind not in (DONE, REFUSED) or frame is not frames[-1]:
                    raise WireError("kind", f"{frame.kind} is not a part of an answer")
                elif frame.kind == REFUSED:
                    raise PageRefused("its pages were released")
                elif writer.missing:
                    raise WireError("pages", f"{writer.missing} bytes are missing")
                else:
                    return

    def _open(self, end: float) -> SecureChannel:
        source = self.source
        channel = self._channel = connect(source.address, source.port, source.certificate, KINDS, CHUNK_BYTES)
        channel.send(HELLO, write_json({"token": source.token}), SEND_SECONDS)
        while not (frames := _receive(channel, end)):
            pass
        if len(frames) > 1 or frames[0].kind != WELCOME:
            raise WireError("kind", f"{frames[0].kind} before WELCOME")
        page_bytes = read_field(read_json(frames[0].body), "page_bytes", list)
        if page_bytes != list(self._page_bytes):
            raise WireError("page_bytes", f"its pages have {page_bytes} bytes, and ours {list(self._page_bytes)}"[:200])
        return channel


def _receive(channel: SecureChannel, end: float) -> list[Frame]:
    """Return the next frames, maybe none. Raise TimeoutError after the monotonic time `end`, or a silence."""
    seconds = min(end - time.monotonic(), SILENCE_SECONDS)
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    if seconds <= 0 or not poll.poll(seconds * 1000):
        raise TimeoutError("it takes too long")
    return channel.receive()


class PageInbox:
    """A part of shared host memory, `memory`, where pages of other hosts arrive. `page_bytes` are the bytes of a page
    of each group."""

    def __init__(self, memory: SharedHostMemory, page_bytes: Sequence[int]) -> None:
        self._page_bytes, self._memory = page_bytes, memoryview(memory.map(page_bytes))
        start = memory.part_start(page_bytes)
        self._part = range(start, start + memory.part_bytes(page_bytes))
        self._taken = dict[int, range]()  # bytes, by key of the import
        self._sources = OrderedDict[PageSource, SourceConnection]()  # the last one was used last
        self._threads = ThreadPoolExecutor(MAX_PULLS, "quire-pull")

    async def fetch(
        self, key: int, source: PageSource, number: int, pages: Sequence[SharedPage]
    ) -> list[SharedPage] | None:
        """Fetch the `pages` of a HandOver, and return them with their addresses here, which `free` frees. Return None
        if there is no room for them, or the source fails."""
        placed = self._place(key, pages)
        if placed is None:
            return None
        connection, end = self._connection(source), time.monotonic() + PULL_SECONDS
        runs, loop, was_failing = byte_runs(placed, self._page_bytes), asyncio.get_running_loop(), False
        try:
            async with asyncio.timeout(PULL_SECONDS):
                await connection.lock.acquire()
            try:
                was_failing = bool(connection.failure)
                await loop.run_in_executor(self._threads, connection.pull, number, self._memory, runs, end)
            finally:
                connection.lock.release()
        except Exception as error:
            self.free(key)
            if not was_failing:  # pages may have been released because their request was aborted
                level = logging.INFO if isinstance(error, PageRefused) else logging.WARNING
                log.log(level, "pages of %s can't be fetched: %s", source.address, first_line(error))
            return None
        return placed

    def free(self, key: int) -> None:
        """Free the bytes of an import, if it has any."""
        self._taken.pop(key, None)

    def close(self) -> None:
        """Close the connections. Pulls that are under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for connection in self._sources.values():
            if connection.lock.locked():
                connection.interrupt()  # its thread closes it
            else:
                connection.close()

    def _place(self, key: int, pages: Sequence[SharedPage]) -> list[SharedPage] | None:
        """Return pages with addresses here, in the first gap that is large enough for all of them, or None."""
        counts = Counter(page.group for page in pages)
        if not pages or len(pages) > MAX_SHARED_PAGES or max(counts) >= len(self._page_bytes):
            return None
        size = sum((count + 1) * self._page_bytes[group] for group, count in counts.items())  # with gaps between groups
        at = self._part.start
        for taken in sorted(self._taken.values(), key=lambda taken: taken.start):
            if taken.start - at >= size:
                break
            at = taken.stop
        if at + size > self._part.stop:
            return None
        self._taken[key] = range(at, at + size)
        next_page = dict[int, int]()
        for group, count in counts.items():
            next_page[group] = -(-at // self._page_bytes[group]) + 1  # host pages are numbered from 1
            at = (next_page[group] - 1 + count) * self._page_bytes[group]
        placed = list[SharedPage]()
        for page in pages:
            placed.append(page._replace(host_page=next_page[page.group]))
            next_page[page.group] += 1
        return placed

    def _connection(self, source: PageSource) -> SourceConnection:
        connection = self._sources.setdefault(source, SourceConnection(source, self._page_bytes))
        self._sources.move_to_end(source)
        for old in list(self._sources)[:-MAX_SOURCES]:
            if not self._sources[old].lock.locked():
                self._sources.pop(old).close()
        return connection
