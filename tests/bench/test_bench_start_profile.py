"""Measurements of starts, and what can be tested of the GPU's profile without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from benching import results

from quire.bench.mixed import Timed, show
from quire.parallel.profiled import kind, union


def test_a_start_is_measured_to_its_third_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [result] = results(tmp_path, "start", "--device", "cpu", "--kv-tokens", "256")
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


def test_steps_are_told_apart_by_their_prompts_and_ways() -> None:
    timed = Timed.__new__(Timed)
    timed.host = {(1, False): [2.0], (1, True): [1.0, 3.0, 9.0], (200, True): [4.0]}
    timed.device = {(1, False): [20.0], (1, True): [10.0, 30.0, 90.0], (200, True): [40.0]}
    assert timed.medians() == {
        0: {"eager_host_ms": 2, "eager_device_ms": 20, "eager_steps": 1,
            "replayed_host_ms": 3, "replayed_device_ms": 30, "replayed_steps": 3},
        200: {"replayed_host_ms": 4, "replayed_device_ms": 40, "replayed_steps": 1},
    }  # fmt: skip
    assert "200" in show([{"rows": 1, "context": 2, "prompt": 200, **timed.medians()[200]}])
