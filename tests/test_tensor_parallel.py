"""Several ranks say what one says: the same tokens over chunks, prefix hits, preemption both ways, branches, beams,
penalties, windows and memories. Most ranks are on threads of this process, with a real exchange between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import gguf_files
import pytest
from test_equality import FAMILIES, random_model

from quire import LLM
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import build

PROMPTS = [[(7 * i + j * j) % 97 for j in range(n)] for i, n in enumerate((1, 5, 16, 23, 37))]
SETTINGS = {
    "skip_tokenizer_init": True, "dtype": "float32", "kv_tokens": 4096, "max_num_batched_tokens": 64, "debug": True,
    "max_num_seqs": 8, "threads": 1, "device": "cpu", "page_size": 4,
}  # fmt: skip
PARAMS = (
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(seed=5, max_tokens=12, ignore_eos=True, top_p=0.9, top_k=40),
    SamplingParams(seed=9, n=3, max_tokens=9, ignore_eos=True, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(beam_width=3, n=2, max_tokens=6, ignore_eos=True, temperature=0),
    SamplingParams(seed=2, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=1, min_p=0.01),
)  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_batched_tokens": 7},
    "recompute": {"kv_tokens": 192, "page_size": 16, "max_num_seqs": 16, "preemption": "recompute"},
    "swap": {"kv_tokens": 192, "page_size": 16, "max_num_seqs": 16, "preemption": "swap", "swap_gib": 0.01},
    "depth": {"depth": 2, "enable_prefix_caching": False, "table_scope": "layer"},
    "virtual": {"memory": "virtual", "kv_tokens": 2048},
    "reserved": {"memory": "orca-max", "kv_tokens": 4096},
}


def saver(factory: pytest.TempPathFactory, families: Mapping[str, Callable[[], Any]]) -> Callable[[str], Path]:
    """Return a function that saves a random model of a family, once, and returns its folder."""

    def saved(family: str) -> Path:
        folder = factory.mktemp("model")
        random_model(families[family]()).save_pretrained(folder)
        return folder

    return cache(saved)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return saver(tmp_path_factory, FAMILIES)


def engine_of(folder: Path, **settings: Any) -> Engine:
    return build(EngineConfig.of(model=str(folder), **{**SETTINGS, **settings})).engine


def answers(engine: Engine, rounds: int) -> Iterator[Any]:
    """Yield the tokens of prompts with parameters of each kind; in a second round prefixes are found."""
    for again in range(rounds):
        for i, prompt in enumerate(PROMPTS):
            for j in (i, i + again + 1):
                engine.add(f"{i} {j}", prompt, PARAMS[j % len(PARAMS)])
        told: dict[tuple[str, int], list[int]] = {}
        while engine.has_unfinished_requests:
            for output in engine.step():
                told.setdefault((output.request_id, output.branch), []).extend(output.tokens)
        yield told


def tokens_of(llm: LLM, prompts: Any, params: SamplingParams) -> list[list[int]]:
    return [result.outputs[0].token_ids for result in llm.generate(prompts, params, use_tqdm=False)]


def both(folder: Path, tp: int, rounds: int = 2, **settings: Any) -> tuple[Engine, Engine]:
    own = "executor", "on_rank_failure", "pp", "expert_parallel"
    theirs = {name: settings.pop(name) for name in own if name in settings}
    one, several = engine_of(folder, **settings), engine_of(folder, tp=tp, **theirs, **settings)
    try:
        for wanted, got in zip(answers(one, rounds), answers(several, rounds), strict=True):
            assert got == wanted, "several ranks say something else than one"
    finally:
        several.close()
    return one, several


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_say_what_one_says(folders: Any, case: str) -> None:
    one, several = both(folders("llama"), 2, **CASES[case])
    for engine in (one, several):
        assert (engine.scheduler.num_preemptions > 0) == (case in ("recompute", "swap"))
        assert case != "chunks" or engine.scheduler.memory.account().sharing.hits > 0


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("family", "case", "layout"),
    [("mixtral", "swap", {"tp": 2}), ("qwen2_moe", "chunks", {"tp": 4}), ("gpt_oss", "recompute", {"tp": 2, "pp": 2})],
    ids=str,
)
def test_ranks_with_whole_experts_say_what_one_says(
    folders: Any, family: str, case: str, layout: dict[str, int]
) -> None:
    """Of six experts, four ranks have two or one."""
    both(folders(family), **layout, expert_parallel=True, **CASES[case])


def test_processes_with_whole_experts(folders: Any) -> None:
    """With quire's own kernels and packed weights."""
    settings: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "rank_timeout": 60}
    llm, alone = (LLM(str(folders("mixtral")), **SETTINGS, **more) for more in (settings, {}))
    assert llm.engine.runner.layout == ParallelLayout(2, expert_parallel=True)
    assert tokens_of(llm, PROMPTS, PARAMS[0]) == tokens_of(alone, PROMPTS, PARAMS[0])
    llm.close()


