"""`python -m quire.client`: read plans as JSON lines from stdin, and write results to stdout.

A plan is answered by {"ready": true}, {"start": T} starts it, and then follow a line for each answer and one, {"load":
...}, for the client itself. The end of stdin ends the program, even during a run: the process that started it has
ended."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Mapping
from typing import Any

from quire.client.connection_pool import Address
from quire.client.load_run import LoadPlan, LoadRun, PlannedRequest

MAX_PLAN_BYTES = 2**26


def write_line(record: Mapping[str, Any]) -> None:
    """Write a line of JSON to stdout."""
    sys.stdout.write(json.dumps(record, separators=(",", ":")) + "\n")


def parse_plan(line: bytes) -> LoadPlan:
    """Return the plan in a line."""
    fields = json.loads(line)
    requests = [PlannedRequest(*one) for one in fields["requests"]]
    address, head = Address(*fields["address"]), fields["head"].encode()
    return LoadPlan(address, head, requests, fields["slots"], fields["bodies"], fields["queue"])


async def run_plans() -> None:
    """Run the plans of stdin one after the other."""
    lines = asyncio.StreamReader(limit=MAX_PLAN_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    line = await lines.readline()
    while line:
        plan = parse_plan(line)
        write_line({"ready": True})
        sys.stdout.flush()
        begin = await lines.readline()
        if not begin:
            return
        run = LoadRun(plan, json.loads(begin)["start"])
        working, next_line = asyncio.create_task(run.run()), asyncio.create_task(lines.readline())
        await asyncio.wait((working, next_line), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            return
        load = working.result()
        for record in run.to_json():
            write_line({"answer": record})
        write_line({"load": load})
        sys.stdout.flush()
        line = await next_line


def main() -> None:
    """Raise the limit of open files, and run the plans."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(run_plans())


if __name__ == "__main__":
    main()
