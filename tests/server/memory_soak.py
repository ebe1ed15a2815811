"""The memory of servers under mixed load, over time. As a script it writes what it saw:
`python tests/server/memory_soak.py 1800 docs/measurements/cpu_memory_soak.json`. With the word "apart" behind it
there is one server, for 16 clients. The memory of a server's front and of its engine's process are told apart.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from mixed_load import PREFIXES, Load

from quire.bench.machine import machine
from quire.config import PREEMPTIONS

CLIENTS = 64  # of all servers together
EVERY = 5.0  # seconds
FLAGS = ("--dtype", "bfloat16", "--threads", "1", "--max-model-len", "2048", "--kv-tokens", "4096",
         "--prefix-tokens", "1024", "--swap-gib", "0.03")  # fmt: skip


class Server(NamedTuple):
    """A process that serves the bundled model, and where."""

    child: subprocess.Popen[bytes]
    url: str
    errors: Path

    def mib(self) -> tuple[float, float]:
        """Resident memory of the front, and of its engine's process; 0 without one."""
        front = psutil.Process(self.child.pid)
        engines = [one for one in front.children() if "quire.link.program" in one.cmdline()]
        held = sum(one.memory_info().rss for one in engines)
        return round(front.memory_info().rss / 2**20, 1), round(held / 2**20, 1)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"quire_{name}[ {{]", line))


@contextmanager
def serving(preemption: str, folder: Path) -> Iterator[Server]:
    """A server, until the end; it exits with 0 and says nothing of errors."""
    prefixes, said, errors = (folder / f"{preemption}.{kind}" for kind in ("json", "out", "err"))
    prefixes.write_text(json.dumps({"p": {"token_ids": PREFIXES[-1]}}))
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", *FLAGS, "--preemption", preemption]
    with said.open("wb") as out, errors.open("wb") as err:
        child = subprocess.Popen([*command, "--prefixes", str(prefixes)], stdout=out, stderr=err)
    try:
        ends = time.monotonic() + 60
        while not (found := re.search(r"^curl (http://[0-9.:]+)", said.read_text(), re.M)):
            assert child.poll() is None, errors.read_text()
            assert time.monotonic() < ends, "the server did not start"
            time.sleep(0.1)
        try:
            yield Server(child, found[1], errors)
        except BaseException:
            print(errors.read_text()[-4000:], file=sys.stderr)
            raise
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0, errors.read_text()
        assert "Traceback" not in errors.read_text(), errors.read_text()
    finally:
        child.kill()
        child.wait()


async def watch(servers: list[Server], seconds: float) -> list[list[tuple[float, float]]]:
    """Resident memory [servers][times] of the servers' fronts and engines."""
    seen: list[list[tuple[float, float]]] = [[] for _ in servers]
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for server, mib in zip(servers, seen):
            mib.append(server.mib())
        await asyncio.sleep(EVERY)
    return seen


async def loaded(
    servers: list[Server], seconds: float, clients: int
) -> tuple[list[Load], list[list[tuple[float, float]]]]:
    """Load on all servers at once, and what `watch` saw."""
    loads = [Load(server.url, seed) for seed, server in enumerate(servers)]
    shares = [clients // len(servers) + (i < clients % len(servers)) for i in range(len(servers))]
    watching = asyncio.create_task(watch(servers, seconds))
    await asyncio.gather(*(load.run(share, seconds) for load, share in zip(loads, shares)))
    return loads, await watching


def growth(mib: list[float]) -> float:
    """MiB a minute, over the last two thirds of the samples: the slope of the line of least squares."""
    last = mib[len(mib) // 3 :]
    return float(np.polyfit(np.arange(len(last)) * EVERY / 60, last, 1)[0])


def held(idle: float, mib: list[float]) -> dict[str, Any]:
    """What is told of the memory of one process."""
    return {"idle_mib": idle, "peak_mib": max(mib), "growth_mib_a_minute": round(growth(mib), 3), "mib": mib}


def result(
    preemption: str, server: Server, idle: tuple[float, float], load: Load, mib: list[tuple[float, float]]
) -> dict[str, Any]:
    """What is told of one server."""
    health = np.percentile(np.array(load.health) * 1000, (50, 99, 100))
    front, engine = (list(series) for series in zip(*mib))
    return {
        "preemption": preemption,
        **held(idle[0], front),
        "answers": dict(sorted(load.answers.items())),
        "preemptions": server.metric("num_preemptions_total"),
        "prompt_tokens": server.metric("prompt_tokens_total"),
        "generation_tokens": server.metric("generation_tokens_total"),
        "health_ms": dict(zip(("p50", "p99", "max"), health.round(1).tolist())),
        "engine": held(idle[1], engine),
    }


def soak(seconds: float, kinds: Sequence[str] = PREEMPTIONS, clients: int = CLIENTS) -> dict[str, Any]:
    """Serve a random mixture for `seconds` by one server for each of these kinds of preemption, all at once."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [stack.enter_context(serving(kind, Path(folder))) for kind in kinds]
        idle = [server.mib() for server in servers]
        loads, seen = asyncio.run(loaded(servers, seconds, clients))
        for server in servers:
            assert settled(server), "requests or pages are left"
        results = list(map(result, kinds, servers, idle, loads, seen))
    return {"seconds": seconds, "every_s": EVERY, "clients": clients, "flags": FLAGS, "machine": machine(),
            "servers": results}  # fmt: skip


def settled(server: Server) -> bool:
    """Whether no request is left within 10 s; and no page, but those that are cached."""
    ends = time.monotonic() + 10
    while time.monotonic() < ends:
        names = ("num_requests_running", "num_requests_waiting")
        if not any(server.metric(name) for name in names):
            return server.metric("kv_cache_usage_perc") < 0.3  # the registered prefix stays
        time.sleep(0.1)
    return False


if __name__ == "__main__":
    told = soak(float(sys.argv[1]), *((("auto",), 16) if "apart" in sys.argv[3:] else ()))
    told["command"] = "python tests/server/memory_soak.py " + " ".join(sys.argv[1:])
    Path(sys.argv[2]).write_text(json.dumps(told, indent=1) + "\n")
