"""Time steps of engines with dummy weights, over any memory: decodes by batch size, each of many steps, and prompts."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import mean, median
from typing import Any, cast

from papers.entry import Point, left_out
from quire.bench import contexts
from quire.bench.shapes import built, local_runner
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.memory.virtual.virtual_memory import VirtualMemory
from quire.models.named_configs import named_config
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import BuiltEngine

SHAPES: dict[str, dict[str, Any]] = {
    **{name: named_config(name) for name in ("yi-6b", "llama3-8b", "yi-34b")},
    "small": {
        **named_config("llama-125m"), "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 512, "vocab_size": 512, "dtype": "float32",
    },
}  # fmt: skip
PAGED: dict[str, Any] = {"memory": "paged"}
LAYER_SLACK, SLACK = 2048, 128  # tokens of a sequence's last page of 2 MB at most, with a buffer a layer, and others


def virtual(layout: str, ahead: bool = True) -> dict[str, Any]:
    """Return the settings of virtual memory; pages are mapped `ahead` in a thread, as in the paper (§6.2.1)."""
    return {"memory": "virtual", "virtual_layout": layout, "map_ahead": "thread" if ahead else "off"}


def dummy(model: str, length: int, seqs: int, **settings: Any) -> AbstractContextManager[BuiltEngine]:
    """Open an engine of one of SHAPES with room for `seqs` sequences of `length` tokens at once.
    Nothing is compiled or captured in advance, so its first steps must not be timed. Raise StartupError if the device
    is too small."""
    slack = LAYER_SLACK if settings.get("virtual_layout") == "layer" else SLACK
    return built(EngineConfig.of(**{
        "device": "cuda", "max_model_len": length, "max_num_seqs": seqs, "kv_tokens": seqs * (length + slack),
        "swap_gib": 0.0, "enable_prefix_caching": False, "preemption": "recompute", "warm_up": False,
        "gpu_memory_utilization": 0.98, **settings,
    }), {**SHAPES[model], "max_position_embeddings": length})  # fmt: skip


def release() -> None:
    """Release the device memory of closed engines, for the next one."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decodes(
    models: Mapping[str, Sequence[int]], ways: Mapping[str, Mapping[str, Any]], context: int, steps: int
) -> list[Point]:
    """Return the rates of each model's decode steps, at each of its batch sizes, with the settings of each way."""
    points: list[Point] = []
    missing: dict[str, str] = {}
    for model, batches in models.items():
        for way, settings in ways.items():
            print(f"{model}, {way}", file=sys.stderr)
            try:
                points += [{"way": way, **one} for one in _decodes(model, settings, batches, context, steps)]
            except StartupError as error:
                missing[f"{model}, {way}, batch {max(batches)}"] = str(error)[:160]
            release()
    return points + left_out(missing)


def _decodes(model: str, settings: Mapping[str, Any], batches: Sequence[int], context: int, steps: int) -> list[Point]:
    """Measure one engine at each batch size, the largest first; requests then end until the next size is left."""
    most = max(batches)
    last = most * context // 4096 + (steps + contexts.WARM + 4) * len(batches)  # steps at most, while one decodes
    points: list[Point] = []
    with dummy(model, context + last + 16, most, **settings) as made:
        engine, token = made.engine, made.memory_plan.token_bytes
        contexts.skipping(engine)
        contexts.start(engine, [context] * most)
        for batch in sorted(batches, reverse=True):
            contexts.stop(engine, [name for name in engine.requests if int(name.split("-")[1]) >= batch])
            seconds = contexts.step_seconds(engine, steps)
            points.append({
                "model": model, "batch": batch, "ms": 1000 * mean(seconds), "median_ms": 1000 * median(seconds),
                "tokens_s": batch / mean(seconds), "mb_s": batch * token / mean(seconds) / 2**20,
            })  # fmt: skip
        contexts.stop(engine)
        del engine
    del made
    return points


