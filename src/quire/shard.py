"""What computes a part of a model, or all of it: its weights loaded, its attention chosen, its runner; and a rank's
program, which has one of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quire.config import VENDORS, EngineConfig
from quire.data.kernels.cpu import loading as kernels
from quire.data.kernels.cpu.memory import memory
from quire.data.kernels.limits import MOST_GROUP, MOST_HEAD_DIM
from quire.data.models.quantization import FP8, Few, scheme_of
from quire.data.weights.checkpoint import SMALLEST, check_size
from quire.errors import StartupError
from quire.source import Source, read_source
from quire.vocabulary.layout import WHOLE, Part
from quire.vocabulary.specs import ModelSpec
from quire.vocabulary.stages import staged

if TYPE_CHECKING:
    import torch

    from quire.data.layers.exchange import Exchange
    from quire.data.runner.stages import Neighbours
    from quire.parallel.devices import Seat
    from quire.parallel.frames import Hello


def build_rank(hello: Hello, seat: Seat | None = None) -> Any:
    """The runner of a rank's part, on the GPU of its seat, if any. StartupError where it can't be."""
    import torch

    from quire.data.weights.mapped import trim
    from quire.parallel.device_pipes import DevicePipes
    from quire.parallel.pipes import Pipes
    from quire.parallel.shared import SharedExchange

    config, part = hello.config, hello.part
    if seat is None:
        kernels.use_threads(config.threads)
    elif config.threads is not None:
        torch.set_num_threads(config.threads)
    dtype = getattr(torch, config.dtype)
    source = read_source(config).divided(part).stored(config, dtype.itemsize)
    exchange: Exchange | None = None if seat is None else seat.exchange
    if seat is None and part.ranks > 1:
        exchange = SharedExchange(part, hello.meeting, hello.seconds)
    device = torch.device(config.device) if seat is None else seat.device
    pipes: Pipes | None = None
    if part.stages > 1 and seat is None:
        pipes = Pipes(part, hello.meeting, hello.seconds)
    elif part.stages > 1:
        assert config.max_num_batched_tokens is not None, "a sized config"
        room = config.max_num_batched_tokens * source.spec.hidden * dtype.itemsize
        pipes = DevicePipes(part, hello.meeting, hello.seconds, device, room)
    runner = shard_runner(
        config, source, dtype, device, hello.eos_ids, hello.max_len, hello.progress,
        part=part, exchange=exchange, pipes=pipes,
    )  # fmt: skip
    runner.notices = (kernels.said(),) if seat is None else seat.notices
    trim()
    return runner


def shard_runner(
    config: EngineConfig,
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    eos_ids: tuple[int, ...],
    max_len: int,
    progress: bool = False,
    common: Callable[[], torch.Tensor] | None = None,
    part: Part = WHOLE,
    exchange: Exchange | None = None,
    pipes: Neighbours | None = None,
) -> Any:
    """The runner of a part of the model, which `source`'s spec is of; `exchange` is where it meets the others of its
    stage, if any, and `pipes` lead to the stages beside."""
    import torch

    from quire.data.layers.prepare import join
    from quire.data.runner.model_runner import ModelRunner

    def make(progress: bool = False) -> Any:
        model = _loaded(config, source, dtype, device, progress, part, exchange)
        model.prepare(max_len, config.deterministic)
        if exchange is not None:
            join(model, exchange)
        memory().settle()
        return model

    model = make(progress)
    attention, recorded = attention_of(config, source.spec, device, dtype), ("triton", "native", *VENDORS)
    kind: Callable[..., Any] = ModelRunner
    if pipes is not None:
        from quire.data.runner.stages import StageRunner

        kind = partial(StageRunner, part=part, pipes=pipes)
    runner = kind(
        model, source.spec, dtype, device, attention, eos_ids,
        graphs=(pipes is None or device.type == "cuda") and config.cuda_graphs and attention in recorded,
        deterministic=config.deterministic, debug=config.debug, background=config.map_ahead == "thread",
        common=common() if common is not None else None,
        state_dtype=torch.bfloat16 if config.state_dtype == "bfloat16" else torch.float32,
    )  # fmt: skip
    runner.make = make
    return runner


def _loaded(
    config: EngineConfig, source: Source, dtype: torch.dtype, device: torch.device, progress: bool, part: Part,
    exchange: Exchange | None = None,
) -> Any:  # fmt: skip
    """The model with its weights; ranks that have some columns of a row each ask through `exchange` for what is largest
    in all of it."""
    from quire.data.weights import few
    from quire.data.weights.dummy import fill_dummy
    from quire.data.weights.fp8 import made
    from quire.data.weights.gguf_loader import load_gguf
    from quire.data.weights.loader import load

    scheme = scheme_of(source.config, config.quantization)
    dummy = config.dummy_weights or source.folder is None
    if not dummy and source.file is None:
        stored = scheme is not None and scheme.stored
        least = SMALLEST if not stored else 1 if isinstance(scheme, FP8) else scheme.bits / 8
        check_size(source.folder, source.spec.parameters, least)
    if isinstance(scheme, Few):
        model = few.made(source.config, dtype, device, scheme, source.file, part)
    else:
        model = made(source.config, dtype, device, scheme, part)
    if part.stages > 1:
        model.__dict__["undivided"] = meta_of(source.config, dtype, part)  # no module of it
    most = None if exchange is None else exchange.largest
    if dummy:
        fill_dummy(model, config.seed, scheme)
    elif source.file is not None:
        load_gguf(model, source.file, progress, scheme, most)
    else:
        load(model, source.folder, progress, scheme, most)
    model.__dict__.pop("undivided", None)
    return model


def meta_of(config: dict[str, Any], dtype: torch.dtype, part: Part, stages: bool = False) -> Any:
    """The model of a config.json, of shapes alone: what a rank would have of it if there were no stages; or, with
    `stages`, what it has."""
    import torch

    from quire.data.models import resolve

    return resolve(config)(config, dtype, torch.device("meta"), part if stages else Part(part.rank, part.ranks))


def stage_of(source: Source, dtype: torch.dtype, ranks: int, stages: int) -> ModelSpec:
    """The spec of a stage that has as much of everything as any of `stages` has, of `ranks` each, whose part `source`'s
    spec is of. StartupError for a model that can't be divided so."""
    import torch

    spec = staged(source.spec, stages)
    counts = []
    for stage in range(stages):
        weights = list(meta_of(source.config, dtype, Part(0, ranks, stage, stages), stages=True).parameters())
        wide = sum(weight.numel() for weight in weights if weight.dtype == torch.float32 != dtype)
        counts.append((sum(weight.numel() for weight in weights), wide))
    most, wide = map(max, zip(*counts))
    eyes = spec.vision.parameters if spec.vision is not None else 0  # which are counted apart
    return replace(spec, parameters=most - eyes, wide_parameters=wide)


