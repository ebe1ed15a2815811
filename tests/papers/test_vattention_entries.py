"""vAttention's entries: committed measurements are judged as they were, and every runner runs, tiny, on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch

from papers import attention_times, dummy_engines, mapping_costs, table_building, vattention
from papers.call_latencies import PAGE_SIZES
from papers.dummy_engines import PAGED, virtual
from papers.entry import DIFFERS, MEASURED, chosen
from quire.bench import contexts
from quire.bench.kv_batches import random_kv
from quire.models.named_configs import named_config
from quire.protocol.step_plan import SeqSlice
from quire.vattention import VAttention

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton and memfd are Linux's")

TINY = {
    **named_config("llama-125m"), "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "dtype": "float32",
}  # fmt: skip


# Kernels


SMALL = """
import json, sys, time, torch
from quire.bench import replay
from quire.models.named_configs import named_config
from quire.models import read_spec
from papers import attention_times as times

def timed(calls, rounds=1):
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)

replay.replayed = timed
torch.cuda.empty_cache = lambda: None
tiny = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=64)
times.spec_of = lambda name: read_spec({**named_config("llama-125m"), **tiny})
memories = ("paged, 16", "contiguous", "virtual, layer", "virtual, sliced")
vllm = ("vllm 0.2.7, 16", "vllm 0.2.7, 64")
print(json.dumps({
    "decodes": times.decodes({"m": (1, 2)}, (33, 64), memories + vllm, False, "cpu", 4),
    "whole": times.decodes({"m": (1, 2)}, (70,), memories, True, "cpu", 4),
    "prompts": times.prompts("m", (1, 2), (33, 64), memories[:2], 66, "cpu"),
    # the interpreter computes no other dtype right
    "chunks": times.chunked_prompts(("m",), (16, 32, 64, 150), 32, (0, 1, 3), memories, "cpu", 4, "float32"),
}))
"""


@pytest.mark.timeout(300)
def test_kernels_are_timed_over_every_memory() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SMALL], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    ours = {"paged, 16", "contiguous", "virtual, layer", "virtual, sliced"}
    vllm = {"vllm 0.2.7, 16", "vllm 0.2.7, 64"}
    for name, count, ways in (("decodes", 4, ours | vllm), ("whole", 2, ours)):
        points = found[name]
        assert {point["way"] for point in points} == ways | {"torch, virtual, layer", "torch, virtual, sliced"}
        assert all(len(chosen(points, {"way": way})) == count for way in ways)
        assert all(point["ms"] == pytest.approx(3 * point["us"] / 1000) for point in points)
    prompts = [point for point in found["prompts"] if "us" in point]
    assert {(point["batch"], point["context"]) for point in prompts} == {(1, 33), (1, 64), (2, 33)}, "66 tokens at most"
    assert {"prompt, paged, 16", "prompt, contiguous"} <= {point["way"] for point in prompts}
    assert {"left_out": "prompt_hopper", "why": "it is for a Hopper GPU"} in found["prompts"]
    torchs = {"torch flash", "torch cuDNN"}  # a CPU's own fused kernel stands in for these
    kernels = {memory: {p["kernel"] for p in found["chunks"] if p.get("memory") == memory} for memory in ours}
    assert kernels == {memory: {"prompt", *(torchs if memory != "paged, 16" else ())} for memory in ours}


def test_chunks_between_those_that_were_timed() -> None:
    times = {(i * 2048, 2048): 1.0 + 3 * i for i in (0, 1, 3, 7)} | {(0, 1024): 0.25}
    assert attention_times.whole_prompt(times, 8 * 2048, 2048) == pytest.approx(sum(1.0 + 3 * i for i in range(8)))
    assert attention_times.whole_prompt(times, 1024, 2048) == 0.25
    assert attention_times.whole_prompt(times, 2048, 2048) == 1.0


def test_a_kernel_that_computes_something_else_is_left_out() -> None:
    where = random_kv(1, 32, 2, 16, 16, 1, torch.float32, 4, on="cpu")
    cache, q = where.caches[0], torch.randn(8, 4, 16)
    keys, values = (x[where.tables[1]].transpose(0, 1).reshape(2, 32, 16).repeat_interleave(2, 0)
                    for x in (cache.keys, cache.values))  # fmt: skip
    later = torch.arange(32) > torch.arange(24, 32)[:, None]
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * cache.scale).masked_fill(later, -torch.inf)
    right = (scores.softmax(-1) @ values).transpose(0, 1)

    def answering(answer: torch.Tensor) -> partial[torch.Tensor]:
        return partial(lambda q, x: x, q, answer)

    missing: dict[str, str] = {}
    assert attention_times.right({"a": answering(right), "b": answering(right + 0.5)}, where, 24, missing) == ["a"]
    assert missing == {"b": "its results are 0.5 from those in fp32"}


def test_views_of_mapped_pages() -> None:
    points = attention_times.mapped_views(("float32", "bfloat16"), (4, 64), (48, 160), (1, 16), turns=4)
    assert len(points) == 2 * 16
    assert all(point["us"] > 0 for point in points)
    assert len(vattention.ENTRIES["vattention-views"].judge(points).results) == 4


# Engines


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(dummy_engines.SHAPES, "tiny", TINY)


def test_prompts_are_taken_as_computed(tiny: None) -> None:
    settings = {**virtual("sliced"), "device": "cpu", "max_num_batched_tokens": 100}
    with dummy_engines.dummy("tiny", 900, 3, **settings) as made:
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


def test_spikes_are_where_pages_are_full(tiny: None) -> None:
    page = 512  # tokens of 64 KiB of one layer's keys
    runs = dummy_engines.step_times("tiny", 2 * page, page, (10, 16), 24, ("layer", "sliced"), (2, 1), device="cpu")
    assert len(runs) == 8
    for run in runs:
        assert len(run["ms"]) == len(run["maps"]) == 24
        mapping = [i for i, count in enumerate(run["maps"]) if count]
        if run["layout"] == "layer" and not run["ahead"]:
            assert [run["maps"][i] for i in mapping] == [4, 4], "a page of keys and one of values, of each layer"
            assert 5 <= mapping[1] - mapping[0] <= 7
        if run["ahead"]:
            assert not mapping


def test_rates_by_batch(tiny: None) -> None:
    ways = {"paged": {**PAGED, "device": "cpu"}, "virtual": {**virtual("sliced"), "device": "cpu"},
            "too large": {**PAGED, "device": "cpu", "kv_tokens": 2**30}}  # fmt: skip
    *points, missing = dummy_engines.decodes({"tiny": (1, 2, 4)}, ways, 40, 3)
    assert [(p["way"], p["batch"]) for p in points] == [(way, n) for way in ("paged", "virtual") for n in (4, 2, 1)]
    token = 2 * 2 * 2 * 16 * 4  # bytes: keys and values, layers, heads, numbers, of four
    assert all(p["mb_s"] == pytest.approx(p["tokens_s"] * token / 2**20) for p in points)
    assert missing["left_out"] == "tiny, too large, batch 4"
    assert "out of memory" in missing["why"]


def test_first_tokens_by_page_size(tiny: None) -> None:
    ways = {"paged": PAGED, "ahead": {**virtual("layer"), "virtual_page_kib": 64},
            **{str(kib): {**virtual("layer", False), "virtual_page_kib": kib} for kib in (64, 256, 2048)}}  # fmt: skip
    points = dummy_engines.first_tokens(
        ("tiny",), (600,), ways, 2, depth=1, seqs=3, device="cpu", threads=1, kv_tokens=2**16
    )
    buffers = 4
    assert {point["way"]: point["maps"] for point in points} == {
        "paged": 0, "ahead": 0, **{str(kib): buffers * -(-600 * 128 // (kib << 10)) for kib in (64, 256, 2048)}
    }  # fmt: skip
    points = dummy_engines.first_tokens(("tiny",), (600, 900), {"paged": PAGED}, 1, 512, device="cpu")
    assert [point["length"] for point in points] == [600, 900]
    assert all(point["ms"] > 0 for point in points)


# The host


def test_latencies_of_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    points = mapping_costs.calls(16, (1, 16))
    assert {point["page"] for point in points} == set(PAGE_SIZES)
    assert {(point["kind"], point["load"]) for point in points if point["kind"] in ("map", "unmap")} == {
        (kind, load) for kind in ("map", "unmap") for load in ("idle", "loaded")
    }  # fmt: skip
    verdicts = {result.verdict for result in vattention.ENTRIES["vattention-table3"].judge(points).results}
    assert verdicts == {MEASURED}, "these are not the paper's calls"


def test_bandwidth_of_one_worker_and_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(mapping_costs, "at_once", lambda pair, *_: [2.0, 3.0])
    points = mapping_costs.bandwidths(16, 0.01, 0.01)
    assert [(p["kib"], p["gb_s"]) for p in points if p.get("workers") == 2] == [
        (page >> 10, 5.0) for page in PAGE_SIZES
    ]
    assert len(points) == 12


def test_two_processes_map_beside_each_other() -> None:
    rates = mapping_costs.at_once(("cpu", "cpu"), 64 << 10, 16, 0.1)
    assert len(rates) == 2
    assert min(rates) > 0


def test_tables_by_how_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    points = table_building.tables({"few": [100] * 3, "unlike": [2000, 20, 20]}, 4.0, 1e-5, 3)
    assert [point["way"] for point in points] == 2 * list(vattention.TABLES)
    assert all((point["us"] > 0) == (point["way"] != "none") for point in points)
    rows = table_building.rows_of([40, 20])
    assert rows.store.tables[0][1, :3].tolist() == rows.tables[0]
    lists, arrays = rows.padded_lists(), rows.padded_arrays()
    assert torch.equal(lists, arrays)  # type: ignore[arg-type]
    assert lists[1].tolist() == [*rows.tables[1], 0]  # type: ignore[index]
    before = rows.store.tables[0].clone()
    rows.deltas()
    assert torch.equal(rows.store.tables[0], before), "the same pages once more"


# The library


def differing(name: str) -> dict[str, Any]:
    return {r.what: r.ours for r in vattention.ENTRIES[name].run().results if r.verdict == DIFFERS}


def test_a_library_that_reclaims_at_once_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = VAttention.free_reqid

    def reclaims(self: VAttention, reqid: int) -> None:
        free(self, reqid)
        self._reclaim(self.pages, [(reqid, 0)])

    monkeypatch.setattr(VAttention, "free_reqid", reclaims)
    assert list(differing("vattention-fig7")) == ["(d) R1 has completed: pages under reqIds 0 and 1"]
    assert "pages mapped for a request no longer than the one before" in differing("vattention-table4")


def test_a_library_that_maps_nothing_ahead_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VAttention, "map_ahead", lambda self: None)
    assert list(differing("vattention-table4").values()) == [1, 1]


def test_another_output_of_a_kernel_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from papers.kernel_switch import WAYS, compared

    real = WAYS["sdpa_flash"]

    def off(query: Any, keys: Any, values: Any) -> Any:
        return real(query, keys, values) + (keys.stride(0) > 128)  # where tokens of several layers are sliced

    monkeypatch.setitem(WAYS, "sdpa_flash", off)
    assert compared() == {"sdpa": True, "sdpa_flash": False}


def test_sizes_of_sliced_layouts() -> None:
    results = {result.what: result.ours for result in vattention.ENTRIES["vattention-table8"].run().results}
    assert results["llama3-8b, TP-1, sliced: tokens of a page of 64 KB, 128 KB, 256 KB, 2 MB"][-1] == 32
    assert results["yi-34b, TP-1, sliced: tokens of a page of 64 KB, 128 KB, 256 KB, 2 MB"][-1] == 17.07
    assert results["llama3-8b, TP-1, sliced: most waste of a request"][-1] == 4
