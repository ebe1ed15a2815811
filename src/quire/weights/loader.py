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

from quire.errors import StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN
from quire.models.quantization import BLOCK, FP8Scheme, LowBitScheme
from quire.weights import low_bit
from quire.weights.awq_gptq import TENSOR_KINDS, PackedWeight
from quire.weights.checkpoint_files import tensor_files
from quire.weights.fp8 import (
    E4M3,
    MaxReduce,
    dequantize,
    expand_scales,
    find_fp8_tensors,
    get_scale,
    quantize,
    scale_attributes,
)
from quire.weights.low_bit import UNQUANTIZED_MODULES as FEW_STAY
from quire.weights.low_bit import choose_formats, low_bit_layers, set_rows
from quire.weights.mapped_files import MIN_MAPPED_BYTES, MappedFile, copy_tensor
from quire.weights.tensor_slices import TensorSlice, tensor_slices, zero_padding

if TYPE_CHECKING:
    from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight
    from quire.layers.linear import Linear
    from quire.models import Model
    from quire.weights.gguf_file import GGUFFile

FIT_REMEDY = "The checkpoint must fit its config.json"
PROJECTOR_REMEDY = (
    "A projector makes the text's rows of what a tower sees, and config.json says that there is one: put its tensors, "
    "under these names, into the folder's safetensors files, or use a checkpoint that has all three parts"
)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALE_DTYPES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)
IGNORED_SCALES = r".*\.(input_scale(_ub)?|activation_scale|output_scale|[qkv]_scale)"
"""Scales of activations, and of keys and values: neither are as a checkpoint in FP8 has them."""


class LoadTarget(NamedTuple):
    """Where a tensor goes: these rows of one of our parameters, after a transposition if the file keeps [in, out].

    `is_fp8`: it is in FP8, or is rounded to it. Then `scale` [G, N] is where its scales go; None where the rows are in
    the model's dtype and are to hold the products. `group_rows`, `row_order`: see quire.models.weight_names.
    `low_bit_format`: it is in few bits, or is rounded to them, and is this part of the weight of `layer`, if it is
    one's. `whole_parameter`: the parameter that these rows are all of. `tensor_slice`: what of the tensor they are;
    None: all of it."""

    rows: Tensor
    transpose: bool
    is_fp8: bool = False
    scale: Tensor | None = None
    group_rows: tuple[int, ...] = ()
    low_bit_format: LowBitFormat | None = None
    layer: Linear | None = None
    part_index: int = 0
    whole_parameter: Parameter | None = None
    tensor_slice: TensorSlice | None = None
    padded_rows: int = 0  # rows that a slice's are to be, with zeros behind them
    row_order: tuple[int, ...] = ()

    def arrange(self, tensor: Tensor) -> Tensor:
        """A tensor's rows as ours."""
        tensor = ungroup_rows(tensor, self.group_rows) if self.group_rows else tensor
        return tensor[list(self.row_order)] if self.row_order else tensor

    @property
    def is_column_sharded(self) -> bool:
        """They are some columns of rows that other ranks have the others of."""
        return self.tensor_slice is not None and self.tensor_slice.columns is not None


