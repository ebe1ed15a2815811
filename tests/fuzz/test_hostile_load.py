"""64 clients at once, good and hostile, against one server on two cores; another process asks /health every 20 ms.

By itself, into a file:  QUIRE_HOSTILE_LOAD=FILE python -m pytest -m soak tests/fuzz/test_hostile_load.py
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from serve_process import Process, bearer, serving

from quire.bench.machine import machine
from quire.server.answer_size import MAX_BYTES, MAX_LOGPROBS

CLIENTS = 64
SECONDS = float(os.environ.get("QUIRE_HOSTILE_SECONDS", "60"))
OUTPUT = os.environ.get("QUIRE_HOSTILE_LOAD")
MAX_LEN = 4096  # of the bundled model
BODY = (8 << 20) - 64
TRIES = 20
HEALTH_P99, REFUSAL = 0.1, 0.05  # seconds
CHAT = {"messages": [{"role": "user", "content": "What is a quire of pages?"}], "max_tokens": 48, "ignore_eos": True}


class Ask(NamedTuple):
    """A request, and how its client behaves. `leave`: it goes once it read so many bytes. `pause`: it sends the body in
    bits, with so many seconds between two, and goes before the end."""

    path: str
    body: bytes
    key: str | None = None
    leave: int | None = None
    pause: float | None = None
    raw: bool = False


class Told(NamedTuple):
    """What came of it: 0 for a client that left, or that was closed without an answer."""

    status: int
    size: int
    seconds: float


def post(path: str, body: Any, **more: Any) -> Ask:
    return Ask(path, body if isinstance(body, bytes) else json.dumps(body).encode(), bearer()["Authorization"], **more)


def complete(**body: Any) -> Ask:
    return post("/v1/completions", body)


def attacks(more: int) -> list[dict[str, Any]]:
    """n x echo x logprobs x prompts, as near below the limit of log-probabilities as lengths allow, or beyond it."""
    found = []
    for n, k, prompts in itertools.product((1, 8, 32, 128), (0, 4, 20), (1, 8, 64)):
        length = MAX_LOGPROBS // ((k + 1) * n * prompts) - 1 + more
        if 1 <= length < MAX_LEN:
            prompt = [[token % 400 + 9 for token in range(length)]] * prompts
            found.append({"prompt": prompt, "n": n, "logprobs": k, "echo": True, "max_tokens": 1, "seed": 1})
    return found


ABOVE = [{"prompt": [7] * 3900, "n": 128, "logprobs": 20, "echo": True, "max_tokens": 1}, *attacks(1)]
ABOVE.append({**ABOVE[0], "prompt": [[7] * 3900] * 8})
BELOW = attacks(0)


def dense() -> dict[str, bytes]:
    """8 MiB of JSON each, which hold as much as goes into them, or take long to read."""
    keys = itertools.accumulate(itertools.repeat(1), lambda at, _: at + 1)
    found = {
        "ints": b"1," * (BODY // 2) + b"1",
        "floats": b"1e-320," * (BODY // 7) + b"1",
        "strings": b'"",' * (BODY // 3) + b'""',
        "lists": b"[]," * (BODY // 3) + b"[]",
        "nested": (b"[" * 900 + b"]" * 900 + b",") * (BODY // 1801) + b"1",
        "digits": (b"1" * 4300 + b",") * (BODY // 4301) + b"1",
        "objects": b'{"a":1},' * (BODY // 8) + b"1",
        "keys": b"{" + b",".join(b'"%x":1' % key for key in itertools.islice(keys, BODY // 11)) + b"}",
    }
    return {name: b'{"prompt":[' + body + b"]}" for name, body in found.items()}


DENSE = dense()
LONG = {
    "text": json.dumps({"prompt": "a quire " * (BODY // 8)}).encode(),
    "commas": json.dumps({"prompt": "," * BODY}).encode(),
    "escapes": b'{"prompt":"' + rb"\u20ac" * (BODY // 6) + b'"}',
    "deep": b'{"prompt":' + b"[" * BODY,
    "fits": json.dumps({"prompt": "a quire " * (MAX_LEN * 4)}).encode(),
}
SMALL = [part[: (1 << 18) - 20].rpartition(b",")[0] + b"]}" for part in DENSE.values() if b"[[" not in part[:40]]


ONCE = "Once upon a time"
LEFT = {"prompt": [7] * 2000, "max_tokens": 500, "ignore_eos": True, "stream": True, "n": 4}
FIELDS = (b"prompt", b"allowed_token_ids", b"stop", b"tokens", b"messages", b"bad_words")  # that may be lists
HEAVY = ("/v1/completions", "/detokenize", "/tokenize")
KINDS: dict[str, tuple[float, Callable[[random.Random], Ask]]] = {
    # Good load
    "chat": (30, lambda chance: post("/v1/chat/completions", {**CHAT, "stream": True, "seed": chance.randrange(9)})),
    "whole": (20, lambda chance: complete(prompt=ONCE, max_tokens=chance.randrange(1, 60))),
    "branches": (8, lambda chance: complete(prompt=ONCE, max_tokens=20, n=chance.randrange(2, 8))),
    "scored": (8, lambda chance: complete(prompt=[chance.randrange(9, 400) for _ in range(200)], max_tokens=8,
                                          echo=True, logprobs=5)),
    "words": (4, lambda chance: post("/tokenize", {"prompt": "a quire of pages " * chance.randrange(1, 500),
                                                   "return_token_strs": True})),
    # Hostile load
    "above": (8, lambda chance: complete(**chance.choice(ABOVE), stream=chance.random() < 0.3)),
    "below": (0.5, lambda chance: complete(**chance.choice(BELOW), stream=chance.random() < 0.3)),
    "heavy": (4, lambda chance: post(chance.choice(HEAVY), chance.choice([*DENSE.values()]))),
    "long": (4, lambda chance: post(chance.choice(("/v1/completions", "/tokenize")), chance.choice([*LONG.values()]))),
    "lists": (4, lambda chance: post(  # as dense as the server reads them, in a field that is a list
        chance.choice(("/v1/completions", "/detokenize", "/v1/chat/completions")),
        chance.choice(SMALL).replace(b"prompt", chance.choice(FIELDS), 1))),
    "slow": (3, lambda chance: post("/v1/completions", b" " * 1000, pause=chance.uniform(0.05, 0.2))),
    "left": (5, lambda chance: post("/v1/completions", LEFT, leave=chance.randrange(1, 3000))),
    "garbage": (3, lambda chance: Ask("", chance.randbytes(chance.randrange(1, 9000)) + b"\r\n\r\n", raw=True)),
    "locked": (3, lambda chance: complete(prompt="a" * chance.randrange(90_000))._replace(key="Bearer no")),
}  # fmt: skip


async def ask(port: int, wanted: Ask) -> Told:
    """Send it, and read the answer to its end."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    size, start = 0, b""
    try:
        with contextlib.suppress(ConnectionError, TimeoutError):
            await _send(writer, wanted)
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(1 << 18):
                start = start or part[:40]
                size += len(part)
                if wanted.leave is not None and size >= wanted.leave:
                    return Told(0, size, time.perf_counter() - began)
        status = int(start.split()[1]) if start.startswith(b"HTTP/1.1 ") else 0
        return Told(status, size, time.perf_counter() - began)
    finally:
        writer.transport.abort()


