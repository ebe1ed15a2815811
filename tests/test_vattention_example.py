"""The example of the paper's interface: a plain transformer gives over virtual tensors what it gives over ordinary
ones, in few lines."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "virtual_memory.py"


@pytest.fixture
def example() -> Any:
    spec = importlib.util.spec_from_file_location("virtual_memory", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_it_decodes_as_over_ordinary_tensors(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    texts, worst = example.main()
    assert [len(text) for text in texts] == [10 + 40, 120 + 40, 66 + 40]
    assert len(set(texts[0][10:])) > 5, "a text of one word would say little"
    assert worst < 1e-4
    assert "failures=0" in capsys.readouterr().out


def test_it_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 60
