"""Encoders on a GPU, with the kernels that are chosen there, beside the same weights on a CPU in fp32."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

from quire.models.vision import VisionSettings, build_encoder, encode_image
from quire.models.vision.named_configs import PREPROCESSOR_CONFIGS, VISION_CONFIGS
from quire.weights.dummy import fill_dummy_weights

pytestmark = pytest.mark.gpu

WIDTH = 256


def smaller(name: str) -> VisionSettings:
    """The published shape, narrower and with few layers."""
    config: dict[str, Any] = deepcopy(VISION_CONFIGS[name])
    tower = {"num_hidden_layers": 3, "hidden_size": 288, "intermediate_size": 272, "num_attention_heads": 4}
    if name == "phi-3-vision":
        del config["img_processor"]["image_dim_out"]
        config["img_processor"]["vision_config"] = tower
    else:
        config["vision_config"] |= tower
    if name == "llama-3.2-11b-vision":
        del config["vision_config"]["vision_output_dim"]
        config["vision_config"] |= {"attention_heads": 4, "intermediate_layers_indices": [1, 2], "num_global_layers": 2}
    if name.startswith("gemma-4"):
        config["vision_config"]["num_key_value_heads"] = 4
    if name == "paligemma2-10b":
        config["vision_config"]["projection_dim"] = config["projection_dim"] = WIDTH
    config |= {"hidden_size": WIDTH, "text_config": {"hidden_size": WIDTH}, "llm_config": {"hidden_size": WIDTH}}
    return VisionSettings.from_config(config, PREPROCESSOR_CONFIGS[name])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", VISION_CONFIGS)
def test_rows_are_the_cpus(name: str, dtype: torch.dtype, near: float, deterministic: bool) -> None:
    settings = smaller(name)
    exact = build_encoder(settings, torch.float32, torch.device("cpu"))
    fill_dummy_weights(exact, 7)
    with torch.no_grad():  # what is small at first, so that each part counts
        for parameter in exact.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)
    encoder, rounded = (build_encoder(settings, dtype, torch.device(device)) for device in ("cuda", "cpu"))
    for other in (encoder, rounded):
        other.load_state_dict(exact.state_dict())
    exact.prepare()
    rounded.prepare()
    encoder.prepare(deterministic)
    for size in ((700, 900), (90, 1300)):
        grid = settings.tiling.choose_grid(*size)
        tile = settings.tiling.tile_size
        count = grid.rows * grid.columns + (settings.kind in ("llava", "internvl")) if grid.rows else 1
        generator = torch.Generator().manual_seed(1)
        pixels = torch.randint(0, 256, (count, tile, tile, 3), generator=generator, dtype=torch.uint8)
        want, got = encode_image(exact, pixels, grid, 8), encode_image(encoder, pixels.cuda(), grid, 8)
        assert got.dtype == dtype
        assert got.shape == want.shape == (settings.tiling.num_embeds(grid), WIDTH)
        # Gemma-4's scores of attention are not scaled down, so that rounding alone changes its rows by a tenth.
        rounding = (encode_image(rounded, pixels, grid, 8).float() - want).abs().max()
        assert (got.float().cpu() - want).abs().max() <= max(near * want.abs().max(), 1.5 * rounding)
