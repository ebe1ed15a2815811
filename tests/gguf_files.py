"""GGUF files for tests, written from what the format's description says, and models in them as llama.cpp's converter
lays them out."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14,
         "bf16": 30, "mxfp4": 39}  # fmt: skip
ALIGNMENT = 32
GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm"}  # fmt: skip
GEMMA4 = {
    **GEMMA, "layer_scalar": "layer_output_scale", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm", "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1", "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp", "experts.gate_up_proj": "ffn_gate_up_exps", "experts.down_proj": "ffn_down_exps",
    "router": "ffn_gate_inp", "router.per_expert": "ffn_down_exps",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}  # fmt: skip
GPT_OSS = {"post_attention_layernorm": "post_attention_norm", "self_attn": "attn_sinks", "mlp.router": "ffn_gate_inp"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up", "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp", "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "model.embedding_norm": "token_embd_norm", "operator_norm": "attn_norm", "ffn_norm": "ffn_norm",
    "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "self_attn.out_proj": "attn_output",
    "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj", "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down",
    "block_sparse_moe.experts.w3": "ffn_up_exps", "block_sparse_moe.experts.w2": "ffn_down_exps",
}  # fmt: skip


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_of(value: Any) -> bytes:
    """A typed value: integers are u32 (or u64), floats f32, lists arrays of the kind of their first entry."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value) if value < 1 << 32 else struct.pack("<IQ", 10, value)
    entries = [value_of(entry) for entry in value]
    kind = entries[0][:4] if entries else struct.pack("<I", 4)
    return struct.pack("<I", 9) + kind + struct.pack("<Q", len(entries)) + b"".join(entry[4:] for entry in entries)


def write(
    path: Path, said: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], version: int = 3
) -> Path:
    """The file; a tensor is its kind, its shape (rows first, as usual) and its bytes."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(said))
    head += b"".join(text(key) + value_of(value) for key, value in said.items())
    data, infos = b"", b""
    for name, (kind, shape, raw) in tensors.items():
        infos += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        infos += struct.pack("<IQ", TYPES[kind], len(data))
        data += raw + bytes(-len(raw) % ALIGNMENT)
    head += infos
    path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + data)
    return path


def floats(array: Any, kind: str = "f32") -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of floats."""
    numbers = np.ascontiguousarray(array, np.float32)
    if kind == "bf16":
        whole = numbers.view(np.uint32)
        return kind, numbers.shape, ((whole + 0x7FFF + (whole >> 16 & 1)) >> 16).astype(np.uint16).tobytes()
    return kind, numbers.shape, numbers.astype(np.float16 if kind == "f16" else np.float32).tobytes()


def q8_0(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor in blocks of 32: a scale and 32 integers."""
    groups = np.asarray(array, np.float32).reshape(-1, 32)
    scale = (np.abs(groups).max(1, keepdims=True) / 127).astype(np.float16)
    numbers = np.round(groups / np.maximum(scale.astype(np.float32), 1e-9)).clip(-127, 127).astype(np.int8)
    return "q8_0", np.shape(array), np.concatenate([scale.view(np.uint8), numbers.view(np.uint8)], 1).tobytes()


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def mxfp4(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor in blocks of 32: an exponent, and the nearest numbers of four bits, the first 16 in the lower halves."""
    groups = np.asarray(array, np.float32).reshape(-1, 32)
    exponent = np.floor(np.log2(np.maximum(np.abs(groups).max(1, keepdims=True), 1e-9))).astype(np.int64) - 2
    sizes = np.abs(groups) / 2.0**exponent
    codes = np.abs(sizes[..., None] - E2M1).argmin(-1) | (groups < 0) << 3
    packed = codes[:, :16] | codes[:, 16:] << 4
    return "mxfp4", np.shape(array), np.concatenate([exponent + 127, packed], 1).astype(np.uint8).tobytes()


def split_experts(block: str, rest: str, array: Any) -> dict[str, Any]:
    """The tensors of gpt-oss's stacked experts, rows first: gate and up are in turn."""
    stem, kind = (rest.removesuffix("_bias"), "bias") if rest.endswith("_bias") else (rest, "weight")
    array = array if kind == "bias" else array.swapaxes(1, 2)
    if stem == "down_proj":
        return {f"{block}.experts.down_proj.{kind}": array}
    return {f"{block}.experts.{name}_proj.{kind}": array[:, half::2] for half, name in enumerate(("gate", "up"))}


def convert(folder: Path, arch: str, path: Path, kind: str = "f32", **more: Any) -> Path:
    """The model of a folder with config.json and model.safetensors. Floats are written in `kind`, vectors in f32;
    `more` are keys, with "__" for the dot, of the architecture's."""
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    tensors = {}
    arrays, experts = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        array, (block, found, rest) = tensor.float().numpy(), name.partition(".experts.")
        number, _, what = rest.partition(".")
        if arch == "gemma4":
            whole = name.replace("per_expert_scale", "per_expert.scale")
            arrays[whole if whole.endswith((".weight", ".scale")) else f"{whole}.weight"] = array
        elif number.isdecimal():
            experts.setdefault(f"{block}.experts.{what}", {})[int(number)] = array
        elif found:
            arrays |= split_experts(block, rest, array)
        else:
            arrays[name] = array[0] if "shared_expert_gate" in name else array
    arrays |= {name: np.stack([each[i] for i in range(len(each))]) for name, each in experts.items()}
    for name, array in arrays.items():
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            rows = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
            array = rows.swapaxes(1, 2).reshape(array.shape)
        if name.endswith("conv.conv.weight"):
            array = array[:, 0]
        if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            array = array + 1
        stem, _, ending = name.rpartition(".")
        layer, _, what = stem.removeprefix("model.layers.").partition(".")
        table = NAMES | {"gemma2": GEMMA, "gemma3": GEMMA, "gemma4": GEMMA4, "gpt-oss": GPT_OSS}.get(arch, {})
        ending = "weight" if ending == "sinks" else ending
        called = f"blk.{layer}.{table[what]}" if "layers." in name else table[stem]
        kinds = {"q8_0": q8_0, "mxfp4": mxfp4 if "_exps" in called else q8_0}
        make = kinds.get(kind, lambda array: floats(array, kind))
        tensors[f"{called}.{ending}"] = floats(array) if array.ndim == 1 or ending == "bias" else make(array)
    said = {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or config["norm_eps"]),
    }
    for name, number in more.items():
        if name.startswith("rope_f"):
            tensors[f"{name}.weight"] = floats(number)
        else:
            said[f"{arch}.{name.replace('__', '.')}"] = number
    return write(path, said, tensors)
