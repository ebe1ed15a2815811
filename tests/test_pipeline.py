"""Stages say what one rank says: the same tokens over chunks, prefix hits, preemption both ways, branches, beams,
windows, states and memories. Most ranks are on threads of this process, with real pipes between them."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import test_state_logits
import torch
import transformers
from test_equality import FAMILIES, FRAMED, GEMMA2, GPT2, OPT, SIZES
from test_tensor_parallel import CASES, PARAMS, PROMPTS, SETTINGS, answers, both, engine_of, saver, tokens_of

from quire import LLM
from quire.config import EngineConfig
from quire.errors import EngineDead
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.parallel_layout import Shard
from quire.protocol.step_plan import PageCopy
from quire.startup.checkpoint import read_checkpoint
from quire.startup.loader import _load_model

THREE = {"num_hidden_layers": 3}
DEEP: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**{**SIZES, **THREE}, tie_word_embeddings=True),
    "gemma2": lambda: transformers.Gemma2Config(**{**GEMMA2, "num_hidden_layers": 5}),
    "opt, norms behind": lambda: transformers.OPTConfig(
        **{**OPT, **THREE, "word_embed_proj_dim": 16}, do_layer_norm_before=False
    ),
    "gpt2": lambda: transformers.GPT2Config(**{**GPT2, "n_layer": 3}),
    "ministral": FAMILIES["ministral"],
    "smollm3": FRAMED["smollm3"],
    "olmo2": lambda: transformers.Olmo2Config(**{**SIZES, **THREE}),
    "qwen2": lambda: transformers.Qwen2Config(**{**SIZES, **THREE}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return saver(tmp_path_factory, DEEP)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("case", CASES)
def test_two_stages_say_what_one_says(folders: Any, case: str) -> None:
    pp = 3 if case == "virtual" else 2  # whose stages have as many layers each
    one, several = both(folders("llama"), 1, pp=pp, **CASES[case])
    for engine in (one, several):
        assert (engine.scheduler.num_preemptions > 0) == (case in ("recompute", "swap"))
        assert case != "chunks" or engine.scheduler.memory.account().sharing.hits > 0


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("family", DEEP)
def test_three_stages_of_every_family_say_what_one_says(folders: Any, family: str) -> None:
    """Tied heads, norms after layers, learned positions, windows in some layers; stages of different sizes."""
    both(folders(family), 1, 1, pp=3, max_num_batched_tokens=16)


@pytest.mark.usefixtures("threads")
def test_chunks_of_a_prompt_go_beside_rows_that_draw(folders: Any) -> None:
    """At most one stage's share of rows samples in a step; a prompt's chunks fill the rest."""
    engine = engine_of(folders("llama"), pp=2, max_num_batched_tokens=16)
    long = replace(PARAMS[0], max_tokens=60)
    lengths = dict.fromkeys("0123456", 0)
    for i in range(7):
        engine.add(str(i), [3, 1, i], long)
    for _ in range(16):
        for output in engine.step():
            lengths[output.request_id] += len(output.tokens)
    assert max(lengths.values()) - min(lengths.values()) <= 2, "each gets its tokens in turn"
    engine.add("long", [j % 97 for j in range(100)], long)
    steps, first = 0, None
    while first is None:
        steps += 1
        first = next((output for output in engine.step() if output.request_id == "long" and output.tokens), None)
    engine.close()
    assert steps <= 12  # 100 tokens in chunks of 12 or more, and the steps in flight; 17 with one in every second step


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("case", "pp", "preemption"),
    [
        ("jamba, attention last", 2, "swap"),
        ("jamba", 3, "recompute"),
        ("mamba", 2, "swap"),
        ("granite hybrid, experts", 2, "swap"),
        ("nemotron_h", 3, "recompute"),
        ("lfm2", 2, "recompute"),
        ("qwen3_next", 2, "swap"),
    ],
)
def test_stages_with_states_say_what_transformers_says(tmp_path: Path, case: str, pp: int, preemption: str) -> None:
    model = test_state_logits.Saved(case, tmp_path)
    settings = {"pp": pp, "page_size": 4, "max_num_batched_tokens": 24, "preemption": preemption}
    test_state_logits.check(model, test_state_logits.SHORT, 2, **settings)


def test_stages_are_processes_and_one_that_is_killed_ends_all(folders: Any) -> None:
    """With quire's own kernels, which compute with packed weights."""
    llm, alone = (LLM(str(folders("llama")), **SETTINGS, **more) for more in ({"pp": 2, "rank_timeout": 60}, {}))
    assert tokens_of(llm, PROMPTS, PARAMS[0]) == tokens_of(alone, PROMPTS, PARAMS[0])
    runner: Any = llm.engine.runner
    pids = [side.child.process.pid for side in runner.ranks]
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"rank 0 was ended by signal 9 \(SIGKILL\)"):
        llm.generate(PROMPTS, PARAMS[0])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    llm.close()


