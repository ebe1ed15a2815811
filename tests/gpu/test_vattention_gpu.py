"""The paper's interface on a GPU: a plain model decodes over it, and torch's kernels give what they give elsewhere."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from papers.kernel_switch import WAYS, compared

pytestmark = pytest.mark.gpu
EXAMPLE = Path(__file__).parents[2] / "examples" / "virtual_memory.py"


def test_the_example() -> None:
    spec = importlib.util.spec_from_file_location("virtual_memory", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    example: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    texts, worst = example.main("cuda")
    assert [len(text) for text in texts] == [50, 160, 106]
    assert worst < 1e-4


def test_kernels_over_virtual_tensors() -> None:
    assert compared() == dict.fromkeys(WAYS, True)
