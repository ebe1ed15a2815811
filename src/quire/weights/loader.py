"""Loads the tensors of a checkpoint into a model's parameters, each exactly once, converted to the model's dtype, to
FP8 or to few bits. Quantised tensors come with scales."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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
from quire.layers.prepare import MappedWeights
from quire.models.quantization import BLOCK, MXFP4, FP8Scheme, LowBitScheme, covers
from quire.weights import low_bit
from quire.weights.awq_gptq import TENSOR_KINDS, PackedWeight
from quire.weights.checkpoint_files import FIT_REMEDY, tensor_files
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
from quire.weights.low_bit import MXFP4_FORMAT, choose_formats, from_mxfp4, low_bit_layers, set_rows
from quire.weights.low_bit import UNQUANTIZED_MODULES as LOW_BIT_UNQUANTIZED
from quire.weights.mapped_files import MIN_MAPPED_BYTES, MappedFile, copy_tensor
from quire.weights.stacked_tensors import MXFP4_GROUP, MixedExpertsFile, UnstackedFile, scale_files
from quire.weights.tensor_slices import TensorSlice, tensor_slices, zero_padding

if TYPE_CHECKING:
    from quire.kernels.cpu.low_bit_linear import LowBitFormat, LowBitWeight
    from quire.layers.linear import Linear
    from quire.models import Model
    from quire.weights.gguf_file import GGUFFile

PROJECTOR_REMEDY = (
    "config.json has a projector, which maps the vision tower's features to the text model's rows: put its tensors, "
    "under these names, into the folder's safetensors files, or use a checkpoint that has all three parts"
)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALE_DTYPES = (*FLOAT_DTYPES, torch.float8_e8m0fnu)
IGNORED_SCALES = r".*\.(input_scale(_ub)?|activation_scale|output_scale|[qkv]_scale)"
"""Scales of activations, and of keys and values, which quire does not use from FP8 checkpoints."""


class LoadTarget(NamedTuple):
    """The destination of a tensor: `rows` of a parameter, transposed if the file has [in, out].

    `is_fp8`: the tensor is in FP8, or is rounded to it. Its scales go to `scale` [G, N]; if that is None, the rows are
    in the model's dtype and get the products. `group_rows`, `row_order`: see quire.models.weight_names.
    `low_bit_format`: the tensor is in few bits, or is rounded to them; it is part `part_index` of the weight of
    `layer`, if any. `whole_parameter`: the parameter, if it consists of these rows alone. `tensor_slice`: the slice of
    the tensor that is loaded; None: all of it."""

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
    padded_rows: int = 0  # the number of rows to which a slice is padded with zeros
    row_order: tuple[int, ...] = ()

    def arrange(self, tensor: Tensor) -> Tensor:
        """Return a tensor with its rows in the parameter's order."""
        tensor = ungroup_rows(tensor, self.group_rows) if self.group_rows else tensor
        return tensor[list(self.row_order)] if self.row_order else tensor

    @property
    def is_column_sharded(self) -> bool:
        """Return True if other ranks have the other columns of these rows."""
        return self.tensor_slice is not None and self.tensor_slice.columns is not None


class LoadedFiles(NamedTuple):
    """The files of a load. Weights may lie in the `mapped` ones: these must not be written to, and `prepare` releases
    their pages. `read_bytes` were read from safetensors files."""

    mapped: tuple[MappedWeights, ...]
    read_bytes: int


