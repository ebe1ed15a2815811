"""`quire run-batch`: files of requests through the server's routes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import echo_service
import pytest

from quire.cli import main
from quire.errors import EngineDead, InputError, StartupError
from quire.llm import LLM
from quire.server import batch
from quire.server.app import create_app
from quire.server.batch import BatchRequest, BatchSummary, InvalidLine, read_lines, run_batch

CPU = ("--device", "cpu", "--dtype", "float32", "--kv-gib", "0.05")


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def answers(file: Path) -> dict[str, Any]:
    return {one["custom_id"]: one for one in map(json.loads, file.read_text().splitlines())}


def go(tmp_path: Path, lines: list[str], runner: Any = None, settings: Any = None, **options: Any) -> BatchSummary:
    """A batch over an echo engine, from in.jsonl to out.jsonl."""
    (tmp_path / "in.jsonl").write_text("\n".join(lines))

    def make() -> Any:
        llm = echo_service.linked(echo_service.built(runner, **settings or {}), placement="thread")
        return llm, create_app(llm, ["echo"])

    return run_batch(make, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **{"in_flight": 8, **options})


def test_the_bundled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["Once upon a time", "The sky is"]
    hello = [{"role": "user", "content": "Hello!"}]
    lines = [line(prompt, prompt=prompt, max_tokens=8, temperature=0) for prompt in prompts]
    lines += [line("chat", "/v1/chat/completions", model="tiny", messages=hello, max_tokens=5, temperature=0)]
    lines += ["", "{", line("bad", prompt="a", max_tokens=-1)]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(lines))
    assert main(["run-batch", "-i", str(source), "-o", str(out), *CPU]) == 1
    assert "3 completed, 1 failed, 1 lines no requests" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
    found = answers(out)
    with LLM("", device="cpu", dtype="float32", kv_gib=0.05) as llm:
        params = llm.prompts.make_params(max_tokens=8, temperature=0)
        for prompt, alone in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
            answer = found[prompt]
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["body"]["choices"][0]["text"] == alone.outputs[0].text
    source.write_text("\n".join(lines[:3]))
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "well.jsonl"), *CPU]) == 0
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"].startswith("Hello")
    assert found["bad"]["response"]["status_code"] == 400
    assert "max_tokens must be between 0 and" in found["bad"]["error"]["message"]
    assert found[None]["response"] is None
    assert found[None]["error"] == {
        "code": "invalid_line", "message": "line 5: it is not valid JSON at column 2", "line": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1]", "no JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ('{"custom_id": 1}', "custom_id must be a string"),
        (line("x" * 513), "1 to 512 characters"),
        (line("a", "http://127.0.0.1/v1/completions"), "url must be one of"),
        (line("a", stream=True), "no streams"),
        ('{"custom_id": "a", "method": "GET", "url": "/v1/completions", "body": {}}', "method must be POST, got 'GET'"),
        ('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": []}', "body must be a JSON object"),
        ('{"custom_id": "a", "method": "POST", "url": ["/v1/completions"], "body": {}}', "url must be one of"),
        ('{"custom_id": "a", "more": 1}', "no field 'more'"),
        (line("a", prompt="x" * 2000), "more than 1000 bytes"),
        # 1002 bytes are read at a time: the line ends with a read, or one byte after it.
        *(pytest.param("x" * n, "more than 1000 bytes", id=f"{n} bytes") for n in (1000, 1001, 2002, 2003)),
    ],
)
def test_bad_lines(text: str, why: str) -> None:
    raw = io.BytesIO(b"\n" + text.encode() + b"\r\n" + line("next").encode())
    bad, good = read_lines(raw, max_line=200_000 if text[:2] == "[[" else 1000)
    assert isinstance(bad, InvalidLine)
    assert bad.number == 2
    assert why in bad.why
    assert isinstance(good, BatchRequest)
    assert (good.number, good.custom_id) == (3, "next")


def test_messages_are_answered_as_their_route_does(tmp_path: Path) -> None:
    """Anthropic's shape and that of responses beside OpenAI's: what was said, errors in each route's own shape, and no
    streams; nothing is stored for a line to come."""
    runner = echo_service.Saying()
    runner.say("once upon a time there was")
    chat = {"model": "echo", "messages": [{"role": "user", "content": "once upon"}], "max_tokens": 8}
    asked = {"model": "echo", "input": "once upon", "max_output_tokens": 8}
    lines = [line("chat", "/v1/chat/completions", **chat), line("text", "/v1/messages", **chat)]
    lines += [line("long", "/v1/messages", **chat | {"max_tokens": -1}), line("response", "/v1/responses", **asked)]
    lines += [line("longer", "/v1/responses", **asked | {"max_output_tokens": -1})]
    lines += [line("next", "/v1/responses", **asked, previous_response_id="resp_1")]
    lines += [line("stream", "/v1/messages", **chat, stream=True)]
    assert go(tmp_path, lines, runner) == (3, 3, 1, 0)
    found = answers(tmp_path / "out.jsonl")
    said = found["chat"]["response"]["body"]["choices"][0]["message"]["content"]
    assert said.startswith("once upon")
    message, response = (found[name]["response"]["body"] for name in ("text", "response"))
    assert (message["type"], message["stop_reason"]) == ("message", "end_turn")
    assert message["content"] == [{"type": "text", "text": said}]
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["output"][0]["content"][0]["text"] == said
    failed = found["long"]
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["type"] == "error"
    assert failed["error"] == failed["response"]["body"]["error"]
    assert failed["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in failed["error"]["message"]
    for name, field in (("longer", "max_output_tokens"), ("next", "previous_response_id")):
        assert found[name]["response"]["status_code"] in (400, 404)
        assert found[name]["error"]["param"] == field
    assert found["stream"]["error"]["message"] == "line 7: a batch has no streams: leave out stream"


def test_too_many_lines(tmp_path: Path) -> None:
    lines = read_lines(io.BytesIO(b"\n" * 6), max_lines=5)
    with pytest.raises(InputError, match="more than 5 lines"):
        list(lines)
    assert go(tmp_path, [line("a", prompt="once"), line("b", prompt="once"), line("a", prompt="a")]) == (2, 0, 1, 0)


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "once upon"}]
    lines = [line(str(at), prompt="once upon", max_tokens=4) for at in range(0, 40, 2)]
    lines += [line(str(at), "/v1/messages", model="echo", messages=said, max_tokens=4) for at in range(1, 40, 2)]
    few = {"max_num_seqs": 2, "max_num_queued_reqs": 2}
    assert go(tmp_path, lines, echo_service.Echo(0.001), few, in_flight=16) == (40, 0, 0, 0)
    assert set(answers(tmp_path / "out.jsonl")) == {str(at) for at in range(40)}


def test_what_a_dead_engine_answered_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [line(str(at), prompt="once upon", max_tokens=4) for at in range(12)]
    lines.insert(0, line("bad", prompt=""))
    partial = tmp_path / "out.jsonl.partial"
    with pytest.raises(EngineDead):
        go(tmp_path, lines, echo_service.Echo(0.001, fail_at=20), in_flight=2)
    assert not (tmp_path / "out.jsonl").exists()
    done = answers(partial)
    good = [name for name, one in done.items() if one["error"] is None]
    assert 0 < len(good) < 12
    with pytest.raises(StartupError, match="--resume"):
        go(tmp_path, lines)
    with partial.open("a") as file:
        file.write('{"id": "cut')
    assert go(tmp_path, lines, resume=True) == (12 - len(good), 1, 0, len(good))
    found = [json.loads(one) for one in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(found) == 13
    assert [one["id"] for one in found[: len(good)]] == [done[name]["id"] for name in good]
    assert not partial.exists()


def test_files_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("")

    def never() -> Any:
        raise AssertionError("the model was loaded")

    for source, target, why in (("in", "in", "both"), ("none", "out", "can't be read"), ("in", "no/out", "written")):
        with pytest.raises(StartupError, match=why):
            run_batch(never, tmp_path / source, tmp_path / target, in_flight=1)
    (tmp_path / f"out{batch.PARTIAL_SUFFIX}").write_text("[]\n")
    with pytest.raises(StartupError, match="no answers of a batch"):
        run_batch(never, tmp_path / "in", tmp_path / "out", in_flight=1, resume=True)


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "-i", "a", "-o", "b", "--max-in-flight", "0"]) == 2
    assert "--max-in-flight is 0. It must be between 1 and 4096" in capsys.readouterr().err
