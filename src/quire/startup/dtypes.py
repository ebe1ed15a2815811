"""What a start computes in: the device, dtypes and storage formats, and their effect on the memory plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.kernels.cpu import library_loader as kernels
from quire.models.quantization import GGUF_BLOCKS_KEY, FP8Scheme, LowBitScheme, resolve_scheme
from quire.protocol.model_spec import ModelSpec
from quire.startup.checkpoint import Checkpoint
from quire.startup.loader import has_native_attention, head_shapes

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
NARROW_HIDDEN = 1024
"""GGUF blocks are multiplied exactly below this hidden size: there rounding shows most, and being exact costs least."""


def with_resolved_attention(config: EngineConfig, spec: ModelSpec, device: str, dtype: str) -> EngineConfig:
    """Return `config` with the attention for which memory is planned: quire's kernels for CPUs gather no keys and
    values. Raise StartupError if `config` needs these kernels and they can't be used."""
    import torch

    ours = (
        device == "cpu"
        and config.memory != "virtual"
        and has_native_attention(head_shapes(spec), getattr(torch, dtype))
    )
    if ours and config.attention == "auto":
        config = replace(config, attention="native")
    if config.kv_cache_dtype == "int8" and not (ours and config.attention == "native"):
        raise StartupError(
            f"--kv-cache-dtype is int8, which only quire's kernels for CPUs read, and "
            f"{_why_not_native(config, device)}",
            "Leave it out",
        )
    return config


def _why_not_native(config: EngineConfig, device: str) -> str:
    """Return the reason that quire's kernels for CPUs can't be used for attention."""
    if config.attention not in ("auto", "native"):
        return f"--attention is {config.attention}"
    if device != "cpu":
        return f"--device is {device}"
    if config.memory == "virtual":
        return "--memory is virtual"
    return (
        kernels.missing_reason() if kernels.library() is None else "they don't take the model's heads, or its --dtype"
    )


def choose_device(config: EngineConfig) -> str:
    """Return "cuda" or "cpu". Raise StartupError if a GPU is requested and there is none."""
    if config.device == "cpu":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if config.device == "cuda":
        raise StartupError("--device is cuda, but torch finds no GPU", "Use --device cpu, or install torch for CUDA")
    return "cpu"


def choose_dtype(config: EngineConfig, model: dict[str, Any], device: str) -> str:
    """Return the dtype of the computation. --dtype auto is the checkpoint's; on a CPU, 16-bit formats become bfloat16
    if that is fast, else float32.

    On a CPU, a model whose weights are blocks of a GGUF file is computed in float32, which is exact, if it is narrow,
    or if quire's kernels for such blocks are missing: bfloat16 would add to the rounding of the blocks."""
    if config.dtype != "auto":
        return config.dtype
    has_kernels = device == "cpu" and _has_low_bit_kernels(config, model)
    if (
        device == "cpu"
        and model.get(GGUF_BLOCKS_KEY)
        and (not has_kernels or model.get("hidden_size", NARROW_HIDDEN) < NARROW_HIDDEN)
    ):
        return "float32"
    stored = model.get("dtype") or model.get("torch_dtype") or "float32"
    stored = stored if isinstance(stored, str) and stored in ITEMSIZE else "float32"
    if device == "cpu" and stored != "float32":
        return "bfloat16" if has_kernels or _has_fast_bfloat16() else "float32"
    return str(stored)


def quantization_savings(
    config: EngineConfig, checkpoint: Checkpoint, dtype: str, device: str, device_absent: bool = False
) -> int:
    """Return the bytes that the weights take less than in `dtype`, those of the draft model included, if they are in
    FP8 or in few bits and `device` computes with them; a GPU that is `device_absent` does so with FP8."""
    if checkpoint.draft is not None:
        models = checkpoint._replace(draft=None), checkpoint.draft
        return sum(quantization_savings(config, model, dtype, device, device_absent) for model in models)
    scheme = resolve_scheme(checkpoint.config, config.quantization)
    if scheme is None or (isinstance(scheme, FP8Scheme) and device == "cpu"):
        return 0
    import torch

    from quire.weights import fp8
    from quire.weights import low_bit as few

    kind, parts = getattr(torch, dtype), config.layout.shards()[:: config.tp]
    if isinstance(scheme, LowBitScheme):
        return min(few.saved_bytes(checkpoint.config, scheme, kind, checkpoint.gguf, part, device) for part in parts)
    here = dtype != "float32" if device_absent else fp8.has_fp8_matmul(kind, torch.device(device))
    return min(fp8.saved_bytes(checkpoint.config, scheme, ITEMSIZE[dtype], part) for part in parts) if here else 0


def kv_namespace(config: EngineConfig, checkpoint: Checkpoint, dtype: str) -> str:
    """Return a key that differs for models whose keys and values differ."""
    rounded = f"kv-{config.kv_cache_dtype}" if config.kv_cache_dtype != "auto" else None
    draft = None if checkpoint.draft is None else f"draft-{checkpoint.draft.name}"
    return ":".join(filter(None, (checkpoint.name, dtype, config.quantization, rounded, draft)))


def _has_low_bit_kernels(config: EngineConfig, model: dict[str, Any]) -> bool:
    """Return True if the model has weights of few bits, and quire's kernels for these are available: they round rows in
    bfloat16 to int8, which every CPU multiplies, and leave rows in float32 as they are."""
    return isinstance(resolve_scheme(model, config.quantization), LowBitScheme) and kernels.library() is not None


def _has_fast_bfloat16() -> bool:
    """Return True if torch reports that this CPU multiplies bfloat16 matrices in hardware."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):  # a torch built without oneDNN
        return False
