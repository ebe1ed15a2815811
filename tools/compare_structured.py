"""quire beside llama.cpp or vLLM where the output is held to a JSON schema: SmolLM2-135M-Instruct, the same file (for
vLLM, what it holds in bf16), the same prompts' tokens, the likeliest token that the schema lets follow; engines take
turns, each in a process of its own.

    python tools/compare_structured.py FOLDER --out docs/measurements/cpu_structured_peers.json

FOLDER is as tools/compare_cpu.py has it. On one thread seconds are a process's own, which others don't lengthen; of a
process the fastest run of a workload counts, of the rounds the median of their ratios. Prompts are in the seconds,
making grammars isn't.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]

import compare_models  # noqa: E402

from quire.bench.document import table  # noqa: E402
from quire.bench.traces import tokenizer_of  # noqa: E402
from quire.config import EngineConfig  # noqa: E402
from quire.text.tokenizer import Tokenizer  # noqa: E402

SCHEMAS: dict[str, Any] = {
    "flat": {"type": "object", "additionalProperties": False, "required": ["name", "age", "city", "member"],
             "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"},
                            "city": {"enum": ["Berlin", "Paris", "Rome"]}, "member": {"type": "boolean"}}},
    "long keys": {"type": "object", "additionalProperties": False, "required": (keys := [
        f"the_measured_value_of_the_{name}_sensor" for name in ("first", "second", "third", "fourth")]),
        "properties": {key: {"type": "integer", "minimum": 0, "maximum": 9} for key in keys}},
    "strings": {"type": "array", "items": {"type": "string", "maxLength": 24}, "minItems": 6, "maxItems": 6},
}  # fmt: skip
PEOPLE = ("Ada", "Grace", "Alan", "Edsger", "Barbara", "Donald", "Margaret", "Niklaus")
ROWS = (1, 8)
NAMES = {"llama": "llama.cpp", "vllm": "vLLM"}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where environments and models are, or are made")
    parser.add_argument("--peer", choices=[*NAMES], default="llama")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="processes of each engine")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of a workload in each process")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="at most, of an output")
    parser.add_argument("--timeout", type=float, default=1800, metavar="S", help="of one process")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    return parser


def workloads(words: Tokenizer) -> list[dict[str, Any]]:
    """Each schema, and none, for so many rows: {"schema", "prompts": token ids}."""
    found = []
    for name in (*SCHEMAS, "none"):
        for rows in ROWS:
            texts = [f"<|im_start|>user\nTell me about {who} as JSON ({name}).<|im_end|>\n<|im_start|>assistant\n"
                     for who in PEOPLE[:rows]]  # fmt: skip
            prompts = [words.encode(text, add_special_tokens=False) for text in texts]
            found.append({"name": f"{name}, {rows}", "schema": SCHEMAS.get(name), "prompts": prompts})
    return found


def with_words(root: Path, words: Tokenizer) -> Path:
    """The folder of the model in bf16, with a tokenizer."""
    found = compare_models.folder(root, compare_models.SMOLLM2)
    if not (found / "tokenizer.json").exists():
        (found / "tokenizer.json").write_text(words._backend.to_str())
        about = {"tokenizer_class": "PreTrainedTokenizerFast", **words.special_tokens}
        (found / "tokenizer_config.json").write_text(json.dumps(about))
    return found


def run_one(args: argparse.Namespace, engine: str, model: Path, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One process: of each workload its seconds, tokens, and whatever else compare_structured_worker.py says."""
    python = sys.executable if engine == "quire" else compare_models.environment(args.folder, engine)
    length = -(-(max(len(prompt) for one in given for prompt in one["prompts"]) + args.tokens + 1) // 64) * 64
    job = {
        "engine": engine, "model": str(model), "threads": args.threads, "repeats": args.repeats, "length": length,
        "count": args.tokens, "workloads": given, "sequences": max(ROWS), "tokens": length * max(ROWS),
        "repack": True, "source": str(HERE.parent / "src"), "settings": {"dtype": "bfloat16"},
        "kv_gib": 0.25,
    }  # fmt: skip
    found: list[dict[str, Any]] = compare_models.run_job(python, "compare_structured_worker.py", job, args.timeout)
    return found


def checked(one: dict[str, Any], schema: Any, words: Tokenizer) -> dict[str, Any]:
    """A workload's numbers, and how many of its outputs ended, how many of these as the schema says."""
    ends = {*words.eos_ids, one["end"]}
    ended = [tokens[:-1] for tokens in one["found"] if tokens[-1] in ends] if schema is not None else []
    count = sum(len(tokens) for tokens in one["found"])
    return {"seconds": one["seconds"], "tokens": count, "ended": len(ended),
            "valid": sum(valid(words.decode(tokens, skip_special_tokens=True), schema) for tokens in ended),
            "others": one["others"], "ms_a_token": 1e3 * one["seconds"] / count}  # fmt: skip


def valid(text: str, schema: Any) -> bool:
    """The text is JSON and fulfils the schema."""
    import jsonschema

    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def result_of(name: str, peer: str, rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """A workload's rounds, and by how much quire is faster: by the token, and by the time of all outputs."""
    engines = ("quire", peer)
    ratios = {
        what: [one[peer][key] / one["quire"][key] for one in rounds]
        for what, key in (("by the token", "ms_a_token"), ("by the outputs", "seconds"))
    }
    others = statistics.mean(one[engine]["others"] for one in rounds for engine in engines)
    return {
        "what": name,
        "times_as_fast": {what: statistics.median(values) for what, values in ratios.items()},
        "ratios": ratios,
        "ms_a_token": {engine: statistics.median(one[engine]["ms_a_token"] for one in rounds) for engine in engines},
        "tokens": {engine: rounds[0][engine]["tokens"] for engine in engines},
        "ended": {engine: rounds[0][engine]["ended"] for engine in engines},
        "valid": {engine: rounds[0][engine]["valid"] for engine in engines},
        "cores_used_by_others": others,
        "rounds": rounds,
    }


def show(results: Sequence[dict[str, Any]], peer: str) -> str:
    """A line a workload."""
    head = ("schema, rows", "quire, ms a token", NAMES[peer], "quire is so many times as fast", "range", "by outputs",
            "valid of ended", NAMES[peer])  # fmt: skip
    rows, engines = [], ("quire", peer)
    for one in results:
        ratios, ms, times = one["ratios"]["by the token"], one["ms_a_token"], one["times_as_fast"]
        rows.append((one["what"], f"{ms['quire']:.2f}", f"{ms[peer]:.2f}", f"{times['by the token']:.2f}",
                     f"{min(ratios):.2f}-{max(ratios):.2f}", f"{times['by the outputs']:.2f}",
                     *(f"{one['valid'][engine]} of {one['ended'][engine]}" for engine in engines)))  # fmt: skip
    return table(head, rows)


def main(given: list[str]) -> int:
    args = arguments().parse_args(given)
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    model = compare_models.published(args.folder)
    words = tokenizer_of(EngineConfig(model=str(model)))
    asked = workloads(words)
    engines = ("quire", args.peer)
    if args.peer == "vllm":
        model = with_words(args.folder, words)
    rounds: dict[str, list[dict[str, dict[str, Any]]]] = {one["name"]: [] for one in asked}
    for number in range(args.rounds):
        told = {engine: run_one(args, engine, model, asked) for engine in engines}
        for at, one in enumerate(asked):
            found = {engine: checked(told[engine][at], one["schema"], words) for engine in engines}
            rounds[one["name"]].append(found)
        results = [result_of(name, args.peer, found) for name, found in rounds.items()]
        print(f"round {number + 1} of {args.rounds}\n{show(results, args.peer)}", file=sys.stderr, flush=True)
        compare_models.keep(args, "compare_structured", given, results, threads=args.threads, model=model.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
