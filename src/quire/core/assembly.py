"""Assembling a scheduler and an engine: for serving, for the simulator, and for comparisons."""

from __future__ import annotations

from collections.abc import Callable

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.preemption_costs import (
    DEFAULT_COSTS,
    DEFAULT_SPECULATION_COSTS,
    PreemptionCosts,
    SpeculationCosts,
)
from quire.core.recovery import RunnerRestarter
from quire.core.runner import DeferredMaskRunner, Runner, can_defer_masks
from quire.core.scheduler import Scheduler
from quire.core.shared_memory import SharedMemoryGroup
from quire.core.speculation import Speculator
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
    shared_memory_group: SharedMemoryGroup | None = None,
    restarter: RunnerRestarter | None = None,
    speculation_costs: SpeculationCosts = DEFAULT_SPECULATION_COSTS,
) -> Engine:
    """Return an engine over `memory` and a runner that is bound to it. `config` has the defaults of its device.
    `depth`: by default the config's, else the runner's. `speculation_costs` say how many draft tokens pay. The other
    arguments are the Engine's."""
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    depth = depth or config.depth or runner.depth
    speculator = None
    if config.speculation is not None:
        if depth == 1:  # the device waits for the host after every step
            speculation_costs = speculation_costs._replace(idle_seconds=0.0, idle_row=0.0)
        lookup = (config.prompt_lookup_min, config.prompt_lookup_max)
        speculator = Speculator(
            config.speculation,
            config.num_speculative_tokens,
            lookup=lookup,
            costs=speculation_costs if config.adaptive_speculation else None,
            eos_ids=eos_ids,
            deferred_masks=isinstance(runner, DeferredMaskRunner),
            pipelined=min(config.pp, depth) > 1,
        )
    scheduler = Scheduler(
        memory,
        token_budget=config.max_num_batched_tokens,
        max_seqs=config.max_num_seqs,
        max_len=limits.max_len,
        eos_ids=eos_ids,
        preemption=config.preemption if config.swap_gib else "recompute",
        costs=costs,
        step_costs=speculation_costs.model,
        static_batching=config.memory in STATIC_BATCH_MEMORIES,
        pp_size=min(config.pp, depth),  # sets of sequences: no more than steps in flight
        deferred_masks=can_defer_masks(runner, depth),
        shares_memory=shared_memory_group is not None,
        speculator=speculator,
    )
    return Engine(
        scheduler,
        runner,
        limits,
        clock=clock,
        seed=config.seed,
        depth=depth,
        tiling=tiling,
        pooling=pooling,
        shared_memory_group=shared_memory_group,
        restarter=restarter,
    )
