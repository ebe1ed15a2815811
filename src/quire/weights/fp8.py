"""Weights in FP8 (e4m3): which layers have them and where, numbers rounded to them, and the scales of a checkpoint.

On a GPU that multiplies FP8 they stay as they are; elsewhere weights in the model's dtype hold the same values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.models import resolve_model_class
from quire.models.quantization import BLOCK, FP8Scheme
from quire.protocol.parallel_layout import UNSHARDED, Shard

if TYPE_CHECKING:
    from quire.models import Model

E4M3 = torch.float8_e4m3fn
MaxReduce = Callable[[Tensor], Tensor]
"""[N] -> the largest of all ranks' numbers, each in its place. All ranks ask in the same order."""
E4M3_MAX = 448.0
MIN_ROW_MAX = 1e-12  # of a row's largest value: a row of zeros has a scale too
UNQUANTIZED_MODULES = re.compile(
    r"(^|\.)(head|router|vision|tower|projector|vision_encoder|(mamba|mixer)\.(x_proj|dt_proj))(\.|$)"
)
"""Modules that stay in the model's dtype, also where a checkpoint has them in FP8. A Mamba's two small products make
the steps by which its states decay, so that what is rounded in them adds up."""


def has_fp8_matmul(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model in `dtype` on `device` computes with weights in FP8: from compute capability 8.9 (Ada) on."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def find_fp8_tensors(model: Model, scheme: FP8Scheme) -> dict[str, tuple[bool, ...]]:
    """Of each parameter that may be in FP8, which of the checkpoint's tensors in it are, or are to be rounded to it:
    those that `UNQUANTIZED_MODULES` may be in FP8 only in the checkpoint."""
    found = {}
    for name, source in model.weight_sources().items():
        path, _, kind = name.rpartition(".")
        if kind in scale_attributes(model.get_submodule(path)):
            modules = [tensor.removesuffix(".weight") for tensor in source.tensors]
            may = scheme.stored or UNQUANTIZED_MODULES.search(path) is None
            found[name] = tuple(may and scheme.covers(module, model.weight_prefixes) for module in modules)
    return found


def scale_attributes(module: nn.Module) -> dict[str, str]:
    """The parameters of a layer that may be in FP8, and its attributes for their scales; empty for most layers."""
    found: dict[str, str] = getattr(module, "FP8", {})
    return found


def get_scale(model: nn.Module, name: str) -> Tensor | None:
    """The scales [G, N] of the parameter of that name; None for one that isn't in FP8."""
    path, _, kind = name.rpartition(".")
    module = model.get_submodule(path)
    found: Tensor | None = getattr(module, scale_attributes(module)[kind]) if kind in scale_attributes(module) else None
    return found


def fp8_weights(model: Model, scheme: FP8Scheme) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters that are in FP8 as a whole, each with its layer and its name there. Where a checkpoint has a part
    of a stacked weight in FP8 only, the whole is in the model's dtype."""
    for name, parts in find_fp8_tensors(model, scheme).items():
        path, _, kind = name.rpartition(".")
        if all(parts) and UNQUANTIZED_MODULES.search(path) is None:
            weight = model.get_parameter(name)
            if weight.shape[1] % 16 == 0:  # what the kernels take
                yield model.get_submodule(path), kind, weight


def create_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: FP8Scheme | None, shard: Shard = UNSHARDED
) -> Model:
    """The model of a config.json, or a shard of it, its weights uninitialised. With a `scheme`, where that is
    `has_fp8_matmul`, its layers are in FP8 at once: in `dtype` they might not fit."""
    if scheme is None or not has_fp8_matmul(dtype, device):
        return resolve_model_class(config)(config, dtype, device, shard)
    return create_fp8_model(config, dtype, device, scheme, shard)


def create_fp8_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: FP8Scheme, shard: Shard = UNSHARDED
) -> Model:
    """The same wherever `device` is."""
    model = resolve_model_class(config)(config, dtype, torch.device("meta"), shard)
    for layer, name, weight in list(fp8_weights(model, scheme)):
        numbers = torch.empty(weight.shape, dtype=E4M3, device=device)
        setattr(layer, name, nn.Parameter(numbers, requires_grad=False))
        scale = torch.empty(scheme.scales_per_row(weight.shape[1]), len(weight), dtype=torch.float32, device=device)
        setattr(layer, scale_attributes(layer)[name], scale)
    moved: dict[Tensor, nn.Parameter] = {}  # a tied weight is one parameter of two modules
    for module in list(model.modules()):
        for name, old in list(module.named_parameters(recurse=False)):
            if old.is_meta and old not in moved:
                moved[old] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), requires_grad=False)
            if old.is_meta:
                setattr(module, name, moved[old])
    assert not any(buffer.is_meta for buffer in model.buffers()), "a buffer lost its values"
    return model


def saved_bytes(config: dict[str, Any], scheme: FP8Scheme, itemsize: int, shard: Shard = UNSHARDED) -> int:
    """Bytes that a part's weights of a config.json's model take less in FP8, with their scales, than `itemsize`
    each."""
    model = resolve_model_class(config)(config, torch.float32, torch.device("meta"), shard)
    saved = 0
    for _, _, weight in fp8_weights(model, scheme):
        rows, depth = weight.shape
        saved += rows * depth * (itemsize - 1) - rows * scheme.scales_per_row(depth) * 4
    return saved


def quantize(weight: Tensor, max_reduce: MaxReduce | None = None) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> numbers [N, K] in e4m3 and scales [N]: a row's largest value is 448 times its scale. Where these
    are some columns of rows that ranks share out `max_reduce` says what is largest in all of a row."""
    largest = weight.abs().amax(1).float()
    scale = (largest if max_reduce is None else max_reduce(largest)).clamp_min(MIN_ROW_MAX) / E4M3_MAX
    return (weight.float() / scale[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def dequantize(numbers: Tensor, scale: Tensor) -> Tensor:
    """numbers [N, K], scale [G, N] -> what the two stand for, in fp32 [N, K]."""
    if len(scale) == 1:
        return numbers.float() * scale.t()
    return numbers.float() * scale.t().repeat_interleave(BLOCK, 1)[:, : numbers.shape[1]]


def expand_scales(scale: Tensor, rows: int, columns: int, in_blocks: bool) -> Tensor | None:
    """A checkpoint's scales of a weight [rows, depth], one for the whole, a row or a block each, as fp32 [G, rows];
    None if their shape doesn't fit."""
    found, shape = scale.float(), tuple(scale.shape)
    if in_blocks:
        fits = shape == (-(-rows // BLOCK), -(-columns // BLOCK))
        return found.repeat_interleave(BLOCK, 0)[:rows].t() if fits else None
    if shape in ((), (1,), (1, 1)):
        return found.view(1, 1).expand(1, rows)
    return found.view(1, rows) if shape in ((rows,), (rows, 1)) else None
