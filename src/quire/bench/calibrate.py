"""Calibrate the simulator's cost model on this machine: run and time a grid of steps, fit the coefficients to two
thirds of them, and report the error on the rest. `quire simulate --calibration FILE` reads the result.

With --steps, fit steps that were recorded elsewhere: the simulator plans the same workloads again, which gives the
exact work of each step. A record whose steps differ from the plan is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.bench.calibration import fit
from quire.bench.document import short, table
from quire.bench.drive import Decoding
from quire.bench.machine import Others, machine
from quire.bench.steps import NOTHING, Sample, Timed, bandwidth_of, grid, moves
from quire.bench.workloads import Job, parse
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.models import read_model_config, uses_transformers
from quire.models.head_config import HeadConfig
from quire.sim.cost_model import MAX_DEPTH, Coefficients, CostModel, ModelShape, StepWork
from quire.sim.simulation import Simulation, TraceRequest
from quire.startup.build import build
from quire.startup.checkpoint import Checkpoint, read_checkpoint
from quire.startup.dtypes import ITEMSIZE

TARGET = 0.15  # limit of the median error on steps that the fit did not use
OVERLAPS = (2.0, 4.0)
LAUNCHES = (10, 20, 30, 40, 50)  # percentiles of the times of steps with prompts, tried as the minimum time of a step
MARGIN = 0.1  # share above that minimum from which a step informs the other coefficients
MOST_SECONDS = 1e6  # of a step
MOST_GIB = 2**20
BANDWIDTHS = (1e-6, 1e6)  # TB/s, minimum and maximum
CLEARLY = 0.95  # a clearly better candidate leaves at most this share of the squared errors


class Errors(NamedTuple):
    """Relative errors of predictions, as fractions."""

    median: float
    p90: float
    worst: float
    steps: int


def shape_of(source: Checkpoint, itemsize: int, saved: int = 0) -> ModelShape:
    """Return a model's shape for the cost model. `saved` is that of `ModelShape.from_spec`."""
    if uses_transformers(source.config):
        raise StartupError(f"{source.name} is computed by transformers, whose time isn't modelled",
                           "Simulate or calibrate a model of quire's own")  # fmt: skip
    settings = read_model_config(source.config)
    if isinstance(settings, HeadConfig):
        return ModelShape.from_head(settings, itemsize)
    return ModelShape.from_spec(source.spec, itemsize, settings.tied, saved)


# The fit


