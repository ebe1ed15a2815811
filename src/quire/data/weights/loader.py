"""Tensors of a checkpoint into a model's parameters, each exactly once, converted on the way: to the model's dtype, to
FP8 or to few bits. Those that are quantised have scales beside them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn import Parameter
from tqdm import tqdm

from quire.data.models.quantization import BLOCK, FP8, Few
from quire.data.weights import few
from quire.data.weights.checkpoint import tensor_files
from quire.data.weights.few import STAY as FEW_STAY
from quire.data.weights.few import forms_of, layers_of, put
from quire.data.weights.fp8 import E4M3, Most, by_rows, covered, places, rounded, scale_of, scaled
from quire.data.weights.grouped import KINDS, Stored
from quire.data.weights.mapped import WORTH, Mapped, copy
from quire.data.weights.slices import Slice, blank, slices_of
from quire.errors import StartupError, shown
from quire.files import AGAIN

if TYPE_CHECKING:
    from quire.data.kernels.cpu.quantised import Form, Numbers
    from quire.data.layers.linear import Linear
    from quire.data.models import Model
    from quire.data.weights.gguf import GGUF

FIT = "The checkpoint must fit its config.json"
PROJECTOR = (
    "A projector makes the text's rows of what a tower sees, and config.json says that there is one: put its tensors, "
    "under these names, into the folder's safetensors files, or use a checkpoint that has all three parts"
)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = (*FLOATS, torch.float8_e8m0fnu)
UNREAD = r".*\.(input_scale(_ub)?|activation_scale|output_scale|[qkv]_scale)"
"""Scales of activations, and of keys and values: neither are as a checkpoint in FP8 has them."""


class Target(NamedTuple):
    """Where a tensor goes: these rows of one of our parameters, after a transposition if the file keeps [in, out].

    `fp8`: it is in FP8, or is rounded to it. Then `scale` [G, N] is where its scales go; None where the rows are in
    the model's dtype and are to hold the products. `grouped`, `order`: see quire.data.models.names. `form`: it is in
    few bits, or is rounded to them, and is this part of the weight of `layer`, if it is one's. `whole`: the parameter
    that these rows are all of. `slice`: what of the tensor they are; None: all of it."""

    rows: Tensor
    transpose: bool
    fp8: bool = False
    scale: Tensor | None = None
    grouped: tuple[int, ...] = ()
    form: Form | None = None
    layer: Linear | None = None
    part: int = 0
    whole: Parameter | None = None
    slice: Slice | None = None
    room: int = 0  # rows that a slice's are to be, with zeros behind them
    order: tuple[int, ...] = ()

    def arranged(self, tensor: Tensor) -> Tensor:
        """A tensor's rows as ours."""
        tensor = ungrouped(tensor, self.grouped) if self.grouped else tensor
        return tensor[list(self.order)] if self.order else tensor

    @property
    def divided(self) -> bool:
        """They are some columns of rows that other ranks have the others of."""
        return self.slice is not None and self.slice.columns is not None


