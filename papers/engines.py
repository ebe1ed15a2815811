"""Measure real engines on this machine: sharing, page sizes, swapping, page tables, memories, and the control plane.

The bundled model runs on a CPU; page sizes and swapping are measured with OPT-13B where there is a GPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import fmean, median
from typing import Any

import numpy as np

from bench import control
from bench.histories import SEED, cut, stories
from papers.serving import in_parallel, shares
from quire.bench.arrivals import poisson
from quire.bench.calibration import compute_seconds, swap_seconds
from quire.bench.drive import Decoding, Load, drive
from quire.bench.latency import latencies
from quire.bench.shapes import built
from quire.bench.workloads import Job, parse
from quire.config import EngineConfig, Experiment
from quire.core.engine import Engine
from quire.memory.answers import Usage
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import BuiltEngine, build

Points = list[dict[str, Any]]
GPU_MODEL = "opt-13b"
MANY = 0.8  # of the requests of a burst; those finished later are the tail
PROMPTS = [[3 + (7 * i + j) % 200 for j in range(17 + 5 * i)] for i in range(8)]
OUTPUT = 32
# A step of the model reads few weights, so that swapping and recomputing fit one plot.
SMALL = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4,
    "intermediate_size": 704, "vocab_size": 512,
}  # fmt: skip
WIDER = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
    "intermediate_size": 1408, "vocab_size": 1024,
}  # fmt: skip


def sharing(workloads: Mapping[str, int], widths: Sequence[int]) -> Points:
    """Return the per cent of pages of 16 tokens that sharing saves, over all steps, by parallel sampling and by beam
    search of the bundled model. Prompts are stories that it wrote, cut to each workload's lengths; `workloads` has
    numbers of requests."""
    done = in_parallel(_sharing_of, [(name, count, widths) for name, count in workloads.items()])
    return [point for points in done for point in points]


def _sharing_of(name: str, count: int, widths: Sequence[int]) -> Points:
    engine = build(
        EngineConfig(threads=1, enable_prefix_caching=False, kv_tokens=2**17, max_num_seqs=64, seed=SEED)
    ).engine
    jobs = cut(name, count, stories(engine))
    points = []
    for way in ("parallel", "beam"):
        for width in widths:
            print(f"{name}, {way} {width}", file=sys.stderr)
            decoding = Decoding(temperature=1.0, n=width) if way == "parallel" else Decoding(beam_width=width)
            _, facts = drive(engine, jobs, Load(concurrency=8), decoding)
            saved = 100 * float(facts["sharing_saved"])
            points.append({"workload": name, "way": way, "width": width, "saved": saved})
    engine.close()
    return points


def page_sizes(
    sizes: Sequence[int], requests: Mapping[str, Mapping[str, int]], runs: Mapping[str, Mapping[str, int]],
    kv_tokens: Mapping[str, int], load: float,
) -> Points:  # fmt: skip
    """Return the normalised latency of traces by page size, at a share `load` of the requests a second that pages of 16
    tokens serve when all come at once. `requests` and `runs` of each trace, and `kv_tokens`, are given by device.

    The latency is that of the median run, in seconds a token; `apart` is that of the slowest run / the fastest's;
    `batch` is a mean over runs, and `preemptions` a sum."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokens = -(-kv_tokens[device] // 256) * 256  # the same for all page sizes

    def jobs(made: BuiltEngine, trace: str) -> list[Job]:
        return parse(f"{trace}@{requests[device][trace]}").jobs(made.spec.vocab_size)

    with _paged(device, 16, tokens) as made:
        rates = {trace: load * _capacity(made.engine, jobs(made, trace)) for trace in requests[device]}
    points = []
    for page in sizes:
        with _paged(device, page, tokens) as made:
            for trace, rate in rates.items():
                mine = jobs(made, trace)
                _serve(made.engine, mine[:4], [0.0] * 4)  # warms up
                done = [
                    _serve(made.engine, mine, poisson(len(mine), rate, seed)) for seed in range(runs[device][trace])
                ]
                latency = [run["normalised"] for run in done]
                points.append({
                    "trace": trace, "page": page, "rate": rate, "latency": median(latency),
                    "apart": max(latency) / min(latency), "batch": fmean(run["mean_batch"] for run in done),
                    "preemptions": sum(run["preemptions"] for run in done),
                })  # fmt: skip
                print(f"{trace}, pages of {page}: {median(latency):.4g} s a token", file=sys.stderr)
    return sorted(points, key=lambda point: (point["trace"], point["page"]))


@contextmanager
def _paged(device: str, page: int, tokens: int) -> Iterator[BuiltEngine]:
    config = EngineConfig(
        device=device, page_size=page, kv_tokens=tokens, max_num_seqs=256, enable_prefix_caching=False,
        preemption="recompute", skip_tokenizer_init=True,
    )  # fmt: skip
    on_gpu = replace(config, model_config=GPU_MODEL, dummy_weights=True)
    with built(replace(config, threads=1) if device == "cpu" else on_gpu) as made:
        made.engine.lift_queue_limit()
        yield made


def _capacity(engine: Engine, jobs: list[Job]) -> float:
    """Return requests a second when all come at once, without the tail, measured in a second run."""
    burst = [_serve(engine, jobs, [0.0] * len(jobs)) for _ in range(2)]
    return float(burst[1]["capacity"])


