"""How kernels are launched: what a device allows them, and the arithmetic of grids (Triton's own takes longer)."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton


def cdiv(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def power_of_2(number: int) -> int:
    """The least power of two from `number`, 1 or more, on."""
    return 1 << (number - 1).bit_length()


@lru_cache
def supports_pdl(device: torch.device) -> bool:
    """Kernels may be launched before their predecessors end (programmatic dependent launch, Hopper and later): they
    start, fetch what no kernel of the step writes, and wait there."""
    return torch.cuda.get_device_capability(device)[0] >= 9


GLUON_VERSIONS = ("3.6", "3.7")
"""Versions of Triton whose Gluon, marked experimental, compiles `prompt_hopper` as it was tested."""


@lru_cache
def supports_hopper_kernel(device: torch.device) -> bool:
    """Groups of warps can be given roles and multiply asynchronously, as `prompt_hopper` has them do: on NVIDIA's
    Hopper alone, and by Gluon, which isn't interpreted. Where this is false that module may not even import."""
    return _is_hopper(device) and _gluon_supported() and not triton.knobs.runtime.interpret


def hopper_notice(device: torch.device) -> str | None:
    """What to say at start where only the version of Triton keeps a Hopper GPU from its own kernel."""
    if not _is_hopper(device) or _gluon_supported():
        return None
    known = ", ".join(GLUON_VERSIONS)
    return f"long prompts are computed as on other GPUs: Triton {triton.__version__} isn't one of {known}"


def _is_hopper(device: torch.device) -> bool:
    here = device.type == "cuda" and torch.version.hip is None
    return here and torch.cuda.get_device_capability(device) == (9, 0)


def _gluon_supported() -> bool:
    return ".".join(triton.__version__.split(".")[:2]) in GLUON_VERSIONS


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have; of a CPU, where kernels are interpreted, as many as an H200's."""
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"])
