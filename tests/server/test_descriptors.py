"""How many connections there are descriptors for."""

from __future__ import annotations

import os
import resource

import pytest

from quire.errors import StartupError
from quire.server.descriptors import RESERVE, capacity


def test_capacity() -> None:
    taken = len(os.listdir("/dev/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert capacity(5) == 5
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + RESERVE + 7, hard))
        assert abs(capacity() - 7) <= 2
        with pytest.raises(StartupError, match="20 connections don't fit"):
            capacity(20)
        resource.setrlimit(resource.RLIMIT_NOFILE, (taken + RESERVE - 2, hard))
        with pytest.raises(StartupError, match="1 connections don't fit"):
            capacity()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with pytest.raises(StartupError, match="--max-connections is 0"):
        capacity(0)
