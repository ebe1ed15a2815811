"""Run and time a grid of steps on an engine, for `quire bench calibrate`: decoding sequences, prompts, both together,
and page copies and swaps.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple, cast

from quire.bench.calibration import TOKEN, host_tokens, swap_seconds
from quire.bench.contexts import stop
from quire.bench.shapes import clock_of, local_runner, wait_for_device
from quire.bench.workloads import Job
from quire.core.engine import Engine
from quire.core.runner import Runner
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import PageCopy, StepPlan, StepResult
from quire.sim.cost_model import Coefficients, CostModel, ModelShape, StepWork, step_work

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 128, 256)
CONTEXTS = (16, 64, 256, 512, 1024, 1900, 4096)
PROMPTS = (1, 2, 8, 32)
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192)
DECODERS = (4, 16, 32)  # rows that decode while a prompt is computed
CHUNKS = 16  # chunks of a long prompt that are sampled
STEPS, WARM, REPEATS = 9, 2, 3
SWAPS = (64, 256, 1024, 4096)
COPIED = 64  # pages
MOST_TOKENS = 2**16  # tokens of all contexts of one step
DECODED = 64  # tokens of the sequences that decode while prompts are computed
MOST_ENCODER, HALVINGS = 64.0, 30  # upper limit of the coefficient, and steps of its bisection
NOTHING = Coefficients(*(0.0,) * 10)


class Sample(NamedTuple):
    """A measured step: its kind, its work, and the seconds of the device and of the host."""

    what: str
    work: StepWork
    seconds: float
    host: float = 0.0


class Timed:
    """A runner that records what each step did and how long the device took. On a GPU the times are those of events:
    while a step is launched kernel by kernel the previous one still runs, and the host's clock would add the launches
    to that one."""

    def __init__(self, engine: Engine, shape: ModelShape) -> None:
        self.engine, self.runner, self.shape = engine, engine.runner, shape
        self.depth = engine.depth
        geometry = engine.scheduler.memory.kv_config
        self.page_bytes = tuple(group.page_bytes for group in geometry.groups)
        self.began: list[float] = []
        self.marks: list[tuple[Any, Any]] = []  # before and after each step in flight, on the GPU's stream
        self.free = self.inside = 0.0
        self.samples: list[Sample] = []
        self.media: dict[int, tuple[ImageItem, ...]] = {}  # of a slot's latest sequence
        self.what = ""
        self.clock = clock_of(engine.runner)
        engine.runner = cast(Runner, self)  # without `bind`, which only the engine's start calls

    def submit(self, plan: StepPlan) -> tuple[StepPlan, Any]:
        began = self.clock()
        self.began.append(began)
        self.media.update((birth.slot, birth.images) for birth in plan.new_slots)
        before = mark(self.runner)
        ticket = self.runner.submit(plan)
        self.marks.append((before, mark(self.runner)))
        if self.depth == 1:  # the host waits for what it submitted; otherwise it does so while the device works
            self.inside += self.clock() - began
        return plan, ticket

    def collect(self, ticket: tuple[StepPlan, Any]) -> StepResult:
        waited = self.clock()
        result = self.runner.collect(ticket[1])
        before, behind = self.marks.pop(0)
        if behind is not None:
            behind.synchronize()
        now = self.clock()
        self.inside += now - waited
        seconds = now - max(self.began.pop(0), self.free)
        if behind is not None:
            seconds = before.elapsed_time(behind) / 1000
        self.free = now
        self.samples.append(Sample(self.what, self._work(ticket[0]), seconds))
        return result

    def _work(self, plan: StepPlan) -> StepWork:
        return step_work(plan, self.shape, self.page_bytes, self.media)

    def add_image(self, pixels: ImagePixels) -> None:
        self.runner.add_image(pixels)

    def remove_image(self, key: bytes) -> None:
        self.runner.remove_image(key)

    def close(self) -> None:
        self.runner.close()

    def step(self) -> Sample:
        """Run one step of the engine and return its sample."""
        began, before = self.clock(), self.inside
        self.engine.step()
        host = max(self.clock() - began - (self.inside - before), 1e-9)
        return self.samples[-1]._replace(host=host)


def grid(timed: Timed) -> list[Sample]:
    """Measure steps of all kinds that the engine's memory and token budget permit."""
    samples: list[Sample] = []
    beside = _beside(timed)
    for context in CONTEXTS:
        for rows in ROWS:
            if _room(timed, rows, context):
                samples.append(decode_step(timed, rows, context))
    for length in LENGTHS:
        for count in PROMPTS:
            if count * length + beside <= timed.engine.scheduler.token_budget and _room(timed, count + beside, length):
                samples.append(prompt_step(timed, count, length))
        for rows in DECODERS:
            if rows + length <= timed.engine.scheduler.token_budget and _room(timed, rows + 1, length):
                samples.append(prompt_step(timed, 1, length, rows))
        print(f"{len(samples)} steps", file=sys.stderr)
    return samples + long_prompt(timed)


def _room(timed: Timed, count: int, length: int) -> bool:
    engine = timed.engine
    longest = length + 4 * (STEPS + WARM + timed.depth)
    fits = longest < engine.limits.max_len and engine.scheduler.memory.fits([longest] * count)
    return fits and count <= engine.scheduler.max_seqs and count * length <= MOST_TOKENS


def decode_step(timed: Timed, rows: int, context: int) -> Sample:
    """Return the fastest of several steps of `rows` sequences of about `context` tokens."""
    timed.what = "decode"
    _start(timed, rows, context)
    steps = [timed.step() for _ in range(WARM + STEPS)][WARM:]
    stop(timed.engine)
    return _fastest(steps)


