"""Loads a model of transformers from safetensors files, by transformers' own conversion of names, or fills it with
random weights. transformers opens no file and reads no address: it gets tensors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire.errors import StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN
from quire.models.transformers_model import TransformersModel
from quire.models.transformers_spec import PAGED, make_config, read_spec, resolve_class
from quire.weights.checkpoint_files import FIT_REMEDY, tensor_files
from quire.weights.loader import FLOAT_DTYPES, check_finite, join_names

CONSTANTS = re.compile(r"(.*\.)?(rotary_emb\.inv_freq|(masked_)?bias|attention\.(masked_)?bias)")
"""Tensors of some checkpoints that a model computes itself: frequencies and causal masks."""


def load_transformers_model(
    config: dict[str, Any], folder: Path | None, dtype: torch.dtype, device: torch.device, seed: int,
    progress: bool = False,
) -> TransformersModel:  # fmt: skip
    """Return the model of a config.json with the weights in `folder`; without one, with random weights by `seed`. Raise
    StartupError for tensors that are missing, unknown, or of the wrong shape or kind, and for damaged files."""
    model_class, settings = resolve_class(config), make_config(config, PAGED)
    num_layers = len(read_spec(config).layers)
    if folder is None:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed)
            return _finish(model_class._from_config(settings, dtype=dtype), num_layers)
    tensors = _read_tensors(folder, progress)
    try:
        model, report = model_class.from_pretrained(
            None, config=settings, state_dict=tensors, dtype=dtype, output_loading_info=True, local_files_only=True,
            trust_remote_code=False,
        )  # fmt: skip
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise StartupError(f"the weights of {folder} don't fit {model_class.__name__}: {reason}", FIT_REMEDY) from error
    unknown = [name for name in report["unexpected_keys"] if not CONSTANTS.fullmatch(name)]
    for names, verb in ((report["missing_keys"], "lacks"), (unknown, "holds tensors that the model has no place for:")):
        if names:
            raise StartupError(f"{folder} {verb} {join_names(sorted(names))}", FIT_REMEDY)
    return _finish(model.to(device), num_layers)


def _finish(model: Any, num_layers: int) -> TransformersModel:
    made = TransformersModel(model, num_layers)
    made.check_tokens_are_separate()
    return made


def _read_tensors(folder: Path, progress: bool) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name. On a CPU they lie in the mapped files."""
    tensors: dict[str, Tensor] = {}
    for path in tqdm(tensor_files(folder), desc="Opening weights", unit=" files", disable=not progress):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    tensor: Tensor = file.get_tensor(name)
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
