"""The layers of a pipeline stage, a run of consecutive layers (GPipe, arXiv:1811.06965). A stage's model has a
placeholder for each layer of other stages, which returns its inputs, so that layers keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from quire.layers.module_list import module_list
from quire.protocol.parallel_layout import Shard

Layer = TypeVar("Layer", bound=nn.Module)


class PPMissingLayer(nn.Module):
    """The placeholder for a layer of another stage: returns x and delta, the pending residual, unchanged."""

    def mix(self, x: Tensor, delta: Tensor | None, *rest: Any, last: bool = False) -> Tensor | None:
        """As the last layer: return the delta that the next stage adds."""
        return delta

    def feed_forward(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The part of the layer after `mix`."""
        return x, delta


def make_layers(shard: Shard, count: int, make: Callable[[int], Layer]) -> Sequence[Layer]:
    """Return an nn.ModuleList of `count` layers: those of the shard's stage, and placeholders for the others. These are
    typed as layers too: they have the methods that `run_layers` of a model calls."""
    local = shard.layer_range(count)
    return module_list(make(layer) if layer in local else cast(Layer, PPMissingLayer()) for layer in range(count))
