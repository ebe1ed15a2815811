"""The lines that a switch of kernels takes are counted as `diff` counts them; what is switched computes the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_reproduce import reproduced

from quire.reproduce import kernel_switch
from quire.reproduce.kernel_switch import WAYS, compared, figure_12
from quire.reproduce.result import CITED, DIFFERS, HOLDS, MEASURED


def test_entry_holds(tmp_path: Path) -> None:
    results = reproduced("vattention-fig12", tmp_path)["results"]
    assert {result["verdict"] for result in results} == {HOLDS, MEASURED, CITED}
    ours = {result["what"]: result["ours"] for result in results}
    assert ours["lines changed from sdpa to sdpa_flash (limit: 10)"] == 4
    assert ours["lines changed from sdpa to varlen_attn (limit: 10)"] == 7


def test_more_lines_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_switch, "MOST", 8)
    differing = [result.ours for result in figure_12().results if result.verdict == DIFFERS]
    assert differing == [9], "from a forced backend to another call"


def test_another_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = WAYS["sdpa_flash"]

    def off(query: Any, keys: Any, values: Any) -> Any:
        return real(query, keys, values) + (keys.stride(0) > 128)  # where tokens of several layers are sliced

    monkeypatch.setitem(WAYS, "sdpa_flash", off)
    same = compared()
    assert same["sdpa"]
    assert not same["sdpa_flash"]


def test_ways_agree() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(9, 4, 16), torch.randn(9, 2, 16), torch.randn(9, 2, 16)
    scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(2, 1)) / 4
    hidden = torch.ones(9, 9, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    dense = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(2, 1))
    for name in kernel_switch.ON_A_CPU:
        assert torch.allclose(WAYS[name](query, keys, values), dense, atol=1e-5)
        assert torch.allclose(WAYS[name](query[-1:], keys, values), dense[-1:], atol=1e-5)
