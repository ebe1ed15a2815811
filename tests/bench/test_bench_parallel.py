"""`quire bench parallel` on CPU ranks: what it writes, what it says of what it left out, and that what it says
of the exchange is compared with sums that were taken elsewhere, bit by bit."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benching import results
from torch import Tensor

from bench import exchange, exchange_rank, parallel
from bench import parallel_goals as goals
from bench.exchange_rank import Timed
from bench.parallel_goals import Goal
from quire.distributed import device_exchange
from quire.errors import QuireError
from quire.kernels.triton import all_reduce as reduce
from quire.layers.norm import RMSNorm
from quire.layers.prepare import connect_ranks
from quire.protocol.parallel_layout import Shard


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPUs, and short rows in this process."""
    monkeypatch.setattr(parallel.links, "found", lambda: {"gpus": []})
    monkeypatch.setattr(exchange_rank, "SIZE", 64)


def test_the_exchange_is_measured_and_its_bits_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(exchange, "ROWS", (1,))
    links, *found = results(tmp_path, "parallel", "--minutes", "1", "--part", "exchange")
    assert (links["device"], links["ranks"]) == ("cpu", [1, 2])
    assert [one["way"] for one in found] == ["quire", "replays", "gloo"]
    for one in found:
        assert one["same_bits"], one
        assert one["exact"], one
        assert one["value"] > 0, one
        assert "goal" not in one or one["goal"] is None
    for one in found[::2]:
        assert one["us"] == max(one["by_rank_us"])
    shown = capsys.readouterr().out
    assert "no GPU: ranks on a CPU" in shown
    assert "equal, right" in shown


def test_what_is_left_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, *found = results(tmp_path, "parallel", "--minutes", "0.001")
    assert [one["part"] for one in found] == list(parallel.PARTS)
    assert all("s were left" in one["left_out"] for one in found)
    assert f"left out: {next(iter(parallel.PARTS))}, all: 0 s were left" in capsys.readouterr().out
    assert results(tmp_path, "parallel", "--ranks", "1", "--part", "failure")[1]["left_out"] == "it takes 2 GPUs"


def test_a_part_that_fails_doesn_t_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(testbed: parallel.Testbed) -> parallel.Found:
        written = json.loads((tmp_path / "benched/result.json").read_text())
        assert len(written["results"]) == 1, "the document is written before"
        yield {"ranks": 2, "what": "one", "value": 1.0}
        raise QuireError("the ranks are gone")

    monkeypatch.setitem(parallel.PARTS, "tokens", parallel.Part("", failing))
    monkeypatch.setitem(
        parallel.PARTS, "failure", parallel.Part("", lambda testbed: iter([{"ranks": 2, "what": "two"}]))
    )
    found = results(tmp_path, "parallel", "--part", "tokens", "--part", "failure")
    assert [one.get("left_out", one.get("what")) for one in found[1:]] == [
        "one", "it failed: QuireError the ranks are gone", "two",
    ]  # fmt: skip


def test_goals_are_rescaled_by_what_copies_take() -> None:
    latency, rate = Goal({4: 10.0}, low=True), Goal({4: 1000.0})
    assert goals.rescaled(latency, 4, "large", None) == 10.0  # NVLink
    assert goals.rescaled(latency, 8, "large", None) is None
    slow = goals.rescaled(latency, 4, "large", 39.1)
    more = 161 * 1.5 * 16384 * (1 / 39.1e9 - 1 / 391e9)  # seconds a token
    assert slow == pytest.approx(10.0 + 1e3 * more)
    assert goals.rescaled(rate, 4, "large", 39.1) == pytest.approx(1 / (1e-3 + more))
    assert goals.exchange_goal(2, 3, 512, None) == 35.0
    assert goals.exchange_goal(2, 3, 512, 39.1) == pytest.approx(35.0 + 1e6 * 2**23 * (1 / 39.1e9 - 1 / 391e9))
    assert goals.exchange_goal(8, 0, 1, None) is None


