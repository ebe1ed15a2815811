"""Low-bit weights: the choice of layers and formats, group-wise quantization, and the conversion of GGUF's blocks.

On a GPU, and on a CPU with quire's kernels, the weights stay in few bits; elsewhere they are stored in the model's
dtype, with equal values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from quire.errors import StartupError
from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight, supports
from quire.layers.linear import Linear
from quire.layers.moe import ExpertWeights
from quire.models import resolve_model_class
from quire.models.quantization import MXFP4, LowBitScheme, covers
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.weights.fp8 import allocate_parameters
from quire.weights.gguf_blocks import BLOCK_FORMATS, GGUFTensor, mxfp4_scales
from quire.weights.gguf_config import open_hf_tensors

if TYPE_CHECKING:
    from quire.models import Model
    from quire.weights.gguf_file import GGUFFile

INT8_FORMAT = LowBitFormat(8, 0, 128, False)
INT4_FORMAT = LowBitFormat(4, 0, 0, True)
E2M1_BOUNDS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between the numbers of MXFP4
Q6_K_FORMAT = LowBitFormat(6, 256, 32, False)
MXFP4_FORMAT = LowBitFormat(4, 0, 12, False, is_e2m1=True)
GGUF_FORMATS = {
    "q8_0": INT8_FORMAT, "q5_0": INT8_FORMAT, "q5_1": LowBitFormat(8, 0, 0, True),
    "q4_0": LowBitFormat(4, 0, 8, False), "q4_1": INT4_FORMAT,
    "q4_k": LowBitFormat(4, 256, 0, True), "q5_k": LowBitFormat(8, 256, 0, True), "q6_k": Q6_K_FORMAT,
    "mxfp4": MXFP4_FORMAT,
}  # fmt: skip
"""GGUF's block formats -> quire's formats with equal values; those of five bits take eight."""
UNQUANTIZED_MODULES = re.compile(
    r"(^|\.)(router|shared_gate|vision|tower|projector|vision_encoder|(mamba|mixer)\.(x_proj|dt_proj|ba_proj))(\.|$)"
)
"""Modules that are not rounded to few bits; a file may have them so (see quire.weights.fp8)."""
HEAD_MODULE = re.compile(r"(^|\.)head$")
"""The head is rounded to 8 bits even with int4, because no later layer corrects its errors."""
PIECE_NUMBERS = 1 << 18  # numbers quantized at once on a CPU: they stay in a core's cache
GPU_PIECE_NUMBERS = 1 << 26  # the same on a GPU
MakeWeight = Callable[[], LowBitWeight]
WeightFormats = dict[str, tuple[LowBitFormat, ...]]
"""Parameter -> the formats of its parts, each a tensor of a checkpoint."""


def choose_formats(model: Model, scheme: LowBitScheme, file: GGUFFile | None = None) -> WeightFormats:
    """Return the formats of the linear layers' weights: those to which they are rounded while loaded, or those of the
    checkpoint or of `file`. Heads have eight bits, since no later layer evens their errors out. Weights without an
    entry are in the model's dtype."""
    chosen: WeightFormats = {}
    sources, stored = model.weight_sources(), None if file is None else open_hf_tensors(file)
    for name, layer in low_bit_layers(model).items():
        assert layer.weight is not None, "the model is not prepared yet"
        tensors, columns, local_columns = sources[name].tensors, layer.column_shard.total, layer.weight.shape[1]
        modules = [tensor.removesuffix(".weight") for tensor in tensors]
        formats: tuple[LowBitFormat, ...]
        if stored is not None:
            kinds = [stored.format_of(tensor) for tensor in tensors]
            formats = tuple(GGUF_FORMATS[kind] for kind in kinds if kind is not None and kind in GGUF_FORMATS)
        elif scheme.stored == MXFP4:
            whole = layer.column_shard.local.start % 32 == local_columns % 32 == 0  # else in the model's dtype
            formats = (MXFP4_FORMAT,) * len(tensors) if isinstance(layer, ExpertWeights) and whole else ()
        elif scheme.stored:
            packed = LowBitFormat(scheme.bits, scheme.group_size, 0 if scheme.bits == 4 else 128, True)
            reordered = scheme.desc_act or bool(sources[name].group_rows or sources[name].row_order)
            covered = [module for module in modules if covers(scheme, module, model.weight_prefixes)]
            formats = () if reordered else (packed,) * len(covered)
        else:
            eight = scheme.bits == 8 or HEAD_MODULE.search(module_name(model, layer)) is not None
            formats = (INT8_FORMAT if eight else choose_int4_format(columns),) * len(tensors)
        units = [each.superblock or each.group for each in formats]
        if isinstance(layer, ExpertWeights) and len(set(formats)) > 1:  # experts are multiplied by one operation
            continue
        if len(formats) == len(tensors) and all(columns % unit == 0 for unit in units):
            _check_shard(layer, name, local_columns, max(units), bool(scheme.stored))
            chosen[name] = formats
    return chosen


