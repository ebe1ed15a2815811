"""GGUF files for tools/compare_cpu.py, made and read in llama.cpp's environment (gguf, NumPy, llama_cpp). Models have
no tokenizers: the comparison gives token ids.

usage: compare_gguf.py write FOLDER OUT.gguf         a Llama's Hugging Face folder -> GGUF, in bf16
       compare_gguf.py random SHAPE OUT.gguf         random weights in bf16; SHAPE is JSON as in compare_models.py
       compare_gguf.py quantize IN.gguf OUT.gguf f32|bf16|q8_0|q4_0|q4_1|q5_0|q4_k|q6_k|mxfp4   by llama.cpp's code
       compare_gguf.py read IN.gguf FOLDER           a Llama's GGUF -> a folder, in bf16
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
TYPES = {
    "f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0", "q4_0": "MOSTLY_Q4_0", "q4_1": "MOSTLY_Q4_1",
    "q5_0": "MOSTLY_Q5_0", "q4_k": "MOSTLY_Q4_K_M", "q6_k": "MOSTLY_Q6_K",
    "mxfp4": "MOSTLY_MXFP4_MOE",  # experts; the rest in Q8_0
}  # fmt: skip
BF16_FILE = 32
WINDOW, TAPS = 128, 3  # of the models of `random`: tokens of gpt-oss's window, of LFM2's convolutions


def stored_name(name: str) -> str:
    """A checkpoint's tensor in a GGUF file."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        return f"blk.{match[1]}.{NAMES[match[2]]}.weight"
    return WHOLE[name.removesuffix(".weight")] + ".weight"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of queries or keys as llama.cpp rotates them: the two of a pair beside each other."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def halved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The reverse of `interleaved`."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(folder: Path, out: Path) -> None:
    """A folder's model, whose safetensors file is in bf16."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(BF16_FILE)
    for name, weight in tensors(folder / "model.safetensors"):
        if weight.ndim == 1:
            writer.add_tensor(stored_name(name), weight)
            continue
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = interleaved(weight, heads if "q_proj" in name else kv_heads)
        kind = gguf.GGMLQuantizationType.BF16
        packed = gguf.quants.quantize(np.ascontiguousarray(weight), kind)
        writer.add_tensor(stored_name(name), packed, raw_shape=packed.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random(shape_json: str, out: Path) -> None:
    """Write a model of a shape of compare_models.GGUF_SHAPES: weights of deviation 0.02, norms of ones. Matrices are in
    bf16, the others in fp32."""
    shape = json.loads(shape_json)
    architecture, layers, kv_heads = shape["architecture"], shape["layers"], shape["kv_heads"]
    head_dim = shape["hidden"] // shape["heads"]
    attention = set(shape.get("attention_layers", range(layers)))
    writer = gguf.GGUFWriter(str(out), architecture)
    writer.add_context_length(8192)
    writer.add_embedding_length(shape["hidden"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape["inner"])
    writer.add_head_count(shape["heads"])
    per_layer = [kv_heads if layer in attention else 0 for layer in range(layers)]
    writer.add_head_count_kv(per_layer if architecture == "lfm2" else kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(shape["rope_base"])
    writer.add_vocab_size(shape["vocabulary"])
    if "experts" in shape:
        writer.add_expert_count(shape["experts"])
        writer.add_expert_used_count(shape["experts_used"])
        writer.add_expert_feed_forward_length(shape["inner"])
    if architecture == "gpt-oss":
        writer.add_sliding_window(WINDOW)
    if architecture == "lfm2":
        writer.add_shortconv_l_cache(TAPS)
    writer.add_tokenizer_model("none")
    writer.add_file_type(BF16_FILE)
    generator = np.random.default_rng(0)
    for name, sizes in random_tensors(shape, attention):
        numbers = generator.standard_normal(sizes, np.float32) * np.float32(0.02)
        if name.endswith("norm.weight"):
            numbers = np.ones(sizes, np.float32)
        if len(sizes) == 1 or name.endswith((".bias", "ffn_gate_inp.weight", "shortconv.conv.weight")):
            writer.add_tensor(name, numbers)
            continue
        kind = gguf.GGMLQuantizationType.BF16
        packed = gguf.quants.quantize(numbers, kind)
        writer.add_tensor(name, packed, raw_shape=packed.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_tensors(shape: dict[str, Any], attention: set[int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and sizes of the tensors of a shape whose layers `attention` have attention."""
    hidden, inner, vocabulary, experts = shape["hidden"], shape["inner"], shape["vocabulary"], shape.get("experts")
    head_dim = hidden // shape["heads"]
    keys = shape["kv_heads"] * head_dim
    is_oss, is_lfm = shape["architecture"] == "gpt-oss", shape["architecture"] == "lfm2"
    yield "token_embd.weight", (vocabulary, hidden)
    yield f"{'token_embd_norm' if is_lfm else 'output_norm'}.weight", (hidden,)
    if not is_lfm:
        yield "output.weight", (vocabulary, hidden)
    of_attention = {"attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden),
                    "attn_output": (hidden, hidden)}  # fmt: skip
    of_convolution = {"shortconv.in_proj": (3 * hidden, hidden), "shortconv.out_proj": (hidden, hidden)}
    of_mlp = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    for layer in range(shape["layers"]):
        matrices: dict[str, tuple[int, ...]] = {**(of_attention if layer in attention else of_convolution)}
        if experts:
            matrices["ffn_gate_inp"] = (experts, hidden)
        matrices |= {f"ffn_{name}{'_exps' if experts else ''}": (experts, *sizes) if experts else sizes
                     for name, sizes in of_mlp.items()}  # fmt: skip
        for name, sizes in matrices.items():
            yield f"blk.{layer}.{name}.weight", sizes
            if is_oss:
                yield f"blk.{layer}.{name}.bias", sizes[:-1]
        yield f"blk.{layer}.attn_norm.weight", (hidden,)
        yield f"blk.{layer}.{'post_attention_norm' if is_oss else 'ffn_norm'}.weight", (hidden,)
        if is_oss:
            yield f"blk.{layer}.attn_sinks.weight", (shape["heads"],)
        elif layer in attention:
            yield from ((f"blk.{layer}.attn_{name}_norm.weight", (head_dim,)) for name in "qk")
        else:
            yield f"blk.{layer}.shortconv.conv.weight", (hidden, TAPS)


