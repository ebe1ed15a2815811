"""Reading streamed completions: however the bytes are cut; and what is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.client.response_parser import (
    MAX_CHUNK_BYTES,
    MAX_HEAD_BYTES,
    MAX_LINE_BYTES,
    BadResponse,
    ResponseParser,
    ResponseRecord,
)

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def events(tokens: int, counted: bool = False) -> list[bytes]:
    """A completion of so many tokens, one a chunk."""
    said: list[dict[str, Any]] = [
        {"choices": [{"text": "é\n"}], "usage": {"prompt_tokens": 3, "completion_tokens": i + 1} if counted else None}
        for i in range(tokens)
    ]
    said.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}})
    return [b"data: %s\n\n" % json.dumps(one, ensure_ascii=False).encode() for one in said] + [b"data: [DONE]\n\n"]


def chunked(pieces: list[bytes]) -> bytes:
    body = b"".join(b"%X;x=y\r\n%s\r\n" % (len(piece), piece) for piece in pieces)
    return PLAIN + b"Transfer-Encoding: Chunked\r\n\r\n" + body + b"0\r\n\r\n"


def read(data: bytes, cuts: list[int], close: bool = False) -> tuple[ResponseRecord, ResponseParser]:
    """Everything, fed in pieces that end at `cuts`: the first at time 0, the second at 1 ..."""
    answer = ResponseRecord(0, None)
    reader, at = ResponseParser(answer), 0
    done = False
    for now, end in enumerate([*cuts, len(data)]):
        assert not done or end == at, "done before its end"
        done = reader.feed(data[at:end], now)
        at = end
    if close:
        reader.on_close()
    else:
        assert done
    return answer, reader


def test_however_the_bytes_are_cut() -> None:
    data = chunked(events(4))
    for cut in range(1, len(data)):
        answer, reader = read(data, [cut])
        assert (len(answer.chunk_times), answer.completion_tokens, answer.prompt_tokens, answer.error) == (
            4,
            4,
            3,
            None,
        )
        assert reader.keep_alive
    answer, _ = read(data, list(range(1, len(data))))  # a byte at a time
    assert (len(answer.chunk_times), answer.completion_tokens) == (4, 4)
    answer, _ = read(chunked(events(5, counted=True)), [])
    assert list(answer.token_counts) == [1, 2, 3, 4, 5]
    rng = random.Random(3)  # chunks need not end where events do
    body = b"".join(events(40))
    for _ in range(50):
        ends = sorted(rng.sample(range(1, len(body)), 30))
        data = chunked([body[a:b] for a, b in zip([0, *ends], [*ends, len(body)])])
        answer, _ = read(data, sorted(rng.sample(range(1, len(data)), 20)))
        assert len(answer.chunk_times) == 40


def test_times_are_those_of_the_piece_that_ended_an_event() -> None:
    pieces = [chunked([event]) for event in events(3)]
    head = pieces[0].index(b"\r\n\r\n") + 4
    bodies = [piece[head:-5] for piece in pieces]
    data = chunked(events(3))
    ends = [head + sum(map(len, bodies[: i + 1])) for i in range(3)]
    answer, _ = read(data, ends)
    assert list(answer.chunk_times) == [0, 1, 2]
    answer, _ = read(data, [end - 1 for end in ends])  # each event's last byte comes with the next piece
    assert list(answer.chunk_times) == [1, 2, 3]


def test_the_chunk_that_says_who_speaks_brings_no_token() -> None:
    """A chat's first one; where it has a token, it counts."""
    said = [{"delta": {"role": "assistant", "content": text}} for text in ("", "a")] + [{"delta": {"content": "b"}}]
    events = [b"data: %s\n\n" % json.dumps({"choices": [one]}).encode() for one in said]
    events.append(b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n')
    pieces = [PLAIN + b"Transfer-Encoding: chunked\r\n\r\n", *(b"%X\r\n%s\r\n" % (len(e), e) for e in events)]
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    answer, _ = read(b"".join([*pieces, b"0\r\n\r\n"]), ends)
    assert (list(answer.chunk_times), answer.completion_tokens, answer.error) == ([2.0, 3.0], 2, None)


def test_bodies_of_known_length_and_until_the_end() -> None:
    body = b"".join(events(3))
    answer, reader = read(PLAIN + b"Content-Length: %d\r\n\r\n%s" % (len(body), body), [70, 90])
    assert (answer.completion_tokens, len(answer.chunk_times), reader.keep_alive) == (3, 3, True)
    answer, reader = read(PLAIN.replace(b"1.1", b"1.0") + b"\r\n" + body, [70, 90], close=True)
    assert (answer.completion_tokens, answer.error, reader.keep_alive) == (3, None, False)
    closing = chunked(events(2)).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    assert not read(closing, [])[1].keep_alive
    answer, _ = read(b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(events(2)), [5])
    assert answer.completion_tokens == 2


def test_a_refusal_is_kept() -> None:
    body = b'{"error": {"message": "the queue is full"}}'
    answer, reader = read(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body), [50])
    assert answer.status == 503
    assert answer.error == "503: " + body.decode()
    assert reader.keep_alive
    assert read(b"HTTP/1.1 429 Slow\r\nContent-Length: 0\r\n\r\n", [])[0].error == "429: "