def load_weights(
    model: Model,
    folder: Path,
    progress: bool = False,
    scheme: FP8Scheme | LowBitScheme | None = None,
    max_reduce: MaxReduce | None = None,
    full_model: Model | None = None,
) -> LoadedFiles:
    """Load every parameter of `model`, which is not prepared yet, from the safetensors files in `folder`.

    `scheme`: the weights that are in FP8 or in few bits, or become so; `max_reduce`: see quire.weights.fp8. A shard
    reads only its own part of the tensors. For the model of a pipeline stage, `full_model` is the model of all stages,
    without weights. On a CPU large weights that need no conversion are not copied, but stay in the mapped files.

    Raise StartupError, naming file and tensor, for tensors that are missing, unknown, duplicate or of the wrong shape
    or kind, for numbers that aren't finite, for scales that aren't finite and above 0, and for damaged files.
    """
    targets = build_targets(model, scheme)
    device = next(parameter for parameter in model.parameters() if not parameter.is_meta).device
    fp8 = scheme if isinstance(scheme, FP8Scheme) and scheme.stored else None
    scales = {f"{name}_scale": target for name, target in targets.items() if target.is_fp8} if fp8 is not None else {}
    grouped = _find_packed_weights(model, targets, scheme)
    words = {f"{name}.{kind}": name for name in grouped for kind in TENSOR_KINDS}
    products: list[tuple[Tensor, Tensor]] = []  # rows in the model's dtype, and the scales to multiply them by
    filled: set[str] = set()
    every = model if full_model is None else full_model
    ignored = (*every.ignored_weights, IGNORED_SCALES) if fp8 is not None else every.ignored_weights
    elsewhere = {name for source in every.weight_sources().values() for name in source.tensors} - set(targets)
    wanted = {name: target for name, target in targets.items() if name.removesuffix(".weight") not in grouped}
    stacked = {name.partition("[")[0] for name in (*targets, *elsewhere) if name.endswith("]")}
    files = tensor_files(folder)
    mappings, read_bytes, experts = list[MappedFile](), 0, getattr(every, "num_stacked_experts", 0)
    scales_of_experts = scale_files(files) if experts else {}
    zero_padding(model)
    with tqdm(total=len(targets) + len(scales), desc="Loading weights", unit=" tensors", disable=not progress) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt", device=str(device)) as opened:
                    file = (
                        MixedExpertsFile(opened, path, experts, scales_of_experts, str(device))
                        if experts
                        else UnstackedFile(opened, lambda key: _strip_prefix(key, every.weight_prefixes) in stacked)
                    )
                    mapped: MappedFile | None = None
                    for key in file.names:
                        name = _strip_prefix(key, every.weight_prefixes)
                        name = name.removesuffix("_inv") if name.endswith("weight_scale_inv") else name
                        known = name in wanted or name in scales or name in words
                        if not known and (_weight_name(name) in elsewhere or _is_ignored(name, ignored)):
                            continue
                        _check_expected(name, key, path, known, filled)
                        target = wanted.get(name)
                        if (
                            target is not None
                            and target.low_bit_format == MXFP4_FORMAT
                            and (pair := _read_mxfp4(file, target, key, path)) is not None
                        ):
                            read_bytes += sum(tensor.nbytes for tensor in pair)
                            set_rows(target.rows, target.layer, target.part_index, partial(from_mxfp4, *pair, key))
                            filled.add(name)
                            bar.update()
                            continue
                        if name in words:
                            tensor = grouped[words[name]].read(name.rpartition(".")[2], file, key, path)
                        else:
                            tensor = _read(file, wanted.get(name), key, path)
                        read_bytes += tensor.nbytes
                        if (
                            mapped is None
                            and tensor.nbytes >= MIN_MAPPED_BYTES
                            and (mapped := MappedFile.containing(tensor)) is not None
                        ):
                            mappings.append(mapped)
                        if name in wanted:
                            load_tensor(wanted[name], tensor, key, path, fp8 is not None, mapped, max_reduce)
                        elif name in scales:
                            assert fp8 is not None, "only FP8 checkpoints have scales"
                            products += _load_scale(scales[name], tensor, key, path, fp8.blocks)
                        if mapped is not None:
                            mapped.release()
                        filled.add(name)
                        bar.update()
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged: {error}", DOWNLOAD_AGAIN) from error
    missing = [name for name in (*wanted, *scales) if name not in filled]
    missing += [name for packed in grouped.values() for name in packed.missing_tensors]
    if missing:
        raise _missing_tensors_error(every, _files_text(folder, files), missing)
    for rows, scale in products:
        rows.copy_(dequantize(rows, scale))
    for name, packed in grouped.items():
        target = targets[f"{name}.weight"]
        if target.rows.is_meta:
            set_rows(target.rows, target.layer, target.part_index, packed.to_low_bit)
        else:
            target.rows.copy_(target.arrange(packed.dequantize()))
    return LoadedFiles(tuple(mappings), read_bytes)


