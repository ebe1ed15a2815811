"""`quire bench beams`: all ways of beam search find the same, and what each copies; and beams in the other benches."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest
from benching import bench, results

from bench.control import branching
from quire.bench.calibration import fit, fit_computed
from quire.bench.preemption import POLICIES
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.core.preemption_costs import PreemptionCosts


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
    from bench.control import _candidates

    scheduler = branching(3, 4, 40, 10)
    for _ in range(6):
        plan = scheduler.schedule()
        assert plan is not None
        before = {seq.id for request in scheduler.running for seq in request.live_seqs}
        scheduler.update(plan, _candidates(plan))
        after = {seq.id for request in scheduler.running for seq in request.live_seqs}
        assert (len(before), len(after), len(before & after)) == (12, 12, 6)
        scheduler.memory.check()


SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": 128,
}  # fmt: skip
LENGTHS = [16, 64, 256, 1024, 4096]


@pytest.mark.parametrize("true", [(1e-3, 2e-5, 3e-8), (0.0, 2e-5, 3e-8), (1e-3, 0.0, 3e-8), (1e-3, 2e-5, 0.0)])
def test_fit_recovers_the_costs(true: tuple[float, float, float]) -> None:
    rows = [[1.0, float(n), n * n / 2] for n in LENGTHS]
    found = fit(rows, [sum(a * b for a, b in zip(true, row)) for row in rows])
    assert found.coefficients == pytest.approx(list(true), rel=1e-6, abs=1e-12)
    assert found.worst_error < 1e-6


def test_tokens_that_a_step_computes_meanwhile_are_free() -> None:
    """Times of Llama-3-8B's prompts on an H200, recorded by `quire bench preemption`: a straight line is up to 26 %
    off."""
    recorded = json.loads((Path(__file__).parents[2] / "docs/measurements/h200_preemption.json").read_text())
    computed = recorded["results"][0]["computed"]
    lengths, seconds = [one["tokens"] for one in computed], [one["added"] for one in computed]
    found, free_tokens = fit_computed(lengths, seconds)
    costs = PreemptionCosts(0.0, 0.0, *found.coefficients, free_tokens)
    predicted = [costs.recompute_seconds(n, n * n / 2) for n in lengths]
    assert predicted == pytest.approx(seconds, rel=0.15)
    assert fit([[1.0, n, n * n / 2] for n in lengths], seconds).worst_error > 0.25


def test_no_cost_is_negative() -> None:
    """Samples that fall with the length: the best straight line would have a negative slope."""
    found = fit([[1.0, float(n)] for n in LENGTHS], [5.0, 4.0, 3.0, 2.0, 1.0])
    assert found.coefficients[0] > 0
    assert found.coefficients[1] == 0
    assert found.worst_error > 0.1


def test_calibration_is_read_by_the_engine(tmp_path: Path) -> None:
    content = bench(tmp_path, "preemption", "--repeat", "1", "--kv-tokens", "700")
    (result,) = content["results"]
    assert content["costs"] == result["costs"]
    assert result["threads"] == 1
    assert content["costs"]["swap_byte"] > 0
    assert content["costs"]["compute_fixed"] + content["costs"]["compute_token"] + content["costs"]["compute_pair"] > 0
    assert [swap["bytes"] for swap in result["swaps"]] == [512 * swap["tokens"] for swap in result["swaps"]]
    config = EngineConfig(
        dtype="float32", device="cpu", kv_tokens=256, calibration=str(tmp_path / "benched/result.json")
    )
    with built(config, SHAPE) as made:
        assert made.engine.scheduler.costs._asdict() == content["costs"]


def test_policies_are_compared_on_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = "fixed:20:30@6/104"
    flags = ("--repeat", "1", "--compare", "--load", load, "--kv-tokens", "700")
    _, result = results(tmp_path, "preemption", *flags)
    assert (result["load"], result["requests"], result["kv_tokens"]) == (load, 6, 104)
    assert set(result["seconds"]) == set(POLICIES)
    assert result["preempted"]["swap"]["swap"] > 0
    assert result["preempted"]["swap"]["recompute"] == 0
    assert result["preempted"]["recompute"]["recompute"] > 0
    assert result["preempted"]["recompute"]["swap"] == 0
    assert result["swapped_bytes"]["swap"] > 0
    assert result["swapped_bytes"]["recompute"] == 0
    better = min(("swap", "recompute"), key=result["median_s"].get)
    assert result["better"] == better
    turns = zip(result["seconds"]["auto"], result["seconds"][better])
    assert result["auto_over_better"] == pytest.approx(median(auto / fixed for auto, fixed in turns))
    assert load in capsys.readouterr().out
