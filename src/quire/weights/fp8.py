"""Weights in FP8 (e4m3): the choice of layers, quantization, and the scales of a checkpoint.

On a GPU that multiplies FP8 the weights stay in FP8; elsewhere they are stored in the model's dtype, with equal values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.models import resolve_model_class
from quire.models.quantization import BLOCK, FP8Scheme, covers
from quire.protocol.parallel_layout import UNSHARDED, Shard

if TYPE_CHECKING:
    from quire.models import Model

E4M3 = torch.float8_e4m3fn
MaxReduce = Callable[[Tensor], Tensor]
"""[N] -> the element-wise maximum over all ranks. All ranks call it in the same order."""
E4M3_MAX = 448.0
MIN_ROW_MAX = 1e-12  # lower bound of a row's largest value, so that a row of zeros has a scale above 0
UNQUANTIZED_MODULES = re.compile(
    r"(^|\.)(head|router|shared_gate|vision|tower|projector|vision_encoder|(mamba|mixer)\.(x_proj|dt_proj|ba_proj))(\.|$)"
)
"""Modules that stay in the model's dtype, even if a checkpoint has them in FP8. A mixer's small products make the
step sizes by which its states decay, so their rounding errors accumulate."""


def has_fp8_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if a model in `dtype` on `device` computes with FP8 weights: from compute capability 8.9 (Ada) on."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def find_fp8_tensors(model: Model, scheme: FP8Scheme) -> dict[str, tuple[bool, ...]]:
    """Return, for each parameter that may be in FP8, whether each of its tensors in the checkpoint is in FP8 or is to
    be rounded to it. `UNQUANTIZED_MODULES` are not rounded, but a checkpoint may have them in FP8."""
    is_fp8 = {}
    for name, source in model.weight_sources().items():
        path, _, kind = name.rpartition(".")
        if kind in scale_attributes(model.get_submodule(path)):
            modules = [tensor.removesuffix(".weight") for tensor in source.tensors]
            may = scheme.stored or UNQUANTIZED_MODULES.search(path) is None
            is_fp8[name] = tuple(may and covers(scheme, module, model.weight_prefixes) for module in modules)
    return is_fp8


def scale_attributes(module: nn.Module) -> dict[str, str]:
    """Return a layer's parameters that may be in FP8 -> the attributes of their scales; empty for most layers."""
    attributes: dict[str, str] = getattr(module, "FP8", {})
    return attributes


def get_scale(model: nn.Module, name: str) -> Tensor | None:
    """Return the scales [G, N] of the parameter `name`; None if it isn't in FP8."""
    path, _, kind = name.rpartition(".")
    module = model.get_submodule(path)
    attributes = scale_attributes(module)
    scale: Tensor | None = getattr(module, attributes[kind]) if kind in attributes else None
    return scale


def fp8_weights(model: Model, scheme: FP8Scheme) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield the parameters that are in FP8, as (layer, name in the layer, parameter). A stacked weight of which a
    checkpoint has only a part in FP8 is in the model's dtype."""
    for name, parts in find_fp8_tensors(model, scheme).items():
        path, _, kind = name.rpartition(".")
        if all(parts) and UNQUANTIZED_MODULES.search(path) is None:
            weight = model.get_parameter(name)
            if weight.shape[1] % 16 == 0:  # required by the kernels
                yield model.get_submodule(path), kind, weight


def create_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: FP8Scheme | None, shard: Shard = UNSHARDED
) -> Model:
    """Return the model of a config.json, or a shard of it, with uninitialised weights. With a `scheme` on a device with
    `has_fp8_matmul`, layers are allocated in FP8: in `dtype` they might not fit."""
    if scheme is None or not has_fp8_matmul(dtype, device):
        return resolve_model_class(config)(config, dtype, device, shard)
    return create_fp8_model(config, dtype, device, scheme, shard)


def create_fp8_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: FP8Scheme, shard: Shard = UNSHARDED
) -> Model:
    """As `create_model` with a scheme, on any device."""
    model = resolve_model_class(config)(config, dtype, torch.device("meta"), shard)
    for layer, name, weight in list(fp8_weights(model, scheme)):
        numbers = torch.empty(weight.shape, dtype=E4M3, device=device)
        setattr(layer, name, nn.Parameter(numbers, requires_grad=False))
        scale = torch.empty(scheme.scales_per_row(weight.shape[1]), len(weight), dtype=torch.float32, device=device)
        setattr(layer, scale_attributes(layer)[name], scale)
    allocate_parameters(model, device)
    assert not any(buffer.is_meta for buffer in model.buffers()), "a buffer lost its values"
    return model


def allocate_parameters(model: nn.Module, device: torch.device, keep: Collection[Tensor] = ()) -> None:
    """Replace the meta parameters of a model, other than those of `keep`, by uninitialised ones on `device`. Layers
    that keep a device, by which they choose kernels and make constant weights, get it too."""
    moved: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight is one parameter of two modules
    for module in list(model.modules()):
        if getattr(module, "device", None) == torch.device("meta"):
            module.device = device  # type: ignore[assignment]  # of no declared type
        for name, old in list(module.named_parameters(recurse=False)):
            if old.is_meta and old not in keep:
                if old not in moved:
                    new = torch.empty(old.shape, dtype=old.dtype, device=device)  # empty_like would import SymPy
                    moved[old] = nn.Parameter(new, requires_grad=False)
                setattr(module, name, moved[old])


def saved_bytes(config: dict[str, Any], scheme: FP8Scheme, itemsize: int, shard: Shard = UNSHARDED) -> int:
    """Return the bytes that a shard's weights save in FP8, scales included, compared with `itemsize` bytes each."""
    model = resolve_model_class(config)(config, torch.float32, torch.device("meta"), shard)
    saved = 0
    for _, _, weight in fp8_weights(model, scheme):
        rows, depth = weight.shape
        saved += rows * depth * (itemsize - 1) - rows * scheme.scales_per_row(depth) * 4
    return saved


def quantize(weight: Tensor, max_reduce: MaxReduce | None = None) -> tuple[Tensor, Tensor]:
    """Round weight [N, K] to FP8: return numbers [N, K] in e4m3 and scales [N]. A row's largest value is 448 times its
    scale. If ranks have some columns each, `max_reduce` gives the largest value of the whole row."""
    largest = weight.abs().amax(1).float()
    scale = (largest if max_reduce is None else max_reduce(largest)).clamp_min(MIN_ROW_MAX) / E4M3_MAX
    return (weight.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def dequantize(numbers: Tensor, scale: Tensor) -> Tensor:
    """Return the values of numbers [N, K] with scale [G, N], in fp32 [N, K]."""
    if len(scale) == 1:
        return numbers.float() * scale.t()
    return numbers.float() * scale.t().repeat_interleave(BLOCK, 1)[:, : numbers.shape[1]]


def expand_scales(scale: Tensor, rows: int, columns: int, in_blocks: bool) -> Tensor | None:
    """Return a checkpoint's scales of a weight [rows, columns], one per tensor, row or block, as fp32 [G, rows]; None
    if their shape doesn't fit."""
    floats, shape = scale.float(), tuple(scale.shape)
    if in_blocks:
        fits = shape == (-(-rows // BLOCK), -(-columns // BLOCK))
        return floats.repeat_interleave(BLOCK, 0)[:rows].t() if fits else None
    if shape in ((), (1,), (1, 1)):
        return floats.view(1, 1).expand(1, rows)
    return floats.view(1, rows) if shape in ((rows,), (rows, 1)) else None