def load_draft_ids(folder: Path, count: int, vocab_size: int) -> Tensor:
    """Return the tokens [count] that an EAGLE-3 head drafts: each is its index plus the number in the tensor `d2t`.
    Raise StartupError if that has another shape or dtype, or names no token of `vocab_size`, or one twice."""
    files = tensor_files(folder)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for key in {"d2t", "model.d2t"} & {*file.keys()}:
                offsets: Tensor = file.get_tensor(key)
                _check_shape(tuple(offsets.shape), (count,), False, key, path)
                if offsets.dtype not in (torch.int64, torch.int32):
                    kind = str(offsets.dtype).removeprefix("torch.")
                    raise StartupError(f"{key} in {path} has dtype {kind}", "It must hold integers")
                ids = offsets.long() + torch.arange(count)
                if not count or not 0 <= (worst := int(ids.max() if ids.min() >= 0 else ids.min())) < vocab_size:
                    raise StartupError(f"{key} in {path} names the token {worst}, and there are {vocab_size}",
                                       FIT_REMEDY)  # fmt: skip
                if len(ids.unique()) < count:
                    raise StartupError(f"{key} in {path} names a token twice", FIT_REMEDY)
                return ids
    raise StartupError(f"{_files_text(folder, files)} lacks d2t", FIT_REMEDY)


def _files_text(folder: Path, files: Sequence[Path]) -> str:
    """Return the name of a checkpoint's file; of its folder if there are several."""
    return str(files[0]) if len(files) == 1 else f"{folder} ({len(files)} safetensors files)"


def _missing_tensors_error(model: Model, checkpoint: str, missing: list[str]) -> StartupError:
    """Return the error that names the missing tensors, with its own text if a vision encoder's projector is missing."""
    missing_set = set(missing)
    tower, projector = set[str](), set[str]()
    for name, source in model.weight_sources().items():
        if name.startswith("vision_encoder."):
            (tower if name.startswith("vision_encoder.tower.") else projector).update(source.tensors)
    if projector and projector <= missing_set:
        has = "no vision tower and no projector" if tower <= missing_set else "a vision tower without its projector"
        names = join_names(name for name in missing if name in projector)
        return StartupError(f"{checkpoint} has {has}: it lacks {names}", PROJECTOR_REMEDY)
    return StartupError(f"{checkpoint} lacks {join_names(missing)}", FIT_REMEDY)


def _find_packed_weights(
    model: Model, targets: dict[str, LoadTarget], scheme: FP8Scheme | LowBitScheme | None
) -> dict[str, PackedWeight]:
    """Return the modules, all within layers, whose weights an AWQ or GPTQ checkpoint has packed."""
    packed: dict[str, PackedWeight] = {}
    if not isinstance(scheme, LowBitScheme) or scheme.stored in ("", MXFP4):
        return packed
    for name, source in model.weight_sources().items():
        path, _, kind = name.rpartition(".")
        if (
            kind in scale_attributes(model.get_submodule(path))
            and LOW_BIT_UNQUANTIZED.search(path) is None
            and re.search(r"\d", path)
        ):
            for tensor in source.tensors:
                module = tensor.removesuffix(".weight")
                if covers(scheme, module, model.weight_prefixes):
                    if (target := targets.get(tensor)) is None:  # an expert of another rank
                        continue
                    rows, columns = target.rows.shape if target.tensor_slice is None else target.tensor_slice.shape
                    packed[module] = PackedWeight(scheme, module, rows, columns, target.tensor_slice)
    return packed