def test_a_table_says_by_how_much_a_goal_is_missed() -> None:
    links = {"gpus": ["NVIDIA H200"] * 2, "link": 39.1, "held": True}
    one = {"part": "large", "ranks": 2, "what": "large, w", "unit": "tok/s", "goal": 100.0, "low": False}
    shown = parallel.show([links, {**one, "value": 90.0}, {**one, "value": 101.0}, {**one, "value": None}])
    assert "no, -10 %" in shown
    assert "yes" in shown
    assert "no NVLink: copies of 39 GB/s, and goals rescaled from 391" in shown
    assert "RANKS DIFFER" in parallel.show([links, {**one, "value": 1.0, "same_bits": False, "exact": False}])


@pytest.mark.soak
def test_all_parts_on_cpu_ranks(tmp_path: Path) -> None:
    _, *found = results(tmp_path, "parallel", "--minutes", "10")
    assert [one["part"] for one in found if "left_out" in one] == ["profile"]
    assert {one["part"] for one in found} == set(parallel.PARTS)
    [tokens] = [one for one in found if one["part"] == "tokens"]
    assert tokens["value"] == 1.0
    [served] = [one["run"] for one in found if one["part"] == "served"]
    assert served["running"] > 0
    assert served["served"]["median"]["requests"] == served["served"]["median"]["attempted"] == 40
    assert "503" in served["health"]
    assert any(line.startswith("quire_rank_restarts_total") and line.endswith(" 1.0") for line in served["metrics"])
    assert sum(line.startswith("quire_rank_memory_bytes") for line in served["metrics"]) == 2
    killed, stopped = (one["run"] for one in found if one["part"] == "failure")
    for run in (killed, stopped):
        assert run["ended"] == run["with_an_error"] == run["clients"] == 32
        assert run["processes_left"] == 0
    assert killed["last_end_s"] < 2 < stopped["last_end_s"] < 12


CPU = torch.device("cpu")
NONE = torch.empty(0)
PEERS = reduce.PeerBuffers(NONE, NONE, NONE, 0, 1, 0)


class Alone:
    """The exchange of a rank that has no others, whose calls number `wrong` aren't right: each in one bit."""

    shard, warming_up = Shard(0, 1), nullcontext

    def __init__(self, *wrong: int) -> None:
        self.wrong, self.adds, self.gathers = wrong, 0, 0
        self.peers = PEERS
        self.most = set[tuple[int, int]]()  # bytes of sums in one phase, and through peers at all

    def all_reduce(self, x: Tensor) -> Tensor:
        self.adds += 1
        self.most.add((self.peers.one_shot_bytes, device_exchange.NCCL_MIN_BYTES))
        if self.adds in self.wrong:
            x.view(torch.int16)[-1, -1] ^= 1
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathers += 1
        every = x[None].clone()
        if x.dtype == torch.int32 and self.gathers in self.wrong:
            every[0, 0, 3] ^= 1
        return every

    def barrier(self) -> None:
        """There is nobody else."""

    def check_peers(self) -> None:
        """Nobody is missed."""


def timed(given: Alone) -> Timed:
    runner = object.__new__(Timed)
    runner.part, runner.device, runner.group, runner.device_exchange = given.shard, CPU, None, None
    runner.exchange: Any = given
    runner.host: Any = Alone()
    runner.norms = [RMSNorm(exchange_rank.SIZE, 1e-5, exchange_rank.DTYPE, CPU) for _ in range(2)]
    for norm in runner.norms:
        norm.weight.fill_(1.0)
    connect_ranks(runner.norms[0], given)
    return runner


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


def test_sums_of_all_sizes_go_the_way_that_is_measured() -> None:
    """And afterwards as before."""
    for way, most in (("one-shot", 1 << 40), ("two-shot", 0)):
        alone = Alone()
        runner = timed(alone)
        runner.device_exchange: Any = alone
        runner.warm_up(2, exchange.WAYS.index(way))
        assert alone.most == {(most, 1 << 40)}
        assert runner.found["exact"]
        assert alone.peers is PEERS
    assert device_exchange.NCCL_MIN_BYTES == 16 << 20
