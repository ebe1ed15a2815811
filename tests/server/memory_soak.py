"""The memory of servers under mixed load, over time: many unlike clients at once, seeded. As a script it writes what it
saw: `python tests/server/memory_soak.py 1800 docs/measurements/cpu_memory_soak.json`. With the word "apart" behind it
there is one server, for 16 clients. The memory of a server's front and of its engine's process are told apart.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import httpx
import numpy as np
from served_process import SERVE, Served, served
from waiting import wait_until

from quire.bench.machine import machine
from quire.config import PREEMPTIONS

CLIENTS = 64  # of all servers together
EVERY = 5.0  # seconds
BUSY = ("num_requests_running", "num_requests_waiting")
FLAGS = ("--dtype", "bfloat16", "--threads", "1", "--max-model-len", "2048", "--kv-tokens", "4096",
         "--prefix-tokens", "1024", "--swap-gib", "0.03")  # fmt: skip
VOCAB = 3000  # token ids below this are ordinary ones
PREFIXES = [random.Random(length).choices(range(10, VOCAB), k=length) for length in (40, 130, 300, 700)]
WORDS = ("the", "a", "small", "bright", "old", "ship", "garden", "river", "stone", "night", "and", "then", "she", "saw")


class Load:
    """Clients of a server. `answers` counts statuses by kind, `health` holds /health's seconds."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self.seed, self.ends = seed, 0.0
        self.answers: Counter[str] = Counter()
        self.health: list[float] = []

    async def run(self, clients: int, seconds: float) -> None:
        """Have `clients` ask for `seconds`, and /health be asked all the while."""
        self.ends = time.monotonic() + seconds
        async with self.http:
            await asyncio.gather(self._watch(), *(self._client(number) for number in range(clients)))

    async def _watch(self) -> None:
        while time.monotonic() < self.ends:
            began = time.perf_counter()
            assert (await self.http.get("/health")).status_code == 200
            self.health.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self.ends:
            kind = chance.choices(list(KINDS), [share for share, _ in KINDS.values()])[0]
            status = await self._ask(kind, chance)
            assert status < 500 or status == 503, f"{kind}: {status}"
            self.answers[f"{kind} {status}"] += 1

    async def _ask(self, kind: str, chance: random.Random) -> int:
        """Return the status of an answer, which is read whole unless its client leaves."""
        body = KINDS[kind][1](chance)
        if kind == "tokens":
            answer = await self.http.post("/tokenize", json=body)
            return (await self.http.post("/detokenize", json={"tokens": answer.json()["tokens"]})).status_code
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if not body.get("stream"):
            return (await self.http.post(path, json=body)).status_code
        left = chance.randint(0, 5) if kind == "leave" else -1  # pieces that are read
        async with self.http.stream("POST", path, json=body) as answer:
            async for line in answer.aiter_lines():
                if not left:
                    break
                left -= 1
                assert not line.startswith("data: {") or "error" not in json.loads(line[6:]), line
        return answer.status_code


def ids(chance: random.Random, most: int = 1500) -> list[int]:
    """A prompt: most are short, and any length up to `most` comes up."""
    return chance.choices(range(10, VOCAB), k=int(most ** chance.random()))


def sentence(chance: random.Random) -> str:
    return " ".join(chance.choices(WORDS, k=int(300 ** chance.random())))


def sampling(chance: random.Random) -> dict[str, Any]:
    """Greedy or drawn, plainly or with rules; up to 200 tokens."""
    asked: dict[str, Any] = {"max_tokens": int(200 ** chance.random()), "ignore_eos": chance.random() < 0.5}
    for settings in (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": chance.randrange(10**6)},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {str(chance.randrange(VOCAB)): 5}},
        {"min_p": 0.05, "stop": ["the end", "."], "bad_words": ["ship"]},
    ):
        if chance.random() < 0.3:
            asked |= settings
    return asked


def whole(chance: random.Random, most: int = 1500) -> dict[str, Any]:
    return {"prompt": ids(chance, most), **sampling(chance)}


def several(chance: random.Random) -> dict[str, Any]:
    """n samples, of more that are drawn."""
    n = chance.randint(2, 4)
    return {**whole(chance), "n": n, "best_of": n + chance.randint(0, 2), "temperature": 1.0}


def common(chance: random.Random) -> dict[str, Any]:
    """A prompt that begins as others do."""
    prefix = chance.choice(PREFIXES)
    start = prefix[: chance.choice((len(prefix), chance.randint(1, len(prefix))))]
    return {"prompt": start + ids(chance, 100), **sampling(chance)}


