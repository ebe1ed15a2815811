"""How a model is divided among devices: the layout, and what of each tensor one rank has (Megatron's division, by heads
and by columns: arXiv:1909.08053, §3; PagedAttention §4.6). Arithmetic only: no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.config import MAX_RANKS
from quire.errors import StartupError

MOST_RANKS = MAX_RANKS
VOCAB_ROWS_MULTIPLE = 64
"""Rows of the vocabulary that ranks share out at once, so that rows of a product stay aligned; the last rank pads."""


class HeadRanges(NamedTuple):
    """Of one rank: which heads of queries, and which of keys and values."""

    queries: range
    kv_heads: range


class Shard(NamedTuple):
    """One of `tp_size` equal parts of a model whose layers are divided (tensor parallelism), and of these the layers of
    one of `pp_size` (pipeline parallelism)."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def shard_range(self, size: int) -> range:
        """Its part of `size` columns or rows, a multiple of the ranks."""
        assert size % self.tp_size == 0, f"{size} is not a multiple of {self.tp_size} ranks"
        count = size // self.tp_size
        return range(self.tp_rank * count, (self.tp_rank + 1) * count)

    def head_ranges(self, queries: int, keys: int) -> HeadRanges:
        """Its heads. Where ranks outnumber heads of keys, neighbours have copies of the same one."""
        own = self.shard_range(queries)
        if keys % self.tp_size == 0:
            return HeadRanges(own, self.shard_range(keys))
        assert self.tp_size % keys == 0, f"{keys} heads of keys and {self.tp_size} ranks: neither divides the other"
        copied = self.tp_rank * keys // self.tp_size
        return HeadRanges(own, range(copied, copied + 1))

    def vocab_range(self, size: int) -> range:
        """Its rows of a vocabulary, padding aside: as many as the other ranks', but for the last ones'."""
        each = self.padded_vocab_rows(size)
        return range(min(self.tp_rank * each, size), min((self.tp_rank + 1) * each, size))

    def padded_vocab_rows(self, size: int) -> int:
        """Rows that each rank's share of a vocabulary takes, padding included."""
        if self.tp_size == 1:
            return size
        return -(-size // (self.tp_size * VOCAB_ROWS_MULTIPLE)) * VOCAB_ROWS_MULTIPLE

    @property
    def is_first_tp_rank(self) -> bool:
        """What is to be added once is added here."""
        return self.tp_rank == 0

    def layer_range(self, count: int) -> range:
        """The layers of its stage, of so many: as many as others have, or one more in the first stages."""
        first, last = (-(-at * count // self.pp_size) for at in (self.pp_rank, self.pp_rank + 1))
        return range(first, last)

    @property
    def is_first_stage(self) -> bool:
        """Its stage is the first, which knows tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Its stage is the last, which draws."""
        return self.pp_rank == self.pp_size - 1

    def has_embedding(self, tied: bool) -> bool:
        """It needs the embedding: for tokens, or, `tied`, as its head."""
        return self.is_first_stage or (tied and self.is_last_stage)

    def has_lm_head(self, tied: bool) -> bool:
        """It has the head: to draw, or because it is `tied` to the embedding."""
        return self.is_last_stage or (tied and self.is_first_stage)

    @property
    def global_rank(self) -> int:
        """Among all ranks: one stage's behind another's."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def returns_result(self) -> bool:
        """It tells what was drawn."""
        return self.is_last_stage and self.is_first_tp_rank


UNSHARDED = Shard()


class ParallelLayout(NamedTuple):
    """`tp` ranks divide each layer; `pp` stages have some layers each."""

    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        """In all."""
        return self.tp * self.pp

    @property
    def result_rank(self) -> int:
        """The number of the rank that tells what was drawn."""
        return self.tp * (self.pp - 1)

    def shards(self) -> list[Shard]:
        """What each rank has, in the order of their numbers."""
        return [Shard(rank, self.tp, stage, self.pp) for stage in range(self.pp) for rank in range(self.tp)]


def can_divide(ranks: int, queries: int, keys: int, columns: tuple[int, ...]) -> bool:
    """Whether so many ranks can share a layer with these heads, and products with so many columns."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0) and not any(n % ranks for n in columns)


def check_tp_division(ranks: int, queries: int, keys: int, **columns: int) -> None:
    """StartupError, which says how many there may be, unless `ranks` ranks can share a layer with these heads, and
    products with so many `columns` (by what config.json calls them)."""
    if can_divide(ranks, queries, keys, tuple(columns.values())):
        return
    fine = [n for n in range(1, min(queries, MOST_RANKS) + 1) if can_divide(n, queries, keys, tuple(columns.values()))]
    has = ", ".join([f"{queries} heads", f"{keys} heads of keys", *(f"{name} {n}" for name, n in columns.items())])
    *some, last = map(str, fine)
    raise StartupError(
        f"--tp is {ranks}, which doesn't divide the model: it has {has}",
        f"Use {' or '.join(filter(None, [', '.join(some), last]))}",
    )
