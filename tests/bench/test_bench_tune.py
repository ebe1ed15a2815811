"""`quire bench kernels --tune` takes the fastest tile of those that compile and are right, writes a table that can be
read, and says that it needs a GPU."""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

from quire import bench
from quire.bench import kernels, tune
from quire.bench.document import write
from quire.errors import StartupError
from quire.kernels.triton.tiles import ENTRIES, MORE, Tile, measured_card, read_card, shipped_cards

CPU = torch.device("cpu")
ROOM = 232_448
OLD = Tile(8, 32, 512, 4, 4, 1)
NARROW, WIDE, DEEP = OLD._replace(columns=16), OLD._replace(columns=64), OLD._replace(depth=1024)
LATER = math.inf


class FakeTimer:
    """A timer of given times: each tile has its times in turn, the last one over and over."""

    def __init__(self, **times: Sequence[float]) -> None:
        self.times = {globals()[name.upper()]: list(several) for name, several in times.items()}
        self.asked: list[Tile] = []

    def __call__(self, tile: Tile) -> float:
        self.asked.append(tile)
        times = self.times[tile]
        return times.pop(0) if len(times) > 1 else times[0]


def test_the_fastest_tile_is_taken() -> None:
    timer = FakeTimer(old=[10.0], narrow=[9.0], wide=[8.0], deep=[math.inf])
    assert tune.fastest(OLD, [NARROW, WIDE, DEEP], timer, LATER) == (WIDE, 10.0, 8.0)
    assert timer.asked == [OLD, NARROW, WIDE, DEEP, *[OLD, WIDE] * tune.TURNS]


def test_a_gain_within_the_noise_is_none() -> None:
    assert tune.fastest(OLD, [WIDE], FakeTimer(old=[10.0], wide=[9.85]), LATER) == (OLD, 10.0, 10.0)
    assert tune.fastest(OLD, [WIDE], FakeTimer(old=[10.0], wide=[9.8]), LATER)[0] == WIDE
    once = FakeTimer(old=[10.0], wide=[7.0, 10.0, 9.9, 10.1])
    assert tune.fastest(OLD, [WIDE], once, LATER) == (OLD, 10.0, 10.0), "it was fast by chance"
    slow = FakeTimer(old=[12.0, 10.0, 10.2, 9.9], wide=[11.0, 10.0])
    assert tune.fastest(OLD, [WIDE], slow, LATER)[0] == OLD, "today's was slow by chance"


def test_a_tile_that_does_not_run_is_not_taken_and_may_be_replaced() -> None:
    assert tune.fastest(OLD, [WIDE], FakeTimer(old=[10.0], wide=[math.inf]), LATER) == (OLD, 10.0, 10.0)
    assert tune.fastest(OLD, [WIDE], FakeTimer(old=[math.inf], wide=[10.0]), LATER) == (WIDE, math.inf, 10.0)


def test_no_tile_is_measured_after_the_end() -> None:
    timer = FakeTimer(old=[10.0], wide=[8.0])
    assert tune.fastest(OLD, [WIDE], timer, time.monotonic() - 1) == (OLD, 10.0, 10.0)
    assert timer.asked == [OLD]


