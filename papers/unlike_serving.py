"""Simulate serving models of unlike layers with different allocation rules, on the paper's devices and budgets (Jenga
§7).

The engine, the scheduler and the memory are the real ones. Steps cost what a calibration says, scaled by a device's
bandwidth and compute. So throughputs of other devices are extrapolations, and only rules on one device are compared.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from quire.bench.pictured import Eyes
from quire.bench.simulate import SimulatedDeployment, read_deployment
from quire.bench.workloads import Sketch, parse
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.runner import Runner
from quire.errors import QuireError
from quire.memory.policies import POLICIES
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.protocol.images import ImagePixels
from quire.protocol.kv_cache_config import KVCacheGroup
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import StepPlan, StepResult
from quire.sim.cost_model import calibration_names, load_calibration
from quire.sim.simulation import TraceRequest

WINDOWED, OTHER = "h200-ministral-8b", "h200-llama3-8b"
CALIBRATION = WINDOWED if WINDOWED in calibration_names() else OTHER
SEED = 0
OWN = 11  # the token of prompts whose content has no effect
DOCUMENT = 64  # first token id of documents; those of questions come after them
GB = 1e9
BESIDE = 1.5 * GB  # of a device, for activations and kernels
SHARE = 0.95  # usable share of a device

RULES: dict[str, dict[str, Any]] = {
    "jenga": {},
    "uniform": {"memory": "uniform"},
    "max": {"page_sizes": "max"},
    "gcd": {"page_sizes": "gcd"},
    "own": {"page_sizes": "own"},
    "paper": {"association": "paper"},
    "none": {"association": "none"},
}
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
    config.json."""

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

    @property
    def shape(self) -> dict[str, Any]:
        """Return the model's config.json, with `changes`."""
        return {**named_config(self.model), **dict(self.changes)}

    @property
    def spec(self) -> ModelSpec:
        return read_spec(self.shape)

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

    def config(self, rule: str, **more: Any) -> EngineConfig:
        """Return the engine config of a rule of RULES."""
        return EngineConfig.of(**{
            "model_config": self.model, "kv_gib": self.budget, "max_model_len": self.longest, "swap_gib": 0.0,
            "preemption": "recompute", "enable_prefix_caching": self.caching, "seed": SEED,
            "max_num_batched_tokens": self.chunk, "max_num_seqs": self.seqs, **RULES[rule], **more,
        })  # fmt: skip

    def plant(self, rule: str, **more: Any) -> SimulatedDeployment:
        """Return the same as a simulation. Weights of one byte are read twice as fast; compute costs the same."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.shape))
            made = read_deployment(self.config(rule, model_config=None, model=folder, **more), CALIBRATION)
        slower, longer = H200.bandwidth / self.device.bandwidth, H200.operations / self.device.operations
        c = made.calibration.coefficients_for(self.model)
        scaled = c._replace(
            weight_byte=c.weight_byte * slower / (2 if self.halved else 1), kv_byte=c.kv_byte * slower,
            copied_byte=c.copied_byte * slower, operation=c.operation * longer, attention=c.attention * longer,
        )  # fmt: skip
        return made._replace(cost=made.cost._replace(coefficients=scaled))

    def sketches(self) -> list[Sketch]:
        """Return the requests, cut to the model's context: a prompt that is too long loses its document's end."""
        most, eyes = min(self.spec.max_len, self.longest or self.spec.max_len), self.eyes
        found = []
        for one in parse(self.workload).sketches(SEED):
            length = one.prompt_len if eyes is None else eyes.placed(one)[0]
            over = max(length + one.output_len - most, 0)
            kept = max(one.prefix_len - over, 0)
            found.append(one._replace(prompt_len=one.prompt_len - over, prefix_len=kept))
        return found


def prompts(sketches: Sequence[Sketch]) -> list[list[int]]:
    """Return prompts whose first tokens identify their documents, and whose last ones the questions."""
    documents = {name: DOCUMENT + i for i, name in enumerate(dict.fromkeys(one.prefix_id for one in sketches))}
    behind = DOCUMENT + len(documents)
    found = []
    for i, one in enumerate(sketches):
        own = one.prompt_len - one.prefix_len
        found.append([documents[one.prefix_id]] * one.prefix_len + [behind + i] * min(1, own) + [OWN] * (own - 1))
    return found


def exactly(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def burst(sketches: Sequence[Sketch], eyes: Eyes | None = None, pixels: bool = False) -> list[TraceRequest]:
    """Return all requests at time 0. `eyes` place images where other models have tokens.

    `pixels`: include them, for a real runner."""
    found = []
    for prompt, one in zip(prompts(sketches), sketches):
        asked = TraceRequest(0.0, prompt, exactly(one.output_len))
        if eyes is not None and one.pictures:
            length, media = eyes.placed(one)
            seen = eyes.pixels(one) if pixels else ()
            asked = asked._replace(prompt=[*prompt[:1], *[OWN] * (length - 1)], media=media, pixels=seen)
        found.append(asked)
    return found


class Step(NamedTuple):
    """A planned step: its decode rows and its prompt tokens."""

    decoding: int
    prompt: int


class Counted:
    """A runner that counts the rows and tokens of its steps. It replaces the engine's own."""

    def __init__(self, engine: Engine) -> None:
        self.runner, self.depth = engine.runner, engine.depth
        self.steps: list[Step] = []
        engine.runner = cast(Runner, self)  # a step calls no other methods

    def submit(self, plan: StepPlan) -> Any:
        counts = [len(row.tokens) for row in plan.slices]
        self.steps.append(Step(counts.count(1), sum(count for count in counts if count > 1)))
        return self.runner.submit(plan)

    def collect(self, ticket: Any) -> StepResult:
        return self.runner.collect(ticket)

    def add_image(self, pixels: ImagePixels) -> None:
        self.runner.add_image(pixels)

    def remove_image(self, key: bytes) -> None:
        self.runner.remove_image(key)

    def close(self) -> None:
        self.runner.close()


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

    `decode_steps` are steps with a decode row, `batch` their mean number of such rows. `hit_rate` is a share of prompt
    tokens. `normalised` is the mean of latency / output length, in seconds a token; `latency` is the mean latency.
    `encoder_runs` counts whole images encoded, `encoder_parts` their parts. `steps` and `memory` are samples."""

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
    steps: list[Step]
    memory: list[Memory]

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Return the throughput of prompts and outputs."""
        return self.tokens / self.seconds

    def facts(self) -> dict[str, Any]:
        """Return the results as JSON, without the samples."""
        return {name: value for name, value in self._asdict().items() if name not in ("steps", "memory")}


