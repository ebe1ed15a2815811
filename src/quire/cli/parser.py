"""The parser of all command lines, and the one line with which a failed start ends."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NoReturn

USAGE_ERROR = 2


class Advanced(str):
    """The help of an option, or the description of a group, that --help leaves out and --help-all shows."""


class ShortHelp(argparse.HelpFormatter):
    """Formats what --help prints: all but what is Advanced."""

    def add_text(self, text: str | None) -> None:
        """Add the description of a group."""
        if not isinstance(text, Advanced):
            super().add_text(text)

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option."""
        if not isinstance(action.help, Advanced):
            super().add_argument(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser with a short help, whose errors are one line. A flag may have underscores instead of dashes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, formatter_class=ShortHelp)

    def _parse_optional(self, arg_string: str) -> Any:
        name, equals, value = arg_string.partition("=")
        dashed = name.replace("_", "-")
        return super()._parse_optional(dashed + equals + value if dashed in self._option_string_actions else arg_string)

    def error(self, message: str) -> NoReturn:
        fail(message[:1].upper() + message[1:], f"See {self.prog} --help")


class HelpAll(argparse.Action):
    """--help-all: print the help with all options, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print the help and exit."""
        parser.formatter_class = argparse.HelpFormatter
        parser.print_help()
        parser.exit()


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object on the command line."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not JSON") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON object")
    return value


def fail(cause: str, remedy: str = "") -> NoReturn:
    """Exit with the one line that ends every failed start."""
    line = " ".join(f"{cause}. {remedy}".split()) if remedy else " ".join(cause.split())
    print(f"quire: error: {line}", file=sys.stderr)
    raise SystemExit(USAGE_ERROR)