def _serve(engine: Engine, jobs: list[Job], times: Sequence[float]) -> dict[str, Any]:
    """Serve the jobs. Return the facts with `normalised`, seconds a token, `capacity`, requests a second until a share
    of MANY is finished, and `seconds`."""
    traces, facts = drive(engine, jobs, Load(times), Decoding())
    normalised = latencies(traces)["normalised_s"]
    assert normalised is not None, "no requests"
    ends = sorted(trace.events[-1][0] for trace in traces)
    many = max(1, int(MANY * len(ends)))
    return {**facts, "capacity": many / ends[many - 1], "normalised": normalised["mean"], "seconds": ends[-1]}


def swapping(sizes: Sequence[int], tokens: int, repeats: int) -> Points:
    """Return milliseconds to swap `tokens` tokens out, in, and `both`, and to recompute them, by page size.

    OPT-13B on a GPU, a small LLaMA on a CPU. quire moves whole pages, and all of a sequence at once; on a GPU, `pieces`
    is out and in with a separate copy of each layer's keys and values of each page."""
    import torch

    gpu = torch.cuda.is_available()
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, kv_tokens=8 * tokens, enable_prefix_caching=False
    )  # fmt: skip
    if gpu:
        config = replace(
            config, model_config=GPU_MODEL, dummy_weights=True, dtype="float16", device="cuda", swap_gib=1.0
        )
    points = []
    for page in sizes:
        print(f"pages of {page}", file=sys.stderr)
        with built(replace(config, page_size=page), None if gpu else SMALL) as made:
            moved = swap_seconds(made.engine, tokens, repeats)
            (computed,) = compute_seconds(made.engine, [tokens], repeats)
            pieces = 1000 * _pieces(tokens // page * len(made.spec.layers) * 2, moved.bytes) if gpu else None
        points.append({
            "page": page, "out": 1000 * moved.out, "back": 1000 * moved.back,
            "both": 1000 * (moved.out + moved.back), "recompute": 1000 * computed, "pieces": pieces,
        })  # fmt: skip
    return points


def _pieces(count: int, size: int) -> float:
    """Return the seconds to copy `size` bytes out and in, in `count` separate copies each way."""
    import torch

    here = torch.zeros(count, size // count, dtype=torch.uint8, device="cuda")
    there = torch.zeros(here.shape, dtype=torch.uint8, pin_memory=True)
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for target, source in ((there, here), (here, there)):
            for to, come in zip(target, source):
                to.copy_(come, non_blocking=True)
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def table_scopes(repeats: int) -> Points:
    """Return the milliseconds of each run with one page table for all layers and with one a layer, of a small LLaMA
    with dummy weights in float32, and the number of requests whose tokens are those of the other in the last run."""
    config = EngineConfig(dtype="float32", threads=1, kv_tokens=4096, enable_prefix_caching=False)
    tokens: dict[str, list[list[int]]] = {}
    points: Points = []
    by_layer = replace(config, experiment=Experiment(table_scope="layer"))
    with built(config, WIDER) as model, built(by_layer, WIDER) as layer:
        for run in range(repeats):  # in turn, so that noise on the machine affects both alike
            for scope, made in (("model", model), ("layer", layer)):
                began = time.perf_counter()
                tokens[scope] = _generate(made.engine)
                points.append({"scope": scope, "run": run + 1, "ms": 1000 * (time.perf_counter() - began)})
    return [*points, {"requests": len(PROMPTS), "same": sum(map(list.__eq__, tokens["model"], tokens["layer"]))}]


def _generate(engine: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(PROMPTS):
        engine.add(str(i), prompt, params)
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    while engine.has_unfinished_requests:
        for output in engine.step():
            tokens[int(output.request_id)] += output.tokens
    return tokens


def control_plane(loads: Sequence[tuple[int, int]], steps: int) -> Points:
    """Return the median microseconds of planning, memory and output processing, by sequences and context."""
    costs = [control.step_cost(count, context, steps) for count, context in loads]
    return [
        {"sequences": cost["sequences"], "context": cost["context"],
         **{part: cost[f"{part}_us"]["p50"] for part in ("schedule", "update", "step")}}
        for cost in costs
    ]  # fmt: skip


def memories(names: Sequence[str], workload: str, requests: int, rate: float, kv_tokens: int, max_len: int) -> Points:
    """Serve Poisson arrivals through each memory with the bundled model in float32.

    The clock is this process's CPU time: one thread does everything, so that other processes do not affect it. It stops
    in sleep, so the first request comes at 0, and the rate must keep the engine busy."""
    times = np.array(poisson(requests, rate, SEED))
    points = []
    for name in names:
        print(f"{name}, real", file=sys.stderr)
        config = EngineConfig(
            memory=name, dtype="float32", device="cpu", threads=1, kv_tokens=kv_tokens, max_model_len=max_len,
            enable_prefix_caching=False, seed=SEED,
        )  # fmt: skip
        made = build(config)
        made.engine.clock = time.process_time
        jobs = parse(f"{workload}@{requests}").jobs(made.spec.vocab_size, SEED)
        run = _serve(made.engine, jobs, (times - times[0]).tolist())
        made.engine.close()
        usage = Usage(*(int(run["memory_bytes"][kind]) for kind in Usage._fields))
        points.append({
            "run": "real", "memory": name, **shares(usage), "running": run["mean_running"],
            "latency": run["normalised"], "requests_per_s": requests / run["seconds"],
            "preemptions": run["preemptions"],
        })  # fmt: skip
    return points
