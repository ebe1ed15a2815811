"""Jenga's entries that only count, and the verdicts and pictures of all; and lines of code."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from papers import ENTRIES, jenga, jenga_examples
from papers.code_size import KERNELS, MEASURING, OTHER, PARTS, ROOT, code_lines, package, part_of, sizes
from papers.entry import BY_ARITHMETIC, DIFFERS, HOLDS, MEASURED, MISSED
from papers.layer_kinds import Kind, attention, kinds_of, named, page_plans, uniform_waste
from papers.unlike_serving import budgets
from quire.jenga import Request
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.policies import POLICIES
from quire.protocol.model_spec import LayerSpec, ModelSpec

Points = list[dict[str, Any]]
MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements" / "reproduce"
DOCUMENTS = {
    path.stem: content
    for path in MEASUREMENTS.glob("jenga-*.json")
    if (content := json.loads(path.read_text())).get("data")
}


def differing(name: str, points: Points) -> list[str]:
    return [one.what for one in ENTRIES[name].results(points) if one.verdict in (DIFFERS, MISSED)]


def scaled(field: str, factor: float, **where: Any) -> Callable[[Points], Points]:
    """Return a function that multiplies a field of the points with the values `where`."""
    return lambda points: [
        {**p, field: p[field] * factor} if where.items() <= p.items() and field in p else p for p in points
    ]


@pytest.mark.parametrize(("name", "change", "what"), [
    ("jenga-fig3", scaled("share", 1.1), "Gemma-2 9B, 8,192 tokens: wasted"),
    ("jenga-fig4", lambda points: [{**p, "left": [24, 0]} if "left" in p else p for p in points],
     "(b) not aligned: less of a text is left"),
    ("jenga-fig6", scaled("page", 2), "small pages of text tokens, by their ids"),
    ("jenga-fig6", scaled("large", 2), "large pages of the image tokens"),
    ("jenga-fig7", scaled("start", 2, layer="cross.2"), "a small page is consecutive: its layers follow one another"),
    ("jenga-fig12", scaled("kv", 2, way="inside"),
     f"{jenga.WAYS['inside']}: peak, beyond what it is without embeddings"),
    ("jenga-fig12", lambda points: points[1:], f"{jenga.WAYS['pages']}: encoder runs"),
    ("jenga-fig13", scaled("requests_per_s", 1.1, model="Llama", pages="jenga"),
     "llama3-8b, L4: LCM pages / uniform (within 3 %)"),
    ("jenga-fig13", scaled("requests_per_s", 0.5, pages="jenga"), "ministral-8b, H100: LCM pages / uniform (above 1)"),
    ("jenga-fig14", scaled("e2e", 1.1, rule="jenga"),
     "end to end within capacity: LCM pages from uniform ones, mean (at most the paper's)"),
    ("jenga-fig14-gpu", scaled("e2e", 1.2, by="real"),
     "uniform at the lower rate: simulated end to end, off by (limit: 0.15)"),
    ("jenga-fig15", scaled("decode_steps", 3, rule="jenga"),
     "LCM pages, bulk (ours), 54.4 GiB: steps that decode (at most)"),
    ("jenga-fig17", scaled("hit_rate", 0.9, way="paper"), "up to 3 articles equal (within 5 %)"),
    ("jenga-fig18", scaled("latency", 3, mode="pages"), "InternVL2 8B: latency, times that of off (no loss)"),
    ("jenga-fig18", scaled("encoder_runs", 2), 
     "one by one a picture is encoded once, without a cache in each chunk that has a part of it"),
    ("jenga-fig18", scaled("most", 2, mode="inside"), "InternVL2 8B, inside: peak of a request's memory, of off's"),
    ("jenga-fig19", scaled("requests_per_s", 1.1, way="Jenga"), "llama3-8b, L4: Jenga / vLLM-manual (within 3 %)"),
    ("jenga-fig19", scaled("requests_per_s", 2, way="vLLM-max"), "ministral-8b, H100: Jenga / vLLM-max (above 1)"),
    ("jenga-table1", lambda points: [{**p, "fits": not p["fits"]} for p in points], "jamba-52b*, L4, mmlu-pro@400"),
    ("jenga-fig13-mllama-gpu", scaled("requests_per_s", 0.5, way="jenga"), "throughput: LCM pages / uniform (above 1)"),
    ("jenga-fig13-llama-gpu", scaled("requests_per_s", 1.1, way="jenga"),
     "throughput: LCM pages / uniform (within 3 %)"),
    ("jenga-fig17-gpu", scaled("seconds", 2, by="real"), "jenga: simulated time, of the real (within 0.15)"),
    ("jenga-fig18-llava-gpu", scaled("encoder_runs", 2), "pages: encoder runs a request"),
])  # fmt: skip
def test_other_points_differ(name: str, change: Callable[[Points], Points], what: str) -> None:
    points = DOCUMENTS[name]["data"]
    assert what not in differing(name, points)
    assert what in differing(name, change(points))


def test_timelines_are_judged() -> None:
    ramp = [28] * 50 + [40] * 50 + [54] * 50

    def timelines(shares: list[int], wasted: dict[str, float]) -> Points:
        return [
            {"trace": trace, "rule": rule, "pages": rule,
             "memory": [[float(t), share, 100 - share, wasted[rule], 50, 2] for t, share in enumerate(shares)]}
            for trace in jenga.TRACES for rule in jenga.BOTH
        ]  # fmt: skip

    good = timelines(ramp, {"uniform": 62, "jenga": 0.04})
    assert jenga._wasted(good[0]) == pytest.approx(100 * 62 / 162)
    assert differing("jenga-fig16", good) == []
    assert len(differing("jenga-fig16", timelines([80] * 50, {"uniform": 20, "jenga": 20}))) == 4


# Runners


def test_models_plan_where_the_paper_has_them() -> None:
    """One that fits, one whose longest request uniform pages can't hold, one with vision, and one that is too large."""
    of = {case.label: case for case in jenga.ENTRIES["jenga-table1"].params["cases"]}
    small, long, seeing, too_large = budgets([
        of["llama3-8b, L4"], of["ministral-8b*, L4"], of["llama3.2-vision-11b*, L4"], of["jamba-52b*, L4"],
    ])  # fmt: skip
    assert small["left"] == pytest.approx(0.95 * 24e9 - 1.5e9 - small["weights"], abs=1)
    assert [one["fits"] for one in (small, long, seeing, too_large)] == [True, True, True, False]
    assert [one["uniform"] for one in (small, long, too_large)] == [True, False, False]
    assert seeing["weights"] > 2 * 895_000_000 + 9_775_000_000, "eyes aren't in FP8"
    assert too_large["left"] < -25e9


