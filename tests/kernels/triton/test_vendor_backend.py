"""Steps whose long prompts another kernel computes, over virtual memory: they equal dense attention, and each row goes
where it belongs."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from attention_steps import two_steps
from grids import CUDA
from small_models import SMALL, a_model, a_runner
from test_paged_attention import assert_close

from quire.config import VENDOR_ATTENTIONS, EngineConfig
from quire.errors import StartupError
from quire.kernels import vendor
from quire.kernels.triton.vendor_backend import VendorBackend
from quire.layers.rope_config import RopeConfig
from quire.layers.rotary import RotaryEmbedding
from quire.memory.page_layout import MemorySize
from quire.memory.virtual.virtual_memory import build_virtual_kv_config
from quire.models.named_configs import named_config
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import TableWrite
from quire.startup import build, loader
from quire.worker.virtual.store import VirtualStore, open_store

DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
DTYPE = torch.bfloat16 if CUDA else torch.float32
KV_HEADS, HEADS, DIM, MOST = 2, 6, 16, 160
NAMES = VENDOR_ATTENTIONS if CUDA else ("cudnn",)  # whose stand-in is all of them
SIZES = {
    "one": [(0, 90)],
    "a chunk": [(80, 70)],
    "beside others": [(12, 1), (0, 90), (3, 9), (80, 70), (40, 1), (70, 12)],
    "short ones": [(0, 9), (5, 1), (0, 30)],
}


@pytest.fixture
def lower(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is long, and how many queries are worth a call."""
    monkeypatch.setattr(vendor, "MIN_CONTEXT", 64)
    monkeypatch.setattr(vendor, "MIN_QUERIES", 10)


@pytest.fixture(params=["layer", "sliced"])
def store(request: pytest.FixtureRequest) -> Iterator[VirtualStore]:
    """Six sequences, whose pages aren't numbers yet."""
    layer = LayerSpec(KV_HEADS, DIM)
    spec = ModelSpec("test", (layer,) * 3, 10, 4096, 16, HEADS, 16, 0)
    kib = 2048 if CUDA else 4
    config = EngineConfig.of(
        memory="virtual", virtual_layout=request.param, virtual_page_kib=kib, max_num_seqs=6, swap_gib=0.0
    )
    geometry = build_virtual_kv_config(config, spec, MemorySize(2**18 if CUDA else 6 * 256, MOST, DTYPE.itemsize))
    made = open_store(geometry, spec, DTYPE, DEVICE, False, is_contiguous=True)
    made.buffer.fill_(torch.nan)
    ids, width = list(geometry.groups[0].ids), geometry.groups[0].table_width
    assert len(ids) >= 6 * width, "a page for each place"
    made.apply_page_ops(tuple(TableWrite(i + 1, 0, 0, tuple(ids[i::6][:width])) for i in range(6)))
    yield made
    gc.collect()  # what the interpreter keeps in circles
    made.close()


def step(backend: VendorBackend, store: VirtualStore, sizes: list[tuple[int, int]], asked: bool = False) -> list[int]:
    """How many queries each call of the kernel had in a step that equals dense attention."""
    calls: list[int] = []
    kernel, plan = backend.kernel, backend.plan

    def counted(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        calls.append(len(q))
        return kernel(q, *rest)

    def planned(*given: Any) -> Any:
        calls.clear()
        return plan(*given)

    backend.kernel, backend.plan = counted, planned  # type: ignore[method-assign]
    rotary = RotaryEmbedding(RopeConfig(kind="default", theta=10000.0, original_max_len=256), DIM, 256)
    rotary.prepare(DEVICE)
    assert_close(*two_steps(backend, store, store.caches[1], sizes, rotary, fused=True, asked=asked))
    return calls


@pytest.mark.share(4)
@pytest.mark.usefixtures("lower")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("sizes", "calls", "asked"),
    [("one", [90], False), ("a chunk", [70], False), ("beside others", [90, 70, 12], False), ("short ones", [], False),
     ("beside others", [], True)],
)  # fmt: skip
def test_steps_equal_dense_attention(name: str, sizes: str, calls: list[int], asked: bool, store: VirtualStore) -> None:
    """The last layer is asked for single rows alone."""
    assert step(VendorBackend(name), store, SIZES[sizes], asked) == calls


def test_what_is_long(store: VirtualStore) -> None:
    def long(*rows: tuple[int, int], **bounds: Any) -> bool:
        starts, lengths = np.array(rows, dtype=np.int64).reshape(-1, 2).T
        return VendorBackend("flash").use_long_kernel(replace(store.caches[0], **bounds), lengths, starts + lengths)

    assert long((0, 4096))
    assert not long((0, 4096), window=5000), "layers with windows are for our kernel"
    assert not long((0, 4096), softcap=2.0)
    assert long((8000, 64))
    assert not long((8000, 63)), "queries are too few"
    assert not long((0, 4095))
    assert not long()
    assert not long((4032, 64), *((0, 900),) * 9), "nearly all of the work is in short ones"


