"""Helpers for launches: the abilities of devices, and the arithmetic of grids (Triton's own takes longer)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton


def cdiv(number: int, by: int) -> int:
    """Return number / by, rounded up."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number` >= 1."""
    return 1 << (number - 1).bit_length()


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Return True if kernels may be launched before their predecessors end (programmatic dependent launch, Hopper and
    later): they start, load what no kernel of the step writes, and then wait."""
    return torch.cuda.get_device_capability(device)[0] >= 9


GLUON_VERSIONS = ("3.6", "3.7")
"""Versions of Triton with whose Gluon, which is experimental, `prefill_hopper` was tested."""


@lru_cache
def supports_hopper_kernel(device: torch.device) -> bool:
    """Return True if `prefill_hopper` can run: it needs warp specialization and asynchronous products, which only
    NVIDIA's Hopper has, and Gluon, which cannot be interpreted. Else importing that module may fail."""
    return _is_hopper(device) and _gluon_supported() and not triton.knobs.runtime.interpret


def hopper_notice(device: torch.device) -> str | None:
    """Return a startup message if only Triton's version prevents `prefill_hopper` on a Hopper GPU, or None."""
    if not _is_hopper(device) or _gluon_supported():
        return None
    known = ", ".join(GLUON_VERSIONS)
    return f"long prompts are computed as on other GPUs: Triton {triton.__version__} isn't one of {known}"


def _is_hopper(device: torch.device) -> bool:
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and torch.cuda.get_device_capability(device) == (9, 0)


def _gluon_supported() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in GLUON_VERSIONS


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; for a CPU, where kernels are interpreted, an
    H200's."""
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
