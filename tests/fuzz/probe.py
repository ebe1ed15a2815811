"""A program that asks /health every 20 ms over one connection, from a process of its own, until its input ends; then it
prints how long the answers took, in seconds: from when they were due, so that what a late answer kept from being asked
is late too."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import sys
import time

EVERY = 0.02  # seconds


def main(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    took: list[float] = []
    failed = 0
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], 0)[0]:
        with contextlib.suppress(ValueError):
            time.sleep(due - time.perf_counter())
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        failed += answer.status != 200
        took.append(time.perf_counter() - due)
        due += EVERY
    print(json.dumps({"seconds": took, "failed": failed}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
