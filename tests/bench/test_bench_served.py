"""The numbers of a run against a server, beside vLLM's definitions written out over made-up answers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from quire.bench.fleet import Sent
from quire.bench.served import Timed, show, summary
from quire.bench.workloads import Job

IDLE = {"cpu_s": 0.4, "seconds": 4.0, "busiest": 0.2, "lag_p99_s": 0.001, "lag_max_s": 0.004}
LATE = 0.002


def answer(number: int, due: float, times: list[float], tokens: int, counts: list[int] | None = None) -> Sent:
    return Sent(number, due, due + LATE, times, counts or [], 5, tokens, 200, None)


def made_up(rng: random.Random, count: int) -> list[Sent]:
    """Answers of a token a chunk, some with a last chunk that brings none."""
    answers = []
    for number in range(count):
        now = due = rng.uniform(0, 3)
        times = [now := now + rng.uniform(0.01, 0.3) for _ in range(rng.randint(1, 20))]
        answers.append(answer(number, due, [*times, now + 9] if rng.random() < 0.2 else times, len(times)))
    return answers


def jobs(answers: list[Sent]) -> list[Job]:
    return [Job([1] * 5, one.tokens) for one in answers]


def whole(answers: list[Sent], clients: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return summary(jobs(answers), answers, clients or [IDLE])


def test_latencies_are_vllms() -> None:
    answers = made_up(random.Random(5), 300)
    ttfts, tpots, itls, e2els = [], [], [], []
    for one in answers:  # as its client does it: from when a request was sent, in the order of its chunks
        latest = one.sent
        for i, moment in enumerate(one.times[: one.tokens]):
            ttfts += [moment - one.sent] if i == 0 else []
            itls += [moment - latest] if i > 0 else []
            latest = moment
        e2els.append(latest - one.sent)
        tpots += [(e2els[-1] - ttfts[-1]) / (one.tokens - 1)] if one.tokens > 1 else []
    run = whole(answers)
    duration = max(one.times[one.tokens - 1] for one in answers)
    tokens = sum(one.tokens for one in answers)
    expected = {
        "duration": duration, "completed": 300, "failed": 0, "total_input_tokens": 1500, "total_output_tokens": tokens,
        "request_throughput": 300 / duration, "output_throughput": tokens / duration,
        "total_token_throughput": (tokens + 1500) / duration,
    }  # fmt: skip
    for name, values in {"ttft": ttfts, "tpot": tpots, "itl": itls, "e2el": e2els}.items():
        expected[f"mean_{name}_ms"] = np.mean(values) * 1000
        expected[f"median_{name}_ms"] = np.median(values) * 1000
        expected[f"p90_{name}_ms"] = np.percentile(values, 90) * 1000
        expected[f"p99_{name}_ms"] = np.percentile(values, 99) * 1000
    assert run["as_vllm"] == pytest.approx(expected)
    assert run["inter_token_from"] == "one token a chunk"
    assert run["inter_token_s"] == run["itl_s"]
    assert run["ttft_s"]["mean"] == pytest.approx(np.mean(ttfts) + LATE)  # ours start when a request was due
    assert run["e2e_s"]["p99"] == pytest.approx(np.percentile(e2els, 99) + LATE)
    assert run["chunks"] == tokens


def test_chunks_of_several_tokens() -> None:
    one = Timed(answer(0, 0.0, [1.0, 1.5, 3.5], 8))
    assert one.brought.tolist() == [3, 4]  # 7 tokens after the first
    assert one.between.tolist() == pytest.approx([0.5 / 3] * 3 + [0.5] * 4)
    assert one.each == pytest.approx(one.between.mean()) == pytest.approx(2.5 / 7)
    known = Timed(answer(0, 0.0, [1.0, 1.5, 3.5], 8, [2, 3, 8]))
    assert known.between.tolist() == pytest.approx([0.5] + [0.4] * 5)
    assert whole([known.sent])["inter_token_from"] == "usage of every chunk"
    assert whole([one.sent])["inter_token_from"] == "mean tokens a chunk"
    assert Timed(answer(0, 0.0, [1.0], 8)).between.tolist() == []
    assert Timed(answer(0, 0.0, [1.0], 1)).each is None


def test_nothing_is_lost_silently() -> None:
    answers = made_up(random.Random(6), 10)
    answers[2] = answers[2]._replace(status=429, error="429: slow down", times=[])
    answers[3] = answers[3]._replace(status=503, error="503: full", times=[])
    answers[4] = answers[4]._replace(error="the connection was closed in an answer")
    answers[5] = answers[5]._replace(status=0, error="no connection: Connection refused", times=[])
    asked = jobs(answers)
    asked[6] = Job([1] * 5, answers[6].tokens + 1)
    run = summary(asked, answers, [IDLE])
    assert (run["attempted"], run["requests"], run["other_lengths"]) == (10, 6, 1)
    assert run["refused"] == {"429": 1, "503": 1}
    reasons = ["the connection was closed in an answer", "no connection: Connection refused"]
    assert run["failed"] == dict.fromkeys(reasons, 1)
    assert run["as_vllm"]["failed"] == 4
    assert run["output_tokens"] == sum(one.tokens for one in answers if one.error is None)
    shown = show([{"workload": "w", "model": "m", "url": "u", "median": {**run, "server": None}}])
    assert "6 of 10 requests" in shown
    assert "(2 refused, 2 failed)" in shown
    assert all(f"1 requests without an answer: {what}" in shown for what in ("429", "503", *reasons))


def test_nobody_was_answered() -> None:
    run = whole([answer(0, 0.0, [], 0)._replace(error="gone")])
    assert (run["requests"], run["seconds"], run["ttft_s"], run["output_tokens_per_s"]) == (0, 0.0, None, 0.0)


@pytest.mark.parametrize(
    ("client", "late", "why"),
    [
        ({}, 0.0, []),
        ({"busiest": 0.95}, 0.0, ["a client used 0.95 of a core"]),
        ({"lag_p99_s": 0.05}, 0.0, ["a client's event loop was 50 ms late in 1 % of the time"]),
        ({}, 0.2, ["1 % of the requests were sent 200 ms late or more"]),
    ],
)
def test_a_saturated_client_says_so(client: dict[str, Any], late: float, why: list[str]) -> None:
    answers = [one._replace(sent=one.due + late) for one in made_up(random.Random(7), 20)]
    run = whole(answers, [IDLE, {**IDLE, **client}])
    assert run["saturated"] == why
    assert run["sent_late_s"]["max"] == pytest.approx(late)
    shown = show([{"workload": "w", "model": "m", "url": "u", "median": {**run, "server": None}}])
    assert ("may be its own" in shown) == bool(why)


def test_the_engines_view_is_beside_the_clients() -> None:
    seen = {"count": 9, "mean": 0.25, "p50": 0.125, "p90": 0.5, "p99": 0.75}
    server = {"inter_token_s": seen, "cpu_cores": {"front": 0.5}, "cpu_us_per_token": {"front": 123.0}}
    run = {**whole(made_up(random.Random(8), 20)), "server": server}
    lines = show([{"workload": "w", "model": "m", "url": "u", "median": run}]).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("between tokens"))
    assert lines[at + 1].split() == ["as", "the", "engine", "saw", "it", "250", "125", "500", "750"]
    assert "server's processor time: front 123 us a token (0.50 cores)" in lines
