"""A sparse mixture of gated MLPs (Mixtral, arXiv:2401.04088; Jamba; Qwen): each token goes through `top_k` experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.kernels.cpu.experts import PackedExperts
from quire.kernels.cpu.linear import ACTIVATIONS as CPU_ACTIVATIONS
from quire.kernels.cpu.linear import PackedLinear, supports
from quire.kernels.cpu.low_bit_linear import LowBitWeight, PackedLowBitLinear
from quire.layers.experts_config import ExpertsConfig
from quire.layers.linear import Linear
from quire.layers.mlp import GatedMLP, get_gated_activation
from quire.layers.sharding import shard_columns, shard_experts
from quire.protocol.parallel_layout import UNSHARDED, Shard

if TYPE_CHECKING:
    from quire.kernels.triton.low_bit import LowBitMatrix


class ExpertWeights(Linear):
    """The weights of one product of all experts, stacked. SparseMLP multiplies those that a token chooses."""

    def can_pack(self) -> bool:
        """Return True if the CPU has quire's kernels for this weight."""
        on_gpu = self.low_bit_device.type == "cuda"
        return self.weight is not None and not on_gpu and (self.low_bit_parts is not None or supports(self.weight))

    @torch.no_grad()
    def pack_each(
        self, count: int, activation: str | None = None, deterministic: bool = False
    ) -> list[PackedLinear | PackedLowBitLinear]:
        """Return the packed weights of `count` experts, and drop the plain ones. `activation`: that of gate and up,
        stacked. Needs `can_pack`."""
        assert self.weight is not None, "packed twice"
        fused, dtype = (activation, activation is not None, deterministic), self.weight.dtype
        biases = (None,) * count if self.bias is None else self.bias.chunk(count)
        packed: list[PackedLinear | PackedLowBitLinear] = []
        if self.low_bit_parts is not None:
            loaded = [make for make in self.low_bit_parts if make is not None]  # other ranks' experts have none
            size, rest = divmod(len(loaded), count)
            assert not rest, "all parts are loaded"
            for start, bias in zip(range(0, len(loaded), size), biases):
                parts = [make() for make in loaded[start : start + size]]
                packed.append(PackedLowBitLinear(reduce(LowBitWeight.concat_rows, parts), dtype, bias, *fused))
        else:
            self.load_deferred()
            packed += [PackedLinear(weight, bias, *fused) for weight, bias in zip(self.weight.chunk(count), biases)]
        self.weight = self.low_bit_parts = None
        return packed

    @torch.no_grad()
    def pack_for_gpu(self) -> LowBitMatrix:
        """Return a low-bit weight for quire.kernels.triton.low_bit, and drop the plain one."""
        from quire.kernels.triton.low_bit import pack

        assert self.low_bit_parts is not None, "not a low-bit weight"
        parts = [make() for make in self.low_bit_parts if make is not None]
        self.weight = self.low_bit_parts = None
        return pack(parts, self.low_bit_device)

    @torch.no_grad()
    def dequantize(self) -> None:
        """Replace a low-bit weight by a plain one with equal values."""
        if self.low_bit_parts is not None:
            assert self.weight is not None, "packed already"
            rows = [make().dequantize().to(self.weight.dtype) for make in self.low_bit_parts if make is not None]
            self.weight, self.low_bit_parts = nn.Parameter(torch.cat(rows), requires_grad=False), None

    def prepare(self, deterministic: bool = False) -> None:
        """See Linear. The weight stays as it is."""
        self.load_deferred()


