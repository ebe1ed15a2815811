"""`quire serve`: configure logging to stderr, then run quire.server.api_server."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence

from quire.cli.flags import config_from
from quire.errors import StartupError
from quire.protocol.sampling_params import MAX_LOGPROBS
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
    if not ROOT_PATH.fullmatch(args.root_path):
        raise StartupError(f"--root-path is {args.root_path[:80]!r}", "Give a path that begins with /, as /api")
    if f"{args.root_path}/".startswith("/v1/"):  # paths below it would be ambiguous
        raise StartupError(f"--root-path is {args.root_path[:80]!r}, where routes begin", "Give another, as /api")
    if not 0 <= args.max_logprobs <= MAX_LOGPROBS:
        more = " (-1, the whole vocabulary, isn't offered)" if args.max_logprobs == -1 else ""
        raise StartupError(f"--max-logprobs is {args.max_logprobs}", f"It must be between 0 and {MAX_LOGPROBS}{more}")
    if args.max_connections is not None and not 1 <= args.max_connections <= 2**20:
        raise StartupError(f"--max-connections is {args.max_connections}", f"It must be between 1 and {2**20}")
    given = {name: value for name, value in vars(args).items() if name in ServeOptions._fields}
    tools, reasoning = args.tool_call_parser, args.reasoning_parser
    return ServeOptions(**given | {
        "served_model_name": tuple(args.served_model_name),
        "tool_call_parser": None if tools is None else tool_format_named(tools),
        "reasoning_parser": None if reasoning is None else reasoning_format_named(reasoning),
        "root_path": args.root_path.rstrip("/"),
        "allowed_origins": parse_origins(args.allowed_origins),
    })  # fmt: skip


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
