"""Prefixes in a file of the operator's, registered before the server accepts requests (PagedAttention §4.4)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from quire.errors import EngineDead, QuireError, StartupError, short_repr
from quire.files import MAX_BYTES_BY_FILE, read_bounded
from quire.text.input_processor import PREFIX_NAME

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM

REMEDY = 'It holds {"NAME": {"text": "..."}, "NAME": {"token_ids": [...]}}'
Prefix = str | list[int]


def read_prefixes(file: str | None) -> dict[str, Prefix]:
    """Return the prefixes in `file` by name, each a text or token ids. Raise StartupError that names an invalid
    entry."""
    if file is None:
        return {}
    data = read_bounded(file, MAX_BYTES_BY_FILE["prefixes"], f"--prefixes {file}", REMEDY)
    try:
        entries = json.loads(data, object_pairs_hook=_unique_pairs)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"--prefixes {file} is not JSON: {str(error)[:200]}", REMEDY) from error
    if not isinstance(entries, dict):
        raise StartupError(f"--prefixes {file} holds a {type(entries).__name__}", REMEDY)
    return {
        name: _entry(f"--prefixes {file}, entry {short_repr(name)}", name, given) for name, given in entries.items()
    }


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{short_repr(name)} is there twice")
        entries[name] = value
    return entries


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
    """Register all prefixes. Return their number of tokens. Raise StartupError that names a prefix that cannot be
    registered."""
    total = 0
    for name, prefix in prefixes.items():
        try:
            total += await llm.register_prefix(name, prefix)
        except EngineDead:
            raise
        except QuireError as error:
            raise StartupError(f"the prefix {name!r} can't be registered: {error}", "Change --prefixes") from error
    return total