WRONG: tuple[dict[str, Any], ...] = ({"temperature": -1}, {"prompt": [-1]}, {"n": 0}, {"logprobs": 99}, {"stop": 3})
KINDS: dict[str, tuple[int, Callable[[random.Random], dict[str, Any]]]] = {
    "whole": (4, whole),
    "text": (2, lambda c: {"prompt": [sentence(c) for _ in range(c.randint(1, 3))], **sampling(c)}),
    "chat": (2, lambda c: {"messages": [{"role": ("user", "assistant")[i % 2], "content": sentence(c)}
                                        for i in range(c.choice((1, 3, 5)))], **sampling(c), "logprobs": True}),
    "stream": (4, lambda c: {**whole(c), "stream": True}),
    "leave": (2, lambda c: {**whole(c), "stream": True}),
    "several": (2, several),
    "beams": (1, lambda c: {"prompt": ids(c, 300), "max_tokens": c.randint(1, 40), "n": c.randint(2, 5),
                            "use_beam_search": True}),
    "echo": (2, lambda c: {"prompt": ids(c, 700), "max_tokens": c.randint(0, 20), "echo": True,
                           "logprobs": c.randint(0, 5)}),
    "common": (3, common),
    "tokens": (1, lambda c: {"prompt": sentence(c), "return_token_strs": True}),
    "wrong": (1, lambda c: {"prompt": "a", **c.choice(WRONG)}),
}  # fmt: skip
"""By kind of request: its share of all, and its body."""


class Server(Served):
    def mib(self) -> tuple[float, float]:
        """Resident memory of the front, and of its engine's process; 0 without one."""
        engines = [one for one in self.processes() if "quire.startup.engine_program" in one.cmdline()]
        held = sum(one.memory_info().rss for one in engines)
        return round(self.process.memory_info().rss / 2**20, 1), round(held / 2**20, 1)

    def metric(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(rf"quire_{name}[ {{]", line))


@contextmanager
def serving(preemption: str, folder: Path) -> Iterator[Server]:
    """A server of the bundled model, until the end; it exits with 0 and says nothing of errors."""
    prefixes = folder / f"{preemption}.json"
    prefixes.write_text(json.dumps({"p": {"token_ids": PREFIXES[-1]}}))
    flags = (*FLAGS, "--preemption", preemption, "--prefixes", str(prefixes))
    with served(folder, *flags, command=SERVE, kind=Server) as server:
        server.ready()
        try:
            yield server
        except BaseException:
            print(server.text[-4000:], file=sys.stderr)
            raise
        server.child.send_signal(signal.SIGTERM)
        assert server.child.wait(60) == 0, server.text
        assert "Traceback" not in server.text, server.text


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
    return {"idle_mib": idle, "peak_mib": max(mib), "growth_mib_a_minute": round(growth(mib), 3), "mib": mib}


def result(
    preemption: str, server: Server, idle: tuple[float, float], load: Load, mib: list[tuple[float, float]]
) -> dict[str, Any]:
    health = np.percentile(np.array(load.health) * 1000, (50, 99, 100))
    front, engine = (list(series) for series in zip(*mib))
    totals = {name: server.metric(f"{name}_total") for name in ("prompt_tokens", "generation_tokens")}
    return {
        "preemption": preemption, **held(idle[0], front), "answers": dict(sorted(load.answers.items())),
        "preemptions": server.metric("num_preemptions_total"), **totals,
        "health_ms": dict(zip(("p50", "p99", "max"), health.round(1).tolist())), "engine": held(idle[1], engine),
    }  # fmt: skip


def soak(seconds: float, kinds: Sequence[str] = PREEMPTIONS, clients: int = CLIENTS) -> dict[str, Any]:
    """Serve a random mixture for `seconds` by one server for each of these kinds of preemption, all at once."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        servers = [stack.enter_context(serving(kind, Path(folder))) for kind in kinds]
        idle = [server.mib() for server in servers]
        loads, seen = asyncio.run(loaded(servers, seconds, clients))
        for server in servers:
            wait_until(lambda server=server: not any(map(server.metric, BUSY)), "no request is left", 10)
            assert server.metric("kv_cache_usage_perc") < 0.3, "pages are left beside the registered prefix's"
        results = list(map(result, kinds, servers, idle, loads, seen))
    return {"seconds": seconds, "every_s": EVERY, "clients": clients, "flags": FLAGS, "machine": machine(),
            "servers": results}  # fmt: skip


if __name__ == "__main__":
    told = soak(float(sys.argv[1]), *((("auto",), 16) if "apart" in sys.argv[3:] else ()))
    told["command"] = "python tests/server/memory_soak.py " + " ".join(sys.argv[1:])
    Path(sys.argv[2]).write_text(json.dumps(told, indent=1) + "\n")
