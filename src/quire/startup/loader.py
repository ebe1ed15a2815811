"""Load a model or a rank's part of it: its weights, its attention backend and its runner."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.config import VENDOR_ATTENTIONS, EngineConfig
from quire.distributed.triton_cache import triton_cache_environment
from quire.errors import StartupError
from quire.kernels.cpu import library_loader as kernels
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.limits import MAX_GQA_GROUPS
from quire.kernels.pinned_memory import pinned_block
from quire.kernels.triton.compile_process import start_compiler, stop_compiler
from quire.models import uses_transformers
from quire.models.quantization import FP8Scheme, LowBitScheme, resolve_scheme
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, ParallelLayout, Shard
from quire.protocol.pipeline_stages import largest_stage_spec
from quire.protocol.shared_host import SharedHostMemory
from quire.startup.checkpoint import Checkpoint, read_checkpoint
from quire.startup.prealloc import GPU_DEVICE_FILES, open_gpu
from quire.weights.checkpoint_files import MIN_PARAMETER_BYTES, check_weight_bytes

if TYPE_CHECKING:
    import torch

    from quire.distributed.rank_devices import RankDevice
    from quire.distributed.rank_messages import InitMessage
    from quire.layers.exchange import Exchange, StageNeighbours
    from quire.models import Model
    from quire.models.transformers_model import TransformersModel
    from quire.weights.loader import LoadedFiles

log = logging.getLogger("quire.startup")
MIN_COMPILED_AT_ONCE, MAX_COMPILED_AT_ONCE = 3, 16
"""Kernels that are compiled at once. With fewer cores threads compile them as fast."""


def build_rank_runner(init_message: InitMessage, rank_device: RankDevice | None = None) -> Any:
    """Return the runner of a rank's part of the model, on the GPU of `rank_device`, if any. Raise StartupError if it
    can't be built."""
    import torch

    from quire.distributed.device_stage_pipes import DeviceStagePipes
    from quire.distributed.shared_memory_exchange import SharedMemoryExchange
    from quire.distributed.stage_pipes import StagePipes
    from quire.weights.mapped_files import trim_memory

    config, part = init_message.config, init_message.part
    if rank_device is not None:
        start_kernel_compiler(config, config.world_size)
    fds = init_message.meeting.fds(part)
    if rank_device is None:
        kernels.use_threads(config.threads)
    elif config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = getattr(torch, config.dtype)
    source = read_checkpoint(config).for_shard(part).with_stored_dtypes(config, dtype.itemsize)
    exchange: Exchange | None = None if rank_device is None else rank_device.exchange
    if rank_device is None and part.tp_size > 1:
        exchange = SharedMemoryExchange(part, fds, init_message.seconds)
    device = torch.device(config.device) if rank_device is None else rank_device.device
    pipes: StagePipes | None = None
    if part.pp_size > 1 and rank_device is None:
        pipes = StagePipes(part, fds, init_message.seconds)
    elif rank_device is not None and part.pp_size > 1:
        assert config.max_num_batched_tokens is not None, "a sized config"
        room = config.max_num_batched_tokens * source.spec.hidden * dtype.itemsize
        pipes = DeviceStagePipes(part, fds, init_message.seconds, device, room, rank_device.links)
    runner = build_runner(
        config, source, dtype, device, init_message.eos_ids, init_message.max_len, init_message.progress,
        shard=part, exchange=exchange, pipes=pipes,
        notices=(kernels.describe(),) if rank_device is None else rank_device.notices,
    )  # fmt: skip
    trim_memory()
    return runner


def start_gpu_work(config: EngineConfig, host_pages: bool = True) -> None:
    """Start the process that compiles kernels, and the thread of `open_gpu`, if the model may be on a GPU and is not in
    rank processes. If torch has chosen a GPU, which may not be the first, start no thread. A second call has no effect.
    """
    if not config.has_rank_processes:
        start_kernel_compiler(config)
        is_initialized = getattr(sys.modules.get("torch.cuda"), "is_initialized", None)  # None: not yet imported
        if is_initialized is None or not is_initialized():
            open_gpu(config, host_pages)


def end_gpu_work() -> None:
    """End the process that compiles kernels, and free the block of pinned memory unless host pages use it."""
    stop_compiler()
    pinned_block().free()


