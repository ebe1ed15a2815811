"""Four ranks' large sums, which copy engines carry, on two GPUs that they share or on four: exact in every bit, and a
rank that sends nothing is named. Two processes take turns on a GPU, so it says nothing of how long it takes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from carrier_ranks import EXACT, LAPS, LATE
from ranks_alone import joined

from quire.distributed import rank_devices
from quire.distributed.remote_runner import RemoteRunner
from quire.ipc.child_process import BOOTSTRAP

RANKS, PATIENCE = 4, 30.0
PROGRAM = ("-P", "-c", BOOTSTRAP, str(Path(__file__).parent), "carrier_ranks")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteRunner]:
    if torch.cuda.device_count() < RANKS:
        monkeypatch.setenv(rank_devices.SHARE_GPU_VARIABLE, "1")
    with joined(RANKS, PROGRAM, PATIENCE) as runner:
        yield runner


def found(ranks: RemoteRunner, rows: int, way: int) -> list[dict[str, Any]]:
    ranks.warm_up(rows, way)
    reports = ranks.query("found")
    assert not [one["missing"] for one in reports if "missing" in one]
    return reports


def test_sums_of_four_ranks_are_exact_and_who_is_missing_is_named(ranks: RemoteRunner) -> None:
    """Of 2,048 rows of 8,192 numbers, and of a last piece of one row, of which some ranks own nothing; then one that
    comes too late, behind whom sums are exact again."""
    for rows, pieces in ((2048, 2), (2049, 3)):
        for rank, one in enumerate(found(ranks, rows, EXACT)):
            assert one == {"wrong": 0, "pieces": pieces, "calls": 2 * LAPS}, f"rank {rank}, {rows} rows: {one}"
    named = [one["named"] for one in found(ranks, 2048, LATE)]
    assert named == [RANKS] * (RANKS - 1) + [0], f"rank {RANKS - 1} was missed, and ranks name {named}, from 1 on"
    for rank, one in enumerate(found(ranks, 2048, EXACT)):
        assert one["wrong"] == 0, f"rank {rank}, once all are there again: {one}"
