"""The weight-name table: which tensors of a checkpoint fill each of our parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import nn


class Stored(NamedTuple):
    """A parameter's rows are those of `tensors`, one below the other, `rows` of each; `transpose` for weights kept as
    [in, out]."""

    tensors: tuple[str, ...]
    rows: tuple[int, ...]
    transpose: bool = False


def expand(model: nn.Module, table: Mapping[str, str | tuple[str, ...]], transposed: str = "") -> dict[str, Stored]:
    """Every parameter of `model` -> its Stored, from a `table` of patterns in which * is the layer's number.

    `transposed` is a regular expression that the names of parameters kept as [in, out] match. A parameter that the
    table lacks is a KeyError: a mistake in the table.
    """
    sources = {}
    for name, parameter in model.named_parameters():
        layer = re.search(r"\d+", name)
        entry = table[re.sub(r"\d+", "*", name)]
        tensors = (entry,) if isinstance(entry, str) else entry
        if layer:
            tensors = tuple(tensor.replace("*", layer.group()) for tensor in tensors)
        module = model.get_submodule(name.rpartition(".")[0])
        rows = getattr(module, "parts", (parameter.shape[0],))
        flip = bool(transposed) and parameter.dim() == 2 and re.search(transposed, name) is not None
        sources[name] = Stored(tensors, rows, flip)
    return sources
