"""The router: its choices, and its accounts of work and keys."""

from __future__ import annotations

import random

import pytest

from quire.router.router import FIRST_MEAN_OUTPUT, POLICIES, Router, WorkCosts

COSTS = WorkCosts(0.001, 0.002)
PAGE = 16


def keys(name: str, pages: int) -> list[bytes]:
    return [f"{name}{i}".encode() for i in range(pages)]


def router(policy: str = "prefix", count: int = 3) -> Router:
    return Router(count, policy, COSTS, PAGE)


def test_a_request_goes_where_its_prefix_is() -> None:
    one = router()
    one.update_keys(1, keys("a", 10), [])
    assert one.choose(keys("a", 10), 170) == 1
    assert one.choose(keys("b", 10), 170) == 0
    one.update_keys(1, [], keys("a", 10)[:1])
    assert one.choose(keys("a", 10), 170) == 0, "a prefix without its first page can't be found"


def test_a_prefix_that_is_being_computed_counts() -> None:
    one = router()
    one.add("first", 2, keys("a", 100), 1600, 10)
    assert one.choose(keys("a", 100), 1600) == 2
    one.finish("first")
    assert one.choose(keys("a", 100), 1600) == 0, "it was not stored"


def test_work_outweighs_a_short_prefix() -> None:
    one = router(count=2)
    one.update_keys(1, keys("a", 2), [])
    one.add("long", 1, keys("b", 50), 800, 100)
    assert one.choose(keys("a", 2), 40) == 0


def test_other_policies() -> None:
    one = router("round-robin")
    one.update_keys(0, keys("a", 50), [])
    for i in range(6):
        at = one.choose(keys("a", 50), 810)
        assert at == i % 3
        one.add(str(i), at, keys("a", 50), 810, 10)
    one = router("least-loaded")
    one.add("long", 0, (), 1000, 100)
    one.add("short", 1, (), 10, 100)
    one.add("middle", 2, (), 100, 100)
    assert one.choose((), 10) == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_draining_and_refusing_replicas_are_left_out(policy: str) -> None:
    one = router(policy)
    one.replicas[0].is_draining = True
    assert one.choose((), 10) == 1
    assert one.choose((), 10, refused={1}) == 2
    assert one.choose((), 10, refused={1, 2}) is None


def test_output_tokens_become_less_and_never_negative() -> None:
    one = router(count=1)
    replica = one.replicas[0]
    one.add("a", 0, (), 100, 10)
    assert replica.seconds_left(COSTS) == pytest.approx(0.1 + 0.02)
    one.record_tokens("a", 4)
    assert replica.seconds_left(COSTS) == pytest.approx(0.012)
    one.record_tokens("a", 20)
    assert replica.seconds_left(COSTS) == pytest.approx(0)
    one.finish("a")
    assert one.mean_output == pytest.approx(FIRST_MEAN_OUTPUT + (24 - FIRST_MEAN_OUTPUT) / 64)


def test_accounts_are_empty_at_the_end() -> None:
    """Random requests; afterwards nothing is left, and each request was counted once."""
    rng, one, names = random.Random(1), router(), list[str]()
    for i in range(2000):
        if names and rng.random() < 0.5:
            name = names.pop(rng.randrange(len(names)))
            for _ in range(rng.randrange(3)):
                one.record_tokens(name, rng.randrange(1, 300))
            one.finish(name)
        else:
            prompt = keys(str(rng.randrange(5)), rng.randrange(8))
            at = one.choose(prompt, 16 * len(prompt) + 1)
            assert at is not None
            one.add(str(i), at, prompt, 16 * len(prompt) + 1, rng.randrange(1, 500))
            names.append(str(i))
        for replica in one.replicas:
            assert replica.prompt_tokens >= 0
            assert replica.output_tokens > -1e-6
    for name in names:
        one.finish(name)
    for replica in one.replicas:
        assert not replica.computing
        assert replica.prompt_tokens == 0
        assert replica.output_tokens == pytest.approx(0, abs=1e-6)