def build_targets(
    model: Model, scheme: FP8Scheme | LowBitScheme | None, file: GGUFFile | None = None
) -> dict[str, LoadTarget]:
    """Return the target of every weight that the checkpoint, or `file`, must have, by its name without prefix; of
    experts, those of this rank alone."""
    parameters, targets = dict(model.named_parameters()), {}
    fp8 = find_fp8_tensors(model, scheme) if isinstance(scheme, FP8Scheme) else {}
    formats = choose_formats(model, scheme, file) if isinstance(scheme, LowBitScheme) else {}
    layers = low_bit_layers(model)
    for name, source in model.weight_sources().items():
        sizes = list(source.rows)
        parts = torch.split(parameters[name].data, sizes)
        scale = get_scale(model, name)
        scales: Sequence[Tensor | None] = [None] * len(parts) if scale is None else torch.split(scale, sizes, 1)
        part_formats: Sequence[LowBitFormat | None] = formats.get(name, (None,) * len(parts))
        whole = parameters[name] if len(parts) == 1 else None
        starts = accumulate(source.rows, initial=0)
        for part, (tensor, rows, tensor_slice, start) in enumerate(
            zip(source.tensors, parts, tensor_slices(model, name, source), starts)
        ):
            if not len(rows):
                continue
            order = tuple(row - start for row in source.row_order[start : start + len(rows)])
            is_fp8 = fp8[name][part] if name in fp8 else False
            groups = () if part else source.group_rows
            target = LoadTarget(
                rows, source.transpose, is_fp8, scales[part], groups, part_formats[part], layers.get(name), part, whole,
                row_order=order,
            )  # fmt: skip
            if tensor_slice is not None:  # it is read in the parameter's order, and padding may follow
                count = tensor_slice.num_rows
                target = target._replace(
                    rows=rows[:count],
                    scale=None if target.scale is None else target.scale[:, :count],
                    group_rows=(),
                    whole_parameter=whole if count == len(rows) else None,
                    tensor_slice=tensor_slice,
                    padded_rows=len(rows),
                )
            targets[tensor] = target
    return targets


def _read(file: Any, target: LoadTarget | None, key: str, path: Path) -> Tensor:
    """Read a tensor, or one rank's slice of it; a scalar as [1]."""
    if target is None or target.tensor_slice is None:
        whole: Tensor = file.get_tensor(key)
        return whole if whole.dim() else whole.view(1)
    _check_shape(tuple(file.get_slice(key).get_shape()), target.tensor_slice.shape, target.transpose, key, path)
    return target.tensor_slice.read(file, key, target.transpose)


