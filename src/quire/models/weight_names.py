"""Weight names: the checkpoint's tensors for each parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn


class WeightSource(NamedTuple):
    """A parameter consists of the rows of `tensors`, concatenated, `rows` of each. `transpose`: the checkpoint has them
    as [in, out]. `group_rows`: the tensor's rows are in groups, with this number of rows of each part; the parameter
    has the parts one after another. `row_order`: the tensor's row numbers in the parameter's order, if different."""

    tensors: tuple[str, ...]
    rows: tuple[int, ...]
    transpose: bool = False
    group_rows: tuple[int, ...] = ()
    row_order: tuple[int, ...] = ()


def expand_weight_names(
    model: nn.Module, table: Mapping[str, str | tuple[str, ...]], transposed: str = ""
) -> dict[str, WeightSource]:
    """Return each parameter's WeightSource, from a `table` of patterns in which * is the layer's number.

    `transposed` is a regular expression for the names of parameters that a checkpoint has as [in, out]. A parameter
    that the table lacks is a KeyError: a mistake in the table.
    """
    sources = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\d+", name)
        entry = table[re.sub(r"\d+", "*", name, count=1)]
        tensors = (entry,) if isinstance(entry, str) else entry
        if layer:
            tensors = tuple(tensor.replace("*", layer.group()) for tensor in tensors)
        module = model.get_submodule(name.rpartition(".")[0])
        rows = getattr(module, "output_sizes", ())
        if not isinstance(rows, tuple) or len(rows) != len(tensors):  # equal parts
            rows = (len(parameter) // len(tensors),) * len(tensors)
        flip = bool(transposed) and parameter.dim() == 2 and re.search(transposed, name) is not None
        sources[name] = WeightSource(tensors, rows, flip)
    return sources


INTERNLM2_WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "embed_tokens.weight": "tok_embeddings.weight",
    "layers.*.attention_norm.weight": "layers.*.attention_norm.weight",
    "layers.*.attention.qkv.weight": "layers.*.attention.wqkv.weight",
    "layers.*.attention.out.weight": "layers.*.attention.wo.weight",
    "layers.*.mlp_norm.weight": "layers.*.ffn_norm.weight",
    "layers.*.mlp.gate_up.weight": ("layers.*.feed_forward.w1.weight", "layers.*.feed_forward.w3.weight"),
    "layers.*.mlp.down.weight": "layers.*.feed_forward.w2.weight",
    "head.weight": "output.weight",
}
"""InternLM2's names that differ from LLaMA's. Its `wqkv` has, for each key head, its query heads, the key head, and the
value head."""
PHI3_WEIGHT_NAMES: dict[str, str | tuple[str, ...]] = {
    "layers.*.attention.qkv.weight": "layers.*.self_attn.qkv_proj.weight",
    "layers.*.mlp.gate_up.weight": "layers.*.mlp.gate_up_proj.weight",
}
"""Phi-3's names that differ from LLaMA's."""


def mixer_weight_names(ours: str, theirs: str) -> dict[str, str | tuple[str, ...]]:
    """Return the name table of a Mamba layer's mixer (quire.layers.mamba)."""
    names = {
        "in_proj": "in_proj", "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias",
        "x_proj.weight": "x_proj.weight",
        "dt_proj.weight": "dt_proj.weight", "dt_bias": "dt_proj.bias", "A_log": "A_log", "D": "D", "out": "out_proj",
        **{f"norms.{i}.weight": f"{x}_layernorm.weight" for i, x in enumerate(("dt", "b", "c"))},
    }  # fmt: skip
    for linear in ("in_proj", "out"):
        name = names.pop(linear)
        names |= {f"{linear}.{kind}": f"{name}.{kind}" for kind in ("weight", "bias")}
    return {f"{ours}.{parameter}": f"{theirs}.{tensor}" for parameter, tensor in names.items()}


def expert_weight_names(ours: str, theirs: str, experts: int) -> dict[str, str | tuple[str, ...]]:
    """Return the name table of a layer's experts (quire.layers.moe), which are separate tensors in a checkpoint."""
    names = [f"{theirs}.{expert}" for expert in range(experts)]
    return {
        f"{ours}.gate_up": tuple(f"{name}.{x}_proj.weight" for name in names for x in ("gate", "up")),
        f"{ours}.down": tuple(f"{name}.down_proj.weight" for name in names),
    }
