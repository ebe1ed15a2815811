"""vAttention's tables 3 and 7, over memfd: every call of every page, one worker and two; the verdicts can fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engines_over_mappings import drawn

from quire.data.runner.virtual.latencies import BANDWIDTH, PAGES
from quire.reproduce import mapping_costs
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mapping_costs, "COUNT", 16)
    monkeypatch.setattr(mapping_costs, "ALONE", 0.01)


def test_latencies_of_every_call(small: None, tmp_path: Path) -> None:
    content = drawn("vattention-table3", tmp_path)
    points = content["data"]
    assert {point["page"] for point in points} == set(PAGES)
    assert {(point["kind"], point["loaded"]) for point in points if point["kind"] in ("map", "unmap")} == {
        (kind, loaded) for kind in ("map", "unmap") for loaded in (False, True)
    }  # fmt: skip
    assert {result["verdict"] for result in content["results"]} == {MEASURED}, "these are not the paper's calls"


def test_bandwidth_of_one_worker_and_of_two(small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def at_once(pair: Any, page: int) -> list[float]:
        seen.append((tuple(pair), page))
        return [2.0, 3.0]

    monkeypatch.setattr(mapping_costs, "at_once", at_once)
    points = drawn("vattention-table7", tmp_path)["data"]
    assert seen == [(("cpu", "cpu"), page) for page in PAGES]
    assert [point["gb_s"] for point in points if point["workers"] == 2] == [5.0] * 4
    assert len(points) == 12


def test_two_processes_map_beside_each_other() -> None:
    rates = mapping_costs.at_once(("cpu", "cpu"), 64 << 10, 0.1)
    assert len(rates) == 2
    assert min(rates) > 0


def test_verdicts_on_a_gpu() -> None:
    def calls(p50: float) -> list[dict[str, Any]]:
        row = {"device": "cuda:0", "page": PAGES[-1], "run": 1, "loaded": False, "p50": p50}
        return [{**row, "kind": kind} for kind in ("map", "access")]

    assert [result.verdict for result in mapping_costs.judged_3(calls(3.9))] == [HOLDS, HOLDS]
    assert [result.verdict for result in mapping_costs.judged_3(calls(80.0))] == [DIFFERS, DIFFERS]

    def mapped(rate: float) -> list[dict[str, Any]]:
        return [{"device": "cuda:0", "page": PAGES[-1], "workers": n, "load": "idle", "gb_s": n * rate} for n in (1, 2)]

    assert [result.verdict for result in mapping_costs.judged_7(mapped(BANDWIDTH[-1] + 1))] == [HOLDS] * 3
    assert [result.verdict for result in mapping_costs.judged_7(mapped(5.9))] == [DIFFERS] * 3
