"""Measurements of starts, and what can be tested of the GPU's profile without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from quire.bench import main
from quire.bench.profile import kind, union
from quire.errors import StartupError


def test_a_start_is_measured_to_its_third_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "start.json"
    assert main(["start", "--device", "cpu", "--kv-tokens", "256", "--out", str(out)]) == 0
    [result] = json.loads(out.read_text())["results"]
    assert 0 < result["ready_s"] < result["token_s"][0] < result["token_s"][1] < result["token_s"][2]
    assert "tiny" in capsys.readouterr().out


def test_time_that_kernels_cover_together_is_counted_once() -> None:
    assert union([]) == 0
    assert union([(0, 2), (5, 6)]) == 3
    assert union([(5, 9), (0, 6), (1, 2), (9, 10)]) == 10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_decode", "_decode"),
        ("void at::native::elementwise<4>(int, float*)", "at::native::elementwise"),
        ("nvjet_sm90_tst_256x128_64x4_TNT", "nvjet_sm90_tst_256x128_64x4_TNT"),
    ],
)
def test_kernels_are_named_without_their_arguments(name: str, expected: str) -> None:
    assert kind(name) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it does without a GPU")
def test_a_profile_needs_a_gpu() -> None:
    with pytest.raises(StartupError, match="finds none"):
        main(["profile"])
