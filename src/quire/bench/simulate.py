"""`quire simulate`: simulate serving a model on a device without having either: request rates, latencies, memory.

The engine, the scheduler and the memory are those of a real server; the device is a calibration (quire.sim.cost_model).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.bench.arrivals import poisson
from quire.bench.calibrate import shape_of
from quire.bench.document import document, short, table, write
from quire.bench.latency import Trace, latencies, totals
from quire.bench.pictured import Eyes
from quire.bench.plots import COLOURS, figure
from quire.bench.traces import Traced, counter, load_trace
from quire.bench.workloads import EXPECTED, Endless, Workload, parse
from quire.cli.flags import add_engine_flags, config_from
from quire.cli.parser import Parser
from quire.config import EngineConfig
from quire.errors import InputError, StartupError
from quire.memory.answers import Usage
from quire.memory.build import max_seq_len
from quire.memory.page_layout import MemorySize, tokens_for_bytes
from quire.models.named_configs import CONFIGS
from quire.models.quantization import FP8Scheme, resolve_scheme
from quire.protocol.model_spec import ModelSpec
from quire.protocol.pipeline_stages import check_pp_division
from quire.protocol.sampling_params import SamplingParams
from quire.router.router import POLICIES
from quire.sim.cost_model import Calibration, CostModel, Division, calibration_names, load_calibration
from quire.sim.fleet import Fleet, work_costs
from quire.sim.runner import DrawFunction
from quire.sim.simulation import (
    ACCEPTANCE,
    MEASURES,
    STATISTICS,
    Objective,
    Simulation,
    SimulationResult,
    TraceRequest,
    highest_rate,
    mean_usage,
    meets_objectives,
    parse_objective,
)
from quire.startup.checkpoint import DEFAULT_MODEL, Checkpoint, read_checkpoint
from quire.startup.dtypes import ITEMSIZE
from quire.startup.memory_plan import activation_bytes
from quire.startup.speculation import check_speculation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_SECONDS = 600.0  # duration of a generated trace
MIN_RATE, MAX_RATE = 1e-6, 1e5
MAX_REPLICAS = 1024


class SimulatedDeployment(NamedTuple):
    """A model on a device. The KV memory has `kv_bytes` bytes, or if that is 0 the size of `kv_tokens` tokens in every
    layer, those of the draft model in `spec` included. `image_processor` is set for a vision model. A router
    with the policy `router` divides the requests among `replicas` engines."""

    config: EngineConfig
    spec: ModelSpec
    cost: CostModel
    calibration: Calibration
    kv_tokens: int
    kv_bytes: int = 0
    image_processor: Eyes | None = None
    replicas: int = 1
    router: str = POLICIES[0]

    @property
    def max_len(self) -> int:
        """Return the maximum number of tokens of a sequence."""
        wanted = self.config.max_model_len or self.spec.max_len
        size = MemorySize(self.kv_tokens, wanted, self.cost.shape.itemsize, self.kv_bytes)
        return max_seq_len(self.config.with_device_defaults(self.calibration.kind), self.spec, size)

    def simulation(self, draw: DrawFunction | None = None) -> Simulation:
        """Return a simulation with a new engine. `draw`: see SimRunner."""
        kind, depth = self.calibration.kind, max(self.calibration.depth, self.config.pp)
        return Simulation(
            self.config, self.spec, self.cost, self.kv_tokens, kind=kind, depth=depth, draw=draw,
            kv_bytes=self.kv_bytes,
        )  # fmt: skip

    def simulate(self, trace: Sequence[TraceRequest], objectives: Sequence[Objective] = ()) -> SimulationResult:
        """Serve the trace with new engines; with several to its end, whatever the objectives."""
        if self.replicas == 1:
            return self.simulation().run(trace, objectives)
        simulations = [self.simulation() for _ in range(self.replicas)]
        return Fleet(simulations, self.router, work_costs(self.cost)).run(trace)


def main(args: list[str]) -> int:
    """Simulate each --rate, or find the highest rate that meets the objectives."""
    given = _parser().parse_args(args)
    _check(given)
    plant = read_deployment(config_from(given), given.costs)
    plant = plant._replace(replicas=given.replicas, router=given.router)
    objectives = [parse_objective(text) for text in given.objective or ()]
    trace = _trace_source(given, plant)
    results = (
        _find_highest_rate(plant, trace, objectives, given)
        if given.find_rate
        else _run_rates(plant, trace, objectives, given)
    )
    if given.out:
        content = document("simulate", "quire simulate", args, results, real=False)
        write(Path(given.out), {**content, "calibration": plant.calibration._asdict()})
    print(format_results(results, plant))
    if given.plot:
        from quire.bench.plots import save

        save(plot_results(results), Path(given.plot))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="quire simulate", allow_abbrev=False, conflict_handler="resolve",
        description="Simulate serving: the engine over a calibration in place of a device.",
    )  # fmt: skip
    add_engine_flags(parser)
    group = parser.add_argument_group("simulation")
    group.add_argument("--calibration", dest="costs", required=True, metavar="NAME|FILE",
                       help=f"costs of steps: {', '.join(calibration_names())}, "
                       "or a file of quire bench calibrate")  # fmt: skip
    group.add_argument("--workload", metavar="NAME", help=f"{EXPECTED}; without @N, as many as arrive in --seconds")
    group.add_argument("--trace", metavar="FILE", help="a JSONL file of requests and their arrival times")
    group.add_argument("--trace-requests", type=int, metavar="N", help="only the first N of the trace")
    group.add_argument("--rate", type=float, nargs="+", metavar="X",
                       help="requests per second (Poisson; a trace is scaled in time); one run each")  # fmt: skip
    group.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, metavar="S",
                       help="length of a workload without @N (default: %(default)g)")  # fmt: skip
    group.add_argument("--replicas", type=int, default=1, metavar="N",
                       help=f"engines that share the requests, at most {MAX_REPLICAS} (default: 1)")  # fmt: skip
    group.add_argument("--router", choices=POLICIES, default=POLICIES[0],
                       help="how it chooses a replica for a request (default: %(default)s)")  # fmt: skip
    group.add_argument("--acceptance", dest="synthetic_acceptance", type=float, default=argparse.SUPPRESS, metavar="A",
                       help="probability that a draft token is accepted if those before it are "
                       f"(default: {ACCEPTANCE})")  # fmt: skip
    group.add_argument("--find-rate", action="store_true", help="find the highest rate that meets the objectives")
    group.add_argument("--objective", action="append", metavar="NAME=MS",
                       help=f"{'|'.join(STATISTICS)}-{'|'.join(MEASURES)}-ms=NUMBER; may be repeated")  # fmt: skip
    group.add_argument("--out", metavar="FILE", help="write the results as JSON")
    group.add_argument("--plot", metavar="FILE", help="write a plot (PNG)")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raise StartupError for invalid arguments, before a model or a trace is read."""
    rates = args.rate or []
    for rate in rates:
        if not MIN_RATE <= rate <= MAX_RATE:
            raise StartupError(f"--rate is {rate:g}", f"Give requests a second, {MIN_RATE:g} to {MAX_RATE:,.0f}")
    if args.find_rate and len(rates) > 1:
        raise StartupError(
            f"--find-rate is given with {len(rates)} rates, {' '.join(f'{rate:g}' for rate in rates)[:60]}",
            "Give one, where the search begins",
        )
    if args.find_rate and not args.objective:
        raise StartupError("--find-rate needs an --objective", "Such as --objective p99-normalised-ms=200")
    if not 1 <= args.replicas <= MAX_REPLICAS:
        raise StartupError(f"--replicas is {args.replicas}", f"It must be between 1 and {MAX_REPLICAS}")
    if (args.workload is None) == (args.trace is None):
        raise StartupError("there must be one of --workload and --trace", f"A workload: {EXPECTED}")
    if not 1 <= args.seconds <= 1e7:
        raise StartupError(f"--seconds is {args.seconds}", "It must be between 1 and 10,000,000")
    if args.plot:
        from quire.bench.plots import figure

        figure(1, 1)  # fails now if matplotlib is missing, not after the simulation


