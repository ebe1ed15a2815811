"""Interrupts that Python drops are raised later."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from quire.ipc.child_process import ChildProcess, InterruptGuard

SPARED = (
    "import signal, time; from quire.ipc.child_process import exit_now, ignore_signals; signal.alarm(60)\n"
    "while signal.SIGINT not in signal.sigpending(): time.sleep(0.01)\n"
    "ignore_signals(); exit_now(7 if not signal.pthread_sigmask(signal.SIG_BLOCK, ()) else 8)"
)


@pytest.fixture(autouse=True)
def raising() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt; a shell may have had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_one_that_is_dropped_comes_again() -> None:
    with InterruptGuard() as interrupts:
        interrupts.raise_if_interrupted()
        with suppress(KeyboardInterrupt):  # as Python does where it lets go of garbage
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_if_interrupted()


def test_where_they_are_ignored_they_stay_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with InterruptGuard() as interrupts:
            os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        interrupts.raise_if_interrupted()
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_an_interrupt_before_a_program_spares_it_is_dropped() -> None:
    """A terminal's Ctrl-C goes to all of its group; the program must not end with a traceback."""
    child = ChildProcess(1, ("-c", SPARED))
    child.process.send_signal(signal.SIGINT)
    assert child.describe_exit(30) == "ended with status 7"
    child.connections[0].close()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
