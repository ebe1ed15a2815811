"""A sparse mixture of gated MLPs (Mixtral, arXiv:2401.04088; Jamba; Qwen): each token goes through `top_k` experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.experts_config import ExpertsConfig
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, get_activation
from quire.layers.sharding import shard_columns
from quire.protocol.parallel_layout import UNSHARDED, Shard


class ExpertWeights(Linear):
    """The weights of one product of all experts, stacked. SparseMLP multiplies those that a token chooses."""

    def prepare(self, deterministic: bool = False) -> None:
        """See Linear. The weight stays as it is."""
        self.load_deferred()


class SparseMLP(nn.Module):
    """x [T, hidden] -> the outputs of each token's `top_k` most probable experts, summed with their probabilities as
    weights, and that of the shared expert, if any (see ExpertsConfig). Probabilities and sums are computed in fp32.

    `gate_up` has for each expert the gate's rows and then up's, `down` for each expert `hidden` rows. With tensor
    parallelism each rank has some columns of every expert and the whole router: its output is one rank's term of a sum.
    """

    __call__: Callable[..., Tensor]

    def __init__(
        self, hidden: int, experts: ExpertsConfig, act: str, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts, self.top_k, self.renormalize = experts.count, experts.per_token, experts.renormalize
        assert 1 <= self.top_k <= self.experts, f"{self.top_k} of {self.experts} experts"
        self.act, self.act_name = get_activation(act), act
        columns = shard_columns(shard, experts.intermediate)
        self.router = Linear(hidden, self.experts, False, dtype, device)
        self.gate_up = ExpertWeights(hidden, (columns, columns) * self.experts, False, dtype, device)
        self.down = ExpertWeights(columns, (hidden,) * self.experts, False, dtype, device, output_modified=True)
        self.shared: GatedMLP | None = None
        if experts.shared_intermediate:
            self.shared = GatedMLP(hidden, experts.shared_intermediate, act, False, dtype, device, shard, True)
            self.shared_gate = Linear(hidden, 1, False, dtype, device)
        self.route_kernel: Callable[..., tuple[Tensor, Tensor]] | None = None  # softmax and top-k in one launch
        self.experts_kernel: Callable[..., Tensor] | None = None
        self.deterministic = self.pdl = False

    def forward(self, x: Tensor) -> Tensor:
        out = self.mix(x)
        if self.shared is None:
            return out
        return out.addcmul_(self.shared_gate(x).sigmoid_(), self.shared(x))

    def mix(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the outputs of each token's chosen experts."""
        weights, chosen = self.route(x)
        assert self.gate_up.weight is not None, "the weight is not packed"
        assert self.down.weight is not None, "the weight is not packed"
        gate_up, down = (part.view(self.experts, -1, part.shape[1]) for part in (self.gate_up.weight, self.down.weight))
        if self.experts_kernel is not None:
            return self.experts_kernel(
                x, weights, chosen, gate_up, down, self.act_name, (self.gate_up.scale, self.down.scale),
                deterministic=self.deterministic, pdl=self.pdl,
            )  # fmt: skip
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            rows, rank = torch.where(chosen == expert)
            gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=1)
            result = F.linear(self.act(gate).mul_(up), down[expert])
            out.index_add_(0, rows, result.float() * weights[rows, rank, None])
        return out.to(x.dtype)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (fp32) and the indices of each token's experts, [T, top_k] each, most probable first."""
        if self.route_kernel is not None:
            return self.route_kernel(self.router(x), self.top_k, self.renormalize, pdl=self.pdl)
        weights, chosen = F.softmax(self.router(x), dim=1, dtype=torch.float32).topk(self.top_k, dim=1)
        return weights / weights.sum(dim=1, keepdim=True) if self.renormalize else weights, chosen

    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels. Call once, after loading. On a GPU all experts' products are two launches. If
        `deterministic`, a row's bits don't depend on the number of rows."""
        weight = self.gate_up.weight
        if weight is not None and weight.is_cuda:
            from quire.kernels.triton import activation
            from quire.kernels.triton import fused_moe as experts
            from quire.kernels.triton.launch import supports_pdl

            if self.act_name in activation.ACTIVATIONS:
                self.route_kernel, self.experts_kernel = experts.topk_softmax, experts.fused_moe
                self.deterministic, self.pdl = deterministic, supports_pdl(weight.device)
