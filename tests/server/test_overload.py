"""A full queue, a dead engine, a stalled one: what clients are told."""

from __future__ import annotations

import concurrent.futures
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_service
import httpx
import openai
import pytest
from asking import ADMIN, as_admin, openai_of
from echo_service import BRAKED, Echo, Placement, Running
from waiting import wait_until

from quire.core.outputs import BranchOutput
from quire.core.recovery import RunnerRestarter
from quire.errors import InputError, Overloaded, RanksLost
from quire.memory.interface import KVMemory
from quire.protocol.step_plan import SeqSlice, SliceResult
from quire.text.embedding import embedding_vector


def test_a_list_of_prompts_is_queued_whole_or_not_at_all(brake: Path, placement: Placement) -> None:
    """It counts once among the requests that wait; and of prompts there may wait 16 for each of these."""
    model = echo_service.built(Echo(brake=str(brake)), max_num_seqs=1, max_num_queued_reqs=2)
    with echo_service.serving(model, placement=placement) as running:
        url, body = f"{running.url}/v1/completions", {"prompt": ["a"] * 200, "max_tokens": 5}
        answer = httpx.post(url, json=body, timeout=60)
        assert answer.status_code == 400
        assert "at most 32 may wait" in answer.json()["error"]["message"]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first = pool.submit(httpx.post, url, json={"prompt": ["a"] * 20, "max_tokens": 200, "ignore_eos": True})
            wait_until(lambda: running.metric("quire_num_requests_waiting") == 19, "19 prompts wait")
            assert httpx.post(url, json=body | {"prompt": ["a"] * 14}).status_code == 503
            second = pool.submit(httpx.post, url, json=body | {"prompt": ["a"] * 3})
            wait_until(lambda: running.metric("quire_num_requests_waiting") == 22, "22 prompts wait")
            refused = httpx.post(url, json=body | {"prompt": "a"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert "queue is full" in refused.json()["error"]["message"]
            assert running.metric("quire_admission_rejections_total") >= 1
            brake.unlink()
            assert len(first.result().json()["choices"]) == 20
            assert len(second.result().json()["choices"]) == 3
        assert running.idle()


def cause(running: Running) -> str:
    """Wait until the server isn't well; why it isn't."""

    def found() -> str:
        answer = httpx.get(f"{running.url}/health")
        return str(answer.json()["error"]["message"]) if answer.status_code == 503 else ""

    return wait_until(found, "the server is not well")


def test_engine_death_fails_everybody(placement: Placement) -> None:
    """In-flight streams end with an error event and no [DONE]; health turns 503; new requests are refused."""
    model = echo_service.built(Echo(pause=0.02, fail_at=30))
    with echo_service.serving(model, placement=placement) as running:
        died, got = threading.Event(), list[object]()
        running.llm.set_death_callback(died.set)
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
        with openai_of(running) as client:
            stream = client.completions.create(
                model="echo", prompt="a", max_tokens=200, stream=True, extra_body={"ignore_eos": True}
            )
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                whole = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=30)
                with pytest.raises(openai.APIError, match="engine stopped"):
                    got.extend(stream)
                assert got
                assert whole.result().status_code == 503
        assert died.wait(30)
        assert httpx.get(f"{running.url}/health").status_code == 503
        assert "the device is gone" in cause(running)
        late = httpx.post(f"{running.url}/v1/completions", json=body)
        assert late.status_code == 503
        assert "retry-after" in late.headers
        assert "the device is gone" in str(running.llm.error)
        assert httpx.get(f"{running.url}/metrics").status_code == 200


def test_a_stalled_engine_is_unhealthy_until_it_moves_on(brake: Path, placement: Placement) -> None:
    """Each step is stalled at its end, as long as the brake is there."""
    model = echo_service.built(Echo(brake=str(brake)))
    with (
        echo_service.serving(model, stall_after=BRAKED / 2, placement=placement) as running,
        concurrent.futures.ThreadPoolExecutor(1) as pool,
    ):
        assert httpx.get(f"{running.url}/health").status_code == 200
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}
        waiting = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body)
        assert "has lasted" in cause(running)
        brake.unlink()
        assert waiting.result().status_code == 200
        wait_until(lambda: httpx.get(f"{running.url}/health").status_code == 200, "the server is well again")