TINY = Path(__file__).parents[1] / "src" / "quire" / "assets" / "tiny"


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("quantization", "layout"),
    [("fp8", {"tp": 2}), ("fp8", {"tp": 4}), ("int8", {"tp": 2}), ("fp8", {"tp": 1, "pp": 2})],
    ids=str,
)
def test_quantised_ranks_say_what_one_says(quantization: str, layout: dict[str, int]) -> None:
    """Weights are slices of the undivided quantized ones, so tokens are the same."""
    both(TINY, rounds=1, quantization=quantization, **layout)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_ranks_of_a_file_of_blocks_say_what_one_says(layout: dict[str, int], tmp_path: Path) -> None:
    both(gguf_files.convert(TINY, "llama", tmp_path / "tiny.gguf", "q8_0"), rounds=1, **layout)


@pytest.mark.parametrize("layout", [{"tp": 2, "depth": 2}, {"tp": 1, "pp": 2}], ids=str)
def test_ranks_that_are_started_anew_say_the_same(folders: Any, threads: list[Any], layout: dict[str, int]) -> None:
    """Greedy and sampled requests, branches and beams, whatever was cached or in flight."""
    left = iter((3, 9, 12))  # steps of each start

    def fail_later(runner: Any, shard: Shard) -> None:
        if shard.global_rank and (step := next(left, None)) is not None:
            collect, steps = runner.collect, iter(range(1, step))
            runner.collect = lambda ticket: collect(ticket) if next(steps, 0) else 1 // 0

    threads.append(fail_later)
    _, engine = both(folders("llama"), rounds=1, **layout, on_rank_failure="restart", swap_gib=0.01)
    assert engine.stats.restarts == 3
    engine.scheduler.memory.check()
    assert engine.scheduler.memory.account().sharing.tables == 0


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 3}, "--tp is 3, which doesn't divide the model: it has 4 heads.*Use 1, 2 or 4"),
        ({"tp": 2, "executor": "inline"}, "--executor is inline, and --tp is 2"),
        ({"expert_parallel": True}, "--expert-parallel is given, and --tp is 1: experts are.*Give a --tp of 2 or more"),
        ({"pp": 2, "expert_parallel": True}, "--expert-parallel is given, and --tp is 1"),
        ({"tp": 2, "expert_parallel": True}, "--expert-parallel is given, and .* has no experts. Leave it out"),
        ({"pp": 3}, "--pp is 3, and the model has 2 layers. Use 2 or less"),
        ({"pp": 2, "executor": "inline"}, "--executor is inline, and --pp is 2"),
        ({"tp": 8, "pp": 8}, "--tp is 8 and --pp 8: 64 ranks. At most 63"),
        ({"on_rank_failure": "restart"}, "--on-rank-failure is restart, and the model is where the engine is"),
        ({"tp": 2, "on_rank_failure": "again"}, "--on-rank-failure is 'again'. Choose one of: exit, restart"),
        ({"tp": 2, "on_rank_failure": "restart", "log_plans": "log"}, "--on-rank-failure is restart, and --log-plans"),
        ({"tp": 2, "quantization": "int8"}, "a rank would have 16 of 32 columns of .*, of which 32 share a scale"),
        ({"tp": 2, "attention": "triton"}, "--attention is triton, which needs a GPU"),
        ({"tp": 2.0}, "--tp is 2.0. It must be a whole number between 1 and"),
        ({"tp": -1}, "--tp is -1. It must be between 1 and"),
        ({"pp": True}, "--pp is True"),
        ({"pp": 0}, "--pp is 0. It must be between 1 and 63"),
    ],
)
@pytest.mark.usefixtures("threads")
def test_what_cannot_be_divided_is_refused(folders: Any, settings: dict[str, Any], told: str) -> None:
    with pytest.raises(StartupError, match=told):
        engine_of(folders("llama"), **settings)
