"""How far the outputs of a layer stray when its states are kept in fp32, and in bf16, and a token is computed a step.

Steps, decays and weights are drawn as Mamba initialises them (steps from 0.001 to 0.1, decays from 1 to 16): a slow
channel forgets a thousandth of its state in a token, which is less than bf16 can take from a number. As a script it
writes what it measured: `python tests/kernels/test_state_drift.py 131072 docs/measurements/state_drift.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.mamba_states import StateCache, StatePlan, selective_scan

INNER, SIZE = 64, 16


class Layer:
    """Numbers of a layer, and of its tokens, drawn in fp64 and rounded to fp32."""

    def __init__(self, tokens: int) -> None:
        rng = np.random.default_rng(0)
        steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), INNER))
        self.bias = self._of(steps + np.log(-np.expm1(-steps)))
        self.A = -torch.arange(1.0, SIZE + 1).repeat(INNER, 1)
        self.D = torch.ones(INNER)
        self.x, self.z = (F.silu(self._of(rng.normal(size=(tokens, INNER)))) for _ in range(2))
        self.dt = self._of(rng.normal(size=(tokens, INNER)) * 0.5)
        self.B, self.C = (self._of(rng.normal(size=(tokens, SIZE))) for _ in range(2))

    @staticmethod
    def _of(numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).float()

    def stepped(self, dtype: torch.dtype) -> np.ndarray:
        """Outputs [tokens, INNER], a token a step."""
        pages = torch.zeros(2, INNER, SIZE, dtype=dtype)
        cache = StateCache(torch.zeros(2, INNER, 3), pages, page_tokens=1 << 30)
        table, slots = torch.tensor([[0], [1]]), torch.ones(1, dtype=torch.int64)
        first, later = (StatePlan.for_decode(table, slots, torch.tensor([start]), 1 << 30) for start in (0, 1))
        out = []
        for t in range(len(self.x)):
            x, dt, B, C, z = (tensor[t : t + 1] for tensor in (self.x, self.dt, self.B, self.C, self.z))
            plan = later if t else first
            out.append(selective_scan(x, dt, self.A, B, C, self.D, z, self.bias, cache, plan))
        return torch.cat(out).double().numpy()

    def exact(self) -> np.ndarray:
        """The same in fp64."""
        x, z, dt, B, C = (tensor.double().numpy() for tensor in (self.x, self.z, self.dt, self.B, self.C))
        A, delta = self.A.double().numpy(), np.logaddexp(0, dt + self.bias.double().numpy())
        h, out = np.zeros((INNER, SIZE)), np.empty_like(x)
        for t in range(len(x)):
            h = np.exp(delta[t][:, None] * A) * h + (delta[t] * x[t])[:, None] * B[t]
            out[t] = (h @ C[t] + x[t]) * z[t] / (1 + np.exp(-z[t]))
        return out


def drift(tokens: int, dtype: torch.dtype) -> list[float]:
    """The error's size beside the outputs' own, in each eighth of the tokens."""
    layer = Layer(tokens)
    want = layer.exact()
    error = layer.stepped(dtype) - want
    return [
        float(np.linalg.norm(part) / np.linalg.norm(whole))
        for part, whole in zip(np.split(error, 8), np.split(want, 8))
    ]


def test_drift_over_a_few_thousand_tokens() -> None:
    fp32, bf16 = (drift(4096, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert max(fp32) < 2e-6
    assert 5e-4 < max(bf16) < 5e-3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_drift_over_131072_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """In neither does it grow with the tokens, as what is forgotten takes its error with it."""
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 5e-3)):
        errors = drift(131_072, dtype)
        with capsys.disabled():
            print(f"\n{dtype}: {', '.join(f'{error:.2e}' for error in errors)}")
        assert max(errors) < most
        assert max(errors) < 2 * min(errors)


if __name__ == "__main__":
    count = int(sys.argv[1])
    shares = {str(dtype).removeprefix("torch."): drift(count, dtype) for dtype in (torch.float32, torch.bfloat16)}
    found = {"tokens": count, "channels": INNER, "states": SIZE, "torch": torch.__version__, "error_by_eighth": shares}
    Path(sys.argv[2]).write_text(json.dumps(found, indent=2) + "\n")
