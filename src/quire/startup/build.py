"""Build an engine from its settings: checkpoint -> memory plan -> model -> runner, memory, scheduler, engine.

This is the one place where these are joined. Every failure is a StartupError with its cause and a remedy."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config import EngineConfig
from quire.core.assembly import assemble
from quire.core.engine import Engine
from quire.core.preemption_costs import DEFAULT_COSTS, PreemptionCosts, SpeculationCosts
from quire.core.recovery import RunnerRestarter
from quire.core.validation import EngineLimits
from quire.distributed.triton_cache import triton_cache_environment
from quire.errors import StartupError
from quire.files import MAX_BYTES_BY_FILE, read_json_object
from quire.ipc.garbage_collection import gc_paused
from quire.kernels.cpu import library_loader as kernels
from quire.kernels.cpu.weight_arena import weight_arena
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.memory.virtual.virtual_memory import virtual_capacity_tokens
from quire.models import uses_transformers
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import ModelSpec
from quire.protocol.pipeline_stages import check_pp_division, has_uneven_stages
from quire.protocol.plan_log import with_plan_log
from quire.protocol.shared_host import SharedHostMemory
from quire.startup.checkpoint import (
    Checkpoint,
    collect_eos_ids,
    image_tiling,
    pooling_type,
    read_checkpoint,
    read_image_loader,
    read_tokenizer_and_template,
)
from quire.startup.dtypes import (
    ITEMSIZE,
    choose_device,
    choose_dtype,
    kv_namespace,
    quantization_savings,
    with_resolved_attention,
)
from quire.startup.loader import build_runner, choose_attention, end_gpu_work, sharded_stage_spec, start_gpu_work
from quire.startup.memory_plan import (
    GIB,
    DraftSizes,
    MemoryPlan,
    PoolMember,
    check_still_fits,
    describe_pages,
    plan_memory,
)
from quire.startup.prealloc import preallocate_weights
from quire.startup.speculation import check_speculation

if TYPE_CHECKING:
    from quire.distributed.remote_runner import RemoteRunner
    from quire.text.chat_template import ChatTemplate
    from quire.text.images.loader import ImageLoader
    from quire.text.tokenizer import Tokenizer

log = logging.getLogger("quire.startup")


class BuiltEngine(NamedTuple):
    """An engine and its tokenizer, template and plan. `notices` are shown at start; `default_sampling` are the sampling
    parameters of generation_config.json."""

    engine: Engine
    spec: ModelSpec
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    memory_plan: MemoryPlan
    notices: tuple[str, ...]
    default_sampling: dict[str, Any]
    name: str
    image_loader: ImageLoader | None = None


def describe_memory_plan(config: EngineConfig, device_gib: float | None = None) -> list[str]:
    """Return the memory plan of `config` as one screen of lines, without loading the model; with `device_gib`, for GPUs
    of that size, which need not exist (or, with --device cpu, for a machine of that memory)."""
    if device_gib is not None and not 0 < device_gib < 2**20:
        raise StartupError(f"--device-gib is {device_gib}", "It must be above 0")
    absent = device_gib is not None
    device = ("cpu" if config.device == "cpu" else "cuda") if absent else choose_device(config)
    checkpoint = check_speculation(config, read_checkpoint(config, weights=False))
    checkpoint = _with_shard_spec(config, checkpoint, device)
    config = config.with_device_defaults(device).per_rank()
    dtype = choose_dtype(config, checkpoint.config, device)
    checkpoint = checkpoint.with_stored_dtypes(config, ITEMSIZE[dtype])
    saved = quantization_savings(config, checkpoint, dtype, device, absent)
    config = with_resolved_attention(config, checkpoint.pool_spec, device, dtype)
    absent_bytes = (
        None if device_gib is None else int(device_gib * GIB) // (config.world_size if device == "cpu" else 1)
    )
    spec, draft = checkpoint.pool_spec, _draft_sizes(config, checkpoint, dtype, device, absent)
    itemsize = ITEMSIZE[dtype]
    try:
        plan = plan_memory(config, spec, checkpoint.name, dtype, itemsize, device, saved, absent_bytes, draft=draft)
    except StartupError as error:
        if absent:
            raise
        raise StartupError(error.cause, f"{error.remedy}, or --device-gib to plan for another device") from error
    pages = describe_pages(config, spec, itemsize, plan)
    if config.memory == "virtual":  # pages and buffers aren't always filled
        size = MemorySize(plan.kv_tokens, plan.max_len, itemsize, plan.kv_bytes)
        plan = plan._replace(kv_tokens=virtual_capacity_tokens(build_memory(config, spec, size).kv_config))
    if absent:
        plan = plan._replace(device=f"{device} (--device-gib)")
    return plan.to_lines() + pages


def _with_shard_spec(config: EngineConfig, checkpoint: Checkpoint, device: str) -> Checkpoint:
    """Return the same with the spec of a rank's part; with stages, of one with as much of everything as any stage.
    Raise StartupError for a model that can't be divided so. `device` is "cuda" or "cpu", and need not exist here."""
    checkpoint = _with_tp_spec(config, checkpoint)
    if config.pp == 1:
        return checkpoint
    import torch

    dtype = getattr(torch, choose_dtype(config, checkpoint.config, device))
    spec = sharded_stage_spec(checkpoint, dtype, config.layout)
    return checkpoint._replace(spec=spec)


