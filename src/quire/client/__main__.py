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

from quire.client.connections import Address
from quire.client.load import Plan, Planned, Run

LINE = 2**26  # bytes of a plan


def say(record: Mapping[str, Any]) -> None:
    """A line to stdout."""
    sys.stdout.write(json.dumps(record, separators=(",", ":")) + "\n")


def plan_of(line: bytes) -> Plan:
    """The plan that a line holds."""
    said = json.loads(line)
    requests = [Planned(*one) for one in said["requests"]]
    return Plan(
        Address(*said["address"]), said["head"].encode(), requests, said["slots"], said["bodies"], said["queue"]
    )


async def serve() -> None:
    """Plans, one after the other."""
    lines = asyncio.StreamReader(limit=LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    line = await lines.readline()
    while line:
        plan = plan_of(line)
        say({"ready": True})
        sys.stdout.flush()
        begin = await lines.readline()
        if not begin:
            return
        run = Run(plan, json.loads(begin)["start"])
        working, ahead = asyncio.create_task(run.run()), asyncio.create_task(lines.readline())
        await asyncio.wait((working, ahead), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            working.cancel()
            return
        load = working.result()
        for record in run.told():
            say({"answer": record})
        say({"load": load})
        sys.stdout.flush()
        line = await ahead


def main() -> None:
    """As many open connections as the system allows this process."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    asyncio.run(serve())


if __name__ == "__main__":
    main()
