"""What `quire bench parallel` says of the exchange is compared with sums that were taken elsewhere, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.bench import exchange, exchange_rank
from quire.bench.exchange_rank import Timed
from quire.data.layers.norm import RMSNorm
from quire.data.layers.prepare import join
from quire.vocabulary.layout import Part

CPU = torch.device("cpu")


class Alone:
    """The exchange of a rank that has no others, whose calls number `wrong` aren't right: each in one bit."""

    part = Part(0, 1)

    def __init__(self, *wrong: int) -> None:
        self.wrong, self.adds, self.gathers = wrong, 0, 0

    def add(self, x: Tensor) -> Tensor:
        self.adds += 1
        if self.adds in self.wrong:
            x.view(torch.int16)[-1, -1] ^= 1
        return x

    def gather(self, x: Tensor) -> Tensor:
        self.gathers += 1
        every = x[None].clone()
        if x.dtype == torch.int32 and self.gathers in self.wrong:
            every[0, 0, 3] ^= 1
        return every

    def meet(self) -> None:
        """There is nobody else."""

    def check(self) -> None:
        """Nobody is missed."""


def timed(given: Alone) -> Timed:
    runner = object.__new__(Timed)
    runner.part, runner.seat, runner.device, runner.group = given.part, None, CPU, None
    runner.exchange: Any = given
    runner.host: Any = Alone()
    runner.norms = [RMSNorm(exchange_rank.SIZE, 1e-5, exchange_rank.DTYPE, CPU) for _ in range(2)]
    for norm in runner.norms:
        norm.weight.fill_(1.0)
    join(runner.norms[0], given)
    return runner


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_rank, "SIZE", 64)


@pytest.mark.parametrize("wrong", [None, 31, 77, 399])
def test_one_wrong_bit_of_many_calls_is_found(wrong: int | None) -> None:
    """Of one sum and, where the number is that of a gather too, of what was gathered."""
    runner = timed(Alone() if wrong is None else Alone(wrong))
    runner.warm_up(2, exchange.WAYS.index("replays"))
    found = runner.found
    assert found["exact"] == (wrong is None)
    assert (found["wrong"] > 0) == (wrong is not None)
    assert found["calls"] == 20 * found["gathers"] == 400
    assert found["carried"] == 0


def test_a_way_whose_norm_is_wrong_is_not_exact() -> None:
    runner = timed(Alone())
    runner.warm_up(2, exchange.WAYS.index("quire"))
    assert runner.found["exact"]
    runner.norms[0].weight[5] = 1.5
    runner.warm_up(2, exchange.WAYS.index("quire"))
    assert not runner.found["exact"]


def test_fewer_calls_where_they_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_rank, "BUDGET", 0.0)
    runner = timed(Alone())
    runner.warm_up(1, exchange.WAYS.index("replays"))
    assert runner.found["gathers"] == exchange_rank.LOOKS


def test_sums_in_one_and_in_two_phases_are_asked_for_at_all_sizes() -> None:
    for way in ("one-shot", "two-shot", "NCCL"):
        sizes = [rows * 16 for rows in exchange.sizes(way)]  # KiB
        assert min(sizes) == 16
        assert {8 << 10, 16 << 10, 24 << 10} <= set(sizes)
    runner = timed(Alone())
    runner.warm_up(2, exchange.WAYS.index("two-shot"))
    assert "peers" in runner.found["missing"]


def test_ranks_that_reach_each_other_s_memory_have_the_same_bits_either_way() -> None:
    """By the kernels, interpreted; each way takes its own."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("exchange_ranks.py"))],
        env=env | {"CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(one["exact"] for one in found)
    assert len({one["bits"] for one in found if one["way"] != "replays"}) == 1
    kernels = {(one["way"], *one["kernels"]) for one in found}
    ways = {("quire", "_one_shot"), ("one-shot", "_one_shot"), ("two-shot", "_two_shot"), ("replays", "_one_shot")}
    assert (kernels, len(found)) == (ways, 8)
