"""Every tower and connector, tiny and random, in fp32, loaded from a checkpoint: transformers' features to 1e-4."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pictured_models import InternVLChat, Phi3Vision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.gemma4.image_processing_pil_gemma4 import convert_image_to_patches

from quire.models.vision import VisionSettings, blocks, build_encoder, encode_image
from quire.weights.loader import load_weights

TEXT = {
    "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 16, "vocab_size": 60, "head_dim": 12, "pad_token_id": 0,
}  # fmt: skip
TOWER = {  # of 31 pixels 28 are seen
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 31,
    "patch_size": 7,
}  # fmt: skip
PINPOINTS = [[31 * rows, 31 * columns] for rows in range(1, 4) for columns in range(1, 4)]


def randomised(model: nn.Module) -> nn.Module:
    """Every parameter moved away from what it is at first: gates of 0, norms of 1."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.float().eval()


def of_family(family: str, **options: Any) -> nn.Module:
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(family, **options)
    return randomised(transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))


def llava(**options: Any) -> nn.Module:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
    text = {"model_type": "qwen2", **TEXT}
    more = {"image_grid_pinpoints": PINPOINTS, "vision_aspect_ratio": "anyres_max_4", "image_token_index": 59}
    return of_family("llava_onevision", vision_config=vision, text_config=text, **more, **options)


def paligemma() -> nn.Module:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
    more = {"projection_dim": 24, "image_token_index": 59}
    return of_family("paligemma", vision_config=vision, text_config={"model_type": "gemma2", **TEXT}, **more)


def gemma3() -> nn.Module:
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER}
    text = {"model_type": "gemma3_text", **TEXT}
    return of_family("gemma3", vision_config=vision, text_config=text, mm_tokens_per_image=4, image_token_index=59)


def gemma4(**options: Any) -> nn.Module:
    """Bounds cut some of the inputs and outputs off."""
    vision = {
        "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 3,
        "position_embedding_size": 840, **options,
    }  # fmt: skip
    model = of_family("gemma4", vision_config=vision, text_config=TEXT, image_token_id=59)
    for name, buffer in model.named_buffers():
        if name.endswith(("_min", "_max")):
            buffer.fill_((0.6 if "input" in name else 1.2) * (-1 if name.endswith("_min") else 1.5))
        if name.endswith(("std_bias", "std_scale")):
            buffer.copy_(torch.linspace(0.5, 2, len(buffer)))
    return model


def internvl(vision: dict[str, Any] | None = None, **options: Any) -> nn.Module:
    tower = {**TOWER, "image_size": [28, 28], "patch_size": [7, 7], **(vision or {})}
    return of_family("internvl", vision_config=tower, text_config={"model_type": "qwen2", **TEXT}, **options)


def mllama(**vision: Any) -> nn.Module:
    """transformers counts layers' outputs, the model's authors their inputs: its 0 is our 1."""
    taps = [1] if "taps" not in vision else vision.pop("taps")
    tower = {**TOWER, "attention_heads": 4, "num_global_layers": 2, "intermediate_layers_indices": taps, **vision}
    tower["vision_output_dim"] = 32 * (1 + len(taps))
    text = {"model_type": "mllama_text_model", **TEXT, "cross_attention_layers": [0]}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    return of_family("mllama", vision_config=tower, text_config=text)


def saved(model: nn.Module, folder: Path, **save: Any) -> dict[str, Any]:
    """The model's vision tensors alone in `folder`, under the names that transformers writes; its config."""
    model.save_pretrained(folder, **save)
    without_text(folder, "language_model", "lm_head")
    return json.loads((folder / "config.json").read_text())


def without_text(folder: Path, *parts: str) -> None:
    """Leave the tensors of the text out of a checkpoint: those with one of `parts` in their names."""
    path = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(path).items() if not any(part in k for part in parts)}, path)


def ours(config: dict[str, Any], folder: Path, prepare: bool = True, **preprocessor: Any) -> Any:
    """Our encoder, loaded, of as many parameters as its settings say."""
    encoder = build_encoder(VisionSettings.from_config(config, preprocessor), torch.float32, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in encoder.parameters()) == encoder.settings.parameters
    load_weights(encoder, folder)
    if prepare:
        encoder.prepare()
    return encoder


# Towers and connectors

SIZES = [
    (31, 31), (7, 5), (1, 90), (200, 1), (62, 93), (93, 62), (400, 300), (33, 150), (500, 500), (1, 1), (999, 37),
    (93, 47),
]  # fmt: skip
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


def pixels(tiles: int, side: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (tiles, side, side, 3), generator=generator, dtype=torch.uint8)


