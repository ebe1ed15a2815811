"""Page sizes of the paper's models, by its own numbers and by ours; and that every plan is one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.memory.jenga.page_sizes import (
    MAX_LARGE_BYTES,
    MAX_PADDING,
    PAGE_ALIGNMENT,
    LayerType,
    PagePlan,
    max_large_bytes,
    max_page,
    plan_pages,
    split_into_equal_sets,
)

KIB, MIB = 2**10, 2**20
PAGE = 16  # tokens


def tokens(name: str, layers: int, unit: int) -> LayerType:
    """Pages of `layers` layers that keep `unit` bytes of a token each."""
    return LayerType(name, PAGE * layers * unit)


def jamba(ssm_bytes: int) -> list[LayerType]:
    """4 attention layers, and 28 states: 3 inputs of a convolution in 16 bits, and 16 numbers of each of 8,192
    channels."""
    return [tokens("attention", 4, 4096), LayerType("mamba", 28 * 8192 * (3 * 2 + 16 * ssm_bytes))]


GEMMA_27B, GEMMA_2B = [tokens("full", 23, 8192), tokens("window", 23, 8192)], [tokens("draft", 13, 4096)] * 2
MINISTRAL = [tokens("full", 9, 4096), tokens("window", 27, 4096)]
MLLAMA = [tokens("self", 32, 4096), tokens("cross", 8, 4096)]


def test_jamba_as_its_shape_says_and_not_as_the_paper_does() -> None:
    """The paper has 84, without the formats that it counted with. 84 pages of 16 tokens are its 1,344 tokens."""
    half, single = plan_pages(jamba(2), None), plan_pages(jamba(4), None)
    assert (half.small_pages_per_large, half.large_bytes) == ((133, 4), 33.25 * MIB)
    assert (single.small_pages_per_large, single.large_bytes) == ((245, 4), 61.25 * MIB)
    half, single = plan_pages(jamba(2)), plan_pages(jamba(4))
    assert (half.small_pages_per_large, half.large_bytes, half.padding) == ((34, 1), 8.5 * MIB, (0, 196_608))
    assert (single.small_pages_per_large, single.large_bytes, single.padding) == ((62, 1), 15.5 * MIB, (0, 196_608))
    fp8 = plan_pages([LayerType("attention", PAGE * 4 * 2048), LayerType("mamba", 28 * 8192 * 48)], None)
    assert (fp8.small_pages_per_large, 84 * PAGE) == ((84, 1), 1344)


@pytest.mark.parametrize(
    ("model", "large", "ratios"),
    [
        (MLLAMA, 2 * MIB, (1, 4)),
        ([*MLLAMA, tokens("embedding", 1, 8192)], 2 * MIB, (1, 4, 16)),
        (GEMMA_27B, 2.875 * MIB, (1, 1)),
        (MINISTRAL, 1.6875 * MIB, (3, 1)),
        ([tokens("global", 2, 4096), tokens("local", 16, 4096)], 1 * MIB, (8, 1)),  # character.ai's, 8B
        ([tokens("budget", 4, 4096)] * 8, 256 * KIB, (1,) * 8),  # PyramidKV, 8B
        ([tokens("full", 32, 4096)], 2 * MIB, (1,)),
        ([tokens("full", 28, 2048), tokens("embedding", 1, 7168)], 896 * KIB, (1, 8)),  # LLaVA-OneVision 7B
        ([tokens("full", 32, 12288), tokens("embedding", 1, 6144)], 6 * MIB, (1, 64)),  # Phi-3-Vision
        ([tokens("full", 32, 4096), tokens("draft", 16, 2048)], 2 * MIB, (1, 4)),  # Llama 8B and 1B
        ([*MINISTRAL, tokens("draft", 16, 2048)], 13.5 * MIB, (24, 8, 27)),  # Ministral 8B and a draft of 1B
    ],
)  # fmt: skip
def test_the_models_of_the_paper(model: list[LayerType], large: float, ratios: tuple[int, ...]) -> None:
    plan = plan_pages(model)
    assert (plan.large_bytes, plan.small_pages_per_large) == (large, ratios)
    assert not any(plan.padding)


def test_pages_that_no_multiple_brings_together_are_fractions_of_a_large_page() -> None:
    """23 and 13 layers: 37.4 MiB without padding. 7 draft pages fill 2 pages of the model but for 1.1 %."""
    pair, gib = [*GEMMA_27B, *GEMMA_2B], 2**30
    exact, plan = plan_pages(pair, max_large_bytes(40 * gib)), plan_pages(pair, max_large_bytes(18 * gib))
    assert (exact.large_bytes, exact.small_pages_per_large) == (37.375 * MIB, (13, 13, 46, 46))
    assert plan.small_pages_per_large == (2, 2, 7, 7)
    assert plan.large_bytes == -(-5.75 * MIB // (14 * PAGE_ALIGNMENT)) * 14 * PAGE_ALIGNMENT
    assert plan == plan_pages(pair)
    assert not any(exact.padding)
    assert [round(100 * pad / kind.page_bytes, 1) for pad, kind in zip(plan.padding, pair)] == [0.0, 0.0, 1.1, 1.1]
    assert max_large_bytes(40 * gib) == 80 * MIB  # of a large pool it is a small part
    assert max_large_bytes(gib) == MAX_LARGE_BYTES


@given(st.integers(MIB, 10 * MIB), st.integers(MIB, 10 * MIB))
def test_two_types_always_have_a_small_large_page(one: int, other: int) -> None:
    """34 pages of the larger type are enough: the pages of the other that don't quite fill them are padded by 1/34."""
    plan = plan_pages([LayerType("one", one), LayerType("other", other)], 0)
    assert plan.large_bytes <= (1 + MAX_PADDING) * 34 * max(one, other)
    assert all(pad <= MAX_PADDING * kind.page_bytes for pad, kind in zip(plan.padding, plan.types))