def needed(engine: Engine, spec: ModelSpec, itemsize: int, now: float) -> Memory:
    """Return the current memory use.

    A layer needs the units of a sequence that its tokens in flight and later ones read, whatever the memory keeps. Each
    sequence counts alone. Image embeddings do not count as needed."""
    scheduler = engine.scheduler
    full = window = 0
    kinds = by_reach(spec, itemsize)
    for _, seq in scheduler.by_slot.values():
        window += spec.state_bytes
        for policy, size in kinds:
            reads = policy.reads(seq, seq.computed, max(seq.planned, seq.computed + 1))
            count = max(seq.planned - reads.start, 0) * size
            if policy.group.kind == "full":
                full += count
            else:
                window += count
    usage = scheduler.memory.account().usage
    allocated = usage.total - usage.free - usage.cached
    return Memory(now, full, window, max(allocated - full - window, 0), usage.free + usage.cached,
                  len(scheduler.running))  # fmt: skip


def by_reach(spec: ModelSpec, itemsize: int) -> list[tuple[Any, int]]:
    """Return, for each kind of layers, its policy with pages of one token, and its total bytes per token."""
    found: dict[tuple[int | None, ...], list[LayerSpec]] = {}
    for layer in spec.layers:
        if layer.kv_source_layer is None and not layer.state_tensors and not layer.is_cross_attention:
            found.setdefault((layer.window, layer.chunk), []).append(layer)
    kinds = []
    for (window, _), layers in found.items():
        size = sum(layer.token_bytes(itemsize) for layer in layers)
        kind = "full" if window is None else "window"
        kinds.append(
            (POLICIES[kind](KVCacheGroup((), size, size, 1, range(1), run_tokens=1, window=window, kind=kind)), size)
        )
    return kinds


