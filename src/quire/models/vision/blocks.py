"""The building blocks of vision encoders: the patch embedding, layers of bidirectional attention and MLP, the
projector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quire.layers.linear import Linear
from quire.layers.mlp import MLP, get_activation
from quire.layers.norm import LayerNorm, RMSNorm
from quire.models.vision.settings import PROJECTOR_ROWS, VisionSettings
from quire.models.vision.tower_settings import INTERN, MLLAMA, TowerSettings


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class PatchEmbedding(nn.Module):
    """pixels [n, 3, H, W] -> patches [n, side * side, hidden]: a convolution whose stride is its kernel's size, as one
    product. Pixels beyond the last whole patch are ignored."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, bias: bool, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.patch, self.side = s.patch_size, s.patches_per_side
        self.weight = empty_parameter(s.hidden, 3, s.patch_size, s.patch_size, dtype=dtype, device=device)
        self.bias = empty_parameter(s.hidden, dtype=dtype, device=device) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        side, patch, used = self.side, self.patch, self.side * self.patch
        patches = pixels[:, :, :used, :used].reshape(-1, 3, side, patch, side, patch)
        flat = patches.permute(0, 2, 4, 1, 3, 5).reshape(-1, side * side, 3 * patch * patch)
        return F.linear(flat, self.weight.flatten(1), self.bias)


class VisionAttention(nn.Module):
    """Attention of all tokens of an entry of the batch to each other, except that the last `num_padding` tokens don't
    attend to one another."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.heads = s.heads
        rows = 3 * s.hidden if s.fused_qkv else (s.hidden,) * 3
        self.qkv = Linear(s.hidden, rows, s.qkv_bias, dtype, device)
        self.out = Linear(s.hidden, s.hidden, s.kind != MLLAMA, dtype, device)
        self.q_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device) if s.qk_norm else None
        self.k_norm = RMSNorm(s.hidden, s.norm_eps, dtype, device) if s.qk_norm else None

    def forward(self, x: Tensor, entries: int, num_padding: int = 0) -> Tensor:
        """Return the heads' outputs for x [entries * tokens, hidden], of the same shape, before `out`."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(entries, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2) for t in (q, k, v))
        if not num_padding:
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        real = q.shape[2] - num_padding
        of_real = F.scaled_dot_product_attention(q[:, :, :real], k, v)
        of_padding = F.scaled_dot_product_attention(q[:, :, real:], k[:, :, :real], v[:, :, :real])
        return torch.cat((of_real, of_padding), dim=2).transpose(1, 2).reshape(x.shape)


class VisionEncoderLayer(nn.Module):
    """x += s1 attention(norm(x)); returns x and the next residual, s2 mlp(norm(x)). Each sum is left to the norm that
    follows. s1 and s2 are vectors (InternViT), or the tanh of gates (mllama's global layers), or absent."""

    def __init__(self, s: TowerSettings, dtype: torch.dtype, device: torch.device, gated: bool = False) -> None:
        super().__init__()
        norm = RMSNorm if s.use_rms_norm else LayerNorm
        self.attention_norm = norm(s.hidden, s.norm_eps, dtype, device)
        self.attention = VisionAttention(s, dtype, device)
        self.mlp_norm = norm(s.hidden, s.norm_eps, dtype, device)
        self.mlp = MLP(s.hidden, s.intermediate, s.activation, True, dtype, device)
        size = s.hidden if s.kind == INTERN else 1
        scaled, self.gated = gated or s.kind == INTERN, gated
        self.attention_scale = empty_parameter(size, dtype=dtype, device=device) if scaled else None
        self.mlp_scale = empty_parameter(size, dtype=dtype, device=device) if scaled else None

    def forward(self, x: Tensor, delta: Tensor | None, entries: int, num_padding: int = 0) -> tuple[Tensor, Tensor]:
        attended = self.attention.out(self.attention(self.attention_norm(x, delta), entries, num_padding))
        inner = self.mlp(self.mlp_norm(x, self._scale(attended, self.attention_scale)))
        return x, self._scale(inner, self.mlp_scale)

    def _scale(self, delta: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return delta
        return delta.mul_(scale.tanh() if self.gated else scale)


def run_layers(layers: Sequence[VisionEncoderLayer], x: Tensor) -> Tensor:
    """Return the output of `layers` for x [n, tokens, hidden], which is overwritten."""
    flat, delta = x.flatten(0, 1), None
    for layer in layers:
        flat, delta = layer(flat, delta, len(x))
    assert delta is not None, "a tower has layers"
    return flat.add_(delta).view(x.shape)


class Projector(nn.Module):
    """features [T, in] -> rows [T, width]: two products with an activation between them, PROJECTOR_ROWS rows at a time
    to bound the memory of the intermediate result."""

    __call__: Callable[..., Tensor]

    def __init__(self, s: VisionSettings, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.act = get_activation(s.activation)
        self.up = Linear(s.connector_in, s.hidden, s.bias, dtype, device)
        self.down = Linear(s.hidden, s.hidden, s.bias, dtype, device)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.empty(len(x), self.down.output_sizes[0], dtype=x.dtype, device=x.device)
        for start in range(0, len(x), PROJECTOR_ROWS):
            rows[start : start + PROJECTOR_ROWS] = self.down(self.act(self.up(x[start : start + PROJECTOR_ROWS])))
        return rows


def merge_patches(features: Tensor, merge: int) -> Tensor:
    """Concatenate the features of merge x merge patches: [n, side * side, h] -> [n, side / merge, side / merge,
    merge * merge * h]."""
    tiles, patches, size = features.shape
    side = round(patches**0.5)
    squares = features.view(tiles, side // merge, merge, side // merge, merge, size).transpose(2, 3)
    return squares.reshape(tiles, side // merge, side // merge, merge * merge * size)
