"""`--config FILE`: settings in YAML, converted to arguments. Keys are names of flags without dashes. Arguments on the
command line override them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator
from typing import Any

from quire.cli.vllm_flags import SPECULATIVE_SETTINGS
from quire.errors import StartupError
from quire.files import read_bounded

MAX_BYTES = 1 << 20
# Groups of arguments, by their names in argparse, that set the same: one on the command line overrides the others in a
# file.
EQUIVALENT_ARGUMENTS = (
    {"model", "vllm_model"},
    {"kv_gib", "kv_tokens", "kv_cache_memory_bytes"},
    {"attention", "attention_backend"},
    {"cuda_graphs", "enforce_eager"},
    {"dummy_weights", "load_format"},
    {"speculative_config", *SPECULATIVE_SETTINGS},
)


def read_settings(file: str) -> dict[str, Any]:
    """Return the mapping in the file. Raise StartupError if there is none."""
    import yaml

    shown = f"--config {file[:200]!r}"
    content = read_bounded(file, MAX_BYTES, shown, "Give a YAML file")
    try:
        settings = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise StartupError(f"{shown} is not YAML: {why}", "Write one setting a line, as `port: 8000`") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise StartupError(f"{shown} holds a {type(settings).__name__}", "Write one setting a line, as `port: 8000`")
    return settings


def settings_to_arguments(
    settings: dict[Any, Any], parser: argparse.ArgumentParser, given: Collection[str]
) -> list[str]:
    """Return the arguments for `settings`, without those that the command line sets; `given` are the names of the
    latter in argparse. Raise StartupError for a key that is not a flag, or a value that its flag cannot take."""
    overridden = set(given).union(*(group for group in EQUIVALENT_ARGUMENTS if group & set(given)))
    actions = {option: action for action in parser._actions for option in action.option_strings}
    arguments: list[str] = []
    seen: set[str] = set()
    for key, value in settings.items():
        flag = "--" + str(key).replace("_", "-")
        action = actions.get(flag)
        if action is None or action.dest in ("config", "help"):
            raise StartupError(f"--config: there is no setting {str(key)[:80]!r}", f"See {parser.prog} --help")
        if flag in seen:
            raise StartupError(f"--config: {flag[2:80]!r} is there twice", "Give it once")
        seen.add(flag)
        if action.dest not in overridden:
            arguments += _format_argument(flag, value, action, actions)
    return arguments


def _format_argument(flag: str, value: Any, action: argparse.Action, actions: Collection[str]) -> Iterator[str]:
    """Yield the arguments of a setting."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise StartupError(f"--config: {flag[2:]} is {_describe(value)}", "It must be true or false")
        negated = f"--no-{flag[2:]}"
        if value:
            yield flag
        elif negated in actions:
            yield negated
    elif isinstance(value, list) and (action.nargs == "+" or isinstance(action, argparse._AppendAction)):
        items = [_format_scalar(flag, item) for item in value]
        yield from [flag, *items] if action.nargs == "+" and items else [f"{flag}={item}" for item in items]
    elif isinstance(value, dict) and action.metavar == "JSON":
        yield f"{flag}={json.dumps({str(name): _check_scalar(flag, item) for name, item in value.items()})}"
    else:
        yield f"{flag}={_format_scalar(flag, value)}"


def _check_scalar(flag: str, value: Any) -> Any:
    if isinstance(value, (str, int, float)):
        return value
    raise StartupError(f"--config: {flag[2:]} is {_describe(value)}", "It must be text or a number")


def _format_scalar(flag: str, value: Any) -> str:
    value = _check_scalar(flag, value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _describe(value: Any) -> str:
    if value is None:
        return "empty"
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else repr(value)[:80]
