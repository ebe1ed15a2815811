"""Divide a model of transformers among ranks, by the plan that its class publishes (`tp_plan`). The plan names the
parameters of which a rank has rows or columns, and the modules whose outputs the ranks add up or concatenate. Imports
torch and transformers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from quire.errors import StartupError
from quire.layers.exchange import ShardedModule
from quire.protocol.parallel_layout import Shard

TP_REMEDY = "Leave --tp out, for one GPU or --replicas, or use a model of a family that is quire's own"
ROWS, COLUMNS = -2, -1
"""Dimensions of a weight, from the end, as weights of several experts have another one before them."""


class ParameterPart(NamedTuple):
    """The part of a parameter that a rank has: an equal share of each of `groups` runs along dimension `dim`, whose
    size on all ranks together is `size`. If `padded`, it has the rows of `rows_of` instead, and `size` need not
    divide."""

    shard: Shard
    dim: int
    size: int
    groups: int = 1
    padded: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Return True if a tensor of this shape has `size` numbers along `dim`."""
        return len(shape) > 0 and shape[self.dim % len(shape)] == self.size

    def read(self, source: Any, dims: int) -> Tensor:
        """Return the part of `source`, a tensor or a slice of a safetensors file with `dims` dimensions."""
        if self.padded:
            rows, padded = rows_of(self.shard, self.size)
            part = source[rows.start : rows.stop] if rows else source[:0]
            return F.pad(part, [0, 0] * (dims - 1) + [0, padded - len(rows)])
        run = self.size // self.groups
        local, before = self.shard.shard_range(run), (slice(None),) * (self.dim % dims)
        starts = (group * run + local.start for group in range(self.groups))
        pieces = [source[(*before, slice(start, start + len(local)))] for start in starts]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def rows_of(shard: Shard, size: int) -> tuple[range, int]:
    """Return a rank's range of `size` rows, in order of ranks, and the equal number of rows that each rank stores: the
    rest are zeros. There is no padding if each rank has a multiple of 8 rows (16 bytes of outputs in 16 bits)."""
    if size % (8 * shard.tp_size):
        return shard.vocab_range(size), shard.padded_vocab_rows(size)
    return (rows := shard.shard_range(size)), len(rows)


class _Divided(ShardedModule):
    """A module that has one rank's part of its weights."""

    shard: Shard
    size: int
    """The number of the weight's rows on all ranks together."""

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of the ranks' x; without an exchange, as while a model is inspected, return x."""
        return x if self.exchange is None else self.exchange.all_reduce(x)


class _Summed(_Divided):
    """A module whose output is one rank's term of a sum."""

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return self.add_up(super().forward(*args, **options))


class _SummedLinear(_Divided):
    """A linear layer with a rank's columns, whose input has these columns alone. The bias is added to the sum."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        out = self.add_up(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class _CuttingLinear(_SummedLinear):
    """A _SummedLinear whose input has the columns of all ranks."""

    def forward(self, x: Tensor) -> Tensor:
        columns = self.shard.shard_range(x.shape[-1])
        return super().forward(x[..., columns.start : columns.stop])


class _GatheredLinear(_Divided):
    """A linear layer with a rank's rows, which concatenates all ranks' outputs."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x)
        parts = out.expand(self.shard.tp_size, *out.shape) if self.exchange is None else self.exchange.all_gather(out)
        return parts.movedim(0, -2).flatten(-2)[..., : self.size]  # padding is at the end


class _Lookup(_Divided):
    """An embedding with a rank's rows. Tokens of other rows have zeros, so the sum over ranks is exact."""

    def forward(self, ids: Tensor) -> Tensor:
        rows, _ = rows_of(self.shard, self.size)
        missing = (ids < rows.start) | (ids >= rows.stop)
        vectors = super().forward((ids - rows.start).masked_fill(missing, 0))
        return self.add_up(vectors.masked_fill(missing[..., None], 0))


class _Style(NamedTuple):
    """A style of transformers' plans. A rank has a part of each weight along `dim` (None: all of it), in `groups` runs.
    Modules become `forward` (None: they stay as they are)."""

    dim: int | None = None
    groups: int = 1
    forward: type[_Divided] | None = None


STYLES = {
    "colwise": _Style(ROWS),
    "packed_colwise": _Style(ROWS, 2),
    "colwise_gather_output": _Style(ROWS, forward=_GatheredLinear),
    "colwise_rep": _Style(ROWS, forward=_GatheredLinear),
    "rowwise": _Style(COLUMNS, forward=_SummedLinear),
    "rowwise_split_input": _Style(COLUMNS, forward=_CuttingLinear),
    "rowwise_rep": _Style(COLUMNS, forward=_CuttingLinear),
    "embedding_rowwise": _Style(ROWS, forward=_Lookup),
    "moe_tp_experts": _Style(forward=_Summed),
    "replicated_with_grad_allreduce": _Style(),
    "mla_kv_a_proj": _Style(),
    "replicate": _Style(),
}