def opened(encoder: Any, height: int, width: int, *alone: bool) -> tuple[Any, Any]:
    """How a picture of that size is cut, and its tiles as the tower sees them."""
    grid = encoder.tiling.choose_grid(height, width, *alone)
    seen = encoder.preprocess(pixels(encoder.tiling.num_parts(grid), encoder.tiling.tile_size), grid)
    assert len(seen) == encoder.tiling.num_parts(grid) <= encoder.tiling.max_parts
    return grid, seen


def check(encoder: Any, rows: Tensor, expected: Tensor, grid: Any) -> None:
    assert len(rows) == encoder.tiling.num_embeds(grid) <= encoder.tiling.max_embeds
    torch.testing.assert_close(rows, expected, **CLOSE)


LLAVA: list[dict[str, Any]] = [
    {}, {"vision_feature_layer": -2},
    {"multimodal_projector_bias": False, "projector_hidden_act": "gelu_pytorch_tanh"},
]  # fmt: skip


@pytest.mark.parametrize("options", LLAVA, ids=["as published", "the layer before the last", "no biases"])
def test_llava(options: dict[str, Any], tmp_path: Path) -> None:
    theirs, layer = llava(**options), options.get("vision_feature_layer", -1)
    encoder = ours(saved(theirs, tmp_path), tmp_path)
    for (height, width), alone in product(SIZES, (True, False)):
        grid, seen = opened(encoder, height, width, alone)
        with torch.no_grad():
            found = theirs.model.get_image_features(
                seen[None], torch.tensor([[height, width]]), batch_num_images=torch.tensor([1 if alone else 2]),
                vision_feature_layer=layer, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_4",
            ).pooler_output[0]  # fmt: skip
            check(encoder, encoder.assemble(encoder.encode(seen), grid), found, grid)


INTERN: dict[str, dict[str, Any]] = {
    "as published": {},
    "biases, norms of queries and keys": {"attention_bias": True, "use_qk_norm": True},
    "RMS norms": {"norm_type": "rms_norm", "hidden_act": "gelu_pytorch_tanh"},
    "a final norm": {"use_mean_pooling": False},
}


@pytest.mark.parametrize("case", INTERN)
def test_internvl(case: str, tmp_path: Path) -> None:
    theirs = internvl(INTERN[case])
    encoder = ours(saved(theirs, tmp_path), tmp_path)
    for height, width in SIZES:
        grid, seen = opened(encoder, height, width)
        with torch.no_grad():
            found = theirs.model.get_image_features(seen).pooler_output.flatten(0, 1)
            check(encoder, encoder.assemble(encoder.encode(seen), grid), found, grid)


