"""Building an engine from its settings: checkpoint -> memory plan -> model -> runner, memory, scheduler, engine.

The one place where the planes are joined. Every failure is a StartupError with its cause and a remedy.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.budget import GIB, MemoryPlan, check_again, page_lines, plan_memory
from quire.config import EngineConfig
from quire.control.assembly import assemble
from quire.control.costs import DEFAULT, Costs
from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.memory import Size, build_memory
from quire.control.memory.virtual import capacity
from quire.control.recovery import Restarts
from quire.data.kernels.cpu import loading as kernels
from quire.data.kernels.cpu.memory import memory
from quire.errors import StartupError
from quire.files import LIMITS, read_object
from quire.formats import ITEMSIZE, device_of, dtype_of, model_id, planned, saved_by_fp8
from quire.link.collector import paused
from quire.parallel.caches import cache_apart
from quire.plan_log import logged
from quire.reserve import reserve
from quire.shard import attention_of, shard_runner, stage_of
from quire.source import Source, eos_ids, pooling_of, read_sight, read_source, read_text, tiling_of
from quire.vocabulary.layout import Layout, Part
from quire.vocabulary.specs import Geometry, ModelSpec
from quire.vocabulary.stages import check_stages, uneven

if TYPE_CHECKING:
    from quire.parallel.remote import RemoteRunner
    from quire.pool import Member
    from quire.text.chat import ChatTemplate
    from quire.text.sight import Sight
    from quire.text.tokenizer import Tokenizer


class Built(NamedTuple):
    """An engine and what belongs to it. `notices` are said at start; `defaults` are generation_config.json's sampling
    parameters."""

    engine: Engine
    spec: ModelSpec
    tokenizer: Tokenizer | None
    chat: ChatTemplate | None
    plan: MemoryPlan
    notices: tuple[str, ...]
    defaults: dict[str, Any]
    name: str
    sight: Sight | None = None


def plan(config: EngineConfig, device_gib: float | None = None) -> list[str]:
    """The memory plan of `config` as one screen, without loading the model; with `device_gib`, for GPUs of so many GiB
    each, which need not be there (or, where the config says CPU, for such a machine)."""
    if device_gib is not None and not 0 < device_gib < 2**20:
        raise StartupError(f"--device-gib is {device_gib}", "It must be above 0")
    absent = device_gib is not None
    device = ("cpu" if config.device == "cpu" else "cuda") if absent else device_of(config)
    source = _divided(config, read_source(config, weights=False), device)
    config = config.sized(device).of_rank()
    dtype = dtype_of(config, source.config, device)
    source = source.stored(config, ITEMSIZE[dtype])
    saved = saved_by_fp8(config, source, dtype, device, absent)
    config = planned(config, source.spec, device, dtype)
    there = None if device_gib is None else int(device_gib * GIB) // (config.ranks if device == "cpu" else 1)
    made = plan_memory(config, source.spec, source.name, dtype, ITEMSIZE[dtype], device, saved, there)
    pages = page_lines(config, source.spec, ITEMSIZE[dtype], made)
    if config.memory == "virtual":  # pages and buffers aren't always filled
        size = Size(made.kv_tokens, made.max_len, ITEMSIZE[dtype], made.kv_bytes)
        made = made._replace(kv_tokens=capacity(build_memory(config, source.spec, size).geometry))
    if absent:
        made = made._replace(device=f"{device} (--device-gib)")
    return made.lines() + pages


def _divided(config: EngineConfig, source: Source, device: str) -> Source:
    """The same with the spec of a rank's part: of stages one that has as much as any. StartupError for a model that so
    many can't share. `device` is "cuda" or "cpu", and need not be here."""
    source = _shared_out(config, source)
    if config.pp == 1:
        return source
    import torch

    spec = stage_of(source, getattr(torch, dtype_of(config, source.config, device)), config.tp, config.pp)
    return source._replace(spec=spec)


def _shared_out(config: EngineConfig, source: Source) -> Source:
    """The same with the spec of a rank's part of each layer, and as much of it said as needs no torch."""
    source = source.divided(Part(0, config.tp, 0, config.pp))
    if config.pp == 1:
        return source
    if config.memory == "virtual" and uneven(source.spec, config.pp):
        raise StartupError(
            f"--memory is virtual, and of {len(source.spec.layers)} layers --pp {config.pp} makes stages that don't "
            "have as many of each kind",
            "Use --memory paged, or another --pp",
        )
    check_stages(source.spec, config.pp)
    return source


@paused()
def build(config: EngineConfig, progress: bool = False, member: Member | None = None) -> Built:
    """Load the model and assemble the engine; over its part of a pool, whose config is `member`'s."""
    from quire.text.renderer import Renderer

    renderer = None if config.skip_tokenizer_init else Renderer()  # its process comes up while torch is imported
    ranks = None
    try:
        source = read_source(config)
        ranks = ranks_of(config, source)
        reserve(config, source)
        import_module("torch")
        tokenizer, chat = read_text(config, source, renderer)
        named = tokenizer.eos_ids if tokenizer is not None else ()
        sight = read_sight(config, source, tokenizer)
        engine, plan, notices = build_engine(config, source, named, progress, member, ranks)
        return Built(engine, source.spec, tokenizer, chat, plan, notices, source.defaults, source.name, sight)
    except BaseException:
        if renderer is not None:
            renderer.close()
        if ranks is not None:
            ranks.abandon()
        raise
    finally:
        memory().settle()  # of a start that failed, too


