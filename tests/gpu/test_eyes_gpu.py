"""Models that see, on a GPU: log-probabilities are transformers'; steps as graphs beside steps with
pictures; shapes with tall heads in bf16, attending both ways; and no kernel is compiled when the first picture comes.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gpu_serving as serving
import numpy as np
import pytest
import transformers
from gpu_serving import nothing_is_compiled

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers of the tests there

from pictured_models import MODELS
from test_seeing_logits import check, chunk_of

from quire.core.engine import Engine
from quire.models.named_configs import CONFIGS
from quire.models.vision import VisionSettings
from quire.protocol.images import ImageItem, ImagePixels

pytestmark = pytest.mark.gpu

SAME_PALIGEMMA = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 23)
SMALL = {"num_hidden_layers": 4, "intermediate_size": 2048}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda case: MODELS[case](tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("vision_cache", ["pages", "inside", "off"])
@pytest.mark.parametrize(("chunk", "preemption"), [(7, "recompute"), (512, "swap")])
@pytest.mark.parametrize("case", MODELS)
def test_logits(saved: Any, case: str, chunk: int, preemption: str, vision_cache: str) -> None:
    """To what fp32 sums in another order leave, and exponentials of another library."""
    settings = {"device": "cuda", "preemption": preemption, "vision_cache": vision_cache, "page_size": 4}
    if case == "paligemma" and not SAME_PALIGEMMA:
        pytest.skip(f"transformers {transformers.__version__} has another PaliGemma than the one that it became")
    check(saved(case), case, 2, within=2e-3, max_num_batched_tokens=chunk_of(case, chunk), **settings)


def shape(name: str) -> dict[str, Any]:
    """A named shape with few layers of text, and of its tower."""
    config = {**CONFIGS[name]}
    for key in ("text_config", "llm_config"):
        if key in config:
            config[key] = {**config[key], **SMALL}
    config["vision_config"] = {**config["vision_config"], "num_hidden_layers": 3}
    return config


def started(name: str, folder: Path, **settings: Any) -> Engine:
    config = shape(name)
    preprocessor = config.pop("preprocessor_config")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    both = {"kv_tokens": 24576, "max_num_batched_tokens": 2048, "max_num_seqs": 16, "max_model_len": 6144, **settings}
    return serving.engine_of(model=str(folder), swap_gib=0.25, **both)


def shown(name: str, height: int, width: int, seed: int) -> tuple[list[int], tuple[ImageItem, ...], list[ImagePixels]]:
    """A prompt with one picture of noise."""
    config = shape(name)
    tiling = VisionSettings.from_config(config, config["preprocessor_config"]).tiling
    grid = tiling.choose_grid(height, width)
    pixels = (tiling.num_parts(grid), tiling.tile_size, tiling.tile_size, 3)
    data = np.random.default_rng(seed).integers(0, 256, pixels, dtype=np.uint8).tobytes()
    rows = tiling.num_embeds(grid)
    medium = ImageItem(hashlib.sha256(data).digest(), 5, rows, rows, tiling.num_parts(grid))
    tokens = [3 * seed + i for i in range(5)] + [100] * rows + [7 + i for i in range(9)]
    return tokens, (medium,), [ImagePixels(medium.key, pixels, data, tuple(grid))]


def answers(engine: Engine, name: str) -> list[list[int]]:
    """Pictures and texts, in waves."""
    params = serving.greedy(12)
    found: dict[str, list[int]] = {}

    def step() -> None:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.tokens)

    for i in range(8):
        tokens, media, pixels = shown(name, 300 + 90 * i, 500, i % 5)
        engine.add(f"picture {i}", tokens, params, images=media, pixels=pixels)
        engine.add(f"text {i}", serving.prompt(i, 20 + 30 * i, 5000), params)
        for _ in range(i % 3):
            step()
    while engine.has_unfinished_requests:
        step()
    return [found[key] for key in sorted(found)]


@pytest.mark.parametrize("name", ["llava-onevision-7b", "internvl2-8b", "paligemma2-10b"])
def test_tokens_in_bf16(name: str, tmp_path: Path) -> None:
    """Wherever rows lie. Products of towers are torch's, whose rounding may depend on how many parts share a step."""
    found = []
    for settings in ({}, {"vision_cache": "inside"}, {"cuda_graphs": False}, {"memory": "uniform"}):
        engine = started(name, tmp_path, deterministic=True, **settings)
        found.append(answers(engine, name))
        engine.scheduler.memory.check()
        engine.close()
    assert all(len(tokens) == 12 for tokens in found[0])
    differ = [sum(a != b for a, b in zip(one, found[0])) for one in found]
    assert max(differ) <= 2, differ


@pytest.mark.parametrize("name", ["llava-onevision-7b", "internvl2-8b"])
def test_no_kernel_is_compiled_for_the_first_picture(name: str, tmp_path: Path) -> None:
    engine = started(name, tmp_path)
    with nothing_is_compiled():
        answers(engine, name)
    engine.close()
