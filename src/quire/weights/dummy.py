"""Random weights for a model without a checkpoint: what `--dummy-weights` measures with."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.layers.mamba import MambaMixer
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.sharding import ParameterShards
from quire.models.quantization import FP8Scheme, LowBitScheme
from quire.weights import low_bit
from quire.weights.fp8 import E4M3, E4M3_MAX, find_fp8_tensors, get_scale
from quire.weights.low_bit import choose_formats
from quire.weights.tensor_slices import parameter_shards, zero_padding

if TYPE_CHECKING:
    from quire.kernels.cpu.low_bit_linear import LowBitFormat
    from quire.models import Model

STD = 0.02
MIN_DT, MAX_DT = 1e-3, 0.1
"""Of an untrained Mamba's states, where the token says nothing (arXiv:2312.00752, §3.6)."""
PIECE_NUMBERS = 1 << 24  # numbers that are laid at once where a shard has some of their columns
NOISE_LENGTH = 4_194_301  # numbers drawn once and laid into every weight; a prime, so that no two rows line up


@torch.no_grad()
def fill_dummy_weights(model: Model, seed: int, scheme: FP8Scheme | LowBitScheme | None = None) -> None:
    """Normal weights of standard deviation 0.02; norms are the identity, and states decay as an untrained Mamba's. A
    function of seed, dtype and device; a shard has what the undivided model has in its place. What `scheme` has in FP8
    is drawn in FP8, all with one scale, or holds the same values in the model's dtype."""
    first = next(parameter for parameter in model.parameters() if not parameter.is_meta)
    generator = torch.Generator(first.device).manual_seed(seed)
    noise = torch.empty(NOISE_LENGTH, dtype=torch.float32, device=first.device).normal_(0, STD, generator=generator)
    scale = noise.abs().max() / E4M3_MAX
    numbers = (noise / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    products, noise = (numbers.float() * scale).to(first.dtype), noise.to(first.dtype)
    fp8 = find_fp8_tensors(model, scheme) if isinstance(scheme, FP8Scheme) else {}
    forms = choose_formats(model, scheme) if isinstance(scheme, LowBitScheme) else {}
    at, here = 0, dict(model.named_modules())
    zero_padding(model)
    for path, whole in getattr(model, "full_model", model).named_modules():
        for name, shape in whole.named_parameters(recurse=False):
            module = here.get(path)
            parameter = getattr(module, name, None)
            if parameter is None:  # another stage's
                at = (at + _num_noise_values(whole, name, shape)) % len(noise)
            elif isinstance(module, RMSNorm | LayerNorm):
                offset = isinstance(module, RMSNorm) and module.offset
                parameter.fill_(1.0 if name == "weight" and not offset else 0.0)
            elif isinstance(module, MambaMixer) and name in MAMBA_INIT:
                [cut] = module.param_shards[name].rows
                steady = MAMBA_INIT[name](parameter.new_empty(cut.total, *parameter.shape[1:]))
                parameter.copy_(steady[cut.local.start : cut.local.stop])
            elif f"{path}.{name}" in forms:
                at = _fill_low_bit(model, f"{path}.{name}", forms[f"{path}.{name}"], noise, at)
            else:
                source = products if all(fp8.get(f"{path}.{name}", (False,))) else noise
                if (scales := get_scale(model, f"{path}.{name}")) is not None:
                    scales.fill_(scale)
                    source = numbers
                cuts = parameter_shards(module, name)
                at = (
                    _fill_from(parameter.view(-1), source, at)
                    if cuts is None
                    else _fill_shard(parameter, cuts, source, at)
                )


def _num_noise_values(module: torch.nn.Module, name: str, parameter: Tensor) -> int:
    """Numbers that are laid for a parameter, of which a rank may have some."""
    if isinstance(module, RMSNorm | LayerNorm) or (isinstance(module, MambaMixer) and name in MAMBA_INIT):
        return 0
    cuts = parameter_shards(module, name)
    if cuts is None:
        return parameter.numel()
    width = math.prod(parameter.shape[1:]) if cuts.columns is None else cuts.columns.total
    return sum(cut.total for cut in cuts.rows) * width


def _fill_low_bit(model: Model, name: str, formats: tuple[LowBitFormat, ...], noise: Tensor, offset: int) -> int:
    """The same for a weight in few bits, or that holds the same values in the model's dtype."""
    parameter, layer = model.get_parameter(name), low_bit.low_bit_layers(model)[name]
    cuts = ParameterShards(layer.row_shards, layer.column_shard if layer.column_shard.is_sharded else None)
    numbers = torch.zeros(parameter.shape, dtype=noise.dtype, device=noise.device)
    offset = _fill_shard(numbers, cuts, noise, offset)
    parts = layer.output_sizes if len(formats) > 1 else (len(parameter),)
    for part, (rows, own) in enumerate(zip(parameter.data.split(parts), numbers.split(parts))):
        low_bit.set_rows(rows, layer, part, partial(low_bit.quantize, own, formats[part]))
    return offset


def _initial_A_log(like: Tensor) -> Tensor:
    """Of d_state numbers the n-th decays n times as fast as the first."""
    return torch.arange(1, like.shape[1] + 1, device=like.device).log().expand(like.shape)


def _initial_dt_bias(like: Tensor) -> Tensor:
    """What softplus makes steps of that are equally far apart on a scale of logarithms."""
    steps = torch.linspace(math.log(MIN_DT), math.log(MAX_DT), len(like), device=like.device).exp()
    return steps.expm1().log()


MAMBA_INIT: dict[str, Callable[[Tensor], Tensor]] = {
    "A_log": _initial_A_log,
    "D": torch.ones_like,
    "dt_bias": _initial_dt_bias,
}
"""What isn't noise of a mixer's parameters."""


def _fill_from(flat: Tensor, noise: Tensor, offset: int) -> int:
    """Fill `flat` with the endless repetition of `noise` from `offset` on; where to go on."""
    filled = 0
    while filled < len(flat):
        piece = noise[offset : offset + len(flat) - filled]
        flat[filled : filled + len(piece)] = piece
        filled, offset = filled + len(piece), (offset + len(piece)) % len(noise)
    return offset


def _fill_shard(parameter: Tensor, shards: ParameterShards, noise: Tensor, offset: int) -> int:
    """The same for what a rank has of a parameter: the numbers that are at these rows and columns of the whole one."""
    columns, filled = shards.columns, 0
    width = math.prod(parameter.shape[1:]) if columns is None else columns.total
    for cut in shards.rows:
        rows, start = parameter[filled : filled + len(cut.local)], (offset + cut.local.start * width) % len(noise)
        if columns is None:
            _fill_from(rows.view(-1), noise, start)
        else:
            for some in rows.split(max(PIECE_NUMBERS // width, 1)):
                numbers = torch.empty((len(some), width), dtype=noise.dtype, device=noise.device)
                start = _fill_from(numbers.view(-1), noise, start)
                some.copy_(numbers[:, columns.local.start : columns.local.stop])
        filled, offset = filled + cut.padded, (offset + cut.total * width) % len(noise)
    return offset
