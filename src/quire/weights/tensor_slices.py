"""What one rank reads of a checkpoint's tensors, where ranks share out a model: runs of rows, and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.mamba import MambaMixer
from quire.layers.moe import SparseMLP
from quire.layers.sharding import ParameterShards, ShardRange
from quire.models.weight_names import WeightSource

if TYPE_CHECKING:
    from quire.models import Model


class TensorSlice(NamedTuple):
    """Of a tensor that has this shape: the rows of `row_ranges`, one run below the other, and `columns`, if not all."""

    shape: tuple[int, ...]
    row_ranges: tuple[range, ...]
    columns: range | None

    @property
    def num_rows(self) -> int:
        """Of its rows."""
        return sum(map(len, self.row_ranges))

    def read(self, file: Any, key: str, transposed: bool) -> Tensor:
        """It, of a safetensors file that keeps the tensor's transpose if `transposed`: then so is what is read."""
        tensor, parts = file.get_slice(key), []
        for run in self.row_ranges:
            rows = slice(run.start, run.stop)
            if len(self.shape) == 1:
                parts.append(tensor[rows])
            else:
                columns = slice(None) if self.columns is None else slice(self.columns.start, self.columns.stop)
                parts.append(tensor[columns, rows] if transposed else tensor[rows, columns])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=int(transposed))


def parameter_shards(module: nn.Module, name: str) -> ParameterShards | None:
    """Those of a module's parameter; None if all ranks have all of it."""
    if isinstance(module, Embedding) and module.shard_range.is_sharded:
        return ParameterShards((module.shard_range,), None)
    if isinstance(module, MambaMixer | SparseMLP):
        cuts = module.param_shards.get(name)
        return cuts if cuts is not None and (*cuts.rows, cuts.columns or cuts.rows[0])[-1].is_sharded else None
    if not isinstance(module, Linear):
        return None
    columns = module.column_shard if module.column_shard.shard.tp_size > 1 and name == "weight" else None
    if columns is None and not any(cut.is_sharded for cut in module.row_shards):
        return None
    return ParameterShards(module.row_shards, columns)


def tensor_slices(model: Model, name: str, source: WeightSource) -> tuple[TensorSlice | None, ...]:
    """Of each of the tensors that a parameter is filled from; None: all of it is read."""
    path, _, kind = name.rpartition(".")
    cuts = parameter_shards(model.get_submodule(path), kind)
    if cuts is None:
        return (None,) * len(source.tensors)
    columns, parameter = cuts.columns, model.get_parameter(name)
    width = parameter.shape[1:] if columns is None else (columns.total,)
    stacked = [[cut] for cut in cuts.rows] if len(cuts.rows) == len(source.tensors) else [cuts.rows]
    return tuple(
        TensorSlice(
            (sum(cut.total for cut in each), *width),
            tuple(_row_ranges(each, source.group_rows or tuple(cut.total for cut in each))) or (range(0),),
            None if columns is None else columns.local,
        )
        for each in stacked
    )


def _row_ranges(shard_ranges: Sequence[ShardRange], sizes: tuple[int, ...]) -> Iterator[range]:
    """Where the rows of these cuts lie in a tensor whose rows lie in groups, each with so many rows of every one."""
    for cut, size, before in zip(shard_ranges, sizes, accumulate(sizes, initial=0)):
        for group in range(cut.local.start // size, -(-cut.local.stop // size)):
            first, last = max(cut.local.start, group * size), min(cut.local.stop, (group + 1) * size)
            begin = group * sum(sizes) + before + first - group * size
            yield range(begin, begin + last - first)


@torch.no_grad()
def zero_padding(model: nn.Module) -> None:
    """Zeros where a shard's rows of the vocabulary are padding."""
    for module in model.modules():
        cuts = (
            (module.shard_range,)
            if isinstance(module, Embedding)
            else module.row_shards
            if isinstance(module, Linear)
            else ()
        )
        if len(cuts) == 1 and len(cuts[0].local) < cuts[0].padded:
            module.weight[len(cuts[0].local) :].zero_()
