"""Beam histories: what was recorded is what the engine chooses in a simulation, and shares as much as for real."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

import quire
from bench.beam_histories import RECORDED_BEAMS, BeamHistory, BeamReplay, load_histories, pack_history, unpack_history
from bench.histories import record
from quire.bench.drive import Decoding, Load, drive
from quire.bench.workloads import Job
from quire.config import EngineConfig
from quire.core.decoding import BeamSearch
from quire.errors import StartupError
from quire.protocol.method import Advance, Branch, Context
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.sim.cost_model import Coefficients, CostModel, ModelShape
from quire.sim.simulation import Simulation, TraceRequest
from quire.startup.build import build

SPEC = ModelSpec("none", (LayerSpec(2, 16),) * 2, 512, 4096, 64, 4, 128, 10**6, eos_ids=(8,))
COST = CostModel(ModelShape.from_spec(SPEC, 2, tied=True), Coefficients(*(0.0,) * 10)._replace(step=0.01))
PLAIN = EngineConfig(enable_prefix_caching=False, max_num_seqs=96)
MADE: dict[int, tuple[BeamHistory, ...]] = {
    3: (((0, 0, 0), (1, 1, 2), (2, 0, 0)), ((0, 0, 0), (0, 1, 2), (1, 1, 1), (0, 2, 2)))
}


def asked(width: int | None, output: int, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, beam_width=width, max_tokens=output, seed=seed, ignore_eos=True, detokenize=False
    )


def trace(width: int, prompts: Sequence[int], outputs: Sequence[int]) -> list[TraceRequest]:
    """All at once; request i has the seed i."""
    sizes = enumerate(zip(prompts, outputs))
    return [TraceRequest(0.0, [20 + i] * prompt, asked(width, output, i)) for i, (prompt, output) in sizes]


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[tuple[int, ...]]]:
    """What the engine's own search chose, step by step, by the first token of the prompt."""
    found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    real = BeamSearch.advance

    def noted(self: BeamSearch, branches: Sequence[Branch], context: Context) -> Advance:
        done = real(self, branches, context)
        if done.choices:
            found[branches[0].tokens[0]].append(tuple(choice.parent for choice in done.choices))
        return done

    monkeypatch.setattr(BeamSearch, "advance", noted)
    return found


@pytest.mark.parametrize(("memory", "workload"), [("paged", "alpaca"), ("orca-max", "sharegpt")])
def test_the_engine_chooses_what_was_recorded(
    memory: str, workload: str, chosen: dict[int, list[tuple[int, ...]]]
) -> None:
    """Paged memory is too small for all beams at the end; a reserved one copies them."""
    histories = load_histories(workload)
    config = EngineConfig(memory=memory, enable_prefix_caching=False, page_size=4, max_num_seqs=96, max_model_len=60)
    simulation = Simulation(config, SPEC, COST, 480, draw=BeamReplay(histories))
    simulation.run(trace(6, [19] * 6, [40] * 6))
    assert (simulation.engine.scheduler.num_preemptions > 0) == (memory == "paged")
    assert [chosen[20 + i] for i in range(6)] == [list(history[:39]) for history in histories[6][:6]]
    assert any(len(set(parents)) < 6 for steps in chosen.values() for parents in steps[1:])


def test_longer_outputs_go_on_in_another_history(chosen: dict[int, list[tuple[int, ...]]]) -> None:
    replay = BeamReplay(MADE)
    Simulation(PLAIN, SPEC, COST, 4096, draw=replay).run(trace(3, [5], [60]))
    assert chosen[20][:3] == list(MADE[3][0])
    later = {*MADE[3][0][1:], *MADE[3][1][2:]}  # the second halves
    assert set(chosen[20][3:]) == later
    assert chosen[20] == [replay.parents(0, 3, step) for step in range(59)]
    assert [replay.parents(1, 3, step) for step in range(4)] == list(MADE[3][1])


def test_requests_without_beams_draw_what_they_ask_for() -> None:
    """End tokens are avoided, as they are without a replay."""
    requests = [
        TraceRequest(0.0, [30], SamplingParams(n=3, max_tokens=4, detokenize=False)),
        TraceRequest(0.0, [31], asked(3, 3, 0)),
        TraceRequest(0.0, [32], asked(None, 5, 0)),
    ]
    outcome = Simulation(PLAIN, SPEC, COST, 4096, draw=BeamReplay(MADE, frozenset(SPEC.eos_ids))).run(requests)
    assert [sum(count for _, count in one.token_times) for one in outcome.requests] == [12, 3, 5]
    assert 8 not in BeamReplay(MADE, frozenset({8})).tokens


def test_a_simulation_shares_what_a_real_run_shares() -> None:
    """Of the same prompts' lengths, outputs and beams, all at once: exactly. The real run counts sharing after each
    step, and so does a short simulation."""
    engine = build(EngineConfig(threads=1, enable_prefix_caching=False, kv_tokens=4096, max_num_seqs=32)).engine
    jobs = [
        Job([10 + (7 * i + 3 * j) % 900 for j in range(prompt)], 40) for i, prompt in enumerate((12, 40, 3, 70, 21))
    ]
    recorded = record(engine, [job.prompt for job in jobs], 4, 40)
    _, facts = drive(engine, jobs, Load((0.0,) * len(jobs)), Decoding(beam_width=4))
    engine.close()
    replay = BeamReplay({4: [tuple(history) for history in recorded]})
    requests = trace(4, [len(job.prompt) for job in jobs], [job.output for job in jobs])
    saved = Simulation(PLAIN, SPEC, COST, 4096, draw=replay).run(requests).totals.sharing_saved
    assert saved == pytest.approx(float(facts["sharing_saved"]), rel=1e-9)
    assert saved > 0.4


def test_packing_is_undone() -> None:
    for history in MADE[3]:
        assert unpack_history(pack_history(history), 3) == history
    assert pack_history(((0, 0), (0, 1), (1, 0))) == "00 . 10"
    for text, what in (("", "begin"), (". 00", "begin"), ("00 02", "below 2"), ("00 0", "2 digits")):
        with pytest.raises(ValueError, match=what):
            unpack_history(text, 2)


def test_the_recording_is_of_the_model_that_is_bundled() -> None:
    results = json.loads(RECORDED_BEAMS.read_text())["results"]
    weights = Path(quire.__file__).parent / "assets" / "tiny" / "model.safetensors"
    assert {result["weights"] for result in results} == {hashlib.sha256(weights.read_bytes()).hexdigest()}
    assert {(result["workload"], result["beam_width"]) for result in results} == {
        (workload, width) for workload in ("alpaca", "sharegpt") for width in (2, 4, 6)
    }
    for result in results:
        assert len(result["histories"]) == result["prompts"]
        assert {len(text.split()) for text in result["histories"]} == {result["steps"]}


def test_what_was_not_recorded(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"for 'chat'"):
        load_histories("chat")
    for text in ("{", "[]", '{"results": [{"workload": "alpaca", "beam_width": 2, "histories": ["01"]}]}'):
        (tmp_path / "beams.json").write_text(text)
        with pytest.raises(StartupError, match="can't be used"):
            load_histories("alpaca", tmp_path / "beams.json")
    with pytest.raises(StartupError, match=r"no histories of 5 beams.*2, 4, 6"):
        BeamReplay(load_histories("alpaca")).parents(0, 5, 0)