def test_internvl_under_its_published_names(tmp_path: Path) -> None:
    theirs = internvl({"attention_bias": True, "use_qk_norm": True})
    written = saved(theirs, tmp_path)
    expected = ours(written, tmp_path)
    config = {
        "architectures": ["InternVLChatModel"],
        "vision_config": {**TOWER, "image_size": 28, "norm_type": "layer_norm", "qk_normalization": True,
                          "qkv_bias": True},
        "llm_config": {"hidden_size": 24}, "force_image_size": 28, "downsample_ratio": 0.5, "ps_version": "v2",
        "use_thumbnail": True, "max_dynamic_patch": 6,
    }  # fmt: skip
    save_file(published(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    encoder = ours(config, tmp_path, size=28)
    grid = encoder.tiling.choose_grid(30, 80)
    assert encoder.tiling.max_parts == 7
    assert grid[:2] == (1, 3)
    bytes_ = pixels(3, 28)
    with torch.no_grad():
        got, want = (encode_image(model, bytes_, grid, 2) for model in (encoder, expected))
    torch.testing.assert_close(got, want, **CLOSE)


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """InternVL's tensors under the names of InternVLChatModel, which keeps queries, keys and values as one."""
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in InternVLChat.VISION.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    for name in [name for name in renamed if ".q_proj." in name]:
        parts = [renamed.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        renamed[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return renamed


@pytest.mark.parametrize("more", [{}, {"num_hidden_layers": 4, "taps": [0, 2], "hidden_act": "gelu_pytorch_tanh"}])
def test_mllama(more: dict[str, Any], tmp_path: Path) -> None:
    theirs = mllama(**dict(more))
    config = saved(theirs, tmp_path)
    taps = config["vision_config"]["intermediate_layers_indices"]
    config["vision_config"]["intermediate_layers_indices"] = [tap + 1 for tap in taps]
    encoder = ours(config, tmp_path)
    seen_grids = set()
    for height, width in [*SIZES, (31, 62), (31, 93), (31, 124), (62, 31), (62, 62), (93, 31), (124, 31), (500, 9)]:
        grid = encoder.tiling.choose_grid(height, width)
        count = grid.rows * grid.columns
        seen = encoder.preprocess(pixels(count, 31), grid)
        assert len(seen) == encoder.tiling.num_parts(grid) == 1
        padded = torch.zeros(1, 1, 4, 3, 31, 31)
        padded[0, 0, :count] = seen[0]
        mask = (torch.arange(4) < count).long()[None, None]
        with torch.no_grad():
            states = theirs.model.vision_model(padded, torch.tensor([[encoder.tiling.aspect_ratio_id(grid)]]), mask)
            found = theirs.model.multi_modal_projector(states.last_hidden_state)[0, 0, :count].flatten(0, 1)
            check(encoder, encoder.assemble(encoder.encode(seen, grid), grid), found, grid)
        seen_grids.add(grid[:2])
    assert len(seen_grids) == 8, "every shape of four tiles"


@pytest.mark.parametrize("order", ["sub_glb", "glb_sub"])
def test_phi3(order: str, tmp_path: Path) -> None:
    theirs = Phi3Vision(tmp_path)
    without_text(tmp_path, "model.layers", "model.norm", "model.embed_tokens", "lm_head")
    config = json.loads((tmp_path / "config.json").read_text())
    config["embd_layer"]["hd_transform_order"] = order
    encoder = ours(config, tmp_path, num_crops=4)
    for height, width in SIZES:
        shown = theirs.shown(height, width)
        assert shown.parts <= encoder.tiling.max_parts == 5
        with torch.no_grad():
            found = theirs.rows(shown)
        if order == "glb_sub":
            cut, end, whole = found.split((len(found) - 7, 1, 6))
            found = torch.cat((whole, end, cut))
        check(encoder, encode_image(encoder, shown.tiles, shown.grid, at_once=2), found, shown.grid)


@pytest.mark.parametrize(
    "options", [{}, {"use_clipped_linears": True, "standardize": True}, {"pooling_kernel_size": 2, "head_dim": 12}],
    ids=["plain", "clipped and standardised", "rows of 2 x 2 patches"],
)  # fmt: skip
def test_gemma4(options: dict[str, Any], tmp_path: Path) -> None:
    theirs = gemma4(**options)
    encoder = ours(saved(theirs, tmp_path), tmp_path, max_soft_tokens=13)
    side = encoder.tiling.patches_per_side
    shapes = set()
    for height, width in SIZES:
        grid, tile = encoder.tiling.choose_grid(height, width), encoder.tiling.tile_size
        count = grid.rows * grid.columns
        tiles = pixels(count, tile)
        image = tiles.view(grid.rows, grid.columns, tile, tile, 3).transpose(1, 2)
        image = image.reshape(grid.rows * tile, grid.columns * tile, 3).permute(2, 0, 1)
        lines, columns = torch.meshgrid(
            torch.arange(grid.rows * side), torch.arange(grid.columns * side), indexing="ij"
        )
        padding = (13 - count) * side**2
        patches = nn.functional.pad(
            torch.from_numpy(convert_image_to_patches(image.numpy() / 255, 4)), (0, 0, 0, padding)
        )
        positions = torch.stack((columns.flatten(), lines.flatten()), -1)
        positions = nn.functional.pad(positions, (0, 0, 0, padding), value=-1)
        with torch.no_grad():
            [found] = theirs.model.get_image_features(patches[None], positions[None]).pooler_output
            check(encoder, encode_image(encoder, tiles, grid, at_once=2), found, grid)
        shapes.add(grid[:2])
    assert len(shapes) > 5


@pytest.mark.parametrize("family", [llava, paligemma, gemma3, gemma4, internvl, mllama])
def test_names_before_the_newer_ones(family: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Checkpoints published before transformers 5 lack "model." before the tower; its own layout in memory has it."""
    model = family()
    config = saved(model, tmp_path)
    expected = {k: v.clone() for k, v in ours(config, tmp_path, prepare=False).state_dict().items()}
    plain = {k: v for k, v in model.state_dict().items() if "language_model" not in k and "lm_head" not in k}
    older = {k.removeprefix("model."): v for k, v in plain.items()}
    nested = {k.replace("vision_tower.e", "vision_tower.vision_model.e"): v for k, v in older.items()}
    for tensors in (plain, older, nested):
        if family in (llava, paligemma, gemma3) or "vision_tower.vision_model" not in " ".join(tensors):
            save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
            got = ours(config, tmp_path, prepare=False).state_dict()
            assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_connector_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = ours(saved(llava(), tmp_path), tmp_path)
    grid = encoder.tiling.choose_grid(90, 60)
    cut = pixels(encoder.tiling.num_parts(grid), 31)
    whole = encode_image(encoder, cut, grid, 9)
    monkeypatch.setattr(blocks, "PROJECTOR_ROWS", 5)
    torch.testing.assert_close(encode_image(encoder, cut, grid, 9), whole, atol=1e-6, rtol=1e-6)
