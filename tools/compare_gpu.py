"""quire beside vLLM on GPUs, offline, in one run: named shapes with dummy weights, engines in turns, each in a process
of its own, the same prompts and output lengths for both.

    python tools/compare_gpu.py llama3-8b --vllm VENV/bin/python --out comparison.json --picture comparison.png
    python tools/compare_gpu.py qwen3-30b-a3b gpt-oss-20b --vllm VENV/bin/python --workloads fixed:128:128@8
    python tools/compare_gpu.py llama3-70b --tp 4 --vllm VENV/bin/python
    python tools/compare_gpu.py --draw comparison.json --picture comparison.png

A workload is one of `quire bench`; `sampled:` before it draws tokens at temperature 1 and top-p 0.95. Prefix caches are
off. The number of a workload is the median over the seeds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

from quire.bench.document import check_writable, document, short, table, write  # noqa: E402
from quire.bench.workloads import parse  # noqa: E402
from quire.errors import StartupError  # noqa: E402
from quire.models.named_configs import named_config  # noqa: E402

WORKLOADS = (
    "fixed:128:128@1", "sharegpt@64", "sharegpt@1000", "sampled:sharegpt@1000", "fixed:1024:128@512",
    "fixed:128:1024@256", "fixed:1000:128@32",
)  # fmt: skip
SAMPLED = "sampled:"
LENGTH = 2048  # the most tokens of a sequence


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="named shapes (`quire plan --help`)")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment; without it quire alone"
    )
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, metavar="WORKLOAD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[13, 14, 15], metavar="N")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each GPU")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="more settings of quire")
    parser.add_argument("--vllm-settings", type=json.loads, default={}, metavar="JSON", help="more settings of vLLM")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="of one process")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing, take the results of this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios (needs matplotlib)")
    return parser


def cases_of(args: argparse.Namespace, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield each workload with each seed."""
    for name in args.workloads:
        for seed in args.seeds:
            jobs = parse(name.removeprefix(SAMPLED)).jobs(vocabulary, seed)
            yield {
                "name": name, "seed": seed, "sampled": name.startswith(SAMPLED),
                "prompts": [job.prompt for job in jobs], "outputs": [job.output for job in jobs],
            }  # fmt: skip


def check(args: argparse.Namespace) -> None:
    """Raise StartupError for a model, a workload, an interpreter or a file with which a later run would fail."""
    for model in args.models:
        if "vocab_size" not in named_config(model):
            raise StartupError(f"{model} has images", "Name a shape of text alone")
    for name in args.workloads:
        parse(name.removeprefix(SAMPLED))
    if args.vllm and shutil.which(args.vllm) is None:
        raise StartupError(f"--vllm is {args.vllm}, which is no program", "Give the path of an interpreter")
    for path in (args.out, args.picture):
        if path is not None:
            check_writable(path)


def results_of(path: Path) -> list[dict[str, Any]]:
    """Return the results of an earlier comparison. Raise StartupError if the file has none."""
    try:
        results: list[dict[str, Any]] = json.loads(path.read_text())["results"]
        show(results)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise StartupError(f"{path} can't be drawn: {error!r}", "Give a file that this tool wrote") from error
    return results


