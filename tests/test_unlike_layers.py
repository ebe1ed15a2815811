"""A model of full and window layers, served on a CPU while pages of two sizes move in one memory: prefixes are found,
beams share and part, requests are swapped, and every token is what a roomy memory with pages of one size gives."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.errors import StartupError

CONFIG = {
    "architectures": ["MinistralForCausalLM"], "model_type": "ministral", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512,
    "max_position_embeddings": 512, "sliding_window": 48, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2, "hidden_act": "silu", "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)
BEAMS = SamplingParams(beam_width=4, n=2, max_tokens=24, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ministral")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    stem = [rng.randrange(3, 512) for _ in range(64)]
    return [stem + [rng.randrange(3, 512) for _ in range(24)] for _ in range(10)]


def served(folder: Path, beams: bool = True, **settings: Any) -> tuple[list[list[int]], Any, Any]:
    """Greedy requests, then beams (where there is room): their tokens, the memory's account, and its geometry."""
    settings = {"dummy_weights": True, "skip_tokenizer_init": True, "dtype": "float32", "seed": 3, **settings}
    with LLM(str(folder), max_num_seqs=24, threads=1, **settings) as llm:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts()]
        results = llm.generate(asked, GREEDY, use_tqdm=False)
        if beams:
            results += llm.generate(asked[:3], BEAMS, use_tqdm=False)
        memory = llm.engine.scheduler.memory
        memory.check()
        tokens = [output.token_ids for result in results for output in result.outputs]
        return tokens, (memory.account(), dict(llm.engine.scheduler.preempted)), memory.geometry


@pytest.mark.parametrize("sizes", ["lcm", "own"])
def test_pages_of_two_sizes_serve_the_same_tokens(
    sizes: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roomy, _, padded = served(folder, kv_tokens=16384, page_sizes="max")
    assert len({group.page_bytes for group in padded.groups}) == 1
    log = tmp_path / "plans"
    tight = {"kv_tokens": 560 if sizes == "lcm" else 640, "page_sizes": sizes, "debug": True}
    swapped, (account, preempted), geometry = served(
        folder, preemption="swap", swap_gib=0.05, log_plans=str(log), **tight
    )
    assert [group.page_bytes for group in geometry.groups] == [16 * 2 * 256, 16 * 6 * 256]
    assert geometry.large_bytes == (16 * 6 * 256 if sizes == "lcm" else 0)
    assert swapped == roomy
    assert preempted["swap"] > 0
    assert account.sharing.swapped_in > 0
    assert account.sharing.hits > 0
    assert account.sharing.copies > 0
    recomputed, (_, preempted), _ = served(folder, preemption="recompute", **tight)
    assert recomputed == roomy
    assert preempted["recompute"] > 0
    assert main(["replay", str(log)]) == 0
    assert "2 groups of layers" in capsys.readouterr().out


@pytest.mark.share(4)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_however_the_memory_is_cut_tokens_are_the_same(folder: Path, page_size: int) -> None:
    """Roomy and starved, with prompts in chunks that end anywhere."""
    ways = [*({"page_sizes": sizes} for sizes in ("lcm", "max", "gcd", "own")), {"memory": "uniform"}]
    greedy, beams = [], []
    for way in ways:
        settings = {**way, "page_size": page_size, "swap_gib": 0.05, "debug": True}
        tokens = served(folder, kv_tokens=4096, **settings)[0]
        starved, (_, preempted), _ = served(folder, False, kv_tokens=192, max_num_batched_tokens=37, **settings)
        assert sum(preempted.values()) > 0
        greedy += [tokens[:10], starved]
        beams.append(tokens[10:])
    assert all(tokens == greedy[0] for tokens in greedy)
    assert all(tokens == beams[0] for tokens in beams)


def test_pages_that_hold_no_whole_rows_are_refused_with_the_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.control.memory import layout

    laid_out = layout.page_layout

    def odd(*arguments: Any) -> Any:
        sheets = laid_out(*arguments)
        return sheets._replace(pages=tuple(s._replace(page_bytes=s.page_bytes + 2) for s in sheets.pages))

    monkeypatch.setattr(layout, "page_layout", odd)
    with pytest.raises(StartupError, match="a page of 8,194 bytes"):
        served(folder, kv_tokens=640, page_sizes="own")
