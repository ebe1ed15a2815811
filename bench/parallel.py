"""Measure everything about tensor parallelism within a number of minutes, most valuable first: GPU links, the exchange,
tokens, models, a step by rank, starts, failures. The document is written after each measurement and names what was left
out.

Models run in quire's own commands, each a process with --tp. Without GPUs the same measurements run on CPU ranks, with
the bundled model and short requests: this shows that it works, not how fast ranks are.

A result has `part`, `ranks`, `what`, `value`, `unit`, `goal` (for H200s; null elsewhere), `low` (less is better) and
`peer` (vLLM 0.26), or `left_out` and the reason. The exchange has `us` (the slowest rank's median), `by_rank_us`,
`same_bits` (on all ranks) and `exact` (equal to sums in rank order).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import exchange, links, rank_failure
from bench import parallel_goals as goals
from bench.parallel_goals import Goal
from quire.bench.document import document, short, table, write
from quire.distributed.rank_devices import SHARE_GPU_VARIABLE, may_share_gpus
from quire.errors import QuireError, StartupError
from quire.protocol.parallel_layout import MAX_RANKS

LARGE_FLAGS = ("--model-config", "llama3-70b", "--dummy-weights", "--dtype", "bfloat16")
SMALL_FLAGS = ("--model-config", "llama3-8b", "--dummy-weights", "--dtype", "bfloat16")
SMALL_WORKLOADS = ("fixed:128:128@1", "fixed:1000:128@32", "fixed:1024:128@512")
CPU_WORKLOADS = ("fixed:16:16@1", "fixed:64:16@8")
WARMING = "fixed:64:8@4"  # the first workload of each command, which isn't reported
LEAST = 20.0  # seconds that must be left for a command
PROFILED = ("--rows", "1", "256", "--prompts", "8", "--context", "1024")
PROMPT = "The old lighthouse keeper"


class Testbed(NamedTuple):
    """Where to measure: `link`, 10^9 bytes a second of copies between the slowest pair of GPUs (None: no GPUs), the
    numbers of ranks, and the deadline (time.monotonic)."""

    device: str
    link: float | None
    held: bool  # the goals are for such GPUs
    ranks: tuple[int, ...]
    end: float

    @property
    def left(self) -> float:
        """Return the seconds until the deadline."""
        return self.end - time.monotonic()

    @property
    def several(self) -> tuple[int, ...]:
        return tuple(count for count in self.ranks if count > 1)

    def beside(self, goal: float | None, peer: float | None = None) -> dict[str, float | None]:
        """Return the goal and vLLM's measurement, if both exist for these GPUs."""
        return {"goal": goal if self.held else None, "peer": peer if self.held else None}

    def model(self, which: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the flags and workloads of the small or the large model."""
        if self.device == "cpu":
            return ("--device", "cpu"), CPU_WORKLOADS
        return (SMALL_FLAGS, SMALL_WORKLOADS) if which == "small" else (LARGE_FLAGS, tuple(goals.LARGE))


Found = Iterator[dict[str, Any]]


def _exchange(testbed: Testbed) -> Found:
    for ranks in testbed.several:
        for one in exchange.measured(ranks, testbed.device, testbed.end):
            if "us" not in one:
                done = {"value": float(one["calls"]), "unit": "calls"} if "calls" in one else {}
                yield {"ranks": ranks, "what": f"{one['way']}, {one['rows']} rows", **done, **one}
                continue
            if "hidden" in one:
                yield {"ranks": ranks, "what": f"of a sum hidden {one['way']}, {one['rows']} rows",
                       "value": 100 * one["hidden"], "unit": "%", **testbed.beside(goals.HIDDEN), **one}  # fmt: skip
                continue
            goal = None
            if one["way"] == "quire":
                index = exchange.ROWS.index(one["rows"])
                goal = goals.exchange_goal(ranks, index, one["rows"], testbed.link)
            yield {"ranks": ranks, "what": f"{one['way']}, {one['rows']} rows", "value": one["us"], "unit": "us",
                   "low": True, **testbed.beside(goal), **one}  # fmt: skip


def _tokens(testbed: Testbed) -> Found:
    """Compare the bundled model's fp32 tokens on each number of ranks with those of one rank."""
    said = {}
    for ranks in (1, *testbed.several):
        flags = ("--dtype", "float32", "--temperature", "0", "--max-tokens", "48", "--device", testbed.device)
        said[ranks] = _ran(("generate", "--tp", str(ranks), "--prompt", PROMPT, *flags), testbed).stdout
        if ranks > 1:
            yield {"ranks": ranks, "what": "tokens of one rank", "value": float(said[ranks] == said[1]), "unit": "",
                   "text": said[ranks][:2000]}  # fmt: skip


def _models(which: str, counts: Callable[[Testbed], tuple[int, ...]]) -> Callable[[Testbed], Found]:
    """Measure a model's workloads on each number of ranks."""

    def measure(testbed: Testbed) -> Found:
        flags, workloads = testbed.model(which)
        held = goals.LARGE if which == "large" else goals.SMALL
        alone: dict[str, float] = {}
        for ranks in counts(testbed):
            results, why = _bench(flags, workloads, ranks, testbed)
            for result in results:
                name, (value, unit) = result["workload"], _value(result)
                goal = held.get(name, Goal({}))
                if ranks == 1:
                    alone[name] = value
                elif which == "small" and name == "fixed:1024:128@512" and ranks in goals.GAINS and name in alone:
                    goal = Goal({ranks: goals.GAINS[ranks] * alone[name]})
                asked = goals.rescaled(goal, ranks, which, testbed.link)
                yield {"ranks": ranks, "what": f"{which}, {name}", "value": value, "unit": unit, "low": unit == "ms",
                       **testbed.beside(asked, goal.peer.get(ranks)), "run": result}  # fmt: skip
            if why:
                yield {"ranks": ranks, "what": which, "left_out": why}

    return measure


def _profile(testbed: Testbed) -> Found:
    """Profile the steps of the small model by rank, with the time in which no kernel runs."""
    flags, _ = testbed.model("small")
    if testbed.device == "cpu":
        yield {"left_out": "it takes GPUs"}
        return
    for ranks in testbed.ranks:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "profile.json"
            _ran(("bench", "profile", "--tp", str(ranks), *flags, *PROFILED, "--out", str(out)), testbed)
            for result in json.loads(out.read_text())["results"]:
                prompts = "prompts" if "prompt_tokens_per_s" in result else "rows"
                idle = max(one["idle_share"] for one in result.get("ranks", [result]))
                yield {"ranks": ranks, "what": f"idle in a step of {result['rows']} {prompts}", "value": 100 * idle,
                       "unit": "%", "low": True, **testbed.beside(goals.IDLE), "run": result}  # fmt: skip


def _start(testbed: Testbed) -> Found:
    """Measure the seconds to the first token, with an empty folder of compiled kernels and with a filled one."""
    flags, _ = testbed.model("large")
    for ranks in testbed.several:
        with tempfile.TemporaryDirectory() as folder:
            for how, goal in goals.START.items():
                out = Path(folder) / "start.json"
                args = ("bench", "start", "--tp", str(ranks), *flags, "--out", str(out))
                _ran(args, testbed, TRITON_CACHE_DIR=str(Path(folder) / "kernels"))
                [result] = json.loads(out.read_text())["results"]
                yield {"ranks": ranks, "what": f"first token, {how}", "value": result["token_s"][0], "unit": "s",
                       "low": True, **testbed.beside(goal, goals.PEER_START.get(ranks)), "run": result}  # fmt: skip


def _deterministic(testbed: Testbed) -> Found:
    """Measure the slowdown of a workload by --deterministic."""
    flags, workloads = testbed.model("small")
    for ranks in testbed.several[:1]:
        runs = [_bench((*flags, *more), workloads[:2], ranks, testbed) for more in ((), ("--deterministic",))]
        if why := runs[0][1] or runs[1][1]:
            yield {"ranks": ranks, "what": "--deterministic", "left_out": why}
        for plain, ordered in zip(runs[0][0], runs[1][0]):
            ratio = ordered["median"]["seconds"] / plain["median"]["seconds"]
            yield {"ranks": ranks, "what": f"--deterministic, {plain['workload']}", "value": ratio, "unit": "times",
                   "low": True, **testbed.beside(goals.DETERMINISTIC),
                   "run": {"plain": plain, "deterministic": ordered}}  # fmt: skip


def _failure(testbed: Testbed) -> Found:
    flags, _ = testbed.model("small")
    long = 400 if testbed.device == "cpu" else 8000
    for ranks in testbed.several[:1]:
        for how in rank_failure.SIGNALS:
            given = (*flags, "--tp", str(ranks))
            found = rank_failure.measured(given, how, long, max(testbed.left, LEAST))
            yield {"ranks": ranks, "what": f"a rank {how}: the last of {found['clients']} streams ended",
                   "value": found["last_end_s"], "unit": "s", "run": found}  # fmt: skip


def _served(testbed: Testbed) -> Found:
    """Kill and restart a rank of the large model under a load."""
    flags, _ = testbed.model("large")
    workload, rate, after = ("sharegpt@1000", 20.0, 15.0) if testbed.device == "cuda" else ("fixed:32:96@40", 4.0, 3.0)
    for ranks in testbed.several[:1]:
        given = (*flags, "--tp", str(ranks))
        found = rank_failure.restarted(given, workload, rate, after, max(testbed.left, LEAST))
        ended = found["served"]["median"]
        yield {"ranks": ranks, "what": f"{workload} at {rate:g} a second, a rank killed: requests that ended well",
               "value": float(ended["requests"]), "unit": f"of {ended['attempted']}",
               **testbed.beside(float(ended["attempted"])), "run": found}  # fmt: skip


class Part(NamedTuple):
    """A measurement. It starts only if `least` seconds are left; on a CPU, LEAST."""

    about: str
    run: Callable[[Testbed], Found]
    least: float = LEAST


PARTS = {
    "exchange": Part("rows added up over ranks, and the norm after it, beside other libraries", _exchange),
    "tokens": Part("the bundled model's tokens are one rank's", _tokens),
    "large": Part("Llama-3-70B", _models("large", lambda testbed: testbed.several), 120.0),
    "small": Part("Llama-3-8B", _models("small", lambda testbed: testbed.ranks), 60.0),
    "profile": Part("where a step's time goes, by rank", _profile, 60.0),
    "start": Part("Llama-3-70B, until its first token", _start, 60.0),
    "deterministic": Part("what --deterministic costs Llama-3-8B", _deterministic, 60.0),
    "served": Part("Llama-3-70B under a load, a rank killed and started anew", _served, 150.0),
    "failure": Part("a rank killed, and stopped, under 32 streams of Llama-3-8B", _failure, 45.0),
}


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    parser.add_argument("--minutes", type=float, default=25.0, metavar="M", help="time limit (default: %(default)s)")
    parser.add_argument("--part", action="append", choices=tuple(PARTS), help="measure only this part; may be repeated")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N",
                        help="numbers of ranks (default: 1, 2, 4, 8 up to the GPUs; on a CPU 1, 2)")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all measurements that time permits. With --out the document is written after each. Raise StartupError for
    invalid arguments."""
    if not 0 < args.minutes < 10_000:
        raise StartupError(f"--minutes is {args.minutes}", "Give a number above 0")
    end = time.monotonic() + 60 * args.minutes
    found = links.found()
    testbed = _testbed(found, args.ranks, end)
    results: list[dict[str, Any]] = [{"part": "links", **found, **testbed._replace(end=0.0)._asdict()}]
    _save(args, results)
    for name in args.part or PARTS:
        for one in _part(name, testbed):
            results.append({"part": name, **one})
            print(f"{name}: {_line(results[-1])}", file=sys.stderr)
            _save(args, results)
    return results


def _part(name: str, testbed: Testbed) -> Found:
    part = PARTS[name]
    if testbed.left < (part.least if testbed.device == "cuda" else LEAST):
        yield {"left_out": f"{max(testbed.left, 0.0):.0f} s were left"}
        return
    if not testbed.several and name != "small":
        yield {"left_out": "it takes 2 GPUs"}
        return
    try:
        yield from part.run(testbed)
    except (QuireError, OSError, KeyError, ValueError) as error:
        yield {"left_out": f"it failed: {type(error).__name__} {error}"[:500]}


def _testbed(found: dict[str, Any], given: Sequence[int] | None, end: float) -> Testbed:
    gpus = found["gpus"]
    most = len(gpus) if gpus and not may_share_gpus() else MAX_RANKS
    ranks = tuple(given or (count for count in (1, 2, 4, 8) if count <= (len(gpus) or 2)))
    if not all(1 <= count <= most for count in ranks):
        raise StartupError(
            f"--ranks is {list(ranks)}", f"Give numbers between 1 and {most}, or set {SHARE_GPU_VARIABLE}=1"
        )
    speeds = [pair["gb_s"] for pair in found.get("pairs", ())]
    kind = bool(gpus) and all(goals.KIND in name for name in gpus)
    linked = all(pair.get("nvlink") for pair in found.get("pairs", ()))
    return Testbed("cuda" if gpus else "cpu", min(speeds) if speeds and not linked else None, kind, ranks, end)


def _save(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    if args.out:
        write(Path(args.out), document("parallel", "quire bench", args.arguments, results))


def _bench(
    flags: Sequence[str], workloads: Sequence[str], ranks: int, testbed: Testbed
) -> tuple[list[dict[str, Any]], str]:
    """Run `quire bench throughput` with a number of ranks. Return the results of the workloads, and the reason if some
    are missing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        named = [word for name in (WARMING, *workloads) for word in ("--workload", name)]
        args = ("bench", "throughput", "--tp", str(ranks), *flags, *named, "--repeat", "1", "--warmup", "0")
        why = ""
        try:
            _ran((*args, "--out", str(out)), testbed)
        except QuireError as error:
            why = str(error)
        results: list[dict[str, Any]] = json.loads(out.read_text())["results"] if out.exists() else []
        return results[1:], why


