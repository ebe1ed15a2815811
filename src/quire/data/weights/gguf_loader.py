"""Tensors of a GGUF file into a model's parameters, each exactly once, in the model's dtype or rounded to FP8."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from tqdm import tqdm

from quire.data.models.quantization import FP8, Few
from quire.data.weights.blocks import Blocks, Floats
from quire.data.weights.few import FORMS, of_blocks, put
from quire.data.weights.fp8 import Most
from quire.data.weights.gguf import GGUF
from quire.data.weights.gguf_model import named
from quire.data.weights.loader import Target, fill, some, targets_of, undivided
from quire.data.weights.slices import Slice, blank
from quire.errors import StartupError, shown

if TYPE_CHECKING:
    from quire.data.models import Model

FIT = "The file's tensors must fit what it says of its model"


def load_gguf(
    model: Model, file: GGUF, progress: bool = False, scheme: FP8 | Few | None = None, most: Most | None = None
) -> None:
    """Fill every parameter of `model`, which is not prepared yet, with what the file's tensors stand for. `scheme`:
    what becomes FP8, `most`: see quire.data.weights.fp8. StartupError for tensors that are missing, unknown or of the
    wrong shape, and for scales that aren't finite."""
    targets, stored = targets_of(model, scheme, file), named(file)
    every = {tensor for source in undivided(model).names().values() for tensor in source.tensors}
    if unknown := stored.unknown(every):
        raise StartupError(f"{file.path} holds {shown(unknown[0])}, which the model has no place for", FIT)
    if missing := [name for name in map(stored.name, targets) if name not in file.tensors]:
        raise StartupError(f"{file.path} lacks {some(map(str, missing))}", FIT)
    model.mapped = [file]
    blank(model)
    for name, target in tqdm(targets.items(), "Loading weights", unit=" tensors", disable=not progress):
        blocks = stored.blocks(name)
        assert blocks is not None, "it isn't missing"
        _fill(target, blocks, str(stored.name(name)), file, most)
        file.release()


def _rows(blocks: Blocks, cut: Slice) -> Blocks:
    """The rows that one rank has of a weight."""
    [first, *more] = cut.runs
    if more:
        return blocks.picked(np.concatenate([np.arange(run.start, run.stop) for run in cut.runs]))
    return blocks.part(first.start, first.stop)


def _put(target: Target, numbers: Floats, name: str, file: GGUF, most: Most | None) -> None:
    """Numbers in fp32 where they go, in FP8 or in the model's dtype."""
    found = torch.from_numpy(np.array(numbers)).view(target.rows.shape).to(target.rows.device)
    fill(target, found, name, file.path, False, most=most)


def _fill(target: Target, blocks: Blocks, name: str, file: GGUF, most: Most | None) -> None:
    shape = target.rows.shape if target.slice is None else target.slice.shape
    if (blocks.rows, blocks.columns) not in (tuple(shape), (1, *shape), (*shape, 1)):
        found = [blocks.rows, blocks.columns]
        raise StartupError(f"{name} in {file.path} has shape {found}, but its settings make it {list(shape)}", FIT)
    if target.slice is not None:
        if len(shape) == 1:
            numbers = blocks.numbers().reshape(-1)
            target.rows.copy_(torch.from_numpy(np.concatenate([numbers[r.start : r.stop] for r in target.slice.runs])))
            return
        blocks, columns = _rows(blocks, target.slice), target.slice.columns
        if columns is not None and target.form is None:  # nothing stays in blocks, so that any cut will do
            found = [piece[:, columns.start : columns.stop] for _, piece in blocks.pieces()]
            _put(target, np.concatenate(found), name, file, most)
            return
        blocks = blocks if columns is None else blocks.columns_of(columns)
        if target.rows.is_meta and blocks.rows < target.room:
            blocks = blocks.padded(target.room)
    if blocks.kind in FORMS and target.form is not None:
        put(target.rows, target.layer, target.part, partial(of_blocks, blocks))
        return
    if target.fp8:
        _put(target, blocks.numbers(), name, file, most)
        return
    rows = target.rows.view(blocks.rows, blocks.columns)
    for start, piece in blocks.pieces():
        rows[start : start + len(piece)] = torch.from_numpy(np.require(piece, requirements="W"))
