"""Measure what the router of several engines costs a request: microseconds for the keys of its prompt's pages, for the
choice of a replica, and for all else that it records until the request ends.

The router is that of `quire serve --replicas` and `quire simulate --replicas`. Prompts begin with one of 64 prefixes,
each replica has an equal part of their pages, and as many requests are in flight as a rate of --rate keeps there for
10 seconds each."""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.machine import Others
from quire.bench.simulate import read_deployment
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.page_keys import PromptKeys
from quire.router.router import Router, WorkCosts

PREFIXES, PREFIX, OWN, OUTPUT = 64, 2048, 128, 128  # prefixes; tokens of each, of the rest of a prompt, of an answer
SECONDS_IN_FLIGHT = 10.0
STEPS = 32  # in which the output tokens of a request come
COSTS = WorkCosts(1.0, 3.5)


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(parser, "measurement", repeat=(2000, "requests measured"), rate=(1000, "requests a second"))
    group.add_argument("--replicas", type=int, nargs="+", default=[4, 16, 64], metavar="N", help="numbers of replicas")
    group.add_argument("--prompt", type=int, nargs="+", default=[PREFIX + OWN, 131072], metavar="N",
                       help="tokens of a prompt")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each number of replicas and length of prompts."""
    for name, values in (("repeat", [args.repeat]), ("rate", [args.rate]), ("replicas", args.replicas)):
        if min(values) < 1:
            raise StartupError(f"--{name} is {min(values)}", "Give 1 or more")
    if min(args.prompt) < PREFIX:
        raise StartupError(f"--prompt is {min(args.prompt)}", f"Give {PREFIX} or more, the length of a prefix")
    deployment = read_deployment(EngineConfig(kv_tokens=40_000), "h200-llama3-8b")
    memory: Any = deployment.simulation().engine.scheduler.memory
    keys = memory.prefix_cache.prompt_keys()
    return [measured(keys, count, length, args) for length in args.prompt for count in args.replicas]


def measured(keys: PromptKeys, replicas: int, length: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure requests with prompts of `length` tokens."""
    rng, router, others = random.Random(0), Router(replicas, "prefix", COSTS, keys.page_tokens), Others()
    prefixes = [[rng.randrange(1, 100_000) for _ in range(PREFIX)] for _ in range(PREFIXES)]
    for i, prefix in enumerate(prefixes):
        router.update_keys(i % replicas, keys.of_prompt(prefix), ())
    repeat = args.repeat if length <= PREFIX + OWN else max(args.repeat // 20, 1)
    in_flight, times = deque[int](), list[tuple[float, float, float]]()
    warm = int(args.rate * SECONDS_IN_FLIGHT)
    rest = [rng.randrange(1, 100_000) for _ in range(length - PREFIX)]
    for i in range(warm + repeat):
        prompt = [*rng.choice(prefixes), i, *rest[1:]]
        if i < warm:  # as many as are in flight; their prompts need not be hashed anew
            at = router.choose((), length) or 0
            router.add(i, at, (), length, OUTPUT)
            in_flight.append(i)
            continue
        began = time.perf_counter_ns()
        found = keys.of_prompt(prompt)
        hashed = time.perf_counter_ns()
        replica = router.choose(found, length)
        assert replica is not None, "none is draining"
        router.add(i, replica, found, length, OUTPUT)
        chosen = time.perf_counter_ns()
        oldest = in_flight.popleft()
        for _ in range(STEPS):
            router.record_tokens(oldest, OUTPUT // STEPS)
        router.finish(oldest)
        ended = time.perf_counter_ns()
        in_flight.append(i)
        times.append(((hashed - began) / 1e3, (chosen - hashed) / 1e3, (ended - chosen) / 1e3))
    parts = dict(zip(("keys_us", "choice_us", "rest_us"), (_spread(part) for part in zip(*times))))
    total = _spread([sum(each[:2]) for each in times])
    return {
        "replicas": replicas, "prompt_tokens": length, "in_flight": warm, **parts, "before_first_token_us": total,
        "requests": repeat, "cores_used_by_others": others.load(),
    }  # fmt: skip


def _spread(times: Sequence[float]) -> dict[str, float]:
    return {"p50": median(times), "p99": sorted(times)[int(0.99 * (len(times) - 1))]}


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format a line for each measurement."""
    head = ("replicas", "prompt tokens", "in flight", "keys us", "p99", "choice us", "p99", "until it is sent us",
            "p99", "the rest us", "p99", "others' cores")  # fmt: skip
    names = ("keys_us", "choice_us", "before_first_token_us", "rest_us")
    return table(head, [
        (r["replicas"], r["prompt_tokens"], r["in_flight"],
         *(short(r[name][which]) for name in names for which in ("p50", "p99")), f"{r['cores_used_by_others']:.2f}")
        for r in results
    ])  # fmt: skip
