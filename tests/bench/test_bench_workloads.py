"""The numbers of the workloads, fixed: another engine was measured on them, so they must never change."""

from __future__ import annotations

import numpy as np
import pytest

from quire.bench.workloads import MAX_PROMPT_TOKENS, parse, poisson
from quire.errors import StartupError

# From the generators that the other engines' runs used: name, seed, first lengths, sums of prompts and of outputs.
KNOWN = [
    ("sharegpt@1000", 0, [(81, 669), (58, 277), (159, 248)], 133485, 304585),
    ("sharegpt@64", 5, [(24, 791)], 7095, 15577),
    ("alpaca@1000", 0, [(17, 112), (14, 50), (23, 45)], 17797, 57453),
    ("alpaca@64", 5, [(9, 130)], 1042, 2885),
    ("longdoc@1000", 0, [(101785, 78), (90033, 54), (83113, 59)], 83378031, 75456),
    ("longdoc@64", 5, [(91894, 51)], 5226383, 4788),
    ("fixed:128:64@3", 0, [(128, 64)] * 3, 384, 192),
    ("shared:512:32:16@2", 0, [(544, 16)] * 2, 1088, 32),
]


@pytest.mark.parametrize(("name", "seed", "first", "prompts", "outputs"), KNOWN)
def test_lengths(name: str, seed: int, first: list[tuple[int, int]], prompts: int, outputs: int) -> None:
    lengths = parse(name).lengths(seed)
    assert lengths[: len(first)] == first
    assert sum(prompt for prompt, _ in lengths) == prompts
    assert sum(output for _, output in lengths) == outputs


@pytest.mark.parametrize(
    ("name", "start", "total", "last"),
    [
        ("sharegpt@1000", [15142, 16378, 24160, 30405], 2135623230, 19126),
        ("fixed:128:128@32", [15142, 16378, 24160, 30405], 66137590, 27032),
        ("shared:512:32:32@32", [15142, 16378, 24160], 283253840, 29215),
    ],
)
def test_prompts(name: str, start: list[int], total: int, last: int) -> None:
    workload = parse(name)
    jobs = workload.jobs(32000)
    assert jobs[0].prompt[: len(start)] == start
    assert sum(sum(job.prompt) for job in jobs) == total
    assert jobs[-1].prompt[-1] == last
    assert [(len(job.prompt), job.output) for job in jobs] == workload.lengths()


def test_shared_prefix() -> None:
    assert parse("shared:5:3:2@4").jobs(100) == [
        ([47, 50, 70, 86, 12, 21, 75, 85], 2),
        ([47, 50, 70, 86, 12, 29, 34, 79], 2),
        ([47, 50, 70, 86, 12, 43, 31, 76], 2),
        ([47, 50, 70, 86, 12, 30, 42, 61], 2),
    ]


def test_tokens_are_plain_and_within_the_vocabulary() -> None:
    tokens = [token for job in parse("alpaca@50").jobs(64, seed=3) for token in job.prompt]
    assert {type(token) for token in tokens} == {int}
    assert (min(tokens), max(tokens)) == (10, 53)


@pytest.mark.parametrize(
    "name",
    [
        "", "sharegpt", "sharegpt@", "sharegpt@0", "sharegpt@-1", "sharegpt@1e3", "sharegpt@100001", "wmt@10",
        "fixed@4", "fixed:1@4", "fixed:1:2:3@4", "fixed:0:1@4", "fixed:1:x@4", "fixed:1:99999999999@4",
        "shared:1:2@3", "sharegpt:1@3", "alpaca@٣", "alpaca@" + "9" * 5000,
    ],
)  # fmt: skip
def test_bad_names_say_what_was_expected(name: str) -> None:
    with pytest.raises(StartupError, match=r"Expected sharegpt@N, alpaca@N, longdoc@N, fixed:IN:OUT@N") as caught:
        parse(name)
    assert len(str(caught.value)) < 300


def test_bounds() -> None:
    with pytest.raises(StartupError, match="vocabulary of more than 20"):
        parse("alpaca@1").jobs(20)
    with pytest.raises(StartupError, match=f"At most {MAX_PROMPT_TOKENS:,}"):
        parse("fixed:100000:1@100000").jobs(32000)


def test_poisson_arrivals() -> None:
    times = poisson(20_000, 4.0, seed=1)
    assert times == poisson(20_000, 4.0, seed=1)
    assert times != poisson(20_000, 4.0, seed=2)
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)  # exponential: deviation equals mean
