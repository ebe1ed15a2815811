"""tools/compare_structured.py: what its numbers are, that outputs are held against their schema, and one process of
quire over the bundled model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_structured

from quire.bench.traces import tokenizer_of
from quire.config import EngineConfig
from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return tokenizer_of(EngineConfig(model="tiny"))


def run(seconds: float, tokens: int) -> dict[str, Any]:
    ms = 1e3 * seconds / tokens
    return {"seconds": seconds, "tokens": tokens, "ended": 1, "valid": 1, "others": 0.5, "ms_a_token": ms}


def test_the_median_of_the_rounds_ratios_counts() -> None:
    rounds = [{"quire": run(1.0, 100), "llama": run(llama, 50)} for llama in (1.0, 3.0, 2.0)]
    result = compare_structured.result_of("flat, 1", "llama", rounds)
    assert result["times_as_fast"] == {"by the token": 4.0, "by the outputs": 2.0}
    assert result["ratios"]["by the token"] == [2.0, 6.0, 4.0]
    assert (result["ms_a_token"], result["cores_used_by_others"]) == ({"quire": 10.0, "llama": 40.0}, 0.5)
    assert "2.00-6.00" in compare_structured.show([result], "llama")


def test_what_ended_is_held_against_its_schema(words: Tokenizer) -> None:
    schema = {"type": "array", "items": {"type": "integer"}}

    def found(text: str, *more: int) -> dict[str, Any]:
        tokens = [*words.encode(text, add_special_tokens=False), *more]
        return {"seconds": 1.0, "others": 0.0, "end": words.eos_ids[0], "found": [tokens]}

    [end] = words.eos_ids
    for text, more, expected in (("[1, 2]", (end,), (1, 1)), ('["a"', (), (0, 0)), ('["a"]', (end,), (1, 0)),
                                 ("[1", (end,), (1, 0))):  # fmt: skip
        told = compare_structured.checked(found(text, *more), schema, words)
        assert (told["ended"], told["valid"]) == expected, text


def test_one_process_of_quire(words: Tokenizer, tmp_path: Path) -> None:
    args = compare_structured.arguments().parse_args([str(tmp_path), "--tokens", "24", "--repeats", "1"])
    given = [one for one in compare_structured.workloads(words) if one["name"] in ("long keys, 1", "none, 8")]
    short = {"name": "short", "schema": {"enum": [7]}, "prompts": given[0]["prompts"]}
    keys, free, ended = compare_structured.run_one(args, "quire", Path("tiny"), [*given, short])
    assert words.decode(keys["found"][0], skip_special_tokens=True).lstrip("{ \n\t").startswith('"the_measured_value')
    assert [len(tokens) for tokens in free["found"]] == [24] * 8
    assert compare_structured.checked(free, None, words)["tokens"] == 8 * 24
    told = compare_structured.checked(ended, short["schema"], words)
    assert (told["ended"], told["valid"]) == (1, 1)
