"""What is done once to a model's layers: when its weights are there, kernels are chosen and weights are packed; and
a shard is told where it meets the others.
"""

from __future__ import annotations

from torch import nn

from quire.layers.embedding import Embedding
from quire.layers.exchange import Exchange
from quire.layers.linear import Linear
from quire.layers.mamba import MambaMixer
from quire.layers.mlp import MLP, GatedMLP
from quire.layers.moe import SparseMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.softcap import Softcap


def prepare_layers(model: nn.Module, deterministic: bool = False) -> None:
    """Call `prepare` of every layer that has something to prepare. `deterministic`: a row's result must not depend on
    the number of rows, on a GPU, and on a CPU with kernels of our own. What has been packed is given back to the files
    that it was mapped from (`model.mapped`), if any."""
    embeddings = [module for module in model.modules() if isinstance(module, Embedding)]
    files = model.__dict__.pop("mapped", ())
    for module in model.modules():
        if isinstance(module, Linear):
            weight = module.weight
            module.prepare(deterministic)
            for mapped in files:
                mapped.release()
            for embedding in embeddings:
                if weight is not None and embedding.weight is weight and module.weight is None:
                    embedding.tie_to_packed(module.packed)
        elif isinstance(module, GatedMLP | MLP | MambaMixer | SparseMLP):
            module.prepare(deterministic)
        elif isinstance(module, RMSNorm | LayerNorm | Softcap | Embedding):
            module.prepare()


def connect_ranks(model: nn.Module, exchange: Exchange) -> None:
    """Let a shard meet those of the other ranks in every step: at the norms before which something is added, within its
    Mamba mixers, at its embedding, and at its logits, which `exchange` of the model, or of its `text`, is for. Its
    `eyes` are whole on each rank. Before or after `prepare`."""
    # A stage's last product is added up by the next one.
    sends = hasattr(exchange, "send_rows") and exchange.shard.pp_size == 1
    eyes = (
        set(model.vision_encoder.modules()) if getattr(model, "vision_encoder", None) is not None else set[nn.Module]()
    )
    for module in model.modules():
        if module in eyes:
            continue
        met = isinstance(module, RMSNorm | LayerNorm | MambaMixer)
        if met or (isinstance(module, Embedding) and module.shard_range.is_sharded):
            module.exchange = exchange
        if isinstance(module, RMSNorm | LayerNorm):
            module.all_reduce_norm = getattr(exchange, "all_reduce_norm", None)
        if isinstance(module, Linear) and module.column_shard.is_sharded and not module.output_modified and sends:
            module.overlap = exchange  # type: ignore[assignment]
    for holder in (model, getattr(model, "text", model)):
        holder.__dict__["exchange"] = exchange
