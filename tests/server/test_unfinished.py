"""Outputs that neither their model nor a length ended, in the shapes that have no reason for that: what ended them is
told, and whether to ask again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from asking import ADMIN, as_admin
from echo_service import Echo, Running

from quire.core.outputs import BranchOutput
from quire.errors import InputError, Overloaded
from quire.protocol.step_plan import SeqSlice, SliceResult
from quire.text.embedding import embedding_vector

pytestmark = pytest.mark.xdist_group(name="unfinished")

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
