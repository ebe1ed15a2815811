"""Measure the wire format of plans and results: bytes, and microseconds to encode and decode, compared with JSON.

The best and the median of the repeats are reported; on a busy machine the best shows the cost of the code. The garbage
collector is off meanwhile, as it nearly is in service (ipc.garbage_collection).

With --ranks N also the time of a step to N ranks without a model and back: encoded, published, read by each, and the
first rank's result with the digests of all received. And, by the ranks' clocks, the time until the last one has the
slices as arrays, with which it can start.
"""

from __future__ import annotations

import argparse
import json
import time
import timeit
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.echo_rank import ARRIVED
from bench.local_nodes import LocalNodes
from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.machine import Others
from quire.config import EngineConfig
from quire.distributed.rank_handle import launch_rank_process
from quire.distributed.rank_messages import InitMessage
from quire.distributed.remote_runner import RemoteRunner
from quire.errors import StartupError
from quire.ipc.child_process import program_arguments
from quire.protocol.parallel_layout import MAX_RANKS, ParallelLayout
from quire.protocol.step_plan import (
    LAST_SAMPLED,
    SeqSlice,
    SliceResult,
    SlotInit,
    StepPlan,
    StepResult,
    TableWrite,
    TopLogprobs,
)
from quire.protocol.wire import KEY_BYTES, Message, decode_frame, encode_frame

REPEATS = 200
PAUSE = 5e-4  # seconds before each step, in which ranks become idle
AT_ONCE = 1e-3  # approximate seconds of a repeat
ECHO = program_arguments("bench.echo_rank", str(Path(__file__).parents[1]))
ROWS = (1, 32, 256, 1024)


def cases() -> dict[str, Message]:
    """Return steps of typical content: decoding rows (every 16th gets a page), a prompt among them, a fork, results."""
    found: dict[str, Message] = {}
    for rows in ROWS:
        pages = tuple(TableWrite(slot, 0, 100, (5000 + slot,)) for slot in range(1, rows, 16))
        found[f"plan of {rows} rows"] = StepPlan((), pages, _decoding(rows))
    prompt = SeqSlice(300, tuple(range(1000, 3048)), 0, 1)
    found["plan of 255 rows and a prompt of 2048"] = StepPlan((), (), (*_decoding(255), prompt))
    found["plan of a fork"] = StepPlan((SlotInit(7, 12345, 3, None, 2**62 + 1, 500),), (), ())
    for rows in ROWS:
        found[f"result of {rows} rows"] = StepResult(tuple(SliceResult((31000 + i,)) for i in range(rows)), 0.01)
    top = TopLogprobs(310, -0.5, 1, tuple(range(310, 315)), (-0.5, -1.25, -3.0, -4.0, -5.0))
    found["result of 256 rows with 5 log-probabilities"] = StepResult((SliceResult((310,), (top,)),) * 256, 0.01)
    return found