def _ran(args: Sequence[str], testbed: Testbed, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a quire command, with `more` in its environment. Raise QuireError if it fails or takes longer than the time
    left."""
    command, seconds = [sys.executable, "-m", "quire", *args], testbed.left
    if seconds < LEAST / 2:
        raise QuireError(f"{max(seconds, 0.0):.0f} s were left for quire {' '.join(args[:4])}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **more})
    except subprocess.TimeoutExpired as error:
        raise QuireError(f"quire {' '.join(args[:4])} took longer than the {seconds:.0f} s that were left") from error
    if done.returncode:
        raise QuireError(f"quire {' '.join(args[:4])}: {' '.join(done.stderr.splitlines()[-2:])[:400]}")
    return done


def _value(result: dict[str, Any]) -> tuple[float, str]:
    """Return a workload's main number: the time between tokens for one request, output tokens for long outputs, else
    all tokens."""
    median, workload = result["median"], result["workload"]
    if workload.endswith("@1"):
        return 1e3 * median["inter_token_s"]["mean"], "ms"
    if workload == "fixed:128:1024@256":
        return median["output_tokens_per_s"], "output tok/s"
    return median["total_tokens_per_s"], "tok/s"


def _line(one: dict[str, Any]) -> str:
    if "left_out" in one:
        return f"left out: {one['left_out']}"
    return f"{one['ranks']} ranks, {one['what']}: {short(one.get('value'))} {one.get('unit', '')}".rstrip()


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the links, a line a measurement, and what was left out."""
    links, *rest = results
    gpus = links["gpus"]
    lines = [f"{len(gpus)} GPUs: {', '.join(gpus)}" if gpus else "no GPU: ranks on a CPU, the bundled model"]
    if links["link"] is not None:
        lines.append(f"no NVLink: copies of {links['link']:.0f} GB/s, and goals rescaled from {goals.LINK:.0f}")
    if not links["held"]:
        lines.append(f"no goals: they are of GPUs of the kind {goals.KIND}")
    head = ("part", "ranks", "what", "measured", "unit", "goal", "reached", "vLLM", "bits")
    rows = [
        (one["part"], one["ranks"], one["what"], short(one.get("value")), one.get("unit", ""), short(one.get("goal")),
         _reached(one), short(one.get("peer")), _alike(one))
        for one in rest if "left_out" not in one
    ]  # fmt: skip
    left = [
        f"left out: {one['part']}, {one.get('what', 'all')}: {one['left_out']}" for one in rest if "left_out" in one
    ]
    return "\n".join([*lines, table(head, rows), *left, f"not measured here: {NOT_HERE}"])


NOT_HERE = "sharded products and attention (quire bench kernels --model-config llama3-70b --tp N)"


def _reached(one: dict[str, Any]) -> str:
    if one.get("goal") is None or one.get("value") is None:
        return "-"
    by = one["value"] / one["goal"] - 1
    return "yes" if (by <= 0 if one.get("low") else by >= 0) else f"no, {100 * by:+.0f} %"


def _alike(one: dict[str, Any]) -> str:
    if "same_bits" not in one:
        return "-"
    if not one["same_bits"]:
        return "RANKS DIFFER"
    if not one["exact"] and one.get("way") in exchange.OURS:
        return "WRONG"
    return "equal, right" if one["exact"] else "equal"