def test_a_tuned_table_can_be_read_and_shown(tmp_path: Path) -> None:
    """Entries of other families, and of tiles that weren't compiled, are as before."""
    old = measured_card(CPU).tiles
    keys = tune.entries(["linear/half", "decode"])
    shares: list[float] = []

    def compile_all(tasks: Sequence[tuple[tune.Key, Tile]], seconds: float) -> set[tuple[tune.Key, Tile]]:
        shares.append(seconds)
        first = [key for key, _ in tasks[: len(keys)]]
        assert first == keys, "the nearest tiles of all entries come first"
        return {(key, tile) for key, tile in tasks if key != ("linear/half/deep", 8)}

    def timer_of(key: tune.Key) -> tune.Timer:
        return lambda tile: tile.columns * 1e-6 if key[0].startswith("linear") else 1e-6

    lines = tune.tune(old, keys, 1000, ROOM, compile_all, timer_of)
    assert shares == [1000 * tune.COMPILE_SHARE]
    card = {"gpu": "New", "capability": [9, 0], "bytes_per_s": 3.35e12}
    write(tmp_path / "new.json", {"results": lines, "card": card})
    new = read_card(tmp_path / "new.json")
    assert new.gpu == "New"
    for entry, several in ENTRIES.items():
        for most in several:
            before, after = old[entry][most], new.tiles[entry][most]
            if entry.startswith("linear/half") and (entry, most) != ("linear/half/deep", 8):
                least = min(tile.columns for tile in tune.neighbours((entry, most), before, ROOM))
                assert after.columns == min(before.columns, least)
            else:
                assert after == before
    measured = {line["entry"] for line in lines if "us" in line}
    assert len(measured) == len(keys) - 1
    assert {entry.partition("/")[0] for entry in measured} == {"linear", "decode"}
    shown = kernels.show(lines).splitlines()
    assert len(shown) == 1 + len(measured)
    assert shown[1].split() == [
        "linear/half/deep/1", *["8", "x", "512,", "3", "stages,", "4", "warps,", "prefetch", "3"],
        *["2", "x", "512,", "3", "stages,", "4", "warps,", "prefetch", "3"], "8", "2", "75.0",
    ]  # fmt: skip


def test_entries_of_which_no_time_is_left_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    old = measured_card(CPU).tiles
    lines = tune.tune(old, tune.entries(None), 0, ROOM, lambda tasks, seconds: set(tasks), lambda key: lambda tile: 1.0)
    assert len(lines) == sum(map(len, ENTRIES.values()))
    assert not any("us" in line for line in lines)


def test_wrong_results_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside those of the first tile: other bits only where another order of a sum is allowed."""
    want, rounds = torch.tensor([1.0, -2.0, 3.0]), []
    results = {OLD: want, NARROW: want * (1 + 1e-4), WIDE: want * 1.1}

    def product(tile: Tile) -> torch.Tensor:
        if tile == DEEP:
            raise OutOfResources(300_000, ROOM, "shared memory")
        return results[tile]

    def replayed(calls: Sequence[object], number: int = 1) -> float:
        rounds.append((len(calls), number))
        return 1e-5

    monkeypatch.setattr(tune, "cases", lambda entry, most, device: [[product] * 4, [product] * 500])
    monkeypatch.setattr(tune, "replayed", replayed)
    for key, same_bits in ((("linear/half/deep", 8), True), (("linear/half/deep", 1), False), (("decode", 2), False)):
        timer = tune.make_timer(key, CPU)
        assert timer(OLD) == pytest.approx(1e-5)
        assert timer(NARROW) == (math.inf if same_bits else pytest.approx(1e-5))
        assert timer(WIDE) == timer(DEEP) == math.inf
        assert timer(OLD) == pytest.approx(1e-5)
    assert rounds[:4] == [(4, 1), (4, 50), (500, 1), (500, 1)], "as many rounds as take two milliseconds"


def test_families_are_parts_of_names() -> None:
    assert len(tune.entries(None)) == sum(map(len, ENTRIES.values()))
    assert tune.entries(["linear/fp8"]) == [(f"linear/fp8/{s}", 1) for s in ("deep", "square", "middle", "tall")]
    assert {entry for entry, _ in tune.entries(["decode", "experts"])} == {
        entry for entry in ENTRIES if entry.startswith(("decode", "experts"))
    }
    for name in ("lin", "linear/half/deep/1", "copies", ""):
        with pytest.raises(StartupError, match="there is no family"):
            tune.entries([name])


def test_tiles_near_todays_fit() -> None:
    """Today's own tiles are of those that may be tried; and no other number of rows for a linear layer."""
    for table in shipped_cards():
        for entry, several in table.tiles.items():
            for most, tile in several.items():
                assert tune.fits((entry, most), tile, ROOM), (entry, most)
                near = tune.neighbours((entry, most), tile, ROOM)
                assert 10 < len(set(near)) == len(near) < 70
                assert tile not in near
                assert all(tune.fits((entry, most), other, ROOM) for other in near)
                if entry.startswith("linear/half"):
                    assert {other.rows for other in near} == {0 if most == 1 else most}
                elif entry.startswith("linear/rounded"):
                    assert all(other.warps % 4 == 0 and other.rows >= most for other in near)
    key, tile = ("linear/half/square", 8), Tile(8, 32, 512, 3, 2, 2)
    assert len(tune.neighbours(key, tile, ROOM)) > len(tune.neighbours(key, tile, 64 * 1024)) > 0
    assert not tune.fits(("experts/half/gated", MORE), Tile(128, 128, 64, 4, 4), ROOM), "256 sums a thread"
    assert tune.fits(("experts/half/plain", MORE), Tile(128, 128, 64, 4, 4), ROOM)