def split(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """Split the samples: two thirds to fit, every third one to evaluate the fit."""
    return [s for i, s in enumerate(samples) if i % 3 != 2], list(samples[2::3])


def fitted(
    shape: ModelShape, samples: Sequence[Sample], bandwidth: float, moves: Coefficients = NOTHING
) -> Coefficients:
    """Fit coefficients, none below 0, by least squares of relative errors; those of copies and swaps are taken from
    `moves`. Every step reads the weights, at `bandwidth` bytes a second; the rest is fitted. Of two candidates the
    simpler one is taken unless the other is clearly better."""
    even = _balanced(samples)
    moved = [s.work.copied * moves.copied_byte + s.work.swapped * moves.swapped_byte for s in even]
    even = [s._replace(seconds=s.seconds - m) for s, m in zip(even, moved)]
    best, least = NOTHING, float("inf")
    for found in _candidates(shape, even, bandwidth):
        cost = CostModel(shape, found._replace(copied_byte=0.0, swapped_byte=0.0))
        missed = sum((cost.device_seconds(s.work) / s.seconds - 1) ** 2 for s in even)
        if missed < CLEARLY * least:
            best, least = found, missed
    hosts = [sample for sample in samples if sample.host > 0]
    host = [0.0, 0.0]
    if hosts:
        host = fit([[1.0, float(s.work.rows)] for s in hosts], [s.host for s in hosts]).coefficients
    return best._replace(
        copied_byte=moves.copied_byte, swapped_byte=moves.swapped_byte, host_step=host[0], host_row=host[1]
    )


def _candidates(shape: ModelShape, samples: Sequence[Sample], bandwidth: float) -> Iterator[Coefficients]:
    """Yield the best coefficients for each overlap and launch time, simple ones first."""
    prompts = [s.seconds for s in samples if s.work.attention]
    for launch in (0.0, *(np.percentile(prompts, LAUNCHES) if prompts else ())):
        free = [s for s in samples if not s.work.attention or s.seconds > (1 + MARGIN) * launch]
        summed = _summed(shape, free, bandwidth)._replace(launch=float(launch))
        yield summed
        for overlap in OVERLAPS if summed.operation else ():
            for operation in np.geomspace(0.7 * summed.operation, 2 * summed.operation, 24):
                yield _overlapped(shape, free, bandwidth, overlap, float(operation))._replace(launch=float(launch))


def _summed(shape: ModelShape, samples: Sequence[Sample], bandwidth: float) -> Coefficients:
    """Return the coefficients if reading and computing follow one another."""
    rows = [[w.operations, w.kv_bytes, w.attention, 1.0, float(w.rows)] for _, w, *_ in samples]
    operation, kv, attention, each, row = fit(rows, [s.seconds for s in samples]).coefficients
    weights = min(shape.weight_bytes / bandwidth, each)
    return NOTHING._replace(
        weight_byte=weights / shape.weight_bytes, operation=operation, kv_byte=kv, attention=attention,
        step=each - weights, row=row,
    )  # fmt: skip


def _overlapped(
    shape: ModelShape, samples: Sequence[Sample], bandwidth: float, overlap: float, operation: float
) -> Coefficients:
    """Fit the remaining coefficients for a given `overlap` and given seconds per `operation`."""
    known = NOTHING._replace(weight_byte=1 / bandwidth, operation=operation, overlap=overlap)
    rows = [[w.kv_bytes, w.attention, 1.0, float(w.rows)] for _, w, *_ in samples]
    left = [s.seconds - CostModel(shape, known).device_seconds(s.work) for s in samples]
    kv, attention, step, row = fit(rows, left, [s.seconds for s in samples]).coefficients
    return known._replace(kv_byte=kv, attention=attention, step=step, row=row)


def _balanced(samples: Sequence[Sample]) -> list[Sample]:
    """Repeat the samples of rare kinds of step, so that all kinds have equal weight."""
    kinds = {kind: [s for s in samples if s.what == kind] for kind in dict.fromkeys(s.what for s in samples)}
    most = max(map(len, kinds.values()))
    return [sample for group in kinds.values() for sample in group * round(most / len(group))]


def errors(cost: CostModel, samples: Iterable[Sample]) -> Errors:
    """Return the errors of predictions, relative to the measured times."""
    off = [abs(cost.device_seconds(sample.work) / sample.seconds - 1) for sample in samples]
    return Errors(float(np.median(off)), float(np.percentile(off, 90)), max(off), len(off))


def by_kind(cost: CostModel, samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Return the errors of each kind of step."""
    kinds = dict.fromkeys(sample.what for sample in samples)
    return {kind: errors(cost, [s for s in samples if s.what == kind])._asdict() for kind in kinds}


# Steps that were recorded


def recorded(
    path: str, config: EngineConfig, source: Checkpoint, shape: ModelShape, kv_tokens: int
) -> dict[str, list[Sample]]:
    """Return the samples of a record {workload: [[running rows, tokens, seconds] a step]}, whose requests all came at
    once. The simulator plans them again with `config`. Raise StartupError if its steps have other numbers of tokens."""
    remedy = "Expected {WORKLOAD: [[rows, tokens, seconds], ...]}, recorded with the same settings"
    try:
        content: dict[str, list[list[float]]] = json.loads(Path(path).read_text(encoding="utf-8"))
        steps = {name: [(int(t), float(s)) for _, t, s in rows] for name, rows in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StartupError(f"the steps of {path} can't be read: {error}", remedy) from error
    found: dict[str, list[Sample]] = {}
    for name, measured in steps.items():
        works = planned(name, config, source, shape, kv_tokens)
        if [work.tokens for work in works] != [tokens for tokens, _ in measured]:
            raise StartupError(f"the steps of {name[:60]} in {path} are not those that this engine plans", remedy)
        wrong = [seconds for _, seconds in measured if not 0 < seconds <= MOST_SECONDS]
        if wrong:
            raise StartupError(
                f"a step of {name[:60]} in {path} took {wrong[0]:g} seconds",
                f"It must be above 0, and at most {MOST_SECONDS:,.0f}",
            )
        found[name] = [Sample(kind_of(work), work, seconds) for work, (_, seconds) in zip(works, measured)]
    return found


def kind_of(work: StepWork) -> str:
    """Return "prompts" if the step computes any, else "decode"."""
    return "prompts" if work.attention else "decode"


def planned(name: str, config: EngineConfig, source: Checkpoint, shape: ModelShape, kv_tokens: int) -> list[StepWork]:
    """Return the work of each step of a workload whose requests all arrive at once."""
    works: list[StepWork] = []
    cost = CostModel(shape, NOTHING._replace(step=1.0))
    simulation = Simulation(
        config, source.spec, cost, kv_tokens, depth=2, on_step=lambda work, seconds: works.append(work)
    )
    simulation.run(at_once(parse(name).jobs(source.spec.vocab_size, config.seed)))
    return works


def at_once(jobs: Sequence[Job]) -> list[TraceRequest]:
    """Return a trace of jobs that all arrive at time 0."""
    return [TraceRequest(0.0, job.prompt, Decoding().params(job)) for job in jobs]


# The entry


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = parser.add_argument_group("recorded steps, instead of steps made here; --calibration has the swaps' cost")
    group.add_argument(
        "--steps", metavar="FILE", help="recorded steps, as JSON: {WORKLOAD: [[rows, tokens, seconds], ...]}"
    )
    group.add_argument("--device-name", default="?", metavar="TEXT", help="device of the record")
    group.add_argument("--memory-gib", type=float, default=1.0, metavar="GIB", help="memory of that device")
    group.add_argument("--bandwidth", type=float, default=1.0, metavar="TB/S", help="memory bandwidth of that device")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one result: the calibration, with the steps of the fit and of the evaluation."""
    config = replace(config_from(args), enable_prefix_caching=False)
    _check(args, config)
    others = Others()
    facts, shape, samples, bandwidth, moved = _recorded(args, config) if args.steps else _made(config)
    if len(samples) < 12:
        raise StartupError(f"there are only {len(samples)} steps to fit", "Give the KV memory more room")
    fit_to, kept = split(samples)
    coefficients = fitted(shape, fit_to, bandwidth, moved)
    cost = CostModel(shape, coefficients)
    error = {
        **errors(cost, kept)._asdict(),
        "fitted_steps": len(fit_to),
        "target": TARGET,
        "kinds": by_kind(cost, kept),
    }
    return [{
        **facts, "coefficients": coefficients._asdict(), "error": error, "bandwidth": bandwidth,
        "cores_used_by_others": others.load(),
        "samples": [] if args.steps else [
            {"what": s.what, **s.work._asdict(), "seconds": s.seconds, "host": s.host,
            "cost": cost.device_seconds(s.work)}
            for s in samples
        ],
    }]  # fmt: skip


def _check(args: argparse.Namespace, config: EngineConfig) -> None:
    """Raise StartupError for arguments whose results `quire simulate` would refuse, before anything is measured."""
    if config.depth is not None and config.depth > MAX_DEPTH:
        raise StartupError(f"--depth is {config.depth}", f"A calibration's is from 1 to {MAX_DEPTH}")
    if not 1e-3 <= args.memory_gib <= MOST_GIB:
        raise StartupError(f"--memory-gib is {args.memory_gib}", f"It must be between 0.001 and {MOST_GIB:,}")
    low, high = BANDWIDTHS
    if not low <= args.bandwidth <= high:
        raise StartupError(f"--bandwidth is {args.bandwidth}", f"It must be between {low:g} and {high:,.0f} TB/s")
    if any("\ud800" <= character <= "\udfff" for character in args.device_name):
        raise StartupError(f"--device-name is {ascii(args.device_name)[:80]}", "It must be Unicode text")


Found = tuple[dict[str, Any], ModelShape, list[Sample], float, Coefficients]


def _made(config: EngineConfig) -> Found:
    source = read_checkpoint(config)
    made = build(config)
    try:
        shape = shape_of(source, ITEMSIZE[made.memory_plan.dtype], made.memory_plan.quantization_savings)
        made.engine.lift_queue_limit()
        runner: Any = made.engine.runner
        bandwidth, moved = bandwidth_of(runner.device), moves(made.engine)
        samples = grid(Timed(made.engine, shape))
        here = machine()
    finally:
        made.engine.close()
    facts = {
        "device": here["gpu"] if made.memory_plan.device == "cuda" else here["cpu"], "kind": made.memory_plan.device,
        "model": made.name, "dtype": made.memory_plan.dtype, "depth": made.engine.depth,
        "memory_bytes": made.memory_plan.device_bytes,
        "kv_bytes": made.memory_plan.kv_bytes if config.kv_gib is None and config.kv_tokens is None else None,
         # the remaining memory
        "source": f"Fitted by `quire bench calibrate` to two of three steps of a grid (rows that decode at several "
        f"contexts, prompts, both) of {made.name}, {made.memory_plan.dtype}, made on this device with "
        f"{here['threads']} "
        "threads; the error is that on the third steps, which weren't fitted. Weights are read at no more than the "
        "rate of a copy on the device.",
    }  # fmt: skip
    return facts, shape, samples, bandwidth, moved


def _recorded(args: argparse.Namespace, config: EngineConfig) -> Found:
    source = read_checkpoint(config, weights=False)
    dtype = config.dtype if config.dtype != "auto" else str(source.config.get("dtype"))
    if dtype not in ITEMSIZE:
        raise StartupError(f"the model has the number format {dtype[:40]!r}", f"Give --dtype {', '.join(ITEMSIZE)}")
    shape = shape_of(source, ITEMSIZE[dtype])
    token_bytes = source.spec.token_bytes(shape.itemsize)
    if config.kv_gib is None and config.kv_tokens is None:
        raise StartupError("--steps is given without the size of the KV memory", "Give --kv-gib or --kv-tokens")
    kv_tokens = config.kv_tokens or int((config.kv_gib or 0) * 2**30) // token_bytes
    found = recorded(args.steps, config, source, shape, kv_tokens)
    bandwidth = args.bandwidth * 1e12
    swap = _swap_byte(config.calibration) / 2 if config.calibration else 0.0
    facts = {
        "device": args.device_name, "kind": "cuda", "model": source.name, "dtype": dtype, "depth": 2,
        "memory_bytes": int(args.memory_gib * 2**30), "kv_bytes": kv_tokens * token_bytes,
        "source": f"quire bench calibrate --steps: recorded steps of {', '.join(found)} with {source.name}",
    }  # fmt: skip
    # A copy reads and writes each byte.
    moved = NOTHING._replace(swapped_byte=swap, copied_byte=2 / bandwidth)
    return facts, shape, [sample for steps in found.values() for sample in steps], bandwidth, moved


def _swap_byte(path: str) -> float:
    """Return the seconds to swap a byte out and in, from a file of `quire bench preemption`."""
    remedy = "Write one with `quire bench preemption --out FILE`"
    try:
        found = float(json.loads(Path(path).read_text(encoding="utf-8"))["costs"]["swap_byte"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise StartupError(f"--calibration {path} can't be used: {type(error).__name__} {error}", remedy) from error
    if not 0 <= found <= 1:
        raise StartupError(f"--calibration {path} has the swap_byte {found}, and it must be from 0 to 1", remedy)
    return found


def more(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the document that `quire simulate --calibration` reads."""
    keys = ("device", "kind", "model", "dtype", "depth", "memory_bytes", "kv_bytes", "coefficients", "error", "source")
    return {key: results[0][key] for key in keys}


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the coefficients and their errors on the steps of the evaluation."""
    result = results[0]
    error = result["error"]
    rows = [(name, f"{value:.4g}") for name, value in result["coefficients"].items()]
    kinds = [
        (name, e["steps"], f"{e['median']:.1%}", f"{e['p90']:.1%}", f"{e['worst']:.1%}")
        for name, e in {**error["kinds"], "all": error}.items()
    ]
    verdict = "within" if error["median"] <= error["target"] else "beyond"
    return "\n".join([
        table(("coefficient", "seconds"), rows),
        table(("steps kept out of the fit", "count", "median error", "p90", "worst"), kinds),
        f"fitted to {error['fitted_steps']} steps; the median error is {verdict} {error['target']:.0%}; "
        f"memory bandwidth {short(result['bandwidth'] / 1e9)} GB/s",
    ])  # fmt: skip
