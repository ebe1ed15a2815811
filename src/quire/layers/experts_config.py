"""The parameters of layers with experts. No torch: memory plans read them too."""

from __future__ import annotations

from dataclasses import dataclass, replace

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of the activation `clamped_swiglu` (quire.layers.mlp); the kernels compute no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A layer has `count` gated MLPs, experts, of `intermediate` columns each (`intermediate_key`: their key in
    config.json, for errors). A token uses the `per_token` most probable ones, weighted by their probabilities, which
    are divided by their sum if `renormalize`. If there are `shared_intermediate` columns (`shared_key` in
    config.json), each token also uses a shared expert with so many, weighted by the sigmoid of a product of its own
    if `shared_gated`. With `biases` the router and all products of the experts have biases. With `scaled` the weight
    of each expert is multiplied by a number of the checkpoint."""

    count: int
    per_token: int
    intermediate: int
    intermediate_key: str = "moe_intermediate_size"
    renormalize: bool = False
    shared_intermediate: int = 0
    biases: bool = False
    shared_key: str = "shared_expert_intermediate_size"
    shared_gated: bool = True
    scaled: bool = False

    @property
    def columns(self) -> dict[str, int]:
        """The columns that ranks divide, by their keys in config.json."""
        shared = {self.shared_key: self.shared_intermediate} if self.shared_intermediate else {}
        return {self.intermediate_key: self.intermediate, **shared}

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters of a layer's experts, the router's and the shared expert's included."""
        routed = self.count * (3 * hidden * self.intermediate + hidden + self.scaled)
        routed += self.biases * self.count * (2 * self.intermediate + hidden + 1)
        gate = hidden if self.shared_intermediate and self.shared_gated else 0
        return routed + 3 * hidden * self.shared_intermediate + gate

    def divide(self, ranks: int) -> ExpertsConfig:
        """Return one rank's part: some columns of every expert."""
        return replace(
            self, intermediate=self.intermediate // ranks, shared_intermediate=self.shared_intermediate // ranks
        )
