"""Answer a file of requests through the server's routes, without sockets. The format is OpenAI's batch format, as in
vLLM's run-batch.

Each line of the input is answered by one line of the output, in the order in which the answers end; `custom_id` links
the two. The output is written beside its destination under another name and renamed at the end. An interrupted run
leaves that file, and `resume` continues it.
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
MAX_ID_CHARS = 512  # characters of a custom_id
MAX_IN_FLIGHT = 4096
MAX_TRIES = 600  # of a line while the queue is full
PARTIAL_SUFFIX = ".partial"
MAX_ERROR_CHARS = 1000  # characters of an error


class BatchRequest(NamedTuple):
    """A request of the input. `number` is the number of its line, from 1."""

    number: int
    custom_id: str
    url: str
    body: bytes


class InvalidLine(NamedTuple):
    """A line that is not a request, and the reason."""

    number: int
    custom_id: str | None
    why: str

    def to_output_line(self) -> bytes:
        """Return the line of the output for it."""
        error = {
            "code": "invalid_line",
            "message": f"line {self.number}: {self.why}"[:MAX_ERROR_CHARS],
            "line": self.number,
        }
        line = {"id": _new_id(), "custom_id": self.custom_id, "response": None, "error": error}
        return json.dumps(line).encode() + b"\n"


class BatchSummary(NamedTuple):
    """Numbers of lines that were answered, that failed, that were not requests, and that an earlier run had
    answered."""

    completed: int
    failed: int
    invalid: int
    kept: int


class SeenIds:
    """A set of custom_ids, stored as digests."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, custom_id: str) -> bool:
        """Add a custom_id. Return True if it is new."""
        digest = blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        new = digest not in self._seen
        self._seen.add(digest)
        return new


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def read_lines(
    file: BinaryIO, max_line: int = MAX_BODY, max_lines: int = MAX_LINES
) -> Iterator[BatchRequest | InvalidLine]:
    """Yield the requests of a file. Empty lines are skipped. A line of more than `max_line` bytes is invalid and is not
    held in memory. Raise InputError after `max_lines` lines."""
    number = 0
    while raw := file.readline(max_line + 2):
        number += 1
        if number > max_lines:
            raise InputError(f"the input has more than {max_lines} lines", "input_file")
        if len(raw.removesuffix(b"\n")) > max_line:
            while not raw.endswith(b"\n") and (raw := file.readline(max_line + 2)):
                pass
            yield InvalidLine(number, None, f"it has more than {max_line} bytes")
        elif raw.strip():
            yield parse_line(number, raw)


