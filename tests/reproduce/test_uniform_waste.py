"""Jenga's counted figures: what the paper says holds where it can, and another arithmetic would differ."""

from __future__ import annotations

import pytest

from quire.reproduce import planned_pages, unlike_layers
from quire.reproduce.layer_kinds import MLLAMA, Kind, attention, kinds_of, named
from quire.reproduce.planned_pages import models, planned, planner_table
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.reproduce.unlike_layers import NAMES, figure_3, figure_7, of_images, of_length, page_layer, views, waste
from quire.vocabulary.specs import LayerSpec, ModelSpec


def test_waste_by_brute_force() -> None:
    kinds = [Kind("full", 2, 10), Kind("window 3", 4, 10, 3)]
    used = sum(10 * kind.layers for kind in kinds for p in range(8) if kind.most is None or p >= 8 - kind.most)
    assert waste(of_length(kinds, 8)) == pytest.approx(100 * (1 - used / (8 * 6 * 10)))
    assert waste(of_length(kinds, 3)) == 0
    assert waste(of_images(MLLAMA, 43, 6193)) == pytest.approx(79.59, abs=0.005)


def test_another_model_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlike_layers, "TEXT", 430)
    assert [result.verdict for result in figure_3().results] == [DIFFERS, HOLDS, HOLDS, HOLDS, MEASURED]


def test_addresses_are_those_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    assert views()["cross.1"] == page_layer(0, 2)
    found = views()
    monkeypatch.setattr(unlike_layers, "views", lambda: {**found, "cross.2": found["cross.1"]})
    differing = [result.what for result in figure_7().results if result.verdict == DIFFERS]
    assert differing == ["cross.2: start_ptr, page_size", "a small page is consecutive: its layers follow one another"]
    assert list(found) == NAMES


def test_kinds_of_a_model() -> None:
    assert named("ministral-8b") == [attention("full", 9, 8, 128), attention("window 32,768", 27, 8, 128, 32768)]
    layers = (LayerSpec(1, 8), LayerSpec(1, 8, shares=0), LayerSpec(1, 8, budget=40), LayerSpec(1, 8, chunk=4))
    kinds = kinds_of(ModelSpec("made up", layers, 64, 32, 16, 2, 1, 2000))
    found = [(kind.name, kind.layers, kind.most) for kind in kinds]
    assert found == [("full", 1, None), ("budget 40", 1, 40), ("chunk 4", 1, 4)]


def test_the_planner_says_what_it_computes_and_not_what_the_paper_does() -> None:
    found = {result.what: result for result in planner_table().results}
    assert found["the model with the largest LCM, in its small pages"].verdict == HOLDS
    sixteen, thirty_two = (found[f"Jamba 52B, states in {bits} bits: LCM, exact"] for bits in (16, 32))
    assert [(one.ours, one.verdict) for one in (sixteen, thirty_two)] == [(133, DIFFERS), (245, DIFFERS)]
    padded = [result.ours for what, result in found.items() if "padded by" in what]
    assert padded == [34, 62]
    assert [one.verdict for what, one in found.items() if "48 bytes" in what] == [HOLDS, HOLDS]


def test_every_model_of_the_paper_plans() -> None:
    for name, kinds in models().items():
        one = planned(kinds)
        for plan in (one.exact, one.chosen):
            assert all(plan.large_bytes == ratio * size for ratio, size in zip(plan.ratios, plan.sizes)), name
        assert one.padded <= 3
    assert planned(models()["Ministral 8B"]).exact.ratios == (3, 1)


def test_another_largest_model_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = models()
    monkeypatch.setattr(planned_pages, "models", lambda: {**known, "odd": [Kind("a", 1, 1009), Kind("b", 1, 16)]})
    assert planner_table().results[0].verdict == DIFFERS