def read_deployment(config: EngineConfig, calibration: str) -> SimulatedDeployment:
    """Return the deployment to simulate. Without --kv-gib or --kv-tokens the KV memory is what the calibration has
    measured for its own model, less the weights of a draft model, or else what remains on its device."""
    if config.speculation in ("ngram", "both"):
        raise StartupError(
            f"--speculative-method is {config.speculation}, and the tokens that are simulated have no content",
            "Give --speculative-model alone",
        )
    found = load_calibration(calibration)
    if config.model_config is None and not config.model and found.model != DEFAULT_MODEL:
        if found.model not in CONFIGS:
            raise StartupError(f"the calibration's model, {found.model[:80]}, isn't known by name", "Give MODEL")
        config = replace(config, model_config=found.model)
    source = check_speculation(config, read_checkpoint(config, weights=False))
    dtype = config.dtype if config.dtype != "auto" else found.dtype
    itemsize = ITEMSIZE.get(dtype)
    if itemsize is None:
        raise StartupError(
            f"the calibration has the number format {dtype[:40]!r}", f"Give --dtype {', '.join(ITEMSIZE)}"
        )
    config, source = config.with_device_defaults(found.kind), source.with_stored_dtypes(config, itemsize)
    saved = _fp8_saved_bytes(config, source, itemsize, found)
    cost = CostModel(shape_of(source, itemsize, saved), found.coefficients_for(source.name))
    if source.draft is not None:
        cost = cost._replace(draft=shape_of(source.draft, itemsize))
    if config.world_size > 1:
        cost = cost._replace(division=_division(config, source, itemsize))
    spec = source.pool_spec
    tokens, kv_bytes = config.kv_tokens, 0
    if tokens is None:
        kv_bytes = max(_kv_bytes(config, spec, source, itemsize, found, saved), 0)
        tokens = tokens_for_bytes(config, spec, itemsize, kv_bytes)
    if tokens < 2:
        raise StartupError(
            f"the weights of {source.name} leave no room for KV on {found.device}", "Give --kv-gib, or another model"
        )
    return SimulatedDeployment(config, spec, cost, found, tokens, kv_bytes, Eyes.of(source.config, source.spec))