def parse_line(number: int, raw: bytes) -> BatchRequest | InvalidLine:
    """Return the request of a line, or the reason why it is invalid."""
    try:
        line = json.loads(raw.rstrip())
    except (ValueError, RecursionError) as error:
        where = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return InvalidLine(number, None, f"it is not valid JSON{where}")
    if not isinstance(line, dict):
        return InvalidLine(number, None, "it is no JSON object")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        return InvalidLine(number, None, f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters")
    why = _line_error(line)
    if why is not None:
        return InvalidLine(number, custom_id, why)
    try:
        return BatchRequest(number, custom_id, line["url"], json.dumps(line["body"]).encode())
    except (ValueError, RecursionError):
        return InvalidLine(number, custom_id, "its body can't be written as JSON")


def _line_error(line: dict[str, Any]) -> str | None:
    """Return what is wrong with the fields of a line other than custom_id, or None."""
    if unknown := sorted(line.keys() - FIELDS):
        return f"there is no field {unknown[0][:60]!r}; a line has custom_id, method, url and body"
    if (method := line.get("method")) != "POST":
        return f"method must be POST, got {str(method)[:60]!r}"
    if (url := line.get("url")) not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {str(url)[:60]!r}"
    body = line.get("body")
    if not isinstance(body, dict):
        return "body must be a JSON object"
    return "a batch has no streams: leave out stream" if body.get("stream") else None


async def post(app: ASGIApp, url: str, body: bytes) -> tuple[int, bytes, float]:
    """POST to an ASGI application. Return the status, the body of the answer, and the seconds after which to retry (0:
    do not retry). Cancelling this call cancels the request."""
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
            await asyncio.get_running_loop().create_future()  # never done: this client does not disconnect
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            start.update(message)
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    retry_after = dict(start.get("headers", ())).get(b"retry-after", b"0")
    return start["status"], b"".join(parts), float(retry_after)


class BatchRunner:
    """Answers the lines of a file with `app`, the server's application for `llm`, into `out`, `in_flight` lines at
    once. `kept_ids` are the `num_kept` custom_ids that `out` has answers to already."""

    def __init__(
        self, app: ASGIApp, llm: AsyncLLM, out: BinaryIO, in_flight: int, kept_ids: SeenIds, num_kept: int = 0
    ) -> None:
        self.app, self.llm, self.out, self.in_flight = app, llm, out, in_flight
        self._kept_ids, self._ids, self._num_kept = kept_ids, SeenIds(), num_kept
        self._counts: Counter[str] = Counter()

    async def run(self, lines: Iterator[BatchRequest | InvalidLine]) -> BatchSummary:
        """Answer all lines. Raise EngineDead if the engine stops; the answers until then are in the output."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.in_flight):
                    group.create_task(self._run_worker(lines))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        counts = self._counts
        return BatchSummary(counts["completed"], counts["failed"], counts["invalid"], counts["kept"])

    async def _run_worker(self, lines: Iterator[BatchRequest | InvalidLine]) -> None:
        for line in lines:  # the workers share the iterator
            if isinstance(line, BatchRequest) and not self._ids.add(line.custom_id):
                line = InvalidLine(line.number, line.custom_id, f"custom_id {line.custom_id[:60]!r} was used before")
            if isinstance(line, BatchRequest) and self._num_kept and not self._kept_ids.add(line.custom_id):
                self._counts["kept"] += 1
            elif isinstance(line, BatchRequest):
                await self._answer(line)
            else:
                self._write(line.to_output_line(), "invalid")
            await asyncio.sleep(0)

    async def _answer(self, line: BatchRequest) -> None:
        for tried in range(MAX_TRIES):
            status, body, retry_after = await post(self.app, line.url, line.body)
            if self.llm.error is not None:
                raise EngineDead("the engine stopped") from self.llm.error
            if status != 503 or not retry_after or tried == MAX_TRIES - 1:
                break
            await asyncio.sleep(min(retry_after, 1.0))
        error = json.dumps(json.loads(body).get("error")) if status >= 400 else "null"
        head = f'{{"id":"{_new_id()}","custom_id":{json.dumps(line.custom_id)},"response":{{"status_code":{status},'
        head += f'"request_id":"{uuid.uuid4().hex}","body":'
        self._write(head.encode() + body + f'}},"error":{error}}}\n'.encode(), "failed" if error != "null" else
                    "completed")  # fmt: skip

    def _write(self, answer: bytes, kind: str) -> None:
        self.out.write(answer)
        self.out.flush()
        self._counts[kind] += 1


def copy_completed(path: Path, out: BinaryIO) -> tuple[SeenIds, int]:
    """Copy the answers of an earlier run at `path` to `out`, without failed ones, which are tried again, and without a
    last line that was cut off. Return their custom_ids and their number."""
    ids, number = SeenIds(), 0
    with path.open("rb") as file:
        for raw in file:
            if not raw.endswith(b"\n"):
                break
            try:
                answer = json.loads(raw)
                keep = answer["error"] is None and ids.add(answer["custom_id"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise StartupError(f"{path} holds no answers of a batch", "Move it away") from error
            if keep:
                out.write(raw)
                number += 1
    return ids, number


def open_partial(target: Path, resume: bool) -> tuple[BinaryIO, SeenIds, int]:
    """Open the file that will be renamed to `target`, with the answers of an earlier run if `resume` is set. Return it,
    their custom_ids and their number. Raise StartupError if `target` is a folder or cannot be written, or if there is
    an earlier run and `resume` is not set."""
    if target.is_dir():
        raise StartupError(f"{target} is a folder", "Give a file as --output-file")
    partial, fresh = Path(f"{target}{PARTIAL_SUFFIX}"), Path(f"{target}{PARTIAL_SUFFIX}.new")
    if partial.exists() and not resume:
        raise StartupError(f"{partial} exists: an earlier run did not end", "Add --resume to continue it, or remove it")
    try:
        with fresh.open("wb") as out:
            ids, number = copy_completed(partial, out) if partial.exists() else (SeenIds(), 0)
        os.replace(fresh, partial)
        return partial.open("ab"), ids, number
    except OSError as error:
        raise StartupError(f"{target} can't be written: {error.strerror}", "Give another --output-file") from error


def run_batch(
    make: Callable[[], tuple[AsyncLLM, ASGIApp]], source: Path, target: Path, *, in_flight: int, resume: bool = False
) -> BatchSummary:
    """Answer the requests of the file `source` into the file `target`, with the application that `make` returns.
    `resume` keeps the answers of an earlier run. Raise StartupError, before `make` is called, for files that cannot be
    read or written."""
    if source.resolve() == target.resolve():
        raise StartupError(f"--input-file and --output-file are both {source}", "Give two files")
    try:
        file = source.open("rb")
        file.peek(1)
    except OSError as error:
        raise StartupError(f"{source} can't be read: {error.strerror}", "Give a JSONL file") from error
    with file:
        out, kept_ids, num_kept = open_partial(target, resume)
        with out:
            llm, app = make()
            try:
                loader = llm.prompts.image_loader
                max_line = MAX_BODY + (loader.limits.max_body_chars if loader is not None else 0)
                runner = BatchRunner(app, llm, out, in_flight, kept_ids, num_kept)
                summary = asyncio.run(runner.run(read_lines(file, max_line)))
            finally:
                llm.close()
            os.fsync(out.fileno())
    os.replace(f"{target}{PARTIAL_SUFFIX}", target)
    return summary
