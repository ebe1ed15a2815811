"""The layers of a model that is divided into stages, runs of layers one behind another (pipeline parallelism: GPipe,
arXiv:1811.06965). A stage's model is the whole one's, with its own layers; in the places of others are layers that
pass on what they are given, so that layers keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from quire.protocol.parallel_layout import Shard


class PPMissingLayer(nn.Module):
    """In the place of a layer that another stage has: x and what is to be added to it go through as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.post_mlp_norm: nn.Module | None = None  # the norm that a delta goes through first, where a model has such

    def forward(self, x: Tensor, delta: Tensor | None, *rest: Any) -> tuple[Tensor, Tensor | None]:
        return x, delta

    def attend(self, x: Tensor, delta: Tensor | None, *rest: Any, last: bool = False) -> Tensor | None:
        """In the last layer's place: what is to be added by the next stage."""
        return delta

    mix = attend

    def feed_forward(self, x: Tensor, delta: Tensor | None) -> Tensor | None:
        """Behind `attend`."""
        return delta


def make_layers(shard: Shard, count: int, make: Callable[[int], nn.Module]) -> nn.ModuleList:
    """`count` layers, of which the part's stage has some."""
    own = shard.layer_range(count)
    return nn.ModuleList(make(layer) if layer in own else PPMissingLayer() for layer in range(count))
