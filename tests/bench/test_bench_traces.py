"""Traces from files: what they mean, and that whatever is wrong is refused with its line and the limit."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from benching import results
from hypothesis import given
from hypothesis import strategies as st

from quire.bench import main
from quire.bench.traces import CHUNK, LIMITS, Limits, Traced, load_trace
from quire.bench.workloads import Sketch
from quire.errors import InputError, StartupError

GOOD = {"arrival": 0.5, "prompt_len": 10, "output_len": 5}


def words(text: str) -> int:
    """A tokenizer that counts words."""
    return len(text.split())


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def write(path: Path, *lines: Any) -> Path:
    """Each line as it is if it is a text, else as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
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
    plain = [Sketch(10, 5, arrival=arrival) for arrival in (0.0, 0.5, 2.0)]
    assert entries == [*plain[:2], Sketch(10, 5, "a", 10, 0.5), plain[2]]
    assert load_trace(trace, first=2) == entries[:2]
    workload = Traced("trace:x", entries)
    assert workload.arrivals == (0.0, 0.5, 0.5, 2.0)
    assert workload.requests == 4
    assert workload.lengths() == [(10, 5)] * 4


def test_what_follows_the_first_requests_is_not_read(trace: Path) -> None:
    write(trace, GOOD, "broken")
    assert len(load_trace(trace, first=1)) == 1