def _division(config: EngineConfig, source: Checkpoint, itemsize: int) -> Division:
    """Return how the model is divided among ranks. Raise StartupError if it can't be."""
    source.for_shard(config.layout.shards()[0])
    check_pp_division(source.spec, config.pp)
    return Division(config.layout, len(source.spec.layers), source.spec.hidden * itemsize)


def _fp8_saved_bytes(config: EngineConfig, source: Checkpoint, itemsize: int, found: Calibration) -> int:
    """Return the bytes of weights that FP8 saves: on a GPU, which is assumed to compute in FP8."""
    scheme = resolve_scheme(source.config, config.quantization)
    if not isinstance(scheme, FP8Scheme) or found.kind != "cuda" or itemsize != 2:
        return 0
    from quire.weights.fp8 import saved_bytes

    return saved_bytes(source.config, scheme, itemsize)


def _kv_bytes(
    config: EngineConfig, spec: ModelSpec, source: Checkpoint, itemsize: int, found: Calibration, saved: int
) -> int:
    if config.kv_gib is not None:
        return int(config.kv_gib * 2**30)
    if found.kv_bytes is not None and source.name == found.model and config.world_size == 1:
        return found.kv_bytes + saved - (spec.parameters - source.spec.parameters) * itemsize
    room = config.world_size * found.memory_bytes * config.gpu_memory_utilization + saved
    eyes = spec.vision.parameters if spec.vision is not None else 0
    activations = config.world_size * activation_bytes(config, spec, itemsize)
    return int(room - (spec.parameters + eyes) * itemsize - activations)


TraceAtRate = Callable[[float | None], list[TraceRequest]]


def _trace_source(args: argparse.Namespace, plant: SimulatedDeployment) -> TraceAtRate:
    """Return a function from a rate to the requests at that rate. None keeps a trace's own times."""
    if args.trace is not None:
        entries = load_trace(args.trace, plant.max_len, args.trace_requests, counter(plant.config))
        return partial(_scale_trace, Traced(Path(args.trace).name, entries), plant)
    if "@" in args.workload:
        parse(args.workload)
    else:
        parse(f"{args.workload}@1")
    return partial(_generate_trace, args.workload, args.seconds, plant)


def _generate_trace(name: str, seconds: float, plant: SimulatedDeployment, rate: float | None) -> list[TraceRequest]:
    if rate is None:
        raise StartupError(
            f"--rate is missing, and {name[:60]} has no times of its own", "Give --rate X, or --find-rate"
        )
    workload = parse(name) if "@" in name else Endless.lasting(name, rate, seconds)
    return _to_trace_requests(workload, poisson(workload.requests, rate, plant.config.seed), plant)


def _scale_trace(trace: Traced, plant: SimulatedDeployment, rate: float | None) -> list[TraceRequest]:
    times = trace.arrivals
    if times is None:
        if rate is None:
            raise StartupError(
                f"--rate is missing, and {trace.name[:60]} has no times", "Give --rate X, or --find-rate"
            )
        times = tuple(poisson(trace.requests, rate, plant.config.seed))
    elif rate is not None:
        if times[-1] <= 0:
            raise StartupError(f"{trace.name[:60]} has no duration", "Leave --rate and --find-rate out")
        seconds = len(times) / rate
        times = tuple(time / times[-1] * seconds for time in times)  # divides first, so that nothing overflows
    return _to_trace_requests(trace, times, plant)


