"""A mixture of experts equals those of transformers, whose weights it is given. Mixers: see test_state_logits.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.jamba.modeling_jamba import JambaSparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from quire.data.layers.mamba import Mamba, Widths
from quire.data.layers.moe import SparseMLP
from quire.data.layers.prepare import prepare_layers
from quire.errors import StartupError

CPU = torch.device("cpu")
WIDTHS = Widths(hidden=24, d_inner=48, dt_rank=6, d_state=5, d_conv=4)


def draw(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Every parameter of it, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return dict(module.named_parameters())


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
