"""The parameters of layers with experts. No torch: memory plans read them too."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A layer has `count` gated MLPs, experts, of `intermediate` columns each (`intermediate_key`: their key in
    config.json, for errors). A token uses the `per_token` most probable ones, weighted by their probabilities, which
    are divided by their sum if `renormalize`. If there are `shared_intermediate` columns, each token also uses a
    shared expert with so many, weighted by the sigmoid of a product of its own. With `scaled` the weight of each
    expert is multiplied by a number of the checkpoint."""

    count: int
    per_token: int
    intermediate: int
    intermediate_key: str = "moe_intermediate_size"
    renormalize: bool = False
    shared_intermediate: int = 0
    scaled: bool = False

    @property
    def columns(self) -> dict[str, int]:
        """The columns that ranks divide, by their keys in config.json."""
        shared = {"shared_expert_intermediate_size": self.shared_intermediate} if self.shared_intermediate else {}
        return {self.intermediate_key: self.intermediate, **shared}

    def parameters(self, hidden: int) -> int:
        """Return the number of parameters of a layer's experts, the router's and the shared expert's included."""
        routed = self.count * (3 * hidden * self.intermediate + hidden + self.scaled)
        return routed + (3 * hidden * self.shared_intermediate + hidden if self.shared_intermediate else 0)

    def divide(self, ranks: int) -> ExpertsConfig:
        """Return one rank's part: some columns of every expert."""
        return replace(
            self, intermediate=self.intermediate // ranks, shared_intermediate=self.shared_intermediate // ranks
        )