def load_weights(
    model: Model,
    folder: Path,
    progress: bool = False,
    scheme: FP8Scheme | LowBitScheme | None = None,
    max_reduce: MaxReduce | None = None,
) -> None:
    """Fill every parameter of `model`, which is not prepared yet, from the safetensors files in `folder`. `scheme`:
    what is in FP8 or in few bits there, or becomes so. Of a shard's tensors no more is read than it has, and
    `model.read_bytes` is how much was; `max_reduce`: see quire.weights.fp8. On a CPU large weights that need no change
    aren't copied, and `model.mapped` are the files' mappings that they lie in: nobody may write there.

    StartupError, naming file and tensor, for tensors that are missing, unknown, twice there or of the wrong shape or
    kind, for scales that aren't finite and above 0, and for damaged files.
    """
    targets = build_targets(model, scheme)
    device = next(parameter for parameter in model.parameters() if not parameter.is_meta).device
    fp8 = scheme if isinstance(scheme, FP8Scheme) and scheme.stored else None
    scales = {f"{name}_scale": target for name, target in targets.items() if target.is_fp8} if fp8 is not None else {}
    grouped = _find_packed_weights(model, targets, scheme)
    words = {f"{name}.{kind}": name for name in grouped for kind in TENSOR_KINDS}
    products: list[tuple[Tensor, Tensor]] = []  # rows in the model's dtype, and what they are to be multiplied by
    filled: set[str] = set()
    every = full_model(model)
    ignored = (*every.ignored_weights, IGNORED_SCALES) if fp8 is not None else every.ignored_weights
    elsewhere = {name for source in every.weight_sources().values() for name in source.tensors} - set(targets)
    wanted = {name: target for name, target in targets.items() if name.removesuffix(".weight") not in grouped}
    files = tensor_files(folder)
    model.mapped, model.read_bytes = [], 0
    zero_padding(model)
    with tqdm(total=len(targets) + len(scales), desc="Loading weights", unit=" tensors", disable=not progress) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    mapped: MappedFile | None = None
                    for key in file.keys():  # noqa: SIM118 (not a dict)
                        name = _strip_prefix(key, every.weight_prefixes)
                        name = name.removesuffix("_inv") if name.endswith("weight_scale_inv") else name
                        known = name in wanted or name in scales or name in words
                        if not known and (_weight_name(name) in elsewhere or _is_ignored(name, ignored)):
                            continue
                        _check_expected(name, key, path, known, filled)
                        if name in words:
                            tensor = grouped[words[name]].read(name.rpartition(".")[2], file, key, path)
                        else:
                            tensor = _read(file, wanted.get(name), key, path)
                        model.read_bytes += tensor.nbytes
                        if (
                            mapped is None
                            and tensor.nbytes >= MIN_MAPPED_BYTES
                            and (mapped := MappedFile.containing(tensor)) is not None
                        ):
                            model.mapped.append(mapped)
                        if name in wanted:
                            load_tensor(wanted[name], tensor, key, path, fp8 is not None, mapped, max_reduce)
                        elif name in scales:
                            assert fp8 is not None, "only it has scales"
                            products += _load_scale(scales[name], tensor, key, path, fp8.blocks)
                        if mapped is not None:
                            mapped.release()
                        filled.add(name)
                        bar.update()
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged: {error}", DOWNLOAD_AGAIN) from error
    missing = [name for name in (*wanted, *scales) if name not in filled]
    missing += [name for stored in grouped.values() for name in stored.missing_tensors]
    if missing:
        raise _missing_tensors_error(every, folder, missing)
    for rows, by in products:
        rows.copy_(dequantize(rows, by))
    for name, stored in grouped.items():
        target = targets[f"{name}.weight"]
        if target.rows.is_meta:
            set_rows(target.rows, target.layer, target.part_index, stored.to_low_bit)
        else:
            floats = stored.dequantize()
            target.rows.copy_(target.arrange(floats))


def _missing_tensors_error(model: Model, folder: Path, missing: list[str]) -> StartupError:
    """What is missing, by its names; and by what it is, where that is all that stands between a tower and its text."""
    lost = set(missing)
    eyes = {
        name: stored.tensors for name, stored in model.weight_sources().items() if name.startswith("vision_encoder.")
    }
    tower, projector = (
        {
            tensor
            for name, tensors in eyes.items()
            if name.startswith("vision_encoder.tower.") is own
            for tensor in tensors
        }
        for own in (True, False)
    )
    if projector and projector <= lost:
        has = "no vision tower and no projector" if tower <= lost else "a vision tower without its projector"
        names = join_names(name for name in missing if name in projector)
        return StartupError(f"{folder} has {has}: it lacks {names}", PROJECTOR_REMEDY)
    return StartupError(f"{folder} lacks {join_names(missing)}", FIT_REMEDY)


def full_model(model: Model) -> Model:
    """Of a stage's model that of all stages, of shapes alone; else the model itself."""
    whole: Model = getattr(model, "full_model", model)
    return whole


def _find_packed_weights(
    model: Model, targets: dict[str, LoadTarget], scheme: FP8Scheme | LowBitScheme | None
) -> dict[str, PackedWeight]:
    """The modules whose weights a checkpoint by AWQ or GPTQ has in few bits: those of its layers."""
    found: dict[str, PackedWeight] = {}
    if not isinstance(scheme, LowBitScheme) or not scheme.stored:
        return found
    for name, source in model.weight_sources().items():
        path, _, kind = name.rpartition(".")
        if (
            kind in scale_attributes(model.get_submodule(path))
            and FEW_STAY.search(path) is None
            and re.search(r"\d", path)
        ):
            for tensor in source.tensors:
                module = tensor.removesuffix(".weight")
                if scheme.covers(module, model.weight_prefixes):
                    target = targets[tensor]
                    shape = target.rows.shape if target.tensor_slice is None else target.tensor_slice.shape
                    found[module] = PackedWeight(scheme, module, *shape, target.tensor_slice)
    return found


