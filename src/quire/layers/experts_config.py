"""The parameters of layers with experts. No torch: memory plans read them too."""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.errors import StartupError
from quire.protocol.parallel_layout import Shard

SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""Of the activation `clamped_swiglu` (quire.layers.mlp); the kernels compute no others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A layer has `count` gated MLPs, experts, of `intermediate` columns each (`intermediate_key`: their key in
    config.json, for errors). A token uses the `per_token` most probable ones, weighted by their probabilities, which
    are divided by their sum if `renormalize`. If there are `shared_intermediate` columns (`shared_key` in
    config.json), each token also uses a shared expert of that size. If `shared_gated`, the sigmoid of a linear layer
    weights its output. With `biases` the router and all products of the experts have biases. With `scaled` the weight
    of each expert is multiplied by a number of the checkpoint. `local_count`: the number of experts whose weights
    a rank has (None: all)."""

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
    local_count: int | None = None

    def divided_columns(self, shard: Shard) -> dict[str, int]:
        """Return the columns that ranks divide, by their keys in config.json. Raise StartupError if ranks divide whole
        experts and there are more ranks than experts."""
        shared = {self.shared_key: self.shared_intermediate} if self.shared_intermediate else {}
        if not shard.expert_parallel:
            return {self.intermediate_key: self.intermediate, **shared}
        if shard.tp_size > self.count:
            raise StartupError(
                f"--tp is {shard.tp_size}, and --expert-parallel divides {self.count} experts: a rank has one or more",
                (f"Use a --tp of at most {self.count}, or leave" if self.count > 1 else "Leave")
                + " --expert-parallel out",
            )
        return shared

    @property
    def weight_count(self) -> int:
        """The number of experts whose weights this rank has."""
        return self.count if self.local_count is None else self.local_count

    def projection_parameters(self, hidden: int) -> int:
        """Return the number of parameters of the projections of a layer's experts, the shared expert's aside."""
        return self.weight_count * 3 * hidden * self.intermediate

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters of a layer's experts, the router's and the shared expert's included."""
        router = self.count * (hidden + self.scaled + self.biases)
        biases = self.biases * self.weight_count * (2 * self.intermediate + hidden)
        gate = hidden if self.shared_intermediate and self.shared_gated else 0
        return router + self.projection_parameters(hidden) + biases + 3 * hidden * self.shared_intermediate + gate

    def divide(self, shard: Shard) -> ExpertsConfig:
        """Return one rank's part: some columns of every expert, or some experts."""
        ranks = shard.tp_size
        return replace(
            self,
            intermediate=self.intermediate // (1 if shard.expert_parallel else ranks),
            shared_intermediate=self.shared_intermediate // ranks,
            local_count=len(shard.expert_range(self.count)),
        )