def step_times(
    model: str, context: int, page: int, ends: Sequence[int], steps: int, layouts: Sequence[str],
    depths: Sequence[int], **settings: Any,
) -> list[Point]:  # fmt: skip
    """Return the `ms` of each of `steps` decode steps and the pages mapped on its critical path (`maps`), by layout,
    with and without map-ahead, by the steps in flight.

    There are sequences of up to `context` tokens. The i-th one fills a page of `page` tokens after `ends[i]` steps."""
    runs: list[Point] = []
    span = page + steps // page * page
    length = context + len(depths) * span + steps + 64
    for layout in layouts:
        for ahead in (False, True):
            print(f"{layout}, map-ahead {'on' if ahead else 'off'}", file=sys.stderr)
            with dummy(model, length, len(ends), **virtual(layout, ahead), **settings) as made:
                for i, depth in enumerate(depths):
                    # Each run uses later addresses: the last run's pages are mapped already.
                    lengths = [context + i * span - at for at in ends]
                    runs.append(
                        {"layout": layout, "ahead": ahead, "depth": depth, **_steps(made.engine, depth, lengths, steps)}
                    )
    return runs


def _steps(engine: Engine, depth: int, lengths: Sequence[int], steps: int) -> Point:
    engine.depth = depth
    contexts.skipping(engine)
    contexts.start(engine, lengths)
    contexts.step_seconds(engine, 0)
    seconds, maps = [], []
    for _ in range(steps):
        before = _mapped(engine)
        seconds += contexts.step_seconds(engine, 1, 0)
        maps.append(_mapped(engine)[0] - before[0])
    contexts.stop(engine)
    return {"ms": [round(1000 * one, 4) for one in seconds], "maps": maps}


def _mapped(engine: Engine) -> tuple[int, float]:
    """Return the pages mapped on the critical path so far, and the seconds of that; 0 for paged memory."""
    store: Any = local_runner(engine).store
    stats = getattr(store, "mapping_stats", None)
    return (0, 0.0) if stats is None else (stats.maps - stats.overlapped, stats.stall_seconds)


def first_tokens(
    models: Sequence[str], lengths: Sequence[int], ways: Mapping[str, Mapping[str, Any]], repeats: int,
    chunk: int | None = None, depth: int | None = None, seqs: int = 1, **settings: Any,
) -> list[Point]:  # fmt: skip
    """Return the `ms` until the first token of prompts of each length, computed in chunks or in one step, the pages
    mapped on their critical path and the milliseconds of that: medians of `repeats` prompts, one after another, with
    `depth` steps in flight (None: the engine's default).

    An untimed prompt of the same length goes first: kernels are compiled, and cuDNN plans for about 40 ms for each new
    pair of lengths. Each prompt gets the previous one's slot with its pages; without map-ahead the slot is unmapped
    before, so that each prompt maps its pages."""
    points: list[Point] = []
    missing: dict[str, str] = {}
    budget = {"max_num_batched_tokens": chunk or max(lengths) + 2 * seqs}  # with the decoding sequences
    for model in models:
        for way, of in ways.items():
            print(f"{model}, {way}", file=sys.stderr)
            try:
                with dummy(model, max(lengths) + 64, seqs, **budget, **settings, **of) as made:
                    made.engine.depth = depth or made.engine.depth
                    for length in lengths:
                        times = [
                            _prompt(made.engine, f"{length}-{i}", length, of.get("map_ahead") == "off")
                            for i in range(repeats + 1)
                        ]
                        seconds, maps, stalled = (median(one) for one in zip(*times[1:]))
                        points.append({
                            "model": model, "way": way, "length": length, "ms": 1000 * seconds, "maps": maps,
                            "stalled_ms": 1000 * stalled,
                        })  # fmt: skip
                del made
            except StartupError as error:
                missing[f"{model}, {way}"] = str(error)[:160]
            release()
    return points + left_out(missing)


def _prompt(engine: Engine, name: str, length: int, unmap: bool) -> tuple[float, int, float]:
    """Return the seconds to a prompt's first token, the pages mapped on its critical path, and the seconds of
    mapping; then end it."""
    maps, stalled = _mapped(engine)
    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
    engine.add(name, [contexts.TOKEN] * length, params)
    while not any(output.request_id == name and output.tokens for output in engine.step()):
        pass
    seconds = time.perf_counter() - began
    more, longer = _mapped(engine)
    contexts.stop(engine)
    if unmap:
        store: Any = local_runner(engine).store
        for slot in cast(VirtualMemory, engine.scheduler.memory).forget_free_slots():
            store.unmap_slot(slot)
    return seconds, more - maps, longer - stalled


def first_tokens_here(on_gpu: Mapping[str, Any], on_cpu: Mapping[str, Any]) -> list[Point]:
    """Measure `first_tokens` with the parameters for this machine."""
    import torch

    return first_tokens(**(on_gpu if torch.cuda.is_available() else on_cpu))