def build_targets(
    model: Model, scheme: FP8Scheme | LowBitScheme | None, file: GGUFFile | None = None
) -> dict[str, LoadTarget]:
    """Every weight that the checkpoint, or `file`, must hold (its name without prefix) -> where it goes."""
    parameters, targets = dict(model.named_parameters()), {}
    fp8 = find_fp8_tensors(model, scheme) if isinstance(scheme, FP8Scheme) else {}
    forms, layers = (
        choose_formats(model, scheme, file) if isinstance(scheme, LowBitScheme) else {},
        low_bit_layers(model),
    )
    for name, source in model.weight_sources().items():
        parts = parameters[name].data.split(source.rows)
        scale, scales = get_scale(model, name), [None] * len(parts)
        if scale is not None:
            scales = scale.split(source.rows, 1)
        made = forms.get(name, (None,) * len(parts))
        whole = parameters[name] if len(parts) == 1 else None
        begins = accumulate(source.rows, initial=0)
        for part, (tensor, rows, cut, at) in enumerate(
            zip(source.tensors, parts, tensor_slices(model, name, source), begins)
        ):
            order = tuple(row - at for row in source.row_order[at : at + len(rows)])
            yes = fp8[name][part] if name in fp8 else False
            target = LoadTarget(
                rows, source.transpose, yes, scales[part], source.group_rows, made[part], layers.get(name), part, whole,
                row_order=order,
            )  # fmt: skip
            if cut is not None:  # its rows come in our order, and padding may be behind them
                full = whole if cut.num_rows == len(rows) else None
                own = None if target.scale is None else target.scale[:, : cut.num_rows]
                target = target._replace(
                    rows=rows[: cut.num_rows],
                    scale=own,
                    group_rows=(),
                    whole_parameter=full,
                    tensor_slice=cut,
                    padded_rows=len(rows),
                )
            targets[tensor] = target
    return targets


def _read(file: Any, target: LoadTarget | None, key: str, path: Path) -> Tensor:
    """A tensor, or what one rank has of it."""
    if target is None or target.tensor_slice is None:
        whole: Tensor = file.get_tensor(key)
        return whole
    _check_shape(tuple(file.get_slice(key).get_shape()), target.tensor_slice.shape, target.transpose, key, path)
    return target.tensor_slice.read(file, key, target.transpose)


def _check_shape(
    shape: tuple[int, ...], expected_shape: tuple[int, ...], transpose: bool, key: str, path: Path
) -> None:
    expected = expected_shape[::-1] if transpose else expected_shape
    if shape != expected:
        found = f"{short_repr(key)} in {path} has shape {short_repr(list(shape))}"
        cause = f"{found}, but config.json makes it {list(expected)}"
        raise StartupError(cause, FIT_REMEDY)


def _strip_prefix(key: str, prefixes: tuple[str, ...]) -> str:
    """A tensor's name without the prefix that some checkpoints have and others lack."""
    for prefix in prefixes:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _weight_name(name: str) -> str:
    """The weight whose scales, or words, a tensor has, or itself."""
    path, _, kind = name.rpartition(".")
    return f"{path}.weight" if kind in (*TENSOR_KINDS, "weight_scale") else name


def _is_ignored(name: str, ignored: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in ignored)


def _check_expected(name: str, key: str, path: Path, known: bool, filled: set[str]) -> None:
    if not known:
        raise StartupError(
            f"{path} holds {short_repr(key)}, which the model has no place for", "It must fit its config.json"
        )
    if name in filled:
        raise StartupError(f"{path} holds {short_repr(key)}, which was already loaded under that name", DOWNLOAD_AGAIN)


