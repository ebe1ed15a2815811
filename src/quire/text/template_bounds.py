"""Size limits of chat templates: the size of a result is computed before a C function creates it.

This module knows the Python methods and Jinja filters that multiply their input; template_sandbox.py calls it. The
limits of the template process (template_worker.py) apply besides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter

MAX_STRING = 1 << 20  # characters of any one string, items of any one list
MAX_INTEGER = 1 << 16  # integer arguments of functions and filters: widths, counts, ranges
MAX_POWER = 64  # exponent
MAX_BATCHES = 1 << 16  # lists that one `batch` returns
MAX_STRIP_CHARS = 1 << 10  # characters to strip
MAX_SEARCH = 1 << 26  # product of both lengths in a search from the end, which is quadratic
UNSAFE_METHODS = {"encode", "to_bytes"}  # they return bytes, whose methods have no bounds here
_PRINTF = re.compile(r"%(?:\((?P<key>[^)]*)\))?[#0 +-]*(?P<width>\d+|\*)?(?:\.(?P<precision>\d+|\*)?)?")


def check_size(size: int) -> None:
    """Raise SecurityError for a value of more than MAX_STRING elements."""
    if size > MAX_STRING:
        raise SecurityError(f"the template built a value of {size} elements; the limit is {MAX_STRING}")


def check_integer(value: int) -> None:
    """Raise SecurityError for a width, count or precision beyond MAX_INTEGER."""
    if abs(value) > MAX_INTEGER:
        raise SecurityError(f"integers given to functions may be {MAX_INTEGER} at most")


def check_nested_size(values: Iterable[Any], extra_per_value: int = 0, indent: int = 0) -> int:
    """Return the size of nested values when written out: a list may hold one long value many times. Each value adds
    `extra_per_value` characters, and `indent` per level of its depth. Raise SecurityError beyond MAX_STRING."""
    weight, left = 0, [(value, 0) for value in values]
    while left:
        value, depth = left.pop()
        weight += (len(value) if isinstance(value, str) else 1) + extra_per_value + depth * indent
        if isinstance(value, Mapping):
            left += [(inner, depth + 1) for pair in value.items() for inner in pair]
        elif isinstance(value, list | tuple):
            left += [(inner, depth + 1) for inner in value]
        check_size(weight + len(left))
    return weight


def check_power(base: Any, exponent: Any) -> None:
    """Check base ** exponent."""
    if isinstance(exponent, int | float) and abs(exponent) > MAX_POWER:
        raise SecurityError(f"exponents may be {MAX_POWER} at most")
    if isinstance(base, int):
        check_size(base.bit_length() * MAX_POWER)


def check_product(left: Any, right: Any) -> None:
    """Check left * right."""
    for many, times in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(times, int):
            check_size(len(many) * times)
    if isinstance(left, int) and isinstance(right, int):
        check_size(left.bit_length() + right.bit_length())


def check_method(text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the size of the result, and the cost, of a call of the string method `name`."""
    first = args[0] if args else kwargs.get("tabsize", kwargs.get("sep"))
    if name == "expandtabs":
        check_size(len(text) + text.count("\t") * (first if isinstance(first, int) else 8))
    elif name == "replace" and len(args) > 1:
        check_replaced(text, args[0], args[1])
    elif name == "translate" and args:
        table = args[0].values() if isinstance(args[0], Mapping) else args[0]
        check_size(len(text) * max((len(new) for new in table if isinstance(new, str)), default=1))
    elif name == "join" and isinstance(first, list | tuple | Mapping | str):
        check_joined(text, first)
    elif name in ("strip", "lstrip", "rstrip"):
        check_strip_chars(first)
    elif name in ("rfind", "rindex", "rsplit", "rpartition") and len(text) * len(str(first)) > MAX_SEARCH:
        raise SecurityError(f"{name} of {len(text)} by {len(str(first))} characters is too long a search")


def check_replaced(text: str, old: Any, new: Any) -> None:
    """Check text.replace(old, new)."""
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        check_size(len(text) + text.count(old) * (len(new) - len(old)))


def check_joined(separator: Any, items: Any) -> None:
    """Check separator.join(items)."""
    check_size(len(str(separator)) * len(items) + check_nested_size((items,)))


def check_strip_chars(characters: Any) -> None:
    """Check text.strip(characters), whose cost is the product of both lengths."""
    if isinstance(characters, str) and len(characters) > MAX_STRIP_CHARS:
        raise SecurityError(f"at most {MAX_STRIP_CHARS} characters may be stripped, got {len(characters)}")


def check_printf(text: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check `text` % args: widths, precisions, and values that are formatted several times."""
    size = len(text) + check_nested_size(args)
    for match in _PRINTF.finditer(text):
        for digits in (match["width"], match["precision"]):
            if digits == "*":
                raise SecurityError("widths and precisions may not be *")
            if digits:
                size += _checked_width(digits)
        if match["key"] is not None:
            size += check_nested_size((kwargs.get(match["key"]),))
        check_size(size)


def _checked_width(digits: str) -> int:
    width = int(digits) if len(digits) < 10 else MAX_INTEGER + 1
    check_integer(width)
    return width


class BoundedFormatter(SandboxedFormatter):
    """str.format with limits on each width and precision, and on the whole result."""

    size = 0

    def convert_field(self, value: Any, conversion: Any) -> Any:
        """Apply !r or !s."""
        check_nested_size((value,))
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        """Format one field."""
        check_nested_size((value, format_spec))
        for digits in re.findall(r"\d+", format_spec):
            _checked_width(digits)
        text = super().format_field(value, format_spec)
        self.size += len(text)
        check_size(self.size)
        return text


class BoundedEscapeFormatter(BoundedFormatter, SandboxedEscapeFormatter):
    """The same for Markup, which escapes its arguments."""