def test_prompts_share_the_prefix_that_they_name() -> None:
    asked = [("a", 4), ("", 0), ("b", 4), ("a", 7), ("a", 2), ("b", 4)]
    workload = Traced("trace:x", [Sketch(9, 1, name, length) for name, length in asked])
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
    ('{"arrival": 0.5, "prompt_len": 10', "it is not JSON"),
    ("nonsense", "it is not JSON"),
    ("[1]", "expected an object"),
    ("[" * 8000, "nested too deeply"),
    ('{"arrival": 1' + "0" * 5000 + "}", "it is not JSON"),
    ('{"arrival": 1, "arrival": 2, "prompt_len": 1, "output_len": 1}', "a key is there twice"),
    ('{"arrival": NaN, "prompt_len": 1, "output_len": 1}', "NaN is not a number"),
    ('{"arrival": 1e999, "prompt_len": 1, "output_len": 1}', r"arrival is inf. Expected seconds .* from 0 to 1e\+09"),
    ({**GOOD, "arrival": 1_700_000_000}, r"from 0 to 1e\+09"),
    ({**GOOD, "arrival": -0.25}, r"arrival is -0.25. Expected seconds from the start, from 0"),
    ({**GOOD, "arrival": 0.4375}, "arrival is 0.4375, after one at 0.5. Times may not decrease"),
    ({**GOOD, "arrival": "1"}, "arrival is '1'"),
    ({**GOOD, "arrival": True}, "arrival is True"),
    ({**GOOD, "prompt_len": 0}, "prompt_len is 0. Expected a whole number from 1 to 100"),
    ({**GOOD, "prompt_len": 101}, "prompt_len is 101. Expected a whole number from 1 to 100"),
    ({**GOOD, "prompt_len": 3.0}, "prompt_len is 3.0"),
    ({**GOOD, "prompt_len": True}, "prompt_len is True"),
    ({**GOOD, "prompt_len": 10**30}, "prompt_len is 1000"),
    ({**GOOD, "output_len": -5}, "output_len is -5"),
    ({**GOOD, "output_len": [5] * 1000}, r"output_len is \[5, 5"),
    ({**GOOD, "prompt_len": 96}, "prompt_len and output_len are 101 together. At most 100 tokens"),
    ({"arrival": 0.5, "prompt_len": 10}, "output_len is missing"),
    ({}, "arrival is missing"),
    ({**GOOD, "output": 3}, "unknown key 'output'. Known: arrival, output_len, prefix_id"),
    ({**GOOD, "prefix_id": "a"}, "prefix_id and prefix_len need each other"),
    ({**GOOD, "prefix_len": 3}, "prefix_id and prefix_len need each other"),
    ({**PREFIX, "prefix_len": 11}, "prefix_len is 11. Expected a whole number from 1 to 10"),
    ({**PREFIX, "prefix_len": 0}, "prefix_len is 0"),
    ({**PREFIX, "prefix_id": 7}, "prefix_id is 7"),
    ({**PREFIX, "prefix_id": ""}, "Expected a text of 1 to 200 characters"),
    ({**PREFIX, "prefix_id": "a" * 201}, "Expected a text of 1 to 200 characters"),
    ({**GOOD, "x" * 20_000: 1}, "it has more than 16,384 bytes. Give one request a line"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_bad_lines_are_refused_by_number(trace: Path, line: Any, message: str) -> None:
    write(trace, GOOD, "", line, GOOD)
    with pytest.raises(StartupError, match=rf"trace\.jsonl, line 3: .*{message}") as caught:
        load_trace(trace, max_len=100)
    assert len(str(caught.value)) < 600


def test_bytes_that_are_no_text(trace: Path) -> None:
    trace.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(StartupError, match=r"line 2: it is not JSON: .*can't decode"):
        load_trace(trace)


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


@pytest.mark.parametrize("first", [0, -1, LIMITS.requests + 1])
def test_how_many_are_taken_is_bounded(trace: Path, first: int) -> None:
    with pytest.raises(StartupError, match="From 1 to 100,000 can be"):
        load_trace(write(trace, GOOD), first=first)


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
    assert entries == [Sketch(*pair) for pair in kept]
    assert Traced("trace:x", entries).arrivals is None
    assert load_trace(trace, max_len=2047, count=words) == [Sketch(4, 4), Sketch(5, 9)]
    assert load_trace(trace, first=2, count=words) == entries[:2]


def test_sharegpt_beyond_one_chunk(trace: Path) -> None:
    """Conversations, and the spaces between them, go over the edges of what is read at once."""
    items = [json.dumps(conversation(4 + i % 900, 1000)) for i in range(800)]
    trace.write_text("[\n" + (",\n" + " " * 700).join(items) + "\n]\n")
    assert trace.stat().st_size > 4 * CHUNK
    assert load_trace(trace, count=words) == [Sketch(4 + i % 900, 1000) for i in range(800)]
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
    (f"[{TURN},\n{TURN[:-9]}", "line 2: it is not JSON"),
    (f'[{TURN},\n{{"conversations":\n nil}}]', "line 3: it is not JSON"),
    (f"[{TURN},\n3]", "line 2: expected a conversation"),
    (f"[{TURN},\n{{}}]", 'line 2: expected {"conversations"'),
    (f'[{TURN},\n{{"conversations": {{}}}}]', 'line 2: expected {"conversations"'),
    (f'[{TURN},\n{{"conversations": ["hello", "you"]}}]', "line 2: expected a message"),
    (f'[{TURN},\n{{"conversations": [{{"from": "human"}}]}}]', "line 2: expected a message"),
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


ENTRIES = st.builds(
    lambda prompt, output, arrival, name, share: Sketch(
        prompt, output, name, max(1, int(prompt * share)) if name else 0, arrival
    ),
    st.integers(1, 5000), st.integers(1, 5000), st.floats(0, 1e9), st.just("") | st.text(min_size=1, max_size=200),
    st.floats(0, 1),
)  # fmt: skip


@given(st.lists(ENTRIES, min_size=1, max_size=20))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, entries: list[Sketch]) -> None:
    entries.sort(key=lambda entry: entry.arrival or 0.0)
    path = tmp_path_factory.getbasetemp() / "written.jsonl"
    fields = (entry._asdict() for entry in entries)
    lines = [
        {key: value for key, value in line.items() if key != "pictures" and (line["prefix_id"] or "prefix" not in key)}
        for line in fields
    ]
    assert load_trace(write(path, *lines), max_len=10_000) == entries


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
LINES = st.one_of(
    st.binary(max_size=60),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.fixed_dictionaries(
        {"arrival": VALUES | st.floats(0, 10), "prompt_len": VALUES | st.integers(1, 99)},
        optional={"output_len": VALUES | st.integers(1, 99), "prefix_id": VALUES, "prefix_len": VALUES, "more": VALUES},
    ).map(lambda value: json.dumps(value).encode()),
    st.lists(st.fixed_dictionaries({"conversations": VALUES | st.lists(VALUES)})).map(
        lambda value: json.dumps(value).encode()
    ),
)


