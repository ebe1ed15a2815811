"""Entries that only count: Jenga's Figure 12, Table 1, waste and orders of eviction, and lines of code."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from papers import (
    code_taken,
    eviction_orders,
    large_pages,
    layer_interface,
    model_matrix,
    picture_steps,
    planned_pages,
    unlike_layers,
)
from papers.code_size import KERNELS, MEASURING, OTHER, PARTS, ROOT, code_lines, part_of, sizes
from papers.eviction_orders import ORDERS, Rate, alignment, balance
from papers.layer_kinds import MLLAMA, Kind, attention, kinds_of, named
from papers.model_matrix import PAPER, Cell, cell, judged
from papers.pagedattention import X4
from papers.planned_pages import models, planned, planner_table
from papers.result import DIFFERS, HOLDS, MEASURED
from papers.unlike_layers import of_images, of_length, waste
from papers.unlike_serving import L4
from papers.unlike_throughput import CASES
from quire.jenga import Request
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.policies import POLICIES
from quire.protocol.model_spec import LayerSpec, ModelSpec


def test_figure_12_is_the_papers() -> None:
    done = picture_steps.timelines()
    assert {one.verdict for one in done.results if one.verdict != MEASURED} == {HOLDS}
    assert len(picture_steps.draw(done.data).axes) == 3
    late = {
        way: [step._replace(leftover_embeddings=9) for step in picture_steps.figure_12(way)]
        for way in picture_steps.WAYS
    }
    verdicts = [one.verdict for one in picture_steps.judged(late)]
    assert verdicts[:6] == [DIFFERS] * 6
    assert picture_steps.peak(late["pages"]) == 16


def test_models_plan_where_the_paper_has_them() -> None:
    """Two that fit, one whose longest request uniform pages can't hold, and one that is too large."""
    small = cell("Llama", CASES["Llama"][1], "8B")
    assert (small.fits, small.uniform) == (True, True)
    assert small.left == pytest.approx(0.95 * 24e9 - 1.5e9 - small.weights, abs=1)
    long = cell("Ministral", CASES["Ministral"][1], "8B*")
    assert (long.fits, long.uniform) == (True, False)
    seeing = cell("Llama Vision", CASES["Llama Vision"][1], "11B*")
    assert seeing.fits
    assert seeing.weights > 2 * 895_000_000 + 9_775_000_000, "eyes aren't in FP8"
    too_large = cell("Jamba", model_matrix.JAMBA_L4, "OOM")
    assert too_large.fits is None
    assert too_large.left < -25e9
    results = judged([small, long, seeing, too_large])
    assert {one.verdict for one in results if one.verdict != MEASURED} == {HOLDS}
    assert [one.what for one in results if "too much" in one.what] == ["jamba-52b*, L4: too much by"]
    wrong = judged([small._replace(fits=False), too_large._replace(paper="52B*")])
    assert {one.verdict for one in wrong if one.verdict != MEASURED} == {DIFFERS}
    assert len(model_matrix.draw([one._asdict() for one in (small, too_large)]).axes) == 1


def test_all_of_table_1_is_there() -> None:
    assert list(PAPER) == ["Llama Vision", *(name for name in CASES if name != "Llama Vision")]
    for model, (_, *said) in PAPER.items():
        for case, size in zip(CASES[model], said):
            assert case.halved == size.endswith("*"), f"{model}, {size}"
            assert case.model.endswith(f"-{size.rstrip('*').lower()}")
    assert model_matrix.JAMBA_L4.device == L4
    assert Cell("", "", "", "", "", 1, -1).verdict == "OOM"


