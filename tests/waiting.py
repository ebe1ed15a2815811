"""Waiting until a condition holds, a program that runs until it is killed, and whether a process has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import psutil

T = TypeVar("T")

INTERVAL = 0.01  # seconds between two checks of a condition
IDLE = ("-c", "import time; time.sleep(60)")  # Python's arguments; the limit only ends what a failed test leaves


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], seconds: float = 60.0) -> T:
    """Return the first true value of `condition()`; AssertionError after `seconds` without one."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        _check(end, what, seconds)
        time.sleep(INTERVAL)
    return value


async def wait_until_async(condition: Callable[[], T], what: str | Callable[[], str], seconds: float = 60.0) -> T:
    """Do the same on an event loop, which runs meanwhile."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        _check(end, what, seconds)
        await asyncio.sleep(INTERVAL)
    return value


def _check(end: float, what: str | Callable[[], str], seconds: float) -> None:
    if time.monotonic() >= end:
        raise AssertionError(f"waited {seconds:g} s until {what() if callable(what) else what}")


def has_ended(pid: int) -> bool:
    """Return True if a process has ended, even if its parent has not asked for its status yet."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