def test_a_stream_without_tokens_is_an_error() -> None:
    for pieces in (events(2)[:2], events(2)[2:], [b"data: [DONE]\n\n"], []):
        assert read(chunked(pieces), [])[0].error == "a stream that ended without tokens or usage"


START = PLAIN + b"Transfer-Encoding: chunked\r\n\r\n"


def event(data: bytes) -> bytes:
    line = b"data: %s\n" % data
    return START + b"%x\r\n%s\r\n" % (len(line), line)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"SSH-2.0-x\r\n\r\n", "no HTTP answer"),
        (b"HTTP/1.1 abc\r\n\r\n", "no HTTP answer"),
        (b"x" * (MAX_HEAD_BYTES + 1), "headers of more than"),
        (START + b"zz\r\n", "a chunk of size 'zz"),
        (START + b"-5\r\nhello\r\n", "a chunk of size '-5"),
        (START + b"0x5\r\nhello\r\n", "a chunk of size '0x5"),
        (START + b"%x\r\n" % (MAX_CHUNK_BYTES + 1), "a chunk of size"),
        (START + b"9" * 200, "a chunk without a size"),
        (START + b"0\r\n" + b"x" * (MAX_HEAD_BYTES + 1), "a trailer of more than"),
        (START + b"%x\r\n%s\r\n" % (MAX_LINE_BYTES + 2, b"x" * (MAX_LINE_BYTES + 2)), "a line of more than"),
        (START + b"8\r\ndata: {\n\r\n", "a chunk that can't be read"),
        (START + b"9\r\ndata: []\n\r\n", "a chunk that can't be read"),
        (event(b'{"usage":1}'), "a chunk that can't be read"),
        (event(b'{"usage":{"prompt_tokens":1,"completion_tokens":-1}}'), "a chunk that can't be read"),
        (event(b'{"error":"no KV"}'), "the server failed: no KV"),
        (PLAIN + b"Content-Length: -1\r\n\r\n", "a content-length that is no number"),
    ],
)  # fmt: skip
def test_nonsense_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadResponse, match=why):
        ResponseParser(ResponseRecord(0, None)).feed(data, 0.0)


def test_an_end_in_the_middle_is_an_error() -> None:
    data = chunked(events(3))
    for cut in range(len(data)):
        reader = ResponseParser(ResponseRecord(0, None))
        assert not reader.feed(data[:cut], 0.0)
        with pytest.raises(BadResponse, match="closed in an answer" if reader.record.status else "no answer came"):
            reader.on_close()