class SparseMLP(nn.Module):
    """x [T, hidden] -> the outputs of each token's `top_k` most probable experts, summed with their probabilities as
    weights, and that of the shared expert, if any (see ExpertsConfig). Probabilities and sums are computed in fp32.

    `gate_up` has for each expert the gate's rows and then up's, `down` for each expert `hidden` rows. With tensor
    parallelism each rank has the whole router, and its output is one rank's term of a sum. Without expert parallelism
    it has some columns of every expert, and only the first rank adds the bias of `down`. With expert parallelism it has
    the experts `own`: it chooses the experts of all tokens, and computes the pairs of a token and an expert of its own.
    """

    __call__: Callable[..., Tensor]
    expert_scale: nn.Parameter | None

    def __init__(
        self, hidden: int, experts: ExpertsConfig, act: str, dtype: torch.dtype, device: torch.device,
        shard: Shard = UNSHARDED,
    ) -> None:  # fmt: skip
        super().__init__()
        self.experts, self.top_k, self.renormalize = experts.count, experts.per_token, experts.renormalize
        assert 1 <= self.top_k <= self.experts, f"{self.top_k} of {self.experts} experts"
        self.act, self.act_name, biases = get_gated_activation(act), act, experts.biases
        self.own, size = shard.expert_range(self.experts), experts.intermediate
        columns = size if shard.expert_parallel else shard_columns(shard, size)
        inner, outer = (shard_experts(shard, self.experts, *rows) for rows in ((columns, columns), (hidden,)))
        self.router = Linear(hidden, self.experts, biases, dtype, device)
        self.gate_up = ExpertWeights(hidden, inner, biases, dtype, device)
        self.down = ExpertWeights(columns, outer, biases, dtype, device, output_modified=True)
        self.shared: GatedMLP | None = None
        self.shared_gate: Linear | None = None
        if experts.shared_intermediate:
            self.shared = GatedMLP(hidden, experts.shared_intermediate, act, False, dtype, device, shard, True)
            self.shared_gate = Linear(hidden, 1, False, dtype, device) if experts.shared_gated else None
        scale = nn.Parameter(torch.empty(self.experts, dtype=dtype, device=device), requires_grad=False)
        self.register_parameter("expert_scale", scale if experts.scaled else None)
        self.route_kernel: Callable[..., Any] | None = None  # softmax and top-k in one launch
        self.experts_kernel: Callable[..., Tensor] | None = None
        self.packed: PackedExperts | None = None  # all of it, for a CPU
        self.low_bit: tuple[LowBitMatrix, LowBitMatrix] | None = None  # gate and up, and down, on a GPU
        self.deterministic = self.pdl = False

    def forward(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Return the output for x [T, hidden], whose experts `router_input` [T, hidden] chooses (None: x)."""
        shared = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        if self.packed is not None:
            gated, logits = None if gate is None else shared, self.router(x if router_input is None else router_input)
            out = self.packed(x, logits, self.top_k, self.renormalize, gated, gate, self.expert_scale)
        else:
            out = self.mix(x, router_input)
            if shared is not None and gate is not None:
                out.addcmul_(gate.sigmoid_(), shared)
        return out if shared is None or gate is not None else out.add_(shared)

    def mix(self, x: Tensor, router_input: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the outputs of the experts of each token; for the arguments see `forward`."""
        router_input = x if router_input is None else router_input
        biases = self.gate_up.bias, self.down.bias
        if self.low_bit is not None:
            return self._mix_by_kernels(x, router_input, *self.low_bit, biases)
        assert self.gate_up.weight is not None, "the weight is not packed"
        assert self.down.weight is not None, "the weight is not packed"
        weights = self.gate_up.weight, self.down.weight
        gate_up, down = (weight.view(len(self.own), -1, weight.shape[1]) for weight in weights)
        if self.experts_kernel is not None:
            return self._mix_by_kernels(x, router_input, gate_up, down, (self.gate_up.scale, self.down.scale), biases)
        shares, chosen = self.route(router_input)
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        inner_bias, outer_bias = (None if bias is None else bias.view(len(self.own), -1) for bias in biases)
        for number in torch.unique(chosen).tolist():
            if number not in self.own:
                continue
            (rows, rank), expert = torch.where(chosen == number), number - self.own.start
            inner = F.linear(x[rows], gate_up[expert], None if inner_bias is None else inner_bias[expert])
            gate, up = inner.chunk(2, dim=1)
            result = F.linear(self.act(gate, up), down[expert], None if outer_bias is None else outer_bias[expert])
            out.index_add_(0, rows, result.float() * shares[rows, rank, None])
        return out.to(x.dtype)

    def _mix_by_kernels(self, x: Tensor, router_input: Tensor, *weights: Any) -> Tensor:
        assert self.route_kernel is not None, "prepare() chooses both"
        assert self.experts_kernel is not None, "prepare() chooses both"
        gate_up, down, *scales = weights
        listed = len(x) > 1 or self.deterministic
        logits, scale = self.router(router_input), self.expert_scale
        routing = self.route_kernel(logits, self.top_k, self.renormalize, listed, scale, self.own, pdl=self.pdl)
        return self.experts_kernel(
            x, routing, gate_up, down, self.act_name, *scales, deterministic=self.deterministic, pdl=self.pdl
        )

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights (fp32) and the indices of each token's experts, [T, top_k] each, most probable first."""
        weights, chosen = F.softmax(self.router(x), dim=1, dtype=torch.float32).topk(self.top_k, dim=1)
        weights = weights / weights.sum(dim=1, keepdim=True) if self.renormalize else weights
        return weights if self.expert_scale is None else weights * self.expert_scale[chosen], chosen

    def prepare(self, deterministic: bool = False) -> None:
        """Choose kernels. Call once, after loading. All experts' products are two launches on a GPU, or two operations
        with packed weights on a CPU. If `deterministic`, a row's bits don't depend on the number of rows."""
        weight = self.gate_up.weight
        assert weight is not None, "prepared twice"
        if not self.down.column_shard.shard.is_first_tp_rank:
            self.down.bias = None
        if self.expert_scale is not None:
            self.expert_scale = nn.Parameter(self.expert_scale.float(), requires_grad=False)
        if self.gate_up.can_pack() and self.down.can_pack() and self.act_name in CPU_ACTIVATIONS:
            gate_up = self.gate_up.pack_each(len(self.own), self.act_name, deterministic)
            down = self.down.pack_each(len(self.own), None, deterministic)
            self.packed = PackedExperts(gate_up, down, self.own.start)
            return
        products = self.gate_up, self.down
        if all(part.low_bit_parts is not None and part.low_bit_device.type == "cuda" for part in products):
            self._prepare_low_bit(deterministic)
            return
        for part in products:
            part.dequantize()
        if weight.is_cuda:
            from quire.kernels.triton import activation
            from quire.kernels.triton import fused_moe as experts
            from quire.kernels.triton.launch import supports_pdl

            if self.act_name in activation.ACTIVATIONS:
                self.route_kernel, self.experts_kernel = experts.route, experts.fused_moe
                self.deterministic, self.pdl = deterministic, supports_pdl(weight.device)

    def _prepare_low_bit(self, deterministic: bool) -> None:
        from quire.kernels.triton import fused_moe, low_bit
        from quire.kernels.triton.launch import supports_pdl

        self.route_kernel, self.experts_kernel = fused_moe.route, low_bit.low_bit_moe
        self.low_bit = self.gate_up.pack_for_gpu(), self.down.pack_for_gpu()
        self.deterministic, self.pdl = deterministic, supports_pdl(self.gate_up.low_bit_device)
