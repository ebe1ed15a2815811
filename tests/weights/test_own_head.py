"""Checkpoints that config.json ties and that hold a head: it counts if it differs, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
PROMPT = [(7 * i * i + 3) % 64 for i in range(20)]


def check(folder: Path) -> None:
    """The log-probabilities of the prompt are those of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    with LLM(model=str(folder), skip_tokenizer_init=True, dtype="float32", kv_tokens=256) as llm:
        [result] = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [top[id].logprob for top, id in zip(result.prompt_logprobs[1:], PROMPT[1:])]
    assert found == pytest.approx([row[id].item() for row, id in zip(wanted, PROMPT[1:])], abs=1e-4)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("unlike", [True, False])
def test_a_head_that_differs_counts(kind: str, unlike: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SHAPE)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    if unlike:
        tensors["lm_head.weight"][63] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    check(tmp_path)


@pytest.mark.parametrize("theta", [{}, {"rope_theta": 500.0}])
def test_rope_scaling_counts_beside_rope_parameters(theta: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("llama", **SHAPE)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    said = json.loads(path.read_text()) | theta
    said["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": 100.0}
    path.write_text(json.dumps(said))
    check(tmp_path)
