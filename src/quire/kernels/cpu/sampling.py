"""Sampling: greedy tokens, and draws under temperature, min_p, top_k and top_p, equal to quire.worker.inverse_cdf given
the same likelihoods. An operation samples all rows of a step; a row's result depends on nothing but the row."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.dispatch import DTYPE_SUFFIXES
from quire.kernels.cpu.library_loader import library


def sample(
    logits: Tensor, params: Tensor | None, draw_rows: Tensor | None, uniforms: Tensor | None, slots: Tensor,
    last_sampled: Tensor,
    tokens: Tensor, faults: Tensor,
) -> None:  # fmt: skip
    """Draws tokens [D] from the rows owners [D] (rising; None: one draw a row) of logits [R, V], and the lowest id of
    the greatest where the temperature is 0.

    shapes [R, 4] float64: temperature, min_p, top_k (0: off), top_p; None: all rows are greedy. chances [D] float64 in
    [0, 1). faults[r] = 0; in a row with a logit that is NaN or +infinite, or with none above -infinity, token 0 and
    fault 1. The first draw of a row goes to last[slots[r]] too. All others are int64.
    """
    rows, vocab = logits.shape
    found = library()
    assert found is not None, "a sampler chooses this where there is a library"
    assert logits.stride(1) == 1, "a row's logits must be contiguous"
    for tensor in (params, draw_rows, uniforms, slots, last_sampled, tokens, faults):
        assert tensor is None or tensor.is_contiguous(), "plain vectors"
    found.call(
        f"sample_{DTYPE_SUFFIXES[logits.dtype]}", rows, logits, params, draw_rows, uniforms, slots, last_sampled,
        tokens, faults,
        logits.stride(0), vocab, len(tokens),
    )  # fmt: skip
