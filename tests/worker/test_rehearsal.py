"""The rehearsal: which steps it has, and what is said where one fails. On a GPU all other tests run behind it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.triton.compile_locks import compile_once, loading_refused
from quire.layers.linear import Linear
from quire.models.decoder import one_layer_of_each_kind
from quire.models.vision import VisionSettings, build_encoder
from quire.protocol.step_plan import StepPlan
from quire.startup import loader
from quire.startup.build import build
from quire.startup.checkpoint import read_checkpoint
from quire.worker import warmup
from quire.worker.cuda_graphs import GraphCapturer
from quire.worker.image_inputs import ImageInputs
from quire.worker.model_runner import ModelRunner
from quire.worker.warmup import _warmup_plans


def steps(tokens: int, max_len: int, slots: int = 8) -> list[StepPlan]:
    return list(_warmup_plans(tokens, max_len, slots, True))


@pytest.mark.parametrize(
    ("tokens", "max_len", "slots"),
    [(2048, 512, 8), (2048, 512, 256), (100, 512, 3), (1, 1, 1), (513, 512, 2), (9, 3, 4)],
)
def test_the_largest_step_has_all_tokens_in_sequences_that_may_be(tokens: int, max_len: int, slots: int) -> None:
    plans = steps(tokens, max_len, slots)
    for plan in plans:
        assert 1 <= sum(len(row.tokens) for row in plan.slices) <= tokens
        assert 1 <= len(plan.slices) <= slots
        assert all(1 <= len(row.tokens) <= max_len and row.slot == 0 for row in plan.slices)
        assert all(0 <= row.start <= max_len - len(row.tokens) for row in plan.slices)
    ends = [row.start + len(row.tokens) for plan in plans for row in plan.slices if row.score_tokens]
    assert max(ends) == max_len, "the end of the longest prompt, in all layers"
    many, long = plans[-2:]
    assert len(many.slices) == min(slots, tokens)
    for plan in (many, long):
        assert sum(len(row.tokens) for row in plan.slices) == min(tokens, slots * max_len)


def test_every_number_of_tokens_and_rows_with_kernels_of_its_own() -> None:
    plans = steps(2048, 512, 256)
    alone = {len(plan.slices[0].tokens) for plan in plans if len(plan.slices) == 1}
    scored = {len(row.score_tokens) for plan in plans for row in plan.slices}
    singles = {len(plan.slices) for plan in plans if all(len(row.tokens) == 1 for row in plan.slices)}
    assert {1, 2, 9, 17, 33, 65} <= alone & singles & scored


def test_a_cpu_needs_none() -> None:
    made = build(EngineConfig(device="cpu", kv_tokens=512))
    made.engine.runner.warm_up(64, 512)
    assert not torch.any(made.engine.runner.store.group_pages[0][0]), "nothing ran"
    made.engine.close()


def test_what_fails_beside_others_runs_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel that two threads load at once."""
    seen: list[str] = []

    def once() -> None:
        seen.append("once")
        if seen.count("once") == 1:
            raise TypeError("not loaded yet")

    def never() -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(warmup, "_run_task", lambda device, task: task())
    runner: Any = SimpleNamespace(device=torch.device("cpu"), exchange=None)
    monkeypatch.setattr(warmup, "_compile_tasks", lambda runner: [once, lambda: seen.append("other")])
    warmup._compile_kernels(runner)
    assert sorted(seen) == ["once", "once", "other"]
    monkeypatch.setattr(warmup, "_compile_tasks", lambda runner: [never])
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        warmup._compile_kernels(runner)


def test_a_capture_that_would_load_a_kernel_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is loaded by a run between two captures, the first of which fails."""
    calls: list[str] = []
    loaded: list[str] = []
    kernel: Any = SimpleNamespace(fn=SimpleNamespace(__name__="kernel"))

    def load(self: Any, key: str) -> None:
        loaded.append(key)

    def step(key: str = "key") -> str:
        calls.append("step")
        if key not in loaded:
            JITFunction._do_compile(kernel, key)
        calls.append("end")
        return key

    def fail() -> None:
        with ThreadPoolExecutor(1) as pool:  # another engine's thread
            pool.submit(step, "third").result()
        raise RuntimeError("it fails")

    monkeypatch.setattr(JITFunction, "_do_compile", load)
    capturer = object.__new__(GraphCapturer)
    monkeypatch.setattr(capturer, "_capture", lambda step: step())
    assert capturer.capture(step) == "key"
    assert calls == ["step", "step", "end", "step", "end"]
    assert capturer.capture(step) == "key"
    assert calls[5:] == ["step", "end"]
    with pytest.raises(RuntimeError, match="it fails"):
        capturer.capture(fail)
    step("fourth")
    assert loaded == ["key", "third", "fourth"]
    with loading_refused():
        theirs = JITFunction._do_compile  # another engine's thread patches Triton, and puts this back later
    monkeypatch.setattr(JITFunction, "_do_compile", theirs)
    step("fifth")
    assert loaded[3:] == ["fifth"]


def test_a_kernel_is_loaded_once_though_tables_of_kernels_are_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another thread, also the first to launch it, made the table while this one compiles."""
    loads: list[str] = []
    function: Any = SimpleNamespace(cache_key="function", hash="known", fn=_no_kernel, device_caches={0: ({},)})

    def load(self: Any, key: str, signature: Any, device: int) -> str:
        loads.append(key)
        self.device_caches[device] = ({},)
        return f"compiled {key}"

    monkeypatch.setattr(JITFunction, "_do_compile", load)
    with compile_once():
        for key in ("a", "b", "a"):
            function.device_caches[0] = ({},)
            assert JITFunction._do_compile(function, key, None, 0) == f"compiled {key}"
            assert function.device_caches[0][0][key] == f"compiled {key}"
    assert loads == ["a", "b"]


