"""A file of requests through the server's routes, without sockets: OpenAI's batch format, as vLLM's run-batch takes it.

Each line of the input is answered by one line of the output, as they end; `custom_id` says which. The output is written
beside its place under another name, which a run that was cut short leaves for `resume`, and takes its name at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from starlette.types import ASGIApp, Message

from quire.async_llm import AsyncLLM
from quire.errors import EngineDead, InputError, StartupError
from quire.server.guards import MAX_BODY

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/score",
        "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank")  # fmt: skip
FIELDS = frozenset({"custom_id", "method", "url", "body"})
MAX_LINES = 1_000_000
MAX_ID = 512  # characters of a custom_id
MAX_IN_FLIGHT = 4096
TRIES = 600  # for a line that finds the queue full
PARTIAL = ".partial"
DETAIL = 1000  # characters of an error


class Line(NamedTuple):
    """A request of the input. `number`: of its line, from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


class BadLine(NamedTuple):
    """A line that is no request, and why."""

    number: int
    custom_id: str | None
    why: str

    def answer(self) -> bytes:
        """Its line of the output."""
        error = {"code": "invalid_line", "message": f"line {self.number}: {self.why}"[:DETAIL], "line": self.number}
        found = {"id": _id(), "custom_id": self.custom_id, "response": None, "error": error}
        return json.dumps(found).encode() + b"\n"


class Summary(NamedTuple):
    """How many lines were answered well, failed, were no requests, and had been answered by an earlier run."""

    completed: int
    failed: int
    invalid: int
    kept: int


class Ids:
    """The custom_ids seen so far, as digests."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, custom_id: str) -> bool:
        """Note one; whether it is new."""
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        new = digest not in self._seen
        self._seen.add(digest)
        return new


def _id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def read_lines(file: BinaryIO, max_line: int = MAX_BODY, max_lines: int = MAX_LINES) -> Iterator[Line | BadLine]:
    """The lines of a file but the empty ones. One that has more than `max_line` bytes is bad, and not held. InputError
    after `max_lines`."""
    number = 0
    while raw := file.readline(max_line + 2):
        number += 1
        if number > max_lines:
            raise InputError(f"the input has more than {max_lines} lines", "input_file")
        if len(raw.removesuffix(b"\n")) > max_line:
            while not raw.endswith(b"\n") and (raw := file.readline(max_line + 2)):
                pass
            yield BadLine(number, None, f"it has more than {max_line} bytes")
        elif raw.strip():
            yield parse_line(number, raw)


def parse_line(number: int, raw: bytes) -> Line | BadLine:
    """A request, or what is wrong with it."""
    try:
        found = json.loads(raw.rstrip())
    except (ValueError, RecursionError) as error:
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return BadLine(number, None, f"it is not valid JSON{where}")
    if not isinstance(found, dict):
        return BadLine(number, None, "it is no JSON object")
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID:
        return BadLine(number, None, f"custom_id must be a string of 1 to {MAX_ID} characters")
    why = _wrong(found)
    if why is not None:
        return BadLine(number, custom_id, why)
    try:
        return Line(number, custom_id, found["url"], json.dumps(found["body"]).encode())
    except (ValueError, RecursionError):
        return BadLine(number, custom_id, "its body can't be written as JSON")


def _wrong(found: dict[str, Any]) -> str | None:
    """What is wrong with the fields of a line beside its custom_id."""
    if unknown := sorted(found.keys() - FIELDS):
        return f"there is no field {unknown[0][:60]!r}; a line has custom_id, method, url and body"
    if (method := found.get("method")) != "POST":
        return f"method must be POST, got {str(method)[:60]!r}"
    if (url := found.get("url")) not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {str(url)[:60]!r}"
    body = found.get("body")
    if not isinstance(body, dict):
        return "body must be a JSON object"
    return "a batch has no streams: leave out stream" if body.get("stream") else None


async def ask(app: ASGIApp, url: str, body: bytes) -> tuple[int, bytes, float]:
    """POST to an ASGI application: the status, the answer's body, and after how many seconds to ask again (0: never).
    Whoever leaves cancels it."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
             "path": url, "raw_path": url.encode(), "query_string": b"", "root_path": "", "headers": headers,
             "client": None, "server": None}  # fmt: skip
    sent = False
    parts: list[bytes] = []
    start: dict[str, Any] = {}

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.get_running_loop().create_future()  # nobody leaves
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    again = dict(start.get("headers", ())).get(b"retry-after", b"0")
    return start["status"], b"".join(parts), float(again)


