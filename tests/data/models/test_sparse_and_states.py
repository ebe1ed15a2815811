"""The Mamba mixer and the mixture of experts equal those of transformers, whose weights they are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.jamba.modeling_jamba import JambaMambaMixer, JambaSparseMoeBlock
from transformers.models.mamba.modeling_mamba import MambaMixer
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from quire.data.kernels.batch import Batch
from quire.data.kernels.states import StateCache, StatePlan
from quire.data.layers.mamba import Mamba, Widths
from quire.data.layers.moe import SparseMLP
from quire.data.layers.prepare import prepare_layers
from quire.errors import StartupError

CPU = torch.device("cpu")
WIDTHS = Widths(hidden=24, d_inner=48, dt_rank=6, d_state=5, d_conv=4)
EPS = 1e-6


def draw(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter of it, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return dict(module.named_parameters())


def jamba(bias: bool, conv_bias: bool) -> nn.Module:
    config = transformers.JambaConfig(
        hidden_size=24, mamba_expand=2, mamba_d_state=5, mamba_d_conv=4, mamba_dt_rank=6, mamba_proj_bias=bias,
        mamba_conv_bias=conv_bias, rms_norm_eps=EPS, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1,
    )  # fmt: skip
    return JambaMambaMixer(config, 0)


def mamba(bias: bool, conv_bias: bool) -> nn.Module:
    config = transformers.MambaConfig(
        hidden_size=24, expand=2, state_size=5, conv_kernel=4, time_step_rank=6, use_bias=bias,
        use_conv_bias=conv_bias, num_hidden_layers=1,
    )  # fmt: skip
    return MambaMixer(config, 0)


def ours(theirs: nn.Module, bias: bool, conv_bias: bool) -> Mamba:
    """Our layer with its weights."""
    weights = draw(theirs)
    normed = "dt_layernorm.weight" in weights
    mixer = Mamba(WIDTHS, "silu", bias, conv_bias, EPS if normed else None, torch.float32, CPU)
    sources = {
        "into.weight": "in_proj.weight", "into.bias": "in_proj.bias", "conv_weight": "conv1d.weight",
        "conv_bias": "conv1d.bias", "parts.weight": "x_proj.weight", "dt.weight": "dt_proj.weight",
        "dt_bias": "dt_proj.bias", "decay_log": "A_log", "skip": "D", "out.weight": "out_proj.weight",
        "out.bias": "out_proj.bias", "norms.0.weight": "dt_layernorm.weight", "norms.1.weight": "b_layernorm.weight",
        "norms.2.weight": "c_layernorm.weight",
    }  # fmt: skip
    names = dict(mixer.named_parameters())
    assert {sources[name] for name in names} == set(weights), "a place for every weight"
    for name, parameter in names.items():
        parameter.copy_(weights[sources[name]].detach())
    prepare_layers(mixer)
    return mixer


def run(mixer: Mamba, x: Tensor, other: Tensor, chunks: list[int], run_tokens: int = 4) -> tuple[Tensor, Tensor]:
    """What the layer makes of x, in steps of so many tokens, and of another sequence, which takes one in each step."""
    pages = -(-len(x) // run_tokens)
    conv, ssm = (torch.full((2 * pages + 1, 48, width), torch.nan) for width in (3, 5))
    cache = StateCache(conv, ssm, run_tokens=run_tokens)
    table = torch.zeros(3, pages, dtype=torch.int64)
    table[1:] = torch.arange(1, 2 * pages + 1).view(2, pages).flip(1)
    done, parts = 0, []
    for step, count in enumerate(chunks):
        lengths, starts = np.array([1, count]), np.array([step, done])
        positions = torch.tensor([step, *range(done, done + count)])
        batch = Batch(
            torch.zeros(count + 1, dtype=torch.int64), positions, torch.tensor([2, *[1] * count]),
            torch.tensor([0, count]), np.array([2, 1]), starts, lengths, np.array([0, 1]), np.arange(2), [table],
        )  # fmt: skip
        both = torch.cat((other[step : step + 1], x[done : done + count]))
        parts.append(mixer(both, cache, StatePlan.of(batch, cache)))
        done += count
    return torch.cat([part[1:] for part in parts]), torch.cat([part[:1] for part in parts])


@pytest.mark.parametrize(("bias", "conv_bias"), [(False, True), (True, False)])
@pytest.mark.parametrize("make", [jamba, mamba])
def test_mixer_equals_transformers(make: Any, bias: bool, conv_bias: bool) -> None:
    theirs = make(bias, conv_bias).eval()
    mixer = ours(theirs, bias, conv_bias)
    x, other = torch.randn(2, 13, 24, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, beside = theirs(torch.stack((x, other)))
        assert want.std() > 0.01
        for chunks in ([13], [1] * 13, [5, 8], [4, 1, 3, 5], [2, 10, 1]):
            for got, wanted in zip(run(mixer, x, other, chunks), (want, beside[: len(chunks)])):
                torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)


def test_mixer_refuses_other_activations() -> None:
    with pytest.raises(StartupError, match="'gelu' of a Mamba layer"):
        Mamba(WIDTHS, "gelu", False, True, None, torch.float32, CPU)


def sparse(theirs: nn.Module, normalised: bool, experts: int, top: int) -> SparseMLP:
    weights = draw(theirs)
    layer = SparseMLP(24, 40, experts, top, "silu", normalised, torch.float32, CPU)
    router = next(tensor for name, tensor in weights.items() if name.endswith(("router.weight", "gate.weight")))
    assert layer.router.weight is not None
    for target, source in (
        (layer.router.weight, router), (layer.gate_up, weights["experts.gate_up_proj"].flatten(0, 1)),
        (layer.down, weights["experts.down_proj"].flatten(0, 1)),
    ):  # fmt: skip
        target.copy_(source.detach())
    prepare_layers(layer)
    return layer


@pytest.mark.parametrize(("experts", "top"), [(4, 2), (7, 3), (2, 1)])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_mixture_equals_transformers(tokens: int, experts: int, top: int) -> None:
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_experts_per_tok": top}
    jambas = JambaSparseMoeBlock(transformers.JambaConfig(num_experts=experts, **sizes))
    mixtrals = MixtralSparseMoeBlock(transformers.MixtralConfig(num_local_experts=experts, **sizes))
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        for theirs, normalised in ((jambas, False), (mixtrals, True)):
            layer = sparse(theirs.eval(), normalised, experts, top)
            want = theirs(x[None])[0]
            torch.testing.assert_close(layer(x), want, atol=1e-5, rtol=1e-5)
            assert want.std() > 0.01


def test_one_token_reads_its_experts_alone() -> None:
    layer = SparseMLP(24, 40, 6, 2, "silu", False, torch.float32, CPU)
    draw(layer)
    x = torch.randn(1, 24, generator=torch.Generator().manual_seed(3))
    want, (_, chosen) = layer(x), layer.route(x)
    others = [expert for expert in range(6) if expert not in chosen[0]]
    layer.gate_up.view(6, 80, 24)[others] = torch.nan
    layer.down.view(6, 24, 40)[others] = torch.nan
    assert torch.equal(layer(x), want)
