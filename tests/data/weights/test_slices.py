"""What one rank reads of a checkpoint, counted at the file, and what it has of dummy weights: those of the undivided
model, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.data.models import read_spec, resolve
from quire.data.models.configs import named_config
from quire.data.weights import dummy, loader
from quire.data.weights.checkpoint import read_config
from quire.data.weights.dummy import fill_dummy
from quire.data.weights.loader import load
from quire.errors import StartupError
from quire.vocabulary.layout import WHOLE, Part

CPU = torch.device("cpu")
KEYS = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 176, "vocab_size": 512, "max_position_embeddings": 64,
}  # fmt: skip
OPT = {**KEYS, "ffn_dim": 176, "word_embed_proj_dim": 64}
GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 64, "n_inner": 176, "vocab_size": 512}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**named_config("llama-125m"), **KEYS},
    "llama, copied heads": {**named_config("llama-125m"), **KEYS, "num_key_value_heads": 2},
    "llama, shared keys": {**named_config("llama-125m"), **KEYS, "kv_sharing": [None, 0]},
    "llama, padded": {**named_config("llama-125m"), **KEYS, "vocab_size": 331},
    "qwen2, tied": {**named_config("qwen2-7b"), **KEYS, "tie_word_embeddings": True},
    "phi3": {**named_config("llama-125m"), **KEYS, "architectures": ["Phi3ForCausalLM"], "pad_token_id": 0},
    "gemma2": {**named_config("gemma-2-2b"), **KEYS, "head_dim": 16},
    "opt": {**named_config("opt-125m"), **OPT},
    "gpt2": {**named_config("gpt2"), **GPT2},
    "jamba": {**named_config("jamba-52b"), **KEYS, "num_hidden_layers": 4, "num_experts": 4, "attn_layer_period": 3,
              "attn_layer_offset": 1, "mamba_proj_bias": True},
    "mamba": {**named_config("mamba-2.8b"), "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 331},
}  # fmt: skip


def made(config: dict[str, Any], part: Part = WHOLE) -> Any:
    return resolve(config)(config, torch.float32, CPU, part)


def publish(config: dict[str, Any], folder: Path) -> Any:
    """The whole model with dummy weights, and a checkpoint of it in the folder."""
    model, tensors = made(config), {}
    fill_dummy(model, 5)
    parameters = dict(model.named_parameters())
    for name, stored in model.names().items():
        for tensor, rows in zip(stored.tensors, parameters[name].split(stored.rows)):
            tensors[tensor] = (rows.t() if stored.transpose else rows).contiguous()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return model


class Counting:
    """A safetensors file, or a slice of one, that counts the bytes that are asked for."""

    read = 0

    def __init__(self, of: Any) -> None:
        self.of = of

    def __enter__(self) -> Counting:
        return Counting(self.of.__enter__())

    def __exit__(self, *error: Any) -> None:
        self.of.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __getitem__(self, where: Any) -> Tensor:
        return self.count(self.of[where])

    def get_tensor(self, key: str) -> Tensor:
        return self.count(self.of.get_tensor(key))

    def get_slice(self, key: str) -> Counting:
        return Counting(self.of.get_slice(key))

    def count(self, tensor: Tensor) -> Tensor:
        Counting.read += tensor.nbytes
        return tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_of_dummy_weights_are_slices_and_a_rank_reads_no_more_than_its_own(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dummy, "NOISE", 10_007)  # it comes again in the larger weights
    monkeypatch.setattr(dummy, "BLOCK", 5_000)
    monkeypatch.setattr(loader, "safe_open", lambda *args, **options: Counting(safe_open(*args, **options)))
    whole = publish(CONFIGS[name], tmp_path)
    total = sum(parameter.nbytes for parameter in whole.parameters())
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            part, spec = Part(rank, ranks), read_spec(CONFIGS[name], Part(rank, ranks))
            drawn, loaded = made(CONFIGS[name], part), made(CONFIGS[name], part)
            for parameter in (*drawn.parameters(), *loaded.parameters()):
                parameter.fill_(torch.nan)
            fill_dummy(drawn, 5)
            Counting.read = 0
            load(loaded, tmp_path)
            for (path, a), b in zip(drawn.named_parameters(), loaded.parameters(), strict=True):
                assert torch.equal(a, b), f"{path} of rank {rank} of {ranks}"
            padding = len(part.vocabulary(spec.vocab_size)) - part.padded(spec.vocab_size)
            tables = 1 if getattr(whole, "tied", name == "mamba") else 2
            assert Counting.read == loaded.read_bytes == 4 * (spec.parameters + tables * padding * spec.hidden)
            if name in ("llama", "jamba") and ranks < 8:
                assert Counting.read == pytest.approx(total / ranks, rel=0.02)


def test_the_undivided_shape_is_checked(tmp_path: Path) -> None:
    publish(CONFIGS["gpt2"], tmp_path)
    path, name = tmp_path / "model.safetensors", "h.1.mlp.c_fc.weight"
    save_file({**load_file(path), name: torch.zeros(64, 88)}, path)  # what one of two ranks has
    with pytest.raises(StartupError, match=r"c_fc.weight' in .* has shape \[64, 88\], but .* makes it \[64, 176\]"):
        load(made(read_config(tmp_path), Part(0, 2)), tmp_path)
