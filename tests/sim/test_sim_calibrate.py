"""`quire bench calibrate`: the fit recovers what made its steps, errors are those of steps kept out, and what the
command writes is what `quire simulate` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.bench import calibrate, main, steps
from quire.bench.calibrate import by_kind, errors, fitted, kind_of, planned, recorded, shape_of, split
from quire.bench.steps import NOTHING, Sample, Timed, grid
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.sim.cost_model import AttentionShape, Coefficients, CostModel, ModelShape, StepWork, load_calibration
from quire.sim.simulation import Simulation
from quire.startup.checkpoint import Checkpoint, read_checkpoint

SHAPE = ModelShape(10**6, 10**4, 2, (AttentionShape(None, 100, 50),))
TRUE = Coefficients(1e-9, 1e-12, 1e-8, 1e-10, 0.0, 0.0, 5e-4, 1e-5, 1e-4, 2e-6)
WORKLOAD = "fixed:40:12@6"
MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"


def made(cost: CostModel, off: float = 0.0, prompts: tuple[int, ...] = (0, 50, 300)) -> list[Sample]:
    """Steps of all kinds, every third one `off` by that share from its cost."""
    works = [
        StepWork(rows, rows + prompt, 2.0 * 10**6 * (rows + prompt), rows * context * 100.0, prompt**2 * 25.0, 0, 0)
        for rows in (1, 3, 8, 20)
        for context in (10, 100, 1000)
        for prompt in prompts
    ]
    return [
        Sample(kind_of(work), work, cost.device_seconds(work) * (1 + off * (i % 3 == 2)), cost.host_seconds(work))
        for i, work in enumerate(works)
    ]


def test_the_fit_recovers_overlap_and_launches() -> None:
    launched = TRUE._replace(operation=1e-11, overlap=2.0, launch=3.5e-3)
    samples = made(CostModel(SHAPE, launched), prompts=(0, 50, 100, 150, 200, 300, 500, 700, 1000, 1500))
    assert sum(s.seconds == launched.launch for s in samples) > 2
    found = fitted(SHAPE, samples, bandwidth=1e9)
    assert found.overlap == 2
    assert found.launch == pytest.approx(launched.launch, rel=0.1)
    assert errors(CostModel(SHAPE, found), samples).worst < 0.08
    assert errors(CostModel(SHAPE, fitted(SHAPE, samples, 1e9)._replace(overlap=1.0, launch=0.0)), samples).worst > 0.2


def test_a_committed_calibration_is_the_fit_of_its_steps() -> None:
    result = json.loads((MEASUREMENTS / "h200_opt13b_calibration.json").read_text())["results"][0]
    known = load_calibration("h200-opt-13b").coefficients
    samples = [
        Sample(
            s["what"],
            StepWork(**{field: s[field] for field in StepWork._fields if field in s}),
            s["seconds"],
            s["host"],
        )
        for s in result["samples"]
    ]
    shape = shape_of(read_checkpoint(EngineConfig(model_config="opt-13b"), weights=False), 2)
    fit_to, kept = split(samples)
    assert fitted(shape, fit_to, result["bandwidth"], known) == pytest.approx(known, rel=1e-6)
    assert errors(CostModel(shape, known), kept).median < 0.05


def test_weights_are_read_in_no_more_than_a_step_s_time() -> None:
    found = fitted(SHAPE, made(CostModel(SHAPE, TRUE)), bandwidth=1e6)
    assert found.step == 0
    assert found.weight_byte * SHAPE.weight_bytes == pytest.approx(TRUE.step + TRUE.weight_byte * SHAPE.weight_bytes)


def test_errors_are_those_of_steps_kept_out_of_the_fit() -> None:
    cost = CostModel(SHAPE, TRUE)
    fit_to, kept = split(made(cost, off=0.25))
    assert len(fit_to) == 2 * len(kept) == 24
    assert errors(cost, fit_to).worst == pytest.approx(0)
    off = errors(cost, kept)
    assert off[:3] == pytest.approx((0.2, 0.2, 0.2))  # 1 / 1.25 is a fifth too little
    assert off.steps == 12
    assert sum(kind["steps"] for kind in by_kind(cost, kept).values()) == 12


def tiny(**settings: Any) -> tuple[EngineConfig, Checkpoint, ModelShape]:
    config = EngineConfig(model="tiny", enable_prefix_caching=False, **settings)
    source = read_checkpoint(config)
    return config, source, shape_of(source, 4)


def steps_of(folder: Path, seconds: Callable[[StepWork], float]) -> Path:
    """A recording of the steps of WORKLOAD, which took so long."""
    path = folder / "steps.json"
    works = planned(WORKLOAD, *tiny(), 4096)
    path.write_text(json.dumps({WORKLOAD: [[work.rows, work.tokens, seconds(work)] for work in works]}))
    return path


def test_recorded_steps_are_fitted(tmp_path: Path) -> None:
    made_of = tiny()
    cost = CostModel(made_of[-1], TRUE)
    path = steps_of(tmp_path, cost.device_seconds)
    samples = recorded(str(path), *made_of, 4096)[WORKLOAD]
    works = planned(WORKLOAD, *made_of, 4096)
    assert [sample.work for sample in samples] == works
    assert errors(cost, samples).worst == pytest.approx(0)
    out = tmp_path / "calibration.json"
    command = ["calibrate", "--steps", str(path), "--kv-tokens", "4096", "--dtype", "float32", "--out", str(out)]
    assert main([*command, "--device-name", "a device", "--memory-gib", "2", "--bandwidth", "0.1"]) == 0
    found = load_calibration(str(out))
    assert (found.device, found.memory_bytes, found.model) == ("a device", 2**31, "tiny")
    assert found.error is not None
    assert found.error["median"] < 0.01


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("nonsense", "can't be read"),
        ('{"fixed:40:12@6": [[1, 2]]}', "can't be read"),
        ('{"fixed:40:12@6": [[1, 2, 0.5]]}', "are not those that this engine plans"),
        ('{"nothing@6": [[1, 2, 0.5]]}', "there is no workload"),
        ('{"fixed:40:12@6": [[1, 2, 1' + 400 * "0" + "]]}", "can't be read"),
    ],
)
def test_bad_records_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "steps.json"
    path.write_text(content)
    with pytest.raises(StartupError, match=words):
        recorded(str(path), *tiny(), 4096)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf"), 1e7])
def test_steps_that_took_no_time_or_any_are_refused(tmp_path: Path, seconds: float) -> None:
    path = steps_of(tmp_path, lambda work: seconds)
    with pytest.raises(StartupError, match=r"took .* seconds.*at most 1,000,000"):
        recorded(str(path), *tiny(), 4096)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        *((["--bandwidth", value], "--bandwidth is") for value in ("0", "-1", "nan", "inf")),
        *((["--memory-gib", value], "--memory-gib is") for value in ("0", "nan", "inf", "1e9")),
        (["--device-name", "an H200\udc80"], "must be Unicode text"),
        (["--depth", "9"], "--depth is 9"),
    ],
)
def test_bad_facts_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(StartupError, match=words):
        main(["calibrate", "--steps", "/nonexistent", "--kv-tokens", "4096", *arguments])


@pytest.mark.parametrize(
    ("content", "words"),
    [("{}", "KeyError"), ("[]", "TypeError"), ('{"costs": {"swap_byte": 2}}', "the swap_byte 2.0"),
     ('{"costs": {"swap_byte": NaN}}', "the swap_byte nan"), ('{"costs": {"swap_byte": 1' + 400 * "0" + "}}", "Over")],
)  # fmt: skip
def test_bad_costs_of_swaps_are_refused(tmp_path: Path, content: str, words: str) -> None:
    path, costs = steps_of(tmp_path, lambda work: 0.5), tmp_path / "costs.json"
    costs.write_text(content)
    command = ["calibrate", "--steps", str(path), "--kv-tokens", "4096", "--dtype", "float32"]
    with pytest.raises(StartupError, match=rf"--calibration .* {words}"):
        main([*command, "--calibration", str(costs)])


def smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ROWS": (1, 4, 8), "CONTEXTS": (16, 64), "PROMPTS": (1, 2), "LENGTHS": (16, 64, 128),
                        "DECODERS": (4, 32)}.items():  # fmt: skip
        monkeypatch.setattr(steps, name, value)


class Mark:
    """An event of a GPU that is simulated."""

    def __init__(self, simulation: Simulation) -> None:
        self.at = max(simulation.runner.stages_free_at[0], simulation.clock.now)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Mark) -> float:
        return 1000 * (later.at - self.at)


def timed_on(monkeypatch: pytest.MonkeyPatch, tokens: int, depth: int, **settings: Any) -> tuple[Timed, CostModel]:
    config, source, shape = tiny(max_num_seqs=64, **settings)
    cost = CostModel(shape, TRUE)
    simulation = Simulation(config, source.spec, cost, tokens, depth=depth)
    simulation.runner.device = SimpleNamespace(type="cuda")  # type: ignore[attr-defined]
    monkeypatch.setattr(steps, "mark", lambda runner: Mark(simulation))
    timed = Timed(simulation.engine, cost.shape)
    timed.clock = simulation.clock
    return timed, cost


def test_overlapping_steps_are_told_apart_by_the_device_s_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a simulated GPU with two steps in flight, exactly the coefficients are found that it was made of."""
    smaller(monkeypatch)
    timed, cost = timed_on(monkeypatch, 8192, 2)
    samples = grid(timed)
    for sample in samples:
        assert (sample.work.attention > 0) == (sample.what != "decode")
        assert (sample.host > 0) == (sample.what == "decode"), "launches aren't the host's"
        assert sample.seconds == pytest.approx(cost.device_seconds(sample.work))
    prompts = [s.work for s in samples if s.what == "prompts"]
    assert [work.rows for work in prompts] == [2, 3] * 3, "something decodes beside"
    assert [work.tokens for work in prompts] == [17, 33, 65, 129, 129, 257]
    found = fitted(cost.shape, samples, bandwidth=1e9)
    assert found == pytest.approx(TRUE, rel=1e-3)


