"""The part of a weight's dimension that one rank has: all of it, or with tensor parallelism some rows or columns. No
torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.parallel_layout import UNSHARDED, Shard


@dataclass(frozen=True, slots=True)
class ShardRange:
    """The `local` of `total` rows or columns, which the rank `shard` has. Its weight has `padded` of them: those after
    the local ones are padding, zeros."""

    local: range
    total: int
    padded: int
    shard: Shard = UNSHARDED

    @property
    def is_sharded(self) -> bool:
        """Return True if other ranks have the rest."""
        return self.shard.tp_size > 1


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """The part of a divided parameter that one rank has: rows of each projection, and columns (None: all)."""

    rows: tuple[ShardRange, ...]
    columns: ShardRange | None


def as_shard_range(size: int | ShardRange) -> ShardRange:
    """Return `size`, or the whole dimension if it is an int."""
    return size if isinstance(size, ShardRange) else ShardRange(range(size), size, size)


def shard_columns(shard: Shard, size: int) -> ShardRange:
    """Return the shard's equal part of `size` columns of a feed-forward block."""
    local = shard.shard_range(size)
    return ShardRange(local, size, len(local), shard)


def shard_experts(shard: Shard, count: int, *sizes: int | ShardRange) -> tuple[int | ShardRange, ...]:
    """Return the rows of the stacked projections of `count` experts; those of each expert have `sizes` rows. With
    expert parallelism the shard has no rows of other ranks' experts."""
    if not shard.expert_parallel:
        return sizes * count
    own, every = shard.expert_range(count), [as_shard_range(size).total for size in sizes]
    rows = [(size, size if expert in own else 0) for expert in range(count) for size in every]
    return tuple(ShardRange(range(local), size, local, shard) for size, local in rows)


def shard_heads(shard: Shard, queries: int, keys: int, head_dim: int) -> tuple[ShardRange, ShardRange]:
    """Return the columns of the shard's query heads, and of its key (or value) heads."""
    query_columns, key_columns = (
        ShardRange(range(own.start * head_dim, own.stop * head_dim), count * head_dim, len(own) * head_dim, shard)
        for own, count in zip(shard.head_ranges(queries, keys), (queries, keys))
    )
    return query_columns, key_columns


def shard_vocab(shard: Shard, size: int) -> ShardRange:
    """Return the shard's rows of a vocabulary. All ranks have equal room; the last ones have fewer rows, or none."""
    return ShardRange(shard.vocab_range(size), size, shard.padded_vocab_rows(size), shard)
