"""Raise and lower the load of a server, and record its replicas and latencies: `python tools/follow_load.py --url URL
--out FILE.json`, which also draws FILE.png.

The load is a number of requests in flight, each sent when the one before has ended: `--phases 1:30,12:120,1:90` is one
for 30 seconds, then 12 for 120 seconds, and so on. `--mark 60 TEXT` prints a text after 60 seconds, for a program that
does something then, and draws it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

from quire.bench.document import document, write
from quire.bench.plots import COLOURS, figure, save

SAMPLE_SECONDS = 1.0  # between two looks at the replicas
UP = "quire_engine_up{"
WAITING, RUNNING = "quire_num_requests_waiting{", "quire_num_requests_running{"


class Load:
    """The clients of a server, of which those with a number below `in_flight` send requests."""

    def __init__(self, http: httpx.AsyncClient, max_tokens: int) -> None:
        self.http, self.max_tokens = http, max_tokens
        self.in_flight, self.start = 0, time.monotonic()
        self.requests, self.samples = list[dict[str, Any]](), list[dict[str, Any]]()

    async def client(self, number: int) -> None:
        """Send requests while this client is among those that do."""
        while number < self.in_flight:
            body = {"prompt": f"{number} Once upon a time", "max_tokens": self.max_tokens, "ignore_eos": True}
            began = time.monotonic()
            response = await self.http.post("/v1/completions", json=body)
            seconds = time.monotonic() - began
            ended = {"at": round(began - self.start, 3), "seconds": round(seconds, 3), "status": response.status_code}
            if response.status_code != 200:
                ended["error"] = response.json()["error"]["message"]
            self.requests.append(ended)

    async def sample(self) -> None:
        """Record the replicas that serve, and the requests that wait and run."""
        while True:
            lines = (await self.http.get("/metrics")).text.splitlines()
            up, waiting, running = (
                sum(float(line.split()[-1]) for line in lines if line.startswith(name))
                for name in (UP, WAITING, RUNNING)
            )
            at = round(time.monotonic() - self.start, 3)
            self.samples.append({"at": at, "replicas": int(up), "waiting": int(waiting), "running": int(running),
                                 "in_flight": self.in_flight})  # fmt: skip
            await asyncio.sleep(SAMPLE_SECONDS)

    async def mark(self, seconds: float, text: str) -> None:
        """Print a text after some seconds."""
        await asyncio.sleep(seconds)
        print(text, flush=True)


class Phase(NamedTuple):
    """A number of requests in flight, for some seconds."""

    in_flight: int
    seconds: float


def phases(text: str) -> list[Phase]:
    """Parse --phases."""
    return [Phase(int(many), float(seconds)) for many, _, seconds in (one.partition(":") for one in text.split(","))]


Mark = tuple[float, str]


async def measure(url: str, order: list[Phase], max_tokens: int, mark: Mark | None) -> Load:
    """Return what happened."""
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        load, clients = Load(http, max_tokens), list[asyncio.Task[None]]()
        others = [asyncio.create_task(load.sample())]
        if mark is not None:
            others.append(asyncio.create_task(load.mark(*mark)))
        for phase in order:
            before, load.in_flight = load.in_flight, phase.in_flight
            clients += [asyncio.create_task(load.client(number)) for number in range(before, phase.in_flight)]
            await asyncio.sleep(phase.seconds)
        load.in_flight = 0
        await asyncio.gather(*clients)
        for other in others:
            other.cancel()
        return load


def summary(load: Load, order: list[Phase]) -> list[dict[str, Any]]:
    """Return the latencies of each phase: of the requests that began in it."""
    found, begin = list[dict[str, Any]](), 0.0
    for phase in order:
        begun = [one["seconds"] for one in load.requests if begin <= one["at"] < begin + phase.seconds]
        late = [
            one["seconds"] for one in load.requests if begin + phase.seconds / 2 <= one["at"] < begin + phase.seconds
        ]
        seen = [one["replicas"] for one in load.samples if begin <= one["at"] < begin + phase.seconds]
        found.append({
            "in_flight": phase.in_flight, "seconds": phase.seconds, "requests": len(begun),
            "median_seconds": round(median(begun), 3), "median_seconds_second_half": round(median(late), 3),
            "replicas_first": seen[0], "replicas_most": max(seen), "replicas_last": seen[-1],
        })  # fmt: skip
        begin += phase.seconds
    return found


def draw(load: Load, mark: Mark | None, path: Path) -> None:
    """Draw the replicas and the requests over time, and below them the latency of each request."""
    drawn = figure(8, 5)
    above, below = drawn.subplots(2, 1, sharex=True)
    at = [one["at"] for one in load.samples]
    above.step(
        at, [one["in_flight"] for one in load.samples], where="post", color=COLOURS[4], label="requests in flight"
    )
    above.step(at, [one["waiting"] for one in load.samples], where="post", color=COLOURS[1], label="of these, waiting")
    above.step(at, [one["replicas"] for one in load.samples], where="post", color=COLOURS[0], label="replicas",
               linewidth=2.5)  # fmt: skip
    for axes in (above, below):
        if mark is not None:
            axes.axvline(mark[0], color=COLOURS[3], linestyle="--", label=mark[1])
    above.set_ylabel("number")
    above.set_ylim(bottom=0)
    above.legend(loc="upper right", fontsize="small")
    for colour, marker, of in ((COLOURS[0], "o", "ended"), (COLOURS[3], "x", "failed")):
        drawn_ones = [one for one in load.requests if (one["status"] == 200) == (of == "ended")]
        below.scatter([one["at"] for one in drawn_ones], [one["seconds"] for one in drawn_ones], s=12, color=colour,
                      marker=marker, label=of)  # fmt: skip
    below.legend(loc="upper right", fontsize="small")
    below.set_ylabel("seconds of a request")
    below.set_xlabel("seconds; a request is drawn where it was sent")
    below.set_ylim(bottom=0)
    save(drawn, path)


def main(arguments: list[str]) -> int:
    """Measure, and write the document and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--phases", default="1:30,12:120,1:90", help="requests in flight and seconds, of each phase")
    parser.add_argument("--max-tokens", type=int, default=300)
    parser.add_argument("--deployment", default="", help="how the server was started, for the document")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mark", nargs=2, metavar=("SECONDS", "TEXT"), help="what happens, and when")
    args = parser.parse_args(arguments)
    order, mark = phases(args.phases), None if args.mark is None else (float(args.mark[0]), args.mark[1])
    load = asyncio.run(measure(args.url, order, args.max_tokens, mark))
    failed = sum(one["status"] != 200 for one in load.requests)
    result = {"deployment": args.deployment, "failed": failed, "mark": mark, "phases": summary(load, order),
              "samples": load.samples, "requests": load.requests}  # fmt: skip
    shown = [*arguments]
    shown[shown.index("--out") + 1] = args.out.name
    write(args.out, document("follow_load", "python tools/follow_load.py", shown, [result]))
    draw(load, mark, args.out.with_suffix(".png"))
    for one in result["phases"]:
        print(one)
    print(f"{len(load.requests)} requests, {failed} failed")
    return 1 if failed and mark is None else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
