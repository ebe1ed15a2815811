"""Models that rotate a part of each head (Phi-4-mini), against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire import LLM, SamplingParams
from quire.errors import StartupError

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.75, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0], "long_factor": [2.0] * 6}
PROMPT = [(7 * i * i + 3) % 64 for i in range(60)]


def saved(folder: Path, **more: Any) -> torch.Tensor:
    """A random checkpoint, and the log-probabilities that transformers' model of it gives the prompt's tokens."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("phi3", **SHAPE, **more)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    with torch.no_grad():
        rows = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    return rows[range(len(PROMPT) - 1), PROMPT[1:]]


@pytest.mark.parametrize("settings", [{}, {"tp": 2}], ids=["one rank", "two"])
@pytest.mark.parametrize("more", [{}, {"rope_scaling": LONG}], ids=["plain", "longrope"])
def test_log_probabilities_are_those_of_transformers(
    more: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    wanted = saved(tmp_path, **more)
    with LLM(str(tmp_path), skip_tokenizer_init=True, dtype="float32", kv_tokens=256, device="cpu", **settings) as llm:
        [result] = llm.generate([PROMPT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    found = [top[id].logprob for top, id in zip(result.prompt_logprobs[1:], PROMPT[1:])]
    assert found == pytest.approx(wanted.tolist(), abs=2e-4)


@pytest.mark.parametrize("share", [0.0, 1.5, 0.07])
def test_shares_that_leave_no_pairs_are_refused(share: float, tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"partial_rotary_factor": 0.75', f'"partial_rotary_factor": {share}'))
    with pytest.raises(StartupError, match="partial_rotary_factor"):
        LLM(str(tmp_path), skip_tokenizer_init=True, device="cpu")
