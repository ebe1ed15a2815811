"""How a model is divided among ranks: the layout, and the part of each tensor that a rank has (Megatron's division by
heads and by columns: arXiv:1909.08053, §3; PagedAttention §4.6). Arithmetic only: no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import StartupError

MAX_RANKS = 63
VOCAB_ROWS_MULTIPLE = 64
"""A rank's rows of the vocabulary are padded to a multiple of this, so that the rows of a product stay aligned."""


class HeadRanges(NamedTuple):
    """The query heads and the key-value heads of a rank."""

    queries: range
    kv_heads: range


class Shard(NamedTuple):
    """The part of a model that a rank has: one of `tp_size` equal parts of each layer (tensor parallelism), for the
    layers of one of `pp_size` stages (pipeline parallelism). With `expert_parallel` it has whole experts, not columns
    of every expert."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    expert_parallel: bool = False

    def shard_range(self, size: int) -> range:
        """Return the rank's part of `size` columns or rows; `size` must be a multiple of `tp_size`."""
        assert size % self.tp_size == 0, f"{size} is not a multiple of {self.tp_size} ranks"
        count = size // self.tp_size
        return range(self.tp_rank * count, (self.tp_rank + 1) * count)

    def expert_range(self, count: int) -> range:
        """Return the experts, of `count`, whose weights the rank has: some with expert parallelism, else all. The
        numbers of ranks' experts differ by at most one; the first rank has the most."""
        return _part(self.tp_rank, self.tp_size, count) if self.expert_parallel else range(count)

    def head_ranges(self, queries: int, keys: int) -> HeadRanges:
        """Return the rank's heads. With more ranks than key heads, neighbouring ranks have copies of the same one."""
        query_heads = self.shard_range(queries)
        if keys % self.tp_size == 0:
            return HeadRanges(query_heads, self.shard_range(keys))
        assert self.tp_size % keys == 0, f"{keys} heads of keys and {self.tp_size} ranks: neither divides the other"
        copied = self.tp_rank * keys // self.tp_size
        return HeadRanges(query_heads, range(copied, copied + 1))

    def vocab_range(self, size: int) -> range:
        """Return the rank's rows of the vocabulary without padding: the last ranks may have fewer than the others."""
        each = self.padded_vocab_rows(size)
        return range(min(self.tp_rank * each, size), min((self.tp_rank + 1) * each, size))

    def padded_vocab_rows(self, size: int) -> int:
        """Return the rows of each rank's part of the vocabulary, padding included."""
        if self.tp_size == 1:
            return size
        return -(-size // (self.tp_size * VOCAB_ROWS_MULTIPLE)) * VOCAB_ROWS_MULTIPLE

    @property
    def is_first_tp_rank(self) -> bool:
        """True for the rank that adds what ranks must add only once."""
        return self.tp_rank == 0

    def layer_range(self, count: int) -> range:
        """Return the layers of the rank's stage, of `count`. The first stages may have one more than the others."""
        return _part(self.pp_rank, self.pp_size, count)

    @property
    def is_first_stage(self) -> bool:
        """True for the first stage, which embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """True for the last stage, which samples."""
        return self.pp_rank == self.pp_size - 1

    def has_embedding(self, tied: bool) -> bool:
        """Return True if the rank has the embedding: to embed tokens or, if `tied`, as the LM head."""
        return self.is_first_stage or (tied and self.is_last_stage)

    def has_lm_head(self, tied: bool) -> bool:
        """Return True if the rank has the LM head: to sample or, if `tied`, as the embedding."""
        return self.is_last_stage or (tied and self.is_first_stage)

    @property
    def global_rank(self) -> int:
        """The number among all ranks, stage by stage."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def returns_result(self) -> bool:
        """True for the rank that returns the samples."""
        return self.is_last_stage and self.is_first_tp_rank


def _part(number: int, parts: int, count: int) -> range:
    """Return part `number` of `parts` parts of range(count), in order. Sizes differ by at most one; the first part is
    the largest."""
    first, last = (-(-at * count // parts) for at in (number, number + 1))
    return range(first, last)


UNSHARDED = Shard()


class ParallelLayout(NamedTuple):
    """`tp` ranks divide each layer; `pp` stages divide the layers. With `expert_parallel` ranks have whole experts."""

    tp: int = 1
    pp: int = 1
    expert_parallel: bool = False

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.tp * self.pp

    @property
    def result_rank(self) -> int:
        """The number of the rank that returns the samples."""
        return self.tp * (self.pp - 1)

    def shards(self) -> list[Shard]:
        """Return the shard of each rank, by rank number."""
        stages, ranks = range(self.pp), range(self.tp)
        return [Shard(rank, self.tp, stage, self.pp, self.expert_parallel) for stage in stages for rank in ranks]


def can_divide(ranks: int, queries: int, keys: int, columns: tuple[int, ...]) -> bool:
    """Return True if `ranks` ranks can divide a layer with these heads and products with these `columns`."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0) and not any(n % ranks for n in columns)


def check_tp_division(ranks: int, queries: int, keys: int, most: int = MAX_RANKS, **columns: int) -> None:
    """Raise StartupError, which names the possible numbers up to `most`, unless `ranks` ranks can divide a layer with
    these heads and products with these `columns` (by their names in config.json)."""
    if can_divide(ranks, queries, keys, tuple(columns.values())):
        return
    possible = [n for n in range(1, min(queries, most) + 1) if can_divide(n, queries, keys, tuple(columns.values()))]
    has = ", ".join([f"{queries} heads", f"{keys} heads of keys", *(f"{name} {n}" for name, n in columns.items())])
    *others, last = map(str, possible)
    raise StartupError(
        f"--tp is {ranks}, which doesn't divide the model: it has {has}",
        f"Use {' or '.join(filter(None, [', '.join(others), last]))}",
    )