def test_lines_are_those_of_files_that_are_there(tmp_path: Path) -> None:
    listed = [name for names in code_taken.PARTS.values() for name in names]
    assert len(set(listed)) == len(listed)
    assert [name for name in listed if not (ROOT / name).exists()] in ([], ["worker/cross_attention.py"])
    (tmp_path / "jenga.py").write_text('"""A text."""\n\nx = 1  # a comment\n')
    (tmp_path / "kernel.cu").write_text("int x;\nint y;\n")
    assert [size[1:] for size in code_taken.sizes(tmp_path) if size.files] == [(1, 3, 1)]
    assert code_taken.foreign(tmp_path) == 2
    assert code_taken.foreign() == 0
    assert code_taken.code_taken().results[1].verdict == HOLDS


def test_waste_by_brute_force() -> None:
    kinds = [Kind("full", 2, 10), Kind("window 3", 4, 10, 3)]
    used = sum(10 * kind.layers for kind in kinds for p in range(8) if kind.most is None or p >= 8 - kind.most)
    assert waste(of_length(kinds, 8)) == pytest.approx(100 * (1 - used / (8 * 6 * 10)))
    assert waste(of_length(kinds, 3)) == 0
    assert waste(of_images(MLLAMA, 43, 6193)) == pytest.approx(79.59, abs=0.005)


def test_kinds_of_a_model() -> None:
    assert named("ministral-8b") == [attention("full", 9, 8, 128), attention("window 32,768", 27, 8, 128, 32768)]
    layers = (LayerSpec(1, 8), LayerSpec(1, 8, kv_source_layer=0), LayerSpec(1, 8, budget=40), LayerSpec(1, 8, chunk=4))
    kinds = kinds_of(ModelSpec("made up", layers, 64, 32, 16, 2, 1, 2000))
    found = [(kind.name, kind.layers, kind.most) for kind in kinds]
    assert found == [("full", 1, None), ("budget 40", 1, 40), ("chunk 4", 1, 4)]


def test_the_planner_says_what_it_computes_and_not_what_the_paper_does() -> None:
    found = {result.what: result for result in planner_table().results}
    assert found["the model with the largest LCM, in its small pages"].verdict == HOLDS
    sixteen, thirty_two = (found[f"Jamba 52B, states in {bits} bits: LCM, exact"] for bits in (16, 32))
    assert [(one.ours, one.verdict) for one in (sixteen, thirty_two)] == [(133, DIFFERS), (245, DIFFERS)]
    assert planned(models()["Ministral 8B"]).exact.small_pages_per_large == (3, 1)
    padded = [result.ours for what, result in found.items() if "padded by" in what]
    assert padded == [34, 62]
    assert [one.verdict for what, one in found.items() if "48 bytes" in what] == [HOLDS, HOLDS]


def test_what_eviction_leaves() -> None:
    assert balance() == {"balanced, aligned": [0, 24], "not balanced": [0, 0]}
    kept = alignment()
    assert kept["balanced, aligned"] > kept["not aligned"] > 0


def test_orders_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [Rate(name, "paper", 0.5 - 0.1 * i, 1.0) for i, name in enumerate(ORDERS)]
    paper = {"balanced, aligned": [0, 24], "not balanced": [0, 0]}, {"balanced, aligned": 20, "not aligned": 16}
    assert {one.verdict for one in eviction_orders.judged(*paper, rates)} == {HOLDS, MEASURED}
    worse = {"balanced, aligned": [0, 0], "not balanced": [0, 24]}, {"balanced, aligned": 16, "not aligned": 16}
    verdicts = [one.verdict for one in eviction_orders.judged(*worse, rates) if one.verdict != MEASURED]
    assert verdicts == [DIFFERS] * 3
    assert [one.ours for one in eviction_orders.judged(*paper, rates)][-2:] == [1.25, 1.67]
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


# Others would differ


def test_a_ledger_that_knows_no_requests_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(TwoLevelPagePool):
        def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
            return super().allocate(group, count, None)

    monkeypatch.setattr(large_pages, "TwoLevelPagePool", Forgetful)
    assert [result.verdict for result in large_pages.figure_8().results][:2] == [HOLDS, DIFFERS]


