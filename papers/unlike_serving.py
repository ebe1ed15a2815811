"""Simulate serving models of unlike layers by several allocation rules, on the devices and budgets of Jenga §7.

The engine, the scheduler and the memory are the real ones. Steps cost what a calibration says, scaled by a device's
bandwidth and compute. So throughputs of other devices are extrapolations, and only rules on one device are compared.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

from papers.serving import in_parallel, shares
from quire.bench.pictured import Eyes
from quire.bench.simulate import SimulatedDeployment, read_deployment
from quire.bench.workloads import RequestSpec, parse
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.runner import Runner
from quire.errors import QuireError, StartupError
from quire.memory.answers import Usage
from quire.memory.paged import PagedMemory
from quire.memory.policies import POLICIES
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.models.quantization import FP8_ON_LOAD
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan
from quire.sim.cost_model import calibration_names, load_calibration
from quire.sim.simulation import TraceRequest
from quire.weights.fp8 import saved_bytes

WINDOWED, OTHER = "h200-ministral-8b", "h200-llama3-8b"
CALIBRATION = WINDOWED if WINDOWED in calibration_names() else OTHER
SEED = 0
OWN = 11  # the token of prompts whose content has no effect
DOCUMENT = 64  # first token id of documents; those of questions come after them
GB = 1e9
BESIDE = 1.5 * GB  # of a device, for activations and kernels
SHARE = 0.95  # usable share of a device
DRAFTS, ACCEPTANCE = 3, 0.7  # of a draft model

RULES: dict[str, dict[str, Any]] = {
    "jenga": {}, "uniform": {"memory": "uniform"}, "max": {"page_sizes": "max"}, "gcd": {"page_sizes": "gcd"},
    "own": {"page_sizes": "own"}, "paper": {"association": "paper"}, "none": {"association": "none"},
}  # fmt: skip
LABELS = {
    "jenga": "LCM pages, bulk (ours)", "uniform": "uniform (vLLM 0.6.3)", "max": "MAX pages", "gcd": "GCD pages",
    "own": "a static split", "paper": "LCM pages, association of the paper", "none": "LCM pages, no association",
}  # fmt: skip


class Device(NamedTuple):
    """A device: `memory` in bytes, bandwidth in bytes a second, bfloat16 operations a second, from the vendor's
    data."""

    name: str
    memory: float
    bandwidth: float
    operations: float


H200 = Device("H200", 141 * GB, 4.8e12, 989e12)
H100 = Device("H100", 80 * GB, 3.35e12, 989e12)
L4 = Device("L4", 24 * GB, 0.3e12, 121e12)


class Case(NamedTuple):
    """A model on a device and the requests of a workload, all at once.

    `halved`: weights take one byte (FP8 in the paper's Table 1). `kv_gib` replaces the memory left over on the device,
    `longest` the model's context, `chunk` and `seqs` the default tokens and sequences a step. `changes` are to its
    config.json. `draft` is a draft model, which proposes DRAFTS tokens in every step, each accepted with a probability
    of ACCEPTANCE if those before it are. `seed` determines the requests."""

    model: str
    device: Device
    workload: str
    halved: bool = False
    kv_gib: float | None = None
    caching: bool = False
    longest: int | None = None
    chunk: int | None = None
    seqs: int | None = None
    changes: tuple[tuple[str, Any], ...] = ()
    draft: str | None = None
    seed: int = SEED

    @property
    def shape(self) -> dict[str, Any]:
        """Return the model's config.json, with `changes`."""
        return {**named_config(self.model), **dict(self.changes)}

    @property
    def spec(self) -> ModelSpec:
        """Return the model's spec, with the layers and parameters of its draft model."""
        spec = read_spec(self.shape)
        return spec if self.draft is None else spec.with_draft(read_spec(named_config(self.draft)))

    @property
    def budget(self) -> float:
        """Return GiB for KV: SHARE of the device less BESIDE and the weights (two bytes each in the vision encoder)."""
        if self.kv_gib is not None:
            return self.kv_gib
        eyes = self.spec.vision.parameters if self.spec.vision is not None else 0
        weights = self.spec.parameters * (1 if self.halved else 2) + 2 * eyes
        return (SHARE * self.device.memory - weights - BESIDE) / 2**30

    @property
    def eyes(self) -> Eyes | None:
        """Return the image settings, if the model takes images."""
        return Eyes.of(self.shape, self.spec)

    @property
    def label(self) -> str:
        return f"{self.model}{'*' if self.halved else ''}, {self.device.name}"

    def on(self, device: Device) -> Case:
        """Return the case on another device, with the KV memory that it has on its own."""
        return self._replace(device=device, kv_gib=self.budget)

    def config(self, rule: str, **more: Any) -> EngineConfig:
        """Return the engine config of a rule of RULES."""
        drafting = {
            "speculative_model": self.draft, "adaptive_speculation": False, "num_speculative_tokens": DRAFTS,
            "synthetic_acceptance": ACCEPTANCE,
        }  # fmt: skip
        return EngineConfig.of(**{
            **({} if self.draft is None else drafting),
            "model_config": self.model, "kv_gib": self.budget, "max_model_len": self.longest, "swap_gib": 0.0,
            "preemption": "recompute", "enable_prefix_caching": self.caching, "seed": SEED,
            "max_num_batched_tokens": self.chunk, "max_num_seqs": self.seqs, **RULES[rule], **more,
        })  # fmt: skip

    def plant(self, rule: str, **more: Any) -> SimulatedDeployment:
        """Return the same as a simulation. Weights of one byte are read twice as fast; compute costs the same."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.shape))
            if self.draft is not None:
                more |= {"speculative_model": f"{folder}/draft"}
                Path(folder, "draft").mkdir()
                Path(folder, "draft", "config.json").write_text(json.dumps(named_config(self.draft)))
            made = read_deployment(self.config(rule, model_config=None, model=folder, **more), CALIBRATION)
        slower, longer = H200.bandwidth / self.device.bandwidth, H200.operations / self.device.operations
        c = made.calibration.coefficients_for(self.model)
        scaled = c._replace(
            weight_byte=c.weight_byte * slower / (2 if self.halved else 1), kv_byte=c.kv_byte * slower,
            copied_byte=c.copied_byte * slower, operation=c.operation * longer, attention=c.attention * longer,
        )  # fmt: skip
        return made._replace(cost=made.cost._replace(coefficients=scaled))

    def specs(self) -> list[RequestSpec]:
        """Return the requests, cut to the model's context: a prompt that is too long loses its document's end."""
        most, eyes = min(self.spec.max_len, self.longest or self.spec.max_len), self.eyes
        found = []
        for one in parse(self.workload).specs(self.seed):
            length = one.prompt_len if eyes is None else eyes.placed(one)[0]
            over = max(length + one.output_len - most, 0)
            kept = max(one.prefix_len - over, 0)
            found.append(one._replace(prompt_len=one.prompt_len - over, prefix_len=kept))
        return found


def prompts(specs: Sequence[RequestSpec]) -> list[list[int]]:
    """Return prompts whose first tokens identify their documents, and whose last ones the questions."""
    documents = {name: DOCUMENT + i for i, name in enumerate(dict.fromkeys(one.prefix_id for one in specs))}
    behind = DOCUMENT + len(documents)
    found = []
    for i, one in enumerate(specs):
        own = one.prompt_len - one.prefix_len
        found.append([documents[one.prefix_id]] * one.prefix_len + [behind + i] * min(1, own) + [OWN] * (own - 1))
    return found


def exactly(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def burst(specs: Sequence[RequestSpec], eyes: Eyes | None = None, pixels: bool = False) -> list[TraceRequest]:
    """Return all requests at time 0. `eyes` place images where other models have tokens.

    `pixels`: include them, for a real runner."""
    found = []
    for prompt, one in zip(prompts(specs), specs):
        asked = TraceRequest(0.0, prompt, exactly(one.output_len))
        if eyes is not None and one.pictures:
            length, media = eyes.placed(one)
            seen = eyes.pixels(one) if pixels else ()
            asked = asked._replace(prompt=[*prompt[:1], *[OWN] * (length - 1)], media=media, pixels=seen)
        found.append(asked)
    return found


class Counted:
    """A runner in place of the engine's own, which counts the rows of each step that decode."""

    def __init__(self, engine: Engine) -> None:
        self.runner = engine.runner
        self.batches: list[int] = []  # of steps with such rows
        engine.runner = cast(Runner, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, plan: StepPlan) -> Any:
        if decoding := sum(len(row.tokens) == 1 for row in plan.slices):
            self.batches.append(decoding)
        return self.runner.submit(plan)


class Memory(NamedTuple):
    """Bytes of the KV memory at a time, and the number of running requests.

    `full` and `window` bytes are read by later tokens, in full-attention layers and in others; `wasted` ones are
    allocated but not read."""

    time: float
    full: int
    window: int
    wasted: int
    free: int
    running: int

    @property
    def allocated(self) -> int:
        return self.full + self.window + self.wasted


class Ran(NamedTuple):
    """The results of a run.

    `batch` is the mean number of rows of the `decode_steps`, steps with a row that decodes; `hit_rate` a share of
    prompt tokens; `normalised` the mean of latency / output length, in seconds a token; `latency` the mean latency.
    `tokens` are those of prompts and outputs. `encoder_runs` counts whole images encoded, `encoder_parts` their parts.
    `batches` are of the decode steps; `memory` are samples."""

    seconds: float
    requests: int
    tokens: int
    output: int
    decode_steps: int
    batch: float
    hit_rate: float
    preemptions: int
    normalised: float
    latency: float
    encoder_runs: int
    encoder_parts: int
    requests_per_s: float
    batches: list[int]
    memory: list[Memory]

    def facts(self) -> dict[str, Any]:
        """Return the results without `batches` and `memory`."""
        return dict(list(self._asdict().items())[:-2])


def needed(engine: Engine, spec: ModelSpec, now: float) -> Memory:
    """Return the current memory use.

    A layer needs the units of a sequence that its tokens in flight and later ones read, whatever the memory keeps. Each
    sequence counts alone. Image embeddings do not count as needed."""
    bytes = {"full": 0, "window": 0}
    kinds = by_reach(spec)
    for _, seq in engine.scheduler.by_slot.values():
        bytes["window"] += spec.state_bytes
        for policy, size in kinds:
            reads = policy.reads(seq, seq.computed, max(seq.planned, seq.computed + 1))
            bytes[policy.group.kind] += max(seq.planned - reads.start, 0) * size
    usage = engine.scheduler.memory.account().usage
    free = usage.free + usage.cached
    wasted = max(usage.total - free - sum(bytes.values()), 0)
    return Memory(now, bytes["full"], bytes["window"], wasted, free, len(engine.scheduler.running))


def by_reach(spec: ModelSpec) -> list[tuple[Any, int]]:
    """Return, for each kind of layers, its policy with pages of one token, and its total bytes per token."""
    found: dict[tuple[int | None, ...], list[LayerSpec]] = {}
    for layer in spec.layers:
        if layer.kv_source_layer is None and not layer.state_tensors and not layer.is_cross_attention:
            found.setdefault((layer.window, layer.chunk), []).append(layer)
    kinds = []
    for (window, _), layers in found.items():
        size = sum(layer.token_bytes(2) for layer in layers)
        kind = "full" if window is None else "window"
        kinds.append(
            (POLICIES[kind](KVCacheGroup((), size, size, 1, range(1), run_tokens=1, window=window, kind=kind)), size)
        )
    return kinds


def serve(
    engine: Engine, trace: Sequence[TraceRequest], spec: ModelSpec, sampled: float | None = None,
    concurrency: int | None = None, each: Callable[[Engine], None] = lambda engine: None,
) -> Ran:  # fmt: skip
    """Serve all requests of a trace, at most `concurrency` at a time; all are available from the start.

    Times are by the engine's clock. The memory is sampled every `sampled` seconds; `each` is called after each step."""
    before, counted, clock = _counts(engine), Counted(engine), engine.clock
    began, look = clock(), clock()
    memory: list[Memory] = []
    came: list[float] = []
    latencies: dict[int, float] = {}
    while len(latencies) < len(trace):
        while len(came) < len(trace) and (concurrency is None or len(came) - len(latencies) < concurrency):
            one = trace[len(came)]
            engine.add(str(len(came)), one.prompt, one.params, images=one.media, pixels=one.encoder_pixels)
            came.append(clock())
        for output in engine.step():
            if output.finish_reason == "error":
                raise QuireError(f"request {output.request_id} failed: {output.stop_reason}")
            if output.done:
                latencies[int(output.request_id)] = clock() - came[int(output.request_id)]
        each(engine)
        if sampled is not None and clock() >= look:
            memory.append(needed(engine, spec, clock() - began))
            look = clock() + sampled
    seconds, engine.runner = clock() - began, counted.runner
    hits, queries, preemptions, runs, parts = (b - a for a, b in zip(before, _counts(engine)))
    lengths = [one.params.max_tokens or 1 for one in trace]
    return Ran(
        seconds, len(trace), sum(lengths) + sum(len(one.prompt) for one in trace), sum(lengths), len(counted.batches),
        fmean(counted.batches or [0]), hits / queries if queries else 0.0, preemptions,
        fmean(took / lengths[i] for i, took in latencies.items()), fmean(latencies.values()), runs, parts,
        len(trace) / seconds, counted.batches, memory,
    )  # fmt: skip


def _counts(engine: Engine) -> list[int]:
    sharing = engine.scheduler.memory.account().sharing
    encoded = sharing.encoder_runs, sharing.encoder_parts
    return [sharing.hits, sharing.queries, engine.scheduler.num_preemptions, *encoded]


def simulated(case: Case, rule: str, sampled: float | None = None, **more: Any) -> Ran:
    """Simulate a case's requests, all at once, by a rule."""
    made = case.plant(rule, **more).simulation()
    return serve(made.engine, burst(case.specs(), case.eyes), case.spec, sampled)


def assumed() -> str:
    """Return the assumptions of the simulations."""
    found = load_calibration(CALIBRATION)
    error = "" if found.error is None else f", median error on steps that weren't fitted {found.error['median']:.1%}"
    far = "" if CALIBRATION == WINDOWED else ", a model without windows: theirs are extrapolated"
    return f"Steps cost what the calibration {CALIBRATION} says ({found.model} on {found.device}{error}){far}."


# Runners


class Run(NamedTuple):
    """A simulation of a case by a rule of RULES with further `settings` of the engine, at most `concurrency` requests
    at a time. `names` are fields of its point.

    Requests that do not fit under one of the rules `fitting` are left out. `page_pool` are attributes of the page pool.
    `sampled`: seconds between samples of the memory. `series`: those of "batches" and "memory" that the point has.
    `peaks`: it has the `most` bytes of allocated KV memory after a step, and the most `beyond` the pages of computed
    tokens."""

    names: dict[str, Any]
    case: Case
    rule: str = "jenga"
    settings: Mapping[str, Any] | None = None
    concurrency: int | None = None
    fitting: tuple[str, ...] = ()
    page_pool: Mapping[str, Any] | None = None
    sampled: float | None = None
    series: tuple[str, ...] = ()
    peaks: bool = False


def simulations(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a point for each run: its names, its results (see Ran), the KV memory in GiB, the requests left out, the
    prompt chunks that contain a part of an image, the wasted share of allocated memory if it is sampled, and with a
    draft model the number of verifications (`drafts`), of the tokens that they verified, and of those accepted."""
    return in_parallel(_point, [(run,) for run in runs])


def _point(run: Run) -> dict[str, Any]:
    case = run.case
    made = case.plant(run.rule, **(run.settings or {})).simulation()
    for name, setting in (run.page_pool or {}).items():
        setattr(cast(PagedMemory, made.engine.scheduler.memory).page_pool, name, setting)
    every = burst(case.specs(), case.eyes)
    longest = min((case.plant(rule).max_len for rule in run.fitting), default=math.inf)
    trace = [one for one in every if _length(one) <= longest]
    sizes: list[tuple[int, int]] = []

    def watch(engine: Engine) -> None:
        if run.peaks:
            sizes.append(_sizes(engine))

    ran = serve(made.engine, trace, made.spec, run.sampled, run.concurrency, watch)
    chunks = [
        (image.end - 1) // case.chunk - image.start // case.chunk + 1
        for one in trace for image in one.media if case.chunk
    ]  # fmt: skip
    point = {**run.names, "label": case.label, "kv_gib": case.budget, **ran.facts(),
             "left_out": len(every) - len(trace), "image_chunks": sum(chunks),
             **{name: getattr(ran, name) for name in run.series}}  # fmt: skip
    if case.draft is not None:
        stats = made.engine.stats
        point |= {"drafts": stats.num_drafts, "draft_tokens": stats.draft_tokens, "accepted": stats.accepted_tokens}
    if run.sampled is not None:
        point["wasted"] = sum(one.wasted for one in ran.memory) / sum(one.allocated for one in ran.memory)
    if run.peaks:
        point |= {"most": max(most for most, _ in sizes), "beyond": max(0, *(beyond for _, beyond in sizes))}
    return point


def _length(asked: TraceRequest) -> int:
    return len(asked.prompt) + (asked.params.max_tokens or 0)


def _sizes(engine: Engine) -> tuple[int, int]:
    """Return the bytes of allocated KV memory, and those beyond the pages of computed tokens."""
    memory = engine.scheduler.memory
    usage, seqs = memory.account().usage, [seq for _, seq in engine.scheduler.by_slot.values()]
    bytes = usage.total - usage.free - usage.cached
    kept = [group for group in memory.kv_config.groups if group.kind != "vision"]
    return bytes, bytes - sum(group.num_pages(seq.planned) * group.page_bytes for group in kept for seq in seqs)


def budgets(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Plan each case into its device's budget. A point has the bytes of `weights` (in FP8 if halved), those `left` for
    KV, and if any are: the tokens that they hold in every layer, the bytes of a large page, and whether the longest
    request of the workload fits, by two-level (`fits`) and by uniform pages."""
    return [_budget(case) for case in cases]


def _budget(case: Case) -> dict[str, Any]:
    spec = case.spec
    eyes = spec.vision.parameters if spec.vision is not None else 0
    weights = 2 * (spec.parameters + eyes) - (saved_bytes(case.shape, FP8_ON_LOAD, 2) if case.halved else 0)
    left = int(SHARE * case.device.memory - weights - BESIDE)
    point = {"label": case.label, "workload": case.workload, "weights": weights, "left": left, "tokens": 0, "large": 0,
             "fits": False, "uniform": False}  # fmt: skip
    longest = max(burst(case.specs(), case.eyes), key=_length)
    for rule, name in (("jenga", "fits"), ("uniform", "uniform")) if left > 0 else ():
        try:
            plant = case._replace(kv_gib=left / 2**30).plant(rule)
            memory = plant.simulation().engine.scheduler.memory
        except StartupError:  # no request fits
            continue
        point[name] = memory.fits([_length(longest)], len(longest.prompt), longest.media)
        if rule == "jenga":
            point.update(tokens=plant.kv_tokens, large=memory.kv_config.large_bytes)
    return point


def longest_requests(case: Case, rules: Sequence[str], output: int) -> list[dict[str, Any]]:
    """Return the longest request in tokens by each rule, and the output tokens of such a request when it is served."""
    points = []
    for rule in rules:
        plant = case.plant(rule)
        trace = [TraceRequest(0.0, [OWN] * (plant.max_len - output), exactly(output))]
        served = sum(serve(plant.simulation().engine, trace, case.spec).batches) + 1
        points.append({"rule": rule, "kv_gib": case.budget, "longest": plant.max_len, "context": case.spec.max_len,
                       "served": served})  # fmt: skip
    return points


def memories(names: Sequence[str], case: Case) -> list[dict[str, Any]]:
    """Serve a case's requests, which come at once, in each memory. What running or later tokens read is used; the rest
    of the allocated memory is internal waste: KV outside a layer's window too."""
    points = []
    for memory in names:
        print(f"{memory}, windows, simulated", file=sys.stderr)
        run = simulated(case, "jenga", sampled=0.5, memory=memory)
        full, window, wasted, free = (
            sum(getattr(moment, kind) for moment in run.memory) // len(run.memory)
            for kind in ("full", "window", "wasted", "free")
        )
        points.append({
            "run": "windows", "memory": memory, **shares(Usage(full + window, 0, 0, wasted, 0, free)),
            "running": run.batch, "latency": run.normalised, "requests_per_s": run.requests_per_s,
            "preemptions": run.preemptions,
        })  # fmt: skip
    return points
