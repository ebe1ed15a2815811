"""Traces from files: what they mean, and that whatever is wrong is refused with its line and the limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from benching import results

from quire.bench import main
from quire.bench.traces import CHUNK, LIMITS, Limits, Traced, load_trace
from quire.bench.workloads import RequestSpec
from quire.errors import InputError, StartupError

GOOD = {"arrival": 0.5, "prompt_len": 10, "output_len": 5}


def words(text: str) -> int:
    """A tokenizer that counts words."""
    return len(text.split())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def write(path: Path, *lines: Any) -> Path:
    """Each line as it is if it is a text or bytes, else as JSON."""
    texts = (line if isinstance(line, str | bytes) else json.dumps(line) for line in lines)
    path.write_bytes(b"".join((text if isinstance(text, bytes) else text.encode()) + b"\n" for text in texts))
    return path


def conversation(*lengths: int) -> dict[str, Any]:
    """Messages of so many words."""
    turns = [
        {"from": ("human", "gpt")[i % 2], "value": "word " * length, "markdown": None}
        for i, length in enumerate(lengths)
    ]
    return {"id": "abc_0", "conversations": turns}


def test_jsonl(trace: Path) -> None:
    write(trace, {**GOOD, "arrival": 0}, "", GOOD, {**GOOD, "prefix_id": "a", "prefix_len": 10}, {**GOOD, "arrival": 2})
    entries = load_trace(trace)
    plain = [RequestSpec(10, 5, arrival=arrival) for arrival in (0.0, 0.5, 2.0)]
    assert entries == [*plain[:2], RequestSpec(10, 5, "a", 10, 0.5), plain[2]]
    write(trace, GOOD, {**GOOD, "arrival": 1}, "broken")
    assert load_trace(trace, first=2) == [RequestSpec(10, 5, arrival=0.5), RequestSpec(10, 5, arrival=1.0)]
    workload = Traced("trace:x", entries)
    assert workload.arrivals == (0.0, 0.5, 0.5, 2.0)
    assert workload.requests == 4
    assert workload.lengths() == [(10, 5)] * 4


def test_prompts_share_the_prefix_that_they_name() -> None:
    asked = [("a", 4), ("", 0), ("b", 4), ("a", 7), ("a", 2), ("b", 4)]
    workload = Traced("trace:x", [RequestSpec(9, 1, name, length) for name, length in asked])
    assert workload.arrivals is None
    one, plain, other, longer, shorter, again = (job.prompt for job in workload.jobs(10_000))
    assert {len(prompt) for prompt in (one, plain, other, longer, shorter, again)} == {9}
    assert one[:4] == longer[:4]
    assert one[:2] == shorter[:2]
    assert other[:4] == again[:4]
    assert len({prompt[0] for prompt in (one, plain, other)}) == 3
    assert one[4:] != longer[4:]
    assert other[4:] != again[4:]
    assert workload.jobs(10_000) == workload.jobs(10_000) != workload.jobs(10_000, seed=1)


PREFIX = {**GOOD, "prefix_id": "a", "prefix_len": 3}
BAD = [
    ('{"arrival": 0.5, "prompt_len": 10', "it is not JSON"), (b"\xff\xfe", "it is not JSON: .*can't decode"),
    ("[1]", "expected an object"), ("[" * 8000, "nested too deeply"),
    ('{"arrival": 1' + "0" * 5000 + "}", "it is not JSON"),
    ('{"arrival": 1, "arrival": 2, "prompt_len": 1, "output_len": 1}', "a key is there twice"),
    ('{"arrival": NaN, "prompt_len": 1, "output_len": 1}', "NaN is not a number"),
    ('{"arrival": 1e999, "prompt_len": 1, "output_len": 1}', r"arrival is inf. Expected seconds .* from 0 to 1e\+09"),
    ({**GOOD, "arrival": 1_700_000_000}, r"from 0 to 1e\+09"),
    ({**GOOD, "arrival": -0.25}, r"arrival is -0.25. Expected seconds from the start, from 0"),
    ({**GOOD, "arrival": 0.4375}, "arrival is 0.4375, after one at 0.5. Times may not decrease"),
    ({**GOOD, "arrival": "1"}, "arrival is '1'"), ({**GOOD, "arrival": True}, "arrival is True"),
    ({**GOOD, "prompt_len": 0}, "prompt_len is 0. Expected a whole number from 1 to 100"),
    ({**GOOD, "prompt_len": 101}, "prompt_len is 101. Expected a whole number from 1 to 100"),
    ({**GOOD, "prompt_len": 3.0}, "prompt_len is 3.0"), ({**GOOD, "output_len": [5] * 1000}, r"output_len is \[5, 5"),
    ({**GOOD, "prompt_len": 96}, "prompt_len and output_len are 101 together. At most 100 tokens"),
    ({"arrival": 0.5, "prompt_len": 10}, "output_len is missing"),
    ({**GOOD, "output": 3}, "unknown key 'output'. Known: arrival, output_len, prefix_id"),
    ({**GOOD, "prefix_id": "a"}, "prefix_id and prefix_len need each other"),
    ({**PREFIX, "prefix_len": 11}, "prefix_len is 11. Expected a whole number from 1 to 10"),
    ({**PREFIX, "prefix_id": 7}, "prefix_id is 7"),
    ({**PREFIX, "prefix_id": ""}, "Expected a text of 1 to 200 characters"),
    ({**PREFIX, "prefix_id": "a" * 201}, "Expected a text of 1 to 200 characters"),
    ({**GOOD, "x" * 20_000: 1}, "it has more than 16,384 bytes. Give one request a line"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_lines_are_refused_by_number(trace: Path, line: Any, message: str) -> None:
    write(trace, GOOD, "", line, GOOD)
    with pytest.raises(StartupError, match=rf"trace\.jsonl, line 3: .*{message}") as caught:
        load_trace(trace, max_len=100)
    assert len(str(caught.value)) < 600


def test_files_are_bounded(trace: Path) -> None:
    write(trace, *[GOOD] * 5)
    size = trace.stat().st_size
    small = LIMITS._replace(requests=4)
    with pytest.raises(StartupError, match=r"line 5: there are more than 4 lines\. .*--trace-requests N"):
        load_trace(trace, limits=small)
    assert len(load_trace(trace, first=4, limits=small)) == 4
    with pytest.raises(StartupError, match=f"it has {size} bytes. .* at most {size - 1} bytes"):
        load_trace(trace, limits=LIMITS._replace(file_bytes=size - 1))
    assert len(load_trace(trace, limits=LIMITS._replace(file_bytes=size, line_bytes=size // 5, requests=5))) == 5
    with pytest.raises(StartupError, match=f"line 1: it has more than {size // 5 - 1} bytes"):
        load_trace(trace, limits=LIMITS._replace(line_bytes=size // 5 - 1))


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="it can't be read: No such file"):
        load_trace(tmp_path / "none")
    with pytest.raises(StartupError, match="it can't be read: embedded null"):
        load_trace("a\0b")
    with pytest.raises(StartupError, match="it is not a plain file"):
        load_trace(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartupError, match="it is not a plain file"):
        load_trace(tmp_path / "pipe")


@pytest.mark.parametrize("content", ["", "\n\n", "[]", " [ ] \n"])
def test_a_trace_without_requests_is_refused(trace: Path, content: str) -> None:
    trace.write_text(content)
    with pytest.raises(StartupError, match="no requests that can be used"):
        load_trace(trace, count=words)


def test_sharegpt(trace: Path) -> None:
    """What the usual filters keep: the first two messages, 4 tokens at least, 1024 in the prompt, 2048 in all."""
    kept = [(4, 4), (1024, 1024), (30, 2018), (5, 9)]
    dropped = [(3, 50), (50, 3), (1025, 4), (1024, 1025), (31, 2018), (10,), ()]
    items = [conversation(*lengths) for lengths in (*dropped[:4], *kept[:3], *dropped[4:], (*kept[3], 7, 2))]
    trace.write_text(json.dumps(items, indent=2))
    entries = load_trace(trace, count=words)
    assert entries == [RequestSpec(*pair) for pair in kept]
    assert Traced("trace:x", entries).arrivals is None
    assert load_trace(trace, max_len=2047, count=words) == [RequestSpec(4, 4), RequestSpec(5, 9)]
    assert load_trace(trace, first=2, count=words) == entries[:2]


def test_sharegpt_beyond_one_chunk(trace: Path) -> None:
    """Conversations, and the spaces between them, go over the edges of what is read at once."""
    items = [json.dumps(conversation(4 + i % 900, 1000)) for i in range(800)]
    trace.write_text("[\n" + (",\n" + " " * 700).join(items) + "\n]\n")
    assert trace.stat().st_size > 4 * CHUNK
    assert load_trace(trace, count=words) == [RequestSpec(4 + i % 900, 1000) for i in range(800)]
    trace.write_text(trace.read_text().replace('"from": "human"', '"from": 3').replace('"from": 3', '"from": "x"', 700))
    with pytest.raises(StartupError, match=r'line 702: expected a message {"from"'):
        load_trace(trace, count=words)


TURN = json.dumps(conversation(5, 5))
BAD_LISTS = [
    ("[", "line 1: expected a conversation"),
    (f"[\n{TURN}", "line 2: it ends where ',' was expected"),
    (f"[\n{TURN},\n]", "line 3: expected a conversation"),
    (f"[\n{TURN}\n{TURN}]", "line 3: expected ',', found '{'"),
    (f"[\n{TURN}]\n[]", "line 3: something follows the list"),
    (f'[{TURN},\n{{"conversations":\n nil}}]', "line 3: it is not JSON"),
    (f"[{TURN},\n3]", "line 2: expected a conversation"),
    (f'[{TURN},\n{{"conversations": {{}}}}]', 'line 2: expected {"conversations"'),
    (f'[{TURN},\n{{"conversations": ["hello", "you"]}}]', "line 2: expected a message"),
    (f'[{TURN},\n{{"conversations": [{{"from": "human", "value": null}}]}}]', "line 2: expected a message"),
    (f"[{TURN},\n" + '{"a":' * 100_000, "line 2: .*nested too deeply"),
    (f'[{TURN},\n{{"a": 1{"0" * 5000}}}]', "line 2: it is not JSON"),
    (f'[{TURN},\n{{"a": "{"b" * 3000}"}}]', "line 2: a conversation has more than 2,000 characters"),
]


@pytest.mark.parametrize(("content", "message"), BAD_LISTS)
def test_bad_conversations_are_refused_by_line(trace: Path, content: str, message: str) -> None:
    trace.write_text(content)
    limits = LIMITS if "deeply" in message or "5000" in content or "JSON" in message else Limits(item_chars=2000)
    with pytest.raises(StartupError, match=rf"trace\.jsonl, {message}") as caught:
        load_trace(trace, count=words, limits=limits)
    assert len(str(caught.value)) < 600


def test_a_conversation_without_an_end_is_not_read_whole(trace: Path) -> None:
    trace.write_text(f'[{TURN},\n{{"a": "' + "b" * 6 * CHUNK)
    with pytest.raises(StartupError, match=r"line 2: it is not JSON.*or a conversation has more than 1,000 characters"):
        load_trace(trace, count=words, limits=Limits(item_chars=1000))


def test_sharegpt_needs_text_and_a_tokenizer(trace: Path) -> None:
    trace.write_bytes(f"[{TURN},\n".encode() + b'{"a": "\xff"}]')
    with pytest.raises(StartupError, match="what follows is not UTF-8"):
        load_trace(trace, count=words)
    trace.write_text(f"[{TURN}]")
    with pytest.raises(StartupError, match=r"there is no tokenizer. Give --tokenizer"):
        load_trace(trace)

    def refuse(text: str) -> int:
        raise InputError("text holds a lone surrogate")

    with pytest.raises(StartupError, match="line 1: text holds a lone surrogate"):
        load_trace(trace, count=refuse)


def test_more_conversations_than_allowed(trace: Path) -> None:
    trace.write_text(f"[{','.join([TURN] * 5)}]")
    with pytest.raises(StartupError, match=r"more than 4 requests. Take the first ones"):
        load_trace(trace, count=words, limits=LIMITS._replace(requests=4))


def test_bench_runs_a_trace(trace: Path, tmp_path: Path) -> None:
    """On the bundled model: all at once, at the trace's times, at others, and beside a workload."""
    shared = {"prompt_len": 40, "output_len": 3, "prefix_id": "a", "prefix_len": 32}
    write(trace, *({"arrival": arrival, **shared} for arrival in (0, 0.2, 0.5)))
    once = ("--threads", "1", "--repeat", "1", "--warmup", "0")
    small, result = results(tmp_path, "throughput", *once, "--trace", str(trace), "--workload", "fixed:3:2@1")
    assert small["workload"] == "fixed:3:2@1"
    assert result["workload"] == "trace:trace.jsonl"
    assert (result["median"]["requests"], result["median"]["output_tokens"]) == (3, 9)
    (result,) = results(tmp_path, "serve", *once, "--trace", str(trace))
    assert result["median"]["seconds"] >= 0.5
    assert result["median"]["prefix_hit_tokens"] == 64  # the second and the third find the prefix
    write(trace, *({"arrival": arrival, **shared} for arrival in (0, 60, 120)))
    again = ("--arrivals", "burst:2@0.7", "--trace-requests", "2")
    (result,) = results(tmp_path, "serve", *once, "--trace", str(trace), *again)
    assert result["median"]["requests"] == 2
    assert result["median"]["seconds"] < 30


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arrivals", "poisson:1", "--rate", "2"], "--arrivals and --rate are both given"),
        (["--arrivals", "sometimes"], "there are no arrivals 'sometimes'. Expected poisson:RATE"),
        (["--workload", "alpaca@2"], "some traces say when requests come"),
        (["--max-model-len", "42"], "line 1: prompt_len and output_len are 43 together. At most 42 tokens"),
        (["--trace-requests", "0"], "its first 0 requests.* From 1 to 100,000 can be"),
        (["--trace-requests", "100001"], "From 1 to 100,000 can be"),
    ],
)
def test_bad_flags(trace: Path, flags: list[str], message: str) -> None:
    write(trace, {"arrival": 1, "prompt_len": 40, "output_len": 3})
    with pytest.raises(StartupError, match=message):
        main(["serve", "--trace", str(trace), *flags])
