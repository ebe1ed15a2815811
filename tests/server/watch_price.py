"""What watching costs a server: its processor time for a fixed number of tokens, with and without somebody who reads
/console/events, in turn.

    python tests/server/watch_price.py docs/measurements/cpu_watching.json

The load is of the bundled model: requests of random prompts at once, not streamed, so that the engine is nearly all of
it. Processor time is that of the engine's process and the fronts'; readers are in another one. Where others use the
machine, seconds by the clock say little, and processor time a few per cent: every round has both, and medians are of
rounds. What an event costs while nothing else is done is less noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx
from served_process import SERVE, served

from quire.bench.machine import machine
from quire.ipc.engine_loop import HISTORY_IDLE_SECONDS

REST = 10.0  # seconds
VOCAB = 3000  # of the bundled model's, without what is special
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "256 pages": (1, ("--kv-tokens", "4096")),
    "8,192 pages": (1, ("--kv-tokens", "131072")),
    "8,192 pages, 2 fronts, 2 watchers": (2, ("--kv-tokens", "131072", "--fronts", "2")),
}
"""Watchers, and options of the server."""


def seconds(port: int) -> float:
    """Processor time of the engine and of all fronts, as /metrics has it."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).text
    return sum(map(float, re.findall(r"^quire_process_cpu_seconds_total\{.*?\} (\S+)$", text, re.MULTILINE)))


def ask(port: int, tokens: int, count: int, seed: int) -> None:
    """`count` requests at once, each for so many tokens."""

    def post(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        said = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=600).json()
        assert said["usage"]["completion_tokens"] == tokens, said

    rng = random.Random(seed)
    prompts = [[rng.randrange(100, VOCAB) for _ in range(48)] for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(post, prompts))


class Watcher:
    """Somebody who reads the events, of whom `took` are what the looks took."""

    def __init__(self, port: int) -> None:
        self.took, self.bytes, self._over = list[float](), 0, False
        self._answer = urllib.request.urlopen(f"http://127.0.0.1:{port}/console/events", timeout=60)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while not self._over:
            line = self._answer.readline()
            self.bytes += len(line)
            if line.startswith(b"data: "):
                self.took.append(float(re.findall(rb'"took":([\d.]+)', line)[0]))

    def leave(self) -> None:
        self._over = True
        self._thread.join()
        self._answer.close()


def at_rest(port: int, watchers: int) -> dict[str, Any]:
    """What an event costs while nothing else is done."""
    time.sleep(HISTORY_IDLE_SECONDS + 1)
    spent = seconds(port)
    time.sleep(REST)
    spent = seconds(port) - spent
    there = [Watcher(port) for _ in range(watchers)]
    began = seconds(port)
    time.sleep(REST)
    watched = seconds(port) - began
    for watcher in there:
        watcher.leave()
    events = sum(len(watcher.took) for watcher in there)
    per_event = 1000 * (watched - spent) / events
    return {"events_a_second": round(events / REST, 2), "cpu_ms_an_event": round(per_event, 3), **sizes(there)}


def sizes(watchers: list[Watcher]) -> dict[str, Any]:
    looks = [seconds for watcher in watchers for seconds in watcher.took]
    size = sum(watcher.bytes for watcher in watchers) // len(looks)
    return {"events": len(looks), "event_bytes": size, "engine_ms_a_look": round(1000 * statistics.fmean(looks), 3)}


def measured(case: str, given: argparse.Namespace) -> dict[str, Any]:
    watchers, options = CASES[case]
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *options, command=SERVE) as server:
        port = int(server.ready().url.rpartition(":")[2])
        ask(port, given.tokens, given.requests, 0)
        rest = at_rest(port, watchers)
        print(case, json.dumps(rest), flush=True)
        for number in range(1, given.rounds + 1):
            one: dict[str, Any] = {}
            for what in ("watched", "alone") if number % 2 else ("alone", "watched"):
                time.sleep(HISTORY_IDLE_SECONDS + 1 if what == "alone" else 0)
                there = [Watcher(port) for _ in range(watchers if what == "watched" else 0)]
                began, spent = time.monotonic(), seconds(port)
                ask(port, given.tokens, given.requests, 2 * number + bool(there))  # nothing is found of the other's
                spent, took = seconds(port) - spent, time.monotonic() - began
                for watcher in there:
                    watcher.leave()
                one[what] = {"cpu_seconds": round(spent, 3), "tokens_a_second": round(given.total / took, 1)}
                one[what] |= sizes(there) if there else {}
            rounds.append(one)
            print(case, json.dumps(one), flush=True)
    return {
        "server": ["quire", "serve", *options], "watchers": watchers, "at_rest": rest,
        "median_ratio_of_cpu_seconds": ratio(rounds, "cpu_seconds"),
        "median_ratio_of_tokens_a_second": ratio(rounds, "tokens_a_second"), "rounds": rounds,
    }  # fmt: skip


def ratio(rounds: list[dict[str, Any]], name: str) -> float:
    return round(statistics.median(one["watched"][name] / one["alone"][name] for one in rounds), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each request")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    given.total = given.requests * given.tokens
    told: dict[str, Any] = {
        "what": "processor time of a server, with and without somebody who watches, for the same number of tokens",
        "command": "OMP_NUM_THREADS=1 python tests/server/watch_price.py FILE",
        "settings": {"requests": given.requests, "tokens": given.tokens, "rounds": given.rounds},
        "machine": machine(), "load_average": os.getloadavg(), "cases": {},
    }  # fmt: skip
    for case in CASES:
        told["cases"][case] = measured(case, given)
        Path(given.out).write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
