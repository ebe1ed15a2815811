"""A checkpoint's folder: its location, its config files, and the safetensors files with its tensors. No torch here.

Nothing in the folder is executed or unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any, NoReturn

from safetensors import SafetensorError, safe_open

from quire.errors import StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN, MAX_BYTES_BY_FILE, find_checkpoint_file, read_json_object
from quire.files import read_json_config as read_optional

CONFIG_PATTERNS = ["*.json", "*.model", "*.jinja", "*.txt"]
DOWNLOAD_PATTERNS = ["*.safetensors", *CONFIG_PATTERNS]
IGNORE_PATTERNS = ["*/*", "consolidated*"]  # the same weights once more: in subfolders, and in Mistral's own format
HUB_TIMEOUT = 3.5  # seconds until the hub counts as unreachable
HUB_ID_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
FIT_REMEDY = "The checkpoint must fit its config.json"
MIN_PARAMETER_BYTES = 2  # bytes of a parameter in the smallest unquantised format
REVISION_PATTERN = re.compile(r"(?!.*\.\.)\w[\w./-]{0,199}")
HEAD_OR_EMBEDDING = re.compile(r"(.*\.)?(lm_head|embed_tokens|wte|embeddings)\.weight")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def locate_checkpoint(model: str, weights: bool = True, revision: str | None = None) -> Path:
    """Return the folder of `model`: a local folder, or that of a hub id, downloaded unless HF_HUB_OFFLINE is set.

    Without `weights` only the small files of a hub's model are downloaded. `revision` is a branch, tag or commit.

    Raise StartupError, within 5 s, if there is no such folder or the hub can't be reached.
    """
    path = Path(os.path.expanduser(model))
    if revision is not None and path.exists():
        raise StartupError(f"--revision is given, and {model!r} is a local folder", "Give a model of the hub with it")
    if revision is not None and not REVISION_PATTERN.fullmatch(revision):
        raise StartupError(f"--revision is {revision[:80]!r}", "Give a branch, a tag or a commit of the hub's model")
    if path.is_dir():
        return path
    if path.exists():
        raise StartupError(f"the model {model!r} is a file, and no GGUF file", "Give the folder that holds config.json")
    if not HUB_ID_PATTERN.fullmatch(model):
        raise StartupError(f"there is no folder {model!r}", "Give a folder with a checkpoint, or a hub id (owner/name)")
    return _download(model, DOWNLOAD_PATTERNS if weights else CONFIG_PATTERNS, revision)


def _download(model: str, patterns: list[str], revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    try:
        cached = offline or not _is_hub_reachable()
        folder = snapshot_download(
            model,
            allow_patterns=patterns,
            ignore_patterns=IGNORE_PATTERNS,
            etag_timeout=HUB_TIMEOUT,
            local_files_only=cached,
            revision=revision,
        )
        return Path(folder)
    except GatedRepoError as error:
        raise StartupError(
            f"the hub refuses access to {model!r}", "Accept its licence there and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise StartupError(f"neither a folder nor a hub model is called {model!r}", "Check the name") from error
    except RevisionNotFoundError as error:
        raise StartupError(f"the hub's model {model!r} has no revision {revision!r}", "Check --revision") from error
    except LocalEntryNotFoundError as error:
        if offline:
            cause = f"the model {model!r} is neither a folder nor in the local cache, and HF_HUB_OFFLINE is set"
            raise StartupError(cause, "Unset HF_HUB_OFFLINE, or give a folder") from error
        cause = f"the model {model!r} is no folder, it isn't in the local cache, and the hub can't be reached"
        raise StartupError(cause, "Give a folder with a checkpoint, or check the network") from error
    except Exception as error:  # the hub's client raises errors of many libraries
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StartupError(f"{model!r} could not be downloaded: {reason}", "Check the name and the network") from error


def _is_hub_reachable() -> bool:
    """Return True if the hub answers within HUB_TIMEOUT. snapshot_download has no such limit for its first request."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except Exception:  # for any network error, a cached copy is used
        return False
    return True