def _to_trace_requests(workload: Workload, times: Sequence[float], plant: SimulatedDeployment) -> list[TraceRequest]:
    requests, max_len, seed = list[TraceRequest](), plant.max_len, plant.config.seed
    jobs, specs = workload.jobs(plant.spec.vocab_size, seed), workload.specs(seed)
    if plant.image_processor is not None and any(request.pictures for request in specs):
        jobs = plant.image_processor.jobs(specs, jobs, pixels=False)
    for time, job in zip(times, jobs):
        if len(job.prompt) + job.output > max_len:
            raise StartupError(
                f"a request of {workload.name[:60]} has {len(job.prompt) + job.output} tokens, but sequences may have "
                f"{max_len}",
                "Use a shorter workload, another model or a larger --kv-gib",
            )
        params = SamplingParams(temperature=0.0, max_tokens=job.output, ignore_eos=True, detokenize=False)
        requests.append(TraceRequest(time, job.prompt, params, job.media))
    return requests


def _run_rates(
    plant: SimulatedDeployment, trace: TraceAtRate, objectives: Sequence[Objective], args: argparse.Namespace
) -> list[dict[str, Any]]:
    rates: list[float | None] = list(args.rate or [None])
    return [_result_record(plant.simulate(_trace_at_rate(trace, rate)), rate, objectives) for rate in rates]


