"""Compare quire's KV memory with vLLM's, without a model or a GPU: what sequences take, and what prompts find cached.

    python tools/compare_kv.py FOLDER --out comparison.json --picture comparison.png
    python tools/compare_kv.py --draw comparison.json --picture comparison.png

vLLM's code is imported from FOLDER (vllm_kv.py says what to install there, and how much of it runs). Both schedulers
have the same memory, the same limits and the same requests; every sampled token is the same.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE)]

import vllm_kv  # noqa: E402

from bench.echo_runner import EchoRunner  # noqa: E402
from quire.bench.document import document, table, write  # noqa: E402
from quire.config import EngineConfig  # noqa: E402
from quire.core.request import Request  # noqa: E402
from quire.core.scheduler import Scheduler  # noqa: E402
from quire.memory.page_layout import MemorySize  # noqa: E402
from quire.memory.paged import PagedMemory  # noqa: E402
from quire.models import read_spec  # noqa: E402
from quire.models.named_configs import named_config  # noqa: E402
from quire.protocol.sampling_params import SamplingParams  # noqa: E402
from quire.protocol.sequence import Sequence as Seq  # noqa: E402
from quire.startup.memory_plan import GIB, plan_memory  # noqa: E402

KV_GIB = 40
MAX_LEN, MAX_SEQS, STEP_TOKENS = 131072, 256, 8192  # of both
LENGTHS = (12, 100, 500, 528, 1000, 8192, 32768)
"""Tokens of the prompts whose memory is counted."""
SEQUENCES, ALL_TOKENS = 16, 131072
"""The most sequences that run at once then, and the most tokens of their prompts together."""
PREFIXES = (100, 300, 1000, 5000)
"""Tokens that prompts begin with in common."""
OWN_TOKENS, OUTPUT = 50, 64
PROMPTS = 5  # with a common prefix, one after the other
TURNS, TURN_TOKENS, TURN_OUTPUT = 6, 60, 100  # of a conversation; its tokens and the answer's of each turn
ARTICLES, ARTICLE_TOKENS, QUESTIONS = (2, 4, 6, 8, 12, 16, 24, 32), 20000, 3
"""Articles of this length: one question about each, then the next one about each."""
HELD_ARTICLES, STATE_TOKENS = 6, 1000
"""The articles that the memory has room for, if every layer with keys keeps all of their tokens, and every other layer
a state in bf16 after each STATE_TOKENS tokens."""


class Variant(NamedTuple):
    """One way to serve a model: an engine, and its settings that are not the default."""

    engine: str
    name: str
    settings: Mapping[str, Any] = {}


WINDOWS = (Variant("quire", "quire"), Variant("vllm", "vLLM"))
CACHED = {"enable_prefix_caching": True}
STATES = (
    *WINDOWS, Variant("quire", "quire, states in bf16", {"state_dtype": "bfloat16"}),
    Variant("vllm", "vLLM, prefixes cached", CACHED),
    Variant("vllm", "vLLM, cached each 16", {**CACHED, "mamba_cache_mode": "align", "prefix_match_unit": 16}),
)  # fmt: skip
"""Without settings vLLM caches no prefixes of models with states. Its states are in bf16, and quire's in fp32."""
NAMES = [variant.name for variant in STATES]
MODELS: dict[str, tuple[Variant, ...]] = {
    "gemma-3-12b": WINDOWS, "gpt-oss-20b": WINDOWS, "gemma-4-31b": WINDOWS, "qwen3-next-80b-a3b": STATES,
    "jamba-52b": STATES,
}  # fmt: skip