def _check_shard(layer: Linear, name: str, local_columns: int, unit: int, from_checkpoint: bool) -> None:
    """Raise StartupError if a rank's columns aren't whole units of columns that share a scale."""
    if local_columns % unit or layer.column_shard.local.start % unit:
        raise StartupError(
            f"--tp is {layer.column_shard.shard.tp_size}, and a rank would have {local_columns} of "
            f"{layer.column_shard.total} columns of {name}, of which {unit} share a scale",
            f"--tp must divide its groups of columns, {layer.column_shard.total // unit}"
            + ("" if from_checkpoint else "; or use another --quantization")
            + ("; or give --expert-parallel" if isinstance(layer, ExpertWeights) else ""),
        )


def choose_int4_format(columns: int) -> LowBitFormat:
    """Return the 4-bit format with 4.625 or 4.75 bits per number if superblocks divide the columns; else 5 bits."""
    unit = next((unit for unit in (256, 128) if columns % unit == 0), 0)
    return LowBitFormat(4, unit, 0, True)


def module_name(model: nn.Module, layer: nn.Module) -> str:
    """Return the name of a layer of `model`."""
    name: str = next(path for path, module in model.named_modules() if module is layer)
    return name


def low_bit_layers(model: nn.Module) -> dict[str, Linear]:
    """Return the linear layers that may have few bits, by the names of their weights; that of a tied head is the
    embedding's."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    layers = {}
    for path, module in model.named_modules():
        if (
            isinstance(module, Linear)
            and UNQUANTIZED_MODULES.search(path) is None
            and isinstance(module.weight, nn.Parameter)
        ):
            layers[names[module.weight]] = module
    return layers


def create_model(
    config: dict[str, Any], dtype: torch.dtype, device: torch.device, scheme: LowBitScheme,
    file: GGUFFile | None = None,
    shard: Shard = UNSHARDED,
) -> Model:  # fmt: skip
    """Return the model of a config.json, or a shard of it, with uninitialised weights; those that stay in few bits are
    meta tensors."""
    model = resolve_model_class(config)(config, dtype, torch.device("meta"), shard)
    formats, low_bit_weights = choose_formats(model, scheme, file), set[Tensor]()
    for name, layer in low_bit_layers(model).items():
        weight = layer.weight
        assert weight is not None, "the model is not prepared yet"
        if name in formats and stays_low_bit(name, weight.shape[1], dtype, device):
            layer.low_bit_parts, layer.low_bit_device = [None] * len(formats[name]), device
            low_bit_weights.add(weight)
    allocate_parameters(model, device, low_bit_weights)
    return model


def stays_low_bit(name: str, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Return True if the weight `name` with this number of columns stays in few bits. On a GPU a tied head doesn't,
    since it is the embedding too."""
    if device.type != "cuda":
        return supports(columns, dtype, device)
    return dtype in (torch.bfloat16, torch.float16) and "embed_tokens" not in name.split(".")


def set_rows(rows: Tensor, layer: Linear | None, part_index: int, make_weight: MakeWeight) -> None:
    """Set rows of a weight to the result of `make_weight`: now, or when its layer is prepared, if it stays low-bit."""
    if rows.is_meta:
        assert layer is not None, "only linear layers have low-bit weights"
        assert layer.low_bit_parts is not None, "a meta weight is a low-bit one"
        layer.low_bit_parts[part_index] = make_weight
    else:
        rows.copy_(make_weight().dequantize())


