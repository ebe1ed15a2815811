"""Weights in FP8 (e4m3): which layers have them and where, numbers rounded to them, and the scales of a checkpoint.

On a GPU that multiplies FP8 they stay as they are; elsewhere weights in the model's dtype hold the same values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quire.data.models import resolve
from quire.data.models.quantization import BLOCK, FP8
from quire.vocabulary.layout import WHOLE, Part

if TYPE_CHECKING:
    from quire.data.models import Model

E4M3 = torch.float8_e4m3fn
Most = Callable[[Tensor], Tensor]
"""[N] -> the largest of all ranks' numbers, each in its place. All ranks ask in the same order."""
LARGEST = 448.0
LEAST = 1e-12  # of a row's largest value: a row of zeros has a scale too
STAY = re.compile(r"(^|\.)(head|router|vision|tower|projector|eyes|mamba\.(parts|dt)|mixer\.(parts|dt))(\.|$)")
"""Modules that stay in the model's dtype, also where a checkpoint has them in FP8. A Mamba's two small products make
the steps by which its states decay, so that what is rounded in them adds up."""


def native(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a model in `dtype` on `device` computes with weights in FP8: from compute capability 8.9 (Ada) on."""
    if device.type != "cuda" or torch.version.hip is not None or dtype not in (torch.bfloat16, torch.float16):
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def covered(model: Model, scheme: FP8) -> dict[str, tuple[bool, ...]]:
    """Of each parameter that may be in FP8, which of the checkpoint's tensors in it are, or are to be rounded to it:
    those that `STAY` may be in FP8 only in the checkpoint."""
    found = {}
    for name, source in model.names().items():
        path, _, kind = name.rpartition(".")
        if kind in places(model.get_submodule(path)):
            modules = [tensor.removesuffix(".weight") for tensor in source.tensors]
            may = scheme.stored or STAY.search(path) is None
            found[name] = tuple(may and scheme.covers(module, model.prefixes) for module in modules)
    return found


def places(module: nn.Module) -> dict[str, str]:
    """The parameters of a layer that may be in FP8, and its attributes for their scales; empty for most layers."""
    found: dict[str, str] = getattr(module, "FP8", {})
    return found


def scale_of(model: nn.Module, name: str) -> Tensor | None:
    """The scales [G, N] of the parameter of that name; None for one that isn't in FP8."""
    path, _, kind = name.rpartition(".")
    module = model.get_submodule(path)
    found: Tensor | None = getattr(module, places(module)[kind]) if kind in places(module) else None
    return found


def weights(model: Model, scheme: FP8) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """The parameters that are in FP8 as a whole, each with its layer and its name there. Where a checkpoint has a part
    of a stacked weight in FP8 only, the whole is in the model's dtype."""
    for name, parts in covered(model, scheme).items():
        path, _, kind = name.rpartition(".")
        if all(parts) and STAY.search(path) is None:
            weight = model.get_parameter(name)
            if weight.shape[1] % 16 == 0:  # what the kernels take
                yield model.get_submodule(path), kind, weight


def made(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: FP8 | None, part: Part = WHOLE
) -> Model:
    """The model of a config.json, or a shard of it, its weights uninitialised. With a `scheme`, where that is `native`,
    its layers are in FP8 at once: in `dtype` they might not fit."""
    if scheme is None or not native(dtype, device):
        return resolve(config)(config, dtype, device, part)
    return in_fp8(config, dtype, device, scheme, part)


def in_fp8(config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: FP8, part: Part = WHOLE) -> Model:
    """The same wherever `device` is."""
    model = resolve(config)(config, dtype, torch.device("meta"), part)
    for layer, name, weight in list(weights(model, scheme)):
        numbers = torch.empty(weight.shape, dtype=E4M3, device=device)
        setattr(layer, name, nn.Parameter(numbers, requires_grad=False))
        scale = torch.empty(scheme.groups(weight.shape[1]), len(weight), dtype=torch.float32, device=device)
        setattr(layer, places(layer)[name], scale)
    moved: dict[Tensor, nn.Parameter] = {}  # a tied weight is one parameter of two modules
    for module in list(model.modules()):
        for name, old in list(module.named_parameters(recurse=False)):
            if old.is_meta and old not in moved:
                moved[old] = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device), requires_grad=False)
            if old.is_meta:
                setattr(module, name, moved[old])
    assert not any(buffer.is_meta for buffer in model.buffers()), "a buffer lost its values"
    return model


def saved_bytes(config: dict[str, Any], scheme: FP8, itemsize: int, part: Part = WHOLE) -> int:
    """Bytes that a part's weights of a config.json's model take less in FP8, with their scales, than `itemsize`
    each."""
    model = resolve(config)(config, torch.float32, torch.device("meta"), part)
    saved = 0
    for _, _, weight in weights(model, scheme):
        rows, depth = weight.shape
        saved += rows * depth * (itemsize - 1) - rows * scheme.groups(depth) * 4
    return saved


def rounded(weight: Tensor, most: Most | None = None) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> numbers [N, K] in e4m3 and scales [N]: a row's largest value is 448 times its scale. Where these
    are some columns of rows that ranks share out `most` says what is largest in all of a row."""
    largest = weight.abs().amax(1).float()
    scale = (largest if most is None else most(largest)).clamp_min(LEAST) / LARGEST
    return (weight.float() / scale[:, None]).clamp(-LARGEST, LARGEST).to(E4M3), scale


def scaled(numbers: Tensor, scale: Tensor) -> Tensor:
    """numbers [N, K], scale [G, N] -> what the two stand for, in fp32 [N, K]."""
    if len(scale) == 1:
        return numbers.float() * scale.t()
    return numbers.float() * scale.t().repeat_interleave(BLOCK, 1)[:, : numbers.shape[1]]


def by_rows(scale: Tensor, rows: int, depth: int, blocks: bool) -> Tensor | None:
    """A checkpoint's scales of a weight [rows, depth], one for the whole, a row or a block each, as fp32 [G, rows];
    None if their shape doesn't fit."""
    found, shape = scale.float(), tuple(scale.shape)
    if blocks:
        fits = shape == (-(-rows // BLOCK), -(-depth // BLOCK))
        return found.repeat_interleave(BLOCK, 0)[:rows].t() if fits else None
    if shape in ((), (1,), (1, 1)):
        return found.view(1, 1).expand(1, rows)
    return found.view(1, rows) if shape in ((rows,), (rows, 1)) else None
