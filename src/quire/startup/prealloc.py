"""Prepare memory for packed weights, or open the GPU and allocate pinned memory, while torch is imported.

Does not import torch.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from typing import Any

import psutil

from quire.config import EngineConfig
from quire.kernels.cpu import library_loader as kernels
from quire.kernels.cpu.weight_arena import weight_arena
from quire.kernels.pinned_memory import pinned_block
from quire.startup.checkpoint import Checkpoint

GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
QUANTIZED_BITS = {"int8": 8.5, "int4": 4.75}
"""Bits of a weight by --quantization, with its share of the scales."""


def preallocate_weights(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Prefault about as much memory as packed weights will take, as far as it is known before torch is imported; in
    parallel with the import it costs no time. At most half of the free memory is taken: whether the model fits is
    checked later. Do nothing if a GPU or ranks may compute, or without quire's kernels for CPUs."""
    if config.has_rank_processes:
        return
    if config.device != "cpu" and any(map(os.path.exists, GPU_DEVICE_FILES)):
        return
    if kernels.find_library(os.environ.get("QUIRE_CPU_KERNELS", "")) is None:
        return
    models = [checkpoint] if checkpoint.draft is None else [checkpoint, checkpoint.draft]
    wanted = sum(_packed_bytes(config, model) for model in models)
    weight_arena().prefault(min(wanted, psutil.virtual_memory().available // 2))


def open_gpu(config: EngineConfig, host_pages: bool = True) -> None:
    """If the model may be on a GPU, start a thread that initializes CUDA's driver and the context of the first GPU,
    without the interpreter's lock. torch then uses this context. A second call has no effect.

    With `host_pages` the thread also allocates their pinned memory: --swap-gib, but not more than --kv-gib, since there
    are never more host pages than pages on the GPU. With --kv-tokens the size of those is not known yet. If it is more
    than half of the available memory the thread does not, since fewer pages may be needed."""
    if config.device != "cpu" and any(map(os.path.exists, GPU_DEVICE_FILES)):
        gib = config.swap_gib if config.kv_gib is None else min(config.swap_gib, config.kv_gib)
        num_bytes = int(gib * 2**30) if host_pages and config.kv_tokens is None else 0
        fits = num_bytes <= psutil.virtual_memory().available // 2
        pinned_block().allocate_in_thread(_open_first_gpu, num_bytes if fits else 0)


def _open_first_gpu() -> tuple[Any, ctypes.c_void_p] | None:
    """Make the first GPU's primary context current in this thread. Return CUDA's driver library and the context. Return
    None if that fails: torch will report why."""
    with suppress(OSError, AttributeError):  # no such library, as on AMD's GPUs
        driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        if (
            driver.cuInit(0) == 0
            and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
            and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
            and driver.cuCtxSetCurrent(context) == 0
        ):
            return driver, context
    return None


def _packed_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Return about how many bytes the packed weights of one model will take."""
    spec, bits = checkpoint.spec, 32.0 if config.dtype == "float32" else 16.0
    if checkpoint.path is not None and not config.dummy_weights:
        files = [checkpoint.path] if checkpoint.gguf is not None else checkpoint.path.glob("*.safetensors")
        bits = min(bits, sum(file.stat().st_size for file in files if file.is_file()) * 8 / spec.parameters)
    has_table = not checkpoint.config.get("tie_word_embeddings") and not spec.captured_width
    table = spec.vocab_size * spec.hidden if has_table else 0
    return int((spec.parameters - table) * min(bits, QUANTIZED_BITS.get(config.quantization or "", bits)) / 8)
