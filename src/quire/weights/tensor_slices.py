"""The slices of a checkpoint's tensors that one rank reads: runs of rows, and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.sharding import ParameterShards, ShardRange
from quire.layers.state_mixer import StateMixer
from quire.models.decoder import Attention
from quire.models.weight_names import WeightSource

if TYPE_CHECKING:
    from quire.models import Model


class TensorSlice(NamedTuple):
    """A slice of a tensor of `shape`: the rows of `row_ranges`, concatenated, and `columns` (None: all)."""

    shape: tuple[int, ...]
    row_ranges: tuple[range, ...]
    columns: range | None

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the slice."""
        return sum(map(len, self.row_ranges))

    def read(self, file: Any, key: str, transposed: bool) -> Tensor:
        """Read the slice from a safetensors file. If the file has the tensor's transpose, so is the result."""
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
    """Return the shard ranges of a module's parameter; None if every rank has all of it."""
    if isinstance(module, Embedding) and module.shard_range.is_sharded:
        return ParameterShards((module.shard_range,), None)
    if isinstance(module, StateMixer | Attention):
        shards = module.param_shards.get(name)
        return shards if shards is not None and (shards.columns or shards.rows[0]).is_sharded else None
    if not isinstance(module, Linear):
        return None
    columns = module.column_shard if module.column_shard.shard.tp_size > 1 and name == "weight" else None
    if columns is None and not any(rows.is_sharded for rows in module.row_shards):
        return None
    return ParameterShards(module.row_shards, columns)


def tensor_slices(model: Model, name: str, source: WeightSource) -> tuple[TensorSlice | None, ...]:
    """Return the slice of each tensor from which a parameter is loaded; None: the whole tensor."""
    path, _, kind = name.rpartition(".")
    shards = parameter_shards(model.get_submodule(path), kind)
    if shards is None:
        return (None,) * len(source.tensors)
    columns, parameter = shards.columns, model.get_parameter(name)
    width = tuple(parameter.shape[1:]) if columns is None else (columns.total,)
    separate = len(source.tensors) > 1
    ends = accumulate(source.projections if separate else (len(shards.rows),), initial=0)
    by_tensor = [shards.rows[first:end] for first, end in pairwise(ends)]
    return tuple(
        TensorSlice(
            (sum(rows.total for rows in parts), *width),
            tuple(_row_ranges(parts, (not i and source.group_rows) or tuple(rows.total for rows in parts)))
            or (range(0),),
            None if columns is None else columns.local,
        )
        for i, parts in enumerate(by_tensor)
    )


def _row_ranges(shard_ranges: Sequence[ShardRange], sizes: tuple[int, ...]) -> Iterator[range]:
    """Yield the local rows of `shard_ranges` in a tensor whose rows are in groups, each with `sizes` rows of them."""
    for part, size, before in zip(shard_ranges, sizes, accumulate(sizes, initial=0)):
        for group in range(part.local.start // size, -(-part.local.stop // size)):
            first, last = max(part.local.start, group * size), min(part.local.stop, (group + 1) * size)
            begin = group * sum(sizes) + before + first - group * size
            yield range(begin, begin + last - first)


@torch.no_grad()
def zero_padding(model: nn.Module) -> None:
    """Set the padding rows of a shard's vocabulary to zero."""
    for module in model.modules():
        if isinstance(module, Embedding):
            parts: tuple[ShardRange, ...] = (module.shard_range,)
        elif isinstance(module, Linear):
            parts = module.row_shards
        else:
            continue
        if len(parts) == 1 and len(parts[0].local) < parts[0].padded:
            assert module.weight is not None, "the model is not prepared yet"
            module.weight[len(parts[0].local) :].zero_()