def weights_of(folder: Path, part: Shard, **settings: Any) -> Any:
    """Return the files that a shard's model is loaded from, and its weights by name, before they are prepared."""
    config = EngineConfig(model=str(folder), device="cpu", **settings)
    model, files = _load_model(
        config, read_checkpoint(config).for_shard(part), torch.float32, torch.device("cpu"), False, part
    )
    return files, dict(model.named_parameters())


@pytest.mark.parametrize("dummy", [True, False], ids=["dummy", "loaded"])
@pytest.mark.parametrize(
    ("family", "tp", "pp"),
    [*((family, 1, 3) for family in DEEP), *((family, 2, 2) for family in DEEP if family != "olmo2")],
)
def test_weights_of_stages_are_those_of_the_whole(folders: Any, family: str, tp: int, pp: int, dummy: bool) -> None:
    """Bit for bit, and none is missing, tied heads included."""
    for rank in range(tp):
        _, whole = weights_of(folders(family), Shard(rank, tp), dummy_weights=dummy)
        found: set[str] = set()
        for stage in range(pp):
            _, own = weights_of(folders(family), Shard(rank, tp, stage, pp), dummy_weights=dummy)
            for name, weight in own.items():
                assert torch.equal(weight, whole[name]), name
            found |= own.keys()
        assert found == whole.keys()


def test_a_stage_reads_its_layers_only(folders: Any) -> None:
    """The first and the last stage both have a tied head."""
    read = [weights_of(folders("llama"), Shard(0, 1, stage, 3))[0].read_bytes for stage in range(3)]
    embedding, norm = 97 * 32 * 4, 32 * 4
    layer = (32 * 32 * 2 + 16 * 32 * 2 + 3 * 32 * 48 + 2 * 32) * 4
    assert read == [embedding + layer + norm, layer + norm, embedding + layer + norm]


FAULTS: dict[str, str] = {
    "a journal entry skipped on one stage": r"rank 0 applied or sampled differently from rank 1 in step \d",
    "a stage that gives the rows of another step": r"sent \(number, rows, columns, bytes\) \[2, .*, not",
    "what is to be added is lost between stages": "several ranks say something else than one",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_bugs_are_noticed(folders: Any, threads: list[Any], fault: str) -> None:
    threads.append(lambda runner, shard: plant(runner, fault) if shard.is_first_stage else None)
    if fault.startswith("what is to be added"):  # by tokens alone
        with pytest.raises(AssertionError, match=FAULTS[fault]):
            both(folders("llama"), 1, 1, pp=2)
        return
    engine = engine_of(folders("llama"), pp=2)
    with pytest.raises(EngineDead, match=FAULTS[fault]):
        list(answers(engine, 1))
    engine.close()


def plant(runner: Any, fault: str) -> None:
    send, bind = runner.pipes.send, runner.bind

    def twice(x: torch.Tensor, delta: torch.Tensor | None) -> None:
        runner.pipes.num_sent += 1
        send(x, delta)

    def bound(geometry: KVCacheConfig) -> None:
        bind(geometry)
        replay = runner.store.apply_page_ops
        runner.store.apply_page_ops = lambda journal: replay(
            tuple(entry for entry in journal if type(entry) is not PageCopy)
        )

    if fault.startswith("a journal"):
        runner.bind = bound
    elif fault.startswith("a stage"):
        runner.pipes.send = twice
    else:
        runner.pipes.send = lambda x, delta: send(x, None)