def _no_kernel() -> None:
    """Has no code that a kernel would have."""


def test_a_model_has_its_layers_again() -> None:
    made = build(EngineConfig(device="cpu", kv_tokens=512))
    model = made.engine.runner.model
    layers = model.layers
    with suppress(ValueError), one_layer_of_each_kind(model):
        assert len(model.layers) == 3
        assert model.layers[-1] is layers[-1]
        raise ValueError("it fails")
    assert model.layers is layers
    first = next(iter(layers[2].parameters()))
    first.data = first.data.to(torch.int8)
    with one_layer_of_each_kind(model):
        assert layers[2] in list(model.layers), "weights of another dtype have other kernels"
    linear = next(module for module in layers[0].modules() if isinstance(module, Linear))
    linear.low_bit_device = torch.device("cuda")
    with one_layer_of_each_kind(model):
        assert model.layers is layers, "formats of few bits may differ"
    with one_layer_of_each_kind(no_model := SimpleNamespace(layers=layers)):
        assert no_model.layers is layers
    made.engine.close()


def test_steps_of_the_warm_up_run_one_layer_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture among them fails, because a graph needs all layers."""
    made = build(EngineConfig(device="cpu", kv_tokens=512))
    model, seen = made.engine.runner.model, list[int]()

    def run(*_: object) -> None:
        seen.append(len(model.layers))

    monkeypatch.setattr(warmup, "_compile_kernels", run)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    runner: Any = SimpleNamespace(
        model=model, exchange=None, decode_graphs=None, mixed_graphs=None, image_inputs=None, prompt_lengths=None,
        max_rows=4, run_without_mixed_graphs=run, store=made.engine.runner.store, device=torch.device("cpu"),
        deterministic=False,
    )  # fmt: skip
    warmup.warm_up(runner, 64, 128)
    assert len(seen) > 10
    assert set(seen) == {3}
    assert len(model.layers) > 3
    runner.run_without_mixed_graphs = lambda plan: one_layer_of_each_kind(model).__enter__()
    with pytest.raises(AssertionError, match="captured without them"):
        warmup.warm_up(runner, 64, 128)
    assert len(model.layers) > 3
    made.engine.close()


def test_a_kernel_that_a_small_gpu_cannot_run_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    def too_large() -> None:
        raise OutOfResources(104448, 101376, "shared memory")

    monkeypatch.setattr(warmup, "_run_task", lambda device, task: task())
    monkeypatch.setattr(warmup, "_compile_tasks", lambda runner: [too_large])
    with pytest.raises(StartupError, match=r"more than this GPU has: .*104448.*101376.*--attention sdpa"):
        warmup._compile_kernels(SimpleNamespace(device=torch.device("cpu"), exchange=None))  # type: ignore[arg-type]


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "find_spec", lambda name: None)
    spec = read_checkpoint(EngineConfig()).spec
    with pytest.raises(StartupError, match=r"--device is cuda, but there is no Triton.*pip install triton"):
        loader.choose_attention(EngineConfig(), spec, torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError("Tried to allocate 2 GiB.\nMuch more follows"), StartupError,
         r"^out of memory on cpu at start: Tried to allocate 2 GiB\.\. Use .* --kv-gib, --swap-gib, [^\n]*$"),
        (RuntimeError("CUDA error: out of memory\nMuch more follows"), StartupError,
         r"^out of memory on cpu at start: CUDA error: out of memory\. Use .* --kv-gib, --swap-gib, [^\n]*$"),
        (RuntimeError("an illegal memory access"), RuntimeError, "^an illegal memory access$"),
    ],
)  # fmt: skip
def test_too_little_memory_at_start_is_explained_and_other_errors_are_their_own(
    monkeypatch: pytest.MonkeyPatch, error: RuntimeError, kind: type[Exception], words: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelRunner, "warm_up", fail)
    with pytest.raises(kind, match=words):
        build(EngineConfig(device="cpu", kv_tokens=512))


def test_an_encoder_that_makes_a_tile_itself_is_rehearsed() -> None:
    """Phi-3-Vision's is given fewer tiles than it has parts."""
    tower = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4}
    processor = {"image_dim_out": 32, "vision_config": {**tower, "image_size": 28, "patch_size": 7}}
    said = {"architectures": ["Phi3VForCausalLM"], "hidden_size": 32, "img_processor": processor}
    eyes = build_encoder(VisionSettings.from_config(said, {"num_crops": 4}), torch.float32, torch.device("cpu"))
    eyes.prepare()
    seen: list[int] = []
    encode = eyes.encode
    eyes.encode = lambda pixels, grid=None: seen.append(len(pixels)) or encode(pixels, grid)  # type: ignore[func-returns-value]
    of: Any = SimpleNamespace(vision_encoder=eyes, store=SimpleNamespace(device=torch.device("cpu"), exchange=None))
    with torch.inference_mode():
        ImageInputs.warmup(of)
    assert seen == [5, 5]