def start_kernel_compiler(config: EngineConfig, shares: int = 1) -> None:
    """Start the process that compiles kernels, on one of `shares` equal shares of the cores, if the model will be
    warmed up on a GPU, unless there are too few cores to gain by it. It does not import torch here."""
    if not config.warm_up or config.device == "cpu" or not any(map(os.path.exists, GPU_DEVICE_FILES)):
        return
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):  # none of the GPUs
        return
    processes = min(MAX_COMPILED_AT_ONCE, len(os.sched_getaffinity(0)) // shares)
    if processes >= MIN_COMPILED_AT_ONCE and find_spec("triton"):
        os.environ.update(triton_cache_environment())
        start_compiler(processes)


def build_runner(
    config: EngineConfig,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    eos_ids: tuple[int, ...],
    max_len: int,
    progress: bool = False,
    get_shared_buffer: Callable[[], torch.Tensor] | None = None,
    shard: Shard = UNSHARDED,
    exchange: Exchange | None = None,
    pipes: StageNeighbours | None = None,
    notices: tuple[str, ...] = (),
    shared_host: SharedHostMemory | None = None,
) -> Any:
    """Return the runner of the part of the model that `checkpoint`'s spec describes; `exchange` connects it to the
    other ranks of its stage, if any, and `pipes` to the neighbouring stages. Its host pages are in `shared_host`, if
    any."""
    import torch

    from quire.layers.prepare import connect_ranks
    from quire.models.speculation_heads import SpeculationHead
    from quire.worker.model_runner import ModelRunner

    def make(source: Checkpoint, progress: bool = False) -> Any:
        model, files = _load_model(config, source, dtype, device, progress, shard, exchange)
        model.prepare(max_len, config.deterministic, files.mapped)
        if exchange is not None:
            connect_ranks(model, exchange)
        weight_arena().finish_block()
        return model

    target: Callable[[], Any] | None = None  # the model that was made last; a sleep of level 2 drops it

    def make_model(progress: bool = False) -> Any:
        nonlocal target
        model = make(checkpoint, progress)
        target = weakref.ref(model)
        return model

    def make_draft(progress: bool = False) -> Any:
        assert checkpoint.draft is not None, "there is a draft model"
        draft = make(checkpoint.draft, progress)
        if isinstance(draft, SpeculationHead):
            assert target is not None, "a head is made after its target"
            draft.attach(target())
        return draft

    if device.type == "cuda":  # while weights are loaded
        from quire.kernels.triton.compile_process import hash_triton

        with suppress(ImportError):  # another version of Triton's
            hash_triton()
    model, draft = make_model(progress), checkpoint.draft
    log.debug("weights are loaded")
    speculation: dict[str, Any] = {
        "max_drafts": config.max_draft_tokens, "synthetic_acceptance": config.experiment.synthetic_acceptance,
    }  # fmt: skip
    if draft is not None:
        speculation |= {
            "draft_model": make_draft(progress), "draft_spec": draft.spec, "make_draft_model": make_draft,
            "max_step_tokens": config.max_num_batched_tokens,
        }  # fmt: skip
    attention = choose_attention(config, checkpoint.pool_spec, device, dtype)
    recorded: tuple[str, ...] = ("triton", "native", *VENDOR_ATTENTIONS)
    if any(uses_transformers(source.config) for source in (checkpoint, draft) if source is not None):
        recorded = ()  # transformers may ask for numbers, or take other kernels, at any step
    kind: Callable[..., Any] = ModelRunner
    if pipes is not None:
        from quire.worker.stage_runner import StageRunner

        kind = partial(StageRunner, shard=shard, pipes=pipes)
    return kind(
        model, checkpoint.spec, dtype, device, attention, eos_ids,
        use_graphs=(pipes is None or device.type == "cuda") and config.cuda_graphs and attention in recorded,
        deterministic=config.deterministic, debug=config.debug,
        map_in_background=config.experiment.map_ahead == "thread",
        shared_buffer=get_shared_buffer() if get_shared_buffer is not None else None,
        state_dtype=torch.bfloat16 if config.state_dtype == "bfloat16" else torch.float32,
        make_model=make_model, notices=notices, shared_host=shared_host, **speculation,
    )  # fmt: skip


def _load_model(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: bool,
    shard: Shard,
    exchange: Exchange | None = None,
) -> tuple[Model | TransformersModel, LoadedFiles]:  # fmt: skip
    """Return the model with its weights, and the files that they come from. Ranks that each hold some columns of a row
    get the maximum over the whole row through `exchange`."""
    from quire.models.speculation_heads import Eagle3Head
    from quire.weights import low_bit
    from quire.weights.dummy import fill_dummy_weights
    from quire.weights.fp8 import create_model
    from quire.weights.gguf_loader import load_gguf
    from quire.weights.loader import LoadedFiles, load_draft_ids, load_weights

    if uses_transformers(checkpoint.config):
        from quire.weights.transformers_loader import load_transformers_model

        folder = None if config.dummy_weights else checkpoint.path
        if folder is not None:
            check_weight_bytes(folder, checkpoint.spec.parameters)
        made = load_transformers_model(checkpoint.config, folder, dtype, device, config.seed, progress, shard)
        return made, LoadedFiles((), 0)
    scheme = resolve_scheme(checkpoint.config, config.quantization)
    path = None if config.dummy_weights else checkpoint.path  # None: dummy weights
    if path is not None and checkpoint.gguf is None:
        least: float = MIN_PARAMETER_BYTES
        if scheme is not None and scheme.stored:
            least = 1 if isinstance(scheme, FP8Scheme) else scheme.bits / 8
        check_weight_bytes(path, checkpoint.spec.parameters, least)
    if isinstance(scheme, LowBitScheme):
        model = low_bit.create_model(checkpoint.config, dtype, device, scheme, checkpoint.gguf, shard)
    else:
        model = create_model(checkpoint.config, dtype, device, scheme, shard)
    full_model = meta_model(checkpoint.config, dtype, shard) if shard.pp_size > 1 else None
    all_reduce_max = None if exchange is None else exchange.all_reduce_max
    if path is None:
        fill_dummy_weights(model, config.seed, scheme, full_model)
        files = LoadedFiles((), 0)
    elif checkpoint.gguf is not None:
        files = load_gguf(model, checkpoint.gguf, progress, scheme, all_reduce_max, full_model)
    else:
        files = load_weights(model, path, progress, scheme, all_reduce_max, full_model)
        if isinstance(model, Eagle3Head) and model.config.has_draft_ids:
            model.set_draft_ids(load_draft_ids(path, model.config.draft_vocab, model.config.vocab_size))
    return model, files


def meta_model(config: dict[str, Any], dtype: torch.dtype, shard: Shard, stages: bool = False) -> Any:
    """Return the model of a config.json with shapes only: a rank's part if there were no stages, or, with `stages`, the
    rank's actual part."""
    import torch

    from quire.models import resolve_model_class

    return resolve_model_class(config)(
        config, dtype, torch.device("meta"), shard if stages else shard._replace(pp_rank=0, pp_size=1)
    )


def sharded_stage_spec(checkpoint: Checkpoint, dtype: torch.dtype, layout: ParallelLayout) -> ModelSpec:
    """Return the spec of a stage that has as much of everything as any stage of `layout`, where `checkpoint` has the
    spec of a rank's part of each layer. Raise StartupError for a model that can't be divided so."""
    import torch

    spec = largest_stage_spec(checkpoint.spec, layout.pp)
    counts = []
    for shard in layout.shards()[:: layout.tp]:
        weights = list(meta_model(checkpoint.config, dtype, shard, stages=True).parameters())
        wide = sum(weight.numel() for weight in weights if weight.dtype == torch.float32 != dtype)
        counts.append((sum(weight.numel() for weight in weights), wide))
    largest, wide = map(max, zip(*counts))
    encoder_parameters = spec.vision.parameters if spec.vision is not None else 0  # counted separately
    return replace(spec, parameters=largest - encoder_parameters, fp32_parameters=wide)


def choose_attention(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the attention backend. Raise StartupError if the device or the model does not support it."""
    chosen, needs_triton = config.attention, ("triton", *VENDOR_ATTENTIONS)
    if device.type == "cuda" and not find_spec("triton"):  # CUDA builds of torch for Linux include it
        raise StartupError("--device is cuda, but there is no Triton, which compiles the kernels", "pip install triton")
    heads = head_shapes(spec)
    fits = all(
        dim % 2 == 0 and any(dim <= size and group <= most for size, most in MAX_GQA_GROUPS.items())
        for group, dim in heads
    )
    if chosen == "auto":
        chosen = "contiguous" if config.memory == "virtual" else "sdpa"
        if device.type == "cuda" and fits:
            chosen = "triton"
        elif device.type == "cpu" and has_native_attention(heads, dtype):
            chosen = "native"
    if chosen in needs_triton and not fits:
        raise StartupError(
            f"--attention is {chosen}, and the model has heads that Triton's kernels don't take: (query heads a key "
            "head, size) " + ", ".join(map(str, sorted(heads))),
            "They take "
            + " and ".join(f"up to {most} of even sizes up to {size}" for size, most in MAX_GQA_GROUPS.items())
            + "; use --attention sdpa",
        )
    vision = spec.vision
    if (
        chosen in VENDOR_ATTENTIONS
        and vision is not None
        and (vision.bidirectional_prompt or vision.bidirectional_images)
    ):
        raise StartupError(
            f"--attention is {chosen}, whose kernels for prompts are causal, and tokens of this model's prompts attend "
            "both ways",
            "Use --attention triton",
        )
    if chosen in needs_triton and device.type == "cpu":
        raise StartupError(f"--attention is {chosen}, which needs a GPU", "Use --attention auto")
    if config.deterministic and chosen != "triton" and device.type != "cpu":
        raise StartupError(f"--deterministic is given, and the attention is {chosen}", "It needs --attention triton")
    return chosen


def head_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """Return (query heads per KV head, head size) of each attention layer."""
    return {
        ((layer.heads or spec.heads) // layer.kv_heads, layer.head_dim)
        for layer in spec.layers
        if not layer.state_tensors
    }


def has_native_attention(shapes: set[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Return True if quire's attention kernels for CPUs are available for heads like these: (query heads per KV head,
    head size)."""
    from quire.kernels.cpu.backend import supports

    return kernels.library() is not None and all(supports(dtype, shared, dim) for shared, dim in shapes)