def quantize(weight: Tensor, low_bit_format: LowBitFormat) -> LowBitWeight:
    """Quantize weight [N, K] by groups of 32. In 8 bits a group's largest value is 127 scales. In 4 bits its minimum
    and maximum are 0 and 15 scales above the minimum; scale and minimum have 8 bits each if groups share a superblock.
    Scales are rounded before the numbers are computed, so that the numbers compensate."""
    step = max(1, (GPU_PIECE_NUMBERS if weight.is_cuda else PIECE_NUMBERS) // weight.shape[1])
    result = _allocate(weight, low_bit_format)

    def fill(start: int) -> None:
        for to, part in zip(result[1:], _quantize(weight[start : start + step], low_bit_format)[1:]):
            if to is not None and part is not None:
                to[start : start + step] = part

    with ThreadPoolExecutor(torch.get_num_threads()) as threads, single_threaded():
        list(threads.map(fill, range(0, len(weight), step)))
    return result


@contextmanager
def single_threaded() -> Iterator[None]:
    """Run torch's operations on one thread each. Several would synchronise after each operation, which takes longer
    than the operation if another program occupies a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _allocate(weight: Tensor, low_bit_format: LowBitFormat) -> LowBitWeight:
    """Return an uninitialised LowBitWeight of a weight's shape."""
    rows, columns = weight.shape
    groups, units = columns // low_bit_format.group, columns // (low_bit_format.superblock or low_bit_format.group)
    kinds = (
        torch.float16,
        torch.float16 if low_bit_format.has_min else None,
        *((torch.int8, torch.int8) if low_bit_format.superblock else ()),
    )
    sizes = (units, units, groups, groups)
    scales = (
        None if kind is None else torch.empty(rows, size, dtype=kind, device=weight.device)
        for kind, size in zip(kinds, sizes)
    )
    numbers = torch.empty(rows, columns, dtype=torch.uint8, device=weight.device)
    return LowBitWeight(low_bit_format, numbers, *scales)  # type: ignore[arg-type]  # two to four tensors


def _quantize(weight: Tensor, low_bit_format: LowBitFormat) -> LowBitWeight:
    """As `quantize`, for a piece."""
    groups = torch.unflatten(weight.float(), 1, (-1, low_bit_format.group))
    if low_bit_format == INT8_FORMAT:
        d = (groups.abs().amax(2) / 127).half()
        by = _inverse(d)
        numbers = (groups * by).round_().clamp_(-127, 127).add_(128)
        return LowBitWeight(low_bit_format, numbers.to(torch.uint8).flatten(1), d)
    if low_bit_format == MXFP4_FORMAT:  # the exponent with which the largest number is from 4 on
        d = torch.exp2(groups.abs().amax(2).log2().floor() - 3).half()
        codes = torch.bucketize((groups * _inverse(d)).abs() / 2, E2M1_BOUNDS.to(groups.device)) + 8 * (groups < 0)
        return LowBitWeight(low_bit_format, codes.to(torch.uint8).flatten(1), d)
    assert low_bit_format == INT4_FORMAT._replace(superblock=low_bit_format.superblock), (
        f"no quantization to {low_bit_format}"
    )
    least, most = groups.amin(2), groups.amax(2)
    if not low_bit_format.superblock:
        scales = [((most - least.half().float()) / 15).half(), least.half()]
    else:
        d, a = _superblock_scales((most - least) / 15, low_bit_format)
        e, b = _superblock_scales(-least, low_bit_format)
        scales = [d, e, a, b]
    by, low = LowBitWeight(low_bit_format, groups, *scales).scales()
    assert low is not None, "the format has minima"
    one = by + low  # the value of the number 1, bit for bit
    numbers = (groups - low[:, :, None]).mul_(_inverse(one - low)).round_().clamp_(0, 15)
    return LowBitWeight(low_bit_format, numbers.to(torch.uint8).flatten(1), *scales)


def _superblock_scales(values: Tensor, low_bit_format: LowBitFormat) -> tuple[Tensor, Tensor]:
    """Quantize values [N, groups] to int8 [N, groups] times an fp16 scale for each superblock."""
    units = torch.unflatten(values, 1, (-1, low_bit_format.superblock // low_bit_format.group))
    unit = (units.abs().amax(2) / 127).half()
    return unit, (units * _inverse(unit)).round_().clamp_(-127, 127).to(torch.int8).flatten(1)


def _inverse(d: Tensor) -> Tensor:
    wide = d.float()
    return torch.where(wide > 0, 1 / wide, 0.0)[:, :, None]


def from_gguf(tensor: GGUFTensor) -> LowBitWeight:
    """Convert a GGUF file's blocks, without loss."""
    blocks_per_row = tensor.columns // BLOCK_FORMATS[tensor.format].block_size  # explicit, since there may be no rows
    parts = (
        None if part is None
        else torch.from_numpy(np.require(part, None, ["C", "W"]).reshape(tensor.rows, blocks_per_row * part.shape[1]))
        for part in tensor.unpack()
    )  # fmt: skip
    return LowBitWeight(GGUF_FORMATS[tensor.format], *parts)  # type: ignore[arg-type]  # two to five tensors


def from_mxfp4(blocks: Tensor, scales: Tensor, tensor_name: str) -> LowBitWeight:
    """Convert a checkpoint's MXFP4 blocks [rows, groups, 16] and scales [rows, groups], without loss if these are from
    2^-23 to 2^16; smaller ones become 0. Raise StartupError for larger ones."""
    d = torch.from_numpy(mxfp4_scales(scales.numpy()))
    if not d.isfinite().all():
        raise StartupError(f"{tensor_name} has a scale above 2^16", "Weights are not so large: download it again")
    numbers = torch.stack((blocks & 15, blocks >> 4), -1).flatten(1)
    return LowBitWeight(MXFP4_FORMAT, numbers, d)


def saved_bytes(
    config: dict[str, Any],
    scheme: LowBitScheme,
    dtype: torch.dtype,
    file: GGUFFile | None = None,
    shard: Shard = UNSHARDED,
    device: str = "cpu",
) -> int:
    """Return the bytes that a shard's low-bit weights save on a device, compared with `dtype`."""
    model = resolve_model_class(config)(config, dtype, torch.device("meta"), shard)
    layers, sources, saved = low_bit_layers(model), model.weight_sources(), 0
    for name, formats in choose_formats(model, scheme, file).items():
        weight = layers[name].weight
        assert weight is not None, "the model is not prepared yet"
        columns = weight.shape[1]
        if stays_low_bit(name, columns, dtype, torch.device(device)):
            for form, rows in zip(formats, sources[name].rows):
                row_bytes = form.row_bytes(columns) if device == "cpu" else form.gpu_row_bytes(columns)
                saved += rows * (columns * dtype.itemsize - row_bytes)
    return saved
