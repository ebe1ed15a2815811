"""Ranks without a model, started, seated and joined as an engine's are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from quire.config import EngineConfig
from quire.distributed import rank_startup
from quire.distributed.rank_handle import launch_rank_process
from quire.distributed.rank_messages import InitMessage
from quire.distributed.remote_runner import RemoteRunner
from quire.protocol.parallel_layout import ParallelLayout


@contextmanager
def joined(ranks: int, program: Sequence[str], seconds: float) -> Iterator[RemoteRunner]:
    """So many of a program, which have opened their GPUs, or what stands for these."""
    config = EngineConfig(tp=ranks, device="cuda")
    runner = RemoteRunner(ranks, seconds, partial(launch_rank_process, program=tuple(program)))
    try:
        rank_startup.open_devices(runner, config)
        runner.send_init([InitMessage(config, part, (), 1, seconds) for part in ParallelLayout(ranks).shards()])
        runner.wait_until_built()
        yield runner
    finally:
        runner.close()
