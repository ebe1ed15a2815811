"""What one rank has of a dimension of a weight: all of it, or, where ranks share out a model's layers, some rows or
columns. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.protocol.parallel_layout import UNSHARDED, Shard


@dataclass(frozen=True, slots=True)
class ShardRange:
    """`local` of `total` rows or columns, in room for `padded` of them: what is behind its own is padding, zeros.
    `shard` says whose they are."""

    local: range
    total: int
    padded: int
    shard: Shard = UNSHARDED

    @property
    def is_sharded(self) -> bool:
        """Other ranks have others."""
        return self.shard.tp_size > 1


@dataclass(frozen=True, slots=True)
class ParameterShards:
    """Of a parameter that is divided: what a rank has of its rows, those of each projection, and of its columns, if it
    hasn't all."""

    rows: tuple[ShardRange, ...]
    columns: ShardRange | None


def as_shard_range(size: int | ShardRange) -> ShardRange:
    """All of a dimension, where only its size is said."""
    return size if isinstance(size, ShardRange) else ShardRange(range(size), size, size)


def shard_columns(shard: Shard, size: int) -> ShardRange:
    """An equal part of `size` columns of a feed-forward block."""
    own = shard.shard_range(size)
    return ShardRange(own, size, len(own), shard)


def shard_heads(shard: Shard, queries: int, keys: int, head_dim: int) -> tuple[ShardRange, ShardRange]:
    """The columns of its heads of so many: of queries, and of keys (or values)."""
    queries_cut, keys_cut = (
        ShardRange(range(own.start * head_dim, own.stop * head_dim), count * head_dim, len(own) * head_dim, shard)
        for own, count in zip(shard.head_ranges(queries, keys), (queries, keys))
    )
    return queries_cut, keys_cut


def shard_vocab(shard: Shard, size: int) -> ShardRange:
    """Its rows of a vocabulary: as much room on each rank, and fewer of their own on the last ones, or none."""
    return ShardRange(shard.vocab_range(size), size, shard.padded_vocab_rows(size), shard)
