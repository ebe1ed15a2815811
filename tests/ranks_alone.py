"""Ranks without a model, started, seated and joined as an engine's are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from quire.config import EngineConfig
from quire.parallel import starting
from quire.parallel.frames import Hello
from quire.parallel.remote import RemoteRunner
from quire.parallel.sides import start_program
from quire.vocabulary.layout import Layout


@contextmanager
def joined(ranks: int, program: Sequence[str], seconds: float) -> Iterator[RemoteRunner]:
    """So many of a program, which have opened their GPUs, or what stands for these."""
    config = EngineConfig(tp=ranks, device="cuda")
    runner = RemoteRunner(ranks, seconds, partial(start_program, program=tuple(program)))
    try:
        starting.meet(runner, config)
        meeting = runner.meeting.descriptors
        runner.hello([Hello(config, part, (), 1, seconds, meeting) for part in Layout(ranks).parts()])
        runner.wait()
        yield runner
    finally:
        runner.close()
