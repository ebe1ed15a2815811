"""The parser of all command lines, and the one line with which a failed start ends."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

USAGE_ERROR = 2


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        fail(message[:1].upper() + message[1:], f"See {self.prog} --help")


def fail(cause: str, remedy: str = "") -> NoReturn:
    """Exit with the one line that ends every failed start."""
    line = " ".join(f"{cause}. {remedy}".split()) if remedy else " ".join(cause.split())
    print(f"quire: error: {line}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)
