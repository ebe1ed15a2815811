"""Streams and events of several GPUs in one process, in place of torch.cuda's: what is queued runs later, one piece
after another, in an order that is drawn among those that streams, events and waited-for words allow."""

from __future__ import annotations

import ctypes
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from quire.distributed import peer_memory


class Stuck(AssertionError):
    """Something is queued that never begins."""


class Piece:
    """Of work: done once it's ready. `late` is done in its place where nothing that is queued is ready."""

    def __init__(
        self, do: Callable[[], object], ready: Callable[[], bool], late: Callable[[], object] | None = None
    ) -> None:
        self.do, self.ready, self.late = do, ready, late


class World:
    """All streams; `owner` is whose those are that are made now, and `full` has the owners on whose GPUs a kernel waits
    with as many programs as there is room for."""

    def __init__(self, seed: int) -> None:
        self.draw, self.streams, self.owner = random.Random(seed), list[Stream](), 0
        self.full = set[int]()
        self.current = Stream(self)

    def run(self, first: int | None = None) -> None:
        """Until nothing is queued; what owner `first` has comes before all else."""
        while waiting := [stream for stream in self.streams if stream.queue]:
            able = [stream for stream in waiting if stream.queue[0].ready()]
            able = [stream for stream in able if stream.owner == first] or able
            if able:
                self.draw.choice(able).queue.popleft().do()
                continue
            if not (patient := [stream for stream in waiting if stream.queue[0].late is not None]):
                raise Stuck(f"{len(waiting)} streams wait for one another")
            self.draw.choice(patient).queue.popleft().late()  # type: ignore[misc]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        former, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = former

    def put(self, do: Callable[[], object], ready: Callable[[], bool] = lambda: True, late: Any = None) -> None:
        """Queue something on the current stream."""
        self.current.queue.append(Piece(do, ready, late))

    def brief(self, do: Callable[[], object]) -> None:
        """Queue a kernel that waits for nothing, but takes room."""
        owner = self.current.owner
        self.put(do, lambda: owner not in self.full)

    def fill(self, do: Callable[[], object], ready: Callable[[], bool]) -> None:
        """Queue a kernel that begins at once, and then waits with as many programs as there is room for; it gives up
        where there is nothing else to be done."""
        owner = self.current.owner

        def end() -> None:
            do()
            self.full.discard(owner)

        self.put(lambda: self.full.add(owner))
        self.put(end, ready, end)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: Stream(self))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *args: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        for name in ("copy", "stream_write_value", "stream_wait_value"):
            monkeypatch.setattr(peer_memory, name, getattr(self, name))

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """It takes room, as within one GPU a copy may be a kernel."""
        with self.on(self.streams[stream]):
            self.brief(lambda: ctypes.memmove(target, source, nbytes))

    def stream_write_value(self, address: int, value: int, stream: int) -> None:
        word = ctypes.c_int64.from_address(address)
        with self.on(self.streams[stream]):
            self.put(lambda: setattr(word, "value", value))

    def stream_wait_value(self, address: int, value: int, stream: int) -> None:
        word = ctypes.c_int64.from_address(address)
        with self.on(self.streams[stream]):
            self.put(lambda: None, lambda: word.value >= value)


class Stream:
    """As much of torch's as is used."""

    def __init__(self, world: World) -> None:
        self.world, self.owner, self.cuda_stream = world, world.owner, len(world.streams)
        self.queue: deque[Piece] = deque()
        world.streams.append(self)

    def wait_event(self, event: Event) -> None:
        last = event.last
        with self.world.on(self):
            self.world.put(lambda: None, lambda: last in event.passed)


class Event:
    """Likewise."""

    def __init__(self, world: World) -> None:
        self.world, self.last, self.passed = world, 0, {0}

    def record(self, stream: Stream | None = None) -> None:
        self.last += 1
        last = self.last
        with self.world.on(stream or self.world.current):
            self.world.put(lambda: self.passed.add(last))
