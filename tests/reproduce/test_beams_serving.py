"""Figures 14 and 19b by simulation: how loads are decoded, and the verdicts, on short traces and made-up numbers."""

from __future__ import annotations

from functools import partial

import pytest
from matplotlib.figure import Figure
from test_serving import made

from quire.reproduce import beams_serving, preemption_serving
from quire.reproduce.beams_serving import SHOWN, Decoded, figure_14
from quire.reproduce.preemption_serving import MEDIUM, PIECE, SIZES, WAYS, figure_19b
from quire.reproduce.preemption_serving import Point as Run
from quire.reproduce.result import DIFFERS, HOLDS, MEASURED
from quire.reproduce.serving import LIMIT, Curve, Load, curve, in_parallel

SMALL = Load("a100-13b", "alpaca", kv_gib=4.0)


in_turn = partial(in_parallel, most=1)


def curves(paged: float, oracle: float, pow2: float = 0.5, most: float = 0.1) -> dict[str, Curve]:
    return {system: made(system, rate) for system, rate in zip(SHOWN, (paged, oracle, pow2, most))}


def test_a_decoded_load_has_the_same_requests() -> None:
    plain = SMALL.trace(2.0, 10.0)
    for way, width in (("basic", 1), ("parallel", 4), ("beam", 4)):
        decoded = Decoded(SMALL, way, width).trace(2.0, 10.0)
        assert [(one.at, one.prompt) for one in decoded] == [(one.at, one.prompt) for one in plain]
        assert [one.params.max_tokens for one in decoded] == [one.params.max_tokens for one in plain]
        assert {one.params.width for one in decoded} == {width}
        assert len({one.params.seed for one in decoded}) == len(plain)
    longer = Decoded(SMALL, "beam", 4).trace(4.0, 10.0)
    assert [one.params.seed for one in longer[:20]] == [one.params.seed for one in decoded]


def test_beams_share_more_than_samples() -> None:
    samples, beams = (Decoded(SMALL, way, 6).saved(1.0, 20.0) for way in ("parallel", "beam"))
    assert 0 < samples < 0.3 < beams < 5 / 6


def test_orca_copies_what_vllm_shares() -> None:
    beams = Decoded(SMALL, "beam", 4)
    shared, apart = (beams.serve(system, beams.trace(1.0, 20.0)) for system in ("paged", "orca-oracle"))
    assert shared.totals.finished
    assert apart.totals.finished
    assert apart.totals.saved == 0
    tokens = [sum(count for _, count in one.events) for one in shared.served]
    assert tokens == [one.params.max_tokens for one in beams.trace(1.0, 20.0)]
    assert tokens == [sum(count for _, count in one.events) for one in apart.served]


@pytest.mark.soak
def test_the_rate_that_beams_sustain_is_found() -> None:
    tiny = Load("a100-13b", "alpaca", kv_gib=1.7)
    found = [curve(Decoded(tiny, "beam", 2), system, 3.0) for system in ("paged", "orca-oracle")]
    assert found[0].highest > found[1].highest > 0
    assert [point.keeps(LIMIT) for point in found[0].points] == [p.rate <= found[0].highest for p in found[0].points]


def test_figure_14_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rates made up, and what is saved simulated."""
    rates = {"paged": 2.0, "orca-oracle": 1.0, "orca-pow2": 0.8, "orca-max": 0.2}
    monkeypatch.setattr(beams_serving, "in_parallel", in_turn)
    monkeypatch.setattr(beams_serving, "curve", lambda load, system, seconds: made(system, rates[system] / load.width))
    monkeypatch.setattr(beams_serving, "WORKLOAD", SMALL)
    monkeypatch.setattr(beams_serving, "SHORT", 20.0)
    done = figure_14()
    found = {result.what: result for result in done.results}
    assert {result.real_or_simulated for result in done.results} == {"simulated"}
    assert found["beam search, 6 beams: rate of vLLM / Orca (Oracle) (within 20%)"].ours == 2
    assert found["vLLM > Orca (Oracle) > Orca (Pow2) > Orca (Max) everywhere"].verdict == HOLDS
    assert isinstance(done.draw(), Figure)
    assert len(done.data) == 7


def test_verdicts_of_figure_14() -> None:
    found = {
        ("basic", 1): curves(1.3, 1.0),
        **{("parallel", width): curves(1.3 + width / 20, 1.0) for width in (2, 4, 6)},
        **{("beam", width): curves(1.3 + width / 6, 1.0) for width in (2, 4, 6)},
    }
    assert {result.verdict for result in beams_serving._claims(found)} == {HOLDS}
    gaps = beams_serving._gaps(found)
    assert [(result.paper, result.verdict) for result in gaps] == [
        (1.3, HOLDS), *[(None, MEASURED)] * 5, (2.3, HOLDS),
    ]  # fmt: skip
    missed = found | {("parallel", width): curves(1.3 * 1.03, 1.0) for width in (2, 4, 6)}
    verdicts = [result.verdict for result in beams_serving._claims(missed)]
    assert verdicts == [DIFFERS, HOLDS, HOLDS, HOLDS], "a search's error is no growth"
    found["beam", 6] = curves(1.5, 1.0, 1.2)
    found["parallel", 4] = curves(1.2, 1.0)
    assert {result.verdict for result in beams_serving._claims(found)} == {DIFFERS}
    assert beams_serving._gaps(found)[-1].verdict == DIFFERS


def test_the_share_of_prompts_is_what_samples_would_save_without_end() -> None:
    shares = {("parallel", 2): 6.0, ("parallel", 4): 9.0, ("beam", 6): 70.0}
    results = {result.what: result for result in beams_serving._shares(shares)}
    prompts = results["parallel sampling: prompts' share of KV (within 20%)"]
    assert (prompts.row, prompts.ours, prompts.verdict) == ("P-X2", 12.0, HOLDS)
    assert [result.verdict for what, result in results.items() if "6 beams" in what] == [HOLDS]


def test_small_pages_are_slow_to_swap_by_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole figure on a short trace, at a rate that preempts."""
    monkeypatch.setattr(preemption_serving, "in_parallel", in_turn)
    monkeypatch.setattr(preemption_serving, "LOAD", Load("a100-13b", "sharegpt", kv_gib=3.0))
    monkeypatch.setattr(preemption_serving, "SIZES", (1, 16))
    monkeypatch.setattr(preemption_serving, "RATE", 2.0)
    monkeypatch.setattr(preemption_serving, "SECONDS", 30.0)
    done = figure_19b()
    runs = {way: done.data[way] for way in WAYS}
    assert runs["recompute"][0]["swapped"] == 0
    assert min(run["preemptions"] for way in WAYS for run in runs[way]) > 0
    assert runs["swap by pieces"][0]["latency"] > runs["swap"][0]["latency"]
    assert isinstance(done.draw(), Figure)
    assert "aren't on that line" in done.text


def test_verdicts_of_figure_19b() -> None:
    points = {(way, page): Run(0.1, 5, 10) for way in WAYS for page in SIZES}
    points["swap by pieces", 1] = Run(1.0, 5, 10)
    verdicts = [HOLDS, MEASURED, MEASURED, MEASURED]  # what is by pieces is too rough to be judged
    assert [result.verdict for result in preemption_serving._verdicts(points)] == verdicts
    points["recompute", MEDIUM[0]] = Run(0.13, 5, 10)
    assert preemption_serving._verdicts(points)[0].verdict == DIFFERS
    assert pytest.approx((220e-3 - 8.2e-3) / (2 * 20480), rel=0.01) == PIECE