def serve(
    engine: Engine, trace: Sequence[TraceRequest], spec: ModelSpec, sampled: float | None = None, itemsize: int = 2,
    concurrency: int | None = None, each: Callable[[Engine], None] = lambda engine: None,
) -> Ran:  # fmt: skip
    """Serve all requests of a trace, at most `concurrency` at a time; all are available from the start.

    Times are by the engine's clock. The memory is sampled every `sampled` seconds; `each` is called after each step."""
    counted, clock = Counted(engine), engine.clock
    before = _counts(engine)
    began, look = clock(), clock()
    memory: list[Memory] = []
    came: list[float] = []
    latencies: list[tuple[float, int]] = []  # of finished requests, with their output lengths
    while len(latencies) < len(trace):
        while len(came) < len(trace) and (concurrency is None or len(came) - len(latencies) < concurrency):
            one = trace[len(came)]
            engine.add(str(len(came)), one.prompt, one.params, images=one.media, pixels=one.encoder_pixels)
            came.append(clock())
        for output in engine.step():
            if output.finish_reason == "error":
                raise QuireError(f"request {output.request_id} failed: {output.stop_reason}")
            if output.done:
                i = int(output.request_id)
                latencies.append((clock() - came[i], trace[i].params.max_tokens or 1))
        each(engine)
        if sampled is not None and clock() >= look:
            memory.append(needed(engine, spec, itemsize, clock() - began))
            look = clock() + sampled
    seconds = clock() - began
    engine.runner = counted.runner
    counts = [b - a for a, b in zip(before, _counts(engine))]
    return _ran(trace, seconds, counts, latencies, counted.steps, memory)


def _counts(engine: Engine) -> list[int]:
    sharing = engine.scheduler.memory.account().sharing
    encoded = sharing.encoder_runs, sharing.encoder_parts
    return [sharing.hits, sharing.queries, engine.scheduler.num_preemptions, *encoded]


def _ran(
    trace: Sequence[TraceRequest],
    seconds: float,
    counts: Sequence[int],
    latencies: Sequence[tuple[float, int]],
    steps: list[Step],
    memory: list[Memory],
) -> Ran:
    hits, queries, preemptions, encoder_runs, encoder_parts = counts
    output = sum(one.params.max_tokens or 0 for one in trace)
    decoding = [step.decoding for step in steps if step.decoding]
    return Ran(
        seconds, len(trace), output + sum(len(one.prompt) for one in trace), output, len(decoding),
        sum(decoding) / max(len(decoding), 1), hits / queries if queries else 0.0, preemptions,
        sum(one / length for one, length in latencies) / max(len(latencies), 1),
        sum(one for one, _ in latencies) / max(len(latencies), 1), encoder_runs, encoder_parts,
        steps, memory,
    )  # fmt: skip


def simulated(case: Case, rule: str, sampled: float | None = None, **more: Any) -> Ran:
    """Simulate a case's requests, all at once, by a rule."""
    made = case.plant(rule, **more).simulation()
    return serve(made.engine, burst(case.sketches(), case.eyes), case.spec, sampled)


def assumed() -> str:
    """Return the assumptions of the simulations."""
    found = load_calibration(CALIBRATION)
    error = "" if found.error is None else f", median error on steps that weren't fitted {found.error['median']:.1%}"
    far = "" if CALIBRATION == WINDOWED else ", a model without windows: theirs are extrapolated"
    return f"Steps cost what the calibration {CALIBRATION} says ({found.model} on {found.device}{error}){far}."