async def _send(writer: asyncio.StreamWriter, wanted: Ask) -> None:
    if wanted.raw:
        writer.write(wanted.body)
        writer.write_eof()
        return
    lines = [f"POST {wanted.path} HTTP/1.1", "Host: x", "Content-Type: application/json", "Connection: close"]
    lines += [f"Authorization: {wanted.key}", f"Content-Length: {len(wanted.body)}", "", ""]
    writer.write("\r\n".join(lines).encode())
    if wanted.pause is None:
        writer.write(wanted.body)
        await writer.drain()
        return
    for at in range(20):
        writer.write(wanted.body[at : at + 1])
        await asyncio.sleep(wanted.pause)
    writer.transport.abort()


async def load(port: int, seconds: float) -> dict[str, list[Told]]:
    """What every kind of request was told, while all clients worked."""
    told: dict[str, list[Told]] = defaultdict(list)
    end = time.perf_counter() + seconds

    async def client(number: int) -> None:
        chance = random.Random(number)
        while time.perf_counter() < end:
            [name] = chance.choices([*KINDS], [share for share, _ in KINDS.values()])
            told[name].append(await ask(port, KINDS[name][1](chance)))

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    return told


@contextlib.contextmanager
def probing(port: int) -> Iterator[dict[str, Any]]:
    """What the probe saw is there at the end."""
    found: dict[str, Any] = {}
    command = [sys.executable, str(Path(__file__).with_name("probe.py")), str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield found
        finally:
            found |= json.loads(child.communicate(timeout=60)[0])


def quantiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds."""
    ordered = sorted(seconds)
    at = {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] for name, share in
          (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))}  # fmt: skip
    return {"count": len(ordered), **{f"{name}_ms": round(1e3 * value, 2) for name, value in at.items()}}


def table(told: dict[str, list[Told]]) -> dict[str, Any]:
    found = {}
    for name, some in sorted(told.items()):
        statuses = {str(status): sum(one.status == status for one in some) for status in {one.status for one in some}}
        largest = max(one.size for one in some)
        found[name] = {"statuses": statuses, "largest_bytes": largest, **quantiles([one.seconds for one in some])}
    return found


def refusals(port: int) -> dict[str, Any]:
    """How long each answer of the attack, and each dense body, takes to be refused, one after the other."""
    found = {}
    for number, body in enumerate(ABOVE):
        some = [asyncio.run(ask(port, post("/v1/completions", body))) for _ in range(TRIES)]
        assert {one.status for one in some} == {400}
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        name = f"{number}: n {body['n']}, logprobs {body['logprobs']}, {len(prompts)} prompts of {len(prompts[0])}"
        found[name] = quantiles([one.seconds for one in some])
    for name, heavy_body in {**DENSE, **LONG}.items():
        some = [asyncio.run(ask(port, post("/v1/completions", heavy_body))) for _ in range(TRIES // 4)]
        assert {one.status for one in some} <= {400, 413, 200}, name
        found[f"8 MiB: {name}"] = quantiles([one.seconds for one in some])
    return found


def memory(to: Process) -> float:
    return round(psutil.Process(to.child.pid).memory_info().rss / 2**20, 1)


def peak(to: Process) -> int:
    """The most that it ever held, in MiB."""
    return int(Path(f"/proc/{to.child.pid}/status").read_text().split("VmHWM:")[1].split()[0]) >> 10


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_hostile_load() -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])
    try:
        with serving() as to:
            assert asyncio.run(ask(to.port, complete(prompt=ONCE, max_tokens=9))).status == 200
            before = memory(to)
            with probing(to.port) as alone:
                time.sleep(2)
            refused = refusals(to.port)
            with probing(to.port) as probed:
                told = asyncio.run(load(to.port, SECONDS))
            held, load_average = memory(to), os.getloadavg()[0]
            assert to.idle(30)
            result = {
                "what": "/health and refusals under 64 clients of good and hostile load, on two cores",
                "command": "QUIRE_HOSTILE_LOAD=FILE python -m pytest -m soak tests/fuzz/test_hostile_load.py",
                "clients": CLIENTS, "seconds": SECONDS, "machine": machine(), "load_average": round(load_average, 2),
                "health_idle": quantiles(alone["seconds"]),
                "health": {**quantiles(probed["seconds"]), "failed": probed["failed"]},
                "refusals_one_at_a_time": refused, "requests": table(told),
                "memory_mib": {"before": before, "under_load": held, "after": memory(to), "peak": peak(to)},
            }  # fmt: skip
            if OUTPUT:
                Path(OUTPUT).write_text(json.dumps(result, indent=1) + "\n")
            print(json.dumps(result, indent=1))
            assert to.end() == 0
            assert "Traceback" not in to.text
    finally:
        os.sched_setaffinity(0, cores)
    everything = [one for some in told.values() for one in some]
    assert not [one for one in everything if one.status >= 500 and one.status != 503]
    assert max(one.size for one in everything) < MAX_BYTES + 100_000
    assert result["health"]["p99_ms"] < 1e3 * HEALTH_P99
    assert all(some["p50_ms"] < 1e3 * REFUSAL for name, some in refused.items() if "8 MiB" not in name)
