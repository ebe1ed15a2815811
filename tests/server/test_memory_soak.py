"""Memory stays flat: half an hour of mixed load on servers with each kind of preemption."""

from __future__ import annotations

import os

import pytest
from memory_soak import soak

SECONDS = float(os.environ.get("MEMORY_SOAK_SECONDS", "1800"))


GROWTH = 20  # MiB over the last two thirds: one a minute in half an hour, and what requests come and go with in less


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_memory_stays_flat() -> None:
    for told in soak(SECONDS)["servers"]:
        assert told["growth_mib_a_minute"] * SECONDS / 90 < GROWTH, told
        assert told["peak_mib"] < 450, told
        assert told["preemptions"] > 0, "the memory was meant to be too small"
