"""Jenga's Figure 12: keys and values beside embeddings of a picture, over the chunks of its prompt."""

from __future__ import annotations

import pytest

from papers.figure_12 import StepUsage, figure_12


def test_a_embeddings_are_freed_as_chunks_consume_them() -> None:
    """[t0 i0 i1], then [i2 i3 t1], then a decode: the picture is encoded once, two embeddings go with each chunk."""
    assert figure_12("pages") == [
        StepUsage(tokens=3, encodes=True, kv=3, free_places=0, embeddings=4, leftover_embeddings=2),
        StepUsage(tokens=3, encodes=False, kv=6, free_places=0, embeddings=2, leftover_embeddings=0),
        StepUsage(tokens=1, encodes=False, kv=7, free_places=0, embeddings=0, leftover_embeddings=0),
    ]


def test_b_embeddings_lie_where_keys_and_values_will() -> None:
    """The first step has places for all of the prompt, and nothing beside them."""
    assert figure_12("inside") == [
        StepUsage(tokens=3, encodes=True, kv=3, free_places=3, embeddings=0, leftover_embeddings=0),
        StepUsage(tokens=3, encodes=False, kv=6, free_places=0, embeddings=0, leftover_embeddings=0),
        StepUsage(tokens=1, encodes=False, kv=7, free_places=0, embeddings=0, leftover_embeddings=0),
    ]


def test_without_a_cache_each_chunk_encodes() -> None:
    assert [step.encodes for step in figure_12("off")] == [True, True, False]


@pytest.mark.parametrize("chunk", [1, 2, 5, 8])
def test_the_peak_is_no_more_than_a_chunk_above_the_tokens(chunk: int) -> None:
    steps = figure_12("pages", text=(3, 5), picture=12, chunk=chunk)
    assert sum(step.encodes for step in steps) == 1
    whole = 3 + 12 + 5
    assert all(step.leftover_embeddings + step.kv <= whole + 2 for step in steps)
    assert steps[-1].leftover_embeddings == 0
