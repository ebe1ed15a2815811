"""`python -m quire.client`: plans come as JSON lines on stdin, what came of them goes to stdout.

A plan is answered with {"ready": true}, {"start": T} begins it, and then come a line for each answer and one, {"load":
...}, for the client itself. The end of stdin is the end of the program, in the middle of a run too: whoever started it
is gone.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
from collections.abc import Mapping
from typing import Any

from quire.client.connection_pool import Address
from quire.client.load_run import LoadPlan, LoadRun, PlannedRequest

MAX_PLAN_BYTES = 2**26  # bytes of a plan


def write_line(record: Mapping[str, Any]) -> None:
    """A line to stdout."""
    sys.stdout.write(json.dumps(record, separators=(",", ":")) + "\n")


def parse_plan(line: bytes) -> LoadPlan:
    """The plan that a line holds."""
    said = json.loads(line)
    requests = [PlannedRequest(*one) for one in said["requests"]]
    return LoadPlan(
        Address(*said["address"]), said["head"].encode(), requests, said["slots"], said["bodies"], said["queue"]
    )


async def run_plans() -> None:
    """Plans, one after the other."""
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
        working, ahead = asyncio.create_task(run.run()), asyncio.create_task(lines.readline())
        await asyncio.wait((working, ahead), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            return
        load = working.result()
        for record in run.to_json():
            write_line({"answer": record})
        write_line({"load": load})
        sys.stdout.flush()
        line = await ahead


def main() -> None:
    """As many open connections as the system allows this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(run_plans())


if __name__ == "__main__":
    main()
