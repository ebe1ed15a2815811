"""Speculation heads for tests, tiny and random, in fp32: transformers' modules put together as the heads are published,
and their checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

VOCAB, DRAFTED = 97, 40
TARGET = {
    "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "vocab_size": VOCAB, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": VOCAB,
    "draft_vocab_size": DRAFTED, "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}  # fmt: skip


def saved(family: str, options: dict[str, Any], folder: Path) -> Any:
    """transformers' model with random weights, saved to `folder`."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    randomized(model).save_pretrained(folder)
    return model


def attended(module: nn.Module, x: Tensor, cfg: Any, rotary: type[nn.Module]) -> Tensor:
    """transformers' attention of rows x [T, ...] at positions 0 to T - 1, causal."""
    positions = torch.arange(len(x))[None]
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    out: Tensor = module(x[None], position_embeddings=rotary(cfg)(x[None], positions), attention_mask=mask)[0][0]
    return out


class PublishedEagle3(nn.Module):
    """An EAGLE-3 head as it is published: names of the tensors, and the equation."""

    def __init__(self, config: dict[str, Any], embeds: bool) -> None:
        super().__init__()
        self.before = config.get("norm_before_residual", False)
        self.cfg = cfg = transformers.LlamaConfig(
            **{name: value for name, value in config.items() if name != "architectures"}, attn_implementation="eager"
        )
        width = config.get("target_hidden_size", cfg.hidden_size)
        layer = llama.LlamaDecoderLayer(cfg, 0)
        for name in "qkv":
            old = getattr(layer.self_attn, f"{name}_proj")
            setattr(layer.self_attn, f"{name}_proj", nn.Linear(2 * cfg.hidden_size, old.out_features, bias=False))
        layer.hidden_norm = llama.LlamaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.midlayer, self.fc = layer, nn.Linear(3 * width, cfg.hidden_size, bias=False)
        self.norm = llama.LlamaRMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.hidden_size, config["draft_vocab_size"], bias=False)
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size) if embeds else None
        ids = torch.randperm(cfg.vocab_size, generator=torch.Generator().manual_seed(5))[: config["draft_vocab_size"]]
        self.d2t = ids.sort().values - torch.arange(config["draft_vocab_size"])

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        both = torch.cat((layer.input_layernorm(embeddings), normed), dim=-1)
        x = (normed if self.before else hidden) + attended(layer.self_attn, both, self.cfg, llama.LlamaRotaryEmbedding)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.full((len(hidden), self.cfg.vocab_size), -torch.inf)
        logits[:, torch.arange(len(self.d2t)) + self.d2t] = self.lm_head(self.norm(hidden))
        return logits

    def save(self, folder: Path, config: dict[str, Any], rename: Callable[[str], str] = str) -> None:
        folder.mkdir()
        tensors = {rename(name): tensor.contiguous() for name, tensor in self.state_dict().items()}
        is_drafted = torch.zeros(self.cfg.vocab_size, dtype=torch.bool)
        is_drafted[torch.arange(len(self.d2t)) + self.d2t] = True
        save_file({**tensors, "d2t": self.d2t, "t2d": is_drafted}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))


class PublishedMtp(nn.Module):
    """MiMo's MTP layer as it is published."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.cfg = cfg
        for name in ("token", "hidden", "input_", "post_attention_", "final_"):
            norm = qwen2.Qwen2RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
            setattr(self, f"{name}layernorm" if name.endswith("_") else f"{name}_layernorm", norm)
        self.input_proj = nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        self.self_attn, self.mlp = qwen2.Qwen2Attention(cfg, 0), qwen2.Qwen2MLP(cfg)

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        embeddings = torch.cat((torch.zeros_like(embeddings[:1]), embeddings[1:]))
        x = self.input_proj(torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embeddings)), dim=-1))
        x = x + attended(self.self_attn, self.input_layernorm(x), self.cfg, qwen2.Qwen2RotaryEmbedding)
        out: Tensor = self.final_layernorm(x + self.mlp(self.post_attention_layernorm(x)))
        return out


class PublishedQwenMtp(nn.Module):
    """The MTP layer of Qwen3-Next or Qwen3.5 as vLLM has it: that of a checkpoint's first layer, but with attention."""

    def __init__(self, cfg: Any, kind: str) -> None:
        super().__init__()
        code = {"qwen3_next": qwen3_next, "qwen3_5_text": qwen3_5}[kind]
        name = {"qwen3_next": "Qwen3Next", "qwen3_5_text": "Qwen3_5"}[kind]
        for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            setattr(self, part, getattr(code, f"{name}RMSNorm")(cfg.hidden_size, cfg.rms_norm_eps))
        self.fc = nn.Linear(2 * cfg.hidden_size, cfg.hidden_size, bias=False)
        layer = getattr(code, f"{name}DecoderLayer")(cfg, cfg.layer_types.index("full_attention"))
        self.layers, self.cfg = nn.ModuleList([layer]), cfg
        for name, parameter in layer.named_parameters():
            if ".experts." in name:  # these are allocated alone
                nn.init.normal_(parameter, std=0.1)

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        both = self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)
        x = self.fc(torch.cat(both, dim=-1))[None]
        angles = qwen3_next.Qwen3NextRotaryEmbedding(self.cfg)(x, torch.arange(x.shape[1])[None])  # of text, for both
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)[None, None]
        out: Tensor = self.norm(self.layers[0](x, position_embeddings=angles, attention_mask=mask)[0])
        return out


@torch.no_grad()
def randomized(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.15)
    return module.eval()


def mimo(folder: Path, **settings: Any) -> tuple[Any, Any]:
    """A MiMo with an MTP layer, saved as it is published: transformers' Qwen2, and the layer."""
    theirs = saved("qwen2", {**TARGET, **settings}, folder)
    layer = randomized(PublishedMtp(theirs.config))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return theirs, layer


QWEN = {
    **TARGET, "num_hidden_layers": 3, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
    "pad_token_id": None, "rms_norm_eps": 1e-2,
}  # fmt: skip


def qwen(folder: Path, kind: str = "qwen3_next", **settings: Any) -> tuple[Any, Any]:
    """A Qwen3-Next or Qwen3.5 with an MTP layer, saved as it is published: transformers' model, and the layer."""
    options = {**QWEN, **settings}
    options["layer_types"] = options["layer_types"][: options["num_hidden_layers"]]
    theirs = saved(kind, options, folder)
    layer = randomized(PublishedQwenMtp(theirs.config, kind))
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"mtp.{name}": tensor for name, tensor in layer.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    return theirs, layer
