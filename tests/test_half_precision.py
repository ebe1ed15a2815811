"""In bf16 the log-probabilities of prompts and of generated tokens are as close to fp64 as transformers' are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from quire import LLM, SamplingParams

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPTS = (150, 33, 80, 1)
NEW = 24
SHAPE = {
    "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
GEMMA = {**SHAPE, "head_dim": 32, "sliding_window": 48, "tie_word_embeddings": False}


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_bf16_is_as_exact_as_transformers(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SHAPE if family == "llama" else GEMMA))
    exact = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in exact.parameters():
        if parameter.count_nonzero() == 0:  # norms that keep their difference from one
            parameter.data.normal_(0, 0.1)
        parameter.data = parameter.data.mul(3).bfloat16()  # what all three start from
    exact.save_pretrained(tmp_path)
    half = exact.to(DEVICE)
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    prompts = [[(7 * i + 13 * j) % 500 for j in range(length)] for i, length in enumerate(PROMPTS)]
    tokens: list[list[int]] = []
    ours: list[float] = []
    with LLM(str(tmp_path), dtype="bfloat16", skip_tokenizer_init=True, kv_tokens=2048) as llm:
        for prompt, result in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
            [output] = result.outputs
            tokens.append(prompt + output.token_ids)
            entries = result.prompt_logprobs[1:] + output.logprobs
            ours += [entry[token].logprob for token, entry in zip(tokens[-1][1:], entries, strict=True)]

    def logprobs(model: torch.nn.Module, which: int) -> torch.Tensor:
        ids = torch.tensor([tokens[which]], device=DEVICE)
        with torch.no_grad():
            found = model(ids).logits[0, :-1].double().log_softmax(-1)
        return found.gather(1, ids[0, 1:, None])[:, 0].cpu()

    theirs = [logprobs(half, which) for which in range(len(prompts))]
    exact = half.double()
    truth = torch.cat([logprobs(exact, which) for which in range(len(prompts))])
    got = torch.tensor(ours, dtype=torch.float64)
    assert got.shape == truth.shape
    own, other = ((x - truth).square().mean().sqrt() for x in (got, torch.cat(theirs)))
    assert truth.std() > 0.5, "the tokens' probabilities differ"
    assert 0 < own < 1.2 * other
