"""One way to put a scheduler and an engine together: for serving, for the simulator, and for comparisons."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.preemption_costs import DEFAULT_COSTS, PreemptionCosts
from quire.core.runner import Runner
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.memory.baselines.reserved import STATIC_BATCH_MEMORIES
from quire.memory.interface import KVMemory
from quire.protocol.image_tiling import ImageTiling


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