class Batch:
    """Answers the lines of a file by `app`, the server's application over `llm`, `in_flight` at once, into `out`.
    `kept`: custom_ids that are answered there already."""

    def __init__(self, app: ASGIApp, llm: AsyncLLM, out: BinaryIO, in_flight: int, kept: Ids, had: int = 0) -> None:
        self.app, self.llm, self.out, self.in_flight = app, llm, out, in_flight
        self._kept, self._ids, self._had = kept, Ids(), had
        self._counts: Counter[str] = Counter()

    async def run(self, lines: Iterator[Line | BadLine]) -> Summary:
        """All of them. EngineDead when the engine stops; what was answered until then is in the output."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.in_flight):
                    group.create_task(self._work(lines))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        counts = self._counts
        return Summary(counts["completed"], counts["failed"], counts["invalid"], counts["kept"])

    async def _work(self, lines: Iterator[Line | BadLine]) -> None:
        for line in lines:  # the workers share the iterator
            if isinstance(line, Line) and not self._ids.add(line.custom_id):
                line = BadLine(line.number, line.custom_id, f"custom_id {line.custom_id[:60]!r} was used before")
            if isinstance(line, Line) and self._had and not self._kept.add(line.custom_id):
                self._counts["kept"] += 1
            elif isinstance(line, Line):
                await self._answer(line)
            else:
                self._write(line.answer(), "invalid")
            await asyncio.sleep(0)

    async def _answer(self, line: Line) -> None:
        for tried in range(TRIES):
            status, body, again = await ask(self.app, line.url, line.body)
            if self.llm.error is not None:
                raise EngineDead("the engine stopped") from self.llm.error
            if status != 503 or not again or tried == TRIES - 1:
                break
            await asyncio.sleep(min(again, 1.0))
        error = json.dumps(json.loads(body).get("error")) if status >= 400 else "null"
        head = f'{{"id":"{_id()}","custom_id":{json.dumps(line.custom_id)},"response":{{"status_code":{status},'
        head += f'"request_id":"{uuid.uuid4().hex}","body":'
        self._write(head.encode() + body + f'}},"error":{error}}}\n'.encode(), "failed" if error != "null" else
                    "completed")  # fmt: skip

    def _write(self, answer: bytes, kind: str) -> None:
        self.out.write(answer)
        self.out.flush()
        self._counts[kind] += 1


def answered(path: Path, out: BinaryIO) -> tuple[Ids, int]:
    """Write to `out` what an earlier run left at `path` but its failures, which are asked again, and a line that was
    cut. The custom_ids, and how many there are."""
    ids, number = Ids(), 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                found = json.loads(raw)
                keep = found["error"] is None and ids.add(found["custom_id"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise StartupError(f"{path} holds no answers of a batch", "Move it away") from error
            if keep:
                out.write(raw)
                number += 1
    return ids, number


def open_partial(target: Path, resume: bool) -> tuple[BinaryIO, Ids, int]:
    """The file that becomes `target`, open, with the answers of an earlier run if they are kept. StartupError if it
    is a folder, can't be written, or is there and isn't to be resumed."""
    if target.is_dir():
        raise StartupError(f"{target} is a folder", "Give a file as --output-file")
    partial, fresh = Path(f"{target}{PARTIAL}"), Path(f"{target}{PARTIAL}.new")
    if partial.exists() and not resume:
        raise StartupError(f"{partial} is there: a run that didn't end", "Add --resume to go on with it, or remove it")
    try:
        with fresh.open("wb") as out:
            ids, number = answered(partial, out) if partial.exists() else (Ids(), 0)
        os.replace(fresh, partial)
        return partial.open("ab"), ids, number
    except OSError as error:
        raise StartupError(f"{target} can't be written: {error.strerror}", "Give another --output-file") from error


def run_batch(
    make: Callable[[], tuple[AsyncLLM, ASGIApp]], source: Path, target: Path, *, in_flight: int, resume: bool = False
) -> Summary:
    """Answer the requests of the file `source` into the file `target`, by the application that `make` makes. `resume`
    keeps what an earlier run answered well. StartupError for files that can't be read or written, before `make`."""
    if source.resolve() == target.resolve():
        raise StartupError(f"--input-file and --output-file are both {source}", "Give two files")
    try:
        file = source.open("rb")
        file.peek(1)
    except OSError as error:
        raise StartupError(f"{source} can't be read: {error.strerror}", "Give a JSONL file") from error
    with file:
        out, kept, had = open_partial(target, resume)
        with out:
            llm, app = make()
            try:
                sight = llm.prompts.sight
                longest = MAX_BODY + (sight.limits.body if sight is not None else 0)
                summary = asyncio.run(Batch(app, llm, out, in_flight, kept, had).run(read_lines(file, longest)))
            finally:
                llm.close()
            os.fsync(out.fileno())
    os.replace(f"{target}{PARTIAL}", target)
    return summary