def test_ranks_that_start_anew_are_unhealthy_and_streams_go_on(echo: Running) -> None:
    class Lost(Echo):
        def collect(self, ticket: int) -> object:  # type: ignore[override]
            raise RanksLost("rank 1 is gone")

    def anew() -> tuple[Echo, KVMemory]:
        assert gate.wait(60)
        again = echo_service.built(Echo()).engine
        return again.runner, again.scheduler.memory  # type: ignore[return-value]

    gate, model = threading.Event(), echo_service.built(Lost(), restarter=RunnerRestarter(anew))
    body = {"prompt": "a", "max_tokens": 9, "temperature": 1, "seed": 5}
    wanted = httpx.post(f"{echo.url}/v1/completions", json=body).json()["choices"]
    with echo_service.serving(model) as running, concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert httpx.get(f"{running.url}/health").status_code == 200
        waiting = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=60)
        assert cause(running) == "rank 1 is gone; ranks are started anew"
        gate.set()
        assert waiting.result().json()["choices"] == wanted
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert running.metric("quire_rank_restarts_total") == 1


# Outputs that neither their model nor a length ended, in shapes that have no reason for that

FAULT = "the request's masks leave no token to sample"
MESSAGES: Any = {"messages": [{"role": "user", "content": "once"}], "max_tokens": 100, "ignore_eos": True}
RESPONSES: Any = {"input": "once", "max_output_tokens": 100, "ignore_eos": True}


class Faulty(Echo):
    """An Echo whose rows have nothing to draw, when `broken`."""

    broken = False

    def compute_row(self, row: SeqSlice) -> SliceResult:
        sampled = super().compute_row(row)
        return sampled._replace(error=FAULT) if self.broken and sampled.tokens else sampled


@pytest.fixture(scope="module")
def served(loose_brake: Path) -> Iterator[tuple[Running, Faulty, httpx.Client]]:
    runner = Faulty(pause=0.005, brake=str(loose_brake))
    with echo_service.serving(echo_service.built(runner), admin_keys=[ADMIN]) as running, as_admin(running) as http:
        yield running, runner, http


def last_event(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.text.rstrip().rpartition("data: ")[2])
    return found


def test_what_can_not_go_on_says_why(served: Any) -> None:
    _, runner, http = served
    runner.broken = True
    try:
        refused = http.post("/v1/messages", json=MESSAGES)
        wanted = {"type": "invalid_request_error", "message": f"the output can't go on: {FAULT}"}
        assert (refused.status_code, refused.json()["error"]) == (400, wanted)
        assert last_event(http.post("/v1/messages", json=MESSAGES | {"stream": True}))["error"] == wanted
        whole = http.post("/v1/responses", json=RESPONSES).json()
        streamed = last_event(http.post("/v1/responses", json=RESPONSES | {"stream": True}))
        assert streamed["type"] == "response.failed"
        for failed in (whole, streamed["response"]):
            assert (failed["status"], failed["error"]["message"]) == ("failed", wanted["message"])
    finally:
        runner.broken = False


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_ended_may_be_asked_again(served: Any, loose_brake: Path, stream: bool) -> None:
    running, _, http = served
    loose_brake.touch()
    with ThreadPoolExecutor(1) as pool:
        body = MESSAGES | {"stream": stream}
        future = echo_service.begun(running, pool, lambda: http.post("/v1/messages", json=body))
        assert http.post("/sleep?mode=abort").status_code == 200
        answer = future.result()
    loose_brake.unlink()
    assert http.post("/wake_up").status_code == 200
    error = (last_event(answer) if stream else answer.json())["error"]
    assert error == {"type": "overloaded_error", "message": "the request was aborted before its output was complete"}
    if not stream:
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")


def test_an_embedding_that_is_not_there() -> None:
    ended = BranchOutput("", 0, (), "", (), "abort", None, True, 0.0)
    with pytest.raises(Overloaded):
        embedding_vector(ended)
    with pytest.raises(InputError, match="not finite"):
        embedding_vector(ended._replace(finish_reason="error", stop_reason="the model's hidden states are not finite"))
