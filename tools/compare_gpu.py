"""Compare quire with vLLM on GPUs, offline, in one run. Models are named shapes with dummy weights. For each, the
engines run one after the other, each in a process of its own, with the same prompts and output lengths.

    python tools/compare_gpu.py llama3-8b --vllm VENV/bin/python --out comparison.json --picture comparison.png
    python tools/compare_gpu.py qwen3-30b-a3b gpt-oss-20b --vllm VENV/bin/python --workloads fixed:128:128@8
    python tools/compare_gpu.py llama3-70b --tp 4 --vllm VENV/bin/python
    python tools/compare_gpu.py --draw comparison.json --picture comparison.png

A workload is one of `quire bench`. With `sampled:` before its name, tokens are sampled at temperature 1 and top-p 0.95,
else they are greedy. Prefix caches are off. Reported numbers are medians over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
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
MAX_MODEL_LEN = 2048


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="named shapes (`quire plan --help`)")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment; without it only quire runs"
    )
    parser.add_argument("--workloads", nargs="+", default=WORKLOADS, metavar="WORKLOAD")
    parser.add_argument("--seeds", nargs="+", type=int, default=[13, 14, 15], metavar="N")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs")
    parser.add_argument("--expert-parallel", action="store_true", help="divide whole experts among the GPUs")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON", help="more arguments of quire.LLM")
    parser.add_argument("--vllm-settings", type=json.loads, default={}, metavar="JSON", help="of vllm.LLM")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="seconds for one process")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing; show the results of this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the ratios (needs matplotlib)")
    return parser


def make_cases(args: argparse.Namespace, vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield each workload with each seed: prompts (token ids below `vocabulary`) and output lengths in tokens."""
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
    """Run one engine in a process. Return `model` and `engine`; if any case was run, `ready_s`, the seconds until the
    engine was ready, and `runs` (see `describe_run`); and if the process failed, `error`, the last line it printed."""
    with tempfile.TemporaryDirectory() as folder:
        job_file, result_file, log = (Path(folder, name) for name in ("job.json", "result.json", "log"))
        config = {"torch_dtype": "bfloat16", **named_config(model)}
        Path(folder, "config.json").write_text(json.dumps(config))
        cases = list(make_cases(args, config["vocab_size"]))
        job = {
            "engine": engine, "folder": folder, "cases": cases, "tp": args.tp, "expert_parallel": args.expert_parallel,
            "max_model_len": MAX_MODEL_LEN, "settings": args.settings if engine == "quire" else args.vllm_settings,
            "source": str(HERE.parent / "src"), "spawned": time.time(),
        }  # fmt: skip
        job_file.write_text(json.dumps(job))
        python = sys.executable if engine == "quire" else args.vllm
        with log.open("w") as file:
            command = [python, HERE / "compare_gpu_worker.py", job_file, result_file]
            process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
            status: int | None = None  # it took too long
            try:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(args.timeout)
            finally:
                with suppress(ProcessLookupError):  # the engine's other processes end too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        outcome: dict[str, Any] = {"model": model, "engine": engine}
        if status:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            outcome["error"] = lines[-1][:200] if status > 0 and lines else f"ended with exit status {status}"
        elif status is None:
            outcome["error"] = f"took more than {args.timeout} s"
        if not result_file.exists():
            return outcome
        result = json.loads(result_file.read_text())
    runs = [describe_run(case, seconds) for case, seconds in zip(cases, result["seconds"])]
    return {**outcome, "ready_s": result["ready_s"], "runs": runs}


def gpu_name() -> str | None:
    """Return the name of the first GPU, without torch, which would take some of its memory; None if it is unknown."""
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()[0]
    return None


