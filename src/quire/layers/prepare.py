"""What is done once to a model's layers: choosing kernels and packing weights after loading, and connecting a shard to
the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange, ShardedModule
from quire.layers.linear import Linear
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.moe import SparseMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.softcap import Softcap
from quire.layers.state_mixer import StateMixer


class MappedWeights(Protocol):
    """A mapped file of weights (quire.weights.mapped_files)."""

    def release(self) -> None:
        """Give the file's pages in memory back to the system."""
        ...


def prepare_layers(model: nn.Module, deterministic: bool = False, mapped_files: Sequence[MappedWeights] = ()) -> None:
    """Call `prepare` of every layer that has one. `deterministic`: a row's result must not depend on the number of
    rows, on a GPU or with quire's CPU kernels. `mapped_files`, from which the weights were loaded, are released after
    each packing."""
    embeddings = [module for module in model.modules() if isinstance(module, Embedding)]
    for module in model.modules():
        if isinstance(module, Linear):
            weight = module.weight
            module.prepare(deterministic)
            for file in mapped_files:
                file.release()
            for embedding in embeddings:
                if weight is not None and embedding.weight is weight and module.weight is None:
                    embedding.tie_to_packed(module.packed)
        elif isinstance(module, GatedMLP | MLP | StateMixer | SparseMLP):
            module.prepare(deterministic)
        elif isinstance(module, RMSNorm | LayerNorm | Softcap | Embedding):
            module.prepare()


def connect_ranks(model: nn.Module, exchange: Exchange) -> None:
    """Connect a shard to the other ranks: at the norms that add a residual, within mixers with states, at the
    embedding, and at the logits. A vision encoder is whole on each rank. May be called before or after `prepare`."""
    vision_encoder: nn.Module | None = getattr(model, "vision_encoder", None)
    unsharded = set[nn.Module]() if vision_encoder is None else set(vision_encoder.modules())
    for module in model.modules():
        if isinstance(module, ShardedModule) and module not in unsharded:
            module.connect(exchange)