def ranks_of(config: EngineConfig, source: Source) -> RemoteRunner | None:
    """Ranks in processes of their own, if there are any, which load libraries while this one does. Those of Ray come
    later, once it is known what GPUs there are, and so do those for which there don't seem to be enough. StartupError
    for a model that they can't share out."""
    if config.ray_address and config.executor != "ray":
        raise StartupError(f"--ray-address is given, and --executor is {config.executor}", "Use --executor ray")
    if not config.remote or config.executor == "ray":
        return None
    from quire.parallel.devices import may_start
    from quire.parallel.remote import RemoteRunner

    _shared_out(config, source)
    if not may_start(config.device, config.ranks):
        return None
    return RemoteRunner(Layout(config.tp, config.pp), config.rank_timeout)


def build_engine(
    config: EngineConfig, source: Source, named: tuple[int, ...], progress: bool = False, member: Member | None = None,
    ranks: RemoteRunner | None = None,
) -> tuple[Engine, MemoryPlan, tuple[str, ...]]:  # fmt: skip
    """The engine of `source`, whose tokenizer has the end tokens `named`; its memory plan, and what is to be said. The
    memory is that of `member`, if any. With ranks in processes of their own the model is there, and not here; `ranks`
    were started already, and end if this fails."""
    ranks = ranks or ranks_of(config, source)
    if not config.remote:
        if config.on_rank_failure == "restart":
            cause = "--on-rank-failure is restart, and the model is where the engine is"
            raise StartupError(cause, "Use --tp, or --executor process")
        return _assembled(config, source, named, progress, member, None)
    assert member is None, "models of a pool are in its process"
    from quire.parallel.devices import check_gpus
    from quire.parallel.remote import RemoteRunner
    from quire.parallel.starting import started_by

    try:
        device = device_of(config)
        source = _divided(config, source, device)
        if device != "cpu":
            check_gpus(config.tp, config.pp)
        if ranks is None:
            ranks = RemoteRunner(Layout(config.tp, config.pp), config.rank_timeout, **started_by(config, device))
        return _assembled(config, source, named, progress, None, ranks)
    except BaseException:
        if ranks is not None:
            ranks.abandon()
        raise


def _assembled(
    config: EngineConfig,
    source: Source,
    named: tuple[int, ...],
    progress: bool,
    member: Member | None,
    ranks: RemoteRunner | None,
) -> tuple[Engine, MemoryPlan, tuple[str, ...]]:
    """The same over `ranks`, whose spec `source` has: or a model here."""
    import torch

    device = device_of(config)
    if device == "cpu" and ranks is None:
        kernels.use_threads(config.threads)
    elif config.threads is not None and ranks is None:
        torch.set_num_threads(config.threads)
    config = config.sized(device).of_rank()
    dtype = dtype_of(config, source.config, device)
    source = source.stored(config, ITEMSIZE[dtype])
    sized = planned(config, source.spec, device, dtype)
    plan = member.plan if member is not None else _memory_plan(sized, source, dtype, device, ranks)
    ends = eos_ids(source, named)
    with _enough_memory(device):
        runner = _runner(config, source, dtype, device, ends, plan.max_len, progress, member, ranks)
    if config.log_plans:
        runner = logged(runner, Path(config.log_plans), source.spec.vocab_size)
    size = Size(plan.kv_tokens, plan.max_len, ITEMSIZE[dtype], plan.kv_bytes)
    make_memory = partial(build_memory, config, source.spec, size, model_id(config, source, dtype))
    memory = member.memory if member else make_memory()
    if config.memory == "virtual":  # pages and buffers aren't always filled
        plan = plan._replace(kv_tokens=capacity(memory.geometry))
    assert config.max_num_batched_tokens is not None, "sized above"
    with _enough_memory(device):
        runner.bind(memory.geometry)
        if config.warm_up:
            runner.warm_up(config.max_num_batched_tokens, plan.max_len)
    limits = _limits(config, source.spec, plan, memory.geometry)
    costs = _read_costs(config.calibration) if config.calibration else DEFAULT
    engine = assemble(
        config, memory, runner, limits, clock=time.monotonic, eos_ids=ends, costs=costs, tiling=tiling_of(source),
        pooling=pooling_of(config, source),
    )  # fmt: skip
    if ranks is not None and config.on_rank_failure == "restart":
        from quire.parallel import starting

        said = replace(config, dtype=dtype, device=device, attention=ranks.attention)
        folder = str(source.folder or "")
        fits = partial(check_again, config, plan)
        engine.restarts = Restarts(partial(starting.anew, said, folder, ends, plan.max_len, make_memory, fits))
    if member is not None:
        member.pool.turns.add(engine)
    return engine, plan, (*_computing(config, runner, ranks, device), *source.notes,
                          *_notices(config, plan, ends, source.defaults))  # fmt: skip


