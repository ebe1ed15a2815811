"""Process-wide settings of a server: logging, and the limit on the digits of an integer."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.options import ServeOptions

MAX_INT_DIGITS = 640  # of an integer in JSON, the lowest limit that Python allows; the parse time is quadratic


def configure_logging(options: ServeOptions, name: str = "") -> None:
    """Log to stderr. Each line has the `name` of the frontend, if given."""
    format = f"%(asctime)s {name}: %(message)s" if name else "%(asctime)s %(message)s"
    logging.basicConfig(stream=sys.stderr, format=format, datefmt="%H:%M:%S")
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(options.uvicorn_log_level.upper())
    if options.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
