"""What a model folder's small JSON files say about its text: special tokens and the tokenizer's settings.

Reads settings only; no code of a model folder ever runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quire.errors import StartupError, short_repr
from quire.files import read_json_config

MAX_SPECIAL_TOKENS = 1024  # named special tokens, and characters of each


def tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed by what only the older special_tokens_map.json says."""
    return {**read_json_config(folder, "special_tokens_map.json"), **read_json_config(folder, "tokenizer_config.json")}


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens of a tokenizer_config: {"bos_token": "<s>", "eos_token": "</s>", ...}. StartupError for
    one that can't be a token."""
    named = {}
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
    """Is it valid Unicode, or are there lone surrogates (which JSON can hold)?"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
