"""Settings of config.json in unusual places, against transformers: a head that it ties and that the checkpoint holds,
rope_scaling beside rope_parameters, and heads of which a part is rotated (Phi-4-mini)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.errors import StartupError

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PARTIAL = {
    **SHAPE, "hidden_size": 64, "max_position_embeddings": 128, "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75, "tie_word_embeddings": False,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [2.0] * 6}


def save(folder: Path, kind: str, **config: Any) -> Any:
    """A random checkpoint; returns the model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).float()
    model.save_pretrained(folder)
    return model


def check(folder: Path, length: int = 20, tolerance: float = 1e-4, **settings: Any) -> None:
    """The log-probabilities of a prompt are those of transformers."""
    prompt = [(7 * i * i + 3) % 64 for i in range(length)]
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    with LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", kv_tokens=256, **settings) as llm:
        [result] = llm.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [top[id].logprob for top, id in zip(result.prompt_logprobs[1:], prompt[1:])]
    assert found == pytest.approx([row[id].item() for row, id in zip(wanted, prompt[1:])], abs=tolerance)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("unlike", [True, False])
def test_a_head_that_differs_counts(kind: str, unlike: bool, tmp_path: Path) -> None:
    save(tmp_path, kind, **SHAPE)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if unlike:
        tensors["lm_head.weight"][63] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(tmp_path)


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 500.0}])
def test_rope_scaling_counts_beside_rope_parameters(theta: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path, "llama", **SHAPE)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text()) | theta
    said["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    path.write_text(json.dumps(said))
    check(tmp_path)


@pytest.mark.parametrize("settings", [{}, {"tp": 2}], ids=["one rank", "two"])
@pytest.mark.parametrize("more", [{}, {"rope_scaling": LONG}], ids=["plain", "longrope"])
def test_a_part_of_each_head_is_rotated(more: dict[str, Any], settings: dict[str, Any], tmp_path: Path) -> None:
    model = save(tmp_path, "phi3", **PARTIAL, **more)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    check(tmp_path, 60, 2e-4, device="cpu", **settings)


@pytest.mark.parametrize("share", [0.0, 1.5, 0.07])
def test_shares_that_leave_no_pairs_are_refused(share: float, tmp_path: Path) -> None:
    save(tmp_path, "phi3", **PARTIAL)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"partial_rotary_factor": 0.75', f'"partial_rotary_factor": {share}'))
    with pytest.raises(StartupError, match="partial_rotary_factor"):
        LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu")
