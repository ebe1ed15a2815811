"""Weight names: the checkpoint's tensors for each parameter. No torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import nn

WeightNames = Mapping[str, str | tuple[str, ...]]
"""A parameter -> the tensors that it consists of, or a module -> the modules of which its weight and bias consist. In
the names of both, * stands for the layer's number. Where stacked projections come from fewer tensors, a tensor is named
once for each of its projections, or once if all have equally many. A name that ends with [i] is the i-th matrix of a
tensor, a stack of them."""


class WeightSource(NamedTuple):
    """A parameter consists of the rows of `tensors`, concatenated, `rows` of each. Of stacked
    projections each has the next `projections`. `transpose`: the checkpoint has them as [in, out].
    `group_rows`: the first tensor's rows are in groups, with this number of rows of each part; the parameter has the
    parts one after another. `row_order`: the tensor's row numbers, after that, in the parameter's order, if
    different."""

    tensors: tuple[str, ...]
    rows: tuple[int, ...]
    transpose: bool = False
    group_rows: tuple[int, ...] = ()
    row_order: tuple[int, ...] = ()
    projections: tuple[int, ...] = ()


def expand_weight_names(model: nn.Module, table: WeightNames, transposed: str = "") -> dict[str, WeightSource]:
    """Return each parameter's WeightSource. `transposed` is a regular expression for the names of parameters that a
    checkpoint has as [in, out]. A child with `weight_sources` of its own has these. A parameter that the table lacks is
    a KeyError: a mistake in the table."""
    sources = {}
    children: dict[str, Any] = {name: one for name, one in model.named_children() if hasattr(one, "weight_sources")}
    for name, parameter in model.named_parameters():
        if name.partition(".")[0] in children:
            continue
        named, sizes = _lookup(table, name), getattr(model.get_submodule(name.rpartition(".")[0]), "output_sizes", None)
        counts = Counter(named)
        tensors = tuple(counts)
        if not isinstance(sizes, tuple):  # equal parts
            sizes = (len(parameter) // len(tensors),) * len(tensors)
        each, rest = divmod(len(sizes), len(named))
        assert not rest, f"{name} consists of {len(sizes)} projections in {len(named)} parts"
        projections = tuple(each * count for count in counts.values())
        ends = accumulate(projections, initial=0)
        rows = tuple(sum(sizes[first:end]) for first, end in pairwise(ends))
        flip = bool(transposed) and parameter.dim() == 2 and re.search(transposed, name) is not None
        sources[name] = WeightSource(tensors, rows, flip, projections=projections)
    for child_name, child in children.items():
        sources |= {f"{child_name}.{name}": source for name, source in child.weight_sources().items()}
    return sources


def _lookup(table: WeightNames, name: str) -> tuple[str, ...]:
    """Return the tensors of a parameter: an entry for its layer's number comes before one for all layers."""
    number, (module, _, kind) = re.search(r"\d+", name), name.rpartition(".")
    for ours, suffix in ((name, ""), (module, f".{kind}")):
        entry = table.get(ours) or table.get(re.sub(r"\d+", "*", ours, count=1))
        if entry is not None:
            theirs = (entry,) if isinstance(entry, str) else entry
            return tuple((one + suffix).replace("*", number.group() if number else "*") for one in theirs)
    raise KeyError(name)


def prefixed(ours: str, theirs: str, table: WeightNames) -> WeightNames:
    """Return a part's table with the part's names before its own."""
    return {
        f"{ours}.{name}": f"{theirs}{entry}" if isinstance(entry, str) else tuple(theirs + one for one in entry)
        for name, entry in table.items()
    }


MAMBA_NAMES: WeightNames = {
    "conv_weight": "conv1d.weight", "conv_bias": "conv1d.bias", "dt_bias": "dt_proj.bias", "A_log": "A_log", "D": "D",
    **{name: name for name in ("in_proj", "x_proj", "dt_proj")}, "out": "out_proj",
    **{f"norms.{i}": f"{x}_layernorm" for i, x in enumerate(("dt", "b", "c"))},
}  # fmt: skip
"""The names of a Mamba layer's mixer (quire.layers.mamba)."""
DELTA_RULE_NAMES: WeightNames = {
    "conv_weight": "conv1d.weight", "dt_bias": "dt_bias", "A_log": "A_log", "norm": "norm", "out": "out_proj",
}  # fmt: skip
"""The names of a mixer with the gated delta rule (quire.layers.delta_rule), but for its products of the input."""