def test_sets_of_layers_of_equal_bytes() -> None:
    assert split_into_equal_sets([(9, 4096), (27, 4096)]) == (9, 9)
    assert split_into_equal_sets([(10, 4096), (52, 4096)]) == (2, 2)
    assert split_into_equal_sets([(4, 8192), (6, 4096)]) == (1, 2)
    assert split_into_equal_sets([(23, 8192), (13, 4096)]) is None
    assert split_into_equal_sets([(3, 96), (5, 64)]) is None


sizes = st.lists(st.integers(1, 5000), min_size=1, max_size=4)
limits = st.none() | st.integers(16, 10**6)


@given(sizes, st.sampled_from([2, 8, 12, 16, 48]), limits)
def test_every_plan_is_one(numbers: list[int], row: int, limit: int | None) -> None:
    """Large pages are whole numbers of every type's pages, which are aligned, hold what they must and are padded no
    more than allowed; and no plan is larger than the exact one."""
    kinds = [LayerType(str(i), size * row, row) for i, size in enumerate(numbers)]
    plan, exact = plan_pages(kinds, limit), plan_pages(kinds, None)
    assert plan.large_bytes <= exact.large_bytes
    if limit is not None and exact.large_bytes > limit:
        multiples = _smallest(kinds, exact)
        assert plan.large_bytes == multiples if multiples <= limit else plan.large_bytes <= multiples
    for kind, size in zip(kinds, plan.sizes):
        assert size % PAGE_ALIGNMENT == size % row == plan.large_bytes % size == 0
        assert kind.page_bytes <= size <= max(kind.aligned_bytes, (1 + MAX_PADDING) * kind.page_bytes)
    assert max_page(kinds) >= max(kind.page_bytes for kind in kinds)
    assert max_page(kinds) % row == 0


def _smallest(kinds: list[LayerType], exact: PagePlan) -> int:
    """The same search for multiples, one type after another: no cleverness."""
    found = {1}
    for kind in kinds:
        grain = math.lcm(kind.page_multiple, PAGE_ALIGNMENT)
        most = kind.page_bytes + kind.page_bytes * MAX_PADDING
        steps = [*exact.sizes, *(2**k for k in range(40))]
        tried = {kind.aligned_bytes, *(-(-kind.page_bytes // s) * s for s in (math.lcm(x, grain) for x in steps))}
        found = {
            math.lcm(large, size) for large in found for size in tried if size <= most or size == kind.aligned_bytes
        }
    return min(found)