def _read_mxfp4(file: Any, target: LoadTarget, key: str, path: Path) -> tuple[Tensor, Tensor] | None:
    """Read an expert's weight in MXFP4, or a rank's slice of it, as blocks and scales. None if it is to be expanded."""
    if not target.rows.is_meta or not isinstance(file, MixedExpertsFile):
        return None
    part, pair = target.tensor_slice, file.get_blocks(key)
    if pair is None:
        raise StartupError(f"{short_repr(key)} in {path} isn't in MXFP4, as quantization_config says", FIT_REMEDY)
    (rows, groups), shape = pair[1].shape, target.rows.shape if part is None else part.shape
    _check_shape((rows, groups * MXFP4_GROUP), tuple(shape), False, key, path)
    ranges, columns = ((range(rows),), None) if part is None else (part.row_ranges, part.columns)
    own = slice(None) if columns is None else slice(columns.start // MXFP4_GROUP, columns.stop // MXFP4_GROUP)
    blocks, scales = (torch.cat([x[run.start : run.stop, own] for run in ranges]) for x in pair)
    return blocks, scales


def _check_shape(
    shape: tuple[int, ...], expected_shape: tuple[int, ...], transpose: bool, key: str, path: Path
) -> None:
    expected = expected_shape[::-1] if transpose else expected_shape
    if shape != expected:
        actual = f"{short_repr(key)} in {path} has shape {short_repr(list(shape))}"
        cause = f"{actual}, but config.json makes it {list(expected)}"
        raise StartupError(cause, FIT_REMEDY)


def _strip_prefix(key: str, prefixes: tuple[str, ...]) -> str:
    """Return a tensor's name without a prefix that some checkpoints have."""
    for prefix in prefixes:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _weight_name(name: str) -> str:
    """Return the name of the weight to which a tensor of scales or packed words belongs; else the name itself."""
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
    """Load a tensor into its target. If it is in `mapped_file` and needs no conversion, it becomes the data of a whole
    parameter; other weights of a layer are copied from there, and converted, when the layer is prepared."""
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
    if target.low_bit_format is not None and (target.rows.is_meta or target.low_bit_format != MXFP4_FORMAT):
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
        name = f"{short_repr(key)} in {path}"
        if mapped_file is None or not mapped_file.contains(tensor):
            _copy_finite(tensor, target.rows, name)
        elif target.whole_parameter is not None and tensor.dtype == target.rows.dtype:
            check_finite(tensor, name)
            target.whole_parameter.data = tensor
        elif target.layer is not None and not target.is_fp8:
            load = partial(_copy_and_release, mapped_file, tensor, target.rows, name)
            target.layer.deferred_loads.append(load)
        else:
            _copy_finite(tensor, target.rows, name)
        return
    numbers, scale = quantize(tensor, max_reduce if target.is_column_sharded else None)
    if not scale.isfinite().all():
        raise StartupError(f"{short_repr(key)} in {path} has a value that isn't finite", "It can't be rounded to FP8")
    if target.scale is None:
        target.rows.copy_(dequantize(numbers, scale[None]))
    else:
        target.rows.copy_(numbers)
        target.scale.copy_(scale[None])


def _copy_finite(tensor: Tensor, to: Tensor, tensor_name: str) -> None:
    """Copy a tensor, converted. Raise StartupError if a number of the copy isn't finite."""
    copy_tensor(tensor, to)
    check_finite(to, tensor_name)


def _copy_and_release(file: MappedFile, tensor: Tensor, to: Tensor, tensor_name: str) -> None:
    """Copy a tensor in a mapped file like `_copy_finite`, and release the file's pages."""
    _copy_finite(tensor, to, tensor_name)
    file.release()


def check_finite(tensor: Tensor, tensor_name: str) -> None:
    """Raise StartupError if a number isn't finite. One that isn't makes the sum so, too; a sum of large numbers may be
    infinite without it."""
    if tensor.dtype in FLOAT_DTYPES and not tensor.sum().isfinite() and not tensor.isfinite().all():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise StartupError(f"{tensor_name} has a number that isn't finite, or is too large for {dtype}", DOWNLOAD_AGAIN)


def _quantize(tensor: Tensor, low_bit_format: LowBitFormat, tensor_name: str) -> LowBitWeight:
    """Return a tensor in few bits. Raise StartupError if a value, and thus a scale, isn't finite."""
    weight = low_bit.quantize(tensor, low_bit_format)
    if not weight.d.isfinite().all():
        raise StartupError(f"{tensor_name} has a value that isn't finite, or too large", "It can't be rounded")
    return weight


def _load_scale(
    target: LoadTarget, tensor: Tensor, key: str, path: Path, in_blocks: bool
) -> Iterator[tuple[Tensor, Tensor]]:
    """Load the scales of `target`; if it has no place for them, yield its rows and the scales."""
    if tensor.dtype not in SCALE_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise StartupError(f"{short_repr(key)} in {path} has dtype {kind}", "Scales must be floating-point numbers")
    rows, columns = target.rows.shape if target.tensor_slice is None else target.tensor_slice.shape
    scale = expand_scales(tensor, rows, columns, in_blocks)
    if scale is None:
        whose = f"a weight {[rows, columns]}, {'in blocks' if in_blocks else 'as a whole or by row'}"
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
    """Return the scales of a slice from those of the whole weight, [G, N]."""
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
    """Reorder rows that are in groups with `parts` rows of each part: return the parts one after another."""
    groups = torch.unflatten(tensor, 0, (-1, sum(parts)))
    return torch.cat([part.flatten(0, 1) for part in torch.split(groups, list(parts), 1)])


def join_names(names: Iterable[str], count: int = 3) -> str:
    """Return the first `count` names, and the number of the others."""
    names = list(names)
    rest = f" and {len(names) - count} more tensors" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