def _with_tp_spec(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Return the same with the spec of a rank's part of each layer, and check what can be checked without torch."""
    checkpoint = checkpoint.for_shard(config.layout.shards()[0])
    if config.pp == 1:
        return checkpoint
    if config.memory == "virtual" and has_uneven_stages(checkpoint.spec, config.pp):
        raise StartupError(
            f"--memory is virtual, and of {len(checkpoint.spec.layers)} layers --pp {config.pp} makes stages with "
            "different numbers of each kind",
            "Use --memory paged, or another --pp",
        )
    check_pp_division(checkpoint.spec, config.pp)
    return checkpoint


@gc_paused()
def build(config: EngineConfig, progress: bool = False, pool_member: PoolMember | None = None) -> BuiltEngine:
    """Load the model and assemble the engine; for a member of a pool over its part of the memory, with the config of
    `pool_member`."""
    from quire.text.template_process import TemplateProcess

    if config.kv_events is not None:  # `serve_clients` publishes them
        raise StartupError("--kv-events-config is given, and only an engine with a process of its own publishes events",
                           "Use quire serve, or AsyncLLM with engine_process=True")  # fmt: skip
    renderer = None if config.skip_tokenizer_init else TemplateProcess()  # its process starts while torch is imported
    ranks = None
    try:
        checkpoint = read_checkpoint(config)
        ranks = start_ranks(config, checkpoint)
        start_gpu_work(config, host_pages=pool_member is None)
        preallocate_weights(config, checkpoint)
        import_module("torch")
        log.debug("torch is imported")
        tokenizer, chat_template = read_tokenizer_and_template(config, checkpoint, renderer)
        eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
        image_loader = read_image_loader(config, checkpoint, tokenizer)
        engine, plan, notices = build_engine(config, checkpoint, eos_ids, progress, pool_member, ranks)
        return BuiltEngine(
            engine,
            checkpoint.spec,
            tokenizer,
            chat_template,
            plan,
            notices,
            checkpoint.default_sampling,
            checkpoint.name,
            image_loader,
        )
    except BaseException:
        if renderer is not None:
            renderer.close()
        if ranks is not None:
            ranks.kill()
        raise
    finally:
        weight_arena().finish_block()  # after a failed start, too
        end_gpu_work()


def start_ranks(config: EngineConfig, checkpoint: Checkpoint) -> RemoteRunner | None:
    """Start ranks in processes of their own, if there are any, so that they import libraries while this process does.
    Return None for ranks of Ray, which are started once the GPUs are known, and if there are probably not enough GPUs.
    Raise StartupError for a model that can't be divided among ranks."""
    if config.ray_address and config.executor != "ray":
        raise StartupError(f"--ray-address is given, and --executor is {config.executor}", "Use --executor ray")
    if not config.has_rank_processes or config.executor == "ray":
        return None
    from quire.distributed.rank_devices import seems_to_have_devices
    from quire.distributed.remote_runner import RemoteRunner

    _with_tp_spec(config, checkpoint)
    if not seems_to_have_devices(config.device, config.world_size):
        return None
    return RemoteRunner(config.layout, config.rank_timeout)


def build_engine(
    config: EngineConfig, checkpoint: Checkpoint, tokenizer_eos_ids: tuple[int, ...], progress: bool = False,
    pool_member: PoolMember | None = None,
    remote_runner: RemoteRunner | None = None, shared_host: SharedHostMemory | None = None,
) -> tuple[Engine, MemoryPlan, tuple[str, ...]]:  # fmt: skip
    """Return the engine of `checkpoint`, its memory plan, and notices for the start. The tokenizer has the end tokens
    `tokenizer_eos_ids`. The memory is that of `pool_member`, if any. With ranks in processes of their own the model is
    loaded only there; `remote_runner` are ranks that were started already, which end if this fails. `shared_host` is
    where host pages are that other engines read, too; then the model is in this process."""
    checkpoint = check_speculation(config, checkpoint)
    remote_runner = remote_runner or start_ranks(config, checkpoint)
    if not config.has_rank_processes:
        if config.on_rank_failure == "restart":
            cause = "--on-rank-failure is restart, and the model is where the engine is"
            raise StartupError(cause, "Use --tp, or --executor process")
        return _assemble(config, checkpoint, tokenizer_eos_ids, progress, pool_member, None, shared_host)
    assert pool_member is None, "models of a pool are in its process"
    from quire.distributed.rank_devices import check_gpus
    from quire.distributed.rank_startup import start_remote_runner

    try:
        device = choose_device(config)
        checkpoint = _with_shard_spec(config, checkpoint, device)
        if device != "cpu" and config.executor != "ray":
            check_gpus(config.tp, config.pp)
        if remote_runner is None:
            remote_runner = start_remote_runner(config, device, list(filter(None, _checkpoint_paths(checkpoint))))
        return _assemble(config, checkpoint, tokenizer_eos_ids, progress, None, remote_runner)
    except BaseException:
        if remote_runner is not None:
            remote_runner.kill()
        raise


def _assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer_eos_ids: tuple[int, ...],
    progress: bool,
    pool_member: PoolMember | None,
    remote_runner: RemoteRunner | None,
    shared_host: SharedHostMemory | None = None,
) -> tuple[Engine, MemoryPlan, tuple[str, ...]]:
    """Return the same as `build_engine`, over `remote_runner`, to whose ranks `checkpoint`'s spec belongs, or over a
    model in this process."""
    import torch

    device = choose_device(config)
    if device == "cpu" and remote_runner is None:
        kernels.use_threads(config.threads)
    elif config.threads is not None and remote_runner is None:
        torch.set_num_threads(config.threads)
    config = config.with_device_defaults(device).per_rank()
    dtype = choose_dtype(config, checkpoint.config, device)
    checkpoint = checkpoint.with_stored_dtypes(config, ITEMSIZE[dtype])
    sized = with_resolved_attention(config, checkpoint.pool_spec, device, dtype)
    plan = (
        pool_member.plan if pool_member is not None else _plan_memory(sized, checkpoint, dtype, device, remote_runner)
    )
    log.debug("the device is open")
    eos_ids = collect_eos_ids(checkpoint, tokenizer_eos_ids)
    with _report_out_of_memory(device):
        runner = _make_runner(
            config, checkpoint, dtype, device, eos_ids, plan.max_len, progress, pool_member, remote_runner, shared_host
        )
    if config.log_plans:
        runner = with_plan_log(runner, Path(config.log_plans), checkpoint.spec.vocab_size)
    size = MemorySize(plan.kv_tokens, plan.max_len, ITEMSIZE[dtype], plan.kv_bytes)
    namespace = kv_namespace(config, checkpoint, dtype)
    make_memory = partial(build_memory, config, checkpoint.pool_spec, size, namespace, shared_host)
    memory = pool_member.memory if pool_member else make_memory()
    if config.memory == "virtual":  # pages and buffers aren't always filled
        plan = plan._replace(kv_tokens=virtual_capacity_tokens(memory.kv_config))
    assert config.max_num_batched_tokens is not None, "sized above"
    with _report_out_of_memory(device):
        runner.bind(memory.kv_config)
        log.debug("pages are allocated")
        if config.warm_up:
            runner.warm_up(config.max_num_batched_tokens, plan.max_len)
    limits = _engine_limits(config, checkpoint.spec, plan, memory.kv_config)
    costs = _read_costs(config.calibration) if config.calibration else DEFAULT_COSTS
    restarter = None
    if remote_runner is not None and config.on_rank_failure == "restart":
        from quire.distributed import rank_startup

        resolved = _resolve(config, checkpoint, dtype, device, remote_runner.attention)
        check_memory = partial(check_still_fits, config, plan)
        restarter = RunnerRestarter(
            partial(
                rank_startup.rebuild_ranks,
                resolved,
                _checkpoint_paths(checkpoint),
                eos_ids,
                plan.max_len,
                make_memory,
                check_memory,
            )
        )
    engine = assemble(
        config,
        memory,
        runner,
        limits,
        clock=time.monotonic,
        eos_ids=eos_ids,
        costs=costs,
        tiling=image_tiling(checkpoint),
        pooling=pooling_type(config, checkpoint),
        shared_memory_group=pool_member.shared_memory_group if pool_member is not None else None,
        restarter=restarter,
        speculation_costs=SpeculationCosts.estimate(
            device, ITEMSIZE[dtype], checkpoint.spec, None if checkpoint.draft is None else checkpoint.draft.spec
        ),
    )
    return engine, plan, (*_model_notices(checkpoint.config), *_hardware_notices(config, runner, remote_runner, device),
                          *checkpoint.notices,
                          *_notices(config, plan, eos_ids, checkpoint.default_sampling))  # fmt: skip


