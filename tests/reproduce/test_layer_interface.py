"""Jenga's Figures 4 and 9 to 11 as its interface and its memory have them; others would differ."""

from __future__ import annotations

import pytest

from quire.control.memory.policies import POLICIES
from quire.jenga import Request
from quire.reproduce import eviction_orders, layer_interface
from quire.reproduce.eviction_orders import ORDERS, Rate, alignment, balance, judged
from quire.reproduce.layer_interface import SlidingWindowLayer, figure_9, figure_10, figure_11
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED


class TouchesAll(SlidingWindowLayer):
    """A window that says it used all tokens, and needs one fewer."""

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(1, r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def get_possible_prefix(self, is_hit: list[bool]) -> set[int]:  # type: ignore[override]
        return {p for p in range(1, len(is_hit) + 1) if all(is_hit[max(p - self.sliding + 1, 0) : p])}


def test_another_layer_type_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_interface, "SlidingWindowLayer", TouchesAll)
    assert DIFFERS in {one.verdict for one in figure_10().results}
    assert DIFFERS in {one.verdict for one in figure_11().results}


def test_another_policy_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_interface, "_policies", lambda: {**POLICIES, "window": POLICIES["full"]})
    assert [one.verdict for one in figure_9().results if "as a policy" in one.what] == [DIFFERS]


def test_what_eviction_leaves() -> None:
    assert balance() == {"balanced, aligned": [0, 24], "not balanced": [0, 0]}
    kept = alignment()
    assert kept["balanced, aligned"] > kept["not aligned"] > 0


def test_orders_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [Rate(name, "paper", 0.5 - 0.1 * i, 1.0) for i, name in enumerate(ORDERS)]
    paper = {"balanced, aligned": [0, 24], "not balanced": [0, 0]}, {"balanced, aligned": 20, "not aligned": 16}
    assert {one.verdict for one in judged(*paper, rates)} == {HOLDS, MEASURED}
    worse = {"balanced, aligned": [0, 0], "not balanced": [0, 24]}, {"balanced, aligned": 16, "not aligned": 16}
    verdicts = [one.verdict for one in judged(*worse, rates) if one.verdict != MEASURED]
    assert verdicts == [DIFFERS] * 3
    assert [one.ours for one in judged(*paper, rates)][-2:] == [1.25, 1.67]
    data = {"balance": paper[0], "alignment": paper[1], "rates": [one._asdict() for one in rates]}
    assert len(eviction_orders.draw(data).axes) == 2
    assert "50.0%" in eviction_orders.text(*paper, rates)


def test_orders_are_the_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace so short that nothing is evicted is found the same by every order."""
    case = eviction_orders.CASE._replace(workload="docqa:2:400@6", kv_gib=1.0)
    monkeypatch.setattr(eviction_orders, "CASE", case)
    found = eviction_orders.rates()
    assert len(found) == 2 * len(ORDERS)
    assert len({round(one.hit_rate, 6) for one in found}) == 1
    assert found[0].hit_rate > 0.5
