"""Loads a model of transformers, or a rank's part, from safetensors files, by transformers' own conversion of names, or
fills it with random weights. transformers opens no file and reads no address: it gets tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm
from transformers.utils import logging

from quire.errors import StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN
from quire.models.transformers_model import TransformersModel
from quire.models.transformers_plan import TP_REMEDY, ParameterPart, divide, divided_class
from quire.models.transformers_spec import PAGED, make_config, read_spec, resolve_class
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.weights.checkpoint_files import FIT_REMEDY, tensor_files
from quire.weights.loader import FLOAT_DTYPES, check_finite, join_names

CONSTANTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|(masked_)?bias|attention\.(masked_)?bias)")
"""Tensors of some checkpoints that a model computes itself: frequencies and causal masks."""
PartOf: TypeAlias = Callable[[str], ParameterPart | None]


def load_transformers_model(
    config: dict[str, Any], folder: Path | None, dtype: torch.dtype, device: torch.device, seed: int,
    progress: bool = False, shard: Shard = UNSHARDED,
) -> TransformersModel:  # fmt: skip
    """Return the model of a config.json, or the part of it that `shard` has, with the weights in `folder`; without one,
    with random weights by `seed`. Of tensors that ranks divide, only the rank's part is read. Raise StartupError for
    tensors that are missing, unknown, or of the wrong shape or kind, and for damaged files."""
    model_class, settings = resolve_class(config), make_config(config, PAGED)
    num_layers = len(read_spec(config).layers)
    if shard.tp_size == 1 and folder is None:
        with _seeded(seed, device), torch.device(device):
            return _finish(model_class._from_config(settings, dtype=dtype), num_layers)
    part_of: PartOf | None = None
    if shard.tp_size > 1:
        with torch.device("meta"):
            whole = model_class._from_config(settings, dtype=dtype)
        part_of = _tensor_parts(whole, divide(whole, shard))
        model_class = divided_class(model_class, shard)
    if folder is None:  # one seed for all ranks, so that weights that aren't divided are the same
        with _seeded(seed, torch.device("cpu")), _quiet():
            model = model_class.from_pretrained(None, config=settings, state_dict={}, dtype=dtype)
        return _finish(model.to(device), num_layers, shard)
    tensors = _read_tensors(folder, progress, part_of)
    try:
        with _quiet():
            model, report = model_class.from_pretrained(
                None, config=settings, state_dict=tensors, dtype=dtype, output_loading_info=True, local_files_only=True,
                trust_remote_code=False, ignore_mismatched_sizes=True,
            )  # fmt: skip
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StartupError(f"the weights of {folder} don't fit {model_class.__name__}: {reason}", FIT_REMEDY) from error
    unknown = [name for name in report["unexpected_keys"] if not CONSTANTS.fullmatch(name)]
    for names, verb in ((report["missing_keys"], "lacks"), (unknown, "holds tensors that the model has no place for:")):
        if names:
            raise StartupError(f"{folder} {verb} {join_names(sorted(names))}", FIT_REMEDY)
    for name, shape, needed in sorted(report["mismatched_keys"]):
        raise StartupError(f"{name} of {folder} has the shape {tuple(shape)}, and the model needs {tuple(needed)}"
                           + (f" on each of {shard.tp_size} ranks" if part_of else ""), FIT_REMEDY)  # fmt: skip
    model = model.to(device)
    for parameter in model.parameters():  # of a mapped file, a rank's columns lie apart
        parameter.data = parameter.data.contiguous()
    return _finish(model, num_layers, shard)


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers in a context, and restore their state after it."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers' warnings in a context, such as that of weights that no file has."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _finish(model: Any, num_layers: int, shard: Shard = UNSHARDED) -> TransformersModel:
    made = TransformersModel(model, num_layers)
    if shard.is_first_tp_rank:  # it has the first tokens of the vocabulary, which the check takes
        made.check_tokens_are_separate()
    return made


def _tensor_parts(whole: Any, parts: dict[str, ParameterPart]) -> PartOf:
    """Return a function from the name of a checkpoint's tensor to the part that a rank reads (None: all of it). It maps
    names of tensors to those of parameters as transformers does. `whole` is a model on the meta device; `parts` are
    those of `divide`."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        Concatenate,
        MergeModulelist,
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    conversions, state = get_model_conversion_mapping(whole), whole.state_dict()
    renamings = [step for step in conversions if isinstance(step, WeightRenaming)]
    converters = [step for step in conversions if isinstance(step, WeightConverter)]
    by_pattern = {pattern: step for step in converters for pattern in step.source_patterns}

    def part_of(name: str) -> ParameterPart | None:
        target, pattern = rename_source_key(name, renamings, converters, whole.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        part = parts.get(target)
        if pattern is None:
            return part
        converter = by_pattern[pattern]
        steps, sources = [type(step) for step in converter.operations], converter.source_patterns
        if steps == [MergeModulelist, Concatenate] and part is not None and part.groups == len(sources):
            return part._replace(size=part.size // part.groups, groups=1)  # each source is one of the groups
        if steps == [MergeModulelist] or (part is None and len(converter.target_patterns) == 1):
            return part
        raise StartupError(
            f"--tp is given, and transformers makes {target} from {short_repr(name)} in steps that ranks can't apply "
            "to a part of it",
            TP_REMEDY,
        )

    return part_of


def _read_tensors(folder: Path, progress: bool, part_of: PartOf | None) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name, or the parts that `part_of` chooses. On a CPU they lie in the mapped
    files."""
    tensors: dict[str, Tensor] = {}
    for path in tqdm(tensor_files(folder), desc="Opening weights", unit=" files", disable=not progress):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    part, stored = None if part_of is None else part_of(name), file.get_slice(name)
                    if part is not None and not part.fits(shape := stored.get_shape()):
                        raise StartupError(f"{short_repr(name)} in {path} has the shape {tuple(shape)}, and the model "
                                           f"needs {part.size} of what ranks divide", FIT_REMEDY)  # fmt: skip
                    tensor: Tensor = file.get_tensor(name) if part is None else part.read(stored, len(shape))
                    if tensor.dtype not in FLOAT_DTYPES and not CONSTANTS.fullmatch(name):
                        kind = str(tensor.dtype).removeprefix("torch.")
                        raise StartupError(
                            f"{short_repr(name)} in {path} has dtype {kind}",
                            "Weights that transformers computes with must be floating-point numbers",
                        )
                    if name in tensors:
                        raise StartupError(f"{path} holds {short_repr(name)} a second time", DOWNLOAD_AGAIN)
                    check_finite(tensor, f"{short_repr(name)} in {path}")
                    tensors[name] = tensor
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path} is damaged: {error}", DOWNLOAD_AGAIN) from error
    return tensors
