"""An engine over ranks that echo."""

from __future__ import annotations

from typing import Any

from memories import MEMORIES, VOCAB, Build
from traces import MAX_LEN

from quire.core.engine import Engine
from quire.core.recovery import RunnerRestarter
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.distributed.remote_runner import RemoteRunner
from quire.distributed.rendezvous import RankRendezvous, slowest_rank
from quire.memory.interface import KVMemory
from quire.protocol.sampling_params import SamplingParams


def engine_over(runner: Any, memory: KVMemory, budget: int = 64, restarter: RunnerRestarter | None = None) -> Engine:
    runner.bind(memory.kv_config)
    scheduler = Scheduler(memory, token_budget=budget, max_seqs=16, max_len=MAX_LEN)
    return Engine(scheduler, runner, EngineLimits(VOCAB, MAX_LEN, 100), clock=lambda: 0.0, restarter=restarter)


def open_engine(runner: RemoteRunner) -> Engine:
    """Return an engine over ranks, with requests under way."""
    engine = engine_over(runner, MEMORIES["paged-4"](Build(256, 64)))
    for i in range(2):
        engine.add(str(i), [1, 2, 3 + i], SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=i))
    return engine


def drain(engine: Engine) -> None:
    while engine.has_unfinished_requests:
        engine.step()


def slowest(rendezvous: RankRendezvous, ranks: int) -> int:
    """Return the slowest of all ranks of a host."""
    return slowest_rank({rank: rendezvous.progress(rank) for rank in range(ranks)}, range(ranks))
