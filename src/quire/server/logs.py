"""What a serving process sets for itself as a whole: its log, and how long an integer in JSON may be."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.server.options import ServeOptions

MAX_INT_DIGITS = 640  # of an integer in JSON, the least that Python allows to set; reading it costs their square


def configure_logging(options: ServeOptions, name: str = "") -> None:
    """Log to stderr, each line with the name of the front that says it, if it has one."""
    said = f"%(asctime)s {name}: %(message)s" if name else "%(asctime)s %(message)s"
    logging.basicConfig(stream=sys.stderr, format=said, datefmt="%H:%M:%S")
    logging.getLogger("quire").setLevel(logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(options.uvicorn_log_level.upper())
    if options.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
