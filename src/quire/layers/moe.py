"""A sparse mixture of gated MLPs (Mixtral, arXiv:2401.04088; Jamba): each token goes through `top_k` experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import get_activation
from quire.layers.sharding import ParameterShards, as_shard_range, shard_columns
from quire.protocol.parallel_layout import UNSHARDED, Shard


class SparseMLP(nn.Module):
    """x [T, hidden] -> the outputs of each token's `top_k` most probable experts, summed with their probabilities as
    weights. If `renormalize` (Mixtral), the weights sum to one. Probabilities and sums are computed in fp32.

    The experts' weights are stacked: `gate_up` [experts * 2 * intermediate, hidden], for each expert the gate's rows
    and then up's, and `down` [experts * hidden, intermediate]. With tensor parallelism each rank has some columns of
    every expert and the whole router: its output is one rank's term of a sum.
    """

    FP8: ClassVar[dict[str, str]] = {"gate_up": "gate_up_scale", "down": "down_scale"}
    """As in `Linear`; the router has its own."""

    __call__: Callable[..., Tensor]

    def __init__(
        self, hidden: int, intermediate: int, experts: int, top: int, act: str, normalised: bool,
        dtype: torch.dtype, device: torch.device, shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__()
        assert 1 <= top <= experts, f"{top} of {experts} experts"
        self.hidden, self.experts, self.top_k, self.renormalize = hidden, experts, top, normalised
        self.act, self.act_name = get_activation(act), act
        columns = shard_columns(shard, intermediate)
        self.param_shards = {
            "gate_up": ParameterShards((columns,) * 2 * experts, None),
            "down": ParameterShards((as_shard_range(hidden),) * experts, columns),
        }

        def stacked(rows: int, columns: int) -> nn.Parameter:
            weight = torch.empty(experts * rows, columns, dtype=dtype, device=device)
            return nn.Parameter(weight, requires_grad=False)

        self.router = Linear(hidden, experts, False, dtype, device)
        self.gate_up, self.down = stacked(2 * columns.padded, hidden), stacked(hidden, columns.padded)
        self.gate_up_scale: Tensor | None = None  # [groups, rows of all experts], of FP8 weights
        self.down_scale: Tensor | None = None
        self.route_kernel: Callable[..., tuple[Tensor, Tensor]] | None = None  # softmax and top-k in one launch
        self.experts_kernel: Callable[..., Tensor] | None = None
        self.deterministic = self.pdl = False

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        gate_up, down = self.gate_up.view(self.experts, -1, self.hidden), self.down.view(self.experts, self.hidden, -1)
        if self.experts_kernel is not None:
            return self.experts_kernel(
                x, weights, chosen, gate_up, down, self.act_name, (self.gate_up_scale, self.down_scale),
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
        if self.gate_up.is_cuda:
            from quire.kernels.triton import activation
            from quire.kernels.triton import fused_moe as experts
            from quire.kernels.triton.launch import supports_pdl

            if self.act_name in activation.ACTIVATIONS:
                self.route_kernel, self.experts_kernel = experts.topk_softmax, experts.fused_moe
                self.deterministic, self.pdl = deterministic, supports_pdl(self.gate_up.device)
