"""Any calls of the two-level ledger: audited, against brute force and the one-level ledger, and with bugs planted."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from large_walk import OPS, SIZES, Walk, ratios_of

from quire.control.memory.large import LargePages
from quire.control.memory.pages import Ledger
from quire.control.memory.partial import Partial


def walked(seed: int, steps: int, ratios: list[int] | None = None) -> Walk:
    rng = Random(seed)
    walk = Walk(rng, ratios)
    for _ in range(steps):
        walk.act(rng.choice(OPS), rng)
    walk.drained()
    return walk


def many() -> None:
    for seed in range(40):
        walked(seed, 150)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_any_calls(sizes: list[int]) -> None:
    """They evict large pages and small ones, give large pages to other groups, and run short."""
    walks = [walked(seed, 150, ratios_of(sizes)) for seed in range(12)]
    assert sum(walk.served for walk in walks) > 50
    assert sum(walk.refused for walk in walks) > 0
    counts = [walk.pages.counts() for walk in walks]
    assert sum(count.evicted_large for count in counts) > 0
    assert sum(count.rebound for count in counts) > 0
    assert (sum(count.evicted_small for count in counts) > 0) is (max(ratios_of(sizes)) > 1)


class Calls(RuleBasedStateMachine):
    """The same, drawn so that a failure is made small."""

    @initialize(rng=st.randoms(use_true_random=False))
    def build(self, rng: Random) -> None:
        self.walk = Walk(rng)

    @rule(op=st.sampled_from(OPS), rng=st.randoms(use_true_random=False))
    def act(self, op: str, rng: Random) -> None:
        self.walk.act(op, rng)

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.drained()


def test_any_calls_drawn() -> None:
    run_state_machine_as_test(Calls, settings=settings(max_examples=40, stateful_step_count=30))


@pytest.mark.parametrize("seed", range(20))
def test_with_one_small_page_a_large_one_it_evicts_what_one_level_evicts(seed: int) -> None:
    """The same contents are cached after every call."""
    rng, count = Random(seed), 12
    two, one = LargePages([1, 1], count), Ledger([range(1, count + 1)] * 2)
    held: list[tuple[int, int, int]] = []  # group, and the page in either
    for step in range(400):
        op, g = rng.random(), rng.randrange(2)
        needs = [0, 0]
        needs[g] = rng.randint(1, 4)
        assert two.reserve(needs) is one.reserve(needs)
        if op < 0.5 and one.affords(needs):
            held += zip([g] * needs[g], two.take_all(g, needs[g], step), one.take_all(g, needs[g], step))
        elif op < 0.7 and held:
            for g, a, b in rng.sample(held, min(4, len(held))):
                for ledger, page in ((two, a), (one, b)):
                    ledger.publish(g, page, (step % 50).to_bytes())
        elif op < 0.8 and one.index[g]:
            key = rng.choice(sorted(one.index[g]))
            pair = two.find(g, key), one.find(g, key)
            assert pair[0] is not None
            assert pair[1] is not None
            two.share(g, pair[0])
            one.share(g, pair[1])
            held.append((g, *pair))
        elif held:
            g, a, b = held.pop(rng.randrange(len(held)))
            two.release(g, [a])
            one.release(g, [b])
        assert [set(index) for index in two.index] == [set(index) for index in one.index]
        assert (two.used, two.evictions) == (one.used, one.evictions)
    assert one.evictions > 20


def harm(name: str, patch: Callable[[str, Any], None]) -> None:
    """Plant a bug."""
    if name == "a second page takes a key that is there":

        def publish(pages: LargePages, group: int, page: int, key: bytes) -> None:
            if pages.keys[group][page] is None:
                pages.keys[group][page], pages.index[group][key] = key, page

        patch("publish", publish)
    elif name == "what a request leaves empty is lost":
        patch("leave", lambda pages, owner: [partial.living.discard(owner) for partial in pages.partial])
    elif name == "a key stays on a page that goes to another group":
        forget = LargePages._forget

        def kept(pages: LargePages, group: int, page: int) -> None:
            key = pages.keys[group][page]
            forget(pages, group, page)
            pages.keys[group][page] = key

        patch("_forget", kept)
    elif name == "one group gets pages when another fails":
        left = LargePages._left
        patch("_left", lambda pages, needs, *rest, **how: left(pages, [*needs[:-1], 0], *rest, **how))
    elif name == "a large page more may be taken than is to spare":
        reserve = LargePages.reserve

        def greedy(pages: LargePages, *args: Any, **kwargs: Any) -> bool:
            there = reserve(pages, *args, **kwargs)
            pages.slack += there
            return there

        patch("reserve", greedy)
    elif name == "what is found counts as pages, not as large pages":
        resting = LargePages.resting
        patch("resting", lambda pages, found: resting(pages, found)._replace(large=()))
    elif name == "a reclaimable large page is lost":
        release = LargePages._release
        patch("_release", lambda pages, group, table: release(pages, group, table)[1:])
    else:
        assert name == "a fork is not counted"
        patch("share_all", lambda pages, group, table: None)


PLANTED = {  # bugs, and the message of the check that finds them
    "a second page takes a key that is there": "two pages have the same key",
    "what a request leaves empty is lost": "what a request left empty is lost",
    "a key stays on a page that goes to another group": r"page \d+ is empty and has a key",
    "one group gets pages when another fails": "what was found took more than was counted",
    "a large page more may be taken than is to spare": r"no large page is left for group \d+: what is taken",
    "what is found counts as pages, not as large pages": "what was found took more than was counted",
    "a reclaimable large page is lost": r"large page \d+ is reclaimable and not in the queue",
    "a fork is not counted": "reference counts differ from the tables that name the pages",
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    harm(name, lambda method, function: monkeypatch.setattr(LargePages, method, function))
    with pytest.raises(AssertionError, match=f"^{PLANTED[name]}"):
        many()


def test_planted_an_owner_that_left_is_offered_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that become empty after their request left are everybody's too."""

    def add(partial: Partial, home: int) -> None:
        found = partial.by.setdefault(partial.owner[home], type(partial.by)())
        found[home] = None  # type: ignore[index]

    monkeypatch.setattr(Partial, "add", add)
    with pytest.raises(AssertionError, match=r"^what a request left empty is lost"):
        many()


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_hundred_thousand_requests_leave_nothing_behind() -> None:
    rng = Random(0)
    for ratios in ([1, 84], [5, 3, 2], [3, 2, 24, 8], [3, 1]):
        walk = Walk(rng, ratios)
        walk.pages = LargePages(ratios, 40, "bulk")
        while walk.served < 25_000:
            op = rng.choice(OPS)
            if op == "begin" or walk.tables:
                getattr(walk, op)(rng)
            if rng.random() < 0.001:
                walk.pages.check(walk.named())
        walk.drained()
        assert walk.pages.evictions > 10_000


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_any_calls_at_length() -> None:
    run_state_machine_as_test(Calls, settings=settings(max_examples=1000, stateful_step_count=60))
    for seed in range(500):
        walked(seed, 600)
