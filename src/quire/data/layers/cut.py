"""What one rank has of a dimension of a weight: all of it, or, where ranks share out a model's layers, some rows or
columns. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.vocabulary.layout import WHOLE, Part


@dataclass(frozen=True, slots=True)
class Cut:
    """`own` of `whole` rows or columns, in room for `room` of them: what is behind its own is padding, zeros. `part`
    says whose they are."""

    own: range
    whole: int
    room: int
    part: Part = WHOLE

    @property
    def divided(self) -> bool:
        """Other ranks have others."""
        return self.part.ranks > 1


@dataclass(frozen=True, slots=True)
class Cuts:
    """Of a parameter that is divided: what a rank has of its rows, those of each projection, and of its columns, if it
    hasn't all."""

    rows: tuple[Cut, ...]
    columns: Cut | None


def cut_of(size: int | Cut) -> Cut:
    """All of a dimension, where only its size is said."""
    return size if isinstance(size, Cut) else Cut(range(size), size, size)


def columns(part: Part, size: int) -> Cut:
    """An equal part of `size` columns of a feed-forward block."""
    own = part.share(size)
    return Cut(own, size, len(own), part)


def heads(part: Part, queries: int, keys: int, head_dim: int) -> tuple[Cut, Cut]:
    """The columns of its heads of so many: of queries, and of keys (or values)."""
    queries_cut, keys_cut = (
        Cut(range(own.start * head_dim, own.stop * head_dim), count * head_dim, len(own) * head_dim, part)
        for own, count in zip(part.heads(queries, keys), (queries, keys))
    )
    return queries_cut, keys_cut


def vocabulary(part: Part, size: int) -> Cut:
    """Its rows of a vocabulary: as much room on each rank, and fewer of their own on the last ones, or none."""
    return Cut(part.vocabulary(size), size, part.padded(size), part)
