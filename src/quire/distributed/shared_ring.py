"""A ring of shared memory with one writer and readers in other processes, each of which reads every record. Records are
bytes.

The memory has no name (memfd): it is freed with the last process that maps it, and does not depend on the size of
/dev/shm. A reader sleeps on its eventfd, which counts new records. It relies on that count and on the records' numbers,
not on memory changing, so that it misses none. The readers' positions are in the memory too: the writer waits for the
slowest reader."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from quire.errors import EngineDead

RING_BYTES = 1 << 22
PAGE = 4096
POSITION_BYTES = 2 * PAGE
HEAD = struct.Struct("=QQ")  # a record's number, from 1, and its bytes; records are aligned to this size
ALIGNED = HEAD.size
POSITION_STRIDE = 8  # words between two positions, so that no two share a cache line
POLL_SECONDS = 0.0002  # seconds between two checks for room


class RingFull(Exception):
    """Reader number `reader` has made no room for too long."""

    def __init__(self, reader: int, seconds: float) -> None:
        super().__init__(f"reader {reader} has made no room in {seconds:g} s")
        self.reader = reader


class RingMemory:
    """The memory of a ring: the positions of the writer and of the readers, then the records."""

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self.map = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # no page faults in a step
        self.capacity = size - POSITION_BYTES
        self.positions = memoryview(self.map)[:POSITION_BYTES].cast("Q")  # words are stored and loaded atomically
        self.records = memoryview(self.map)[POSITION_BYTES:]

    def put(self, at: int, data: bytes | memoryview) -> None:
        """Copy `data` to position `at`, counted over everything ever written."""
        start = at % self.capacity
        first = min(len(data), self.capacity - start)
        self.records[start : start + first] = data[:first]
        if first < len(data):
            self.records[: len(data) - first] = data[first:]

    def get(self, at: int, size: int) -> bytes:
        """Return `size` bytes at position `at`."""
        start = at % self.capacity
        data = bytes(self.records[start : start + size])
        return data if len(data) == size else data + bytes(self.records[: size - len(data)])

    def close(self) -> None:
        """Unmap the memory."""
        self.positions.release()
        self.records.release()
        self.map.close()


class RingWriter:
    """The writer. A reader is made of `descriptor` and of its one of `events`."""

    def __init__(self, readers: int, capacity: int = RING_BYTES) -> None:
        """Create the ring. Raise OSError if the system has no memory or descriptor left."""
        assert capacity % PAGE == 0, f"{capacity} bytes aren't whole pages"
        assert 0 < readers < POSITION_BYTES // (8 * POSITION_STRIDE), f"there are no places for {readers} readers"
        self.events: list[int] = []
        self.descriptor = os.memfd_create("quire-ring", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, POSITION_BYTES + capacity)
            self._memory = RingMemory(self.descriptor)
            for _ in range(readers):
                self.events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError:
            self._close_fds()
            raise
        self.max_record_bytes = capacity // 4 - HEAD.size
        self._last_number = self._write_position = 0
        self._read_position = 0  # the last known position of the slowest reader

    def write(self, data: bytes, seconds: float, while_full: Callable[[], None] = lambda: None) -> None:
        """Write `data` for all readers, in as many records as it takes. `while_full` is called repeatedly while there
        is no room. Raise RingFull after `seconds` without room."""
        for start in range(0, len(data), self.max_record_bytes):
            self._write_record(data[start : start + self.max_record_bytes], seconds, while_full)

    def _write_record(self, data: bytes, seconds: float, waiting: Callable[[], None]) -> None:
        memory, size = self._memory, -(-(HEAD.size + len(data)) // ALIGNED) * ALIGNED
        if self._read_position + memory.capacity < self._write_position + size:
            self._wait_for_readers(self._write_position + size - memory.capacity, seconds, waiting)
        self._last_number += 1
        memory.put(self._write_position, HEAD.pack(self._last_number, len(data)) + data)
        self._write_position += size
        memory.positions[0] = self._write_position
        for event in self.events:
            os.eventfd_write(event, 1)  # a system call: the reader that it wakes sees all earlier stores

    def _wait_for_readers(self, place: int, seconds: float, waiting: Callable[[], None]) -> None:
        """Wait until all readers have reached position `place`."""
        end = None
        while (slowest := self._slowest_reader())[0] < place:
            end = time.monotonic() + seconds if end is None else end
            waiting()
            if time.monotonic() >= end:
                raise RingFull(slowest[1], seconds)
            time.sleep(POLL_SECONDS)
        self._read_position = slowest[0]

    def _slowest_reader(self) -> tuple[int, int]:
        """Return the lowest position of all readers, and its reader."""
        positions = self._memory.positions
        return min((positions[(1 + reader) * POSITION_STRIDE], reader) for reader in range(len(self.events)))

    def close(self) -> None:
        """Unmap the memory, which exists as long as readers map it."""
        self._memory.close()
        self._close_fds()

    def _close_fds(self) -> None:
        for descriptor in (self.descriptor, *self.events):
            with suppress(OSError):
                os.close(descriptor)
        self.events, self.descriptor = [], -1


class RingReader:
    """Reader number `reader`. Its `event` is readable when there are new records."""

    def __init__(self, descriptor: int, event: int, reader: int) -> None:
        self._memory, self.event, self._position_index = RingMemory(descriptor), event, (1 + reader) * POSITION_STRIDE
        self._num_available = self._number = self._position = 0

    def __bool__(self) -> bool:
        """Return True if there is a record to read."""
        if not self._num_available:
            try:
                self._num_available = os.eventfd_read(self.event)
            except BlockingIOError:
                return False
        return True

    def read(self) -> bytes:
        """Return the next record; there must be one. Raise EngineDead if it was overwritten before it was read."""
        memory = self._memory
        number, size = HEAD.unpack_from(memory.records, self._position % memory.capacity)  # aligned, so in one piece
        data = memory.get(self._position + HEAD.size, size) if number == self._number + 1 else b""
        ahead = memory.positions[0] - self._position
        if number != self._number + 1 or ahead > memory.capacity:
            raise EngineDead(f"ring overrun: record {number} is where {self._number + 1} should be, {ahead} bytes back")
        self._num_available -= 1
        self._number = number
        self._position += -(-(HEAD.size + size) // ALIGNED) * ALIGNED
        memory.positions[self._position_index] = self._position
        return data

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()