def test_lines_are_those_of_files_that_are_there(tmp_path: Path) -> None:
    listed = [name for names in jenga.TAKEN.values() for name in names]
    assert len(set(listed)) == len(listed)
    assert [name for name in listed if not (ROOT / name).exists()] in ([], ["worker/cross_attention.py"])
    (tmp_path / "jenga.py").write_text('"""A text."""\n\nx = 1  # a comment\n')
    (tmp_path / "kernel.cu").write_text("int x;\nint y;\n")
    assert sizes({"a": ["jenga.py", "b.py"], "b": ["**/*.cu"]}, tmp_path) == [
        {"part": "a", "files": 1, "lines": 3, "code": 1}, {"part": "b", "files": 1, "lines": 2, "code": 0},
    ]  # fmt: skip


def test_waste_by_brute_force(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [Kind("full", 2, 10), Kind("window 3", 4, 10, 3)]
    monkeypatch.setattr("papers.layer_kinds.models", lambda: {"made up": kinds})
    used = sum(kind.layers for kind in kinds for p in range(8) if kind.most is None or p >= 8 - kind.most)
    *parts, wasted = uniform_waste({"long": ("made up", 8, 0)})
    assert wasted["share"] == pytest.approx(100 * (1 - used / (8 * 6)))
    assert sum(one["share"] for one in (*parts, wasted)) == pytest.approx(100)
    assert uniform_waste({"short": ("made up", 3, 0)})[-1]["share"] == 0


def test_kinds_of_a_model() -> None:
    assert named("ministral-8b") == [attention("full", 9, 8, 128), attention("window 32,768", 27, 8, 128, 32768)]
    layers = (LayerSpec(1, 8), LayerSpec(1, 8, kv_source_layer=0), LayerSpec(1, 8, budget=40), LayerSpec(1, 8, chunk=4))
    kinds = kinds_of(ModelSpec("made up", layers, 64, 32, 16, 2, 1, 2000))
    found = [(kind.name, kind.layers, kind.most) for kind in kinds]
    assert found == [("full", 1, None), ("budget 40", 1, 40), ("chunk 4", 1, 4)]


def test_the_planner_says_what_it_computes_and_not_what_the_paper_does() -> None:
    points = page_plans(16)
    assert next(p["ratios"] for p in points if p["model"] == "Ministral 8B") == [3, 1]
    results = {one.what: (one.ours, one.verdict) for one in ENTRIES["jenga-x1"].results(points)}
    assert results["the model with the largest LCM, in its small pages"] == ("Jamba", BY_ARITHMETIC)
    jambas = [found for what, found in results.items() if what.endswith("LCM, exact")]
    assert jambas == [(133, DIFFERS), (245, DIFFERS), (84, BY_ARITHMETIC)]
    assert [ours for what, (ours, _) in results.items() if "padded by" in what] == [34, 62]


def test_orders_are_the_pools() -> None:
    """A trace so short that nothing is evicted is found the same by every order; the examples are the figure's."""
    params = jenga.ENTRIES["jenga-fig4"].params
    short = jenga.EVICTING._replace(workload="docqa:2:400@6", kv_gib=1.0)
    points = jenga_examples.eviction(**{**params, "runs": [run._replace(case=short) for run in params["runs"]]})
    assert [p["left"] for p in points if "left" in p] == [[0, 24], [0, 0], [20], [16]]
    rates = [p["hit_rate"] for p in points if "hit_rate" in p]
    assert len(rates) == 2 * len(jenga.ORDERS)
    assert max(rates) - min(rates) < 1e-6
    assert rates[0] > 0.5


def test_a_pool_that_knows_no_requests_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(TwoLevelPagePool):
        def allocate(self, group: int, count: int, owner: int | None = None) -> list[int]:
            return super().allocate(group, count, None)

    monkeypatch.setattr(jenga_examples, "TwoLevelPagePool", Forgetful)
    assert [result.verdict for result in ENTRIES["jenga-fig8"].run().results][:2] == [HOLDS, DIFFERS]


class TouchesAll(jenga_examples.SlidingWindowLayer):
    """A window that says it used all tokens, and needs one fewer."""

    def update_last_access(self, r: Request, time: int) -> None:
        for i in range(1, r.len + 1):
            self.evictor.update_last_access(r.page[i], time)

    def get_possible_prefix(self, is_hit: list[bool]) -> set[int]:  # type: ignore[override]
        return {p for p in range(1, len(is_hit) + 1) if all(is_hit[max(p - self.sliding + 1, 0) : p])}


def test_another_layer_type_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jenga_examples, "policy_of", lambda layer, horizon: POLICIES["full"])
    found = [one.verdict for one in ENTRIES["jenga-fig9"].run().results if "as a policy" in one.what]
    assert found == [MISSED, MISSED]
    monkeypatch.setattr(jenga_examples, "SlidingWindowLayer", TouchesAll)
    for name in ("jenga-fig10", "jenga-fig11"):
        assert DIFFERS in {one.verdict for one in ENTRIES[name].run().results}


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


counted = cache(package)  # counting takes seconds


def test_every_file_is_counted_once() -> None:
    found = counted()
    assert {size["part"] for size in found} == {*PARTS, OTHER}
    assert sum(size["files"] for size in found) == len(list(ROOT.rglob("*.py")))
    assert all(0 < size["code"] < size["lines"] for size in found)


def test_parts() -> None:
    paths = ("core/scheduler.py", "kernels/triton/rope.py", "models/decoder.py", "bench/runs.py", "llm.py")
    assert [part_of(Path(path)) for path in paths] == ["control plane", KERNELS, "models", MEASURING, OTHER]
    there = {str(path.relative_to(ROOT).with_suffix("")) for path in ROOT.rglob("*")}
    assert not {name for names in PARTS.values() for name in names} - there, "a part names a module that is gone"


def test_the_paper_stands_beside() -> None:
    python, kernels, *parts = ENTRIES["x4"].judge(counted()).results
    assert (python.paper, kernels.paper) == (8.5, 2.0)
    assert {result.verdict for result in (python, kernels, *parts)} == {MEASURED}
    serving = sum(result.ours for result in parts if result.what != MEASURING)
    assert python.ours == pytest.approx(serving, abs=0.05 * len(parts))
