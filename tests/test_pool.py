"""Two models over one KV memory, on a CPU: pages go from one to the other and back as their loads change, and every
token is what an engine with a memory of its own gives."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from quire import LLM, EngineConfig, Pool, SamplingParams
from quire.errors import InputError, Overloaded, StartupError
from quire.memory.paged import PagedMemory
from quire.startup.build import build

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 6, "num_key_value_heads": 2,
    **SHAPE,
}  # fmt: skip
WINDOWED = {
    "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "num_hidden_layers": 8,
    "num_key_value_heads": 2, "sliding_window": 48, "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
    **SHAPE,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
BEAMS = SamplingParams(beam_width=2, n=2, max_tokens=12, ignore_eos=True, detokenize=False)


class Folders(NamedTuple):
    llama: str
    windowed: str


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made = []
    for config in (LLAMA, WINDOWED):
        folder = tmp_path_factory.mktemp(config["model_type"])
        (folder / "config.json").write_text(json.dumps(config))
        made.append(str(folder))
    return Folders(*made)


def config(folder: str, **settings: Any) -> EngineConfig:
    settings = {"dtype": "float32", "seed": 3, "threads": 1, "max_num_seqs": 16, **settings}
    return EngineConfig.of(model=folder, dummy_weights=True, skip_tokenizer_init=True, **settings)


@contextmanager
def both(
    folders: Folders, mib: float, unlike: dict[str, Any] | None = None, **settings: Any
) -> Iterator[tuple[LLM, LLM]]:
    """The llama and the windowed model over a pool of so many MiB; `unlike` are settings of the latter."""
    first, second = config(folders.llama, **settings), config(folders.windowed, **{**settings, **(unlike or {})})
    pool = Pool([first, second], kv_gib=mib / 1024)
    with LLM(folders.llama, custom_kv_cache=pool) as llama, LLM(folders.windowed, custom_kv_cache=pool) as windowed:
        yield llama, windowed


def prompts(count: int, length: int, seed: int = 0) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    stem = [rng.randrange(3, 512) for _ in range(length // 2)]
    rest = [[rng.randrange(3, 512) for _ in range(length - len(stem))] for _ in range(count)]
    return [{"prompt_token_ids": stem + own} for own in rest]


def memory(llm: LLM) -> PagedMemory:
    found = llm.engine.scheduler.memory
    assert isinstance(found, PagedMemory)
    return found


def share(llm: LLM) -> float:
    """Of the pool, what pages of this model's sequences take."""
    part = memory(llm).page_pool
    return part.used_bytes / memory(llm).account().usage.total


def watch(llm: LLM, *others: LLM) -> list[float]:
    """Check both memories after each step of this model's engine, and note its share."""
    seen: list[float] = []
    step = llm.engine._advance

    def checked(outputs: list[Any]) -> bool:
        went = step(outputs)
        for one in (llm, *others):
            memory(one).check()
        seen.append(share(llm))
        return went

    llm.engine._advance = checked
    return seen


def tokens(llm: LLM, asked: Any, params: SamplingParams = GREEDY) -> list[list[int]]:
    results = llm.generate(asked, params, use_tqdm=False)
    return [output.token_ids for result in results for output in result.outputs]


ROUNDS = [prompts(14, 160, seed) for seed in range(3)]


@pytest.fixture(scope="module")
def alone(folders: Folders) -> list[list[list[list[int]]]]:
    """What each model says with a memory of its own: of the rounds, and of beams."""
    said = []
    for folder in folders:
        with LLM.of(build(config(folder, kv_tokens=8192))) as llm:
            said.append([*(tokens(llm, asked) for asked in ROUNDS), tokens(llm, ROUNDS[0][:3], BEAMS)])
    return said


@pytest.mark.parametrize(
    "settings",
    [
        {"preemption": "recompute"},
        {"preemption": "swap", "swap_gib": 0.01},
        {"page_sizes": "max", "preemption": "recompute"},
        {"unlike": {"page_size": 4}, "preemption": "recompute", "debug": True},
    ],
    ids=["recompute", "swap", "max", "unlike-pages"],
)  # fmt: skip
def test_loads_that_alternate_each_have_most_of_the_memory(
    folders: Folders, alone: list[list[list[list[int]]]], settings: dict[str, Any]
) -> None:
    with both(folders, 1.5, **settings) as models:
        seen = [watch(*models), watch(*reversed(models))]
        assert len({llm.engine.runner.store.buffer.data_ptr() for llm in models}) == 1
        for i, asked in enumerate(ROUNDS):
            for llm, said in zip(models, alone):
                assert tokens(llm, asked) == said[i]
        for llm, said in zip(models, alone):
            assert tokens(llm, ROUNDS[0][:3], BEAMS) == said[3]
        assert min(map(max, seen)) > 0.7
        assert memory(models[0]).page_pool.evictions > 0
        for llm in models:
            assert memory(llm).account().usage.used == 0
        if settings.get("preemption") == "swap":
            assert sum(memory(llm).account().sharing.swapped_in for llm in models) > 0


