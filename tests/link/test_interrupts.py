"""Interrupts that Python drops are raised later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from quire.link.child import Interrupts


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    """As where no shell has had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_that_is_dropped_comes_again() -> None:
    with Interrupts() as interrupts:
        interrupts.heed()
        with suppress(KeyboardInterrupt):  # as Python does where it lets go of garbage
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupts.heed()


def test_where_they_are_ignored_they_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupts.heed()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
