"""Speculation heads at the start: where they are found, what is refused, and what they take of the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from published_heads import HEAD, TARGET, PublishedEagle3, mimo, randomized, saved

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.parallel_layout import Shard
from quire.startup.build import describe_memory_plan
from quire.startup.checkpoint import read_checkpoint
from quire.startup.memory_plan import hidden_states_bytes
from quire.startup.speculation import check_speculation
from quire.text.input_processor import engine_config


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama, its EAGLE-3 head, a Gemma, and a MiMo."""
    folder = tmp_path_factory.mktemp("models")
    saved("llama", TARGET, folder / "llama")
    saved("gemma2", {**TARGET, "head_dim": 8}, folder / "gemma")
    randomized(PublishedEagle3(HEAD, embeds=False)).save(folder / "head", HEAD)
    mimo(folder / "mimo")
    return folder


def checked(weights: bool = True, **settings: Any) -> Any:
    config = EngineConfig(device="cpu", **settings)
    return check_speculation(config, read_checkpoint(config, weights))


def edited(models: Path, tmp_path: Path, **settings: Any) -> Path:
    """A copy of the head with other settings in its config.json; without weights."""
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps({**HEAD, **settings}))
    return tmp_path / "head"


def test_a_head_has_a_layer_in_the_memory_of_its_target(models: Path) -> None:
    of_eagle = {"model": str(models / "llama"), "speculative_model": str(models / "head")}
    of_mtp = {"model": str(models / "mimo"), "speculative_method": "mtp"}
    for settings, name, width in (
        ({**of_eagle, "speculative_method": "eagle3"}, "head", 96), (of_mtp, "the MTP layer of mimo", 32),
    ):  # fmt: skip
        source = checked(**settings)
        assert source.draft.name == name
        assert [layer.reads_hidden_states for layer in source.pool_spec.layers] == [False] * 6 + [True]
        assert source.pool_spec.layers[-1].is_draft
        assert source.draft.spec.captured_width == width
        assert source.pool_spec.max_len == source.spec.max_len == 64  # not those that the head was trained for
        assert source.notices == ()
        part = source.for_shard(Shard(1, 2))
        assert part.pool_spec.layers[-1].kv_heads == 1


def test_the_plan_counts_a_head(models: Path) -> None:
    config = EngineConfig(
        model=str(models / "llama"), speculative_model=str(models / "head"), speculative_method="eagle3",
        device="cpu", dtype="float32", max_num_batched_tokens=100,
    )  # fmt: skip
    lines = describe_memory_plan(config)
    count = read_checkpoint(config).draft.spec.parameters
    [head], [kv] = ([line for line in lines if line.startswith(name)] for name in ("draft model", "draft KV"))
    assert f"head, {count:,} parameters" in head
    assert "128 bytes of each token's" in kv
    assert hidden_states_bytes(config, read_checkpoint(config).draft.spec, 4) == 1024 * (2 * 96 + 32) * 4


def test_a_head_without_its_weights_can_be_planned_and_not_started(models: Path, tmp_path: Path) -> None:
    folder = edited(models, tmp_path)
    settings = {"model": str(models / "llama"), "speculative_model": str(folder), "speculative_method": "eagle3"}
    assert checked(weights=False, **settings).draft.name == "head"
    assert checked(dummy_weights=True, **settings).draft.name == "head"
    with pytest.raises(StartupError, match=r"head .*/head' can't be used: .* has no model.safetensors") as error:
        checked(**settings)
    assert "pickled weights (.bin, .pt) are never opened" in error.value.remedy
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    with pytest.raises(StartupError, match=r"holds pickled weights only \('pytorch_model.bin'\)"):
        checked(**settings)
    (folder / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(StartupError, match="is damaged"):
        checked(**settings)


@pytest.mark.parametrize(
    ("settings", "words", "remedy"),
    [
        ({"speculative_method": "eagle3"}, "is eagle3, and there is no head", "--speculative-model"),
        ({"speculative_method": "mtp", "speculative_model": "head"}, "is mtp, and --speculative-model is given",
         "Leave it out"),
        ({"speculative_model": "head"}, "head' can't be used: .* is that of a speculation head", '"method": "eagle3"'),
        ({"model": "head"}, "is that of a speculation head, which is no model of its own", '"method": "eagle3"'),
        ({"speculative_method": "eagle3", "speculative_model": "llama"}, "and that is no EAGLE-3 head", "draft_model"),
        ({"speculative_method": "eagle3", "speculative_model": "none"}, "there is no folder", "Give a folder"),
        ({"speculative_method": "mtp"}, "is mtp, and the architecture LlamaForCausalLM has no MTP layers", "Use an"),
        ({"model": "gemma", "speculative_method": "eagle3", "speculative_model": "head"},
         "head has no embedding of its own, and that of gemma is scaled", "Use a draft model"),
        ({"speculative_method": "eagle3", "speculative_model": "head", "pp": 2}, "--pp is 2", "Use --tp"),
        ({"speculative_method": "eagle3", "speculative_model": "head", "memory": "virtual"}, "--memory is virtual", ""),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(settings: dict[str, Any], words: str, remedy: str, models: Path) -> None:
    names = {"model": "llama", **settings}
    paths = {key: str(models / name) for key, name in names.items() if key in ("model", "speculative_model")}
    with pytest.raises(StartupError, match=words) as error:
        checked(**{**names, **paths})
    assert remedy in error.value.remedy


def test_a_mimo_without_mtp_layers_is_refused(models: Path, tmp_path: Path) -> None:
    config = json.loads((models / "mimo" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    with pytest.raises(StartupError, match=r"is mtp, and num_nextn_predict_layers in config.json is 0"):
        checked(weights=False, model=str(tmp_path), speculative_method="mtp")


def test_vllms_form_of_the_settings() -> None:
    eagle = {"method": "eagle3", "model": "c/d", "num_speculative_tokens": 3}
    assert engine_config("a/b", {"speculative_config": eagle}) == EngineConfig(
        model="a/b", speculative_model="c/d", speculative_method="eagle3", num_speculative_tokens=3
    )
    for method in ("mtp", "mimo_mtp", "qwen3_next_mtp"):
        assert engine_config("a/b", {"speculative_config": {"method": method, "model": "a/b"}}).speculation == "mtp"
        one = {"method": method, "num_speculative_tokens": 1}
        assert engine_config("a/b", {"speculative_config": one}).max_draft_tokens == 1
