"""What a model folder's small JSON files say about its text: special tokens and the tokenizer's settings.

Reads settings only; no code of a model folder ever runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import StartupError

MAX_CONFIG_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} when there is no such file. StartupError for anything else."""
    if not path.is_file():
        return {}
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise StartupError(f"{path} is larger than {MAX_CONFIG_BYTES >> 20} MiB", "Give a folder with a sane config")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise StartupError(f"{path} is not readable JSON: {str(error)[:200]}", "Download the file again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object, got {type(value).__name__}", "Download the file again")
    return value


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by what only the older special_tokens_map.json says."""
    return {**read_json(folder / "special_tokens_map.json"), **read_json(folder / "tokenizer_config.json")}


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config: {"bos_token": "<s>", "eos_token": "</s>", ...}."""
    named = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str) and content:
            named[name] = content
    return named
