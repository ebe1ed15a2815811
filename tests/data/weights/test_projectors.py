"""Checkpoints of models that see, without what stands between tower and text: refused by name, with what to do."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from mllama_models import Saved
from pictured_models import MODELS
from safetensors.torch import load_file, save_file

from quire.data.models import resolve
from quire.data.weights.checkpoint import read_config
from quire.data.weights.loader import load
from quire.errors import StartupError

FAMILIES: dict[str, Callable[[Path], Any]] = {**MODELS, "mllama": Saved}
PROJECTOR = re.compile(r".*(multi_modal_projector|mlp1|img_projection|glb_GN|sub_GN|image_newline)")
EYES = re.compile(rf"{PROJECTOR.pattern}|.*vision_(model|tower|embed)")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cache(lambda family: FAMILIES[family](tmp_path_factory.mktemp("saved")).folder)


def without(folder: Path, copy: Path, lost: Callable[[str], object]) -> list[str]:
    """A copy of the folder less some tensors, and what it failed with: cause and remedy. Names of what was left out."""
    copy.mkdir()
    shutil.copy(folder / "config.json", copy)
    tensors = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not lost(name)}
    assert len(kept) < len(tensors), "nothing is lost"
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    config = {**read_config(copy), "preprocessor_config": {}}
    model = resolve(config)(config, torch.float32, torch.device("cpu"))
    with pytest.raises(StartupError) as caught:
        load(model, copy)
    return [str(caught.value), *sorted(tensors.keys() - kept.keys())]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_without_its_projector(saved: Any, tmp_path: Path, family: str) -> None:
    said, *lost = without(saved(family), tmp_path / "blind", PROJECTOR.match)
    assert "has a vision tower without its projector: it lacks " in said
    assert any(name.endswith(re.search(r"lacks ([\w.]+)", said)[1]) for name in lost), said  # type: ignore[index]
    assert "config.json says that there is one: put its tensors, under these names" in said
    assert len(said) < 700


@pytest.mark.parametrize("family", ["llava", "mllama"])
def test_a_text_without_eyes(saved: Any, tmp_path: Path, family: str) -> None:
    said, *_ = without(saved(family), tmp_path / "blind", EYES.match)
    assert "has no vision tower and no projector: it lacks " in said


@pytest.mark.parametrize(("family", "end"), [("llava", "linear_2.bias"), ("phi3", "glb_GN")])
def test_one_tensor_of_a_projector(saved: Any, tmp_path: Path, family: str, end: str) -> None:
    said, lost = without(saved(family), tmp_path / "torn", lambda name: name.endswith(end))
    assert f"torn lacks {lost.removeprefix('model.').removeprefix('vision_embed_tokens.')}." in said
