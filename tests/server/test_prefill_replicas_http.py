"""`quire serve --prefill-replicas` with the bundled model: one engine computes prompts, and another one decodes; the
answers are those of one engine."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from served_process import SERVE, Served, served

pytestmark = pytest.mark.full
SETTINGS = ("--device", "cpu", "--dtype", "float32", "--kv-tokens", "4096", "--swap-gib", "0.25")
STORY = "Once upon a time there was a girl who had a small dog. " * 12
NUMBER = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
ASKED: list[dict[str, Any]] = [
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0.9, "seed": 7, "logprobs": 1, "frequency_penalty": 0.5},
    {"temperature": 0, "stop": ["She", "."]},
    {"temperature": 0.8, "seed": 3, "n": 3},
    {"temperature": 0, "beam_width": 3, "n": 2},
    {"temperature": 0, "structured_outputs": {"json": NUMBER}},
    {"temperature": 0, "echo": True, "logprobs": 1, "max_tokens": 2},
]


def answers(server: Served) -> list[Any]:
    """The choices of each request, each with a prompt of its own."""
    found = []
    for i, asked in enumerate(ASKED):
        body = {"prompt": f"{i} {STORY}", "max_tokens": 16, **asked}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        found.append((answer.json()["choices"], answer.json()["usage"]))
    return found


def rounded(value: Any) -> Any:
    """Numbers to 1e-3, since steps of other sizes round differently."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return {name: rounded(one) for name, one in value.items()} if isinstance(value, dict) else value


def metric(server: Served, name: str) -> float:
    text = httpx.get(f"{server.url}/metrics").text
    return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"quire_{name}{{"))


def test_answers_are_those_of_one_engine(tmp_path: Path) -> None:
    with served(tmp_path, *SETTINGS, command=SERVE) as server:
        expected = answers(server.ready())
    flags = ("--replicas", "2", "--prefill-replicas", "1", *SETTINGS)
    with served(tmp_path, *flags, command=SERVE) as server:
        assert rounded(answers(server.ready())) == rounded(expected)
        assert metric(server, "prompt_handovers_total") == len(ASKED) - 1, "an echoed prompt is scored where it decodes"
        assert metric(server, "prompt_handover_bytes_total") > 0
        engines = [one for one in server.processes() if "quire.startup.engine_program" in one.cmdline()]
        assert len(engines) == 2
        min(engines, key=psutil.Process.create_time).send_signal(signal.SIGKILL)
        assert server.complete(f"0 {STORY}", max_tokens=16) == expected[0][0][0]["text"]
        assert server.complete(f"new {STORY}")
        assert "replica 0 ended" in server.text


def test_settings_that_do_not_go_together_end_it_at_once(tmp_path: Path) -> None:
    with served(tmp_path, "--prefill-replicas", "2", "--replicas", "2", command=SERVE) as server:
        assert server.child.wait(60) == 2
        assert "--prefill-replicas is 2, and --replicas is 2. At least one of them must decode" in server.text
