"""Checkpoints of InternLM2, which transformers doesn't have, from those of Llamas."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire.weights.checkpoint_files import read_config

INTERNLM2 = {
    "embed_tokens": "tok_embeddings", "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2", "lm_head": "output",
}  # fmt: skip


def as_internlm2(folder: Path) -> None:
    """A Llama's folder as an InternLM2's: other names, and queries, keys and values in groups."""
    path, said = folder / "model.safetensors", read_config(folder)
    tensors, heads = load_file(path), (said["num_key_value_heads"], -1, 8)
    for name in [name for name in tensors if "q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{x}_proj")).unflatten(0, heads) for x in "qkv"]
        tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(parts, 1).flatten(0, 2)
    for old, new in INTERNLM2.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    (folder / "config.json").write_text(json.dumps({**said, "architectures": ["InternLM2ForCausalLM"], "bias": False}))
