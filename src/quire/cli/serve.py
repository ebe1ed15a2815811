"""`quire serve`: configure logging to stderr, then run quire.server.api_server."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from quire.cli.flags import config_from, given_fields
from quire.errors import StartupError
from quire.server.api_server import serve as run
from quire.server.options import MAX_INT_DIGITS, ServeOptions, configure_logging
from quire.text.reasoning_parser import reasoning_format_named
from quire.text.tool_parsers.formats import tool_format_named

ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\[\]:_-]{1,300}")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)*/?")


def serve(args: argparse.Namespace) -> int:
    """Serve until a signal ends the server."""
    config, options = config_from(args), options_from(args)
    configure_logging(options)
    digits = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(MAX_INT_DIGITS)
    try:
        return run(config, options, lambda line: print(line, flush=True))
    finally:
        sys.set_int_max_str_digits(digits)


def options_from(args: argparse.Namespace) -> ServeOptions:
    """Return the server's options. Raise StartupError for an invalid value."""
    given = given_fields(args, ServeOptions)
    path = given.get("root_path", "")
    if not ROOT_PATH.fullmatch(path):
        raise StartupError(f"--root-path is {path[:80]!r}", "Give a path that begins with /, as /api")
    if f"{path}/".startswith("/v1/"):  # paths below it would be ambiguous
        raise StartupError(f"--root-path is {path[:80]!r}, where routes begin", "Give another, as /api")
    for name, parse in PARSERS.items():
        if name in given:
            given[name] = parse(given[name])
    return ServeOptions(**given)


def parse_origins(given: Sequence[str]) -> tuple[str, ...]:
    """Return the origins of --allowed-origins. Each value is an origin or a JSON list of origins."""
    origins: list[object] = []
    for text in given:
        try:
            value = json.loads(text) if text.startswith("[") else [text]
        except (ValueError, RecursionError) as error:
            raise StartupError(f"--allowed-origins is {text[:80]!r}", "It is no JSON list") from error
        origins += value
    for origin in origins:
        if not isinstance(origin, str) or not ORIGIN.fullmatch(origin):
            raise StartupError(
                f"--allowed-origins has {str(origin)[:80]!r}", "Give https://HOST, with a port if need be, or *"
            )
    return tuple(str(origin) for origin in origins)


PARSERS: dict[str, Callable[[Any], Any]] = {
    "root_path": lambda path: path.rstrip("/"), "allowed_origins": parse_origins, "served_model_name": tuple,
    "tool_call_parser": tool_format_named, "reasoning_parser": reasoning_format_named,
}  # fmt: skip
"""What the values of options are made from their flags by."""
