"""`quire serve`: logging to stderr, then quire.server.run."""

from __future__ import annotations

import argparse
import logging
import sys

from quire.cli.flags import config_from
from quire.server.run import ServeOptions
from quire.server.run import serve as run


def serve(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    config = config_from(args)
    options = ServeOptions(
        host=args.host,
        port=args.port,
        api_key_file=args.api_key_file,
        admin_key_file=args.admin_key_file,
        prefixes=args.prefixes,
        served_model_name=tuple(args.served_model_name),
        chat_template=args.chat_template,
        root_path=args.root_path,
        shutdown_timeout=args.shutdown_timeout,
        access_log=args.access_log,
    )
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    logging.getLogger("quire").setLevel(logging.INFO)
    if args.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return run(config, options, lambda line: print(line, flush=True))
