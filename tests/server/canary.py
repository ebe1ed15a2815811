"""How long a small completion takes beside one large request, and beside ordinary ones; and what a client alone gets.

python tests/server/canary.py --url http://127.0.0.1:8000 [--out FILE]

Against a server that runs, of any version. Each load is served alone, then again while a completion of two tokens is
asked for again and again. A line a load: its own seconds both times, and the median and the longest of the
completions'."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx

WORDS = ("once", "upon", "a", "time", "there", "was", "a", "reader", "of", "pages", "who", "kept", "a", "quire")
Ask = Callable[[str, dict[str, Any]], httpx.Response]


def text(seed: int, words: int) -> str:
    return " ".join(WORDS[(seed * 7 + i * i + i // 3) % len(WORDS)] for i in range(words)) + f" {seed}"


def loads() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """The requests of each load, all asked at once."""
    long = {"max_tokens": 192, "ignore_eos": True}
    return {
        "8 ordinary": [("completions", {"prompt": text(i, 40), **long}) for i in range(8)],
        "64 ordinary": [("completions", {"prompt": text(i, 40), **long}) for i in range(64)],
        "1,024 texts of 100 words": [("embeddings", {"input": [text(i, 100) for i in range(1024)]})],
        "256 prompts, n=4": [("completions", {"prompt": [text(i, 20) for i in range(256)], "n": 4, **long})],
    }


def alone(ask: Ask, requests: list[tuple[str, dict[str, Any]]]) -> float:
    with ThreadPoolExecutor(len(requests)) as pool:
        began = time.monotonic()
        list(pool.map(lambda one: ask(*one), requests))
        return time.monotonic() - began


def measured(ask: Ask, requests: list[tuple[str, dict[str, Any]]], salt: str) -> dict[str, Any]:
    """What a load takes, and completions beside it. `salt`: nothing is found in the cache."""
    first, second = ([(path, {**body, "cache_salt": f"{salt}{i}"}) for path, body in requests] for i in range(2))
    seconds_alone = alone(ask, first)
    with ThreadPoolExecutor(len(requests)) as pool:
        began = time.monotonic()
        asked: list[Future[httpx.Response]] = [pool.submit(ask, path, body) for path, body in second]
        time.sleep(0.1)  # the load is to be under way
        took = []
        while not all(one.done() for one in asked) and len(took) < 200:
            start = time.monotonic()
            answer = ask("completions", {"prompt": f"a canary {len(took)}", "max_tokens": 2, "ignore_eos": True})
            took.append(time.monotonic() - start if answer.status_code == 200 else float("inf"))
        refused = sum(one.result().status_code != 200 for one in asked)
        seconds = time.monotonic() - began
    served = [one for one in took if one != float("inf")]
    return {
        "seconds_alone": round(seconds_alone, 3), "seconds": round(seconds, 2), "refused": refused,
        "canaries": len(took), "refused_canaries": len(took) - len(served),
        "median_s": round(statistics.median(served), 3) if served else None,
        "longest_s": round(max(served, default=0), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", help="write JSON there")
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=600, limits=httpx.Limits(max_connections=200)) as http:

        def ask(path: str, body: dict[str, Any]) -> httpx.Response:
            return http.post(f"/v1/{path}", json=body)

        found = {}
        for name, requests in loads().items():
            found[name] = measured(ask, requests, f"{name}, {time.time()}, ")
            print(f"{name}: {json.dumps(found[name])}", flush=True)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
