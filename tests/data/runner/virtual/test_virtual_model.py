"""Random maps, unmaps and aliases on the real driver and on the one that checks, beside a dictionary."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.data.runner.virtual import FakeDriver
from quire.data.runner.virtual.fake import Span
from quire.data.runner.virtual.memfd import MemfdDriver

PAGE, PAGES, PLACES = 4096, 6, 10

ops = st.tuples(
    st.sampled_from(["map", "map", "unmap", "write"]),
    st.integers(0, 1),  # buffer
    st.integers(-1, PLACES),
    st.integers(-1, PAGES),
    st.integers(1, 3),
)


class Pair:
    """Both drivers, doing the same; `places` {(buffer, place): page} and `bytes` say what must be."""

    def __init__(self) -> None:
        self.drivers = (FakeDriver(PAGE), MemfdDriver(PAGE))
        self.buffers = [[driver.reserve(PLACES * PAGE) for _ in range(2)] for driver in self.drivers]
        for driver in self.drivers:
            driver.create(PAGES)
        memfd = self.drivers[1]
        self.views = [memfd.tensor(at, (PLACES, PAGE), (PAGE, 1), torch.uint8) for at in self.buffers[1]]
        self.places: dict[tuple[int, int], int] = {}
        self.bytes = [0] * PAGES
        self.maps = self.unmaps = 0

    def apply(self, op: str, buffer: int, place: int, page: int, count: int) -> None:
        span = [(buffer, place + i) for i in range(count)]
        inside = place >= 0 and place + count <= PLACES
        if op == "map":
            legal = inside and 0 <= page <= PAGES - count and not any(at in self.places for at in span)
            self._both(legal, "map", buffer, place, page, count)
            if legal:
                self.places.update(zip(span, range(page, page + count)))
                self.maps += count
        elif op == "unmap":
            legal = inside and all(at in self.places for at in span)
            self._both(legal, "unmap", buffer, place, count)
            if legal:
                self.unmaps += count
                for at in span:
                    del self.places[at]
        elif (buffer, place) in self.places:
            page = self.places[buffer, place]
            self.bytes[page] = (self.bytes[page] + 1) % 256
            self.views[buffer][place] = self.bytes[page]

    def check(self) -> None:
        fake, memfd = self.drivers
        for (buffer, place), page in self.places.items():
            assert fake.read(self.buffers[0][buffer] + place * PAGE, PAGE) == [Span(page, 0, PAGE)]
            assert (self.views[buffer][place] == self.bytes[page]).all()
        for driver in self.drivers:
            counters = driver.counters
            assert (counters.maps, counters.unmaps, counters.mapped) == (self.maps, self.unmaps, len(self.places))
            assert driver.physical() == counters.physical == PAGES * PAGE
        assert memfd.places.mapped == {self.buffers[1][b] + i * PAGE: page for (b, i), page in self.places.items()}
        assert sum(fake.references(page) for page in range(PAGES)) == len(self.places)

    def close(self) -> None:
        self.views.clear()
        for driver in self.drivers:
            driver.close()

    def _both(self, legal: bool, name: str, buffer: int, place: int, *given: int) -> None:
        for driver, buffers in zip(self.drivers, self.buffers):
            call = getattr(driver, name)
            if legal:
                call(buffers[buffer] + place * PAGE, *given)
            else:
                with pytest.raises(AssertionError):
                    call(buffers[buffer] + place * PAGE, *given)


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
@given(st.lists(ops, max_size=60))
def test_drivers_do_as_a_dictionary_does(given_ops: list[tuple[str, int, int, int, int]]) -> None:
    pair = Pair()
    try:
        for op in given_ops:
            pair.apply(*op)
            pair.check()
    finally:
        pair.close()
