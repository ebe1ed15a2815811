"""What of a model each rank has: everything once, but for heads of keys that several ranks need."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.protocol.parallel_layout import VOCAB_ROWS_MULTIPLE, ParallelLayout, Shard


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 63, 64, 50_257])
def test_every_row_of_a_vocabulary_is_one_ranks(ranks: int, size: int) -> None:
    parts = ParallelLayout(tp=ranks).shards()
    assert [row for part in parts for row in part.vocab_range(size)] == list(range(size))
    padded = {part.padded_vocab_rows(size) for part in parts}
    assert len(padded) == 1
    assert 0 <= padded.pop() * ranks - size < ranks * VOCAB_ROWS_MULTIPLE


@pytest.mark.parametrize(("queries", "keys", "ranks"), [(4, 4, 4), (4, 2, 4), (32, 8, 4), (8, 1, 8), (28, 4, 2)])
def test_queries_lie_with_their_keys(queries: int, keys: int, ranks: int) -> None:
    """Each rank's query heads read its own heads of keys, and as many of these each as in the whole model, or all."""
    seen: Counter[int] = Counter()
    for part in ParallelLayout(tp=ranks).shards():
        own = part.head_ranges(queries, keys)
        assert {head * keys // queries for head in own.queries} == set(own.kv_heads)
        seen.update(own.kv_heads)
    assert set(seen) == set(range(keys))
    assert set(seen.values()) == {max(ranks // keys, 1)}


def test_parts_of_a_size() -> None:
    assert [list(Shard(rank, 3).shard_range(6)) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(AssertionError, match="7 is not a multiple of 3"):
        Shard(0, 3).shard_range(7)
