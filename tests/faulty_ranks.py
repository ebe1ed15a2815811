"""A rank with a part of a real model, one of which goes while it meets the others: its piece is told, and it waits for
theirs. `main` is a program's; FAULT in the environment says how it goes, its number, in which step, and how often it
has met the others in that step."""

from __future__ import annotations

import json
import os
import select
from itertools import count
from typing import Any

from echo_ranks import FAULTS

from quire.parallel import shared
from quire.parallel.frames import Hello
from quire.parallel.rank import build_shard
from quire.parallel.rank import main as rank_main

FAULT: dict[str, Any] = json.loads(os.environ["FAULT"])


class Polled:
    """A poll of what others tell, or the fault. `meetings` counts down in the step that it's due in."""

    meetings = -1

    def __init__(self) -> None:
        self._poll = select.poll()

    def register(self, *arguments: Any) -> None:
        self._poll.register(*arguments)

    def poll(self, *arguments: Any) -> Any:
        Polled.meetings -= 1
        if Polled.meetings == 0:
            if FAULT["how"] == "raise":
                raise RuntimeError("the device is gone")
            FAULTS[FAULT["how"]]()
        return self._poll.poll(*arguments)


def build(hello: Hello, seat: Any = None) -> Any:
    if hello.part.rank == FAULT["rank"]:
        shared.select = Faulty  # type: ignore[assignment]
    runner = build_shard(hello, seat)
    submit, steps = runner.submit, count(1)

    def counted(plan: Any) -> Any:
        if next(steps) == FAULT["step"]:
            Polled.meetings = FAULT["meeting"]
        return submit(plan)

    runner.submit = counted
    return runner


class Faulty:
    """In the place of the module `select`."""

    POLLIN, poll = select.POLLIN, Polled


def main() -> None:
    rank_main(build)
