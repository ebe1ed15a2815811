"""Random weights for a model without a checkpoint: what `--dummy-weights` measures with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quire.data.layers.norm import LayerNorm, RMSNorm

STD = 0.02
NOISE = 4_194_301  # numbers drawn once and laid into every weight; a prime, so that no two rows line up


@torch.no_grad()
def fill_dummy(model: nn.Module, seed: int) -> None:
    """Normal weights of standard deviation 0.02; norms are the identity. A function of seed, dtype and device."""
    first = next(model.parameters())
    generator = torch.Generator(first.device).manual_seed(seed)
    noise = torch.empty(NOISE, dtype=torch.float32, device=first.device).normal_(0, STD, generator=generator)
    noise = noise.to(first.dtype)
    at = 0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, RMSNorm | LayerNorm):
                offset = isinstance(module, RMSNorm) and module.offset
                parameter.fill_(1.0 if name == "weight" and not offset else 0.0)
            else:
                at = _lay(parameter.view(-1), noise, at)


def _lay(flat: Tensor, noise: Tensor, at: int) -> int:
    """Fill `flat` with the endless repetition of `noise` from `at` on; where to go on."""
    filled = 0
    while filled < len(flat):
        piece = noise[at : at + len(flat) - filled]
        flat[filled : filled + len(piece)] = piece
        filled, at = filled + len(piece), (at + len(piece)) % len(noise)
    return at
