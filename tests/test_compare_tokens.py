"""tools/compare_tokens.py: how it counts, and quire over a tiny file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf_files
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_models
import compare_tokens

from quire import SamplingParams

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2}  # fmt: skip


def said(*tokens: int) -> dict[str, Any]:
    return {"ids": [1, 2], "tokens": list(tokens), "margins": [0.5, 0.25, 0.125][: len(tokens)]}


def test_answers_part_at_their_first_other_token_or_where_one_ends() -> None:
    reference = [said(5, 6, 7), said(5, 6, 7), said(5, 6), said(5, 6)]
    greedy = [[5, 6, 7], [5, 8, 9], [5, 6, 3], [5]]
    same = [[True, True, True], [True, False, True], [True, True], [True, False]]
    found = compare_tokens.agreement(reference, greedy, same)
    assert found == {"prompts": 4, "whole": 2, "tokens": 10, "behind": 8, "margins": [0.25, 0.25]}


def test_tokens_behind_the_reference_are_compared_one_by_one() -> None:
    found = compare_tokens.beside_itself([said(5, 6, 7), said(5, 6, 7)], [said(5, 6, 7), said(4, 6, 8)])
    assert found == {"prompts": 2, "whole": 1, "tokens": 6, "behind": 4, "margins": [0.5]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    compare_models._random(tmp_path, TINY)
    return gguf_files.convert(tmp_path, "llama", tmp_path / "model.gguf", "bf16", rope__freq_base=10000.0)


def test_quire_agrees_with_its_own_tokens_and_not_with_others(file: Path) -> None:
    args = compare_tokens.arguments().parse_args([str(file.parent), "--tokens", "4"])
    engine = compare_tokens.Quire(args, file, "float32")
    reference: list[dict[str, Any]] = [{"ids": ids, "margins": [0.5] * 4} for ids in ([5, 6, 7], [8, 9], [11] * 20)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    for one, made in zip(reference, engine.llm.generate([one["ids"] for one in reference], params, use_tqdm=False)):
        one["tokens"] = list(made.outputs[0].token_ids)
    assert engine.beside(reference, []) == {"prompts": 3, "whole": 3, "tokens": 12, "behind": 12, "margins": []}
    reference[1]["tokens"][3] += 1
    reference[1]["margins"][3] = 0.25
    assert engine.beside(reference, []) == {"prompts": 3, "whole": 2, "tokens": 12, "behind": 11, "margins": [0.25]}
    engine.llm.close()
