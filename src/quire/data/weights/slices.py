"""What one rank reads of a checkpoint's tensors, where ranks share out a model: runs of rows, and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.data.layers.cut import Cut, Cuts
from quire.data.layers.embedding import Embedding
from quire.data.layers.linear import Linear
from quire.data.layers.mamba import Mamba
from quire.data.layers.moe import SparseMLP
from quire.data.models.names import Stored

if TYPE_CHECKING:
    from quire.data.models import Model


class Slice(NamedTuple):
    """Of a tensor that has this shape: the rows of `runs`, one run below the other, and `columns`, if not all."""

    shape: tuple[int, ...]
    runs: tuple[range, ...]
    columns: range | None

    @property
    def count(self) -> int:
        """Of its rows."""
        return sum(map(len, self.runs))

    def read(self, file: Any, key: str, transposed: bool) -> Tensor:
        """It, of a safetensors file that keeps the tensor's transpose if `transposed`: then so is what is read."""
        tensor, parts = file.get_slice(key), []
        for run in self.runs:
            rows = slice(run.start, run.stop)
            if len(self.shape) == 1:
                parts.append(tensor[rows])
            else:
                columns = slice(None) if self.columns is None else slice(self.columns.start, self.columns.stop)
                parts.append(tensor[columns, rows] if transposed else tensor[rows, columns])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=int(transposed))


def cuts_of(module: nn.Module, name: str) -> Cuts | None:
    """Those of a module's parameter; None if all ranks have all of it."""
    if isinstance(module, Embedding) and module.cut.divided:
        return Cuts((module.cut,), None)
    if isinstance(module, Mamba | SparseMLP):
        cuts = module.cuts.get(name)
        return cuts if cuts is not None and (*cuts.rows, cuts.columns or cuts.rows[0])[-1].divided else None
    if not isinstance(module, Linear):
        return None
    columns = module.columns if module.columns.part.ranks > 1 and name == "weight" else None
    if columns is None and not any(cut.divided for cut in module.rows):
        return None
    return Cuts(module.rows, columns)


def slices_of(model: Model, name: str, source: Stored) -> tuple[Slice | None, ...]:
    """Of each of the tensors that a parameter is filled from; None: all of it is read."""
    path, _, kind = name.rpartition(".")
    cuts = cuts_of(model.get_submodule(path), kind)
    if cuts is None:
        return (None,) * len(source.tensors)
    columns, parameter = cuts.columns, model.get_parameter(name)
    width = parameter.shape[1:] if columns is None else (columns.whole,)
    stacked = [[cut] for cut in cuts.rows] if len(cuts.rows) == len(source.tensors) else [cuts.rows]
    return tuple(
        Slice(
            (sum(cut.whole for cut in each), *width),
            tuple(_runs(each, source.grouped or tuple(cut.whole for cut in each))) or (range(0),),
            None if columns is None else columns.own,
        )
        for each in stacked
    )


def _runs(cuts: Sequence[Cut], sizes: tuple[int, ...]) -> Iterator[range]:
    """Where the rows of these cuts lie in a tensor whose rows lie in groups, each with so many rows of every one."""
    for cut, size, before in zip(cuts, sizes, accumulate(sizes, initial=0)):
        for group in range(cut.own.start // size, -(-cut.own.stop // size)):
            first, last = max(cut.own.start, group * size), min(cut.own.stop, (group + 1) * size)
            begin = group * sum(sizes) + before + first - group * size
            yield range(begin, begin + last - first)


@torch.no_grad()
def blank(model: nn.Module) -> None:
    """Zeros where a shard's rows of the vocabulary are padding."""
    for module in model.modules():
        cuts = (module.cut,) if isinstance(module, Embedding) else module.rows if isinstance(module, Linear) else ()
        if len(cuts) == 1 and len(cuts[0].own) < cuts[0].room:
            module.weight[len(cuts[0].own) :].zero_()
