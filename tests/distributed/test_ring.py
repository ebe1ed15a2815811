"""A ring: every reader reads every record in order, whatever the sizes and whoever lags, and nothing is overwritten."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.distributed.shared_ring import HEAD, PAGE, RingFull, RingReader, RingWriter
from quire.errors import EngineDead


def readers_of(ring: RingWriter) -> list[RingReader]:
    return [RingReader(ring.descriptor, event, reader) for reader, event in enumerate(ring.events)]


def close(ring: RingWriter, readers: list[RingReader]) -> None:
    for reader in readers:
        reader.close()
    ring.close()


@given(count=st.integers(1, 4), moves=st.lists(st.one_of(st.integers(0, 2200), st.integers(-4, -1)), max_size=60))
def test_each_reader_reads_all_of_it(count: int, moves: list[int]) -> None:
    """A move of at least 0 writes that many bytes; a negative one has a reader read all that is there."""
    ring = RingWriter(count, PAGE)
    readers, read, written = readers_of(ring), [bytearray() for _ in range(count)], bytearray()

    def catch_up(at: int) -> None:
        while readers[at]:
            read[at] += readers[at].read()

    try:
        for i, move in enumerate(moves):
            if move < 0:
                catch_up(-move % count)
                continue
            data = bytes([i % 251]) * move
            ring.write(data, 10, lambda: [catch_up(at) for at in range(count)] and None)
            written += data
        for at in range(count):
            catch_up(at)
        assert read == [written] * count
    finally:
        close(ring, readers)


def test_the_writer_waits_for_the_slowest_and_not_for_ever() -> None:
    ring = RingWriter(2, PAGE)
    readers = readers_of(ring)
    for _ in range(PAGE // 512):
        ring.write(b"x" * (512 - HEAD.size), 0.0)
        assert readers[0]
        readers[0].read()
    with pytest.raises(RingFull) as full:
        ring.write(b"x", 0.01)
    assert full.value.reader == 1
    close(ring, readers)


def test_what_is_overwritten_is_not_taken_for_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer does not wait for readers."""
    ring = RingWriter(1, PAGE)
    readers = readers_of(ring)
    monkeypatch.setattr(RingWriter, "_slowest_reader", lambda self: (self._write_position, 0))
    for i in range(100):
        ring.write(bytes([i]) * (300 + i), 0)
    assert readers[0]
    with pytest.raises(EngineDead, match="ring overrun: record"):
        readers[0].read()
    close(ring, readers)
