"""What is made ready for packed weights before torch is there: no more than is free, and none after a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from quire import reserve as module
from quire.build import build
from quire.config import EngineConfig
from quire.data.kernels.cpu.memory import memory
from quire.errors import StartupError
from quire.reserve import GPUS, reserve
from quire.source import Source, read_source

CONFIG = EngineConfig(device="cpu")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes that are asked for, on a machine with kernels."""
    sizes: list[int] = []
    monkeypatch.setattr(module, "memory", lambda: SimpleNamespace(ahead=sizes.append))
    monkeypatch.setattr(module.kernels, "suited", lambda name: Path("avx2.so"))
    return sizes


@pytest.fixture
def source() -> Source:
    return read_source(CONFIG)


def test_as_much_as_weights_take(asked: list[int], source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(CONFIG, source)
    reserve(replace(CONFIG, quantization="int4"), source)
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1 << 10))
    reserve(CONFIG, source)
    plain, few, little = asked
    assert 0.5 < plain / (2 * source.spec.parameters) <= 1.1
    assert few < plain / 3
    assert little == 1 << 9


def test_nothing_where_a_gpu_may_compute(asked: list[int], source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.exists", lambda path: path in GPUS)
    reserve(EngineConfig(), source)
    assert asked == []
    reserve(CONFIG, source)
    assert len(asked) == 1


def test_a_link_to_nothing_is_no_checkpoint_here(asked: list[int], source: Source, tmp_path: Path) -> None:
    """Whoever reads it says so."""
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    reserve(CONFIG, source._replace(folder=tmp_path))
    assert asked == [0]


def test_a_start_that_fails_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        memory().ahead(1 << 20)
        raise StartupError("it fails", "Nothing")

    monkeypatch.setattr("quire.build.read_text", failing)
    memory().settle()
    with pytest.raises(StartupError, match="it fails"):
        build(EngineConfig(device="cpu", skip_tokenizer_init=True))
    assert (memory().thread, memory().block, memory().ready) == (None, None, 0)
