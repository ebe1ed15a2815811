"""What a start does before torch is imported: ranks, what ends them and what never starts any; memory for weights."""

from __future__ import annotations

import threading
from dataclasses import replace
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import IDLE

from quire.config import EngineConfig
from quire.distributed import rank_devices, remote_runner
from quire.distributed.rank_handle import RankLaunchThread
from quire.errors import StartupError
from quire.ipc.child_process import ChildProcess
from quire.kernels.cpu.weight_arena import weight_arena
from quire.startup import build as building
from quire.startup import loader
from quire.startup import prealloc as module
from quire.startup.build import build
from quire.startup.checkpoint import Checkpoint, read_checkpoint
from quire.startup.prealloc import GPU_DEVICE_FILES, preallocate_weights
from quire.text.template_process import TemplateProcess

UNEVEN = {"pp": 3, "memory": "virtual"}


class Stand:
    """In the place of ranks."""

    started = ended = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        """Count a start."""
        Stand.started += 1

    def kill(self) -> None:
        """Count an end."""
        Stand.ended += 1


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    monkeypatch.setattr(Stand, "started", 0)
    monkeypatch.setattr(Stand, "ended", 0)
    monkeypatch.setattr(remote_runner, "RemoteRunner", Stand)
    return Stand


@pytest.mark.parametrize("step", [
    "read_checkpoint", "start_ranks", "preallocate_weights", "import_module", "read_tokenizer_and_template",
    "read_image_loader", "build_engine",
])  # fmt: skip
@pytest.mark.parametrize("error", [KeyboardInterrupt(), StartupError("no"), RuntimeError("no")])
def test_whatever_goes_wrong_ends_them(
    ranks: type[Stand], monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    def wrong(*_: Any, **__: Any) -> None:
        raise error

    if step != "import_module":
        import_module("torch")
    monkeypatch.setattr(building, "build_engine", lambda *_, **__: pytest.fail("an engine is built"))
    monkeypatch.setattr(building, step, wrong)
    made: list[TemplateProcess] = []
    monkeypatch.setattr(
        "quire.text.template_process.TemplateProcess", lambda: made.append(TemplateProcess()) or made[0]
    )
    with pytest.raises(type(error)) as raised:
        build(EngineConfig(tp=2, device="cpu"))
    assert raised.value is error
    assert ranks.ended == (step not in ("read_checkpoint", "start_ranks"))
    assert [one._kill.alive for one in made] == [False], "the process that renders chat templates"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tp": 3}, "--tp is 3, which doesn't divide the model"),
        ({"pp": 63}, "--pp is 63, and the model has"),
        ({"tp": 2, "ray_address": "127.0.0.1:1"}, "--ray-address is given, and --executor is auto"),
        ({"model_config": "llama3-8b", "dummy_weights": True, "skip_tokenizer_init": True} | UNEVEN,
         "--memory is virtual, and of 32 layers --pp 3"),
        ({"tp": 2, "device": "cuda"}, "--device is cuda, but torch finds no GPU"),
    ],
)  # fmt: skip
def test_what_is_refused_starts_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], told: str
) -> None:
    monkeypatch.setattr(remote_runner, "RemoteRunner", lambda *_, **__: pytest.fail("ranks are started"))
    monkeypatch.setattr(rank_devices, "GPU_DEVICE_FILES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(StartupError, match=told):
        build(EngineConfig(**{"device": "cpu"} | settings))


# Devices' files that machines have; what CUDA_VISIBLE_DEVICES is, of containers, of clusters, of people.
FILES: dict[str, list[str]] = {
    "none": [],
    "two": ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"],
    "eight": [f"nvidia{i}" for i in range(8)],
    "far": ["nvidia7", "nvidia9"],  # a container has those that it is given
    "wsl": ["dxg"],
    "jetson": ["nvhost-gpu", "nvhost-ctrl", "nvmap", "nvgpu"],
    "rocm": ["kfd", "dri"],
    "mig": ["nvidia0", "nvidia-caps"],
}
NAMED = [
    None, "", " ", "-1", "NoDevFiles", "none", "0", "0,1", " 0 , 1,", "0,-1,1", "1,1", "7", "GPU-1f,GPU-2e",
    "MIG-4f7f,MIG-9c1b", "MIG-GPU-4f7f/1/0", ",", "all",
]  # fmt: skip


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return read_checkpoint(EngineConfig(tp=2))


def started_on(config: EngineConfig, source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return the device of the ranks that an engine gets, or "" and the cause of the refusal."""
    assembled: list[Any] = []
    monkeypatch.setattr(building, "_assemble", lambda config, *rest: assembled.append((config, rest[-1])))
    try:
        building.build_engine(config, source, (), remote_runner=building.start_ranks(config, source))
    except StartupError as error:
        return "", error.cause
    ((config, ranks),) = assembled
    return (building.choose_device(config), "") if type(ranks) is Stand else ("", "no ranks, and no refusal")


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
@pytest.mark.parametrize("files", FILES)
def test_torch_alone_says_what_there_is(
    ranks: type[Stand], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Checkpoint, files: str, device: str
) -> None:
    """Whatever device files and variables say, there is one set of ranks on the device that torch finds, or a refusal
    that names what torch finds, and no rank."""
    for name in FILES[files]:
        (tmp_path / name).touch()
    monkeypatch.setattr(rank_devices, "GPU_DEVICE_FILES", f"{tmp_path}/nvidia[0-9]*")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for named, found, shared in product(NAMED, (0, 1, 2, 8), ("", "1")):
        monkeypatch.setenv("QUIRE_SHARE_GPU", shared)
        if named is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
        monkeypatch.setattr("torch.cuda.is_available", lambda found=found: found > 0)
        monkeypatch.setattr("torch.cuda.device_count", lambda found=found: found)
        on = "cpu" if device == "cpu" or (device == "auto" and not found) else "cuda"
        fits = on == "cpu" or found >= 2 or (found and shared)
        ranks.started = ranks.ended = 0
        where, said = started_on(EngineConfig(tp=2, device=device), tiny, monkeypatch)
        assert where == (on if fits else ""), (named, found, shared, said)
        assert ("torch finds" in said) == (not fits)
        assert ranks.started - ranks.ended == bool(fits)
        assert ranks.started <= 1, "not even for a while"


def test_an_interrupt_while_they_start_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ChildProcess] = []
    interrupted = threading.Event()

    def start() -> list[ChildProcess]:
        interrupted.wait(60)
        started.append(ChildProcess(1, IDLE))
        return started

    def interrupt() -> None:
        interrupted.set()
        raise KeyboardInterrupt

    keeper = RankLaunchThread(start)
    monkeypatch.setattr(keeper._launched, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        keeper.wait_for_children()
    keeper.join(60)
    assert not keeper.is_alive()
    assert started[0].has_exited()
    assert started[0].connections[0].fileno() == -1


# What is made ready for packed weights before torch is there: no more than is free, and none after a failure.

CONFIG = EngineConfig(device="cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes that are allocated, on a machine with kernels."""
    sizes: list[int] = []
    monkeypatch.setattr(module, "weight_arena", lambda: SimpleNamespace(prefault=sizes.append))
    monkeypatch.setattr(module.kernels, "find_library", lambda name: Path("avx2.so"))
    return sizes


@pytest.fixture
def source() -> Checkpoint:
    return read_checkpoint(CONFIG)


def test_as_much_as_weights_take(asked: list[int], source: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    preallocate_weights(CONFIG, source)
    preallocate_weights(replace(CONFIG, quantization="int4"), source)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 10))
    preallocate_weights(CONFIG, source)
    plain, few, little = asked
    assert 0.5 < plain / (2 * source.spec.parameters) <= 1.1
    assert few < plain / 3
    assert little == 1 << 9


def test_nothing_where_a_gpu_may_compute(
    asked: list[int], source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor for a dangling link, which its reader reports."""
    monkeypatch.setattr("os.path.exists", lambda path: path in GPU_DEVICE_FILES)
    preallocate_weights(EngineConfig(), source)
    assert asked == []
    preallocate_weights(CONFIG, source)
    assert len(asked) == 1
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    preallocate_weights(CONFIG, source._replace(path=tmp_path))
    assert asked[1:] == [0]


@pytest.mark.parametrize("status", [0, 100])
def test_a_gpu_is_opened_where_it_may_compute(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    calls: list[str] = []
    names = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent")
    driver = SimpleNamespace(**{name: lambda *_, name=name: calls.append(name) or status for name in names})
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: driver)
    sizes: list[int] = []

    def allocate_in_thread(open_gpu: Any, num_bytes: int) -> None:
        opened = open_gpu()
        assert opened is None if status else opened[0] is driver, "without a context nothing is allocated"
        sizes.append(num_bytes)

    monkeypatch.setattr(module, "pinned_block", lambda: SimpleNamespace(allocate_in_thread=allocate_in_thread))
    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 30))
    module.open_gpu(EngineConfig())
    monkeypatch.setattr("os.path.exists", lambda path: path in GPU_DEVICE_FILES)
    module.open_gpu(EngineConfig(device="cpu"))
    assert calls == []
    module.open_gpu(EngineConfig(swap_gib=0.5))
    assert calls == list(names[: 1 if status else 4]), "no call follows one that fails"
    for kv, host in (({"kv_gib": 0.25}, True), ({"kv_tokens": 512}, True), ({"swap_gib": 0.0}, True), ({}, False)):
        module.open_gpu(EngineConfig(**kv), host)
    module.open_gpu(EngineConfig(swap_gib=0.51))
    assert sizes == [1 << 29, 1 << 28, 0, 0, 0, 0], "none if half of the memory is too little"
    monkeypatch.undo()
    if not Path("/dev/nvidiactl").exists():
        assert module._open_first_gpu() is None  # without the library


def test_a_gpu_that_torch_has_chosen_is_not_opened_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(loader, "start_kernel_compiler", started.append)
    monkeypatch.setattr(loader, "open_gpu", lambda config, host_pages: started.append(host_pages))
    loader.start_gpu_work(EngineConfig(tp=2))
    assert started == []
    loader.start_gpu_work(EngineConfig(), host_pages=False)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    loader.start_gpu_work(EngineConfig())
    assert started == [EngineConfig(), False, EngineConfig()]


def test_a_start_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        weight_arena().prefault(1 << 20)
        raise StartupError("it fails", "Nothing")

    monkeypatch.setattr("quire.startup.build.read_tokenizer_and_template", failing)
    weight_arena().finish_block()
    with pytest.raises(StartupError, match="it fails"):
        build(EngineConfig(device="cpu", skip_tokenizer_init=True))
    assert (weight_arena().thread, weight_arena().block, weight_arena().prefaulted) == (None, None, 0)