@pytest.mark.parametrize("name", VENDOR_ATTENTIONS)
def test_over_pages_they_are_refused(name: str) -> None:
    with pytest.raises(StartupError, match=f"--attention is {name}.*the memory is paged"):
        a_runner(*a_model("llama-125m"), name)


@pytest.mark.parametrize(("kind", "text"), [(RuntimeError, "No available kernel\nmore"), (ImportError, "No module")])
def test_a_kernel_that_does_not_run_is_refused(kind: type[Exception], text: str, store: VirtualStore) -> None:
    def failing(*args: Any) -> torch.Tensor:
        raise kind(text)

    backend = VendorBackend("cudnn")
    backend.check_cache(store.caches[0])
    backend.kernel = failing
    with pytest.raises(StartupError, match=rf"--attention is cudnn, .* run here: {text.splitlines()[0]}\. Use"):
        backend.check_cache(store.caches[0])


@pytest.mark.skipif(CUDA, reason="there it runs")
def test_varlen_attn_has_no_kernel_for_a_cpu(store: VirtualStore) -> None:
    with pytest.raises(StartupError, match=r"--attention is varlen, which this torch, .* can't run here: "):
        VendorBackend("varlen").check_cache(store.caches[0])


def test_sizes_that_the_kernel_does_not_know(monkeypatch: pytest.MonkeyPatch, store: VirtualStore) -> None:
    monkeypatch.setattr(vendor, "supports_heads", lambda name, cache: False)
    with pytest.raises(StartupError, match=r"--attention is cudnn, .* heads of 16 numbers of (16|32) bits"):
        VendorBackend("cudnn").check_cache(store.caches[0])


@pytest.mark.parametrize("contiguous", [False, True])
def test_what_the_benchmark_times(contiguous: bool) -> None:
    """A prompt in chunks by every kernel, one answer."""
    from quire.bench.kernels import chunked
    from quire.bench.kv_batches import random_kv

    where = random_kv(2, 50, KV_HEADS, DIM, 16, 1, DTYPE, HEADS, contiguous, str(DEVICE))
    found = {name: torch.cat(call()) for name, call in chunked(where, 20).items()}
    ours = "prompt contiguous" if contiguous else "prompt paged"
    assert [*found] == [ours, *(VENDOR_ATTENTIONS if CUDA else ("flash", "cudnn")) * contiguous]
    for name in [*found][1:]:
        torch.testing.assert_close(found[name], found[ours], atol=0.02 if CUDA else 1e-5, rtol=0.02 if CUDA else 1e-5)


@pytest.mark.skipif(CUDA, reason="tests/gpu/test_vendor_gpu.py has it")
def test_an_engine_with_chunks_and_a_shared_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are those of torch's plain attention, and long chunks went through the kernel."""
    calls, kernel = set(), vendor.KERNELS["cudnn"]

    def counted(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, scale: float) -> torch.Tensor:
        calls.add((len(q), start))
        return kernel(q, keys, values, start, scale)

    monkeypatch.setitem(vendor.KERNELS, "cudnn", counted)
    monkeypatch.setattr(vendor, "MIN_CONTEXT", 24)
    monkeypatch.setattr(vendor, "MIN_QUERIES", 8)
    (tmp_path / "config.json").write_text(json.dumps({**named_config("llama-125m"), **SMALL["llama-125m"]}))
    answers = []
    for attention in ("contiguous", "cudnn"):
        monkeypatch.setattr(loader, "choose_attention", lambda config, spec, device, dtype, chosen=attention: chosen)
        config = EngineConfig.of(
            model=str(tmp_path), dummy_weights=True, skip_tokenizer_init=True, dtype="float32", device="cpu",
            memory="virtual", virtual_page_kib=4, virtual_layout="sliced", kv_tokens=1024, max_num_seqs=6,
            max_num_batched_tokens=20, swap_gib=0.0, cuda_graphs=False,
        )  # fmt: skip
        engine = build.build(config).engine
        for i, length in enumerate((50, 7, 58)):
            params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
            engine.add(str(i), [(5 * j + (j > 40) * i) % 60 for j in range(length)], params)
        found: dict[str, list[int]] = {}
        while engine.has_unfinished_requests:
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.tokens)
        gc.collect()
        engine.close()
        answers.append(found)
    assert answers[0] == answers[1]
    assert any(count >= 8 and start >= 20 for count, start in calls)
