"""vAttention's entries that run whole steps, map pages or read mapped ones: on a CPU, tiny; their verdicts can fail."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from papers import (  # fmt: skip
    chunk_kernels,
    decode_rates,
    dummy_engines,
    long_prompts,
    main,
    mapped_views,
    mapping_costs,
    prompt_mapping,
    step_spikes,
    table_building,
)
from papers.result import DIFFERS, HOLDS, MEASURED
from quire.bench import contexts, replay
from quire.bench.placed_kv import placed
from quire.models.named_configs import named_config
from quire.protocol.step_plan import SeqSlice
from quire.worker.virtual.latencies import PAGE_SIZES, PAPER_BANDWIDTH

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")

TINY = {
    **named_config("llama-125m"), "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "dtype": "float32",
}  # fmt: skip
PAGE = 512  # tokens of 64 KiB of one layer's keys


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "need_gpu", lambda what: None)
    monkeypatch.setattr(dummy_engines, "ON", "cpu")
    monkeypatch.setattr(dummy_engines, "SHAPES", dict.fromkeys(dummy_engines.SHAPES, TINY))


def drawn(name: str, out: Path) -> dict[str, Any]:
    """The document of an entry, whose picture is made anew from it."""
    main([name, "--out", str(out), "--no-pictures"])
    assert main(["--draw", str(out)]) == 0
    assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    content: dict[str, Any] = json.loads((out / f"{name}.json").read_text())
    return content


def test_prompts_are_taken_as_computed(tiny: None) -> None:
    with dummy_engines.dummy("yi-6b", 900, 3, **dummy_engines.virtual("sliced"), max_num_batched_tokens=100) as made:
        contexts.skipping(made.engine)
        contexts.start(made.engine, [700, 5, 801])
        lengths = {name: request.live_seqs[0].computed for name, request in made.engine.requests.items()}
        assert all(lengths[f"row-{i}"] >= length for i, length in enumerate([700, 5, 801]))
        assert made.engine.stats.computed_tokens >= 1506, "the control plane knows nothing of it"
        assert len(contexts.step_seconds(made.engine, 4)) == 4
        contexts.stop(made.engine, ["row-0"])
        assert set(made.engine.requests) == {"row-1", "row-2"}
        contexts.stop(made.engine)
        assert not made.engine.has_unfinished_requests


def test_the_last_token_of_a_row() -> None:
    row = SeqSlice(3, (7, 8, 9), 10, 1, score_tokens=(8, 9))
    assert contexts.last_token(row) == SeqSlice(3, (9,), 12, 1)
    assert contexts.last_token(SeqSlice(3, (7,), 10, 1)) == SeqSlice(3, (7,), 10, 1)


def test_spikes_are_where_pages_are_full(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT", 2 * PAGE), ("PAGE", PAGE), ("STEPS", {False: 24}), ("ENDS", (10, 16))):
        monkeypatch.setattr(step_spikes, name, value)
    runs = drawn("vattention-fig10", tmp_path)["data"]
    assert len(runs) == 8
    for run in runs:
        assert len(run["ms"]) == len(run["maps"]) == 24
        in_the_way = [i for i, count in enumerate(run["maps"]) if count]
        if run["layout"] == "layer" and not run["ahead"]:
            assert [run["maps"][i] for i in in_the_way] == [4, 4], "a page of keys and one of values, of each layer"
            assert 5 <= in_the_way[1] - in_the_way[0] <= 7
        if run["ahead"]:
            assert not in_the_way


def test_verdicts_of_spikes() -> None:
    def run(layout: str, ahead: bool, spike: float, count: int = 4) -> dict[str, Any]:
        return {"layout": layout, "ahead": ahead, "depth": 1, "ms": [1.0] * (200 - count) + [spike] * count, "maps": []}

    def judged(*runs: dict[str, Any]) -> list[str]:
        return [result.verdict for result in step_spikes.judged(runs)]

    assert judged(run("layer", True, 1.05), run("layer", False, 1.6)) == [HOLDS, HOLDS, MEASURED]
    assert judged(run("layer", True, 1.6), run("layer", False, 1.1)) == [DIFFERS, DIFFERS, MEASURED]
    assert judged(run("sliced", False, 1.6)) == [MEASURED]


def test_rates_by_batch(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CONTEXT_6", 40), ("CONTEXT_9", 90), ("STEPS", 3)):
        monkeypatch.setattr(decode_rates, name, value)
    monkeypatch.setattr(decode_rates, "BATCHES_6", dict.fromkeys(dummy_engines.SHAPES, (1, 2, 4)))
    monkeypatch.setattr(decode_rates, "BATCHES_9", {"yi-6b": (1, 3)})
    points = drawn("vattention-fig6", tmp_path)["data"]
    assert [(p["model"], p["batch"]) for p in points] == [(m, b) for m in dummy_engines.SHAPES for b in (4, 2, 1)]
    token = 2 * 2 * 2 * 16 * 4  # bytes: keys and values, layers, heads, numbers, of four
    assert all(p["mb_s"] == pytest.approx(p["tokens_s"] * token / 2**20) for p in points)
    points = drawn("vattention-fig9a", tmp_path)["data"]
    assert [(p["way"], p["batch"]) for p in points] == [
        (way, batch) for way in ("paged", "virtual, sliced") for batch in (3, 1)
    ]  # fmt: skip


def test_a_device_that_is_too_small_is_told(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_rates, "STEPS", 3)
    missing: dict[str, str] = {}
    paged = {**dummy_engines.PAGED, "kv_tokens": 2**30}
    assert not list(decode_rates.decoded("yi-6b", paged, (1, 2), 40, missing))
    assert "out of memory" in missing["yi-6b, paged, batch 2"]


def test_verdicts_of_rates() -> None:
    def six(*rates: float) -> list[str]:
        points = [{"model": "m", "batch": batch, "tokens_s": rate, "ms": 1.0, "mb_s": rate}
                  for batch, rate in zip((1, 50, 100), rates)]  # fmt: skip
        return [result.verdict for result in decode_rates.judged_6(points)]

    assert six(10, 500, 600) == [HOLDS, MEASURED, HOLDS]
    assert six(10, 500, 700) == [DIFFERS, MEASURED, DIFFERS]

    def nine(virtual: float) -> list[str]:
        points = [{"model": "yi-6b", "batch": 8, "way": way, "tokens_s": rate}
                  for way, rate in (("paged", 100.0), ("virtual, sliced", virtual))]  # fmt: skip
        return [result.verdict for result in decode_rates.judged_9a(points)]

    assert nine(200.0) == [HOLDS, HOLDS]
    assert nine(98.0) == [HOLDS, DIFFERS], "the paper's gain is gone"
    assert nine(90.0) == [DIFFERS, DIFFERS]


def test_prompts_by_page_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(prompt_mapping, "LENGTH", {"cpu": 600})
    monkeypatch.setattr(prompt_mapping, "REPEATS", 2)
    monkeypatch.setattr(prompt_mapping, "CPU_TOKENS", 2**16)
    monkeypatch.setattr(prompt_mapping, "SMALL", TINY)
    maps = {point["way"]: point["maps"] for point in drawn("vattention-fig11", tmp_path)["data"]}
    buffers = 4
    assert maps == {
        **{f"{kib} KB, layer, sync": buffers * -(-600 * 128 // (kib << 10)) for kib in (64, 128, 256, 2048)},
        "paged": 0, "64 KB, layer, all on": 0,
    }  # fmt: skip


def test_verdicts_of_prompts_with_maps() -> None:
    def judged(model: str, sync: float, on: float) -> list[str]:
        ms = {"paged": 100.0, "2048 KB, layer, sync": sync, "2048 KB, layer, all on": on}
        points = [{"model": model, "way": way, "ms": value, "maps": 0, "stalled_ms": 0} for way, value in ms.items()]
        return [result.verdict for result in prompt_mapping.judged(points)]

    assert judged("yi-6b", 101.0, 99.0) == [HOLDS, HOLDS]
    assert judged("yi-6b", 110.0, 104.0) == [DIFFERS, DIFFERS]
    assert judged("small", 110.0, 104.0) == [MEASURED, MEASURED]


def test_first_tokens_of_long_prompts(tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompts, "MODELS", ("yi-6b",))
    monkeypatch.setattr(long_prompts, "THROUGH", {False: (1, 2)})
    monkeypatch.setattr(long_prompts, "CHUNK", 512)
    monkeypatch.setattr(long_prompts, "TABLE_6", {"yi-6b": dict.fromkeys((1, 2), (4.0, 1.0, 2.0, 1.0))})
    content = drawn("vattention-table6", tmp_path)
    assert [(p["way"], p["k"]) for p in content["data"]] == [("paged", 1), ("paged", 2), ("virtual", 1), ("virtual", 2)]
    assert all(p["s"] > 0 for p in content["data"])
    assert [r["paper"] for r in content["results"]] == [None, 2.0, None, 2.0]


def test_verdicts_of_long_prompts() -> None:
    def table_6(paged: float) -> list[str]:
        points = [{"model": "yi-6b", "k": 16, "way": way, "s": s} for way, s in (("paged", paged), ("virtual", 1.0))]
        return [result.verdict for result in long_prompts.judged_6(points)]

    assert table_6(1.0) == [MEASURED, HOLDS]
    assert table_6(0.99) == [MEASURED, DIFFERS]

    def figure_8(contiguous: float) -> list[str]:
        seconds = {"prompt, paged, 16-token pages": 1.0, "torch cuDNN, contiguous, layer": contiguous}
        points = [{"model": "m", "length": 2048, "way": way, "seconds": s} for way, s in seconds.items()]
        return [result.verdict for result in long_prompts.judged_8(points)]

    assert figure_8(0.9) == [HOLDS]
    assert figure_8(1.0) == [DIFFERS]


def test_chunks_between_those_that_were_timed() -> None:
    size = long_prompts.CHUNK
    times = {(i * size, size): 1.0 + 3 * i for i in (0, 1, 3, 7)} | {(0, 1024): 0.25}
    assert long_prompts.whole(times, 8 * size) == pytest.approx(sum(1.0 + 3 * i for i in range(8)))
    assert long_prompts.whole(times, 1024) == 0.25
    assert long_prompts.whole(times, size) == 1.0


def test_a_kernel_that_computes_something_else_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    where = placed(1, 32, 2, 16, 16, 1, torch.float32, 4, on="cpu")
    q = torch.randn(8, 4, 16)

    def ours(right: torch.Tensor) -> torch.Tensor:
        return right

    def calls(*_: object) -> dict[str, Any]:
        answer = chunk_kernels.plain(q, where, 24)
        return {"a": partial(lambda q, x: x, q, answer), "b": partial(ours, answer + 0.5)}

    monkeypatch.setattr(chunk_kernels, "chunk_calls", calls)
    missing: dict[str, str] = {}
    assert chunk_kernels.check(where, 24, missing) == ["a"]
    assert missing == {"b": "its results are 0.5 from those in fp32"}


def test_tables_by_how_they_are_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(table_building, "LOADS", {"few": [100] * 3, "unlike": [2000, 20, 20]})
    monkeypatch.setattr(table_building, "REPEATS", 3)
    points = drawn("vattention-x2", tmp_path)["data"]
    assert [p["way"] for p in points] == 2 * list(table_building.WAYS)
    assert all((p["us"] > 0) == (p["way"] != "none") for p in points)
    rows = table_building.rows_of([40, 20])
    assert rows.store.tables[0][1, :3].tolist() == rows.tables[0]
    lists, arrays = rows.padded_lists(), rows.padded_arrays()
    assert torch.equal(lists, arrays)  # type: ignore[arg-type]
    assert lists[1].tolist() == [*rows.tables[1], 0]  # type: ignore[index]
    before = rows.store.tables[0].clone()
    rows.deltas()
    assert torch.equal(rows.store.tables[0], before), "the same pages once more"


def test_verdicts_of_tables() -> None:
    def judged(*shares: float) -> list[str]:
        points = [{"load": "m", "way": way, "share": share} for way, share in zip(table_building.WAYS, shares)]
        return [result.verdict for result in table_building.judged(points)]

    assert judged(25.0, 9.0, 0.4, 0.0) == [HOLDS] * 4
    assert judged(9.0, 11.0, 1.4, 0.0) == [DIFFERS] * 3 + [HOLDS]


def test_every_shape_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_views, "CONTEXTS", (48, 160))
    monkeypatch.setattr(mapped_views, "QUERIES", (1, 16))
    monkeypatch.setattr(mapped_views, "PAGES", (4, 64))
    monkeypatch.setattr(mapped_views, "TURNS", 4)
    done = mapped_views.views()
    assert len(done.data) == 16
    assert all(point["plain"] > 0 < point["mapped"] for point in done.data)
    assert len(done.results) == 4
    assert done.draw().axes


@pytest.mark.parametrize(("mapped", "verdict"), [(100.0, HOLDS), (104.0, DIFFERS)])
def test_verdicts(mapped: float, verdict: str) -> None:
    point = {"dtype": "float32", "kib": 64, "context": 1024, "queries": 1, "plain": 100.0, "mapped": mapped}
    assert [result.verdict for result in mapped_views.judged([point])] == [verdict]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mapping_costs, "COUNT", 16)
    monkeypatch.setattr(mapping_costs, "ALONE", 0.01)


def test_latencies_of_every_call(small: None, tmp_path: Path) -> None:
    content = drawn("vattention-table3", tmp_path)
    points = content["data"]
    assert {point["page"] for point in points} == set(PAGE_SIZES)
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
    assert seen == [(("cpu", "cpu"), page) for page in PAGE_SIZES]
    assert [point["gb_s"] for point in points if point["workers"] == 2] == [5.0] * 4
    assert len(points) == 12


def test_two_processes_map_beside_each_other() -> None:
    rates = mapping_costs.at_once(("cpu", "cpu"), 64 << 10, 0.1)
    assert len(rates) == 2
    assert min(rates) > 0


def test_verdicts_on_a_gpu() -> None:
    def calls(p50: float) -> list[dict[str, Any]]:
        row = {"device": "cuda:0", "page": PAGE_SIZES[-1], "run": 1, "loaded": False, "p50": p50}
        return [{**row, "kind": kind} for kind in ("map", "access")]

    assert [result.verdict for result in mapping_costs.judged_3(calls(3.9))] == [HOLDS, HOLDS]
    assert [result.verdict for result in mapping_costs.judged_3(calls(80.0))] == [DIFFERS, DIFFERS]

    def mapped(rate: float) -> list[dict[str, Any]]:
        return [
            {"device": "cuda:0", "page": PAGE_SIZES[-1], "workers": n, "load": "idle", "gb_s": n * rate} for n in (1, 2)
        ]

    assert [result.verdict for result in mapping_costs.judged_7(mapped(PAPER_BANDWIDTH[-1] + 1))] == [HOLDS] * 3
    assert [result.verdict for result in mapping_costs.judged_7(mapped(5.9))] == [DIFFERS] * 3
