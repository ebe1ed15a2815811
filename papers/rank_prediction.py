"""Predict Llama-3-70B on more H200s than were measured, in two ways.

`simulated`: the engine runs in virtual time with the calibration `h200-llama3-8b`. `Links` adds the time of sums over
ranks (quire.sim.cost_model).

`from kernels`: a decode step is the matrix products of one rank, its attention, and the sums over ranks.

- Attention was measured on one GPU, in the shape of one of two, four and eight ranks.
- Products were measured so for one of two and one of four. For one of N they are a + b / N, fitted to these two.
- Sums over two ranks were measured. Sums over more take longer by what `Links` adds.
- A measured step of two ranks took longer than its three parts. Steps of more ranks are predicted to be longer than
  their parts by the same factor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.bench.simulate import read_deployment
from quire.bench.workloads import parse
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.sampling_params import SamplingParams
from quire.sim.cost_model import Links
from quire.sim.simulation import TraceRequest

MODEL, CALIBRATION = "llama3-70b", "h200-llama3-8b"
LAYERS, SUMS, ROW_BYTES = 80, 161, 16_384  # of the model; sums over ranks of a step; bytes of a row that is summed
MATRICES = ("qkv", "o", "gate_up", "down")
CONTEXT = 1024  # tokens of each sequence of a step from kernels
FOLDER = Path(__file__).parents[1] / "docs" / "measurements"
MAX_ERROR = 0.15  # of the simulation, relative to what was measured, by which the claim is met

Points = list[dict[str, Any]]


def llama_70b(ranks: Sequence[int], workloads: Sequence[str], rows: Sequence[int], measured: str) -> Points:
    """Return the predictions for each number of `ranks`: simulated `workloads`, with all requests at once, and from
    kernels decode steps of each number of `rows`, and sums over ranks. Return also the measured throughput of these
    workloads: on two H200s, and in the document `measured` of `quire bench throughput`, unless it is "".

    A workload's `value` has the unit that `unit` returns. Measured points have the simulation's relative error, `off`.
    """
    documents = [FOLDER / "h200x2_70b.json", *([Path(measured)] if measured else [])]
    found = [result for path in documents for result in _throughput(path)]
    points = [_simulated(tp, workload) for tp in ranks for workload in workloads]
    predicted = {(point["tp"], point["what"]): point["value"] for point in points}
    for tp, workload, value in found:
        if simulated := predicted.get((tp, workload)):
            points.append({
                "by": "real", "tp": tp, "what": workload, "value": value, "unit": unit(workload),
                "off": simulated / value - 1,
            })  # fmt: skip
    steps = {(tp, count): _parts(tp, count) for tp in {2, *ranks} for count in rows}
    for tp in ranks:
        for count in rows:
            parts, of_two = steps[tp, count], steps[2, count]
            factor = _step_of_two(count) / sum(of_two.values())
            points.append({
                "by": "from kernels", "tp": tp, "what": f"decode step of {count} rows", "unit": "ms",
                "value": factor * sum(parts.values()), "factor": factor, **parts,
            })  # fmt: skip
        points += [
            {"by": "from kernels", "tp": tp, "what": f"sum of {count} rows", "unit": "us", "value": us}
            for count, us in _sums(tp).items()
        ]
    return points


def unit(workload: str) -> str:
    """Return the unit of a workload's value: milliseconds a token for one request, output tokens a second if outputs
    are most of the work, else all tokens a second."""
    if workload.endswith("@1"):
        return "ms a token"
    return "output tokens/s" if workload == "fixed:128:1024@256" else "tokens/s"


def _value(workload: str, prompts: int, outputs: int, seconds: float) -> float:
    """Return a workload's value from its tokens of prompts and of outputs, and its seconds."""
    if workload.endswith("@1"):
        return 1000 * seconds / outputs
    return (outputs if unit(workload).startswith("output") else prompts + outputs) / seconds


