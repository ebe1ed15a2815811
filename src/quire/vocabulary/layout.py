"""How a model is divided among devices: the layout, and what of each tensor one rank has (Megatron's division, by heads
and by columns: arXiv:1909.08053, §3; PagedAttention §4.6). Arithmetic only: no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.config import MAX_RANKS
from quire.errors import StartupError

MOST_RANKS = MAX_RANKS
ROWS = 64
"""Rows of the vocabulary that ranks share out at once, so that rows of a product stay aligned; the last rank pads."""


class Heads(NamedTuple):
    """Of one rank: which heads of queries, and which of keys and values."""

    queries: range
    keys: range


class Part(NamedTuple):
    """One of `ranks` equal parts of a model whose layers are divided (tensor parallelism), and of these the layers of
    one of `stages` (pipeline parallelism)."""

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1

    def share(self, size: int) -> range:
        """Its part of `size` columns or rows, a multiple of the ranks."""
        assert size % self.ranks == 0, f"{size} is not a multiple of {self.ranks} ranks"
        count = size // self.ranks
        return range(self.rank * count, (self.rank + 1) * count)

    def heads(self, queries: int, keys: int) -> Heads:
        """Its heads. Where ranks outnumber heads of keys, neighbours have copies of the same one."""
        own = self.share(queries)
        if keys % self.ranks == 0:
            return Heads(own, self.share(keys))
        assert self.ranks % keys == 0, f"{keys} heads of keys and {self.ranks} ranks: neither divides the other"
        copied = self.rank * keys // self.ranks
        return Heads(own, range(copied, copied + 1))

    def vocabulary(self, size: int) -> range:
        """Its rows of a vocabulary, padding aside: as many as the other ranks', but for the last ones'."""
        each = self.padded(size)
        return range(min(self.rank * each, size), min((self.rank + 1) * each, size))

    def padded(self, size: int) -> int:
        """Rows that each rank's share of a vocabulary takes, padding included."""
        if self.ranks == 1:
            return size
        return -(-size // (self.ranks * ROWS)) * ROWS

    @property
    def first(self) -> bool:
        """What is to be added once is added here."""
        return self.rank == 0

    def layers(self, count: int) -> range:
        """The layers of its stage, of so many: as many as others have, or one more in the first stages."""
        first, last = (-(-at * count // self.stages) for at in (self.stage, self.stage + 1))
        return range(first, last)

    @property
    def starts(self) -> bool:
        """Its stage is the first, which knows tokens."""
        return self.stage == 0

    @property
    def ends(self) -> bool:
        """Its stage is the last, which draws."""
        return self.stage == self.stages - 1

    def embeds(self, tied: bool) -> bool:
        """It needs the embedding: for tokens, or, `tied`, as its head."""
        return self.starts or (tied and self.ends)

    def projects(self, tied: bool) -> bool:
        """It has the head: to draw, or because it is `tied` to the embedding."""
        return self.ends or (tied and self.starts)

    @property
    def number(self) -> int:
        """Among all ranks: one stage's behind another's."""
        return self.stage * self.ranks + self.rank

    @property
    def answers(self) -> bool:
        """It tells what was drawn."""
        return self.ends and self.first


WHOLE = Part()


class Layout(NamedTuple):
    """`tp` ranks divide each layer; `pp` stages have some layers each."""

    tp: int = 1
    pp: int = 1

    @property
    def ranks(self) -> int:
        """In all."""
        return self.tp * self.pp

    @property
    def answers(self) -> int:
        """The number of the rank that tells what was drawn."""
        return self.tp * (self.pp - 1)

    def parts(self) -> list[Part]:
        """What each rank has, in the order of their numbers."""
        return [Part(rank, self.tp, stage, self.pp) for stage in range(self.pp) for rank in range(self.tp)]


def divides(ranks: int, queries: int, keys: int, columns: tuple[int, ...]) -> bool:
    """Whether so many ranks can share a layer with these heads, and products with so many columns."""
    return queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0) and not any(n % ranks for n in columns)


def check_division(ranks: int, queries: int, keys: int, **columns: int) -> None:
    """StartupError, which says how many there may be, unless `ranks` ranks can share a layer with these heads, and
    products with so many `columns` (by what config.json calls them)."""
    if divides(ranks, queries, keys, tuple(columns.values())):
        return
    fine = [n for n in range(1, min(queries, MOST_RANKS) + 1) if divides(n, queries, keys, tuple(columns.values()))]
    has = ", ".join([f"{queries} heads", f"{keys} heads of keys", *(f"{name} {n}" for name, n in columns.items())])
    *some, last = map(str, fine)
    raise StartupError(
        f"--tp is {ranks}, which doesn't divide the model: it has {has}",
        f"Use {' or '.join(filter(None, [', '.join(some), last]))}",
    )
