"""What is done once to a model's layers when its weights are there: kernels are chosen, weights are packed."""

from __future__ import annotations

from torch import nn

from quire.data.layers.embedding import Embedding
from quire.data.layers.linear import Linear
from quire.data.layers.mamba import Mamba
from quire.data.layers.mlp import MLP, GatedMLP
from quire.data.layers.moe import SparseMLP
from quire.data.layers.norm import LayerNorm, RMSNorm
from quire.data.layers.softcap import Softcap


def prepare_layers(model: nn.Module, deterministic: bool = False) -> None:
    """Call `prepare` of every layer that has something to prepare. `deterministic`: on a GPU a row's result must not
    depend on the number of rows."""
    for module in model.modules():
        if isinstance(module, Linear | GatedMLP | Mamba | SparseMLP):
            module.prepare(deterministic)
        elif isinstance(module, RMSNorm | LayerNorm | MLP | Softcap | Embedding):
            module.prepare()
