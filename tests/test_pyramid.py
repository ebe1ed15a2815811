"""A Llama with PyramidKV, served on a CPU: what it says is what a dense reference says that keeps lists of positions,
however prompts are cut into steps and pages, in whatever company, and whoever was preempted, forked or swapped."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_pyramid import dense_logprobs

from quire import LLM, SamplingParams
from quire.cli import main
from quire.errors import InputError, StartupError
from quire.worker.warmup import _long_prompt_plans

pytestmark = pytest.mark.xdist_group(name="pyramid")  # they share what takes seconds to make

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 128,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "pyramid_kv": {"budgets": [40, 24, None, 9], "queries": 8, "pool": 5},
}  # fmt: skip
LENGTHS = (61, 7, 24, 41, 90, 33, 9)  # some are kept whole, by all layers or by some
OUTPUTS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pyramid")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def opened(folder: Path, **settings: Any) -> LLM:
    settings = {"kv_tokens": 2048, "max_num_seqs": 16, "page_size": 4, **settings}
    return LLM(
        str(folder), dummy_weights=True, skip_tokenizer_init=True, dtype="float32", seed=3, threads=1, **settings
    )


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, 128) for _ in range(length)] for length in LENGTHS]


def params(**more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=OUTPUTS, ignore_eos=True, detokenize=False, **{"temperature": 0, **more})


def served(llm: LLM, asked: list[list[int]], how: SamplingParams) -> list[Any]:
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], how, use_tqdm=False)
    llm.engine.scheduler.memory.check()
    usage = llm.engine.scheduler.memory.account().usage
    assert usage.used == usage.internal == 0, "something is still held"
    return results


class Said:
    """What the reference says, once for each prompt and outputs."""

    def __init__(self, llm: LLM) -> None:
        self.model, self.spec = llm.engine.runner.model, llm.engine.runner.spec
        self.known: dict[tuple[int, ...], torch.Tensor] = {}

    def check(self, prompt: list[int], output: Any) -> None:
        key = (*prompt, -1, *output.token_ids)
        if key not in self.known:
            self.known[key] = dense_logprobs(self.model, self.spec, prompt, output.token_ids)
        assert len(output.logprobs) == len(output.token_ids) == OUTPUTS
        for there, expected in zip(output.logprobs, self.known[key]):
            for token, top in there.items():
                assert top.logprob == pytest.approx(float(expected[token]), abs=1e-4)


@pytest.fixture(scope="module")
def said(folder: Path) -> Said:
    with opened(folder) as llm:
        return Said(llm)


@pytest.fixture(scope="module")
def roomy(folder: Path, said: Said) -> list[list[int]]:
    """The greedy tokens, in a roomy memory, each prompt alone and in one step."""
    with opened(folder) as llm:
        results = [served(llm, [prompt], params(logprobs=3))[0].outputs[0] for prompt in prompts()]
    for prompt, output in zip(prompts(), results):
        said.check(prompt, output)
    return [output.token_ids for output in results]


@pytest.mark.share(6)
@pytest.mark.parametrize("chunk", [8, 13, 512])
@pytest.mark.parametrize("page", [1, 4, 16])
def test_chunks_and_pages(folder: Path, said: Said, roomy: list[list[int]], page: int, chunk: int) -> None:
    with opened(folder, page_size=page, max_num_batched_tokens=chunk, debug=True) as llm:
        for prompt, expected, result in zip(prompts(), roomy, served(llm, prompts(), params(logprobs=3))):
            said.check(prompt, result.outputs[0])
            assert result.outputs[0].token_ids == expected


@pytest.mark.share(6)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize(("page", "chunk"), [(1, 16), (4, 64), (16, 512)])
def test_preemption(folder: Path, roomy: list[list[int]], page: int, chunk: int, way: str, depth: int) -> None:
    starved = {"kv_tokens": 144, "max_model_len": 128, "swap_gib": 0.01, "debug": True}
    with opened(folder, page_size=page, max_num_batched_tokens=chunk, preemption=way, depth=depth, **starved) as llm:
        tokens = [result.outputs[0].token_ids for result in served(llm, prompts(), params())]
        assert llm.engine.scheduler.preemption_counts[way] > 0
    assert tokens == roomy


@pytest.mark.share(6)
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("memory", ["paged", "uniform", "orca-max"])
def test_backends_and_memories(folder: Path, roomy: list[list[int]], attention: str, memory: str) -> None:
    with opened(folder, attention=attention, memory=memory, max_num_batched_tokens=32) as llm:
        assert [result.outputs[0].token_ids for result in served(llm, prompts(), params())] == roomy


@pytest.mark.share(6)
@pytest.mark.parametrize("way", ["recompute", "swap"])
@pytest.mark.parametrize(("page", "memory"), [(1, "paged"), (16, "paged"), (4, "uniform")])
def test_forks(folder: Path, said: Said, page: int, memory: str, way: str) -> None:
    """Branches share what is left of their prompt, and copy what they write to."""
    how, asked = params(n=3, temperature=1.0, seed=7, logprobs=3), prompts()[:5]
    with opened(folder, page_size=page, memory=memory) as llm:
        expected = served(llm, asked, how)
        assert llm.engine.scheduler.memory.copies > 0 or page == 1
        assert len({tuple(output.token_ids) for output in expected[0].outputs}) == 3
    for prompt, result in zip(asked, expected):
        for output in result.outputs:
            said.check(prompt, output)
    starved = {"kv_tokens": 400, "max_model_len": 128, "swap_gib": 0.01, "debug": True}
    starved |= {"page_size": page, "memory": memory, "preemption": way, "depth": 2}
    with opened(folder, max_num_batched_tokens=32, **starved) as llm:
        again = served(llm, asked, how)
        assert llm.engine.scheduler.preemption_counts[way] > 0
    assert [[o.token_ids for o in r.outputs] for r in again] == [[o.token_ids for o in r.outputs] for r in expected]


def test_beams(folder: Path) -> None:
    how, asked = params(beam_width=4, n=2), [prompt for prompt in prompts() if 24 < len(prompt) < 90] * 3
    with opened(folder) as llm:
        expected = [[output.token_ids for output in result.outputs] for result in served(llm, asked, how)]
    starved = {"kv_tokens": 360, "max_model_len": 128, "swap_gib": 0.01, "max_num_seqs": 32, "debug": True}
    for way in ("recompute", "swap"):
        with opened(folder, max_num_batched_tokens=32, preemption=way, **starved) as llm:
            tokens = [[output.token_ids for output in result.outputs] for result in served(llm, asked, how)]
            assert llm.engine.scheduler.preemption_counts[way] > 0
        assert tokens == expected


def test_a_session(folder: Path, said: Said) -> None:
    """What is appended comes behind what is left of the prompt, several tokens in a step too."""
    prompt = prompts()[4]
    with opened(folder, enable_prefix_caching=True) as llm, llm.session(prompt, width=2, max_tokens=30, top=4) as node:
        node.append(5, 6, 7)
        other = node.fork()
        node.append(*range(8, 16))
        other.append(9)
        for branch in (node, other):
            top, expected = branch.next(4), dense_logprobs(said.model, said.spec, prompt, [*branch.tokens, 0])[-1]
            assert [float(expected[token]) for token in top.ids] == pytest.approx(list(top.logprobs), abs=1e-4)


def test_plans_are_logged_and_replayed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "plans"
    with opened(folder, kv_tokens=144, max_model_len=128, depth=2, log_plans=str(log)) as llm:
        served(llm, prompts(), params())
    assert main(["replay", str(log)]) == 0
    assert "4 groups of layers" in capsys.readouterr().out


def test_a_rehearsal_leaves_no_trace(folder: Path, roomy: list[list[int]]) -> None:
    with opened(folder) as llm:
        runner = llm.engine.runner
        plans = list(_long_prompt_plans(runner, 64))
        assert len(plans) == 2
        for plan in plans:
            runner.collect(runner.submit(plan))
        assert runner.prompt_lengths.lengths[0] == 1
        assert runner.store.buffer.isfinite().all()
        runner.store.clear_scratch()
        assert [result.outputs[0].token_ids for result in served(llm, prompts(), params())] == roomy


def test_pages_are_released_when_the_prompt_is_whole(folder: Path) -> None:
    with opened(folder, max_num_batched_tokens=32) as llm:
        engine, memory = llm.engine, llm.engine.scheduler.memory
        engine.add("one", prompts()[4], params())
        held = []
        while engine.has_unfinished_requests:
            engine.step()
            for resident in memory.seq_pages.values():
                held.append([len(table) for table in resident.tables])
            memory.check()
        # 40, 24, all or 9 tokens of 90 are kept, in pages of 4; the first output takes a place in the step after.
        assert held[:3] == [[8] * 4, [16] * 4, [10, 6, 23, 3]]
        assert held[-1] == [16, 12, 28, 8]


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with opened(folder) as llm:
        with pytest.raises(InputError, match=r"prompt_logprobs is 2, .* part of each prompt") as refused:
            llm.engine.add("a", [5] * 50, params(prompt_logprobs=2))
        assert refused.value.param == "prompt_logprobs"
        with pytest.raises(InputError, match="prefix 'system'"):
            llm.engine.register_prefix("system", [5] * 50)
        assert not llm.engine.has_unfinished_requests
    with pytest.raises(StartupError, match=r"--max-num-batched-tokens is 7, .* last 8 tokens"):
        opened(folder, max_num_batched_tokens=7)
    with pytest.raises(StartupError, match="--prefix-tokens is 16"):
        opened(folder, prefix_tokens=16)
    with pytest.raises(StartupError, match="--memory is virtual"):
        opened(folder, memory="virtual")


def test_branches_need_room_for_a_whole_prompt_each(folder: Path) -> None:
    """They may come back by recomputation, which computes the prompt for each of them."""
    with opened(folder, kv_tokens=256, max_model_len=200) as llm:
        with pytest.raises(InputError, match="don't fit"):
            llm.engine.add("a", [5] * 100, params(n=3))
        llm.engine.add("b", [5] * 100, params(n=2))


def test_no_prefix_is_found(folder: Path, roomy: list[list[int]]) -> None:
    with opened(folder, enable_prefix_caching=True) as llm:
        for _ in range(2):
            assert [result.outputs[0].token_ids for result in served(llm, prompts(), params())] == roomy
        assert llm.engine.scheduler.memory.account().sharing.hits == 0