class Memory(Protocol):
    """An engine's scheduler and memory, which are measured."""

    def describe(self) -> dict[str, Any]:
        """Return the engine's choices: its groups of layers and their pages."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[list[int], int]:
        """Serve all prompts, `output` tokens each. Return the tokens of each that were found in the cache, and the
        bytes in use when all of them ran and had two tokens at least."""
        ...


class Quire:
    """quire's scheduler and memory of `kv_bytes` for the model of a config.json. `settings` are EngineConfig's."""

    def __init__(self, config: Mapping[str, Any], kv_bytes: int, settings: Mapping[str, Any]) -> None:
        engine = EngineConfig(kv_gib=kv_bytes / GIB, **settings).with_device_defaults("cuda")
        states = 2 if engine.state_dtype == "bfloat16" else 4
        spec = read_spec(dict(config)).with_state_itemsize(2, states)
        plan = plan_memory(engine, spec, "", "bfloat16", 2, "cuda", device_bytes=2**40)
        self.memory = PagedMemory.build(engine, spec, MemorySize(plan.kv_tokens, plan.max_len, 2, plan.kv_bytes))
        self.scheduler = Scheduler(self.memory, token_budget=STEP_TOKENS, max_seqs=MAX_SEQS, max_len=plan.max_len)
        self.runner = EchoRunner(is_constant=True)

    def describe(self) -> dict[str, Any]:
        """As Memory.describe."""
        groups = [
            {"kind": group.kind, "layers": len(group.layers), "page_tokens": group.run_tokens,
             "page_bytes": group.page_bytes, "padding": 1 - group.payload_bytes / group.page_bytes}
            for group in self.memory.kv_config.groups
        ]  # fmt: skip
        return {"prefix_caching": True, "large_page_bytes": self.memory.kv_config.large_bytes, "groups": groups}

    def run(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[list[int], int]:
        """As Memory.run."""
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        requests, seqs, taken = [], [], 0
        for prompt in prompts:
            seqs.append(Seq(self.scheduler.new_seq_id(), list(prompt)))
            requests.append(Request(str(seqs[-1].id), seqs[-1], params, arrival_time=0.0, max_tokens=output))
            self.scheduler.add(requests[-1])
        while self.scheduler.has_unfinished_requests:
            plan = self.scheduler.schedule()
            assert plan is not None, "quire has no room for the requests"
            if not taken and min(len(seq.tokens) - seq.prompt_len for seq in seqs) >= 2:
                assert len(self.scheduler.running) == len(prompts), "a request ended before all ran"
                usage = self.memory.account().usage
                taken = sum(usage) - usage.cached - usage.free
            self.scheduler.update(plan, self.runner.collect(self.runner.submit(plan)))
        return [request.cached_tokens for request in requests], taken


ENGINES: dict[str, Callable[[Mapping[str, Any], int, Mapping[str, Any]], Memory]] = {
    "quire": Quire,
    "vllm": vllm_kv.Vllm,
}


def make(model: str, variant: Variant, kv_bytes: int = KV_GIB * GIB, max_len: int = MAX_LEN) -> Memory:
    """Return a new engine for a named config."""
    limits = {"max_model_len": max_len, "max_num_seqs": MAX_SEQS, "max_num_batched_tokens": STEP_TOKENS}
    return ENGINES[variant.engine](named_config(model), kv_bytes, {**limits, **variant.settings})


def sizes(memory: Memory, draw: random.Random) -> list[dict[str, Any]]:
    """Return the bytes that a decoding sequence takes after a prompt of each of LENGTHS, a mean of several at once."""
    found = []
    for length in LENGTHS:
        count = min(SEQUENCES, ALL_TOKENS // length)
        _, taken = memory.run([tokens(draw, length) for _ in range(count)], OUTPUT)
        found.append({"tokens": length, "sequences": count, "bytes_each": taken / count,
                      "tokens_per_gib": count * length * GIB / taken})  # fmt: skip
    return found


def prefixes(memory: Memory, draw: random.Random) -> list[dict[str, Any]]:
    """Return the cached tokens that prompts with a common prefix find, one after the other, for each of PREFIXES."""
    found = []
    for length in PREFIXES:
        shared = tokens(draw, length)
        hits = [memory.run([shared + tokens(draw, OWN_TOKENS)], OUTPUT)[0][0] for _ in range(PROMPTS)]
        found.append({"prefix": length, "prompt": length + OWN_TOKENS, "hits": hits})
    return found


def conversation(memory: Memory, draw: random.Random) -> dict[str, Any]:
    """Return the lengths of the prompts of a conversation, and the cached tokens that each finds."""
    history, prompts, hits = list[int](), [], []
    for _ in range(TURNS):
        history += tokens(draw, TURN_TOKENS)
        hits += memory.run([history], TURN_OUTPUT)[0]
        prompts.append(len(history))
        history += [vllm_kv.SAMPLED] * TURN_OUTPUT
    return {"prompts": prompts, "hits": hits}


def questions(model: str, variant: Variant) -> dict[str, Any]:
    """Return the share of articles that later questions find cached, for each of ARTICLES, in a memory of one size."""
    spec = read_spec(named_config(model)).with_state_itemsize(2, 2)
    size = HELD_ARTICLES * ARTICLE_TOKENS * (spec.token_bytes(2) + spec.state_bytes // STATE_TOKENS)
    found = []
    for count in ARTICLES:
        memory, draw = make(model, variant, size, ARTICLE_TOKENS + OWN_TOKENS + OUTPUT), random.Random(count)
        articles = [tokens(draw, ARTICLE_TOKENS) for _ in range(count)]
        rounds = [
            [memory.run([article + tokens(draw, OWN_TOKENS)], OUTPUT)[0][0] for article in articles]
            for _ in range(QUESTIONS)
        ]
        later = sum(map(sum, rounds[1:]))
        found.append({"articles": count, "share": later / ((QUESTIONS - 1) * count * ARTICLE_TOKENS)})
    return {"kv_bytes": size, "found": found}


def tokens(draw: random.Random, count: int) -> list[int]:
    """Return random tokens, none of which is the sampled one."""
    return [draw.randrange(100, 30000) for _ in range(count)]


def measure(model: str, variant: Variant) -> dict[str, Any]:
    """Measure a model with a variant: return the plan and all results."""
    memory, draw = make(model, variant), random.Random(0)
    result: dict[str, Any] = {
        "model": model, "engine": variant.engine, "name": variant.name, "settings": dict(variant.settings),
        "plan": memory.describe(), "sizes": sizes(memory, draw),
    }  # fmt: skip
    memory = make(model, variant)
    result |= {"prefixes": prefixes(memory, draw), "conversation": conversation(memory, draw)}
    return {**result, "questions": questions(model, variant)}


def show(results: Sequence[dict[str, Any]]) -> str:
    """Return the results as tables, one for each model."""
    tables = []
    for model in dict.fromkeys(one["model"] for one in results):
        mine = [one for one in results if one["model"] == model]
        columns = [numbers(one) for one in mine]
        rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
        tables.append(table((model, *(one["name"] for one in mine)), rows))
    return "\n\n".join(tables)


def numbers(one: Mapping[str, Any]) -> dict[str, str]:
    """Return the numbers of one result, as text, by their names in the table."""
    talk, found = one["conversation"], dict[str, str]()
    for size in one["sizes"]:
        found[f"MiB of {size['tokens']:,} tokens"] = f"{size['bytes_each'] / 2**20:,.1f}"
    for size in one["sizes"]:
        found[f"tokens in a GiB, of {size['tokens']:,}"] = f"{size['tokens_per_gib']:,.0f}"
    for prefix in one["prefixes"]:
        second, third, *_ = prefix["hits"][1:]
        found[f"found of {prefix['prefix']:,}"] = f"{second:,}" if second == third else f"{second:,}; {third:,}"
    before = sum(prompt + TURN_OUTPUT - 1 for prompt in talk["prompts"][:-1])  # what earlier turns have computed
    found["found by turns"] = f"{sum(talk['hits']) / before:.0%}"
    return found | {f"found of {at['articles']} articles": f"{at['share']:.0%}" for at in one["questions"]["found"]}


def draw_picture(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw a column for each model: memory by prompt length, the share of a common prefix found, and of articles."""
    from quire.bench.plots import COLOURS, figure, save

    models = list(dict.fromkeys(one["model"] for one in results))
    drawn = figure(2.6 * len(models), 6.8)
    grid = drawn.subplots(3, len(models), squeeze=False)
    for column, model in enumerate(models):
        mine = [one for one in results if one["model"] == model]
        top, middle, low = grid[:, column]
        for one in mine:
            style: dict[str, Any] = {
                "color": COLOURS[NAMES.index(one["name"])], "linestyle": "-" if one["engine"] == "quire" else "--",
                "marker": "o", "markersize": 3, "label": one["name"], "alpha": 0.8,
            }  # fmt: skip
            top.plot(LENGTHS, [size["bytes_each"] / 2**20 for size in one["sizes"]], **style)
            middle.plot(PREFIXES, [found["hits"][1] / found["prefix"] for found in one["prefixes"]], **style)
            low.plot(ARTICLES, [found["share"] for found in one["questions"]["found"]], **style)
        top.set(title=model, xscale="log", yscale="log", xlabel="tokens of a prompt")
        middle.set(xscale="log", ylim=(-0.05, 1.05), xlabel="tokens of a common prefix")
        low.set(ylim=(-0.05, 1.05), xlabel=f"articles of {ARTICLE_TOKENS:,} tokens")
        top.legend(fontsize=6)
    for axes, label in zip(grid[:, 0], ("MiB a sequence", "share found, 2nd prompt", "share found, later questions")):
        axes.set_ylabel(label)
    save(drawn, path)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("folder", nargs="?", type=Path, help="where vLLM is installed")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="measure nothing, take the results of this file")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the results (needs matplotlib)")
    return parser


def main(given: list[str]) -> int:
    args = arguments().parse_args(given)
    if args.draw:
        results = json.loads(args.draw.read_text())["results"]
    else:
        if args.folder is None:
            raise SystemExit("Name the folder where vLLM is installed; it may be new")
        vllm_kv.prepare(args.folder.resolve())
        results = []
        for model in args.models:
            for variant in MODELS[model]:
                print(f"{model}: {variant.name}", file=sys.stderr, flush=True)
                results.append(measure(model, variant))
        if args.out:
            content = document("compare_kv", "python tools/compare_kv.py", given, results, real=False)
            write(args.out, {**content, "vllm": vllm_kv.VERSION, "kv_gib": KV_GIB})
    print(show(results))
    if args.picture:
        draw_picture(results, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
