"""Serve a case of unlike layers on one GPU in several ways, beside the simulation of the same.

Engines have dummy weights of the model's shape. Token values do not affect the cost of steps. Each way has its own
engine, warmed up before its requests come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from papers.side_by_side import report
from papers.unlike_serving import H200, OWN, SEED, Case, Ran, burst, exactly, serve
from quire.bench.workloads import parse
from quire.core.engine import Engine
from quire.sim.simulation import TraceRequest

T = TypeVar("T")
ON = "cuda"
WARM = (64, 700, 2100, 64)  # prompt lengths of the warm-up


def on_device(case: Case, rule: str, work: Callable[[Engine], T], device: str, warm: Sequence[int], **more: Any) -> T:
    """Return what `work` returns for an engine with dummy weights, in FP8 if the case's are halved.

    The engine first serves prompts of the lengths `warm`, and an image if the model takes images. No such prompt is
    longer than a step if a step must compute a whole prompt. The device memory is released at the end."""
    from papers.dummy_engines import release
    from quire.bench import shapes

    config = case.config(rule, dummy_weights=True, skip_tokenizer_init=True, device=device, **more)
    config = replace(config, quantization="fp8") if case.halved else config
    config, shape = (replace(config, model_config=None), case.shape) if case.changes else (config, None)
    spec = case.spec
    most = case.chunk if spec.vision is not None and spec.vision.bidirectional_prompt else None
    prompts = [TraceRequest(0.0, [OWN] * length, exactly(8)) for length in warm if most is None or length <= most]
    pictured = [one for one in parse(case.workload).specs(SEED + 1) if one.pictures][:1]
    with shapes.built(config, shape) as made:
        serve(made.engine, [*prompts, *burst(pictured, case.eyes, pixels=True)], spec)
        done = work(made.engine)
    del made
    release()
    return done


def beside(
    case: Case, ways: Mapping[str, tuple[str, dict[str, Any]]], concurrency: int | None = None, fp8: bool = False,
    device: str = ON, warm: Sequence[int] = WARM,
) -> list[dict[str, Any]]:  # fmt: skip
    """Serve the requests of a case that fit in every way, at most `concurrency` at a time, on the device and simulated.

    A way is a rule and further settings of the engine. The KV memory is what is left over on the case's own device.
    Weights of one byte take two here, or one with `fp8`. Return two points for each way: see Ran."""
    here = case.on(H200)._replace(halved=fp8)
    longest = min(here.plant(rule, **more).max_len for rule, more in ways.values())
    trace = burst(here.specs(), here.eyes, pixels=True)
    trace = [one for one in trace if len(one.prompt) + (one.params.max_tokens or 0) <= longest]

    def work(engine: Engine) -> Ran:
        return serve(engine, trace, here.spec, concurrency=concurrency)

    points = []
    for way, (rule, more) in ways.items():
        names = {"way": way, "label": case.label, "kv_gib": here.budget}
        real = on_device(here, rule, work, device, warm, **more)
        points.append(report({**names, "by": "real", **real.facts()}))
        simulated = work(here.plant(rule, **more).simulation().engine)
        points.append({**names, "by": "simulated", **simulated.facts()})
    return points