@given(st.lists(LINES, max_size=4).map(b"\n".join))
def test_any_bytes_are_a_trace_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    try:
        entries = load_trace(path, max_len=100, count=words)
    except StartupError:
        return
    assert entries
    for entry in entries:
        assert entry.prompt_len >= 1
        assert entry.output_len >= 1
        assert entry.prompt_len + entry.output_len <= 100
        assert 0 <= entry.prefix_len <= entry.prompt_len
    times = [entry.arrival for entry in entries if entry.arrival is not None]
    assert times == sorted(times)


def bench(folder: Path, *args: str) -> list[dict[str, Any]]:
    return results(folder, *args, "--threads", "1", "--repeat", "1", "--warmup", "0")


def test_bench_runs_a_trace(trace: Path, tmp_path: Path) -> None:
    """On the bundled model: all at once, at the trace's times, at others, and beside a workload."""
    shared = {"prompt_len": 40, "output_len": 3, "prefix_id": "a", "prefix_len": 32}
    write(trace, *({"arrival": arrival, **shared} for arrival in (0, 0.2, 0.5)))
    small, result = bench(tmp_path, "throughput", "--trace", str(trace), "--workload", "fixed:3:2@1")
    assert small["workload"] == "fixed:3:2@1"
    assert result["workload"] == "trace:trace.jsonl"
    assert (result["median"]["requests"], result["median"]["output_tokens"]) == (3, 9)
    (result,) = bench(tmp_path, "serve", "--trace", str(trace))
    assert result["median"]["seconds"] >= 0.5
    assert result["median"]["prefix_hit_tokens"] == 64  # the second and the third find the prefix
    write(trace, *({"arrival": arrival, **shared} for arrival in (0, 60, 120)))
    (result,) = bench(tmp_path, "serve", "--trace", str(trace), "--arrivals", "burst:2@0.7", "--trace-requests", "2")
    assert result["median"]["requests"] == 2
    assert result["median"]["seconds"] < 30


def test_bench_counts_sharegpt_by_the_models_tokenizer(trace: Path, tmp_path: Path) -> None:
    said = {"human": "Once upon a time there was a cat.", "gpt": "It slept well."}
    texts = [{"from": who, "value": what} for who, what in said.items()]
    trace.write_text(json.dumps([{"conversations": texts}] * 3))
    (result,) = bench(tmp_path, "serve", "--trace", str(trace), "--trace-requests", "2")
    run = result["median"]
    assert run["requests"] == 2
    assert 2 * 4 <= run["output_tokens"] < run["prompt_tokens"] < 2 * 40


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arrivals", "poisson:1", "--rate", "2"], "--arrivals and --rate are both given"),
        (["--arrivals", "sometimes"], "there are no arrivals 'sometimes'. Expected poisson:RATE"),
        (["--workload", "alpaca@2"], "some traces say when requests come"),
        (["--max-model-len", "42"], "line 1: prompt_len and output_len are 43 together. At most 42 tokens"),
        (["--trace-requests", "0"], "its first 0 requests"),
    ],
)
def test_bad_flags(trace: Path, flags: list[str], message: str) -> None:
    write(trace, {"arrival": 1, "prompt_len": 40, "output_len": 3})
    with pytest.raises(StartupError, match=message):
        main(["serve", "--trace", str(trace), *flags])
