"""`quire bench kernels` says that it needs a GPU; there, every family has cases and their shares are believable."""

from __future__ import annotations

import argparse

import pytest
import torch

from quire.bench import cpu_kernels, cpu_kv, kernels, kv_batches, rank_kernels
from quire.bench.replay import BEYOND_CACHE, MOST_INPUTS, Case, Ceilings, inputs, result
from quire.kernels.cpu.library_loader import library


@pytest.mark.parametrize(
    ("ranks", "heads", "matrices"),
    [  # head, qkv, o, gate_up, down
        (2, (32, 4), [(64128, 8192), (5120, 8192), (8192, 4096), (28672, 8192), (8192, 14336)]),
        (4, (16, 2), [(32064, 8192), (2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168)]),
        (8, (8, 1), [(16064, 8192), (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)]),
    ],
)
def test_sizes_are_those_of_a_rank_s_layers(
    ranks: int, heads: tuple[int, int], matrices: list[tuple[int, int]]
) -> None:
    shape = rank_kernels.shape_of("llama3-70b", ranks)
    assert (shape.heads, shape.kv_heads, shape.depth) == (*heads, 80)
    assert shape.matrices == dict(zip(("head", "qkv", "o", "gate_up", "down"), matrices))
    assert rank_kernels.shape_of("llama3-8b", 1)._replace(label="") == rank_kernels.LLAMA_8B


class Made(Exception):
    """Enough is known."""


def test_cases_of_a_rank_have_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, where nothing is launched: what is made for the first cases."""
    made: list[tuple[int, ...]] = []

    def random(*shape: int) -> torch.Tensor:
        made.append(shape)
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    monkeypatch.setattr(rank_kernels, "_random", random)
    families = kernels.asked(argparse.Namespace(family=None, tp=8, model_config="llama3-70b"))
    assert list(families) == ["decodes", "linears"]
    cases = list(families["linears"]())
    assert {(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (16064, 8192)} <= set(made)
    steps = [case for case in cases if case.kernel.endswith("a step")]
    assert {case.case for case in steps} == {
        f"llama3-70b, 1 of 8: 80 layers and the head, {rows} rows" for rows in (1, 2, 4, 8, 16, 32)
    }
    numbers = 80 * (8192 * (1280 + 1024 + 7168 + 3584)) + 8192 * 16064
    assert {case.amount for case in steps} == {2 * numbers}
    for case in cases:
        if case.kernel.startswith("cuBLAS"):
            case.calls[0]()  # of shapes that fit

    def random_kv(batch: int, context: int, kv_heads: int, dim: int, *rest: object) -> None:
        made.append((batch, context, kv_heads, dim))
        raise Made

    monkeypatch.setattr(kv_batches, "random_kv", random_kv)
    with pytest.raises(Made):
        next(families["decodes"]())
    assert made[-1] == (1, 1024, 1, 128)


def test_inputs_fill_more_than_the_cache() -> None:
    assert inputs(BEYOND_CACHE) == inputs(2 * BEYOND_CACHE) == 1
    assert inputs(BEYOND_CACHE // 4 + 1) == 4
    assert inputs(1) == MOST_INPUTS


def test_a_result_is_a_share_of_its_own_ceiling() -> None:
    most = Ceilings(memory=4e12, compute=8e14, link_out=5e10, link_in=4e10)
    cases = [Case("a", "1", [], 1e9), Case("b", "1", [], 2e11, "compute"), Case("swap in", "1", [], 1e7, "link")]
    shown = [result(case, 1e-3, most.of(case)) for case in cases]
    assert [r["share"] for r in shown] == pytest.approx([0.25, 0.25, 0.25])
    assert [(r["rate"], r["unit"]) for r in shown] == [(1.0, "TB/s"), (200.0, "TFLOP/s"), (0.01, "TB/s")]
    assert "25" in kernels.show(shown)


def test_products_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("the kernels for CPUs aren't built")
    monkeypatch.setattr(cpu_kernels, "SHAPES", {"tiny": {"gate_up": (64, 32), "head": (50, 32)}})
    for name, value in (("ROWS", (1, 64)), ("READ", 1 << 20), ("SECONDS", 0.0), ("PRODUCT", 64), ("MOST_INPUTS", 2)):
        monkeypatch.setattr(cpu_kernels, name, value)
    assert cpu_kernels.asked(["products"])
    assert not cpu_kernels.asked(["products", "copies"])
    assert not cpu_kernels.asked(None)
    results = cpu_kernels.run(argparse.Namespace(family=["products"]))
    ours = [r for r in results if r["kernel"].startswith("ours")]
    assert [r["case"].split(",")[0] for r in ours] == [
        f"tiny {matrix} {dtype}" for dtype in ("bf16", "f32") for matrix in ("gate_up", "head") for _ in range(2)
    ]
    assert {r["kernel"] for r in results} >= {"ceiling", "oneDNN"}
    assert all(r["rate"] > 0 for r in results)
    assert "GFLOP/s" in kernels.show(results)


def test_keys_and_values_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if library() is None:
        pytest.skip("the kernels for CPUs aren't built")
    shape = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 64, "vocab_size": 80, "max_position_embeddings": 256,
    }  # fmt: skip
    for name, value in (("CONTEXTS", (20, 64)), ("ROWS", (1, 2)), ("TURNS", 1), ("RUNS", 2), ("SHAPE", shape)):
        monkeypatch.setattr(cpu_kv, name, value)
    for name, value in (("READ", 1 << 20), ("SECONDS", 0.0), ("PRODUCT", 64)):
        monkeypatch.setattr(cpu_kernels, name, value)
    results = cpu_kernels.run(argparse.Namespace(family=["kv"]))
    cases = [f"{what}, {rows} x {length}" for rows in (1, 2) for length in (20, 64) for what in ("attention", "step")]
    for kind in ("bf16", "int8"):
        assert [r["case"] for r in results if r["kernel"] == f"KV in {kind}"] == cases
    assert all(r["ratio"] > 0 for r in results if r["kernel"] == "KV in int8")
    assert "attention, 2 x 64" in kernels.show(results)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["copies", "small", "chunks", "states", "ssd", "delta", "experts"])
def test_families_are_measured(family: str) -> None:
    results = kernels.run(argparse.Namespace(family=[family], tp=None, model_config=None, tune=False))
    assert {r["kernel"] for r in results} > {"ceiling"}
    assert all(0 < r["share"] < 1.6 for r in results)  # small inputs that take turns may be found in the cache