def run_one(args: argparse.Namespace, model: str, engine: str) -> dict[str, Any]:
    """Return what a process measured, with its last line as `error` if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        told, result, log = (Path(folder, name) for name in ("job.json", "result.json", "log"))
        config = {"torch_dtype": "bfloat16", **named_config(model)}
        Path(folder, "config.json").write_text(json.dumps(config))
        cases = list(cases_of(args, config["vocab_size"]))
        told.write_text(json.dumps({
            "engine": engine, "folder": folder, "cases": cases, "tp": args.tp, "expert_parallel": args.expert_parallel,
            "length": LENGTH, "settings": args.settings if engine == "quire" else args.vllm_settings,
            "source": str(HERE.parent / "src"), "spawned": time.time(),
        }))  # fmt: skip
        python = sys.executable if engine == "quire" else args.vllm
        with log.open("w") as file:
            command = [python, HERE / "compare_gpu_worker.py", told, result]
            done: int | None = None
            with suppress(subprocess.TimeoutExpired):
                done = subprocess.run(command, stdout=file, stderr=file, timeout=args.timeout, check=False).returncode
        found: dict[str, Any] = {"model": model, "engine": engine}
        if done:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            found["error"] = said[-1][:200] if done > 0 and said else f"ended with exit status {done}"
        elif done is None:
            found["error"] = f"took more than {args.timeout} s"
        if not result.exists():
            return found
        told_back = json.loads(result.read_text())
    runs = [number_of(case, seconds) for case, seconds in zip(cases, told_back["seconds"])]
    return {**found, "ready_s": told_back["ready_s"], "runs": runs}


def number_of(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return a run's numbers."""
    outputs, prompts = sum(case["outputs"]), sum(map(len, case["prompts"]))
    return {
        "workload": case["name"], "seed": case["seed"], "seconds": seconds, "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (outputs + prompts) / seconds, "ms_a_step": 1e3 * seconds / max(case["outputs"]),
    }  # fmt: skip


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how many times as fast as vLLM quire is, for each model and workload: each seed's ratio and their
    median."""
    seconds = {
        (one["model"], one["engine"], run["workload"], run["seed"]): run["seconds"]
        for one in results for run in one.get("runs", ())
    }  # fmt: skip
    found: dict[tuple[str, str], list[float]] = {}
    for (model, engine, workload, seed), ours in seconds.items():
        theirs = seconds.get((model, "vllm", workload, seed))
        if engine == "quire" and theirs is not None:
            found.setdefault((model, workload), []).append(theirs / ours)
    return [
        {"model": model, "workload": workload, "ratios": values, "median": statistics.median(values)}
        for (model, workload), values in found.items()
    ]


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format medians over the seeds, a line a workload."""
    lines, times = [], {(one["model"], one["workload"]): one for one in ratios(results)}
    for model in dict.fromkeys(one["model"] for one in results):
        mine = [one for one in results if one["model"] == model]
        names = dict.fromkeys(run["workload"] for one in mine for run in one.get("runs", ()))
        rows = [("ready, s", *(short(one.get("ready_s")) for one in mine), "")]
        for name in names:
            key = "ms_a_step" if name.endswith("@1") else "output_tokens_per_s"
            runs = [[run[key] for run in one.get("runs", ()) if run["workload"] == name] for one in mine]
            cells = [short(statistics.median(numbers) if numbers else None) for numbers in runs]
            ratio = times.get((model, name))
            spread = (
                ""
                if ratio is None
                else f"{ratio['median']:.3f} ({min(ratio['ratios']):.3f}-{max(ratio['ratios']):.3f})"
            )
            rows.append((f"{name}, {'ms a token' if key == 'ms_a_step' else 'output tokens/s'}", *cells, spread))
        lines += [table((model, *(one["engine"] for one in mine), "ratio"), rows), ""]
        lines += [f"{one['engine']}, {model}: {one['error']}" for one in mine if "error" in one]
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the ratios: medians as bars, seeds as dots."""
    from quire.bench.plots import COLOURS, figure, save

    times = ratios(results)
    drawn = figure(0.9 * len(times) + 2, 3.6)
    axes = drawn.subplots()
    models = list(dict.fromkeys(one["model"] for one in times))
    for at, one in enumerate(times):
        axes.bar(at, one["median"], color=COLOURS[models.index(one["model"]) % len(COLOURS)], width=0.7)
        axes.plot([at] * len(one["ratios"]), one["ratios"], "k.", markersize=4)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(times)), [f"{one['model']}\n{one['workload']}" for one in times], fontsize=6, rotation=30)
    axes.set_ylabel("vLLM's time / quire's")
    axes.set_ylim(bottom=0)
    save(drawn, path)


def main(given: list[str]) -> int:
    args = arguments().parse_args(given)
    if not args.draw and not args.models:
        raise SystemExit("Name a shape, such as llama3-8b")
    try:
        check(args)
        results = results_of(args.draw) if args.draw else []
    except StartupError as error:
        raise SystemExit(str(error)) from error
    if not args.draw:
        for model in args.models:
            for engine in ["quire", *(["vllm"] if args.vllm else [])]:
                print(f"{model}, {engine}", file=sys.stderr, flush=True)
                results.append(run_one(args, model, engine))
                if args.out:
                    said = [one.replace(args.vllm, "PYTHON") if args.vllm else one for one in given]
                    made = document("compare_gpu", "python tools/compare_gpu.py", said, results)
                    write(args.out, {**made, "ratios": ratios(results)})
    print(show(results))
    if args.picture:
        draw(results, args.picture)
    return 1 if any("error" in one for one in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