def load_tensor(
    target: LoadTarget, tensor: Tensor, key: str, path: Path, from_checkpoint: bool,
    mapped_file: MappedFile | None = None,
    max_reduce: MaxReduce | None = None,
) -> None:  # fmt: skip
    """Put a tensor there. One that `mapped_file` holds, if it is as it must be, takes the place of a whole parameter;
    else a layer's weight is copied from there, and converted, when it is prepared."""
    if tensor.dtype not in ((E4M3,) if target.is_fp8 and from_checkpoint else FLOAT_DTYPES):
        kind = str(tensor.dtype).removeprefix("torch.")
        if target.is_fp8 and from_checkpoint:
            wanted = "By its quantization_config it is in float8_e4m3fn"
        else:
            wanted = "Such weights are not supported where quantization_config in config.json doesn't say so"
        raise StartupError(f"{short_repr(key)} in {path} has dtype {kind}", wanted)
    _check_shape(tuple(tensor.shape), tuple(target.rows.shape), target.transpose, key, path)
    tensor = target.arrange(tensor)
    tensor = tensor.t() if target.transpose else tensor
    if target.low_bit_format is not None:
        if target.rows.is_meta and len(tensor) < target.padded_rows:
            tensor = F.pad(tensor, (0, 0, 0, target.padded_rows - len(tensor)))
        set_rows(
            target.rows,
            target.layer,
            target.part_index,
            partial(_quantize, tensor, target.low_bit_format, f"{short_repr(key)} in {path}"),
        )
        return
    if not target.is_fp8 or from_checkpoint:
        if mapped_file is None or not mapped_file.contains(tensor):
            copy_tensor(tensor, target.rows)
        elif target.whole_parameter is not None and tensor.dtype == target.rows.dtype:
            target.whole_parameter.data = tensor
        elif target.layer is not None and not target.is_fp8:
            target.layer.deferred_loads.append(partial(mapped_file.copy_and_release, tensor, target.rows))
        else:
            copy_tensor(tensor, target.rows)
        return
    numbers, scale = quantize(tensor, max_reduce if target.is_column_sharded else None)
    if not scale.isfinite().all():
        raise StartupError(f"{short_repr(key)} in {path} has a value that isn't finite", "It can't be rounded to FP8")
    if target.scale is None:
        target.rows.copy_(dequantize(numbers, scale[None]))
    else:
        target.rows.copy_(numbers)
        target.scale.copy_(scale[None])


def _quantize(tensor: Tensor, low_bit_format: LowBitFormat, tensor_name: str) -> LowBitWeight:
    """A tensor in few bits. Its scales aren't finite where one of its values isn't."""
    numbers = low_bit.quantize(tensor, low_bit_format)
    if not numbers.d.isfinite().all():
        raise StartupError(f"{tensor_name} has a value that isn't finite, or too large", "It can't be rounded")
    return numbers


def _load_scale(
    target: LoadTarget, tensor: Tensor, key: str, path: Path, in_blocks: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Fill the scales of `target`; if it has none, yield its rows and their scales."""
    if tensor.dtype not in SCALE_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise StartupError(f"{short_repr(key)} in {path} has dtype {kind}", "Scales must be floating-point numbers")
    whole = target.rows.shape if target.tensor_slice is None else target.tensor_slice.shape
    scale = expand_scales(tensor, *whole, in_blocks)
    if scale is None:
        whose = f"a weight {list(whole)}, {'in blocks' if in_blocks else 'as a whole or by row'}"
        raise StartupError(
            f"{short_repr(key)} in {path} has shape {short_repr(list(tensor.shape))}, for {whose}", FIT_REMEDY
        )
    wrong = ~(scale.isfinite() & (scale > 0))
    if wrong.any():
        raise StartupError(f"{short_repr(key)} in {path} has the scale {scale[wrong][0].item():g}",
                           "Scales must be finite and above 0")  # fmt: skip
    if target.tensor_slice is not None:
        scale = _slice_scale(scale, target.tensor_slice, key)
    scale = target.arrange(scale.t()).t()
    if target.scale is None:
        yield target.rows, scale
    else:
        target.scale.copy_(scale)


def _slice_scale(scale: Tensor, tensor_slice: TensorSlice, key: str) -> Tensor:
    """Of the scales [G, N] of a whole weight those of a slice of it."""
    scale = torch.cat([scale[:, run.start : run.stop] for run in tensor_slice.row_ranges], dim=1)
    if tensor_slice.columns is None or len(scale) == 1:
        return scale
    if tensor_slice.columns.start % BLOCK or tensor_slice.columns.stop % BLOCK:
        raise StartupError(
            f"a rank would have columns {tensor_slice.columns.start} to {tensor_slice.columns.stop - 1} of the "
            f"weight of {short_repr(key)}, "
            f"where {BLOCK} share a scale",
            "Use a smaller --tp",
        )
    return scale[tensor_slice.columns.start // BLOCK : tensor_slice.columns.stop // BLOCK]


def ungroup_rows(tensor: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Rows that lie in groups of so many of each part -> those of one part below those of another."""
    groups = tensor.unflatten(0, (-1, sum(parts)))
    return torch.cat([part.flatten(0, 1) for part in groups.split(parts, 1)])


def join_names(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - count} more tensors" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