def long(seed: int = 9) -> dict[str, list[int]]:
    return prompts(1, 420, seed)[0]


LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, detokenize=False)


def test_a_session_that_holds_the_memory_is_named_and_nothing_breaks(folders: Folders) -> None:
    with both(folders, 1) as (llama, windowed):
        with llama.session(long(), width=1, max_tokens=60) as node:
            node.next(1)
            assert share(llama) > 0.5
            with pytest.raises(Overloaded, match="leave their sessions"):
                windowed.generate([long()], LONG, use_tqdm=False)
            memory(windowed).check()
        assert len(tokens(windowed, [long()], LONG)[0]) == 60
        assert len(tokens(llama, [long()], LONG)[0]) == 60


def test_registered_prefixes_of_one_are_out_of_the_others_reach(folders: Folders) -> None:
    """A request that fits only without them is refused when it comes, not preempted for ever."""
    with both(folders, 1) as (llama, _), both(folders, 1, unlike={"prefix_tokens": 256}) as (less, pinned):
        assert (less.prompts.max_len, llama.prompts.max_len) == (320, 512)
        assert pinned.register_prefix("stem", long()["prompt_token_ids"][:224]) == 224
        longest = long()["prompt_token_ids"][: less.prompts.max_len - 60]
        assert len(tokens(less, [{"prompt_token_ids": longest}], LONG)[0]) == 60
        memory(less).check()


def test_one_thread_uses_a_pool(folders: Folders) -> None:
    with both(folders, 1) as (llama, _):
        seen: list[BaseException] = []

        def use() -> None:
            try:
                llama.generate(prompts(1, 8), use_tqdm=False)
            except InputError as error:
                seen.append(error)

        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
        assert "by the thread that made their pool" in str(seen[0])
        assert len(tokens(llama, prompts(1, 8))[0]) == 24


@pytest.mark.parametrize(
    ("unlike", "says"),
    [
        ({"memory": "virtual"}, "--memory virtual"),
        ({"page_sizes": "own"}, "--page-sizes own"),
        ({"association": "none"}, "association bulk, none"),
        ({"dtype": "bfloat16"}, "the formats float32, bfloat16"),
        ({"prefix_tokens": 512}, "prefix-tokens is 512"),
        ({"pp": 2}, "--pp 2 and --executor auto"),
        ({"executor": "process"}, "--executor process"),
        ({"max_model_len": 512, "page_size": 512}, "large page"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_models_that_cannot_share_are_refused(folders: Folders, unlike: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        Pool([config(folders.llama), config(folders.windowed, **unlike)], kv_gib=1 / 1024)


def test_a_pool_names_its_models(folders: Folders) -> None:
    pinned = config(folders.windowed, max_model_len=128, prefix_tokens=256)
    with pytest.raises(StartupError, match="the pool holds 320 tokens of llama"):
        Pool([config(folders.llama, max_model_len=400), pinned], kv_gib=1 / 1024)
    with pytest.raises(StartupError, match="0 models"):
        Pool([], kv_gib=1)
    with pytest.raises(StartupError, match="out of memory"):
        Pool([config(folders.llama)], kv_gib=2**19)
    pool = Pool([config(folders.llama)], kv_gib=1 / 1024)
    with pytest.raises(StartupError, match="is no model of the pool"):
        LLM(folders.windowed, custom_kv_cache=pool)
    with pytest.raises(StartupError, match="seed is given beside a pool"):
        LLM(folders.llama, custom_kv_cache=pool, seed=4)
    LLM(folders.llama, custom_kv_cache=pool).close()
    with pytest.raises(StartupError, match="none is left"):
        LLM(folders.llama, custom_kv_cache=pool)


@pytest.mark.share(4)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_however_the_memory_is_cut_tokens_are_the_same(folders: Folders, page_size: int) -> None:
    """Of a model alone, whose pages have two sizes: roomy and starved, with prompts in chunks that end anywhere."""
    asked, greedy, beams = prompts(10, 64), [], []
    for way in (*({"page_sizes": sizes} for sizes in ("lcm", "max", "gcd", "own")), {"memory": "uniform"}):
        settings = {**way, "page_size": page_size, "swap_gib": 0.05, "debug": True}
        with LLM.of(build(config(folders.windowed, kv_tokens=4096, **settings))) as roomy:
            greedy.append(tokens(roomy, asked, LONG))
            beams.append(tokens(roomy, asked[:3], BEAMS))
        settings |= {"kv_tokens": 192, "max_num_batched_tokens": 37}
        with LLM.of(build(config(folders.windowed, **settings))) as starved:
            greedy.append(tokens(starved, asked, LONG))
            assert starved.engine.scheduler.num_preemptions > 0
            starved.engine.scheduler.memory.check()
    assert all(said == greedy[0] for said in greedy)
    assert all(said == beams[0] for said in beams)