def load(
    model: Model, folder: Path, progress: bool = False, scheme: FP8 | Few | None = None, most: Most | None = None
) -> None:
    """Fill every parameter of `model`, which is not prepared yet, from the safetensors files in `folder`. `scheme`:
    what is in FP8 or in few bits there, or becomes so. Of a shard's tensors no more is read than it has, and
    `model.read_bytes` is how much was; `most`: see quire.data.weights.fp8. On a CPU large weights that need no change
    aren't copied, and `model.mapped` are the files' mappings that they lie in: nobody may write there.

    StartupError, naming file and tensor, for tensors that are missing, unknown, twice there or of the wrong shape or
    kind, for scales that aren't finite and above 0, and for damaged files.
    """
    targets = targets_of(model, scheme)
    device = next(parameter for parameter in model.parameters() if not parameter.is_meta).device
    fp8 = scheme if isinstance(scheme, FP8) and scheme.stored else None
    scales = {f"{name}_scale": target for name, target in targets.items() if target.fp8} if fp8 is not None else {}
    grouped = _grouped(model, targets, scheme)
    words = {f"{name}.{kind}": name for name in grouped for kind in KINDS}
    products: list[tuple[Tensor, Tensor]] = []  # rows in the model's dtype, and what they are to be multiplied by
    filled: set[str] = set()
    every = undivided(model)
    ignored = (*every.ignored, UNREAD) if fp8 is not None else every.ignored
    elsewhere = {name for source in every.names().values() for name in source.tensors} - set(targets)
    wanted = {name: target for name, target in targets.items() if name.removesuffix(".weight") not in grouped}
    files = tensor_files(folder)
    model.mapped, model.read_bytes = [], 0
    blank(model)
    with tqdm(total=len(targets) + len(scales), desc="Loading weights", unit=" tensors", disable=not progress) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    mapped: Mapped | None = None
                    for key in file.keys():  # noqa: SIM118 (not a dict)
                        name = _plain(key, every.prefixes)
                        name = name.removesuffix("_inv") if name.endswith("weight_scale_inv") else name
                        known = name in wanted or name in scales or name in words
                        if not known and (_beside(name) in elsewhere or _ignorable(name, ignored)):
                            continue
                        _check_new(name, key, path, known, filled)
                        if name in words:
                            tensor = grouped[words[name]].read(name.rpartition(".")[2], file, key, path)
                        else:
                            tensor = _read(file, wanted.get(name), key, path)
                        model.read_bytes += tensor.nbytes
                        if mapped is None and tensor.nbytes >= WORTH and (mapped := Mapped.of(tensor)) is not None:
                            model.mapped.append(mapped)
                        if name in wanted:
                            fill(wanted[name], tensor, key, path, fp8 is not None, mapped, most)
                        elif name in scales:
                            assert fp8 is not None, "only it has scales"
                            products += _scale(scales[name], tensor, key, path, fp8.blocks)
                        if mapped is not None:
                            mapped.release()
                        filled.add(name)
                        bar.update()
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged: {error}", AGAIN) from error
    missing = [name for name in (*wanted, *scales) if name not in filled]
    missing += [name for stored in grouped.values() for name in stored.missing]
    if missing:
        raise _incomplete(every, folder, missing)
    for rows, by in products:
        rows.copy_(scaled(rows, by))
    for name, stored in grouped.items():
        target = targets[f"{name}.weight"]
        if target.rows.is_meta:
            put(target.rows, target.layer, target.part, stored.numbers)
        else:
            floats = stored.floats()
            target.rows.copy_(target.arranged(floats))


def _incomplete(model: Model, folder: Path, missing: list[str]) -> StartupError:
    """What is missing, by its names; and by what it is, where that is all that stands between a tower and its text."""
    lost = set(missing)
    eyes = {name: stored.tensors for name, stored in model.names().items() if name.startswith("eyes.")}
    tower, projector = (
        {tensor for name, tensors in eyes.items() if name.startswith("eyes.tower.") is own for tensor in tensors}
        for own in (True, False)
    )
    if projector and projector <= lost:
        has = "no vision tower and no projector" if tower <= lost else "a vision tower without its projector"
        names = some(name for name in missing if name in projector)
        return StartupError(f"{folder} has {has}: it lacks {names}", PROJECTOR)
    return StartupError(f"{folder} lacks {some(missing)}", FIT)


def undivided(model: Model) -> Model:
    """Of a stage's model that of all stages, of shapes alone; else the model itself."""
    whole: Model = getattr(model, "undivided", model)
    return whole


def _grouped(model: Model, targets: dict[str, Target], scheme: FP8 | Few | None) -> dict[str, Stored]:
    """The modules whose weights a checkpoint by AWQ or GPTQ has in few bits: those of its layers."""
    found: dict[str, Stored] = {}
    if not isinstance(scheme, Few) or not scheme.stored:
        return found
    for name, source in model.names().items():
        path, _, kind = name.rpartition(".")
        if kind in places(model.get_submodule(path)) and FEW_STAY.search(path) is None and re.search(r"\d", path):
            for tensor in source.tensors:
                module = tensor.removesuffix(".weight")
                if scheme.covers(module, model.prefixes):
                    target = targets[tensor]
                    shape = target.rows.shape if target.slice is None else target.slice.shape
                    found[module] = Stored(scheme, module, *shape, target.slice)
    return found


