"""Where requests' defaults come from: the model's generation_config.json, another one, none, and what overrides it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.build import build
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.source import read_source

SHAPE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu", "eos_token_id": 3,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE))
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "temperature": 0.7, "top_k": 20, "eos_token_id": [5, 7]}'
    )
    return folder


def defaults(model: Path, **settings: Any) -> dict[str, Any]:
    return read_source(EngineConfig(model=str(model), **settings), weights=False).defaults


def test_the_models_own(model: Path) -> None:
    assert defaults(model) == defaults(model, generation_config=True) == {"temperature": 0.7, "top_k": 20}
    assert defaults(model, generation_config="vllm") == defaults(model, generation_config=False) == {}


def test_another_folders(model: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.2, "max_new_tokens": 7}')
    assert defaults(model, generation_config=str(tmp_path)) == {"temperature": 0.2}
    (tmp_path / "generation_config.json").write_text('{"temperature": -2}')
    with pytest.raises(StartupError, match=r"--generation-config .* can't be used: temperature"):
        defaults(model, generation_config=str(tmp_path))


def test_what_overrides(model: Path) -> None:
    override = {"temperature": 0.1, "min_p": 0.2}
    assert defaults(model, override_generation_config=override) == {"temperature": 0.1, "top_k": 20, "min_p": 0.2}
    assert defaults(model, override_generation_config=override, generation_config="vllm") == override
    for wrong in ({"temperature": "hot"}, {"top_p": 2}, {"top_k": 1.5}):
        with pytest.raises(StartupError, match="--override-generation-config can't be used"):
            defaults(model, override_generation_config=wrong)


def test_end_tokens_stay_the_models_own(model: Path) -> None:
    settings = {"dummy_weights": True, "kv_tokens": 64, "device": "cpu", "skip_tokenizer_init": True}
    for said in ("auto", "vllm"):
        built = build(EngineConfig(model=str(model), generation_config=said, **settings))
        assert built.engine.scheduler.eos_ids == {3, 5, 7}
        assert built.defaults == ({"temperature": 0.7, "top_k": 20} if said == "auto" else {})
        shown = [notice for notice in built.notices if "temperature" in notice]
        assert len(shown) == (said == "auto")
        built.engine.close()


def test_overrides_are_said_at_start(model: Path) -> None:
    settings = {"dummy_weights": True, "kv_tokens": 64, "device": "cpu", "skip_tokenizer_init": True}
    built = build(EngineConfig(model=str(model), override_generation_config={"top_p": 0.5}, **settings))
    assert "requests have temperature=0.7, top_p=0.5, top_k=20 where they say nothing" in " ".join(built.notices)
    built.engine.close()
