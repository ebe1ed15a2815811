"""`quire bench kernels --tune`: measure tiles near those of this card's table (quire.kernels.triton.tiles), and make a
table of the fastest.

All tiles are compiled first, by several processes. Each runs this module as a program, which launches nothing. A tile
that does not compile or run, or whose results are wrong, is left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import zip_longest
from statistics import geometric_mean, median
from typing import Any

import torch
from torch import Tensor

from quire.bench.document import short, table
from quire.bench.replay import replayed
from quire.bench.tile_cases import cases
from quire.errors import StartupError
from quire.kernels.triton.decode import program_bytes
from quire.kernels.triton.launch import shared_memory
from quire.kernels.triton.linear import MIN_SHARED_MEMORY
from quire.kernels.triton.tiles import ENTRIES, MORE, Tile, measured_card

PROCESSES = 16
MAX_SECONDS = 86_400
COMPILE_SHARE = 0.6
"""The share of --seconds after which compilation stops."""
STEPS = 2
"""The most steps from today's tile to one that is tried. A step doubles or halves a size or the warps, or changes the
stages or the prefetch by 1."""
MIN_GAIN = 0.02
"""The share of the time that another tile must save to replace today's."""
TURNS = 3
"""The number of times that the fastest tile and today's are measured again, in turns."""
REPLAY_SECONDS, MAX_ROUNDS = 2e-3, 64
"""A measured graph repeats its calls until it takes this long, at most this many times."""
MAX_ERROR = 0.01
"""The largest norm of the difference from the right results, relative to their norm."""
MAX_SUMS, MAX_PREFETCH_BYTES = 128, 1024
"""The most sums of a thread, and bytes of a weight that it loads early."""

