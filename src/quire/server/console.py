"""The console: a page that shows the engine at work, fed by server-sent events.

The page's files contain no data, so they need no key; the events do if keys are set. All clients of one frontend share
its snapshots of the engine. Between two snapshots the engine gets 400 times the processor time that a snapshot took,
multiplied by the number of frontends. A frontend spends up to three times the engine's time on an event. So watching
takes about 1% of the processor time, even if other processes leave the server a quarter of a core. Without clients no
snapshots are taken.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

import quire
from quire.errors import EngineDead
from quire.server.errors import Failure

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.server.metrics import Metrics

PAGE, SCRIPTS = "/console", ("console.js", "chat.js", "common.js", "draw.js", "engine.js", "markdown.js", "tree.js")
FILES = {"console.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}
OPEN_PATHS = ("/", PAGE, f"{PAGE}/", *(f"{PAGE}/{name}" for name in FILES))
LATENCIES = {"first": "time_to_first_token_seconds", "between": "inter_token_latency_seconds"}  # as Metrics has them
MAX_WATCHERS = 32
MIN_POLL_SECONDS = 0.2  # between two snapshots
ENGINE_SHARE = 0.0025  # of the engine's processor time, for the snapshots of all frontends
IDLE_LOAD = 0.05  # processor time per second below which the engine counts as idle
MIN_LOAD = 0.25  # processor time per second; a lower one counts as this much
MAX_STREAM_SECONDS = 600.0  # duration of a stream; the client connects again then
SNAPSHOT_HEAD = re.compile(r'\{"took": ?([^,]+), ?"busy": ?([^,]+),')
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY, "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}  # fmt: skip


class Console:
    """The console's routes. `metrics` are those of this frontend, which is one of `num_frontends`."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics, num_frontends: int = 1) -> None:
        self.llm, self.metrics, self.engine_share, self.num_watchers = llm, metrics, ENGINE_SHARE / num_frontends, 0
        self.latest_snapshot, self.snapshot_number = "", 0
        self._updated = asyncio.Condition()
        self._poll_task: asyncio.Task[None] | None = None
        folder = Path(quire.__file__).parent / "assets" / "console"
        self._page = (folder / "index.html").read_bytes()
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    async def page(self, request: Request) -> Response:
        """Return the page that shows the engine. It names its files relative to PAGE/, so other paths are redirected
        there."""
        if not request.url.path.endswith(f"{PAGE}/"):
            return RedirectResponse(f"{PAGE[1:]}/")
        return Response(self._page, media_type="text/html", headers=HEADERS)

    async def file(self, request: Request) -> Response:
        """Return one of the page's files."""
        name = request.url.path.rpartition("/")[2]
        return Response(self._files[name], media_type=FILES[name], headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Stream snapshots (quire.core.snapshot)."""
        if self.num_watchers >= MAX_WATCHERS:
            return Failure(
                503, f"the console has {MAX_WATCHERS} clients, which is the limit", headers={"Retry-After": "10"}
            ).response(request.scope)
        return StreamingResponse(
            self._event_stream(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _event_stream(self, request: Request) -> AsyncIterator[str]:
        """Yield the events of one client. Each is the latest snapshot; earlier ones may be skipped."""
        self.num_watchers += 1
        seen, end = 0, asyncio.get_running_loop().time() + MAX_STREAM_SECONDS
        try:
            if self._poll_task is None or self._poll_task.done():
                self._poll_task = asyncio.create_task(self._poll_engine())
                seen = self.snapshot_number  # the stored snapshot is outdated: skip it
            while True:
                try:
                    async with asyncio.timeout_at(end), self._updated:
                        await self._updated.wait_for(lambda seen=seen: self.snapshot_number != seen)  # type: ignore[misc]  # mypy infers no type for its default
                        seen, latest = self.snapshot_number, self.latest_snapshot
                except TimeoutError:
                    return
                if not latest or await request.is_disconnected():
                    return
                yield f"data: {latest}\n\n"
        finally:
            self.num_watchers -= 1

    async def _poll_engine(self) -> None:
        """Take snapshots of the engine while there are clients."""
        while self.num_watchers:
            try:
                snapshot = await self.llm.look()
                latest, pause = self._add_fields(snapshot), self._pause_seconds(snapshot)
            except EngineDead:
                latest, pause = "", 0.0
            async with self._updated:
                self.latest_snapshot, self.snapshot_number = latest, self.snapshot_number + 1
                self._updated.notify_all()
            if not latest:
                return
            await asyncio.sleep(pause)

    def _add_fields(self, snapshot: str) -> str:
        """Return the snapshot with the number and the sum in seconds of each kind of latency that this frontend has
        measured, and with `images`: true if the model takes images."""
        histograms = {kind: self.metrics.histograms[name] for kind, name in LATENCIES.items()}
        latencies = {kind: [sum(of.counts), of.total] for kind, of in histograms.items()}
        fields = {"latencies": latencies, "images": self.llm.prompts.image_loader is not None}
        return f"{snapshot[:-1]}, {json.dumps(fields)[1:]}"

    def _pause_seconds(self, snapshot: str) -> float:
        """Return the seconds until the next snapshot. Only the head of the snapshot is parsed, since parsing all of it
        takes longer."""
        head = SNAPSHOT_HEAD.match(snapshot)
        assert head is not None, "a snapshot begins with the time that it took"
        took, busy = map(float, head.groups())
        return max(MIN_POLL_SECONDS, took / self.engine_share / max(busy, MIN_LOAD) if busy > IDLE_LOAD else 0.0)
