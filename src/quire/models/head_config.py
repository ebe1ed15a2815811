"""The declarations of speculation heads: EAGLE-3 (Li et al., 2025) and multi-token prediction (MTP, Gloeckle et al.,
2024). A head drafts tokens from the hidden states of a model, its target. No torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from typing import Any

from quire.errors import StartupError, short_repr
from quire.layers.experts_config import ExpertsConfig
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_LAYERS, DecoderConfig, LayerConfig
from quire.models.delta_rule_families import (
    GATED_NAMES,
    default_rotation,
    read_gated_attention,
    read_qwen3_5_experts,
    read_qwen3_next_experts,
)
from quire.models.expert_families import qwen_expert_names, read_sparse_layers
from quire.models.families import LLAMA_NAMES, declare_gated, read_biases, text_section
from quire.models.rope_settings import read_rope
from quire.models.weight_names import WeightNames
from quire.protocol.model_spec import ModelSpec

TARGET_KEY = "speculation_target"
"""The key under which the configuration of a head has what it depends on besides its own config.json."""
EAGLE3, MTP = "Eagle3LlamaForCausalLM", "MiMoMTPModel"
QWEN3_NEXT_MTP, QWEN3_5_MTP, QWEN3_5_MOE_MTP = "Qwen3NextMTP", "Qwen3_5MTP", "Qwen3_5MoeMTP"
EAGLE3_ARCHITECTURES = (EAGLE3, "LlamaForCausalLMEagle3", "LlamaForCausalLM")
PLAIN_OPTIONS = {
    "norm_before_fc": False, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}  # fmt: skip
"""Options of EAGLE-3 heads that change their equation, and the only values that are supported."""
SPECULATORS_KEYS = (
    "draft_vocab_size", "norm_before_residual", "norm_before_fc", "target_hidden_size",
    "eagle_aux_hidden_state_layer_ids",
)  # fmt: skip
MTP_ARCHITECTURES = {
    "MiMoForCausalLM": (MTP, "num_nextn_predict_layers"),
    "Qwen3NextForCausalLM": (QWEN3_NEXT_MTP, None),
    "Qwen3_5ForCausalLM": (QWEN3_5_MTP, "mtp_num_hidden_layers"),
    "Qwen3_5ForConditionalGeneration": (QWEN3_5_MTP, "mtp_num_hidden_layers"),
    "Qwen3_5MoeForCausalLM": (QWEN3_5_MOE_MTP, "mtp_num_hidden_layers"),
    "Qwen3_5MoeForConditionalGeneration": (QWEN3_5_MOE_MTP, "mtp_num_hidden_layers"),
}
"""The models whose checkpoints have MTP layers that are supported -> the architecture of these, and the key of their
number (None: config.json does not say it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(DecoderConfig):
    """A head of one layer, for a target with hidden states of `target_hidden` numbers. It reads the target's hidden
    states before each of its `captured_layers`, concatenated, or with none its final ones, after the last norm.

    It samples `draft_vocab` tokens of the target's `vocab_size`. Without `has_embedding` or `has_lm_head` that part is
    the target's. `has_draft_ids`: the checkpoint says which tokens those are. `norm_before_residual`: the residual
    starts from the normalised hidden states. An MTP layer's input has the token's embedding before the hidden state if
    `embedding_first`, else after it; with `zeroes_first` the embedding at position 0 counts as zero."""

    target_hidden: int
    captured_layers: tuple[int, ...] = ()
    draft_vocab: int
    has_embedding: bool = False
    has_lm_head: bool = False
    has_draft_ids: bool = False
    norm_before_residual: bool = False
    is_eagle: bool = False
    embedding_first: bool = False
    zeroes_first: bool = False

    @property
    def captured_width(self) -> int:
        """Numbers of the target's hidden states that the head reads for each token."""
        return max(len(self.captured_layers), 1) * self.target_hidden

    @property
    def parameters(self) -> int:
        """Number of parameters, without those that are the target's."""
        h, rows = self.hidden, self.shard.padded_vocab_rows
        total = self._layer_parameters(self.layers[0]) + 3 * h  # the layer's own norms, and the others
        if not self.is_eagle:
            return total + 2 * h * h
        total += h * (self.heads + 2 * self.kv_heads) * self.head_dim - h  # twice as wide an input; two others
        total += h * self.captured_width if self.captured_layers else 0
        return total + h * (self.has_embedding * rows(self.vocab_size) + self.has_lm_head * rows(self.draft_vocab))

    def spec(self) -> ModelSpec:
        """See DecoderConfig."""
        spec = DecoderConfig.spec(self)
        layers = tuple(replace(layer, reads_hidden_states=True) for layer in spec.layers)
        return replace(spec, layers=layers, captured_width=self.captured_width)


def eagle3_config(config: dict[str, Any], target: ModelSpec, tensors: Collection[str] | None) -> dict[str, Any]:
    """Return the configuration of an EAGLE-3 head for `target`, from its config.json and the names of its checkpoint's
    tensors (None: not known, those of most heads are assumed). Raise StartupError if it is no such head."""
    if config.get("speculators_model_type") == "eagle3":
        config = _from_speculators(config)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if name not in EAGLE3_ARCHITECTURES or (name == "LlamaForCausalLM" and config.get("draft_vocab_size") is None):
        raise StartupError(
            f"its architecture is {short_repr(name)}, and that is no EAGLE-3 head",
            f"The architecture of one is {EAGLE3} or {EAGLE3_ARCHITECTURES[1]}; a smaller model needs the method "
            "draft_model",
        )
    known = {"midlayer.", "lm_head.weight", "d2t"} if tensors is None else {*tensors}
    known = {one.removeprefix("model.") for one in known}
    layers = [layer for layer in ("midlayer", "layers.0") if any(one.startswith(f"{layer}.") for one in known)]
    if not layers:
        raise StartupError(
            f"it has no tensors of a layer ({', '.join(sorted(known)[:3])})",
            "The tensors of an EAGLE-3 head's layer begin with midlayer. or layers.0.",
        )
    described = {
        **_describe_target(target),
        "layer": layers[0],
        "has_embedding": "embed_tokens.weight" in known,
        "has_lm_head": "lm_head.weight" in known,
        "has_draft_ids": "d2t" in known,
    }
    return {**config, "architectures": [EAGLE3], TARGET_KEY: described}


def _from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """Return the flat form of a config.json of the library speculators, which has the layer's settings in an object of
    their own."""
    layer = ConfigReader(config).get_object("transformer_layer_config")
    outer = {name: value for name, value in config.items() if name in SPECULATORS_KEYS and value is not None}
    return {**layer, "norm_before_residual": True, **outer, "architectures": [EAGLE3]}


def mtp_config(config: dict[str, Any], target: ModelSpec) -> dict[str, Any]:
    """Return the configuration of the MTP layer in the checkpoint of `target`, whose config.json is given. Raise
    StartupError if it has none."""
    [name, *_] = config["architectures"]
    if name not in MTP_ARCHITECTURES:
        raise StartupError(
            f"the architecture {name} has no MTP layers that are supported",
            f"They are for {', '.join(MTP_ARCHITECTURES)}. Use another method, or leave it out",
        )
    if name.endswith("ForConditionalGeneration"):
        config = {**config, **text_section(ConfigReader(config), {}, tied=False).config}
    architecture, key = MTP_ARCHITECTURES[name]
    count = 1 if key is None else config.get(key)
    if not isinstance(count, int) or count < 1:
        raise StartupError(
            f"{key} in config.json is {short_repr(count)}: the model has no MTP layer",
            "Use a checkpoint that has one, or another method",
        )
    return {**config, "architectures": [architecture], TARGET_KEY: _describe_target(target)}


def _describe_target(target: ModelSpec) -> dict[str, Any]:
    return {
        "hidden": target.hidden, "layers": len(target.layers), "vocab_size": target.vocab_size,
        "max_len": target.max_len,
    }  # fmt: skip


def _declare_head(
    own: ConfigReader, target: dict[str, Any], rows: dict[str, Any], feed_forward: str = "mlp",
    partial: float | None = None, **declared: Any,
) -> HeadConfig:  # fmt: skip
    """Return a head with one Llama layer, and with what is `declared`; `rows` are the options of `declare_gated`,
    `partial` is that of `read_rope`.

    It goes as far as its target, however far it was trained: rotations are relative."""
    rope, _ = read_rope(own, partial)
    base = declare_gated(own, [LayerConfig(rope=rope, feed_forward=feed_forward)], target["max_len"], **rows)
    values = {one.name: getattr(base, one.name) for one in fields(base)}
    return HeadConfig(**{**values, "tied": False, "target_hidden": target["hidden"], **declared})


def read_eagle3(own: ConfigReader) -> HeadConfig:
    """EAGLE-3 (Li et al., 2025): a Llama layer that reads the token's embedding and three hidden states of the target,
    with a vocabulary of frequent tokens."""
    target = _read_target(own, "eagle3")
    if (count := own.get_int("num_hidden_layers", 1, maximum=MAX_LAYERS)) != 1:
        raise StartupError(f"num_hidden_layers in {own.source} is {count}", "Only heads of one layer are supported")
    for section in (own, ConfigReader(own.get_object("eagle_config"), f"eagle_config of {own.source}")):
        for name, value in PLAIN_OPTIONS.items():
            section.require_value(name, value)
    vocab = own.get_int("vocab_size")
    draft_vocab = own.get_int("draft_vocab_size", vocab)
    if vocab != target["vocab_size"]:
        raise StartupError(
            f"the head was made for {vocab} tokens, and the model has {target['vocab_size']}",
            "Use a head that was made for this model",
        )
    if draft_vocab > vocab or (draft_vocab < vocab and not target["has_draft_ids"]):
        which = "more than" if draft_vocab > vocab else "and it has no d2t, which says which of"
        raise StartupError(
            f"draft_vocab_size in {own.source} is {draft_vocab}, {which} the {vocab} tokens of the model",
            "Use a complete head of this model",
        )
    if not target["has_lm_head"] and draft_vocab < vocab:
        raise StartupError("it has no lm_head.weight, and a vocabulary of its own", "Use a complete head")
    layers = _read_captured_layers(own, target["layers"])
    hidden, expected = own.get_int("hidden_size"), own.get_int("target_hidden_size", own.get_int("hidden_size"))
    if expected != target["hidden"] or (hidden != expected and not (target["has_embedding"] and layers)):
        raise StartupError(
            f"the head was made for hidden states of {expected} numbers, and has {hidden} itself; the model's have "
            f"{target['hidden']}",
            "Use a head that was made for this model",
        )
    return _declare_head(
        own,
        target,
        {**read_biases(own), "mlp_bias": own.get_bool("mlp_bias", False)},
        is_eagle=True,
        captured_layers=layers,
        draft_vocab=draft_vocab,
        has_embedding=target["has_embedding"],
        has_lm_head=target["has_lm_head"],
        has_draft_ids=target["has_draft_ids"],
        norm_before_residual=own.get_bool("norm_before_residual", False),
        weight_names={
            **_names_of_layer(target["layer"]),
            "layers.*.hidden_norm": f"{target['layer']}.hidden_norm",
            "fc": "fc",
        },
        ignored_weights=("d2t", "t2d", r"(.*\.)?rotary_emb\.inv_freq"),
    )


def _read_captured_layers(own: ConfigReader, count: int) -> tuple[int, ...]:
    """Return the layers of the target, of `count`, before which the head reads its hidden states; () if it reads the
    final ones.

    In `eagle_config` layers are named after which they are read, at the top level those before which they are, unless
    `eagle_aux_layer_semantics` says otherwise."""
    section = ConfigReader(own.get_object("eagle_config"), f"eagle_config of {own.source}")
    if not section.get_bool("use_aux_hidden_state", True):
        return ()
    key = "eagle_aux_hidden_state_layer_ids"
    outer, inner = own.config.get(key), section.config.get(key)
    offset = 1 if not outer or own.get_str("eagle_aux_layer_semantics", "vllm") == "sglang" else 0
    ids = outer or inner
    if not ids:
        ids, offset = [2, count // 2, count - 3], 0
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one + offset < count for one in ids):
        raise StartupError(
            f"the head reads hidden states of the layers {short_repr(ids)}, and the model has {count}",
            "Use a head that was made for this model",
        )
    return tuple(one + offset for one in ids)


def read_mimo_mtp(own: ConfigReader) -> HeadConfig:
    """The MTP layer of MiMo-7B (Xiaomi, 2025): a Qwen2 layer that reads the token's embedding and the target's final
    hidden state. Embedding and LM head are the target's."""
    target = _read_target(own, "mtp")
    name = "mtp_layers.0"
    return _declare_head(
        own,
        target,
        {"qkv_bias": True},
        draft_vocab=target["vocab_size"],
        zeroes_first=True,
        weight_names={
            **_names_of_layer(name),
            "token_norm": f"{name}.token_layernorm",
            "hidden_norm": f"{name}.hidden_layernorm",
            "project_in": f"{name}.input_proj",
            "norm": f"{name}.final_layernorm",
        },
        ignored_weights=(rf"(?!{name}\.).*",),
    )


def read_qwen3_next_mtp(own: ConfigReader) -> HeadConfig:
    """The MTP layer of Qwen3-Next (Qwen team, 2025): a layer of gated attention, with experts if layer 0 has some."""
    experts = read_qwen3_next_experts(own) if 0 in read_sparse_layers(own) else None
    return _declare_qwen_mtp(own, experts, kv_heads=2, intermediate=own.get_int("intermediate_size", 5632))


def read_qwen3_5_mtp(own: ConfigReader) -> HeadConfig:
    """The MTP layer of Qwen3.5 (Qwen team, 2026): a layer of gated attention."""
    return _declare_qwen_mtp(own, None, kv_heads=4)


def read_qwen3_5_moe_mtp(own: ConfigReader) -> HeadConfig:
    """The MTP layer of Qwen3.5 with experts."""
    experts = read_qwen3_5_experts(own)
    return _declare_qwen_mtp(own, experts, kv_heads=2, intermediate=experts.intermediate)


def _declare_qwen_mtp(own: ConfigReader, experts: ExpertsConfig | None, **rows: Any) -> HeadConfig:
    """Return an MTP layer that reads the token's embedding and the target's final hidden state. Embedding and LM head
    are the target's."""
    target = _read_target(own, "mtp")
    own.require_value("mtp_use_dedicated_embeddings", False)
    names = GATED_NAMES if experts is None else {**GATED_NAMES, **qwen_expert_names(experts)}
    return _declare_head(
        own,
        target,
        {**rows, **read_gated_attention(own), "experts": experts},
        "mlp" if experts is None else "experts",
        default_rotation(own),
        draft_vocab=target["vocab_size"],
        embedding_first=True,
        weight_names={
            **_names_of_layer("mtp.layers.0", names),
            "token_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "project_in": "mtp.fc",
            "norm": "mtp.norm",
        },
        ignored_weights=(r"(?!mtp\.).*",),
    )


def _read_target(own: ConfigReader, method: str) -> dict[str, Any]:
    """Return the description of the target that `eagle3_config` or `mtp_config` added. Raise StartupError if a head is
    used as a model."""
    if TARGET_KEY not in own.config:
        raise StartupError(
            f"{own.source} is that of a speculation head, which is no model of its own",
            f'Give it beside its model: --speculative-config \'{{"method": "{method}", "model": ...}}\'',
        )
    target: dict[str, Any] = own.config[TARGET_KEY]
    return target


def _names_of_layer(layer: str, names: WeightNames = LLAMA_NAMES) -> WeightNames:
    """Return the names of a model whose only layer is called `layer`, where those of others have `names`."""
    return {
        ours: theirs.replace("layers.*", layer) if isinstance(theirs, str)
        else tuple(one.replace("layers.*", layer) for one in theirs)
        for ours, theirs in names.items()
    }  # fmt: skip
