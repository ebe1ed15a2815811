"""Measure a start: from the start of the process until the engine is ready, and until the first tokens are generated;
and when each of its phases ended, which quire logs.

Triton keeps compiled kernels on disk; the result reports whether any existed.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire.bench.document import short, table
from quire.bench.machine import seconds_alive
from quire.bench.shapes import built
from quire.cli.flags import config_from
from quire.protocol.sampling_params import SamplingParams

PROMPT = 128


class Phases(logging.Handler):
    """Records the seconds since the process started at which each phase of the start ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[tuple[str, float]] = [("quire is imported", seconds_alive())]
        log = logging.getLogger("quire.startup")
        log.addHandler(self)
        log.setLevel(logging.DEBUG)

    def emit(self, record: logging.LogRecord) -> None:
        """Record the end of a phase."""
        self.ends.append((record.getMessage(), seconds_alive()))


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one result: seconds since the process started."""
    kernels, phases = _cached_kernels(), Phases()
    with built(config_from(args)) as made:
        ready = seconds_alive()
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
        made.engine.add("first", [10 + i % 97 for i in range(PROMPT)], params)
        times: list[float] = []
        while made.engine.has_unfinished_requests:
            for output in made.engine.step():
                times += [seconds_alive()] * len(output.tokens)
        return [
            {
                "model": made.name,
                "dtype": made.memory_plan.dtype,
                "device": made.memory_plan.device,
                "kernels_on_disk": kernels,
                "phases_s": phases.ends,
                "ready_s": ready,
                "token_s": times,
            }
        ]


def _cached_kernels() -> int:
    """Return the compiled kernels that Triton finds on disk."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    return sum(1 for _ in folder.glob("*/*.cubin")) if folder.is_dir() else 0


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the result as one line, and the seconds that each phase took."""
    head = ("model", "kernels on disk", "ready s", "first token s", "second", "third")
    rows = [(r["model"], r["kernels_on_disk"], short(r["ready_s"]), *map(short, r["token_s"])) for r in results]
    ends = [*results[0]["phases_s"], ("ready", results[0]["ready_s"])]
    took = [(name, short(end - before)) for (name, end), (_, before) in zip(ends, [("", 0.0), *ends])]
    return f"{table(head, rows)}\n{table(('until', 'took s'), took)}"