Key = tuple[str, int]
"""An entry, named without its `most`, and its `most`."""
Timer = Callable[[Tile], float]
"""Returns the seconds of a call with a tile; infinite for a tile that is left out."""


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tune the entries of --family within --seconds. Return the lines of the whole table. Raise StartupError for an
    unknown family or too few seconds."""
    device = torch.device("cuda")
    keys = entries(args.family)
    if not 1 <= args.seconds <= MAX_SECONDS:
        raise StartupError(f"--seconds is {args.seconds}", f"Give 1 to {MAX_SECONDS}")
    torch.manual_seed(0)
    tiles = measured_card(device).tiles
    from quire.kernels.triton.compile_locks import compile_once

    with compile_once():  # else the kernels would have other keys than those that `_compile_only` compiled
        return tune(tiles, keys, args.seconds, shared_memory(device), compile_tiles, partial(make_timer, device=device))


def entries(families: Sequence[str] | None) -> list[Key]:
    """Return the entries whose names begin with one of `families`; None: all. Raise StartupError for a family without
    entries."""
    for name in families or ():
        if not any(f"{entry}/".startswith(f"{name}/") for entry in ENTRIES):
            raise StartupError(f"there is no family {name[:40]!r} of tiles", f"Known: {', '.join(ENTRIES)}, or a part")
    return [
        (entry, most)
        for entry, mosts in ENTRIES.items()
        for most in mosts
        if families is None or any(f"{entry}/".startswith(f"{name}/") for name in families)
    ]


def tune(
    tiles: Mapping[str, Mapping[int, Tile]], keys: Sequence[Key], seconds: float, shared_bytes: int,
    compile_all: Callable[[Sequence[tuple[Key, Tile]], float], set[tuple[Key, Tile]]], timer_of: Callable[[Key], Timer],
) -> list[dict[str, Any]]:  # fmt: skip
    """Return a line for each entry of the table `tiles`. It has the entry's tile. If the entry is among `keys`, and was
    measured in time, it has the fastest tile, and the microseconds before and now.

    A program has `shared_bytes` of shared memory. `compile_all` compiles tiles for a number of seconds, and returns
    those that it compiled. `timer_of` returns the timer of an entry."""
    end = time.monotonic() + seconds
    near = {key: neighbours(key, tiles[key[0]][key[1]], shared_bytes) for key in keys}
    nearest_first = zip_longest(*([(key, tile) for tile in near[key]] for key in keys))
    ready = compile_all([task for tasks in nearest_first for task in tasks if task], seconds * COMPILE_SHARE)
    _progress(f"{len(ready)} of {sum(map(len, near.values()))} tiles compiled")
    lines = []
    for key, old in (((entry, most), old) for entry, by_most in tiles.items() for most, old in by_most.items()):
        line = {"entry": _name(key), **_fields(old)}
        candidates = [tile for tile in near.get(key, ()) if (key, tile) in ready]
        if candidates and time.monotonic() < end:
            tile, before, now = fastest(old, candidates, timer_of(key), end)
            changed = {} if tile == old else {"tile_before": _describe(old)}
            line = {"entry": _name(key), **_fields(tile), **changed, "us_before": _us(before), "us": _us(now)}
            old_text, new_text = (f"{_describe(one)}, {short(_us(s))} us" for one, s in ((old, before), (tile, now)))
            _progress(f"{_name(key)}: {old_text}; {new_text}")
        lines.append(line)
    return lines


def fastest(old: Tile, tiles: Sequence[Tile], timer: Timer, end: float) -> tuple[Tile, float, float]:
    """Return the chosen tile, the seconds of `old`, and the seconds of the chosen tile. The choice is the fastest of
    `tiles` if it is faster than `old` by MIN_GAIN when both are measured again; else it is `old`. Tiles that would be
    measured after `end`, a time of time.monotonic, are not considered."""
    seconds = {old: timer(old)}
    for tile in tiles:
        if time.monotonic() >= end:
            break
        seconds[tile] = timer(tile)
    best = min(seconds, key=lambda tile: seconds[tile])
    if best == old:
        return old, seconds[old], seconds[old]
    again = [(timer(old), timer(best)) for _ in range(TURNS)]
    before, now = (median(times) for times in zip(*again))
    return (best, before, now) if now <= before * (1 - MIN_GAIN) else (old, before, before)


def make_timer(key: Key, device: torch.device) -> Timer:
    """Return a function that measures tiles of an entry, as the geometric mean of its cases. The results of the first
    tile are taken to be right. Others may differ by MAX_ERROR. But products of few rows in 16 bits must have the same
    bits, because `batch_invariant_linear` uses these tiles too."""
    from triton.runtime.errors import OutOfResources

    entry_cases, right = cases(*key, device), list[Tensor]()
    exact, rounds = key[0].startswith("linear/half") and key[1] > 1, dict[int, int]()

    def is_right(got: Tensor, want: Tensor) -> bool:
        return torch.equal(got, want) or (not exact and bool((got - want).norm() <= MAX_ERROR * want.norm()))

    def timer(tile: Tile) -> float:
        try:
            results = [case[0](tile) for case in entry_cases]
        except OutOfResources:
            return math.inf
        if not right:
            right.extend(result.clone() for result in results)
        if not all(map(is_right, results, right)):
            return math.inf
        times = []
        for number, case in enumerate(entry_cases):
            calls = [partial(call, tile) for call in case]
            if number not in rounds:
                rounds[number] = min(MAX_ROUNDS, math.ceil(REPLAY_SECONDS / len(calls) / replayed(calls)))
            times.append(replayed(calls, rounds[number]))
        return geometric_mean(times) if times else math.inf

    return timer


def neighbours(key: Key, tile: Tile, shared_bytes: int) -> list[Tile]:
    """Return the other tiles at most STEPS steps from `tile` that the entry's kernel may have, the nearest first."""
    near = {tile: None}  # a dict keeps the order
    for _ in range(STEPS):
        near |= {new: None for one in near for new in _steps(one) if fits(key, new, shared_bytes)}
    return [new for new in near if new != tile]


