"""Figure 18: part (b) runs on a CPU in a small form and its verdicts can fail; part (a) says that it needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.reproduce import ENTRIES, attention_blocks, main
from quire.reproduce.attention_blocks import Kernel, Served, _verdicts
from quire.reproduce.result import DIFFERS, HOLDS


@pytest.mark.soak
@pytest.mark.timeout(400)  # it waits for requests that come over time, the longer the busier the machine is
def test_latency_by_page_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_blocks, "SIZES", {False: (1, 16, 32, 256), True: (256,)})
    monkeypatch.setattr(attention_blocks, "REQUESTS", {"cpu": {"sharegpt": (1, 1), "alpaca": (3, 3)}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main(["fig18b", "--out", str(tmp_path)])
    results = json.loads((tmp_path / "fig18b.json").read_text())["results"]
    assert [result["row"] for result in results] == ["P-F18b"] * 4
    assert all(result["ours"] > 0 for result in results)
    assert results[0]["ours"] >= 1  # over the best
    assert (tmp_path / "fig18b.png").read_bytes().startswith(b"\x89PNG")


def served(sharegpt: dict[int, float], alpaca: dict[int, float]) -> list[Served]:
    points = {"sharegpt": sharegpt, "alpaca": alpaca}
    return [Served(trace, page, 1.0, s, 1.0, 0) for trace, by in points.items() for page, s in by.items()]


def test_verdicts_follow_the_paper() -> None:
    paper = served({1: 3.0, 16: 1.0, 32: 1.0, 128: 1.05, 256: 1.6}, {1: 3.0, 16: 1.0, 32: 1.05, 128: 2.0, 256: 4.0})
    assert [result.verdict for result in _verdicts(paper)] == [HOLDS] * 4
    other = served({1: 0.9, 16: 1.0, 32: 1.0, 128: 1.2, 256: 1.6}, {1: 0.9, 16: 1.0, 32: 1.2, 128: 1.0, 256: 1.1})
    assert [result.verdict for result in _verdicts(other)] == [DIFFERS] * 4
    assert Kernel("m", 1, 1, 12.5, 10.0, 9.0).overhead == pytest.approx(0.25)


def test_the_kernels_part_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("quire.reproduce.ENTRIES", {name: ENTRIES[name] for name in ("fig18a", "x1")})
    assert main(["--all"]) == 0  # what it can't measure doesn't stop the others
    said = capsys.readouterr()
    assert "fig18a: left out" in said.err
    assert "x1:" in said.out
