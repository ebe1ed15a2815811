"""Random weights for a model without a checkpoint: what `--dummy-weights` measures with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.data.layers.cut import Cuts
from quire.data.layers.mamba import Mamba
from quire.data.layers.norm import LayerNorm, RMSNorm
from quire.data.models.quantization import FP8, Few
from quire.data.weights import few
from quire.data.weights.few import forms_of
from quire.data.weights.fp8 import E4M3, LARGEST, covered, scale_of
from quire.data.weights.slices import blank, cuts_of

if TYPE_CHECKING:
    from quire.data.kernels.cpu.quantised import Form
    from quire.data.models import Model

STD = 0.02
LEAST_STEP, MOST_STEP = 1e-3, 0.1
"""Of an untrained Mamba's states, where the token says nothing (arXiv:2312.00752, §3.6)."""
BLOCK = 1 << 24  # numbers that are laid at once where a shard has some of their columns
NOISE = 4_194_301  # numbers drawn once and laid into every weight; a prime, so that no two rows line up


@torch.no_grad()
def fill_dummy(model: Model, seed: int, scheme: FP8 | Few | None = None) -> None:
    """Normal weights of standard deviation 0.02; norms are the identity, and states decay as an untrained Mamba's. A
    function of seed, dtype and device; a shard has what the undivided model has in its place. What `scheme` has in FP8
    is drawn in FP8, all with one scale, or holds the same values in the model's dtype."""
    first = next(parameter for parameter in model.parameters() if not parameter.is_meta)
    generator = torch.Generator(first.device).manual_seed(seed)
    noise = torch.empty(NOISE, dtype=torch.float32, device=first.device).normal_(0, STD, generator=generator)
    scale = noise.abs().max() / LARGEST
    numbers = (noise / scale).clamp(-LARGEST, LARGEST).to(E4M3)
    products, noise = (numbers.float() * scale).to(first.dtype), noise.to(first.dtype)
    fp8 = covered(model, scheme) if isinstance(scheme, FP8) else {}
    forms = forms_of(model, scheme) if isinstance(scheme, Few) else {}
    at, here = 0, dict(model.named_modules())
    blank(model)
    for path, whole in getattr(model, "undivided", model).named_modules():
        for name, shape in whole.named_parameters(recurse=False):
            module = here.get(path)
            parameter = getattr(module, name, None)
            if parameter is None:  # another stage's
                at = (at + _laid(whole, name, shape)) % len(noise)
            elif isinstance(module, RMSNorm | LayerNorm):
                offset = isinstance(module, RMSNorm) and module.offset
                parameter.fill_(1.0 if name == "weight" and not offset else 0.0)
            elif isinstance(module, Mamba) and name in STEADY:
                [cut] = module.cuts[name].rows
                steady = STEADY[name](parameter.new_empty(cut.whole, *parameter.shape[1:]))
                parameter.copy_(steady[cut.own.start : cut.own.stop])
            elif f"{path}.{name}" in forms:
                at = _round(model, f"{path}.{name}", forms[f"{path}.{name}"], noise, at)
            else:
                source = products if all(fp8.get(f"{path}.{name}", (False,))) else noise
                if (scales := scale_of(model, f"{path}.{name}")) is not None:
                    scales.fill_(scale)
                    source = numbers
                cuts = cuts_of(module, name)
                at = _lay(parameter.view(-1), source, at) if cuts is None else _lay_some(parameter, cuts, source, at)


def _laid(module: torch.nn.Module, name: str, parameter: Tensor) -> int:
    """Numbers that are laid for a parameter, of which a rank may have some."""
    if isinstance(module, RMSNorm | LayerNorm) or (isinstance(module, Mamba) and name in STEADY):
        return 0
    cuts = cuts_of(module, name)
    if cuts is None:
        return parameter.numel()
    width = math.prod(parameter.shape[1:]) if cuts.columns is None else cuts.columns.whole
    return sum(cut.whole for cut in cuts.rows) * width


def _round(model: Model, name: str, forms: tuple[Form, ...], noise: Tensor, at: int) -> int:
    """The same for a weight in few bits, or that holds the same values in the model's dtype."""
    parameter, layer = model.get_parameter(name), few.layers_of(model)[name]
    cuts = Cuts(layer.rows, layer.columns if layer.columns.divided else None)
    numbers = torch.zeros(parameter.shape, dtype=noise.dtype, device=noise.device)
    at = _lay_some(numbers, cuts, noise, at)
    parts = layer.parts if len(forms) > 1 else (len(parameter),)
    for part, (rows, own) in enumerate(zip(parameter.data.split(parts), numbers.split(parts))):
        few.put(rows, layer, part, partial(few.rounded, own, forms[part]))
    return at


def _decays(like: Tensor) -> Tensor:
    """Of d_state numbers the n-th decays n times as fast as the first."""
    return torch.arange(1, like.shape[1] + 1, device=like.device).log().expand(like.shape)


def _steps(like: Tensor) -> Tensor:
    """What softplus makes steps of that are equally far apart on a scale of logarithms."""
    steps = torch.linspace(math.log(LEAST_STEP), math.log(MOST_STEP), len(like), device=like.device).exp()
    return steps.expm1().log()


STEADY: dict[str, Callable[[Tensor], Tensor]] = {"decay_log": _decays, "skip": torch.ones_like, "dt_bias": _steps}
"""What isn't noise of a mixer's parameters."""


def _lay(flat: Tensor, noise: Tensor, at: int) -> int:
    """Fill `flat` with the endless repetition of `noise` from `at` on; where to go on."""
    filled = 0
    while filled < len(flat):
        piece = noise[at : at + len(flat) - filled]
        flat[filled : filled + len(piece)] = piece
        filled, at = filled + len(piece), (at + len(piece)) % len(noise)
    return at


def _lay_some(parameter: Tensor, cuts: Cuts, noise: Tensor, at: int) -> int:
    """The same for what a rank has of a parameter: the numbers that are at these rows and columns of the whole one."""
    columns, filled = cuts.columns, 0
    width = math.prod(parameter.shape[1:]) if columns is None else columns.whole
    for cut in cuts.rows:
        rows, start = parameter[filled : filled + len(cut.own)], (at + cut.own.start * width) % len(noise)
        if columns is None:
            _lay(rows.view(-1), noise, start)
        else:
            for some in rows.split(max(BLOCK // width, 1)):
                numbers = torch.empty((len(some), width), dtype=noise.dtype, device=noise.device)
                start = _lay(numbers.view(-1), noise, start)
                some.copy_(numbers[:, columns.own.start : columns.own.stop])
        filled, at = filled + cut.room, (at + cut.whole * width) % len(noise)
    return at
