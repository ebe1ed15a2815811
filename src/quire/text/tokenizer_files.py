"""The special tokens and tokenizer settings of a model folder's JSON files. No code of a model folder is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import StartupError, short_repr
from quire.files import read_json_config

MAX_SPECIAL_TOKENS = 1024  # number of named special tokens, and characters of each


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """Return tokenizer_config.json, completed from the older special_tokens_map.json."""
    return {**read_json_config(folder, "special_tokens_map.json"), **read_json_config(folder, "tokenizer_config.json")}


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens of a tokenizer_config: {"bos_token": "<s>", "eos_token": "</s>", ...}. Raise
    StartupError for an invalid one."""
    named: dict[str, str] = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str) and content:
            if (
                len(content) > MAX_SPECIAL_TOKENS
                or len(named) == MAX_SPECIAL_TOKENS
                or not is_unicode(name[:MAX_SPECIAL_TOKENS] + content)
            ):
                cause = f"the special token {short_repr(name)} of the tokenizer can't be used: {short_repr(content)}"
                raise StartupError(
                    cause, f"{MAX_SPECIAL_TOKENS} valid ones of {MAX_SPECIAL_TOKENS} characters are the most"
                )
            named[name] = content
    return named


def is_unicode(text: str) -> bool:
    """Return True if `text` is valid Unicode. JSON can hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
