"""How kernels of a step follow one another on the device."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache
def early(device: torch.device) -> bool:
    """Kernels may be launched before their predecessors end (programmatic dependent launch, Hopper and later): they
    start, fetch what no kernel of the step writes, and wait there."""
    return torch.cuda.get_device_capability(device)[0] >= 9