def _find_highest_rate(
    plant: SimulatedDeployment, trace: TraceAtRate, objectives: Sequence[Objective], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return a result for each rate that was tried, in ascending order, each with the highest rate that meets the
    objectives (None if all or none of them do). The search ends at a rate for which there are no requests; `ended` is
    the reason."""
    tried: dict[float, dict[str, Any]] = {}

    def sustains(rate: float) -> bool:
        outcome = plant.simulate(_trace_at_rate(trace, rate), objectives)
        tried[rate] = _result_record(outcome, rate, objectives)
        print(f"{rate:.4g} requests/s: {'yes' if tried[rate]['meets'] else 'no'}", file=sys.stderr)
        return bool(tried[rate]["meets"])

    highest: float | None = None
    ended: str | None = None
    try:
        rate = highest_rate(sustains, (args.rate or [1.0])[0])
        highest = rate if 0 < rate < math.inf else None
    except StartupError as error:
        if not tried:
            raise
        ended = str(error)
    return [{**tried[rate], "highest_rate": highest, "ended": ended} for rate in sorted(tried)]


def _trace_at_rate(trace: TraceAtRate, rate: float | None) -> list[TraceRequest]:
    try:
        return trace(rate)
    except InputError as error:
        raise StartupError(str(error), "Use a shorter workload") from error


def _result_record(outcome: SimulationResult, rate: float | None, objectives: Sequence[Objective]) -> dict[str, Any]:
    """Return the record of a run in the document. Latencies are those of finished requests."""
    done = [Trace(one.arrival, one.prompt_len, one.token_times) for one in outcome.requests if one.done]
    run = outcome.totals
    counts = ("drafts", "draft_tokens", "accepted_tokens") if run.drafts else ()
    return {
        "rate": rate,
        "meets": meets_objectives(outcome, objectives) if objectives else None,
        "objectives": {goal.name: goal.limit * 1000 for goal in objectives},
        **totals(done, run.seconds), **latencies(done),
        "finished": run.finished, "steps": run.steps, "busy": run.busy_share, "mean_batch": run.mean_batch,
        "mean_running": run.mean_running, "preemptions": run.preemptions, "swapped_bytes": run.swapped_bytes,
        "sharing_saved": run.sharing_saved, "hit_rate": run.hits / run.queries if run.queries else None,
        "by_replica": list(outcome.replicas),
        **{name: getattr(run, name) for name in counts},
        "memory_bytes": mean_usage(outcome.timeline)._asdict(),
        "moments": [{"time": m.time, "running": m.running, "waiting": m.waiting, **m.usage._asdict()}
                    for m in outcome.timeline],
    }  # fmt: skip


def format_results(results: Sequence[dict[str, Any]], plant: SimulatedDeployment) -> str:
    """Return a table with a line per run, and a line about the calibration."""
    head = ("rate", "requests/s", "output tok/s", "TTFT p50 ms", "p99", "normalised ms", "p99", "mean running",
            "KV used", "reserved", "internal", "external", "cached", "free", "preempted", "meets")  # fmt: skip
    rows = []
    for run in results:
        memory = run["memory_bytes"]
        whole = sum(memory.values())
        rows.append((
            "as in the trace" if run["rate"] is None else short(run["rate"]), short(run["requests_per_s"]),
            short(run["output_tokens_per_s"]), _ms(run["ttft_s"], "p50"), _ms(run["ttft_s"], "p99"),
            _ms(run["normalised_s"], "mean"), _ms(run["normalised_s"], "p99"), short(run["mean_running"]),
            *(f"{memory[name] / whole:.1%}" for name in ("used", "reserved", "internal", "external", "cached", "free")),
            run["preemptions"],
            "-" if run["meets"] is None else "yes" if run["meets"] else "no" if run["finished"] else "no (given up)",
        ))  # fmt: skip
    error = plant.calibration.error
    accuracy = f"steps off by {error['median']:.1%} (median)" if error and "median" in error else "not measured"
    each = f"{plant.replicas} replicas (router: {plant.router}), each of " if plant.replicas > 1 else ""
    config = plant.config
    ranks = f"{config.tp} x {config.pp} of " if config.world_size > 1 else ""
    device = f"{each}{ranks}{plant.calibration.device}, {plant.kv_tokens:,} tokens of KV"
    lines = [table(head, rows), f"simulated: {device}; {accuracy}"]
    for run in results if plant.replicas > 1 else ():
        found = "" if run["hit_rate"] is None else f"{run['hit_rate']:.1%} of prompt tokens found in caches, "
        counts = sorted(run["by_replica"])
        lines.append(
            f"rate {'of the trace' if run['rate'] is None else short(run['rate'])}: {found}"
            f"{counts[0]:,} to {counts[-1]:,} requests a replica"
        )
    for run in results:
        if "drafts" in run:
            tokens = 1 + run["accepted_tokens"] / run["drafts"]
            lines.append(f"rate {short(run['rate'])}: {tokens:.2f} tokens a verification")
    if results and "highest_rate" in results[0]:
        highest = results[0]["highest_rate"]
        if highest is not None:
            lines.append(f"highest rate: {highest:.4g} requests/s")
        elif results[-1]["ended"] is not None:
            tried = f"{results[-1]['rate']:.4g} requests/s, the highest rate tried,"
            lines.append(f"{tried} meets the objectives; the next can't be: {results[-1]['ended']}")
        elif results[-1]["meets"]:
            lines.append("every rate meets the objectives: the workload is too short to tell")
        else:
            lines.append("no rate meets the objectives")
    return "\n".join(lines)


def _ms(spread: dict[str, float] | None, which: str) -> str:
    return short(spread[which] * 1000) if spread else "-"


CATEGORIES = [name for name in Usage._fields if name != "free"]


def plot_results(results: Sequence[dict[str, Any]]) -> Figure:
    """Return a figure with two panels: latency by rate (or, for one run, requests over time), and memory."""
    fig = figure(11, 4)
    left, right = fig.subplots(1, 2)
    if len(results) == 1:
        _plot_requests(left, results[0]["moments"])
        _plot_memory(right, [m["time"] for m in results[0]["moments"]], results[0]["moments"], "seconds")
    else:
        runs = [run for run in results if run["normalised_s"] is not None]
        for which, colour in zip(("mean", "p99"), COLOURS):
            values = [1000 * run["normalised_s"][which] for run in runs]
            left.plot([run["rate"] for run in runs], values, "o-", color=colour, label=which)
        if max(run["normalised_s"]["p99"] for run in runs) > 10 * min(run["normalised_s"]["mean"] for run in runs):
            left.set_yscale("log")
        left.set_xlabel("requests/s")
        left.set_ylabel("normalised latency, ms a token")
        left.set_title("Latency of requests that ended")
        left.legend()
        _plot_memory(right, [run["rate"] for run in runs], [run["memory_bytes"] for run in runs], "requests/s")
    return fig


def _plot_requests(axes: Axes, moments: Sequence[dict[str, Any]]) -> None:
    times = [moment["time"] for moment in moments]
    for name, colour in zip(("running", "waiting"), COLOURS):
        axes.plot(times, [moment[name] for moment in moments], color=colour, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("requests")
    axes.set_title("Requests over time")
    axes.legend()


def _plot_memory(axes: Axes, at: Sequence[float], usages: Sequence[dict[str, Any]], label: str) -> None:
    shares = [[100 * usage[name] / sum(usage[key] for key in Usage._fields) for usage in usages] for name in CATEGORIES]
    axes.stackplot(at, shares, labels=CATEGORIES, colors=COLOURS)
    axes.set_ylim(0, 100)
    axes.set_xlabel(label)
    axes.set_ylabel("% of the KV memory")
    axes.set_title("Memory by category")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncol=len(CATEGORIES), frameon=False)
