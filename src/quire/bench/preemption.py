"""Measure preemption by swapping, by recomputation, and by the cheaper of both as a calibration predicts for each
victim (PagedAttention §4.5), end to end on workloads that favour different policies.

Policies take turns, so that disturbances affect all of them; they are compared by measured time alone.

The document has `costs`, which `--calibration` reads. The first result is the calibration: its samples, and the worst
and median error of both fits as shares. With --compare one result a load follows: `seconds` of every run by policy,
`better` of the two fixed ones, `auto_over_better` (at most `limit`) and `worse_over_better`. The prefix cache is off,
because a recomputation could find its pages there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from quire.bench.arguments import add_numbers
from quire.bench.calibration import calibrate
from quire.bench.document import short, table
from quire.bench.drive import Decoding, Load, drive
from quire.bench.machine import Others
from quire.bench.shapes import built
from quire.bench.workloads import Job, parse
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.preemption_costs import PreemptionCosts
from quire.errors import StartupError

POLICIES = ("swap", "recompute", "auto")
LIMIT = 1.05  # auto's time / the better fixed policy's
REPEATS = 3
# Pages of one token and one layer are the smallest possible. So neither policy is always cheaper: each page costs a
# copy, and attention makes long contexts expensive to recompute.
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16,
    "intermediate_size": 32, "vocab_size": 512, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL: dict[str, Any] = {"page_size": 1, "table_scope": "layer", "dtype": "float32", "threads": 1, "device": "cpu"}
LOADS = ("fixed:6000:70@4/12125", "fixed:200:6@100/406", "fixed:4000:50@4+fixed:200:50@12/4290")
CALIBRATED_TOKENS = 8192


class Scene(NamedTuple):
    """Jobs that compete for a memory of `kv_tokens` tokens."""

    name: str
    workloads: tuple[str, ...]
    kv_tokens: int

    def jobs(self, vocab_size: int, seed: int) -> list[Job]:
        """Return the jobs of all workloads in one random order."""
        jobs = [job for name in self.workloads for job in parse(name).jobs(vocab_size, seed)]
        return [jobs[i] for i in np.random.default_rng(seed).permutation(len(jobs))]


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(parser, "measurement", repeat=(REPEATS, "runs of each policy"))
    group.add_argument("--compare", action="store_true", help="run workloads under swap, recompute and auto")
    group.add_argument("--load", action="append", metavar="NAME",
                       help="load to compare: WORKLOAD[+WORKLOAD...]/KV_TOKENS; may be given repeatedly "
                            f"(default: {' '.join(LOADS)})")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the calibration, then with --compare one result a load."""
    if args.repeat < 1:
        raise StartupError(f"--repeat is {args.repeat}", "It must be at least 1")
    scenes = [_scene(name) for name in args.load or LOADS] if args.compare else []
    config, shape = config_from(args), None
    if not config.model and config.model_config is None:
        config, shape = EngineConfig.of(**config.flat() | SMALL), SHAPE
    if config.kv_tokens is None and config.kv_gib is None:
        config = replace(config, kv_tokens=CALIBRATED_TOKENS)
    # Without a prefix cache each policy recomputes, or swaps, all tokens of a victim.
    config = replace(config, enable_prefix_caching=False)
    others = Others()
    with built(config, shape) as made:
        facts = {"model": "small shape" if shape else made.name, "dtype": made.memory_plan.dtype,
                 "page_size": config.page_size, "threads": config.threads}  # fmt: skip
        calibration = calibrate(made.engine)
    results = [{"kind": "calibration", **facts, **calibration, "cores_used_by_others": others.load()}]
    costs = PreemptionCosts(**calibration["costs"])
    print(f"calibrated: {table(tuple(calibration['costs']), [tuple(map(short, costs))])}", file=sys.stderr)
    for scene in scenes:
        here = replace(config, kv_tokens=scene.kv_tokens, kv_gib=None)
        with built(here, shape) as made:
            jobs = scene.jobs(made.spec.vocab_size, config.seed)
            made.engine.lift_queue_limit()
            results.append({"kind": "comparison", **facts, **compare(made.engine, scene, jobs, costs, args.repeat)})
    return results


