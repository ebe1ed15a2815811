"""Tensors of a checkpoint into a model's parameters, each exactly once, converted to the model's dtype on the way."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.data.weights.checkpoint import tensor_files
from quire.errors import StartupError, shown
from quire.files import AGAIN

if TYPE_CHECKING:
    from quire.data.models import Model

FIT = "The checkpoint must fit its config.json"
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Target(NamedTuple):
    """Where a tensor goes: these rows of one of our parameters, after a transposition if the file keeps [in, out].
    `grouped`: see quire.data.models.names."""

    rows: Tensor
    transpose: bool
    grouped: tuple[int, ...] = ()


def load(model: Model, folder: Path, progress: bool = False) -> None:
    """Fill every parameter of `model`, which is not prepared yet, from the safetensors files in `folder`.

    StartupError, naming file and tensor, for tensors that are missing, unknown, twice there or of the wrong shape or
    kind, and for damaged files.
    """
    targets, device = _targets(model), next(model.parameters()).device
    filled: set[str] = set()
    files = tensor_files(folder)
    with tqdm(total=len(targets), desc="Loading weights", unit=" tensors", disable=not progress) as bar:
        for path in files:
            try:
                with safe_open(path, framework="pt", device=str(device)) as file:
                    for key in file.keys():  # noqa: SIM118 (not a dict)
                        name = _plain(key, model.prefixes)
                        if name not in targets and _ignorable(name, model.ignored):
                            continue
                        _check_new(name, key, path, targets, filled)
                        _fill(targets[name], file.get_tensor(key), key, path)
                        filled.add(name)
                        bar.update()
            except (SafetensorError, OSError) as error:
                raise StartupError(f"{path} is damaged: {error}", AGAIN) from error
    missing = [name for name in targets if name not in filled]
    if missing:
        raise StartupError(f"{folder} lacks {_some(missing)}", FIT)


def _targets(model: Model) -> dict[str, Target]:
    """Every tensor that the checkpoint must hold (its name without prefix) -> where it goes."""
    parameters, targets = dict(model.named_parameters()), {}
    for name, source in model.names().items():
        parts = parameters[name].data.split(source.rows)
        for tensor, rows in zip(source.tensors, parts, strict=True):
            targets[tensor] = Target(rows, source.transpose, source.grouped)
    return targets


def _plain(key: str, prefixes: tuple[str, ...]) -> str:
    """A tensor's name without the prefix that some checkpoints have and others lack."""
    for prefix in prefixes:
        if key.startswith(prefix):
            return key[len(prefix) :]
    return key


def _ignorable(name: str, ignored: tuple[str, ...]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in ignored)


def _check_new(name: str, key: str, path: Path, targets: dict[str, Target], filled: set[str]) -> None:
    if name not in targets:
        raise StartupError(
            f"{path} holds {shown(key)}, which the model has no place for", "It must fit its config.json"
        )
    if name in filled:
        raise StartupError(f"{path} holds {shown(key)}, which was already loaded under that name", AGAIN)


def _fill(target: Target, tensor: Tensor, key: str, path: Path) -> None:
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise StartupError(f"{shown(key)} in {path} has dtype {kind}", "Quantised weights are not supported")
    expected = target.rows.shape[::-1] if target.transpose else target.rows.shape
    if tensor.shape != expected:
        cause = (
            f"{shown(key)} in {path} has shape {shown(list(tensor.shape))}, but config.json makes it {list(expected)}"
        )
        raise StartupError(cause, FIT)
    if target.grouped:
        tensor = ungrouped(tensor, target.grouped)
    target.rows.copy_(tensor.t() if target.transpose else tensor)


def ungrouped(tensor: Tensor, parts: tuple[int, ...]) -> Tensor:
    """Rows that lie in groups of so many of each part -> those of one part below those of another."""
    groups = tensor.unflatten(0, (-1, sum(parts)))
    return torch.cat([part.flatten(0, 1) for part in groups.split(parts, 1)])


def _some(names: Iterable[str], count: int = 3) -> str:
    names = list(names)
    rest = f" and {len(names) - count} more tensors" if len(names) > count else ""
    return ", ".join(names[:count]) + rest
