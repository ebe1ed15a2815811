"""Several models that share one KV memory (Jenga §8): `Pool([config, config], kv_gib=4)`, then `LLM(model,
custom_kv_cache=pool)` for each.

Page sizes are planned for all models together, so all configs are given before the first model is loaded. Pages that
one model doesn't use are free for the others.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.shared_memory import SharedMemoryGroup
from quire.errors import InputError, StartupError
from quire.memory.jenga.shared_pool import PoolView, SharedPool
from quire.memory.page_layout import MemorySize, build_joint_kv_configs
from quire.memory.page_tables import build_page_pool
from quire.memory.paged import PagedMemory
from quire.startup.checkpoint import Checkpoint, read_checkpoint
from quire.startup.dtypes import ITEMSIZE, choose_device, choose_dtype, kv_namespace, quantization_savings
from quire.startup.memory_plan import GIB, MemoryPlan, PoolMember, plan_memory

if TYPE_CHECKING:
    import torch

MUST_MATCH = ("page_sizes", "association", "device")


class Pool:
    """`kv_gib` GiB of KV memory for the models of `configs`, whose own KV memory sizes are ignored. Raises StartupError
    if the models can't share a memory.

    Only the thread that creates the pool may use its models. Each is loaded once; closing it frees its pages for the
    others."""

    def __init__(self, configs: Sequence[EngineConfig], *, kv_gib: float) -> None:
        if not configs or not kv_gib > 0:
            raise StartupError(f"a pool has {len(configs)} models and {kv_gib} GiB", "Give it some of both")
        self.thread = threading.get_ident()
        self.shared_memory_group = SharedMemoryGroup()
        self.device = choose_device(configs[0])
        sized = [replace(config, kv_gib=kv_gib, kv_tokens=None).with_device_defaults(self.device) for config in configs]
        sources = [read_checkpoint(config) for config in sized]
        dtypes = [choose_dtype(config, source.config, self.device) for config, source in zip(sized, sources)]
        _check_compatible(sized, dtypes)
        for config, source in zip(sized, sources):
            if config.speculation is not None:
                raise StartupError(
                    f"{source.name} decodes speculatively, which no model of a pool does", "Serve it by itself"
                )
            if source.spec.min_budget:
                raise StartupError(
                    f"{source.name} keeps a part of each prompt, which no model of a pool does", "Serve it by itself"
                )
        self.dtype, itemsize = dtypes[0], ITEMSIZE[dtypes[0]]
        sources = [source.with_stored_dtypes(config, itemsize) for config, source in zip(sized, sources)]
        plans = [
            plan_memory(config, source.spec, source.name, self.dtype, itemsize, self.device, saved)
            for config, source in zip(sized, sources)
            for saved in [quantization_savings(config, source, self.dtype, self.device)]
        ]
        _check_room(plans)
        sizes = [MemorySize(plan.kv_tokens, plan.max_len, itemsize) for plan in plans]
        models = [(config, source.spec, size) for config, source, size in zip(sized, sources, sizes)]
        self.kv_configs = build_joint_kv_configs(models, int(kv_gib * GIB))
        joint = replace(self.kv_configs[0], groups=tuple(g for one in self.kv_configs for g in one.groups))
        page_pool = build_page_pool(joint, [group.ids for group in joint.groups], sized[0].experiment.association)
        shared_pool = SharedPool(page_pool, self.kv_configs, [config.prefix_tokens for config in sized])
        self.bytes = joint.bytes
        self.members = [self._member(*parts) for parts in zip(sized, sources, plans, shared_pool.views)]
        self.buffer: torch.Tensor | None = None
        self.unloaded = list(self.members)

    def _member(self, config: EngineConfig, source: Checkpoint, plan: MemoryPlan, view: PoolView) -> PoolMember:
        memory = PagedMemory.from_kv_config(view.kv_config, config, kv_namespace(config, source, self.dtype), view)
        max_len = bisect_left(range(1, plan.max_len + 1), True, key=lambda length: not memory.fits([length]))
        if max_len < (2 if config.max_model_len is None else config.max_model_len):
            raise StartupError(
                f"the pool holds {max_len} tokens of {source.name} at most beside registered prefixes",
                "Use a larger kv_gib, or a smaller max_model_len or prefix_tokens",
            )
        if max_len < plan.max_len:
            plan = plan._replace(max_len=max_len, limit_note=" (a larger pool would allow more)")
        return PoolMember(config, source, plan, memory, view, self.shared_memory_group, self.get_buffer)

    # For quire.llm and quire.startup.build

    def member(self, model: str | None, settings: dict[str, Any]) -> PoolMember:
        """Return and use up the member of `model`, the name in its config. Raise StartupError if there is none left."""
        if settings:
            raise StartupError(
                f"{', '.join(settings)[:80]} is given beside a pool", "Set it in the pool's EngineConfig"
            )
        for member in self.unloaded:
            if (model or "") in (member.config.model, member.config.model_config):
                self.unloaded.remove(member)
                return member
        known = ", ".join(
            member.config.model_config or member.config.model or "the bundled one" for member in self.unloaded
        )
        raise StartupError(
            f"{model or 'the bundled model'!s:.80} is no model of the pool, or was loaded already",
            f"Give one of: {known or 'none is left'}",
        )

    def get_buffer(self) -> torch.Tensor:
        """Return the buffer of all models' pages; zeros at first."""
        import numpy as np
        import torch

        if self.buffer is None:
            if self.device == "cpu":  # on a CPU, zeros of NumPy take no memory until written, those of torch do
                self.buffer = torch.from_numpy(np.zeros(self.bytes, dtype=np.uint8))
            else:
                self.buffer = torch.zeros(self.bytes, dtype=torch.uint8, device=self.device)
        return self.buffer

    def check_thread(self) -> None:
        """Raise InputError unless the calling thread created the pool."""
        if threading.get_ident() != self.thread:
            raise InputError("models that share a KV memory are used by the thread that made their pool")

    def leave(self, engine: Engine, view: PoolView) -> None:
        """Remove a closed model and free its pages."""
        self.shared_memory_group.remove(engine)
        view.close()
        if not self.shared_memory_group.engines and not self.unloaded:
            self.buffer = None