def _steps(tile: Tile) -> Iterator[Tile]:
    """Yield the tiles one step from `tile`, also those that no kernel may have."""
    for field in ("rows", "columns", "depth", "warps"):
        number = getattr(tile, field)
        for new in (2 * number, number // 2):
            if new:
                yield tile._replace(**{field: new})
    for field in ("stages", "prefetch"):
        for step in (1, -1):
            yield tile._replace(**{field: getattr(tile, field) + step})


def fits(key: Key, tile: Tile, shared_bytes: int) -> bool:
    """Return True if the entry's kernel may have this tile, in `shared_bytes` of shared memory. Registers are not
    checked: if a tile needs too many, it does not compile."""
    (family, form, shape), most = key[0].split("/"), key[1]
    rows, columns, depth, stages, warps, prefetch = tile
    threads = 32 * warps
    if not (1 <= stages <= 8 and 1 <= warps <= 16 and 0 <= prefetch <= (3 if family == "linear" else 0)):
        return False
    if family == "decode":
        return columns >= 16 and program_bytes(16, int(shape), 2, columns, stages) <= shared_bytes
    if family == "linear":
        shared_bytes = min(shared_bytes, MIN_SHARED_MEMORY)
    weights = 2 if shape == "gated" else 1  # the others have gate and up in turns, as columns
    weight_bytes = {"low_bit": 0.5}.get(family, 1 if form in ("fp8", "rounded") else 2)
    stage_bytes = depth * (weights * columns * weight_bytes + rows * (1 if form == "rounded" else 2))
    prefetched_bytes = prefetch * columns * depth * weight_bytes
    small = stages * stage_bytes <= shared_bytes and prefetched_bytes <= MAX_PREFETCH_BYTES * threads
    if form == "one_token" and family == "low_bit":  # a sum is over 16 numbers of a row, and a thread has 1 to 32 sums
        large = weights * columns >= 4 and depth >= 128 and columns * depth >= 16 * threads
        return small and large and weights * columns * depth <= 512 * threads
    if rows == 0:  # without tensor cores: sums of each number of the depth
        return small and columns >= 2 and depth >= 32 and columns * depth <= MAX_SUMS * threads
    if form == "rounded":
        wide = rows >= max(most, 16) if columns >= 64 else rows >= 64
        return small and wide and warps % 4 == 0 and depth >= 32 and rows * columns <= MAX_SUMS * threads
    if family == "linear" and rows != most:
        return False
    if family == "low_bit" and not 128 <= depth <= 256:  # a larger depth is unrolled, and takes minutes to compile
        return False
    large = rows >= (16 if family == "experts" else 8) and min(columns, depth) >= 16
    return small and large and weights * rows * columns <= MAX_SUMS * threads


def compile_tiles(tasks: Sequence[tuple[Key, Tile]], seconds: float) -> set[tuple[Key, Tile]]:
    """Compile tiles in up to PROCESSES processes for at most `seconds`. Return those that were compiled."""
    count = min(PROCESSES, os.cpu_count() or 1)

    def compile_share(share: Sequence[tuple[Key, Tile]]) -> list[tuple[Key, Tile]]:
        command = [sys.executable, "-m", "quire.bench.tune"]
        try:
            done = subprocess.run(command, input=json.dumps(share).encode(), stdout=subprocess.PIPE, timeout=seconds)
            output = done.stdout
        except subprocess.TimeoutExpired as error:
            output = error.output or b""
        whole_lines = output[: output.rfind(b"\n") + 1].splitlines()
        return [share[int(line)] for line in whole_lines]

    with ThreadPoolExecutor(count) as pool:
        return {task for done in pool.map(compile_share, (tasks[i::count] for i in range(count))) for task in done}


def _compile_only() -> None:
    """Compile the tiles that standard input lists, and print the index of each that can be compiled. Patches Triton so
    that a launch only compiles, so it needs a process of its own."""
    from triton.runtime.jit import JITFunction

    from quire.kernels.triton.compile_locks import compile_once
    from quire.kernels.triton.fast_launch import FastLauncher

    JITFunction.__getitem__ = lambda self, grid: partial(self.warmup, grid=grid)
    FastLauncher.__getitem__ = lambda self, grid: self.kernel[grid]  # type: ignore[method-assign]
    any_failed = False
    for i, ((entry, most), numbers) in enumerate(json.load(sys.stdin)):
        try:
            with compile_once():
                for case in cases(entry, most, torch.device("meta")):
                    case[0](Tile(*numbers))
            print(i, flush=True)
        except Exception as error:  # the compiler raises errors of many types
            if not any_failed:  # one is enough to show
                tile = _describe(Tile(*numbers))
                _progress(f"{entry}/{most}, {tile} does not compile: {type(error).__name__}: {error}")
            any_failed = True


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the measured entries, a line an entry."""
    rows = []
    for line in results:
        if "us" in line:
            tile = _describe(Tile(*(line.get(name, 0) for name in Tile._fields)))
            gain = 0.0 if line["us_before"] is None else 100 * (1 - line["us"] / line["us_before"])
            before = line.get("tile_before", tile)
            rows.append((line["entry"], before, tile, short(line["us_before"]), short(line["us"]), f"{gain:.1f}"))
    return table(("entry", "tile before", "tile", "us before", "us", "gain, %"), rows)


def _name(key: Key) -> str:
    return f"{key[0]}/{'more' if key[1] == MORE else key[1]}"


def _fields(tile: Tile) -> dict[str, int]:
    return {name: number for name, number in tile._asdict().items() if number}


def _describe(tile: Tile) -> str:
    size = " x ".join(str(number) for number in tile[:3] if number)
    early = f", prefetch {tile.prefetch}" if tile.prefetch else ""
    return f"{size}, {tile.stages} stages, {tile.warps} warps{early}"


def _us(seconds: float) -> float | None:
    """Return microseconds; None, which JSON can hold, if they are infinite."""
    return round(seconds * 1e6, 2) if math.isfinite(seconds) else None


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    _compile_only()