def _scene(name: str) -> Scene:
    workloads, slash, tokens = name.partition("/")
    if not slash or not (tokens.isascii() and tokens.isdigit()) or not 1 <= len(tokens) <= 10:
        raise StartupError(f"there is no load {name[:80]!r}", "Expected WORKLOAD[+WORKLOAD...]/KV_TOKENS")
    names = tuple(workloads.split("+"))
    for workload in names:
        parse(workload)
    return Scene(name, names, int(tokens))


def compare(engine: Engine, scene: Scene, jobs: Sequence[Job], costs: PreemptionCosts, repeats: int) -> dict[str, Any]:
    """Return the seconds of all runs of each policy, in turn; the medians, and the ratio of auto's to the better fixed
    policy's."""
    scheduler = engine.scheduler
    scheduler.costs = costs
    seconds: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    cpu: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    facts: dict[str, dict[str, Any]] = {}
    others = Others()
    for turn in range(-1, repeats):  # the first round warms up
        for policy in POLICIES[turn % 3 :] + POLICIES[: turn % 3]:  # so that no policy always follows the same one
            scheduler.preemption = policy
            began = time.process_time()
            traces, facts[policy] = drive(engine, jobs, Load((0.0,) * len(jobs)), Decoding())
            if turn >= 0:
                seconds[policy].append(max(trace.events[-1][0] for trace in traces))
                cpu[policy].append(time.process_time() - began)
        print(f"{scene.name}: turn {turn + 1} of {repeats}", file=sys.stderr)
    medians = {policy: median(seconds[policy]) for policy in POLICIES}
    better, worse = sorted(("swap", "recompute"), key=medians.__getitem__)
    return {
        "load": scene.name,
        "requests": len(jobs),
        "kv_tokens": scene.kv_tokens,
        "seconds": seconds,
        "median_s": medians,
        "cpu_seconds": cpu,
        "better": better,
        "auto_over_better": _over(seconds, better),
        "auto_over_better_cpu": _over(cpu, better),
        "worse_over_better": median(slow / fast for slow, fast in zip(seconds[worse], seconds[better])),
        "preempted": {
            policy: {way: facts[policy][f"preemptions_{way}"] for way in ("swap", "recompute")} for policy in POLICIES
        },
        "swapped_bytes": {policy: facts[policy]["swapped_out_bytes"] for policy in POLICIES},
        "limit": LIMIT,
        "cores_used_by_others": others.load(),
    }


def _over(seconds: dict[str, list[float]], better: str) -> float:
    """Return the median over all turns of auto's time over the better fixed policy's in the same turn: a slow phase of
    the machine affects both."""
    return median(auto / fixed for auto, fixed in zip(seconds["auto"], seconds[better]))


def more(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the costs in the format that `--calibration` reads."""
    return {"costs": results[0]["costs"]}


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the calibration, and the comparisons as a table."""
    first, *rest = results
    lines = [
        table(("coefficient", "seconds"), [(name, f"{value:.4g}") for name, value in first["costs"].items()]),
        f"worst sample off by {100 * first['swap_fit']['worst_error']:.0f}% (swap), "
        f"{100 * first['compute_fit']['worst_error']:.0f}% (computation)",
    ]
    if rest:
        head = (
            "load", "swap s", "recompute s", "auto s", "preempted", "auto swapped", "worse/better", "auto/better",
            "by CPU time",
        )  # fmt: skip
        rows = [
            (
                r["load"], *(short(r["median_s"][policy]) for policy in POLICIES),
                sum(r["preempted"]["auto"].values()), r["preempted"]["auto"]["swap"],
                f"{r['worse_over_better']:.3f}", f"{r['auto_over_better']:.3f}", f"{r['auto_over_better_cpu']:.3f}",
            )
            for r in rest
        ]  # fmt: skip
        lines.append(table(head, rows))
    return "\n".join(lines)