def targets_of(model: Model, scheme: FP8 | Few | None, file: GGUF | None = None) -> dict[str, Target]:
    """Every weight that the checkpoint, or `file`, must hold (its name without prefix) -> where it goes."""
    parameters, targets = dict(model.named_parameters()), {}
    fp8 = covered(model, scheme) if isinstance(scheme, FP8) else {}
    forms, layers = forms_of(model, scheme, file) if isinstance(scheme, Few) else {}, layers_of(model)
    for name, source in model.names().items():
        parts = parameters[name].data.split(source.rows)
        scale, scales = scale_of(model, name), [None] * len(parts)
        if scale is not None:
            scales = scale.split(source.rows, 1)
        made = forms.get(name, (None,) * len(parts))
        whole = parameters[name] if len(parts) == 1 else None
        begins = accumulate(source.rows, initial=0)
        for part, (tensor, rows, cut, at) in enumerate(
            zip(source.tensors, parts, slices_of(model, name, source), begins)
        ):
            order = tuple(row - at for row in source.order[at : at + len(rows)])
            yes = fp8[name][part] if name in fp8 else False
            target = Target(
                rows, source.transpose, yes, scales[part], source.grouped, made[part], layers.get(name), part, whole,
                order=order,
            )  # fmt: skip
            if cut is not None:  # its rows come in our order, and padding may be behind them
                full = whole if cut.count == len(rows) else None
                own = None if target.scale is None else target.scale[:, : cut.count]
                target = target._replace(
                    rows=rows[: cut.count], scale=own, grouped=(), whole=full, slice=cut, room=len(rows)
                )
            targets[tensor] = target
    return targets


def _read(file: Any, target: Target | None, key: str, path: Path) -> Tensor:
    """A tensor, or what one rank has of it."""
    if target is None or target.slice is None:
        whole: Tensor = file.get_tensor(key)
        return whole
    _check_shape(tuple(file.get_slice(key).get_shape()), target.slice.shape, target.transpose, key, path)
    return target.slice.read(file, key, target.transpose)


def _check_shape(found: tuple[int, ...], ours: tuple[int, ...], transpose: bool, key: str, path: Path) -> None:
    expected = ours[::-1] if transpose else ours
    if found != expected:
        cause = f"{shown(key)} in {path} has shape {shown(list(found))}, but config.json makes it {list(expected)}"
        raise StartupError(cause, FIT)


def _plain(key: str, prefixes: tuple[str, ...]) -> str:
    """A tensor's name without the prefix that some checkpoints have and others lack."""
    for prefix in prefixes:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _beside(name: str) -> str:
    """The weight whose scales, or words, a tensor has, or itself."""
    path, _, kind = name.rpartition(".")
    return f"{path}.weight" if kind in (*KINDS, "weight_scale") else name


def _ignorable(name: str, ignored: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in ignored)


def _check_new(name: str, key: str, path: Path, known: bool, filled: set[str]) -> None:
    if not known:
        raise StartupError(
            f"{path} holds {shown(key)}, which the model has no place for", "It must fit its config.json"
        )
    if name in filled:
        raise StartupError(f"{path} holds {shown(key)}, which was already loaded under that name", AGAIN)


