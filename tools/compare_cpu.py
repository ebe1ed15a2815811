"""quire beside vLLM and llama.cpp on a CPU, in one run: peers are installed and models made in a folder that one names,
engines take turns, each in a process of its own.

    python tools/compare_cpu.py FOLDER --out comparison.json --picture comparison.png
    python tools/compare_cpu.py FOLDER --model smollm2 --formats bf16 q4_1 --workloads S1 S8 --peers llama
    python tools/compare_cpu.py FOLDER --model gpt-oss lfm2 qwen3-moe --workloads D1 D8 P1 --peers llama
    python tools/compare_cpu.py --draw comparison.json --picture comparison.png

Needs Linux, a C++ compiler for llama.cpp, some 6 GB for vLLM; the package index that pip is configured for must answer
when something isn't there yet. Of each process the fastest run of a workload counts, of the rounds the median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import compare_models  # noqa: E402
from compare_models import GGUF_SHAPES  # noqa: E402
from compare_worker import Workload  # noqa: E402

from quire.bench.document import short, table  # noqa: E402

WORKLOADS = {
    "W1": Workload(32, 0, 128, 128), "W2": Workload(1, 0, 128, 128, decode=True), "W3": Workload(1, 0, 2048, 1),
    "W4": Workload(32, 512, 32, 32), "L1": Workload(1, 0, 3968, 128, decode=True), "L8": Workload(8, 0, 3968, 128),
    "S1": Workload(1, 0, 64, 32), "S8": Workload(8, 0, 64, 32), "P1": Workload(1, 0, 512, 1),
    "D1": Workload(1, 0, 32, 96, decode=True), "D8": Workload(8, 0, 32, 96, decode=True),
}  # fmt: skip
ORDER = ("W2", "D1", "P1", "W3", "D8", "W1", "W4", "S1", "S8", "L1", "L8")  # what disturbs least comes first
SAYS = {
    "W1": "W1, 32 x (128 + 128), output tok/s", "W2": "W2, 128 + 128, ms a token", "W3": "W3, a prompt of 2,048, s",
    "W4": "W4, 32 x (512 shared + 32) + 32, s", "L1": "L1, 3,968 + 128, ms a token", "L8": "L8, 8 x (3,968 + 128), s",
    "S1": "S1, 64 + 32, ms a step, prompt included", "S8": "S8, 8 x (64 + 32), ms a step, prompts included",
    "D1": "D1, 32 + 96, ms a token", "D8": "D8, 8 x (32 + 96), ms a step", "P1": "P1, a prompt of 512, s",
}  # fmt: skip
FORMATS = ("bf16", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k", "mxfp4")
EIGHT = ("q8_0", "q6_k")  # what --load-time quantises to 8 bits; the others to 4
VOCABULARY = {"125m": 32000, "500m": 32000, "smollm2": 49000,
              **{name: shape["vocabulary"] for name, shape in GGUF_SHAPES.items()}}  # fmt: skip
STEP = 64  # tokens that a sequence's memory is rounded up to
GIB = 2**30


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, help="where environments and models are, or are made")
    parser.add_argument("--peers", nargs="*", choices=sorted(compare_models.PEERS), default=["vllm", "llama"])
    parser.add_argument("--without-quire", action="store_true", help="peers alone")
    parser.add_argument("--model", nargs="+", choices=sorted(VOCABULARY), default=["125m"])
    parser.add_argument("--formats", nargs="+", choices=FORMATS,
                        help="default: bf16, or that of a mixture or hybrid; vLLM has only bf16 Llamas")  # fmt: skip
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["W1", "W2", "W3", "W4"])
    parser.add_argument("--threads", type=int, default=2, metavar="N")
    parser.add_argument("--busy", action="store_true", help="another program takes one core while workloads run")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="processes of each engine and format")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of a workload in each process")
    parser.add_argument("--wait", type=float, default=6.0, metavar="S",
                        help="how long a run waits, at most, for others to use less than 0.25 cores")  # fmt: skip
    parser.add_argument("--load-time", action="store_true",
                        help="quire quantises the bf16 folder (int8, int4); else it reads the GGUF file")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="vLLM without compilation")
    parser.add_argument("--no-repack", action="store_true", help="llama.cpp leaves weights as the file has them")
    parser.add_argument("--kv-gib", type=float, metavar="X", help="quire's and vLLM's KV (default: what is needed)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="of one process")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing, take the results of this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    return parser


class Contestant(NamedTuple):
    """An engine with a model in a format."""

    model: str
    engine: str
    kind: str


def contestants(args: argparse.Namespace) -> list[Contestant]:
    """Models, formats and engines, in the order of their turns."""
    engines = [*([] if args.without_quire else ["quire"]), *args.peers]
    return [
        Contestant(model, engine, kind) for model in args.model
        for kind in args.formats or [GGUF_SHAPES[model]["format"] if model in GGUF_SHAPES else "bf16"]
        for engine in engines if engine != "vllm" or (kind == "bf16" and model not in GGUF_SHAPES)
    ]  # fmt: skip


def job_of(args: argparse.Namespace, contestant: Contestant, number: int) -> dict[str, Any]:
    """What a process is told."""
    root, (model, engine, kind) = args.folder, contestant
    chosen = {name: WORKLOADS[name] for name in ORDER if name in args.workloads}
    sizes = [(w.requests, -(-(w.shared + w.own + w.output) // STEP) * STEP) for w in chosen.values()]
    tokens = max(requests * length for requests, length in sizes)
    settings: dict[str, Any] = {"dtype": "bfloat16"}
    if model in GGUF_SHAPES or engine == "llama" or (engine == "quire" and kind != "bf16" and not args.load_time):
        path = compare_models.gguf(root, model, kind)
    else:
        path = compare_models.folder(root, model)
    if engine == "quire" and kind != "bf16" and args.load_time:
        settings["quantization"] = "int8" if kind in EIGHT else "int4"
    return {
        "engine": engine, "model": str(path), "settings": settings, "threads": args.threads, "busy": args.busy,
        "repeats": args.repeats, "wait": args.wait, "seed": number, "vocabulary": VOCABULARY[model],
        "workloads": chosen, "tokens": tokens, "length": max(length for _, length in sizes),
        "sequences": max(requests for requests, _ in sizes), "eager": args.eager, "repack": not args.no_repack,
        "source": str(HERE.parent / "src"),
        "kv_gib": args.kv_gib or -(-tokens * token_bytes(root, model) * 4 // GIB) / 4,
    }  # fmt: skip


def token_bytes(root: Path, model: str) -> int:
    """What a token's keys and values take in bf16, at most."""
    if model in GGUF_SHAPES:
        shape = GGUF_SHAPES[model]
        return int(4 * shape["layers"] * shape["kv_heads"] * shape["hidden"] // shape["heads"])
    config = json.loads((compare_models.folder(root, model) / "config.json").read_text())
    dim = config["hidden_size"] // config["num_attention_heads"]
    return int(4 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim)


def run_one(args: argparse.Namespace, contestant: Contestant, number: int) -> dict[str, Any]:
    """One process: what it measured, or {"error": its last line}."""
    engine = contestant.engine
    python = sys.executable if engine == "quire" else compare_models.environment(args.folder, engine)
    job = job_of(args, contestant, number)
    with tempfile.TemporaryDirectory() as folder:
        told, result = Path(folder, "job.json"), Path(folder, "result.json")
        log = Path(folder, "log")
        told.write_text(json.dumps({**job, "spawned": time.time()}))
        with log.open("w") as file:
            try:
                done = subprocess.run([python, HERE / "compare_worker.py", told, result], cwd=folder, stdout=file,
                                      stderr=file, timeout=args.timeout, check=False)  # fmt: skip
            except subprocess.TimeoutExpired:
                return {"error": f"took more than {args.timeout} s"}
        if done.returncode:
            said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            return {"error": said[-1][:200] if said else f"ended with {done.returncode}"}
        found: dict[str, Any] = json.loads(result.read_text())
        return {**found, "kv_gib": job["kv_gib"]}


def number_of(name: str, run: dict[str, Any]) -> float:
    """A run's number, as SAYS names it."""
    workload = WORKLOADS[name]
    if name == "W1":
        return workload.requests * workload.output / float(run["seconds"])
    if workload.decode:
        return 1e3 * float(run["seconds"] - run["first_s"]) / (workload.output - 1)
    return float(run["seconds"]) * (1e3 / workload.output if name[0] == "S" else 1)


def summary(contestant: Contestant, rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A contestant's rounds and their medians."""
    good = [found for found in rounds if "error" not in found]
    model, engine, kind = contestant
    result: dict[str, Any] = {"model": model, "engine": engine, "format": kind, "rounds": list(rounds)}
    if not good:
        return {**result, "error": rounds[-1]["error"] if rounds else "no round"}
    numbers: dict[str, list[float]] = {
        name: [(max if name == "W1" else min)(number_of(name, run) for run in found["workloads"][name]["runs"])
               for found in good]
        for name in good[0]["workloads"]
    }  # fmt: skip
    for name in ("ready_s", "first_token_s"):
        numbers[name] = [found[name] for found in good]
    last = [list(found["workloads"].values())[-1] for found in good]
    numbers["peak_gb"] = [found["peak_bytes"] / 1e9 for found in last]
    others = [run["others"] for found in good for one in found["workloads"].values() for run in one["runs"]]
    medians = {name: statistics.median(values) for name, values in numbers.items()}
    return {**result, "numbers": numbers, "medians": medians, "cores_used_by_others": statistics.mean(others)}


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many times as fast as each peer quire is with the same model and format, by medians; and how many tokens of
    the first answer are the same."""
    mine = {_what(one): one for one in results if one["engine"] == "quire" and "medians" in one}
    found = []
    for one in results:
        if one["engine"] == "quire" or "medians" not in one or _what(one) not in mine:
            continue
        ours, theirs = mine[_what(one)]["medians"], one["medians"]
        times = {name: ours[name] / theirs[name] if name == "W1" else theirs[name] / ours[name]
                 for name in ours if name in WORKLOADS}  # fmt: skip
        tokens = [side["rounds"][0].get("tokens", ()) for side in (mine[_what(one)], one)]
        same = next((at for at, pair in enumerate(zip(*tokens)) if pair[0] != pair[1]), len(tokens[0]))
        model = {"model": one["model"]} if "model" in one else {}
        found.append({**model, "format": one["format"], "against": one["engine"], "times_as_fast": times,
                      "same_first_tokens": same})  # fmt: skip
    return found


def _what(one: dict[str, Any]) -> str:
    """Return the model and the format of a result. Older documents have one model, which results don't name."""
    return f"{one['model']} {one['format']}" if "model" in one else str(one["format"])


def show(results: Sequence[dict[str, Any]]) -> str:
    """Medians, with the rounds' range; then the ratios."""
    lines = []
    for kind in dict.fromkeys(map(_what, results)):
        mine = [one for one in results if _what(one) == kind]
        names = next((list(one["medians"]) for one in mine if "medians" in one), [])
        cells = {"ready_s": "ready, s", "first_token_s": "first token, s", "peak_gb": "peak memory, GB", **SAYS}
        rows = [(cells[name], *(_cell(one, name) for one in mine)) for name in names]
        lines += [table((kind, *(one["engine"] for one in mine)), rows), ""]
        lines += [f"{one['engine']}, {kind}: {one['error']}" for one in mine if "error" in one]
    found = ratios(results)
    if found:
        names = list(found[0]["times_as_fast"])
        rows = [(f"{one['against']}, {_what(one)}", *(f"{one['times_as_fast'][name]:.2f}" for name in names))
                for one in found]  # fmt: skip
        lines.append(table(("quire is so many times as fast as", *names), rows))
    return "\n".join(lines)


def _cell(one: dict[str, Any], name: str) -> str:
    if "medians" not in one:
        return "-"
    values = one["numbers"][name]
    return f"{short(one['medians'][name])} ({short(min(values))}-{short(max(values))})"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """A panel a workload: the medians as bars, the rounds as dots."""
    from quire.bench.plots import COLOURS, figure, save

    good = [one for one in results if "medians" in one]
    names = [name for name in WORKLOADS if any(name in one["medians"] for one in good)]
    drawn = figure(3.2 * len(names) + 0.5, 3.6)
    engines = list(dict.fromkeys(one["engine"] for one in good))
    for axes, name in zip(drawn.subplots(1, len(names), squeeze=False).flat, names):
        for at, one in enumerate(good):
            axes.bar(at, one["medians"][name], color=COLOURS[engines.index(one["engine"])], width=0.7)
            axes.plot([at] * len(one["numbers"][name]), one["numbers"][name], "k.", markersize=4)
        axes.set_xticks(range(len(good)), ["\n".join([one["engine"], *_what(one).split()]) for one in good], fontsize=6)
        axes.set_title(SAYS[name], fontsize=8)
        axes.set_ylim(bottom=0)
    save(drawn, path)


def measure(args: argparse.Namespace, keep: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """All rounds; what is known is kept after each process. An engine that failed once isn't tried again."""
    rounds: dict[Contestant, list[dict[str, Any]]] = {one: [] for one in contestants(args)}
    results: list[dict[str, Any]] = []
    for number in range(args.rounds):
        for contestant, found in rounds.items():
            if any("error" in one for one in found):
                continue
            print(f"round {number + 1} of {args.rounds}: {', '.join(contestant)}", file=sys.stderr, flush=True)
            found.append(run_one(args, contestant, number))
            best = summary(contestant, found[-1:])
            print(f"  {best.get('error') or ', '.join(f'{n} {short(v)}' for n, v in best['medians'].items())}",
                  file=sys.stderr, flush=True)  # fmt: skip
            results = [summary(contestant, found) for contestant, found in rounds.items()]
            keep(results)
    return results


def main(given: list[str]) -> int:
    args = arguments().parse_args(given)
    if args.draw:
        results = json.loads(args.draw.read_text())["results"]
    elif args.folder is None:
        raise SystemExit("name a folder for environments and models")
    else:
        args.folder = args.folder.resolve()
        args.folder.mkdir(parents=True, exist_ok=True)
        for peer in dict.fromkeys([*args.peers, "llama"]):  # llama.cpp's also writes the models
            compare_models.environment(args.folder, peer)
        results = measure(args, lambda results: compare_models.keep(
            args, "compare_cpu", given, results, threads=args.threads, model=args.model, busy=args.busy,
            ratios=ratios(results)))  # fmt: skip
    print(show(results))
    if args.picture:
        draw(results, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