def _model_notices(config: dict[str, Any]) -> Iterator[str]:
    """Yield a notice if transformers computes the model."""
    if uses_transformers(config):
        release = version("transformers")
        yield (f"{config['architectures'][0]}: the class of transformers {release} on quire's pages, slower than "
               "quire's own models, without graphs")  # fmt: skip


def _plan_memory(
    config: EngineConfig, checkpoint: Checkpoint, dtype: str, device: str, remote_runner: RemoteRunner | None
) -> MemoryPlan:
    """Return the memory plan, by the free memory of the ranks' GPUs, or of the nodes of ranks on CPUs, if there are
    any."""
    measured = None
    if remote_runner is not None:
        from quire.distributed import rank_startup

        if device == "cpu":
            measured = rank_startup.smallest_host_memory(remote_runner)
        else:
            measured = rank_startup.open_devices(remote_runner, config)
    saved = quantization_savings(config, checkpoint, dtype, device)
    return plan_memory(
        config, checkpoint.pool_spec, checkpoint.name, dtype, ITEMSIZE[dtype], device, saved, measured=measured,
        draft=_draft_sizes(config, checkpoint, dtype, device),
    )  # fmt: skip


def _draft_sizes(
    config: EngineConfig, checkpoint: Checkpoint, dtype: str, device: str, device_absent: bool = False
) -> DraftSizes | None:
    """Return what the draft model takes of the memory plan; None without one."""
    draft = checkpoint.draft
    if draft is None:
        return None
    weights = draft.spec.weight_bytes(ITEMSIZE[dtype])
    weights -= quantization_savings(config, draft, dtype, device, device_absent)
    return DraftSizes(draft.name, draft.spec, weights, draft.spec.token_bytes(ITEMSIZE[dtype]))


