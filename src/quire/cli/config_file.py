"""`--config FILE`: settings in YAML, turned into the arguments that they stand for. Keys are flags' names without their
dashes; what the command line itself says wins."""

from __future__ import annotations

import argparse
import json
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from quire.errors import StartupError

MAX_BYTES = 1 << 20  # bytes
# Arguments, by where argparse puts them, that set the same: one on the command line silences the others in a file.
EQUIVALENT_ARGUMENTS = (
    {"model", "vllm_model"},
    {"kv_gib", "kv_tokens", "kv_cache_memory_bytes"},
    {"attention", "attention_backend"},
    {"cuda_graphs", "enforce_eager"},
    {"dummy_weights", "load_format"},
)


def read_settings(file: str) -> dict[str, Any]:
    """The mapping that the file holds. StartupError for anything else."""
    import yaml

    shown = f"--config {file[:200]!r}"
    try:
        if not stat.S_ISREG(Path(file).stat().st_mode):
            raise StartupError(f"{shown} is no regular file", "Give a YAML file")
        with Path(file).open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise StartupError(f"{shown} can't be read", "Give a YAML file") from error
    if len(content) > MAX_BYTES:
        raise StartupError(f"{shown} is larger than {MAX_BYTES} bytes", "Give a smaller file")
    try:
        found = yaml.safe_load(content)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())[:200] or type(error).__name__
        raise StartupError(f"{shown} is not YAML: {why}", "Write one setting a line, as `port: 8000`") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise StartupError(f"{shown} holds a {type(found).__name__}", "Write one setting a line, as `port: 8000`")
    return found


def settings_to_arguments(
    settings: dict[Any, Any], parser: argparse.ArgumentParser, given: Collection[str]
) -> list[str]:
    """The arguments that `settings` stand for, less those that the command line sets: `given` holds where argparse puts
    what it says. StartupError for a key that is no flag, or a value that its flag can't take."""
    silenced = set(given).union(*(group for group in EQUIVALENT_ARGUMENTS if group & set(given)))
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
        if action.dest not in silenced:
            arguments += _format_argument(flag, value, action, actions)
    return arguments


def _format_argument(flag: str, value: Any, action: argparse.Action, actions: Collection[str]) -> Iterator[str]:
    """A setting as it is said on the command line."""
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
    elif isinstance(value, dict) and flag == "--override-generation-config":
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
    return (
        "empty"
        if value is None
        else f"a {type(value).__name__}"
        if isinstance(value, (list, dict))
        else repr(value)[:80]
    )