def fill(
    target: Target, tensor: Tensor, key: str, path: Path, stored: bool, mapped: Mapped | None = None,
    most: Most | None = None,
) -> None:  # fmt: skip
    """Put a tensor there. One that `mapped` holds, if it is as it must be, takes the place of a whole parameter; else a
    layer's weight is copied from there, and converted, when it is prepared."""
    if tensor.dtype not in ((E4M3,) if target.fp8 and stored else FLOATS):
        kind = str(tensor.dtype).removeprefix("torch.")
        if target.fp8 and stored:
            wanted = "By its quantization_config it is in float8_e4m3fn"
        else:
            wanted = "Such weights are not supported where quantization_config in config.json doesn't say so"
        raise StartupError(f"{shown(key)} in {path} has dtype {kind}", wanted)
    _check_shape(tuple(tensor.shape), tuple(target.rows.shape), target.transpose, key, path)
    tensor = target.arranged(tensor)
    tensor = tensor.t() if target.transpose else tensor
    if target.form is not None:
        if target.rows.is_meta and len(tensor) < target.room:
            tensor = F.pad(tensor, (0, 0, 0, target.room - len(tensor)))
        put(target.rows, target.layer, target.part, partial(_few, tensor, target.form, f"{shown(key)} in {path}"))
        return
    if not target.fp8 or stored:
        if mapped is None or not mapped.lies(tensor):
            copy(tensor, target.rows)
        elif target.whole is not None and tensor.dtype == target.rows.dtype:
            target.whole.data = tensor
        elif target.layer is not None and not target.fp8:
            target.layer.later.append(partial(mapped.copy, tensor, target.rows))
        else:
            copy(tensor, target.rows)
        return
    numbers, scale = rounded(tensor, most if target.divided else None)
    if not scale.isfinite().all():
        raise StartupError(f"{shown(key)} in {path} has a value that isn't finite", "It can't be rounded to FP8")
    if target.scale is None:
        target.rows.copy_(scaled(numbers, scale[None]))
    else:
        target.rows.copy_(numbers)
        target.scale.copy_(scale[None])


def _few(tensor: Tensor, form: Form, called: str) -> Numbers:
    """A tensor in few bits. Its scales aren't finite where one of its values isn't."""
    numbers = few.rounded(tensor, form)
    if not numbers.d.isfinite().all():
        raise StartupError(f"{called} has a value that isn't finite, or too large", "It can't be rounded")
    return numbers


def _scale(target: Target, given: Tensor, key: str, path: Path, blocks: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Fill the scales of `target`; if it has none, yield its rows and their scales."""
    if given.dtype not in SCALES:
        kind = str(given.dtype).removeprefix("torch.")
        raise StartupError(f"{shown(key)} in {path} has dtype {kind}", "Scales must be floating-point numbers")
    whole = target.rows.shape if target.slice is None else target.slice.shape
    scale = by_rows(given, *whole, blocks)
    if scale is None:
        whose = f"a weight {list(whole)}, {'in blocks' if blocks else 'as a whole or by row'}"
        raise StartupError(f"{shown(key)} in {path} has shape {shown(list(given.shape))}, for {whose}", FIT)
    wrong = ~(scale.isfinite() & (scale > 0))
    if wrong.any():
        raise StartupError(f"{shown(key)} in {path} has the scale {scale[wrong][0].item():g}",
                           "Scales must be finite and above 0")  # fmt: skip
    if target.slice is not None:
        scale = _own(scale, target.slice, key)
    scale = target.arranged(scale.t()).t()
    if target.scale is None:
        yield target.rows, scale
    else:
        target.scale.copy_(scale)


def _own(scale: Tensor, cut: Slice, key: str) -> Tensor:
    """Of the scales [G, N] of a whole weight those of a slice of it."""
    scale = torch.cat([scale[:, run.start : run.stop] for run in cut.runs], dim=1)
    if cut.columns is None or len(scale) == 1:
        return scale
    if cut.columns.start % BLOCK or cut.columns.stop % BLOCK:
        raise StartupError(
            f"a rank would have columns {cut.columns.start} to {cut.columns.stop - 1} of the weight of {shown(key)}, "
            f"where {BLOCK} share a scale",
            "Use a smaller --tp",
        )
    return scale[cut.columns.start // BLOCK : cut.columns.stop // BLOCK]


def ungrouped(tensor: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Rows that lie in groups of so many of each part -> those of one part below those of another."""
    groups = tensor.unflatten(0, (-1, sum(parts)))
    return torch.cat([part.flatten(0, 1) for part in groups.split(parts, 1)])


def some(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - count} more tensors" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
