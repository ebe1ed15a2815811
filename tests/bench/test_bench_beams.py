"""`quire bench beams`: all ways of beam search find the same, and what each copies; and beams in the other benches."""

from __future__ import annotations

from pathlib import Path

import pytest
from benching import results

from quire.bench.control import branching


def test_every_way_finds_the_same_beams(tmp_path: Path) -> None:
    (result,) = results(tmp_path, "beams", "tiny", "--threads", "1", "--repeat", "1", "--workload", "fixed:40:12@2")
    assert result["same_results"] == {"copy-on-write": 2, "copy everything": 2, "transformers": 2}
    assert result["sharing_saved"]["copy everything"] == 0
    assert result["sharing_saved"]["copy-on-write"] > 0.4  # two of three prompt pages are shared by four beams
    assert 0 < result["copied_pages"]["copy-on-write"] < result["copied_pages"]["copy everything"]
    assert result["speedup"]["copy-on-write"] == 1


def test_throughput_of_beams_and_samples(tmp_path: Path) -> None:
    flags = ("throughput", "tiny", "--threads", "1", "--workload", "fixed:40:20@3", "--repeat", "1", "--warmup", "0")
    for more, sequences, returned in (
        (("--n", "3"), 3, 3),
        (("--n", "2", "--best-of", "4"), 4, 2),
        (("--beam-width", "4"), 4, 1),
    ):
        (result,) = results(tmp_path, *flags, *more)
        run = result["median"]
        assert result["decoding"]["n"] == returned
        assert run["output_tokens"] == 3 * 20 * returned
        # One row a request for the prompt and one a sequence for every further token.
        assert run["mean_batch"] * run["steps"] == pytest.approx(3 * (1 + 19 * sequences))
        assert 0 < run["sharing_saved"] < 1
        assert run["copied_pages"] >= 3 * (sequences - 1)  # 40 tokens end within a page
        assert run["swapped_out_bytes"] == run["preemptions"] == run["preemptions_swap"] == 0


def test_control_of_beams(tmp_path: Path) -> None:
    (result,) = results(tmp_path, "control", "--beams", "4", "--sequences", "3", "--contexts", "40", "--steps", "20")
    assert (result["sequences"], result["beams"], result["context"]) == (3, 4, 40)
    assert result["step_us"]["p50"] > 0


def test_half_of_the_branches_are_parted_from(tmp_path: Path) -> None:
    """What `control --beams` says that it measures: in each step 2 of 4 branches are freed and 2 are born."""
    from quire.bench.control import _candidates

    scheduler = branching(3, 4, 40, 10)
    for _ in range(6):
        plan = scheduler.schedule()
        assert plan is not None
        before = {seq.id for request in scheduler.running for seq in request.live}
        scheduler.update(plan, _candidates(plan))
        after = {seq.id for request in scheduler.running for seq in request.live}
        assert (len(before), len(after), len(before & after)) == (12, 12, 6)
        scheduler.memory.check()
