"""`quire bench histories`: what it writes is what simulations read."""

from __future__ import annotations

from pathlib import Path

import pytest
from benching import bench

from quire.bench.histories import LONGEST, cut, parted
from quire.sim.histories import load


def test_a_recording_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("quire.bench.histories.STORY", 200)
    flags = ("--threads", "1", "--prompts", "3", "--steps", "9", "--beam-width", "2", "--beam-width", "3")
    bench(tmp_path, "histories", "tiny", *flags)
    found = load("sharegpt", tmp_path / "benched/result.json")
    assert {width: len(histories) for width, histories in found.items()} == {2: 3, 3: 3}
    assert all(len(history) == 9 for histories in found.values() for history in histories)
    assert "steps that fork" in capsys.readouterr().out


def test_prompts_are_cut_to_a_workloads_lengths() -> None:
    text = list(range(LONGEST + 100))
    jobs = cut("alpaca", 5, text)
    assert [job.prompt for job in jobs] == [text[job.prompt[0] :][: len(job.prompt)] for job in jobs]
    assert len({len(job.prompt) for job in jobs}) > 1


def test_steps_that_fork() -> None:
    assert parted("00 . 10 11") == 0.5  # a change of order forks nobody
