"""Runners of real engines, small and on a CPU, and the claims about them, which can fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from papers import ENTRIES, engines, main, serving, unlike_serving
from papers.entry import DIFFERS, HOLDS, MEASURED, MET, MISSED
from papers.pagedattention import C1, ORDER
from quire.bench.drive import Decoding, Load, drive
from quire.bench.workloads import Job
from quire.config import MEMORIES, EngineConfig
from quire.startup.build import build


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def verdicts(name: str, points: list[dict[str, Any]]) -> list[str]:
    return [result.verdict for result in ENTRIES[name].results(points)]


def test_table_scopes_give_the_same_tokens() -> None:
    points = engines.table_scopes(1)
    assert [(p["scope"], p["run"]) for p in points[:2]] == [("model", 1), ("layer", 1)]
    assert verdicts("table-scope", points)[0] == MET
    slower = [{"scope": scope, "run": 1, "ms": ms} for scope, ms in (("model", 1.0), ("layer", 1.2))]
    assert verdicts("table-scope", [*slower, {"requests": 8, "same": 7}]) == [MISSED, DIFFERS]


def test_the_control_plane_has_a_number_for_each_load() -> None:
    points = engines.control_plane([(1, 128), (2, 1024)], 20)
    assert [(p["sequences"], p["context"]) for p in points] == [(1, 128), (2, 1024)]
    assert all(point["step"] >= point["schedule"] > 0 for point in points)
    assert verdicts("step-overhead", [{"sequences": 256, "context": 128, "step": 2001.0}]) == [MISSED]


def test_sharing_saves_what_sequences_have_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.histories.STORY", 200)
    points = engines.sharing({"alpaca": 3, "sharegpt": 1}, (2, 4, 6))
    assert all(0 < point["saved"] < 100 * (1 - 1 / point["width"]) for point in points)  # one sequence is not saved
    results = {result.what: result for result in ENTRIES["fig15"].results(points)}
    papers = [6.1, 8.5, 9.8, 37.6, 53.1, 55.2, 16.2, 30.5, 44.3, 66.3]
    assert [result.paper for result in results.values() if result.unit] == papers
    assert results["alpaca: beam search saves more than parallel sampling"].verdict == HOLDS


def test_sharing_is_of_whole_prompts() -> None:
    """Parallel samples of a prompt of whole pages that part at once share it and nothing else: 4 of 8 pages, twice."""
    engine = build(EngineConfig(threads=1, enable_prefix_caching=False, kv_tokens=1024)).engine
    jobs = [Job(list(range(10, 74)), 16)]
    _, facts = drive(engine, jobs, Load((0.0,)), Decoding(temperature=1.0, n=2))
    engine.close()
    # After the first step the two share 4 pages of 8; for the 15 steps that compute a token, 4 of 10 (the last one ends
    # both, and nothing is left to sample).
    assert facts["sharing_saved"] == pytest.approx((4 + 14 * 4) / (8 + 14 * 10))


def test_swapping_and_recomputing_are_measured() -> None:
    points = engines.swapping((1, 16), 64, 2)
    assert [point["page"] for point in points] == [1, 16]
    assert all(min(point["out"], point["back"], point["recompute"]) > 0 for point in points)
    assert len(verdicts("fig19a", points)) == 4
    paper = [{"page": page, "both": 2 * ms, "recompute": 2.0, "pieces": 4 * ms}
             for page, ms in ((1, 2.0), (16, 1.0), (256, 1.0))]  # fmt: skip
    assert verdicts("fig19a", paper) == [HOLDS] * 7
    other = [{**point, "recompute": 2.0 + 10 * i, "both": 1.5, "pieces": 1.0 + i}
             for i, point in enumerate(paper)]  # fmt: skip
    assert verdicts("fig19a", other) == [DIFFERS, HOLDS, DIFFERS, DIFFERS, DIFFERS, DIFFERS, DIFFERS]


@pytest.mark.soak
@pytest.mark.timeout(400)  # it waits for requests that come over time, the longer the busier the machine is
def test_latency_by_page_size() -> None:
    requests = {"cpu": {"sharegpt": 1, "alpaca": 3}}
    points = engines.page_sizes((1, 16, 32, 256), requests, {"cpu": {"sharegpt": 1, "alpaca": 2}}, {"cpu": 2304}, 0.9)
    assert [(p["trace"], p["page"]) for p in points[:2]] == [("alpaca", 1), ("alpaca", 16)]
    assert all(result.ours > 0 for result in ENTRIES["fig18b"].results(points))


def test_claims_about_page_sizes() -> None:
    def judged(sharegpt: dict[int, float], alpaca: dict[int, float]) -> list[str]:
        of = {"sharegpt": sharegpt, "alpaca": alpaca}
        return verdicts("fig18b", [{"trace": trace, "page": page, "latency": s} for trace in of
                                   for page, s in of[trace].items()])  # fmt: skip

    paper = {1: 3.0, 16: 1.0, 32: 1.0, 128: 1.05, 256: 1.6}, {1: 3.0, 16: 1.0, 32: 1.05, 128: 2.0, 256: 4.0}
    assert judged(*paper) == [HOLDS, HOLDS, HOLDS, MET]
    other = {1: 0.9, 16: 1.0, 32: 1.0, 128: 1.2, 256: 1.6}, {1: 0.9, 16: 1.0, 32: 1.2, 128: 1.0, 256: 1.1}
    assert judged(*other) == [DIFFERS, DIFFERS, DIFFERS, MISSED]


def test_the_kernels_part_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("papers.ENTRIES", {name: ENTRIES[name] for name in ("fig18a", "x1")})
    assert main(["--all"]) == 0  # what it can't measure doesn't stop the others
    told = capsys.readouterr()
    assert "fig18a: left out" in told.err
    assert "x1:" in told.out
    kernel = {"model": "m", "batch": 1, "context": 1, "contiguous": 10.0}
    points = [{**kernel, "paged": paged, "sdpa": 9.0} for paged in (12.5, 12.7)]
    assert verdicts("fig18a", points) == [HOLDS, DIFFERS]
    assert [result.ours for result in ENTRIES["fig18a"].results(points)] == [25.0, 27.0]


# One trace through every memory


def test_every_memory_serves_the_trace() -> None:
    alpaca = serving.Load("a100-13b", "alpaca")
    points = serving.whole([
        serving.Case({"run": "simulated", "memory": memory}, alpaca, memory, 0.2, 200.0) for memory in MEMORIES
    ])  # fmt: skip
    points += unlike_serving.memories(MEMORIES, C1.also[0].params["case"]._replace(workload="longdoc@2"))
    points += engines.memories(MEMORIES, "alpaca", 3, 1000.0, 8192, 2048)
    assert [point["memory"] for point in points] == 3 * list(MEMORIES)
    for point in points:
        assert 0 < point["used"] <= 100
        assert sum(point[kind] for kind in serving.KINDS) == pytest.approx(100)
        assert min(point["running"], point["latency"], point["requests_per_s"]) > 0
    done = C1.judge(points)
    assert sum(result.verdict == MEASURED for result in done.results) == 3 * 3 * len(MEMORIES)
    assert {result.real_or_simulated for result in done.results} == {"simulated", "real"}
    assert len(done.draw().axes) == 9


def test_claims_follow_the_order() -> None:
    def judged(memories: list[str]) -> list[str]:
        points = [{"memory": memory, "run": run, "used": 50 - 10.0 * i, "running": 20.0 - i, "latency": 0.1 + i}
                  for run in ("simulated", "windows", "real") for i, memory in enumerate(memories)]  # fmt: skip
        return [verdict for verdict in verdicts("c1", points) if verdict != MEASURED]

    best_first = [*ORDER, "uniform"]
    assert judged(best_first) == [MET] * 10
    assert judged(best_first[::-1]) == [MISSED] * 10
