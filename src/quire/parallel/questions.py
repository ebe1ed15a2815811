"""What may be asked of a rank's runner: each question by its name, with an answer of JSON."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping
from typing import Any

Question = Callable[[Any], Any]


def _mapped(runner: Any) -> list[float] | None:
    mapped = getattr(runner, "mapped", None)
    return None if mapped is None else list(mapped)


def _seconds(runner: Any) -> float:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return spent.ru_utime + spent.ru_stime


def _peak(runner: Any) -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


QUESTIONS: Mapping[str, Question] = {
    "depth": lambda runner: runner.depth,
    "attention": lambda runner: getattr(runner, "attention", ""),
    "device": lambda runner: str(getattr(runner, "device", "")),
    "notices": lambda runner: list(getattr(runner, "notices", ())),
    "mapped": _mapped,  # where memory is virtual, the fields of vocabulary.plan.Mapped
    "read_bytes": lambda runner: getattr(getattr(runner, "model", None), "read_bytes", 0),  # of the checkpoint
    "seconds": _seconds,  # of processor time, of the rank's process
    "peak_bytes": _peak,  # of its memory, at most
}