def test_other_places_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found, free = large_pages.walk()
    moved = [one._replace(large=one.large + 1, page=one.page + 2) for one in found]
    monkeypatch.setattr(large_pages, "walk", lambda: (512, moved, [*free[:2], 2]))
    assert [result.verdict for result in large_pages.figure_6().results] == [DIFFERS] * 3 + [HOLDS] + [DIFFERS] * 2


class TouchesAll(layer_interface.SlidingWindowLayer):
    """A window that says it used all tokens, and needs one fewer."""

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(1, r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def get_possible_prefix(self, is_hit: list[bool]) -> set[int]:  # type: ignore[override]
        return {p for p in range(1, len(is_hit) + 1) if all(is_hit[max(p - self.sliding + 1, 0) : p])}


def test_another_layer_type_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_interface, "SlidingWindowLayer", TouchesAll)
    for figure in (layer_interface.figure_10, layer_interface.figure_11):
        assert DIFFERS in {one.verdict for one in figure().results}


def test_another_policy_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_interface, "_policies", lambda: {**POLICIES, "window": POLICIES["full"]})
    assert [one.verdict for one in layer_interface.figure_9().results if "as a policy" in one.what] == [DIFFERS]


def test_another_model_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlike_layers, "TEXT", 430)
    assert [result.verdict for result in unlike_layers.figure_3().results] == [DIFFERS, HOLDS, HOLDS, HOLDS, MEASURED]


def test_addresses_are_those_of_views(monkeypatch: pytest.MonkeyPatch) -> None:
    found = unlike_layers.views()
    monkeypatch.setattr(unlike_layers, "views", lambda: {**found, "cross.2": found["cross.1"]})
    differing = [result.what for result in unlike_layers.figure_7().results if result.verdict == DIFFERS]
    assert differing == ["cross.2: start_ptr, page_size", "a small page is consecutive: its layers follow one another"]


def test_another_largest_model_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    known = models()
    monkeypatch.setattr(planned_pages, "models", lambda: {**known, "odd": [Kind("a", 1, 1009), Kind("b", 1, 16)]})
    assert planner_table().results[0].verdict == DIFFERS


# Lines of code

CODE = {
    '"""Documentation,\nof two lines."""\n': 0,
    "# a comment\n\n\n": 0,
    "x = 1  # said of it\n": 1,
    "def f():\n    '''What it does.'''\n    return 1\n": 2,
    "x = (\n    # why\n    'text'  # what\n)\n": 3,
    "x = '''a\nb\n'''\n": 3,
    "f(\n    1,\n\n    2,\n)\n": 4,
    "class A:\n    '''Alone.'''\n": 1,
}


@pytest.mark.parametrize("source", CODE)
def test_lines_of_code(source: str, tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(source)
    assert code_lines(path) == CODE[source]


counted = cache(lambda: list(sizes()))  # counting takes seconds


def test_every_file_is_counted_once() -> None:
    found = counted()
    assert {size.part for size in found} == {*PARTS, OTHER}
    assert sum(size.files for size in found) == len(list(ROOT.rglob("*.py")))
    assert all(0 < size.code < size.lines for size in found)


def test_parts() -> None:
    paths = ("core/scheduler.py", "kernels/triton/rope.py", "models/llama.py", "bench/runs.py", "llm.py")
    assert [part_of(Path(path)) for path in paths] == ["control plane", KERNELS, "models", MEASURING, OTHER]
    there = {str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("*")}
    assert not {name for names in PARTS.values() for name in names} - there, "a part names a module that is gone"


def test_the_paper_stands_beside() -> None:
    python, kernels, *parts = X4.results([size._asdict() for size in counted()])
    assert (python.paper, kernels.paper) == (8.5, 2.0)
    assert {result.verdict for result in (python, kernels, *parts)} == {MEASURED}
    serving = sum(result.ours for result in parts if result.what != MEASURING)
    assert python.ours == pytest.approx(serving, abs=0.05 * len(parts))
