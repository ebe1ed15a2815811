"""The parser of every command line of ours, and the one line that a bad start ends with."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """argparse with errors of one line."""

    def error(self, message: str) -> NoReturn:
        fail(message[:1].upper() + message[1:], f"See {self.prog} --help")


def fail(cause: str, remedy: str = "") -> NoReturn:
    """End with the one line that every start-up failure ends with."""
    line = " ".join(f"{cause}. {remedy}".split()) if remedy else " ".join(cause.split())
    print(f"quire: error: {line}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)