def test_what_was_compiled_in_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that is stopped, the lines that it finished."""
    tasks = [(("decode/half/128", 2), OLD._replace(stages=stages)) for stages in (1, 2, 3, 4)]

    def run(command: list[str], input: bytes, stdout: int, timeout: float) -> subprocess.CompletedProcess[bytes]:
        assert command[1:] == ["-m", "quire.bench.tune"]
        given = json.loads(input)
        assert timeout == 7
        if given[0][1][3] == 1:
            raise subprocess.TimeoutExpired(command, timeout, output=b"0\n1")
        if given[0][1][3] == 2:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, 0, b"0\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert tune.compile_tiles(tasks, 7) == {tasks[0], tasks[2]}


FAKE_GPU = """
import sys
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from quire.bench import tile_cases, tune

driver.set_active(SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
))
tile_cases.supports_pdl, tile_cases.multiprocessors = (lambda device: True), (lambda device: 132)
tune._compile_only()
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_every_family_is_compiled_without_a_gpu(tmp_path: Path) -> None:
    """A tile of each that is one step from today's; one that no compiler takes is left out."""
    tiles = measured_card(CPU).tiles
    keys: list[tune.Key] = [
        ("linear/half/square", 1), ("linear/half/tall", 32), ("linear/fp8/square", 1), ("linear/rounded/square", 16),
        ("experts/half/plain", 16), ("experts/one_token/narrow", 2048), ("low_bit/half/plain", 32),
        ("low_bit/one_token/gated", MORE), ("decode/half/128", MORE), ("decode/half/64", 2),
    ]  # fmt: skip
    tasks = [(key, tune.neighbours(key, tiles[key[0]][key[1]], ROOM)[0]) for key in keys]
    tasks.insert(1, (("linear/half/square", 1), Tile(0, 3, 512, 3, 4)))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", FAKE_GPU], input=json.dumps(tasks), capture_output=True, text=True,
        env=env | {"TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.split() == [str(i) for i in range(len(tasks)) if i != 1], done.stderr[-2000:]
    assert "linear/half/square/1, 3 x 512, 3 stages, 4 warps does not compile" in done.stderr


def test_a_file_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "tiles.json", Path("/proc/version/tiles.json")):
        with pytest.raises(StartupError, match=f"{path} can't be written"):
            bench.main(["kernels", "--tune", "--out", str(path)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_needed(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"quire bench kernels --tune measures a GPU, and torch finds none"):
        bench.main(["kernels", "--tune", "--out", str(tmp_path / "new" / "tiles.json")])
    assert not [*tmp_path.iterdir()]
    with pytest.raises(StartupError, match="--tune has sizes of its own"):
        bench.main(["kernels", "--tune", "--tp", "2"])
    for seconds in (0, 10**10):
        with pytest.raises(StartupError, match=f"--seconds is {seconds}"):
            tune.run(argparse.Namespace(family=None, seconds=seconds))


@pytest.mark.gpu
def test_tiles_of_a_gpu_are_measured() -> None:
    """A timer takes the same results as right, and leaves others out."""
    device = torch.device("cuda")
    for key in (("linear/half/square", 8), ("experts/half/plain", 8), ("low_bit/half/plain", 8), ("decode/half/64", 2)):
        timer, tile = tune.make_timer(key, device), measured_card(device).tiles[key[0]][key[1]]
        assert 0 < timer(tile) < 1
        assert timer(tile._replace(stages=40)) == math.inf