def prompt_step(timed: Timed, count: int, length: int, rows: int = 0) -> Sample:
    """Return the fastest of several steps that compute `count` prompts while `rows` sequences decode. If steps overlap,
    at least one sequence decodes: in service, too, a step is launched while another one runs. Launches that delay the
    device are part of its time, so they are not counted as the host's."""
    timed.what = "prompts and decode" if rows else "prompts"
    beside = _beside(timed)
    if rows or beside:
        _start(timed, max(rows, beside), DECODED)
    steps = []
    for i in range(REPEATS):
        for j in range(count):
            timed.engine.add(f"prompt-{i}-{j}", [TOKEN] * length, _params(1))
        while not (sample := timed.step()).work.attention:
            pass
        steps.append(sample._replace(host=0.0) if beside else sample)
    stop(timed.engine)
    return _fastest(steps)


def long_prompt(timed: Timed) -> list[Sample]:
    """Measure the steps of whole chunks of the longest prompt: their attention is mostly to tokens of earlier chunks.
    Empty if the prompt has fewer than two chunks."""
    engine, beside = timed.engine, _beside(timed)
    budget, most = engine.scheduler.token_budget - beside, engine.limits.max_len - 1
    others = [DECODED + 4 * (STEPS + WARM)] * beside
    fits = engine.scheduler.memory.fits
    chunks = next((n for n in range(most // budget, 1, -1) if fits([n * budget + 1, *others])), 0)
    if not chunks:
        return []
    timed.what = "chunks of a long prompt"
    if beside:
        _start(timed, beside, DECODED)
    engine.add("prompt", [TOKEN] * (chunks * budget), _params(1))
    found: list[Sample] = []
    while len(found) < chunks and engine.has_unfinished_requests:
        sample = timed.step()
        if sample.work.attention:
            found.append(sample._replace(host=0.0) if beside else sample)
    stop(timed.engine)
    return found[1 :: max(chunks // CHUNKS, 1)]


def picture_steps(timed: Timed, jobs: Sequence[Job]) -> list[Sample]:
    """Return the steps that encode the images of requests that arrive one after another, without the first, which
    compiles."""
    timed.what, beside, first = "pictures", _beside(timed), 0
    if beside:
        _start(timed, beside, DECODED)
    for i, job in enumerate(jobs):
        first = first if i != 1 else len(timed.samples)
        timed.engine.add(f"picture-{i}", job.prompt, _params(1), images=job.media, pixels=job.pixels)
        while f"picture-{i}" in timed.engine.requests:
            timed.step()
    stop(timed.engine)
    return [sample for sample in timed.samples[first:] if sample.work.encoded]


def encoder(cost: CostModel, samples: Sequence[Sample]) -> float:
    """Return the coefficient `encoder`: the median ratio of the time of steps that encode images to the prediction of
    `cost`."""
    return median(_encoder(cost, sample) for sample in samples)


def _encoder(cost: CostModel, sample: Sample) -> float:
    low, high = 0.0, MOST_ENCODER
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        longer = cost._replace(coefficients=cost.coefficients._replace(encoder=middle)).device_seconds(sample.work)
        low, high = (middle, high) if longer < sample.seconds else (low, middle)
    return low


def _beside(timed: Timed) -> int:
    """Return the number of sequences that decode during every prompt step: 0 or 1."""
    return int(timed.depth > 1)


def _start(timed: Timed, rows: int, context: int) -> None:
    engine = timed.engine
    for i in range(rows):
        engine.add(f"decode-{i}", [TOKEN] * context, _params(4 * (STEPS + WARM)))
    tokens = engine.stats.computed_tokens
    while engine.stats.computed_tokens - tokens < rows * context or len(engine.scheduler.running) < rows:
        timed.step()


def _params(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def _fastest(steps: Sequence[Sample]) -> Sample:
    """Return the fastest sample: disturbances only make a step slower."""
    return min(steps, key=lambda sample: sample.seconds)._replace(host=min(sample.host for sample in steps))


def moves(engine: Engine) -> Coefficients:
    """Measure the seconds to swap a byte in one direction, and to copy a byte of a page."""
    runner, geometry = local_runner(engine), engine.scheduler.memory.kv_config
    group = geometry.groups[0]
    most = min(host_tokens(geometry), group.tokens_in_pages(len(group.ids) // (2 * len(geometry.groups))))
    swaps = [swap_seconds(engine, n, REPEATS) for n in SWAPS if n <= most and n + 2 <= engine.limits.max_len]
    swapped = sum(s.out + s.back for s in swaps) / max(sum(2 * s.bytes for s in swaps), 1)
    count = min(COPIED, len(group.ids) // 2)
    entries = tuple(PageCopy(0, group.ids[i], group.ids[count + i]) for i in range(count))
    seconds = []
    clock = clock_of(runner)
    for _ in range(REPEATS):
        began = clock()
        runner.store.apply_page_ops(entries)
        wait_for_device(runner.device)
        seconds.append(clock() - began)
    copied = min(seconds) / (count * group.page_bytes)
    return NOTHING._replace(swapped_byte=swapped, copied_byte=copied)


def bandwidth_of(device: Any) -> float:
    """Return the bytes a second that a copy reads and writes on the device."""
    import torch

    source = torch.zeros(2**31 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        target.copy_(source)
        wait_for_device(device)
        seconds.append(time.perf_counter() - began)
    return 2 * len(source) / min(seconds)


def mark(runner: Any) -> Any:
    """Record an event on a GPU's stream; return None on a CPU."""
    import torch

    if runner.device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