def attention_of(config: EngineConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> str:
    """The name of the attention backend. StartupError for one that the device can't run."""
    chosen, ours = config.attention, ("triton", *VENDORS)
    if device.type == "cuda" and not find_spec("triton"):  # torch brings it along in its CUDA builds for Linux
        raise StartupError("--device is cuda, but there is no Triton, which compiles the kernels", "pip install triton")
    heads = heads_of(spec)
    fits = all(group <= MOST_GROUP and dim % 2 == 0 and dim <= MOST_HEAD_DIM for group, dim in heads)
    if chosen == "auto":
        chosen = "contiguous" if config.memory == "virtual" else "sdpa"
        if device.type == "cuda" and fits:
            chosen = "triton"
        elif device.type == "cpu" and native(heads, dtype):
            chosen = "native"
    if chosen in ours and not fits:
        raise StartupError(
            f"--attention is {chosen}, and the model has heads that Triton's kernels don't take: (query heads a key "
            "head, size) " + ", ".join(map(str, sorted(heads))),
            f"They take {MOST_GROUP} query heads a key head and even sizes up to {MOST_HEAD_DIM}; use --attention sdpa",
        )
    if chosen in VENDORS and spec.vision is not None and spec.vision.both_ways:
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


def heads_of(spec: ModelSpec) -> set[tuple[int, int]]:
    """Of layers that attend: (query heads a key head, size)."""
    return {(spec.heads // layer.kv_heads, layer.head_dim) for layer in spec.layers if not layer.state}


def native(heads: set[tuple[int, int]], dtype: torch.dtype) -> bool:
    """Whether there are kernels for CPUs, for heads like these: (query heads a key head, size)."""
    from quire.data.kernels.cpu.backend import takes

    return kernels.library() is not None and all(takes(dtype, shared, dim) for shared, dim in heads)
