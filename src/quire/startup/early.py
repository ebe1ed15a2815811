"""What a start begins as soon as its settings are known, while most modules and torch are imported. This module imports
few others."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from quire.config import EngineConfig
from quire.distributed.triton_cache import triton_cache_environment
from quire.kernels.pinned_memory import pinned_block
from quire.kernels.triton.compile_process import hash_triton, running_compiler, start_compiler
from quire.startup.torch_import import is_cuda_initialized

GPU_DEVICE_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
MIN_COMPILED_AT_ONCE, MAX_COMPILED_AT_ONCE = 3, 16
"""Kernels that are compiled at once. With fewer cores threads compile them as fast."""


def start_gpu_work(config: EngineConfig, host_pages: bool = True) -> None:
    """If the model may be in this process, on a GPU, start the process that compiles kernels and, unless a GPU was
    chosen, the thread that opens the first one. A second call has no effect. `host_pages`: see `open_gpu`."""
    if not config.has_rank_processes:
        start_kernel_compiler(config)
        if not is_cuda_initialized():
            open_gpu(config, host_pages)


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


def import_triton() -> None:
    """If a process of this one compiles kernels, import Triton and start to hash its files. Call it before waiting for
    torch, which another thread may be importing."""
    if running_compiler() is not None:
        with suppress(ImportError):  # another version of Triton's
            hash_triton()


def open_gpu(config: EngineConfig, host_pages: bool = True) -> None:
    """If this process may compute on a GPU, start a thread that initializes CUDA's driver and the context of the first
    GPU, without the interpreter's lock. torch then uses this context. With `host_pages` the thread then allocates
    their pinned memory: there are not more of them than pages on the GPU."""
    if config.device != "cpu" and not config.has_rank_processes and any(map(os.path.exists, GPU_DEVICE_FILES)):
        gib = config.swap_gib if config.kv_gib is None else min(config.swap_gib, config.kv_gib)
        pinned_block().allocate_in_thread(_open_first_gpu, int(gib * 2**30) if host_pages else 0)


def _open_first_gpu() -> Any:
    """Retain the context and make it this thread's. Return the driver's library, or None; failures are left to torch,
    which reports them."""
    with suppress(OSError, AttributeError):  # no such library, as on AMD's GPUs
        driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        if (
            driver.cuInit(0) == 0
            and driver.cuDeviceGet(ctypes.byref(device), 0) == 0
            and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
            and driver.cuCtxSetCurrent(context) == 0
        ):
            return driver
    return None