def _resolve(config: EngineConfig, checkpoint: Checkpoint, dtype: str, device: str, attention: str) -> EngineConfig:
    """Return the config of ranks: with the dtype, the device, the attention and the draft model's folder resolved."""
    draft, model = checkpoint.draft, config.speculative_model
    if draft is not None and draft.path is not None:
        model = _absolute_path(draft)
    return replace(config, dtype=dtype, device=device, attention=attention, speculative_model=model)


def _checkpoint_paths(checkpoint: Checkpoint) -> list[str]:
    """Return the path of the model, and of the draft model if it is elsewhere."""
    model = _absolute_path(checkpoint)
    draft = "" if checkpoint.draft is None else _absolute_path(checkpoint.draft)
    return [model, draft] if draft not in ("", model) else [model]


def _absolute_path(checkpoint: Checkpoint) -> str:
    """Return the path of a model's folder or file, which does not depend on the working folder: ranks of other nodes
    have another one. "" for a named shape."""
    return "" if checkpoint.path is None else str(checkpoint.path.absolute())


def _engine_limits(config: EngineConfig, spec: ModelSpec, plan: MemoryPlan, kv_config: KVCacheConfig) -> EngineLimits:
    """Return the limits that requests are checked against."""
    held_by = "the KV memory" if plan.limit_note else "the model"
    whole = not (kv_config.budget or kv_config.both_ways)  # embeddings need prompts that are computed token by token
    hidden = spec.hidden if whole else 0
    return EngineLimits(spec.vocab_size, plan.max_len, config.max_num_queued_reqs, held_by, hidden)


