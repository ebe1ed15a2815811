"""The console: a page that shows the engine at work, and what it is told of that, as server-sent events.

The page's files hold no data, so they are open; whatever they ask for needs a key where one is set. All who watch
through one front share its looks at the engine. Between two looks the engine has 400 times the processor time that one
took, from its first page to its last byte, and with several fronts as many times more; the fronts' part of an event is
up to three times the engine's. So watching takes about a hundredth of the processor time, also where others leave
the server a quarter of a core. While nobody watches nothing is asked.
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

PAGE, SCRIPTS = "/console", ("console.js", "chat.js", "common.js", "draw.js", "engine.js", "tree.js")
FILES = {"console.css": "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}
OPEN_PATHS = ("/", PAGE, f"{PAGE}/", *(f"{PAGE}/{name}" for name in FILES))
LATENCIES = {"first": "time_to_first_token_seconds", "between": "inter_token_latency_seconds"}  # as Metrics has them
MAX_WATCHERS = 32
MIN_POLL_SECONDS, ENGINE_SHARE = (
    0.2,
    0.0025,
)  # seconds between two looks, at least; of the engine's that all fronts' looks may take
IDLE_LOAD, MIN_LOAD = (
    0.05,
    0.25,
)  # processor time a second: of an engine that has nothing to lose; less counts as so much
MAX_STREAM_SECONDS = 600.0  # seconds that a client is told; it asks again then
SNAPSHOT_HEAD = re.compile(r'\{"took": ?([^,]+), ?"busy": ?([^,]+),')  # of a scene
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
    """The page's files, and those who watch `llm` through this front, one of `num_frontends`, which counted "
    "`metrics`."""

    def __init__(self, llm: AsyncLLM, metrics: Metrics, num_frontends: int = 1) -> None:
        self.llm, self.metrics, self.engine_share, self.num_watchers = llm, metrics, ENGINE_SHARE / num_frontends, 0
        self.latest_snapshot, self.snapshot_number = "", 0
        self._updated = asyncio.Condition()
        self._poll_task: asyncio.Task[None] | None = None
        folder = Path(quire.__file__).parent / "assets" / "console"
        self._page = (folder / "index.html").read_bytes()
        self._files = {name: (folder / name).read_bytes() for name in FILES}

    async def page(self, request: Request) -> Response:
        """The page. Its files are named as lying below it, so other paths lead there."""
        if not request.url.path.endswith(f"{PAGE}/"):
            return RedirectResponse(f"{PAGE[1:]}/")
        return Response(self._page, media_type="text/html", headers=HEADERS)

    async def file(self, request: Request) -> Response:
        """One of its files."""
        name = request.url.path.rpartition("/")[2]
        return Response(self._files[name], media_type=FILES[name], headers=HEADERS)

    async def events(self, request: Request) -> Response:
        """Scenes (quire.core.snapshot), as they come."""
        if self.num_watchers >= MAX_WATCHERS:
            return Failure(503, f"{MAX_WATCHERS} watch already", headers={"Retry-After": "10"}).response(request.scope)
        return StreamingResponse(
            self._event_stream(request), media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    async def _event_stream(self, request: Request) -> AsyncIterator[str]:
        """One client's events: the latest scene each time, whatever it missed."""
        self.num_watchers += 1
        seen, end = 0, asyncio.get_running_loop().time() + MAX_STREAM_SECONDS
        try:
            if self._poll_task is None or self._poll_task.done():
                self._poll_task, seen = (
                    asyncio.create_task(self._poll_engine()),
                    self.snapshot_number,
                )  # what is there is of long ago
            while asyncio.get_running_loop().time() < end:
                async with self._updated:
                    await self._updated.wait_for(lambda seen=seen: self.snapshot_number != seen)  # type: ignore[misc]
                    seen, latest = self.snapshot_number, self.latest_snapshot
                if not latest or await request.is_disconnected():
                    return
                yield f"data: {latest}\n\n"
        finally:
            self.num_watchers -= 1

    async def _poll_engine(self) -> None:
        """Ask the engine, as long as anybody watches."""
        while self.num_watchers:
            try:
                scene = await self.llm.look()
                latest, pause = self._add_latencies(scene), self._pause_seconds(scene)
            except EngineDead:
                latest, pause = "", 0.0
            async with self._updated:
                self.latest_snapshot, self.snapshot_number = latest, self.snapshot_number + 1
                self._updated.notify_all()
            if not latest:
                return
            await asyncio.sleep(pause)

    def _add_latencies(self, snapshot: str) -> str:
        """A scene, and how many latencies of each kind this front has counted, and their sum in seconds."""
        counted = {kind: self.metrics.histograms[name] for kind, name in LATENCIES.items()}
        told = {kind: [sum(of.counts), of.total] for kind, of in counted.items()}
        return f'{snapshot[:-1]}, "latencies": {json.dumps(told)}}}'

    def _pause_seconds(self, snapshot: str) -> float:
        """Seconds until the next look. What a scene begins with says it: reading all of it would take longer."""
        began = SNAPSHOT_HEAD.match(snapshot)
        assert began is not None, "a scene begins with what it took"
        took, busy = map(float, began.groups())
        return max(MIN_POLL_SECONDS, took / self.engine_share / max(busy, MIN_LOAD) if busy > IDLE_LOAD else 0.0)
