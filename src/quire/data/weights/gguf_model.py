"""A GGUF file's model in the terms of the Hugging Face format: its config.json, and its tensors by the names there.

The layouts are those that llama.cpp's converter writes. No torch here.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from quire.data.models.fields import MAX_NUMBERS, Fields
from quire.data.models.quantization import BLOCKS
from quire.data.models.settings import MAX_LAYERS
from quire.data.weights.blocks import Blocks
from quire.data.weights.gguf import GGUF
from quire.errors import StartupError, shown
from quire.files import AGAIN

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
PHI3 = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
WHOLE = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
FREQS, SHORT, LONG = "rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight"
"""What the pairs of a head turn by is divided by these."""
FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
UNREAD = (FREQS, SHORT, LONG)
LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the one size of a family whose scores are scaled by the hidden size, not by a head's."""
SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip


class Family(NamedTuple):
    """An architecture of GGUF files, as transformers calls it. `turned`: the rows of queries and keys lie in the order
    of a rotary embedding whose pairs are neighbours. `raised`: norms are stored with the 1 that the model adds."""

    architecture: str
    model_type: str
    layer: dict[str, str] = LAYER
    turned: bool = False
    raised: bool = False


FAMILIES = {
    "llama": Family("LlamaForCausalLM", "llama", turned=True),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3"),
    "phi3": Family("Phi3ForCausalLM", "phi3", LAYER | PHI3),
    "gemma2": Family("Gemma2ForCausalLM", "gemma2", LAYER | GEMMA, raised=True),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", LAYER | GEMMA, raised=True),
}


class Named(NamedTuple):
    """The tensors of `file` by the names that transformers gives them, without a prefix."""

    file: GGUF
    family: Family
    head_dim: int

    def name(self, name: str) -> str | None:
        """What the file calls the tensor `name`; None for one that no such file has."""
        if found := re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", name):
            layer, what, kind = found.groups()
            return f"blk.{layer}.{self.family.layer[what]}.{kind}" if what in self.family.layer else None
        what, _, kind = name.rpartition(".")
        return f"{WHOLE[what]}.{kind}" if what in WHOLE else None

    def kind(self, name: str) -> str | None:
        """The format of the tensor `name`; None if the file lacks it."""
        stored = self.file.tensors.get(self.name(name) or "")
        return None if stored is None else stored.kind

    def blocks(self, name: str) -> Blocks | None:
        """The tensor `name`, its rows in the order of transformers; None if the file lacks it. A view of the file, but
        for queries, keys and norms that lie there otherwise. StartupError for scales that aren't finite."""
        called = self.name(name)
        stored = self.file.tensors.get(called or "")
        if stored is None:
            return None
        if not stored.finite():
            raise StartupError(f"{called} in {self.file.path} has a number that isn't finite", AGAIN)
        if self.family.turned and re.search(r"\.self_attn\.[qk]_proj\.", name):
            return _unturned(stored, self.head_dim)
        if self.family.raised and name.endswith("norm.weight"):
            numbers = stored.numbers() - np.float32(1)
            return Blocks("f32", stored.rows, stored.columns, numbers.view(np.uint8))
        return stored

    def unknown(self, names: set[str]) -> list[str]:
        """Tensors that are none of these."""
        known = {self.name(name) for name in names}
        return [name for name in self.file.tensors if name not in known and name not in UNREAD]