def _make_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: str,
    device: str,
    eos_ids: tuple[int, ...],
    max_len: int,
    progress: bool,
    pool_member: PoolMember | None,
    remote_runner: RemoteRunner | None,
    shared_host: SharedHostMemory | None,
) -> Any:
    """Return the runner of a model in this process, or `remote_runner` after its ranks have built theirs."""
    import torch

    kind, where = getattr(torch, dtype), torch.device(device)
    if remote_runner is None:
        if device != "cpu":
            os.environ.update(triton_cache_environment())
        get_shared_buffer = pool_member.get_buffer if pool_member else None
        return build_runner(
            config, checkpoint, kind, where, eos_ids, max_len, progress, get_shared_buffer, shared_host=shared_host
        )
    from quire.distributed import rank_startup

    attention = choose_attention(config, checkpoint.pool_spec, where, kind)
    resolved = _resolve(config, checkpoint, dtype, device, attention)
    rank_startup.build_ranks(remote_runner, resolved, _absolute_path(checkpoint), eos_ids, max_len, progress)
    return remote_runner


def _hardware_notices(
    config: EngineConfig, runner: Any, remote_runner: RemoteRunner | None, device: str
) -> tuple[str, ...]:
    """Return notices that describe the hardware in use."""
    if remote_runner is not None:
        from quire.distributed.rank_startup import unused_threads_notice

        count = len(remote_runner.ranks)
        if device != "cpu":
            return (f"{count} rank{'s' * (count > 1)}, each with a GPU", *remote_runner.notices)
        return (
            *(f"{count} rank{'s' * (count > 1)}, each: {notice}" for notice in remote_runner.notices),
            *unused_threads_notice(config.threads, max(len(host.ranks) for host in remote_runner.hosts)),
        )
    if device == "cpu":
        from quire.weights.mapped_files import trim_memory

        trim_memory()
        return (kernels.describe(),)
    if runner.attention != "triton":
        return ()
    from quire.kernels.triton.launch import hopper_notice

    return tuple(filter(None, [hopper_notice(runner.device)]))


@contextmanager
def _report_out_of_memory(device: str) -> Iterator[None]:
    """A context that raises StartupError if the device has less memory than planned."""
    import torch

    try:
        yield
    except RuntimeError as error:  # torch's own error, or one of the driver
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
    draft = "" if plan.draft is None else plan.draft.model
    if config.dtype == "auto":
        notices.append(f"dtype {plan.dtype}, chosen for {plan.device}")
    if plan.limit_note:
        notices.append(f"sequences may have {plan.max_len:,} tokens{plan.limit_note}")
    if eos_ids:
        notices.append(f"end tokens {', '.join(map(str, eos_ids))}")
    if config.speculation is not None:
        source = {"ngram": "n-grams", "both": f"n-grams and {draft}"}.get(config.speculation, draft)
        notices.append(f"speculative decoding: up to {config.num_speculative_tokens} draft tokens from {source}")
    if defaults:
        shown = ", ".join(f"{key}={value}" for key, value in defaults.items())
        if config.override_generation_config:
            text = f"requests have {shown} where they say nothing (--override-generation-config)"
        else:
            text = f"generation_config.json sets {shown} where a request doesn't (--no-generation-config ignores it)"
        notices.append(text)
    return tuple(notices)


def _read_costs(path: str) -> PreemptionCosts:
    """Return the costs in a file written by `quire bench preemption`. Raise StartupError if it is malformed."""
    remedy = "Write one with `quire bench preemption --out FILE`"
    file = read_json_object(path, MAX_BYTES_BY_FILE["calibration"], f"--calibration {path}", remedy)
    costs_read: Any = file.get("costs")
    try:
        numbers = PreemptionCosts._field_defaults | costs_read
        costs = PreemptionCosts(**{name: float(numbers[name]) for name in PreemptionCosts._fields})
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise StartupError(f"--calibration {path} can't be used: {type(error).__name__} {error}", remedy) from error
    if not all(math.isfinite(number) and number >= 0 for number in costs):
        raise StartupError(f"--calibration {path} has a number that is negative or not finite", remedy)
    return costs