@pytest.mark.parametrize("depth", [1, 2])
def test_chunks_of_a_long_prompt_are_sampled(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, _ = timed_on(monkeypatch, 950, depth, max_num_batched_tokens=100)
    found = steps.long_prompt(timed)
    budget = 100 - (depth > 1)
    longest = min(950, timed.engine.limits.max_len - 1)
    assert 3 < len(found) <= longest // budget - 1, "all chunks but the first"
    assert {sample.work.tokens for sample in found} == {100}
    seen = [sample.work.attention for sample in found]
    assert seen[1] > seen[0]
    assert seen == pytest.approx([seen[0] + i * (seen[1] - seen[0]) for i in range(len(seen))])
    assert not timed.engine.has_unfinished_requests


def test_steps_are_made_and_timed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    smaller(monkeypatch)
    out = tmp_path / "calibration.json"
    assert main(["calibrate", "--device", "cpu", "--kv-tokens", "8192", "--out", str(out)]) == 0
    assert "steps kept out of the fit" in capsys.readouterr().out
    [result] = json.loads(out.read_text())["results"]
    kinds = [sample["what"] for sample in result["samples"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {"decode": 6, "prompts": 6, "prompts and decode": 6}
    for sample in result["samples"]:
        assert sample["seconds"] > 0
        assert sample["host"] > 0
        assert (sample["attention"] > 0) == (sample["what"] != "decode")
    assert [s["rows"] for s in result["samples"][:6]] == [1, 4, 8] * 2
    assert [s["tokens"] for s in result["samples"] if s["what"] == "prompts and decode"] == [20, 48, 68, 96, 132, 160]
    found = load_calibration(str(out))
    assert found.coefficients != NOTHING
    assert found.depth == 1
    assert len(found.source) > 100, "as of those that are committed"
    assert found.error is not None
    assert found.error["steps"] == 6
    assert found.error["target"] == calibrate.TARGET
