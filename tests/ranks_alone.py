"""Ranks without a model, started, seated and joined as an engine's are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from quire.config import EngineConfig
from quire.parallel import starting
from quire.parallel.frames import InitMessage
from quire.parallel.remote import RemoteRunner
from quire.parallel.sides import launch_rank_process
from quire.vocabulary.layout import ParallelLayout


@contextmanager
def joined(ranks: int, program: Sequence[str], seconds: float) -> Iterator[RemoteRunner]:
    """So many of a program, which have opened their GPUs, or what stands for these."""
    config = EngineConfig(tp=ranks, device="cuda")
    runner = RemoteRunner(ranks, seconds, partial(launch_rank_process, program=tuple(program)))
    try:
        starting.open_devices(runner, config)
        meeting = runner.rendezvous.descriptors
        runner.send_init(
            [InitMessage(config, part, (), 1, seconds, meeting) for part in ParallelLayout(ranks).shards()]
        )
        runner.wait_until_built()
        yield runner
    finally:
        runner.close()
