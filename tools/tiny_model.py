"""The bundled models in plain torch: a small LLaMA with Hugging Face weight names, and the folder it is saved as.

Used for training only; the engine reads the saved folder. Rotary positions pair element i with i + head_dim / 2.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save as safetensors_bytes
from tiny_text import BEGIN, CHAT_TEMPLATE, END, END_OF_TEXT, PAD
from tokenizers import Tokenizer
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one model; head_dim is hidden // heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 3072
    context: int = 4096
    theta: float = 10000.0
    epsilon: float = 1e-5


TINY = Shape(hidden=256, layers=6, heads=4, kv_heads=2, intermediate=704)
DRAFT = Shape(hidden=128, layers=2, heads=2, kv_heads=1, intermediate=352)
TEMPERATURE = 0.1  # what requests get that name none; chat_score.py measured it


class RMSNorm(nn.Module):
    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        x32 = x.float()
        return self.weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.epsilon))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, tokens, head_dim] by tables [tokens, head_dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.hidden // shape.heads
        self.q_proj = nn.Linear(shape.hidden, shape.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * self.head_dim, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return projected


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, shape.epsilon)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        added: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + added


class Llama(nn.Module):
    """Token ids [batch, tokens] -> last hidden states; `logits` and `loss` apply the tied head."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, shape.epsilon)
        head_dim = shape.hidden // shape.heads
        inverse = shape.theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(shape.context, dtype=torch.float64), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:  # the two projections back into the residual start smaller, as there are 2 a layer
                small = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * shape.layers) ** 0.5 if small else 0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, ids: Tensor) -> Tensor:
        return F.linear(self(ids), self.embed_tokens.weight)

    def loss(self, ids: Tensor, reduction: str = "mean") -> Tensor:
        """Cross entropy of tokens 1.. given those before, ids [batch, tokens + 1]."""
        logits = self.logits(ids[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


def parameters(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@torch.inference_mode()
def answer(model: Llama, tokenizer: Tokenizer, prompt: str, longest: int = 64) -> str:
    """The greedy continuation of a rendered chat, up to its end token."""
    device = model.embed_tokens.weight.device
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    stops = {tokenizer.token_to_id(END), tokenizer.token_to_id(END_OF_TEXT)}
    start = len(ids)
    while len(ids) < start + longest:
        best = int(model.logits(torch.tensor([ids], device=device))[0, -1].argmax())
        if best in stops:
            break
        ids.append(best)
    return tokenizer.decode(ids[start:])


def write_folder(
    folder: Path, weights: Mapping[str, Tensor], tokenizer: Tokenizer, template: str, files: dict[str, Any]
) -> None:
    """A Hugging Face folder: weights in bf16, tokenizer, chat template, and JSON files by name. `config` is one."""
    folder.mkdir(parents=True, exist_ok=True)
    halves = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in weights.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(halves, metadata={"format": "pt"}))
    special = [one.content for _, one in sorted(tokenizer.get_added_tokens_decoder().items())]
    config = files["config"].get("text_config", files["config"])
    files["tokenizer_config"] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END, "pad_token": PAD,
        "additional_special_tokens": [token for token in special if token not in (BEGIN, END, PAD)],
        "model_max_length": config["max_position_embeddings"], "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }  # fmt: skip
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def save(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model's folder."""
    begin, end, end_of_text, pad = (tokenizer.token_to_id(token) for token in (BEGIN, END, END_OF_TEXT, PAD))
    shape = model.shape
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.hidden // shape.heads, "hidden_act": "silu", "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.epsilon, "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
        "bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad, "torch_dtype": "bfloat16",
    }  # fmt: skip
    generation = {
        "bos_token_id": begin, "do_sample": True, "eos_token_id": [end, end_of_text], "pad_token_id": pad,
        "temperature": TEMPERATURE,
    }  # fmt: skip
    weights = {f"model.{name}": weight for name, weight in model.named_parameters()}
    write_folder(folder, weights, tokenizer, CHAT_TEMPLATE, {"config": config, "generation_config": generation})