def named(file: GGUF) -> Named:
    family, fields = _family(file)
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    return Named(file, family, fields.size("attention.key_length", hidden // heads))


def config_of(file: GGUF) -> dict[str, Any]:
    """What would be its config.json. StartupError for an architecture, or a value, that isn't supported."""
    family, fields = _family(file)
    arch = str(file.said["general.architecture"])
    config = _shape(file, family, fields)
    window = fields.size("attention.sliding_window", 0, least=0)
    if arch.startswith("gemma"):
        config |= _gemma(arch, fields, config)
    elif arch == "phi3":
        config["sliding_window"] = window or None
    elif window and arch == "llama":
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    if arch == "llama":
        biased = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
        config |= {name: tensor in file.tensors for name, tensor in biased.items()}
    rope = _rope(file, fields) | {"rope_theta": fields.number("rope.freq_base", 10000.0)}
    if arch == "gemma3":
        local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
        return config | {"rope_parameters": {"full_attention": rope, "sliding_attention": local}}
    return config | {"rope_parameters": rope}


def _shape(file: GGUF, family: Family, fields: Fields) -> dict[str, Any]:
    """What all families say."""
    heads, hidden = fields.size("attention.head_count"), fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        fields.refuse(name, head_dim)
    fields.refuse("expert_count", 0)
    embedding, tokens = file.tensors.get("token_embd.weight"), file.said.get("tokenizer.ggml.tokens", ())
    if embedding is None:
        raise StartupError(f"{file.path} has no tensor token_embd.weight", "Give a GGUF file of a language model")
    if hasattr(tokens, "__len__") and len(tokens) > embedding.rows:
        raise StartupError(f"{file.path} has {len(tokens)} tokens, and its model knows {embedding.rows}", AGAIN)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": fields.size("block_count", most=MAX_LAYERS),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": fields.size("feed_forward_length"),
        "vocab_size": embedding.rows,
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": FLOATS.get(_kind(file), "bfloat16"),
        BLOCKS: _kind(file) not in FLOATS,
        "eos_token_id": end_ids(file),
    }


def generation_of(file: GGUF) -> dict[str, Any]:
    """What would be its generation_config.json: the sampling that the file asks for, and the end tokens."""
    asked = {name: file.said.get(f"general.sampling.{key}") for key, name in SAMPLING.items()}
    return {name: value for name, value in asked.items() if type(value) in (int, float)} | {
        "eos_token_id": end_ids(file)
    }


def end_ids(file: GGUF) -> list[int]:
    """The tokens that end a text, a turn or a message."""
    said = (file.said.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({id for id in said if type(id) is int and id >= 0})


def _family(file: GGUF) -> tuple[Family, Fields]:
    """The file's family, and what it says of the model, by names without the family's."""
    arch = file.said.get("general.architecture")
    if not isinstance(arch, str) or arch not in FAMILIES:
        raise StartupError(
            f"{file.path} holds a model of the architecture {shown(arch)}, which is not supported",
            f"Supported in GGUF files: {', '.join(FAMILIES)}",
        )
    said = {
        key.removeprefix(f"{arch}."): _plain(value) for key, value in file.said.items() if key.startswith(f"{arch}.")
    }
    return FAMILIES[arch], Fields(said, str(file.path))


def _plain(value: Any) -> Any:
    """A value that can be compared and shown: no setting that is read is an array."""
    return value[:16].tolist() if isinstance(value, np.ndarray) else value


def _gemma(arch: str, fields: Fields, config: dict[str, Any]) -> dict[str, Any]:
    """What Gemma's config has beside Llama's. The scale of scores isn't in the file: llama.cpp knows it, too."""
    layers, hidden, heads = config["num_hidden_layers"], config["hidden_size"], config["num_attention_heads"]
    found = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": hidden // heads if layers == LARGEST[arch] else config["head_dim"],
        "sliding_window": fields.size("attention.sliding_window", 4096 if arch == "gemma2" else None),
        "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0 if arch == "gemma2" else None),
    }
    if arch == "gemma2":
        found["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
    elif found["sliding_window"] is None:
        found |= {"layer_types": ["full_attention"] * layers, "sliding_window": 1}
    return found


def _rope(file: GGUF, fields: Fields) -> dict[str, Any]:
    """What rope_parameters says, but for the base."""
    original = fields.size("rope.scaling.original_context_length", fields.size("context_length"))
    factors = {"short": SHORT, "long": LONG} if SHORT in file.tensors else {"short": FREQS, "long": FREQS}
    if factors["short"] in file.tensors:  # Llama 3's scaling is stored so, too: as what it makes
        lists = {f"{which}_factor": _numbers(file, name) for which, name in factors.items()}
        attention = {"attention_factor": fields.number("rope.scaling.attn_factor", 1.0)}
        return {"rope_type": "longrope", "original_max_position_embeddings": original, **lists, **attention}
    kind = fields.text("rope.scaling.type", "none")
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise StartupError(f"rope.scaling.type in {file.path} is {shown(kind)}", "linear and yarn are supported")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


def _numbers(file: GGUF, name: str) -> list[float]:
    blocks = file.tensors.get(name)
    if blocks is None or blocks.rows * blocks.columns > MAX_NUMBERS:
        raise StartupError(f"{file.path} has no tensor {name} of at most {MAX_NUMBERS} numbers", AGAIN)
    return [float(number) for number in blocks.numbers().ravel()]


def _kind(file: GGUF) -> str:
    """What most numbers of the file are in."""
    sizes: dict[str, int] = {}
    for blocks in file.tensors.values():
        sizes[blocks.kind] = sizes.get(blocks.kind, 0) + blocks.rows * blocks.columns
    return max(sizes, key=lambda kind: sizes[kind])


def _unturned(stored: Blocks, head_dim: int) -> Blocks:
    """The rows of each head, a pair's first one behind the other's first one, then the second ones: llama.cpp has the
    two of a pair beside each other. A bias is one number a row."""
    if stored.rows == 1 and stored.plain:
        stored = Blocks(stored.kind, stored.columns, 1, stored.data.reshape(stored.columns, -1))
    if head_dim < 2 or head_dim % 2 or stored.rows % head_dim:
        raise StartupError(f"heads of {head_dim} numbers don't divide {stored.rows} rows of queries or keys")
    order = np.arange(stored.rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2)
    return stored.picked(order.ravel())
