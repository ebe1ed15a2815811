"""One way to put a scheduler and an engine together: for serving, for the simulator, and for comparisons."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import EngineConfig
from quire.control.costs import DEFAULT, Costs
from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.memory import KVMemory
from quire.control.memory.reserved import STATIC
from quire.control.runners import Runner
from quire.control.scheduler import Scheduler
from quire.vocabulary.pictures import Tiling


def assemble(
    config: EngineConfig,
    memory: KVMemory,
    runner: Runner,
    limits: Limits,
    *,
    clock: Callable[[], float],
    eos_ids: tuple[int, ...] = (),
    costs: Costs = DEFAULT,
    depth: int | None = None,
    tiling: Tiling | None = None,
    pooling: str = "last",
) -> Engine:
    """An engine of `config`, which is sized for its device, over a memory and a runner that is bound to it. `depth` is
    the config's where it isn't given, and else the runner's. `tiling`, `pooling`: see Engine."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    depth = depth or config.depth or runner.depth
    scheduler = Scheduler(
        memory,
        budget=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_len=limits.max_len,
        eos_ids=eos_ids,
        preemption=config.preemption if config.swap_gib else "recompute",
        costs=costs,
        static=config.memory in STATIC,
        stages=min(config.pp, depth),  # as many sets of sequences as steps in flight
    )
    return Engine(scheduler, runner, limits, clock=clock, seed=config.seed, depth=depth, tiling=tiling, pooling=pooling)