def _simulated(tp: int, workload: str) -> dict[str, Any]:
    """Simulate a workload with all requests at once."""
    config = EngineConfig(model_config=MODEL, dummy_weights=True, tp=tp, enable_prefix_caching=False)
    specs = parse(workload).specs(0)
    trace = [
        TraceRequest(0.0, [7] * one.prompt_len, SamplingParams(
            temperature=0.0, max_tokens=one.output_len, ignore_eos=True, detokenize=False
        ))
        for one in specs
    ]  # fmt: skip
    seconds = read_deployment(config, CALIBRATION).simulation().run(trace).totals.seconds
    prompts, outputs = sum(one.prompt_len for one in specs), sum(one.output_len for one in specs)
    return {
        "by": "simulated", "tp": tp, "what": workload, "unit": unit(workload),
        "value": _value(workload, prompts, outputs, seconds),
    }  # fmt: skip


def _throughput(path: Path) -> list[tuple[int, str, float]]:
    """Return the ranks, the workload and its value of each result for MODEL in a document of `quire bench throughput`
    or `parallel`. Raise StartupError if it has no results."""
    measured = []
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StartupError(
            f"{path} has no results of a measurement: {type(error).__name__}: {error}",
            "Make it with quire bench throughput --out",
        ) from error
    for result in results:
        run = result.get("run", result)
        if "median" not in run or run["model"] != MODEL:
            continue
        median, name = run["median"], run["workload"]
        value = _value(name, median["prompt_tokens"], median["output_tokens"], median["seconds"])
        measured.append((int(run["config"].get("tp", 1)), name, value))
    return measured


# From kernels


def _microseconds(tp: int) -> Mapping[tuple[str, str], float]:
    """Return the microseconds of the kernels of one of `tp` ranks, by kernel and case."""
    content = json.loads((FOLDER / f"h200_kernels_70b_tp{tp}.json").read_text(encoding="utf-8"))
    label = f"{MODEL}, 1 of {tp}: "
    return {(one["kernel"], one["case"].removeprefix(label)): one["us"] for one in content["results"]}


def _parts(tp: int, rows: int) -> dict[str, float]:
    """Return the milliseconds of the parts of a decode step of one of `tp` ranks."""
    two, four = (_products(_microseconds(count), rows) for count in (2, 4))
    products = four + (two - four) * (1 / tp - 1 / 4) / (1 / 2 - 1 / 4)
    attention = LAYERS * _microseconds(tp)["decode paged", f"{rows} x {CONTEXT}"]
    return {"products": products / 1000, "attention": attention / 1000, "sums": SUMS * _sums(tp)[rows] / 1000}


def _products(us: Mapping[tuple[str, str], float], rows: int) -> float:
    """Return the microseconds of a step's products. Those of few rows were measured together, others one by one."""
    if whole_step := us.get(("linear, a step", f"{LAYERS} layers and the head, {rows} rows")):
        return whole_step
    return LAYERS * sum(us["cuBLAS", f"{name}, {rows} rows"] for name in MATRICES) + us["cuBLAS", f"head, {rows} rows"]


def _sums(tp: int) -> dict[int, float]:
    """Return the microseconds of a sum over `tp` ranks with the norm after it, by rows: as measured for two ranks, plus
    what `Links` adds for more. That of 256 rows is interpolated."""
    content = json.loads((FOLDER / "h200x2_exchange.json").read_text(encoding="utf-8"))
    of_two = {one["rows"]: one["us"] for one in content["results"] if one.get("way") == "quire"}
    of_two[256] = of_two[128] + (of_two[512] - of_two[128]) * (256 - 128) / (512 - 128)
    links = Links()
    return {
        rows: us + 1e6 * (links.sum_seconds(tp, rows * ROW_BYTES) - links.sum_seconds(2, rows * ROW_BYTES))
        for rows, us in sorted(of_two.items())
    }


def _step_of_two(rows: int) -> float:
    """Return the milliseconds of a decode step of two ranks: as profiled, or for 32 rows, which were not profiled, the
    median time between tokens of a run."""
    content = json.loads((FOLDER / "h200x2_profile_70b.json").read_text(encoding="utf-8"))
    for one in content["results"]:
        run = one.get("run", one)
        if run.get("rows") == rows and "prompt_tokens_per_s" not in run:
            return float(run["step_ms"])
    content = json.loads((FOLDER / "h200x2_70b.json").read_text(encoding="utf-8"))
    [median] = [
        one["run"]["median"] for one in content["results"] if one.get("run", {}).get("workload") == "fixed:1000:128@32"
    ]
    assert rows == 32, f"no step of {rows} rows was measured on two GPUs"
    return float(1000 * median["inter_token_s"]["p50"])