def read_config(folder: Path) -> dict[str, Any]:
    """Return the object in config.json. Raise StartupError if the file is missing or damaged."""
    if find_checkpoint_file(folder, "config.json") is None:
        if files := sorted(short_repr(path.name) for path in folder.glob("*.gguf")):
            raise StartupError(f"{folder} has no config.json, but {', '.join(files[:3])}", "Give the GGUF file itself")
        raise StartupError(f"{folder} has no config.json", "Give a folder with a checkpoint in the Hugging Face format")
    return read_optional(folder, "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Return the object in generation_config.json, empty if there is no such file."""
    return read_optional(folder, "generation_config.json")


def read_preprocessor_config(folder: Path) -> dict[str, Any]:
    """Return the object in preprocessor_config.json, else image_processor of the newer processor_config.json; empty if
    there is neither."""
    config = read_optional(folder, "preprocessor_config.json")
    if config:
        return config
    newer = read_optional(folder, "processor_config.json").get("image_processor")
    return newer if isinstance(newer, dict) else {}


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files of the checkpoint. Raise StartupError if one is missing or outside of the folder."""
    index = find_checkpoint_file(folder, INDEX_FILE)
    if index is None:
        single = find_checkpoint_file(folder, SINGLE_FILE)
        return [single] if single is not None else _raise_no_tensors(folder)
    files = []
    for name in _shard_files(folder / INDEX_FILE, index):
        file = find_checkpoint_file(folder, name)
        if file is None:
            raise StartupError(f"{INDEX_FILE} names {short_repr(name)}, which {folder} lacks", "Complete the download")
        files.append(file)
    return files


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the checkpoint's tensors. Raise StartupError if a file is missing or damaged."""
    names = set[str]()
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                names |= {*file.keys()}
        except (SafetensorError, OSError) as error:
            raise StartupError(f"{path} is damaged: {error}", DOWNLOAD_AGAIN) from error
    return names


def has_untied_head(folder: Path) -> bool:
    """Return True if the checkpoint has a head, `lm_head.weight`, that differs from its embedding; False if a file is
    damaged: the loader will report it."""
    places: dict[str, Path] = {}
    for path in tensor_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                places |= {key: path for key in file.keys() if HEAD_OR_EMBEDDING.fullmatch(key)}  # noqa: SIM118
        except (SafetensorError, OSError):
            return False
    heads = [key for key in places if key.endswith("lm_head.weight")]
    tables = sorted(places.keys() - heads, key=len)  # the model's own has the shortest name
    if len(heads) != 1 or not tables:
        return False
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(safe_open(places[key], framework="pt")).get_slice(key) for key in (heads[0], tables[0])
        )
        if first.get_shape() != second.get_shape() or len(first.get_shape()) != 2:
            return True
        blocks = (slice(at, at + 4096) for at in range(0, first.get_shape()[0], 4096))
        return any(bool((first[rows].float() != second[rows].float()).any()) for rows in blocks)


def check_weight_bytes(folder: Path, parameters: int, bytes_per_parameter: float = MIN_PARAMETER_BYTES) -> None:
    """Raise StartupError if the files are too small for `parameters`, `bytes_per_parameter` bytes each. Called before
    memory is allocated for them."""
    size = sum(file.stat().st_size for file in tensor_files(folder))
    if size < bytes_per_parameter * parameters:
        cause = f"config.json makes {parameters} parameters, and the files of {folder} have {size} bytes"
        raise StartupError(cause, FIT_REMEDY)


def _raise_no_tensors(folder: Path) -> NoReturn:
    pickled = sorted(short_repr(path.name) for path in folder.glob("*") if path.suffix in PICKLE_SUFFIXES)
    if pickled:
        cause = f"{folder} holds pickled weights only ({', '.join(pickled[:3])}), which can run code when opened"
        raise StartupError(cause, "Convert it to safetensors: save_pretrained of transformers does")
    raise StartupError(f"{folder} has no {SINGLE_FILE}", "Complete the checkpoint, or use dummy weights")


def _shard_files(index: Path, real: Path) -> list[str]:
    weight_map = read_json_object(real, MAX_BYTES_BY_FILE[INDEX_FILE], str(index), follow=False).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{index} has no weight_map", DOWNLOAD_AGAIN)
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.+=-]+\.safetensors", name):
            raise StartupError(
                f"{index} names the file {short_repr(name)}", "Shards must be safetensors files beside it"
            )
        names.add(name)
    return sorted(names)
