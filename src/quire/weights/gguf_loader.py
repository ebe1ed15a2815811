"""Loads the tensors of a GGUF file into a model's parameters, each exactly once: in the model's dtype, in blocks, or
rounded to FP8."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from quire.errors import StartupError, short_repr
from quire.models.quantization import FP8Scheme, LowBitScheme
from quire.weights.fp8 import MaxReduce
from quire.weights.gguf_blocks import FloatArray, GGUFTensor
from quire.weights.gguf_config import open_hf_tensors
from quire.weights.gguf_file import GGUFFile
from quire.weights.loader import LoadedFiles, LoadTarget, build_targets, join_names, load_tensor
from quire.weights.low_bit import GGUF_FORMATS, from_gguf, set_rows
from quire.weights.tensor_slices import TensorSlice, zero_padding

if TYPE_CHECKING:
    from quire.models import Model

FIT_REMEDY = "The file's tensors must fit what it says of its model"


def load_gguf(
    model: Model,
    file: GGUFFile,
    progress: bool = False,
    scheme: FP8Scheme | LowBitScheme | None = None,
    max_reduce: MaxReduce | None = None,
    full_model: Model | None = None,
) -> LoadedFiles:
    """Load every parameter of `model`, which is not prepared yet, from the file's tensors. `scheme`: the weights that
    become FP8; `max_reduce`: see quire.weights.fp8; `full_model`: see `load_weights`. Raise StartupError for tensors
    that are missing, unknown or of the wrong shape, and for scales that aren't finite."""
    targets, stored = build_targets(model, scheme, file), open_hf_tensors(file)
    sources = (model if full_model is None else full_model).weight_sources()
    if unknown := stored.unknown_tensors({tensor for source in sources.values() for tensor in source.tensors}):
        raise StartupError(f"{file.path} holds {short_repr(unknown[0])}, which the model has no place for", FIT_REMEDY)
    if missing := [name for name in map(stored.gguf_name, targets) if name not in file.tensors]:
        raise StartupError(f"{file.path} lacks {join_names(map(str, missing))}", FIT_REMEDY)
    zero_padding(model)
    for name, target in tqdm(targets.items(), "Loading weights", unit=" tensors", disable=not progress):
        blocks = stored.get_tensor(name)
        assert blocks is not None, "missing tensors are reported before"
        _load_tensor(target, blocks, str(stored.gguf_name(name)), file, max_reduce)
        file.release()
    return LoadedFiles((file,), 0)


def _select_rows(tensor: GGUFTensor, tensor_slice: TensorSlice) -> GGUFTensor:
    """Return the rows of a weight that one rank has."""
    [first, *more] = tensor_slice.row_ranges
    if more:
        return tensor.select_rows(np.concatenate([np.arange(run.start, run.stop) for run in tensor_slice.row_ranges]))
    return tensor.slice_rows(first.start, first.stop)


def _load_floats(
    target: LoadTarget, values: FloatArray, name: str, file: GGUFFile, max_reduce: MaxReduce | None
) -> None:
    """Load numbers in fp32, converted to FP8 or to the model's dtype."""
    numbers = torch.from_numpy(np.array(values)).view(target.rows.shape).to(target.rows.device)
    load_tensor(target, numbers, name, file.path, False, max_reduce=max_reduce)


def _load_tensor(
    target: LoadTarget, tensor: GGUFTensor, name: str, file: GGUFFile, max_reduce: MaxReduce | None
) -> None:
    shape = target.rows.shape if target.tensor_slice is None else target.tensor_slice.shape
    flat = (shape[0], *shape[2:]) if len(shape) == 3 and shape[1] == 1 else tuple(shape)  # of a convolution's weight
    if (tensor.rows, tensor.columns) not in (flat, (1, *flat), (*flat, 1)):
        raise StartupError(
            f"{name} in {file.path} has shape {[tensor.rows, tensor.columns]}, but its settings make it {list(shape)}",
            FIT_REMEDY,
        )
    if target.tensor_slice is not None:
        if len(shape) == 1:
            numbers = tensor.dequantize().reshape(-1)
            target.rows.copy_(
                torch.from_numpy(np.concatenate([numbers[r.start : r.stop] for r in target.tensor_slice.row_ranges]))
            )
            return
        tensor, columns = _select_rows(tensor, target.tensor_slice), target.tensor_slice.columns
        if columns is not None and target.low_bit_format is None:  # dequantized, so columns may split blocks
            pieces = [piece[:, columns.start : columns.stop] for _, piece in tensor.iter_dequantized()]
            _load_floats(target, np.concatenate(pieces), name, file, max_reduce)
            return
        tensor = tensor if columns is None else tensor.slice_columns(columns)
        if target.rows.is_meta and tensor.rows < target.padded_rows:
            tensor = tensor.pad_rows(target.padded_rows)
    if target.row_order:
        tensor = tensor.select_rows(np.array(target.row_order))
        target = target._replace(row_order=())
    if tensor.format in GGUF_FORMATS and target.low_bit_format is not None:
        set_rows(target.rows, target.layer, target.part_index, partial(from_gguf, tensor))
        return
    if target.is_fp8:
        _load_floats(target, tensor.dequantize(), name, file, max_reduce)
        return
    rows = target.rows.view(tensor.rows, tensor.columns)
    for start, piece in tensor.iter_dequantized():
        rows[start : start + len(piece)] = torch.from_numpy(np.require(piece, requirements="W"))
