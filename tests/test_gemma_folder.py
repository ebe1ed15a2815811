"""A Gemma-3 checkpoint in a folder, tiny and random, as transformers saves it with tokenizer and chat template: `quire
serve FOLDER` on a CPU answers what transformers would say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers

TURNS = ["<start_of_turn>", "<end_of_turn>"]
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{
'model' if message['role'] == 'assistant' else message['role'] }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
SAID = [{"role": "user", "content": "tell me of ducks"}]
NEW = 24


def tokenizer() -> transformers.GemmaTokenizer:
    """Of letters, of bytes for the rest, and of a few pairs."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *TURNS, *(f"<0x{byte:02X}>" for byte in range(256))]
    pairs = [("t", "h"), ("▁", "a"), ("th", "e"), ("c", "k")]
    pieces += [*"▁abcdefghijklmnopqrstuvwxyz", "\n", *("".join(pair) for pair in pairs)]
    made = transformers.GemmaTokenizer({piece: i for i, piece in enumerate(pieces)}, pairs)
    made.add_special_tokens({"additional_special_tokens": TURNS})
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    folder, words = tmp_path_factory.mktemp("gemma-3-tiny"), tokenizer()
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        vocab_size=len(words), hidden_size=48, intermediate_size=64, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=12,
        eos_token_id=[1, words.convert_tokens_to_ids(TURNS[1])], tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.Gemma3ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0, 0.02 if "embed" in name else 0.3)
    model.lm_head.weight.data[7:263] = 0  # it says letters, not bytes, of which few make a text
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder, model, words


@pytest.fixture(scope="module")
def url(saved: tuple[Path, Any, Any]) -> Iterator[str]:
    command = [sys.executable, "-m", "quire", "serve", str(saved[0]), "--port", "0", "--dtype", "float32"]
    more = ["--kv-tokens", "1024", "--threads", "1"]
    with subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "QUIRE_API_KEY": ""},
    ) as child:  # fmt: skip
        try:
            assert child.stdout is not None
            assert child.stderr is not None
            found = next((at for line in child.stdout if (at := re.search(r"http://127\.0\.0\.1:\d+", line))), None)
            assert found, child.stderr.read()
            yield found[0]
        finally:
            child.terminate()
            child.communicate(timeout=60)


def answer(saved: tuple[Path, Any, Any], ids: list[int]) -> str:
    """What transformers goes on with, up to an end token."""
    _, model, words = saved
    batch = torch.tensor([ids])
    options = {"max_new_tokens": NEW, "do_sample": False, "attention_mask": torch.ones_like(batch)}
    text: str = words.decode(model.generate(batch, **options)[0, len(ids) :], skip_special_tokens=True)
    return text


def asked(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(url, json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_completions(saved: tuple[Path, Any, Any], url: str) -> None:
    prompt = "the quick duck and the thick book"
    body = {"prompt": prompt, "max_tokens": NEW, "temperature": 0}
    said = asked(f"{url}/v1/completions", body)
    ids = saved[2](prompt).input_ids
    assert said["usage"]["prompt_tokens"] == len(ids) > 12
    assert said["choices"][0]["text"] == answer(saved, ids) != ""


def test_chat(saved: tuple[Path, Any, Any], url: str) -> None:
    body = {"messages": SAID, "max_tokens": NEW, "temperature": 0}
    said = asked(f"{url}/v1/chat/completions", body)
    ids = saved[2].apply_chat_template(SAID, add_generation_prompt=True, return_dict=False)
    assert ids[0] == 2
    assert ids[1] == 5
    assert said["usage"]["prompt_tokens"] == len(ids)
    assert said["choices"][0]["message"]["content"] == answer(saved, ids) != ""