def _decoding(rows: int) -> tuple[SeqSlice, ...]:
    return tuple(SeqSlice(slot, (LAST_SAMPLED,), 1500 + slot, 1) for slot in range(rows))


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(parser, "measurement", repeat=(REPEATS, "repeats"))
    group.add_argument("--ranks", type=int, nargs="+", default=[], metavar="N", help="send steps to N ranks and back")
    group.add_argument("--agent", action="store_true", help="send these steps through an agent, as to another node")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each kind of message."""
    if args.repeat < 1:
        raise StartupError(f"--repeat is {args.repeat}", "Give 1 or more")
    if not all(1 <= ranks <= MAX_RANKS for ranks in args.ranks):
        raise StartupError(f"--ranks is {args.ranks}", f"Give numbers between 1 and {MAX_RANKS}")
    found = [measured(name, message, args.repeat) for name, message in cases().items()]
    for ranks in args.ranks:
        found += sent(ranks, args.repeat, args.agent)
    return found


def sent(ranks: int, repeats: int, agent: bool) -> list[dict[str, Any]]:
    """Measure steps of several sizes to `ranks` ranks and back, and an order without contents to them; with `agent` as
    to another node."""
    open_hosts = LocalNodes([range(1)], ECHO) if agent else None
    runner, found = RemoteRunner(ranks, 60.0, partial(launch_rank_process, program=ECHO), open_hosts), []
    to = f"{ranks} rank{'s' * (ranks > 1)}{' of an agent' * agent}"
    try:
        runner.send_init([InitMessage(EngineConfig(), part, (), 1, 60.0) for part in ParallelLayout(ranks).shards()])
        runner.wait_until_built()
        others = Others()
        times = {"arrays_us": _spread([_there(runner, None) for _ in range(repeats)])}
        found.append(_of_ranks(f"order without contents to {to}", ranks, times, repeats, others))
        for rows in ROWS:
            plan, others = StepPlan((), (), _decoding(rows)), Others()
            submits, rounds = zip(*[_there_and_back(runner, plan) for _ in range(repeats)])
            arrivals = [_there(runner, plan) for _ in range(repeats)]
            times = {"submit_us": _spread(submits), "arrays_us": _spread(arrivals), "round_us": _spread(rounds)}
            found.append(_of_ranks(f"step of {rows} rows to {to} and back", ranks, times, repeats, others))
    finally:
        runner.close()
    return found


def _of_ranks(message: str, ranks: int, times: dict[str, Any], repeats: int, others: Others) -> dict[str, Any]:
    return {"message": message, "ranks": ranks, **times, "repeats": repeats, "cores_used_by_others": others.load()}


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {"best": min(times), "p50": median(times)}


def _there_and_back(runner: RemoteRunner, plan: StepPlan) -> tuple[float, float]:
    """Return the microseconds until a step is submitted, and until it is collected, with nothing else in flight."""
    began = time.monotonic_ns()
    ticket = runner.submit(plan)
    submitted = time.monotonic_ns()
    runner.collect(ticket)
    return (submitted - began) / 1e3, (time.monotonic_ns() - began) / 1e3


def _there(runner: RemoteRunner, plan: StepPlan | None) -> float:
    """Return the microseconds until the last rank has a step's slices as arrays, with nothing else in flight. Without a
    plan: until it has read an order of minimal size."""
    began = time.monotonic_ns()
    if plan is None:
        runner.remove_image(bytes(KEY_BYTES))
        time.sleep(PAUSE)
    else:
        ticket = runner.submit(plan)
        time.sleep(PAUSE)
        runner.collect(ticket)
    arrived: int = max(runner.query(ARRIVED))
    return (arrived - began) / 1e3


def measured(name: str, message: Message, repeats: int) -> dict[str, Any]:
    """Return the sizes and times of one message."""
    frame, text, others = encode_frame(message), json.dumps(message), Others()
    assert decode_frame(frame) == message, f"{name} isn't read as it was written"
    times = {
        "encode_us": _spent(lambda: encode_frame(message), repeats),
        "decode_us": _spent(lambda: decode_frame(frame), repeats),
        "json_encode_us": _spent(lambda: json.dumps(message), repeats),
        "json_decode_us": _spent(lambda: json.loads(text), repeats),  # lists only: the message classes are not built
    }
    sizes = {"bytes": len(frame), "json_bytes": len(text)}
    return {"message": name, **sizes, **times, "repeats": repeats, "cores_used_by_others": others.load()}


def _spent(call: Callable[[], object], repeats: int) -> dict[str, float]:
    once = min(timeit.repeat(call, number=1, repeat=5))
    number = max(1, int(AT_ONCE / once))
    taken = [seconds / number * 1e6 for seconds in timeit.repeat(call, number=number, repeat=repeats)]
    return _spread(taken)


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format a line a message: the best times, and their ratio to JSON's; and a line a way to ranks."""
    head = ("message", "bytes", "encode us", "decode us", "JSON's bytes", "encode x", "decode x", "others' cores")
    rows = []
    for r in results:
        if "ranks" in r:
            continue
        ours, theirs = ([r[f"{of}{way}_us"]["best"] for way in ("encode", "decode")] for of in ("", "json_"))
        ratios = [f"{b / a:.1f}" for a, b in zip(ours, theirs)]
        load = f"{r['cores_used_by_others']:.2f}"
        rows.append((r["message"], r["bytes"], *map(short, ours), r["json_bytes"], *ratios, load))
    ways = [r for r in results if "ranks" in r]
    second = ("message", "submit us", "median", "arrays us", "median", "and back us", "median", "others' cores")
    there = [(r["message"], *_ways(r), f"{r['cores_used_by_others']:.2f}") for r in ways]
    return table(head, rows) + ("\n\n" + table(second, there) if ways else "")


def _ways(result: dict[str, Any]) -> list[str]:
    spreads = [result.get(way, {}) for way in ("submit_us", "arrays_us", "round_us")]
    return [short(spread[which]) if spread else "" for spread in spreads for which in ("best", "p50")]