def describe_run(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return a case's name and seed, its seconds, tokens per second, and milliseconds of a step, if there are as many
    steps as tokens in the longest output."""
    outputs, prompts = sum(case["outputs"]), sum(map(len, case["prompts"]))
    return {
        "workload": case["name"], "seed": case["seed"], "seconds": seconds, "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (outputs + prompts) / seconds, "ms_a_step": 1e3 * seconds / max(case["outputs"]),
    }  # fmt: skip


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return vLLM's time divided by quire's, for each model and workload: the ratio of each seed, and the median."""
    seconds = {
        (one["model"], one["engine"], run["workload"], run["seed"]): run["seconds"]
        for one in results for run in one.get("runs", ())
    }  # fmt: skip
    by_workload: dict[tuple[str, str], list[float]] = {}
    for (model, engine, workload, seed), quire_seconds in seconds.items():
        vllm_seconds = seconds.get((model, "vllm", workload, seed))
        if engine == "quire" and vllm_seconds is not None:
            by_workload.setdefault((model, workload), []).append(vllm_seconds / quire_seconds)
    return [
        {"model": model, "workload": workload, "ratios": values, "median": statistics.median(values)}
        for (model, workload), values in by_workload.items()
    ]


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format a table of each model: medians over the seeds, a line a workload; then the errors."""
    lines, by_workload = [], {(one["model"], one["workload"]): one for one in ratios(results)}
    for model in dict.fromkeys(one["model"] for one in results):
        engines = [one for one in results if one["model"] == model]
        workloads = dict.fromkeys(run["workload"] for one in engines for run in one.get("runs", ()))
        rows = [("ready, s", *(short(one.get("ready_s")) for one in engines), "")]
        for workload in workloads:
            key, unit = "output_tokens_per_s", "output tokens/s"
            if workload.endswith("@1"):  # one request, so that a step is a token
                key, unit = "ms_a_step", "ms a token"
            runs = [[run[key] for run in one.get("runs", ()) if run["workload"] == workload] for one in engines]
            cells = [short(statistics.median(numbers) if numbers else None) for numbers in runs]
            ratio, text = by_workload.get((model, workload)), ""
            if ratio is not None:
                text = f"{ratio['median']:.3f} ({min(ratio['ratios']):.3f}-{max(ratio['ratios']):.3f})"
            rows.append((f"{workload}, {unit}", *cells, text))
        lines += [table((model, *(one["engine"] for one in engines), "ratio"), rows), ""]
        lines += [f"{one['engine']}, {model}: {one['error']}" for one in engines if "error" in one]
    return "\n".join(lines)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the ratios: medians as bars, seeds as dots, a colour a model."""
    from quire.bench.plots import COLOURS, figure, save

    bars = ratios(results)
    picture = figure(0.9 * len(bars) + 2, 3.6)
    axes = picture.subplots()
    models = list(dict.fromkeys(one["model"] for one in bars))
    for x, one in enumerate(bars):
        axes.bar(x, one["median"], color=COLOURS[models.index(one["model"]) % len(COLOURS)], width=0.7)
        axes.plot([x] * len(one["ratios"]), one["ratios"], "k.", markersize=4)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(bars)), [f"{one['model']}\n{one['workload']}" for one in bars], fontsize=6, rotation=30)
    axes.set_ylabel("vLLM's time / quire's")
    axes.set_ylim(bottom=0)
    save(picture, path)


def main(argv: list[str]) -> int:
    """Measure, or read the results of a file. Print them, and write and draw them if asked. Return 1 if an engine
    failed."""
    args = make_parser().parse_args(argv)
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
                if args.out:  # after each, so that a run that is cut off leaves what it measured
                    command = [word.replace(args.vllm, "PYTHON") if args.vllm else word for word in argv]
                    content = document("compare_gpu", "python tools/compare_gpu.py", command, results)
                    content["machine"]["gpu"] = gpu_name()
                    write(args.out, {**content, "ratios": ratios(results)})
    print(show(results))
    if args.picture:
        draw(results, args.picture)
    return 1 if any("error" in one for one in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
