"""Any calls of the two-level ledger: audited, against brute force and the one-level ledger, and with bugs planted."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from large_walk import OPS, SIZES, Walk, ratios_of
from test_planted import Plant, found_by, instead_of

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


@pytest.mark.parametrize("seed", range(20))
def test_with_one_small_page_a_large_one_it_evicts_what_one_level_evicts(seed: int) -> None:
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


@instead_of(LargePages, "publish")
def a_second_page_takes_a_key(publish: Any, pages: LargePages, group: int, page: int, key: bytes) -> None:
    if pages.keys[group][page] is None:
        pages.keys[group][page], pages.index[group][key] = key, page


@instead_of(LargePages, "_forget")
def a_key_stays(forget: Any, pages: LargePages, group: int, page: int) -> None:
    key = pages.keys[group][page]
    forget(pages, group, page)
    pages.keys[group][page] = key


@instead_of(LargePages, "reserve")
def more_than_is_to_spare(reserve: Any, pages: LargePages, *args: Any, **kwargs: Any) -> bool:
    there: bool = reserve(pages, *args, **kwargs)
    pages.slack += there
    return there


@instead_of(Partial, "add")
def an_owner_that_left_is_offered_to(add: Any, partial: Partial, home: int) -> None:
    """Pages that become empty after their request left are everybody's too."""
    found = partial.by.setdefault(partial.owner[home], type(partial.by)())
    found[home] = None  # type: ignore[index]


PLANTED: dict[str, tuple[Plant, str]] = {  # bugs, and the message of the check that finds them
    "a second page takes a key that is there": (a_second_page_takes_a_key, "two pages have the same key"),
    "what a request leaves empty is lost": (
        instead_of(LargePages, "leave")(
            lambda leave, pages, owner: [one.living.discard(owner) for one in pages.partial]
        ),
        "what a request left empty is lost",
    ),
    "an owner that left is offered to": (an_owner_that_left_is_offered_to, "what a request left empty is lost"),
    "a key stays on a page that goes to another group": (a_key_stays, r"page \d+ is empty and has a key"),
    "one group gets pages when another fails": (
        instead_of(LargePages, "_left")(
            lambda left, pages, needs, *rest, **how: left(pages, [*needs[:-1], 0], *rest, **how)
        ),
        "what was found took more than was counted",
    ),
    "a large page more may be taken than is to spare": (
        more_than_is_to_spare,
        r"no large page is left for group \d+: what is taken",
    ),
    "what is found counts as pages, not as large pages": (
        instead_of(LargePages, "resting")(lambda resting, pages, found: resting(pages, found)._replace(large=())),
        "what was found took more than was counted",
    ),
    "a reclaimable large page is lost": (
        instead_of(LargePages, "_release")(lambda release, *args: release(*args)[1:]),
        r"large page \d+ is reclaimable and not in the queue",
    ),
    "a fork is not counted": (
        instead_of(LargePages, "share_all")(lambda *args: None),
        "reference counts differ from the tables that name the pages",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, message = PLANTED[name]
    plant(monkeypatch)
    with found_by(message):
        for seed in range(40):
            walked(seed, 150)


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
    for seed in range(500):
        walked(seed, 600)
