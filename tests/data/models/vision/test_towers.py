"""Every tower and connector, tiny and random, in fp32, loaded from a checkpoint: transformers' features to 1e-4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eyes
import pytest
import torch
import transformers
from pictured_models import Projection
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.data.models.vision import Grid, blocks, rows_of
from quire.data.weights.dummy import fill_dummy
from quire.errors import StartupError

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
    grid = encoder.tiling.grid(height, width, *alone)
    seen = encoder.open(pixels(encoder.tiling.parts(grid), encoder.tiling.tile), grid)
    assert len(seen) == encoder.tiling.parts(grid) <= encoder.tiling.most_parts
    return grid, seen


def check(encoder: Any, rows: Tensor, expected: Tensor, grid: Any) -> None:
    assert len(rows) == encoder.tiling.rows(grid) <= encoder.tiling.most_rows
    torch.testing.assert_close(rows, expected, **CLOSE)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_llava(height: int, width: int, tmp_path: Path) -> None:
    theirs = eyes.llava()
    encoder = eyes.ours(eyes.saved(theirs, tmp_path), tmp_path)
    for alone in (True, False):
        grid, seen = opened(encoder, height, width, alone)
        with torch.no_grad():
            found = theirs.model.get_image_features(
                seen[None], torch.tensor([[height, width]]), batch_num_images=torch.tensor([1 if alone else 2]),
                vision_feature_layer=-1, vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_4",
            ).pooler_output[0]  # fmt: skip
            check(encoder, encoder.join(encoder.encode(seen), grid), found, grid)


def test_llava_without_biases_and_counted(tmp_path: Path) -> None:
    theirs = eyes.llava(multimodal_projector_bias=False, projector_hidden_act="gelu_pytorch_tanh")
    encoder = eyes.ours(eyes.saved(theirs, tmp_path), tmp_path, prepare=False)
    grid, whole = opened(encoder, 40, 30)
    with torch.no_grad():
        found = theirs.model.multi_modal_projector(theirs.model.vision_tower(whole).last_hidden_state)  # behind a norm
        rows = encoder.join(encoder.encode(whole), grid)
        assert not torch.allclose(rows[:16], found[0], **CLOSE), "LLaVA reads what the last layer gives, without it"
        plain = theirs.model.vision_tower(whole, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(rows[:16], theirs.model.multi_modal_projector(plain)[0], **CLOSE)


def test_the_layer_before_the_last(tmp_path: Path) -> None:
    theirs = eyes.llava(vision_feature_layer=-2)
    encoder = eyes.ours(eyes.saved(theirs, tmp_path), tmp_path)
    grid, seen = opened(encoder, 60, 60)
    with torch.no_grad():
        found = theirs.model.get_image_features(seen[None], torch.tensor([[60, 60]])).pooler_output[0]
        check(encoder, encoder.join(encoder.encode(seen), grid), found, grid)


def test_paligemma(tmp_path: Path) -> None:
    theirs = eyes.paligemma()
    encoder = eyes.ours(eyes.saved(theirs, tmp_path), tmp_path)
    grid, seen = opened(encoder, 50, 3)
    with torch.no_grad():
        found = theirs.model.get_image_features(seen).pooler_output[0]
        check(encoder, encoder.join(encoder.encode(seen), grid), found, grid)
    assert encoder.tiling.parts(grid) == 1
    assert encoder.tiling.rows(grid) == encoder.tiling.most_rows == 16


INTERN: dict[str, dict[str, Any]] = {
    "as published": {},
    "biases, norms of queries and keys": {"attention_bias": True, "use_qk_norm": True},
    "RMS norms": {"norm_type": "rms_norm", "hidden_act": "gelu_pytorch_tanh"},
    "a final norm": {"use_mean_pooling": False},
}


@pytest.mark.parametrize("case", INTERN)
def test_internvl(case: str, tmp_path: Path) -> None:
    theirs = eyes.internvl(INTERN[case])
    encoder = eyes.ours(eyes.saved(theirs, tmp_path), tmp_path)
    for height, width in SIZES:
        grid, seen = opened(encoder, height, width)
        with torch.no_grad():
            found = theirs.model.get_image_features(seen).pooler_output.flatten(0, 1)
            check(encoder, encoder.join(encoder.encode(seen), grid), found, grid)


def test_internvl_under_its_published_names(tmp_path: Path) -> None:
    theirs = eyes.internvl({"attention_bias": True, "use_qk_norm": True})
    written = eyes.saved(theirs, tmp_path)
    expected = eyes.ours(written, tmp_path)
    config = {
        "architectures": ["InternVLChatModel"],
        "vision_config": {**eyes.TOWER, "image_size": 28, "norm_type": "layer_norm", "qk_normalization": True,
                          "qkv_bias": True},
        "llm_config": {"hidden_size": 24}, "force_image_size": 28, "downsample_ratio": 0.5, "ps_version": "v2",
        "use_thumbnail": True, "max_dynamic_patch": 6,
    }  # fmt: skip
    save_file(published(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    encoder = eyes.ours(config, tmp_path, size=28)
    grid = encoder.tiling.grid(30, 80)
    assert encoder.tiling.most_parts == 7
    assert grid[:2] == (1, 3)
    bytes_ = pixels(3, 28)
    with torch.no_grad():
        got, want = (rows_of(model, bytes_, grid, 2) for model in (encoder, expected))
    torch.testing.assert_close(got, want, **CLOSE)


def published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """InternVL's tensors under the names of InternVLChatModel, which keeps queries, keys and values as one."""
    words = {
        "model.vision_tower.": "vision_model.", "vision_tower.": "vision_model.", "cls_token": "class_embedding",
        "position_embeddings": "position_embedding", "patch_embeddings.projection": "patch_embedding",
        "encoder.layer.": "encoder.layers.", "attention.projection_layer": "attn.proj", "attention.": "attn.",
        "layernorm_before": "norm1", "layernorm_after": "norm2", "lambda_": "ls",
        "model.multi_modal_projector.": "multi_modal_projector.", "multi_modal_projector.layer_norm": "mlp1.0",
        "multi_modal_projector.linear_1": "mlp1.1", "multi_modal_projector.linear_2": "mlp1.3",
    }  # fmt: skip
    renamed = {}
    for name, tensor in tensors.items():
        for old, new in words.items():
            name = name.replace(old, new)
        renamed[name] = tensor
    for name in [name for name in renamed if ".q_proj." in name]:
        parts = [renamed.pop(name.replace("q_proj", f"{x}_proj")) for x in "qkv"]
        renamed[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return renamed


@pytest.mark.parametrize("more", [{}, {"num_hidden_layers": 4, "taps": [0, 2], "hidden_act": "gelu_pytorch_tanh"}])
def test_mllama(more: dict[str, Any], tmp_path: Path) -> None:
    theirs = eyes.mllama(**dict(more))
    config = eyes.saved(theirs, tmp_path)
    taps = config["vision_config"]["intermediate_layers_indices"]
    config["vision_config"]["intermediate_layers_indices"] = [tap + 1 for tap in taps]
    encoder = eyes.ours(config, tmp_path)
    seen_grids = set()
    for height, width in [*SIZES, (31, 62), (31, 93), (31, 124), (62, 31), (62, 62), (93, 31), (124, 31), (500, 9)]:
        grid = encoder.tiling.grid(height, width)
        count = grid.rows * grid.columns
        seen = encoder.open(pixels(count, 31), grid)
        assert len(seen) == encoder.tiling.parts(grid) == 1
        padded = torch.zeros(1, 1, 4, 3, 31, 31)
        padded[0, 0, :count] = seen[0]
        mask = (torch.arange(4) < count).long()[None, None]
        with torch.no_grad():
            states = theirs.model.vision_model(padded, torch.tensor([[encoder.tiling.shape(grid)]]), mask)
            found = theirs.model.multi_modal_projector(states.last_hidden_state)[0, 0, :count].flatten(0, 1)
            check(encoder, encoder.join(encoder.encode(seen, grid), grid), found, grid)
        seen_grids.add(grid[:2])
    assert len(seen_grids) == 8, "every shape of four tiles"


PHI3: dict[str, Any] = {
    "architectures": ["Phi3VForCausalLM"],
    "hidden_size": 32,
    "embd_layer": {"projection_cls": "mlp", "use_hd_transform": True, "with_learnable_separator": True},
    "img_processor": {"name": "clip_vision_model", "image_dim_out": 32, "layer_idx": -2,
                      "vision_config": {**eyes.TOWER, "image_size": 28}},
}  # fmt: skip


@pytest.mark.parametrize("order", ["sub_glb", "glb_sub"])
def test_phi3(order: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    clip = eyes.randomised(
        transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**eyes.TOWER | {"image_size": 28}))
    )
    projection = eyes.randomised(Projection())
    root = "model.vision_embed_tokens."
    tensors = {f"{root}img_processor.vision_model.{k}": v for k, v in clip.state_dict().items()}
    tensors |= {f"{root}{k}": v for k, v in projection.state_dict().items()}
    save_file(tensors | {f"{root}wte.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    config = {**PHI3, "embd_layer": {**PHI3["embd_layer"], "hd_transform_order": order}}
    encoder = eyes.ours(config, tmp_path, num_crops=6)
    for height, width in SIZES:
        grid = encoder.tiling.grid(height, width)
        tiles = pixels(encoder.tiling.parts(grid) - 1, 28)
        seen = encoder.open(tiles, grid)
        assert len(seen) == encoder.tiling.parts(grid) <= encoder.tiling.most_parts == 7
        with torch.no_grad():
            hidden = clip(seen, output_hidden_states=True).hidden_states[-2][:, 1:]
            found = projection(hidden, grid.rows, grid.columns)
        if order == "glb_sub":
            cut, end, whole = found.split((len(found) - 7, 1, 6))
            found = torch.cat((whole, end, cut))
        check(encoder, rows_of(encoder, tiles, grid, at_once=2), found, grid)


@pytest.mark.parametrize("family", ["llava", "paligemma", "internvl", "mllama"])
def test_names_before_the_newer_ones(family: str, tmp_path: Path) -> None:
    """Checkpoints published before transformers 5 lack "model." before the tower; its own layout in memory has it."""
    model = getattr(eyes, family)()
    config = eyes.saved(model, tmp_path)
    expected = {k: v.clone() for k, v in eyes.ours(config, tmp_path, prepare=False).state_dict().items()}
    plain = {k: v for k, v in model.state_dict().items() if "language_model" not in k and "lm_head" not in k}
    older = {k.removeprefix("model."): v for k, v in plain.items()}
    nested = {k.replace("vision_tower.e", "vision_tower.vision_model.e"): v for k, v in older.items()}
    for tensors in (plain, older, nested):
        if family in ("llava", "paligemma") or "vision_tower.vision_model" not in " ".join(tensors):
            save_file({k: v.contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
            got = eyes.ours(config, tmp_path, prepare=False).state_dict()
            assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_a_connector_in_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = eyes.ours(eyes.saved(eyes.llava(), tmp_path), tmp_path)
    grid = encoder.tiling.grid(90, 60)
    cut = pixels(encoder.tiling.parts(grid), 31)
    whole = rows_of(encoder, cut, grid, 9)
    monkeypatch.setattr(blocks, "AT_ONCE", 5)
    torch.testing.assert_close(rows_of(encoder, cut, grid, 9), whole, atol=1e-6, rtol=1e-6)


def test_a_tensor_too_few_or_too_many(tmp_path: Path) -> None:
    config = eyes.saved(eyes.llava(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    newline = next(name for name in tensors if name.endswith("image_newline"))
    save_file({k: v for k, v in tensors.items() if k != newline}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="lacks image_newline"):
        eyes.ours(config, tmp_path)
    save_file({**tensors, "vision_tower.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match="no place for"):
        eyes.ours(config, tmp_path)


def test_any_share_of_the_tiles(tmp_path: Path) -> None:
    """What a tile is encoded to depends on no other tile, so that pictures can be cut, and mixed."""
    encoder = eyes.ours(eyes.saved(eyes.internvl(), tmp_path), tmp_path)
    grid, cut = Grid(2, 3, 56, 84), pixels(7, 28)
    whole = rows_of(encoder, cut, grid, 7)
    for at_once in (1, 2, 3):
        torch.testing.assert_close(rows_of(encoder, cut, grid, at_once), whole, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("family", ["llava", "paligemma", "internvl", "mllama"])
def test_bf16_is_near(family: str, tmp_path: Path) -> None:
    encoder = eyes.ours(eyes.saved(getattr(eyes, family)(), tmp_path), tmp_path, prepare=False)
    grid = encoder.tiling.grid(60, 60)
    cut = pixels(grid.rows * grid.columns if encoder.whole else encoder.tiling.parts(grid), encoder.tiling.tile)
    fill_dummy(encoder, 1)
    exact = rows_of(encoder, cut, grid, 4)
    encoder.dtype = torch.bfloat16
    encoder.to(torch.bfloat16).prepare()
    rough = rows_of(encoder, cut, grid, 4)
    assert rough.dtype == torch.bfloat16
    assert (rough.float() - exact).abs().max() < 0.05 * exact.abs().max()