def _memory_plan(
    config: EngineConfig, source: Source, dtype: str, device: str, ranks: RemoteRunner | None
) -> MemoryPlan:
    """What the memory is divided into, by what `ranks` see of their GPUs if there are some."""
    seen = None
    if ranks is not None and device != "cpu":
        from quire.parallel import starting

        seen = starting.meet(ranks, config)
    saved = saved_by_fp8(config, source, dtype, device)
    return plan_memory(config, source.spec, source.name, dtype, ITEMSIZE[dtype], device, saved, seen=seen)


def _limits(config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, geometry: Geometry) -> Limits:
    """What is asked of requests at the edge."""
    held_by = "the KV memory" if plan.clipped else "the model"
    whole = not (geometry.budget or geometry.both_ways)  # a prompt's tokens are computed one by one
    hidden = spec.hidden if whole else 0
    return Limits(spec.vocab_size, plan.max_len, config.max_num_queued_reqs, held_by, hidden)


def _runner(
    config: EngineConfig,
    source: Source,
    dtype: str,
    device: str,
    eos_ids: tuple[int, ...],
    max_len: int,
    progress: bool,
    member: Member | None,
    ranks: RemoteRunner | None,
) -> Any:
    """A runner of the model, or `ranks` that have built it."""
    import torch

    kind, where = getattr(torch, dtype), torch.device(device)
    if ranks is None:
        if device != "cpu":
            os.environ.update(cache_apart())
        common = member.pool.bytes_of if member else None
        return shard_runner(config, source, kind, where, eos_ids, max_len, progress, common)
    from quire.parallel import starting

    attention = attention_of(config, source.spec, where, kind)
    said = replace(config, dtype=dtype, device=device, attention=attention)
    starting.build(ranks, said, str(source.folder or ""), eos_ids, max_len, progress)
    return ranks


def _computing(config: EngineConfig, runner: Any, ranks: RemoteRunner | None, device: str) -> tuple[str, ...]:
    """What computes, to be said at start."""
    if ranks is not None:
        from quire.parallel.starting import unshared

        count = len(ranks.sides)
        if device != "cpu":
            return (f"{count} rank{'s' * (count > 1)}, each with a GPU", *ranks.notices)
        return (
            *(f"{count} rank{'s' * (count > 1)}, each: {said}" for said in ranks.notices),
            *unshared(config.threads, count),
        )
    if device == "cpu":
        from quire.data.weights.mapped import trim

        trim()
        return (kernels.said(),)
    if runner.attention != "triton":
        return ()
    from quire.data.kernels.triton.launch import left_out

    return tuple(filter(None, [left_out(runner.device)]))


@contextmanager
def _enough_memory(device: str) -> Iterator[None]:
    """StartupError where the device has less memory than was planned with."""
    import torch

    try:
        yield
    except RuntimeError as error:  # torch's own kind, or the driver's, of whoever asked it
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error).lower():
            raise
        raise StartupError(
            f"out of memory on {device} at start: {str(error).splitlines()[0][:200]}",
            "Use a smaller --gpu-memory-utilization, --kv-gib, --swap-gib, --max-num-seqs or --max-num-batched-tokens",
        ) from error


def _notices(
    config: EngineConfig, plan: MemoryPlan, eos_ids: tuple[int, ...], defaults: dict[str, Any]
) -> tuple[str, ...]:
    notices = []
    if config.dtype == "auto":
        notices.append(f"dtype {plan.dtype}, chosen for {plan.device}")
    if plan.clipped:
        notices.append(f"sequences may have {plan.max_len:,} tokens{plan.clipped}")
    if eos_ids:
        notices.append(f"end tokens {', '.join(map(str, eos_ids))}")
    if defaults:
        shown = ", ".join(f"{key}={value}" for key, value in defaults.items())
        if config.override_generation_config:
            text = f"requests have {shown} where they say nothing (--override-generation-config)"
        else:
            text = f"generation_config.json sets {shown} where a request doesn't (--no-generation-config ignores it)"
        notices.append(text)
    return tuple(notices)


def _read_costs(path: str) -> Costs:
    """The numbers in a file that `quire bench preemption` wrote. StartupError if it can't be read as such."""
    remedy = "Write one with `quire bench preemption --out FILE`"
    numbers = read_object(path, LIMITS["calibration"], f"--calibration {path}", remedy).get("costs")
    try:
        costs = Costs(**{name: float(numbers[name]) for name in Costs._fields})  # type: ignore[index]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise StartupError(f"--calibration {path} can't be used: {type(error).__name__} {error}", remedy) from error
    if not all(math.isfinite(number) and number >= 0 for number in costs):
        raise StartupError(f"--calibration {path} has a number that is negative or not finite", remedy)
    return costs
