"""tools/compare_kv.py: quire's side of it, by hand; and that the committed measurement is what it measures."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import compare_kv
import vllm_kv

MEASUREMENT = Path(__file__).parents[1] / "docs" / "measurements" / "kv_beside_vllm.json"
MEASURED: list[dict[str, Any]] = json.loads(MEASUREMENT.read_text())["results"]


def test_sizes_and_hits_by_hand() -> None:
    # gpt-oss-20b: 12 layers with a window of 128 and 12 without, each 2,048 bytes a token, in pages of 16 tokens
    memory = compare_kv.make("gpt-oss-20b", compare_kv.WINDOWS[0])
    draw, page = random.Random(0), 12 * 16 * 2048
    prompts = [compare_kv.tokens(draw, 12) for _ in range(3)]
    assert memory.run(prompts, 4) == ([0, 0, 0], 3 * 2 * page)
    prompt = compare_kv.tokens(draw, 1000)
    # 1,002 tokens: 63 pages of all, and those of the 128 tokens before the next one: from 875, in page 54, to 1,002
    assert memory.run([prompt], 4) == ([0], (63 + 9) * page)
    assert memory.run([prompt[:500] + compare_kv.tokens(draw, 100)], 4)[0] == [496]


def test_the_measurement_is_of_this_code() -> None:
    shown = [(one["model"], one["name"]) for one in MEASURED]
    assert shown == [(model, one.name) for model, variants in compare_kv.MODELS.items() for one in variants]
    for one in MEASURED:
        if one["engine"] == "quire":
            variant = compare_kv.Variant("quire", one["name"], one["settings"])
            memory, draw = compare_kv.make(one["model"], variant), random.Random(0)
            assert memory.describe() == one["plan"], f"{one['model']}: run tools/compare_kv.py again"
            assert compare_kv.prefixes(memory, draw) == one["prefixes"], (
                f"{one['model']}: run tools/compare_kv.py again"
            )


def test_without_vllm_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=rf"pip install --no-deps --target {tmp_path} vllm=={vllm_kv.VERSION} "):
        compare_kv.main([str(tmp_path)])
    with pytest.raises(SystemExit, match="Name the folder where vLLM is installed"):
        compare_kv.main([])