def tensors(path: Path) -> Any:
    """The names and fp32 numbers of a safetensors file in bf16."""
    with path.open("rb") as file:
        head = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        start = file.tell()
        for name, tensor in head.items():
            if name == "__metadata__":
                continue
            first, end = tensor["data_offsets"]
            file.seek(start + first)
            halves = np.frombuffer(file.read(end - first), np.uint16).astype(np.uint32)
            yield name, (halves << 16).view(np.float32).reshape(tensor["shape"])


def quantize(source: Path, out: Path, kind: str) -> None:
    """llama.cpp's own quantisation, as it chooses the types of a file's tensors."""
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, None)
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{TYPES[kind]}")
    settings.allow_requantize = True
    settings.nthread = 2
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), settings)
    assert code == 0, f"llama_model_quantize says {code}"


def read(source: Path, folder: Path) -> None:
    """A folder of a GGUF file's model: its numbers, rounded to bf16, under a checkpoint's names."""
    reader = gguf.GGUFReader(str(source))

    def fact(name: str, default: Any = None) -> Any:
        field = reader.fields.get(f"llama.{name}")
        return default if field is None else field.contents()

    heads = fact("attention.head_count")
    kv_heads = fact("attention.head_count_kv", heads)
    plain = {mine: name for name, mine in {**NAMES, **WHOLE}.items()}
    found: dict[str, np.ndarray] = {}
    for tensor in reader.tensors:
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.weight", tensor.name)
        if match is None or match[2] not in plain:
            continue
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = numbers.reshape([int(size) for size in reversed(tensor.shape)])
        if match[2] in ("attn_q", "attn_k"):
            weight = halved(weight, heads if match[2] == "attn_q" else kv_heads)
        found[(f"model.layers.{match[1]}." if match[1] else "") + plain[match[2]] + ".weight"] = weight
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "hidden_size": fact("embedding_length"), "intermediate_size": fact("feed_forward_length"),
        "num_hidden_layers": fact("block_count"), "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": fact("context_length"), "rope_theta": float(fact("rope.freq_base", 10000.0)),
        "rms_norm_eps": float(fact("attention.layer_norm_rms_epsilon")), "bos_token_id": 1, "eos_token_id": 2,
        "vocab_size": len(found["model.embed_tokens.weight"]), "tie_word_embeddings": "lm_head.weight" not in found,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save(folder / "model.safetensors", found)


def save(path: Path, found: dict[str, np.ndarray]) -> None:
    """A safetensors file of these numbers in bf16, rounded to nearest even."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, weight in found.items():
        head[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [at, at + 2 * weight.size]}
        at += 2 * weight.size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for weight in found.values():
            bits = np.ascontiguousarray(weight).view(np.uint32)
            file.write(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes())


if __name__ == "__main__":
    command, source, result, *rest = sys.argv[1:]
    commands: dict[str, Callable[..., None]] = {"write": write, "random": random, "quantize": quantize, "read": read}
    commands[command](source if command == "random" else Path(source), Path(result), *rest)