def _check_compatible(configs: Sequence[EngineConfig], dtypes: Sequence[str]) -> None:
    """Raise StartupError if the models can't share a memory."""
    for config in configs:
        if config.has_rank_processes:
            raise StartupError(
                f"a pool has a model of --tp {config.tp}, --pp {config.pp} and --executor {config.executor}",
                "Models that share a memory have one rank each, in the engine's process",
            )
        if config.memory != "paged" or config.experiment.page_sizes not in ("lcm", "max"):
            raise StartupError(
                f"a pool has a model of --memory {config.memory} and --page-sizes {config.experiment.page_sizes}",
                "Models share a memory with --memory paged and --page-sizes lcm or max",
            )
    for name in MUST_MATCH:
        if len(values := {str(config.flat()[name]) for config in configs}) > 1:
            raise StartupError(f"models of a pool have {name} {', '.join(sorted(values))}", "Give all the same")
    if len(set(dtypes)) > 1:  # as another format, the bits may not be a finite number
        raise StartupError(f"models of a pool have the formats {', '.join(dtypes)}", "Give all the same dtype")


def _check_room(plans: Sequence[MemoryPlan]) -> None:
    """Raise StartupError if the weights and activations of all models don't fit beside the pool. Only one model
    computes at a time, but each keeps its activation buffers."""
    weights_and_activations = sum(plan.weight_bytes + plan.activation_bytes for plan in plans)
    kv = max(plan.kv_bytes for plan in plans)
    if weights_and_activations + kv > plans[0].free_bytes:
        raise StartupError(
            f"out of memory: the models of the pool take {weights_and_activations / GIB:.2f} GiB, "
            f"their KV memory {kv / GIB:.2f} GiB, and "
            f"{plans[0].free_bytes / GIB:.2f} GiB are free on {plans[0].device}",
            "Use a smaller kv_gib, or fewer models",
        )
