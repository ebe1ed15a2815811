"""Prefixes that the operator names in a file, registered before the server answers (PagedAttention §4.4)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import EngineDead, QuireError, StartupError
from quire.text.prompts import PREFIX_NAME

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

MAX_FILE = 8 << 20  # bytes
REMEDY = 'It holds {"NAME": {"text": "..."}, "NAME": {"token_ids": [...]}}'
Prefix = str | list[int]


def read_prefixes(file: str | None) -> dict[str, Prefix]:
    """The prefixes in `file`, a text or token ids each. StartupError names the entry that is wrong."""
    if file is None:
        return {}
    try:
        with Path(file).open("rb") as stream:
            data = stream.read(MAX_FILE + 1)
    except OSError as error:
        raise StartupError(f"--prefixes {file} can't be read", REMEDY) from error
    if len(data) > MAX_FILE:
        raise StartupError(f"--prefixes {file} has more than {MAX_FILE} bytes", "Register fewer or shorter prefixes")
    try:
        entries = json.loads(data, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--prefixes {file} is not JSON: {str(error)[:200]}", REMEDY) from error
    if not isinstance(entries, dict):
        raise StartupError(f"--prefixes {file} holds a {type(entries).__name__}", REMEDY)
    return {name: _entry(f"--prefixes {file}, entry {name[:60]!r}", name, given) for name, given in entries.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)[:60]!r} is there twice")
    return found


def _entry(where: str, name: str, given: Any) -> Prefix:
    if not PREFIX_NAME.fullmatch(name):
        raise StartupError(where, "A name has 1 to 64 letters, digits, '.', '_' or '-'")
    match given:
        case {"text": str(text), **rest} if not rest:
            return text
        case {"token_ids": list(ids), **rest} if not rest and all(type(item) is int for item in ids):
            return ids
    raise StartupError(f"{where} holds neither a text nor token ids", REMEDY)


async def register_prefixes(llm: AsyncLLM, prefixes: dict[str, Prefix]) -> int:
    """Register all; returns how many tokens they have. StartupError names the one that can't be."""
    total = 0
    for name, prefix in prefixes.items():
        try:
            total += await llm.register_prefix(name, prefix)
        except EngineDead:
            raise
        except QuireError as error:
            raise StartupError(f"the prefix {name!r} can't be registered: {error}", "Change --prefixes") from error
    return total
