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
    return ServeOptions(
        host=args.host,
        port=args.port,
        api_key_file=args.api_key_file,
        admin_key_file=args.admin_key_file,
        prefixes=args.prefixes,
        served_model_name=tuple(args.served_model_name),
        chat_template=args.chat_template,
        tool_call_parser=None if args.tool_call_parser is None else tool_format_named(args.tool_call_parser),
        reasoning_parser=None if args.reasoning_parser is None else reasoning_format_named(args.reasoning_parser),
        root_path=args.root_path.rstrip("/"),
        shutdown_timeout=args.shutdown_timeout,
        access_log=args.access_log,
        allowed_origins=parse_origins(args.allowed_origins),
        metrics_prefix=args.metrics_prefix,
        console=args.console,
        store_responses=args.store_responses,
        server_info=args.enable_server_info,
        tokenizer_info=args.enable_tokenizer_info_endpoint,
        strict=args.strict,
        max_logprobs=args.max_logprobs,
        log_requests=args.enable_log_requests,
        ssl_keyfile=args.ssl_keyfile,
        ssl_certfile=args.ssl_certfile,
        max_connections=args.max_connections,
        engine_process=args.engine_process,
        on_engine_death=args.on_engine_death,
        fronts=args.fronts,
        uvicorn_log_level=args.uvicorn_log_level,
    )


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
