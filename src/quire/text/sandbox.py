"""The Jinja environment of chat templates: what Hugging Face's templates expect, sandboxed and bounded.

Templates come with model repositories, so they are untrusted programs. Reaching for Python's internals raises, and each
loop step, output, call, filter and operator passes the render's Budget. Not covered: a single call into C that
multiplies bounded strings (replace, for example): it is seen when it returns. Memory is bounded by value and by time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STRING = 1 << 20  # characters of any one string, items of any one list
MAX_INTEGER = 1 << 16  # size of an integer handed to a function or filter: widths, counts, ranges
MAX_POWER = 64  # exponent
WRITERS = {  # filters that write out what they are given
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace", "safe",
    "string", "striptags", "title", "tojson", "trim", "upper", "urlencode", "wordcount", "xmlattr",
}  # fmt: skip


class Budget:
    """What one render may still use: `seconds` of wall clock."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def tick(self) -> None:
        """Raise SecurityError once the time is over."""
        if time.monotonic() > self._end:
            raise SecurityError(f"the template ran longer than {self.seconds:g} s")


def _check_size(size: int) -> None:
    if size > MAX_STRING:
        raise SecurityError(f"the template built a value of {size} elements; the limit is {MAX_STRING}")


def _check_weight(values: Iterable[Any]) -> None:
    """Refuse to write out nested values that would be huge: a list may hold one long value many times."""
    weight, left = 0, list(values)
    while left:
        value = left.pop()
        weight += len(value) if isinstance(value, str) else 1
        if isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, list | tuple):
            left += value
        _check_size(weight + len(left))


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's words for training; a plain scope here."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's protocol)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Bounds(NodeTransformer):
    """Sends what the environment can't intercept, loops and `~`, through filters that can be bounded."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, " steps", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, " concat", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """One template's environment. `budget` is that of the render under way: one render at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, Generation],
            optimized=False,  # folding constants would compute them outside of any budget
            finalize=_output,
        )
        self.budget = Budget(1.0)
        self.filters["tojson"] = _tojson
        for name in ("urlize", "wordwrap", "pprint"):  # slow on long text, and no chat needs them
            del self.filters[name]
        self.filters = {name: self._bounded(name, function) for name, function in self.filters.items()}
        self.filters |= {" steps": self._steps, " concat": self._concat}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Bounds().visit(super()._parse(source, name, filename))
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        """Join what a macro, a call or a set block has output."""
        pieces = list(parts)
        _check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise at once: jinja2's own answer is a value that prints as nothing."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse, before computing it, what would be huge."""
        self.budget.tick()
        if operator == "**":
            if isinstance(right, int | float) and abs(right) > MAX_POWER:
                raise SecurityError(f"exponents may be {MAX_POWER} at most")
            if isinstance(left, int):
                _check_size(left.bit_length() * MAX_POWER)
        elif operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    _check_size(len(many) * times)
            if isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() + right.bit_length())
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the % operator formats no strings here")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or macro."""
        _check_weight((*args, *kwargs.values()))
        return __self._checked(super().call, (__context, __obj, *args), kwargs)

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja2's marks of which functions want the context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name in WRITERS:
                _check_weight((*args, *kwargs.values()))
            return self._checked(function, args, kwargs)

        return bounded

    def _checked(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.budget.tick()
        for value in (*args, *kwargs.values()):
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise SecurityError(f"integers given to functions may be {MAX_INTEGER} at most")
        result = function(*args, **kwargs)
        if isinstance(result, str | list | tuple):
            _check_size(len(result))
        return result

    def _steps(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.tick()
            yield item

    def _concat(self, parts: tuple[Any, ...]) -> str:
        self.budget.tick()
        _check_weight(parts)
        return self.concat(map(str, parts))


@pass_context
def _output(context: Context, value: Any) -> Any:
    """Each output passes here (being given the context also keeps it from running when the template is compiled)."""
    assert isinstance(context.environment, Sandbox)
    context.environment.budget.tick()
    _check_weight((value,))
    return value


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 100:
        raise SecurityError("strftime_now takes formats of 100 characters at most")
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates expect it: no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