@torch.no_grad()
def divide(model: Any, shard: Shard) -> dict[str, ParameterPart]:
    """Replace the weights of a causal language model of transformers, which is on the meta device, by a rank's parts.
    Return the part of each divided parameter by name. Raise StartupError if the class has no plan, for a style that is
    not in STYLES, and for a parameter that can't be divided."""
    name, plan, ranks = type(model).__name__, model.tp_plan or {}, shard.tp_size
    if not any("*" in pattern for pattern in plan):
        raise StartupError(f"--tp is {ranks}, and transformers {transformers.__version__} has no plan that divides the "
                           f"layers of {name}", TP_REMEDY)  # fmt: skip
    if unknown := sorted({*plan.values()} - {*STYLES}):
        raise StartupError(f"--tp is {ranks}, and transformers' plan for {name} has the style {', '.join(unknown)}, "
                           "which quire doesn't divide by", TP_REMEDY)  # fmt: skip
    parts: dict[str, ParameterPart] = {}
    shared: dict[nn.Parameter, tuple[ParameterPart | None, nn.Parameter]] = {}
    for path, module in [*model.named_modules()]:
        module_style = plan.get(_pattern(path))
        for key, parameter in [*module.named_parameters(recurse=False)]:
            style = STYLES[plan.get(_pattern(f"{path}.{key}"), module_style) or "replicate"]
            if style.forward is _Summed:
                raise StartupError(f"--tp is {ranks}, and transformers' plan for {name} doesn't divide {path}.{key}",
                                   TP_REMEDY)  # fmt: skip
            part = None
            if style.dim is not None and (parameter.dim() > 1 or style.dim == ROWS):
                size = parameter.shape[style.dim % parameter.dim()]
                padded = style.forward in (_GatheredLinear, _Lookup)
                if not padded and size % (ranks * style.groups):
                    rows = "rows" if style.dim == ROWS else "columns"
                    many = f" in {style.groups} parts" if style.groups > 1 else ""
                    raise StartupError(f"--tp is {ranks}, which doesn't divide {path}.{key} of {name}: it has {size} "
                                       f"{rows}{many}", TP_REMEDY)  # fmt: skip
                parts[f"{path}.{key}"] = part = ParameterPart(shard, style.dim, size, style.groups, padded)
            if parameter not in shared:
                local = parameter if part is None else part.read(parameter, parameter.dim())
                shared[parameter] = part, nn.Parameter(local, requires_grad=False)
            if shared[parameter][0] != part:
                raise StartupError(f"--tp is {ranks}, and transformers' plan for {name} divides {path}.{key} in two "
                                   "ways", TP_REMEDY)  # fmt: skip
            module._parameters[key] = shared[parameter][1]
        if module_style is not None:
            _change_forward(module, path, module_style, shard)
    return parts


def _change_forward(module: Any, path: str, style_name: str, shard: Shard) -> None:
    """Make a module compute by its style. Raise StartupError if the style is for another kind of module."""
    style, kind = STYLES[style_name], type(module)
    needed = nn.Embedding if style.forward is _Lookup else nn.Module if style.dim is None else nn.Linear
    # Subclasses of Linear may compute something else.
    if not issubclass(kind, needed) or (needed is nn.Linear and kind is not needed):
        raise StartupError(f"--tp is {shard.tp_size}, and {path} has the style {style_name} in transformers' plan, "
                           f"which is for {needed.__name__}: it is {kind.__name__}", TP_REMEDY)  # fmt: skip
    if style.forward is not None:
        module.shard = shard
        module.size = module.num_embeddings if style.forward is _Lookup else getattr(module, "out_features", 0)
        module.__class__ = type(kind.__name__, (style.forward, kind), {"__module__": kind.__module__})


def divided_class(model_class: type[Any], shard: Shard) -> type[Any]:
    """Return a subclass of `model_class` whose models, which must be made on the meta device, have a rank's part."""

    def make(self: Any, *args: Any, **options: Any) -> None:
        model_class.__init__(self, *args, **options)
        divide(self, shard)

    return type(model_class.__name__, (model_class,), {"__init__": make, "__module__": model_class.__module__})


def _pattern(path: str) -> str:
    """Return the name of a module or parameter with * for numbers, as in plans."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", path)
