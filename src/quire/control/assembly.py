"""One way to put a scheduler and an engine together: for serving, for the simulator, and for comparisons."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import EngineConfig
from quire.control.costs import DEFAULT_COSTS, PreemptionCosts
from quire.control.edge import EngineLimits
from quire.control.engine import Engine
from quire.control.memory import KVMemory
from quire.control.memory.reserved import STATIC_BATCH_MEMORIES
from quire.control.runners import Runner
from quire.control.scheduler import Scheduler
from quire.vocabulary.pictures import ImageTiling


def assemble(
    config: EngineConfig,
    memory: KVMemory,
    runner: Runner,
    limits: EngineLimits,
    *,
    clock: Callable[[], float],
    eos_ids: tuple[int, ...] = (),
    costs: PreemptionCosts = DEFAULT_COSTS,
    depth: int | None = None,
    tiling: ImageTiling | None = None,
    pooling: str = "last",
) -> Engine:
    """An engine of `config`, which is sized for its device, over a memory and a runner that is bound to it. `depth` is
    the config's where it isn't given, and else the runner's. `tiling`, `pooling`: see Engine."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    depth = depth or config.depth or runner.depth
    scheduler = Scheduler(
        memory,
        token_budget=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_len=limits.max_len,
        eos_ids=eos_ids,
        preemption=config.preemption if config.swap_gib else "recompute",
        costs=costs,
        static_batching=config.memory in STATIC_BATCH_MEMORIES,
        pp_size=min(config.pp, depth),  # as many sets of sequences as steps in flight
    )
    return Engine(scheduler, runner, limits, clock=clock, seed=config.seed, depth=depth, tiling=tiling, pooling=pooling)
