"""Random weights for measurements without a checkpoint (`--dummy-weights`)."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quire.layers.moe import SparseMLP
from quire.layers.norm import LayerNorm, RMSNorm
from quire.layers.sharding import ParameterShards
from quire.layers.state_mixer import StateMixer
from quire.models.quantization import FP8Scheme, LowBitScheme
from quire.models.vision.gemma4 import ClippedLinear
from quire.weights import low_bit
from quire.weights.awq_gptq import quantize_groups
from quire.weights.fp8 import E4M3, E4M3_MAX, find_fp8_tensors, get_scale
from quire.weights.low_bit import choose_formats
from quire.weights.tensor_slices import parameter_shards, zero_padding

if TYPE_CHECKING:
    from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight
    from quire.models import Model

STD = 0.02
PIECE_NUMBERS = 1 << 24  # numbers made at once if a shard has some of their columns
NOISE_LENGTH = 4_194_301  # numbers drawn once and repeated in every weight; a prime, so that no two rows are equal


@torch.no_grad()
def fill_dummy_weights(
    model: Model,
    seed: int,
    scheme: FP8Scheme | LowBitScheme | None = None,
    full_model: Model | None = None,
) -> None:
    """Fill a model with normal weights of standard deviation 0.02; norms are the identity, bounds of products are
    infinite, and states decay as in an untrained model. Weights depend on seed, dtype and device alone: a shard has
    slices of the undivided model's. Weights that `scheme` has in FP8 are in FP8, all with one scale, or have the same
    values in the model's dtype. `full_model`: see `load_weights`."""
    first = next(parameter for parameter in model.parameters() if not parameter.is_meta)
    generator = torch.Generator(first.device).manual_seed(seed)
    noise = torch.empty(NOISE_LENGTH, dtype=torch.float32, device=first.device).normal_(0, STD, generator=generator)
    scale = noise.abs().max() / E4M3_MAX
    numbers = (noise / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)
    products, noise = (numbers.float() * scale).to(first.dtype), noise.to(first.dtype)
    fp8 = find_fp8_tensors(model, scheme) if isinstance(scheme, FP8Scheme) else {}
    formats = choose_formats(model, scheme) if isinstance(scheme, LowBitScheme) else {}
    sources = model.weight_sources() if formats else {}
    at, modules = 0, dict(model.named_modules())
    zero_padding(model)
    for path, full_module in (model if full_model is None else full_model).named_modules():
        for name, full_parameter in full_module.named_parameters(recurse=False):
            module = modules.get(path)
            parameter = getattr(module, name, None)
            if module is None or parameter is None:  # it belongs to another stage
                at = (at + _num_noise_values(full_module, name, full_parameter)) % len(noise)
            elif isinstance(module, RMSNorm | LayerNorm):
                has_offset = isinstance(module, RMSNorm) and module.offset
                parameter.fill_(1.0 if name in ("weight", "sum_scale") and not has_offset else 0.0)
            elif isinstance(module, SparseMLP) and name == "expert_scale":
                parameter.fill_(1.0)
            elif isinstance(module, ClippedLinear):
                parameter.copy_(parameter.new_tensor((-math.inf, math.inf) * 2))
            elif isinstance(module, StateMixer) and name in module.initial_values:
                [channels] = module.param_shards[name].rows
                initial = module.initial_values[name](parameter.new_empty(channels.total, *parameter.shape[1:]))
                parameter.copy_(initial[channels.local.start : channels.local.stop])
            elif f"{path}.{name}" in formats:
                assert isinstance(scheme, LowBitScheme), "formats are a scheme's"
                kinds, sizes = formats[f"{path}.{name}"], sources[f"{path}.{name}"].rows
                _fill_low_bit(model, f"{path}.{name}", kinds, sizes, scheme, noise, at)
                at = (at + _num_noise_values(full_module, name, full_parameter)) % len(noise)
            else:
                source = products if all(fp8.get(f"{path}.{name}", (False,))) else noise
                if (scales := get_scale(model, f"{path}.{name}")) is not None:
                    scales.fill_(scale)
                    source = numbers
                shards = parameter_shards(module, name)
                if shards is None:
                    at = _fill_from(parameter.view(-1), source, at)
                else:
                    at = _fill_shard(parameter, shards, source, at)


def _num_noise_values(module: torch.nn.Module, name: str, parameter: Tensor) -> int:
    """Return the number of noise values that a parameter takes, on all ranks together."""
    if isinstance(module, RMSNorm | LayerNorm) or (isinstance(module, StateMixer) and name in module.initial_values):
        return 0
    if (isinstance(module, SparseMLP) and name == "expert_scale") or isinstance(module, ClippedLinear):
        return 0
    shards = parameter_shards(module, name)
    if shards is None:
        return parameter.numel()
    width = math.prod(parameter.shape[1:]) if shards.columns is None else shards.columns.total
    return sum(rows.total for rows in shards.rows) * width


def _fill_low_bit(
    model: Model, name: str, formats: tuple[LowBitFormat, ...], sizes: tuple[int, ...], scheme: LowBitScheme,
    noise: Tensor, offset: int,
) -> None:  # fmt: skip
    """Fill a low-bit weight, or one with the same values in the model's dtype, as `_fill_shard` does. Its parts have
    these `formats` and these `sizes` in rows. If it stays in few bits, its numbers are made only when its layer is
    prepared, so that no two layers' are in memory at once."""
    parameter, layer = model.get_parameter(name), low_bit.low_bit_layers(model)[name]
    shards = ParameterShards(layer.row_shards, layer.column_shard if layer.column_shard.is_sharded else None)

    @cache
    def split_values() -> tuple[Tensor, ...]:
        numbers = torch.zeros(parameter.shape, dtype=noise.dtype, device=noise.device)
        _fill_shard(numbers, shards, noise, offset)
        return torch.split(numbers, list(sizes))

    def make_part(part: int) -> LowBitWeight:
        if scheme.stored in ("awq", "gptq"):
            return quantize_groups(split_values()[part], scheme)
        return low_bit.quantize(split_values()[part], formats[part])

    for part, rows in enumerate(torch.split(parameter.data, list(sizes))):
        if len(rows):  # else an expert of another rank
            low_bit.set_rows(rows, layer, part, partial(make_part, part))


def _fill_from(flat: Tensor, noise: Tensor, offset: int) -> int:
    """Fill `flat` with `noise`, repeated endlessly, from `offset` on. Return the next offset."""
    filled = 0
    while filled < len(flat):
        piece = noise[offset : offset + len(flat) - filled]
        flat[filled : filled + len(piece)] = piece
        filled, offset = filled + len(piece), (offset + len(piece)) % len(noise)
    return offset


def _fill_shard(parameter: Tensor, shards: ParameterShards, noise: Tensor, offset: int) -> int:
    """Fill a rank's part of a parameter with the numbers that the whole one has at these rows and columns. Return the
    offset after the whole parameter."""
    columns, filled = shards.columns, 0
    width = math.prod(parameter.shape[1:]) if columns is None else columns.total
    for part in shards.rows:
        rows, start = parameter[filled : filled + len(part.local)], (offset + part.local.start * width) % len(noise)
        if columns is None:
            _fill_from(rows.view(-1), noise, start)
        else:
            for piece in torch.split(rows, max(PIECE_NUMBERS // width, 1)):
                numbers = torch.empty((len(piece), width), dtype=noise.dtype, device=noise.device)
                start = _fill_from(numbers.view(-1), noise, start)
                piece.copy_(numbers[:, columns.local.start : columns.local.stop])
        filled, offset = filled + part.padded, (offset + part.total * width) % len(noise)
    return offset
