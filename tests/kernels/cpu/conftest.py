"""The kernels' libraries that this machine runs, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from native_kernels import VARIANTS, served_by

from quire.kernels.cpu import linear, low_bit_linear
from quire.kernels.cpu.library import Library
from quire.kernels.cpu.library_loader import BUILT


@pytest.fixture(params=VARIANTS or ["none"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process's library is this one, with two threads."""
    with served_by(request.param, 2, monkeypatch):
        yield


@pytest.fixture(params=VARIANTS or ["none"])
def use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Library]]:
    """Puts a library of a number of threads in place of the process's own, for products."""
    made = []

    def place(threads: int) -> Library:
        own = Library(BUILT / f"{request.param}.so", threads)
        made.append(own)
        for module in (linear, low_bit_linear):
            monkeypatch.setattr(module, "library", lambda: own)
            monkeypatch.setattr(module, "required_library", lambda: own)
        return own

    monkeypatch.setattr(linear, "has_fast_bf16_dot", lambda: False)
    yield place
    for own in made:
        own.close()
