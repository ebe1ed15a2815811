"""What computes a part of a model, or all of it: its weights loaded, its attention chosen, its runner; and a rank's
program, which has one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.config import VENDOR_ATTENTIONS, EngineConfig
from quire.errors import StartupError
from quire.kernels.cpu import library_loader as kernels
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.limits import MAX_GQA_GROUP, MAX_HEAD_DIM
from quire.models.quantization import FP8Scheme, LowBitScheme, resolve_scheme
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.protocol.pipeline_stages import largest_stage_spec
from quire.startup.checkpoint import Checkpoint, read_checkpoint
from quire.weights.checkpoint_files import MIN_PARAMETER_BYTES, check_weight_bytes

if TYPE_CHECKING:
    import torch

    from quire.distributed.rank_devices import RankDevice
    from quire.distributed.rank_messages import InitMessage
    from quire.layers.exchange import Exchange, StageNeighbours


def build_rank_runner(init_message: InitMessage, seat: RankDevice | None = None) -> Any:
    """The runner of a rank's part, on the GPU of its seat, if any. StartupError where it can't be."""
    import torch

    from quire.distributed.device_stage_pipes import DeviceStagePipes
    from quire.distributed.shared_memory_exchange import SharedMemoryExchange
    from quire.distributed.stage_pipes import StagePipes
    from quire.weights.mapped_files import trim_memory

    config, part = init_message.config, init_message.part
    if seat is None:
        kernels.use_threads(config.threads)
    elif config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = getattr(torch, config.dtype)
    source = read_checkpoint(config).for_shard(part).with_stored_dtypes(config, dtype.itemsize)
    exchange: Exchange | None = None if seat is None else seat.exchange
    if seat is None and part.tp_size > 1:
        exchange = SharedMemoryExchange(part, init_message.meeting, init_message.seconds)
    device = torch.device(config.device) if seat is None else seat.device
    pipes: StagePipes | None = None
    if part.pp_size > 1 and seat is None:
        pipes = StagePipes(part, init_message.meeting, init_message.seconds)
    elif part.pp_size > 1:
        assert config.max_num_batched_tokens is not None, "a sized config"
        room = config.max_num_batched_tokens * source.spec.hidden * dtype.itemsize
        pipes = DeviceStagePipes(part, init_message.meeting, init_message.seconds, device, room)
    runner = build_runner(
        config, source, dtype, device, init_message.eos_ids, init_message.max_len, init_message.progress,
        shard=part, exchange=exchange, pipes=pipes,
    )  # fmt: skip
    runner.notices = (kernels.describe(),) if seat is None else seat.notices
    trim_memory()
    return runner


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
) -> Any:
    """The runner of a part of the model, which `checkpoint`'s spec is of; `exchange` is where it meets the others of
    its stage, if any, and `pipes` lead to the stages beside."""
    import torch

    from quire.layers.prepare import connect_ranks
    from quire.worker.model_runner import ModelRunner

    def make(progress: bool = False) -> Any:
        model = _load_model(config, checkpoint, dtype, device, progress, shard, exchange)
        model.prepare(max_len, config.deterministic)
        if exchange is not None:
            connect_ranks(model, exchange)
        weight_arena().finish_block()
        return model

    model = make(progress)
    attention, recorded = (
        choose_attention(config, checkpoint.spec, device, dtype),
        ("triton", "native", *VENDOR_ATTENTIONS),
    )
    kind: Callable[..., Any] = ModelRunner
    if pipes is not None:
        from quire.worker.stage_runner import StageRunner

        kind = partial(StageRunner, shard=shard, pipes=pipes)
    runner = kind(
        model, checkpoint.spec, dtype, device, attention, eos_ids,
        use_graphs=(pipes is None or device.type == "cuda") and config.cuda_graphs and attention in recorded,
        deterministic=config.deterministic, debug=config.debug, map_in_background=config.map_ahead == "thread",
        shared_buffer=get_shared_buffer() if get_shared_buffer is not None else None,
        state_dtype=torch.bfloat16 if config.state_dtype == "bfloat16" else torch.float32,
    )  # fmt: skip
    runner.make_model = make
    return runner


def _load_model(
    config: EngineConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, progress: bool,
    shard: Shard,
    exchange: Exchange | None = None,
) -> Any:  # fmt: skip
    """The model with its weights; ranks that have some columns of a row each ask through `exchange` for what is largest
    in all of it."""
    from quire.weights import low_bit
    from quire.weights.dummy import fill_dummy_weights
    from quire.weights.fp8 import create_model
    from quire.weights.gguf_loader import load_gguf
    from quire.weights.loader import load_weights

    scheme = resolve_scheme(checkpoint.config, config.quantization)
    dummy = config.dummy_weights or checkpoint.path is None
    if not dummy and checkpoint.gguf is None:
        stored = scheme is not None and scheme.stored
        least = MIN_PARAMETER_BYTES if not stored else 1 if isinstance(scheme, FP8Scheme) else scheme.bits / 8
        check_weight_bytes(checkpoint.path, checkpoint.spec.parameters, least)
    if isinstance(scheme, LowBitScheme):
        model = low_bit.create_model(checkpoint.config, dtype, device, scheme, checkpoint.gguf, shard)
    else:
        model = create_model(checkpoint.config, dtype, device, scheme, shard)
    if shard.pp_size > 1:
        model.__dict__["full_model"] = meta_model(checkpoint.config, dtype, shard)  # no module of it
    most = None if exchange is None else exchange.all_reduce_max
    if dummy:
        fill_dummy_weights(model, config.seed, scheme)
    elif checkpoint.gguf is not None:
        load_gguf(model, checkpoint.gguf, progress, scheme, most)
    else:
        load_weights(model, checkpoint.path, progress, scheme, most)
    model.__dict__.pop("full_model", None)
    return model


def meta_model(config: dict[str, Any], dtype: torch.dtype, shard: Shard, stages: bool = False) -> Any:
    """The model of a config.json, of shapes alone: what a rank would have of it if there were no stages; or, with
    `stages`, what it has."""
    import torch

    from quire.models import resolve_model_class

    return resolve_model_class(config)(
        config, dtype, torch.device("meta"), shard if stages else Shard(shard.tp_rank, shard.tp_size)
    )


def sharded_stage_spec(checkpoint: Checkpoint, dtype: torch.dtype, ranks: int, stages: int) -> ModelSpec:
    """The spec of a stage that has as much of everything as any of `stages` has, of `ranks` each, whose part
    `checkpoint`'s spec is of. StartupError for a model that can't be divided so."""
    import torch

    spec = largest_stage_spec(checkpoint.spec, stages)
    counts = []
    for stage in range(stages):
        weights = list(meta_model(checkpoint.config, dtype, Shard(0, ranks, stage, stages), stages=True).parameters())
        wide = sum(weight.numel() for weight in weights if weight.dtype == torch.float32 != dtype)
        counts.append((sum(weight.numel() for weight in weights), wide))
    most, wide = map(max, zip(*counts))
    eyes = spec.vision.parameters if spec.vision is not None else 0  # which are counted apart
    return replace(spec, parameters=most - eyes, fp32_parameters=wide)


def choose_attention(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the attention backend. StartupError for one that the device can't run."""
    chosen, ours = config.attention, ("triton", *VENDOR_ATTENTIONS)
    if device.type == "cuda" and not find_spec("triton"):  # torch brings it along in its CUDA builds for Linux
        raise StartupError("--device is cuda, but there is no Triton, which compiles the kernels", "pip install triton")
    heads = head_shapes(spec)
    fits = all(group <= MAX_GQA_GROUP and dim % 2 == 0 and dim <= MAX_HEAD_DIM for group, dim in heads)
    if chosen == "auto":
        chosen = "contiguous" if config.memory == "virtual" else "sdpa"
        if device.type == "cuda" and fits:
            chosen = "triton"
        elif device.type == "cpu" and has_native_attention(heads, dtype):
            chosen = "native"
    if chosen in ours and not fits:
        raise StartupError(
            f"--attention is {chosen}, and the model has heads that Triton's kernels don't take: (query heads a key "
            "head, size) " + ", ".join(map(str, sorted(heads))),
            f"They take {MAX_GQA_GROUP} query heads a key head and even sizes up to {MAX_HEAD_DIM}; use --attention "
            f"sdpa",
        )
    if chosen in VENDOR_ATTENTIONS and spec.vision is not None and spec.vision.bidirectional_prompt:
        raise StartupError(
            f"--attention is {chosen}, whose kernels for prompts are causal, and tokens of this model's prompts attend "
            "both ways",
            "Use --attention triton",
        )
    if chosen in ours and device.type == "cpu":
        raise StartupError(f"--attention is {chosen}, which needs a GPU", "Use --attention auto")
    if config.deterministic and chosen != "triton" and device.type != "cpu":
        raise StartupError(f"--deterministic is given, and the attention is {chosen}", "It needs --attention triton")
    return chosen


def head_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """Of layers that attend: (query heads a key head, size)."""
    return {(spec.heads // layer.kv_heads, layer.head_dim) for layer in spec.layers if not layer.state_tensors}


def has_native_attention(shapes: set[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether there are kernels for CPUs, for heads like these: (query heads a key head, size)."""
    from quire.kernels.cpu.backend import supports

    return kernels.library() is not None and all(supports(dtype, shared, dim) for shared, dim in shapes)
