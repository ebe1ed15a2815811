"""The Jinja environment of chat templates: Hugging Face's extensions, sandboxed and bounded.

Templates come with model repositories, so they are untrusted programs. Access to Python's internals raises an error.
Each loop step, output, call, filter and operator checks the render's time budget. Results that would be huge are
refused before they are computed (template_bounds.py). The process has limits of its own (template_worker.py) against
anything else.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import filters, nodes, pass_context, pass_environment, pass_eval_context
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from quire.text.template_bounds import (
    MAX_BATCHES,
    UNSAFE_METHODS,
    BoundedEscapeFormatter,
    BoundedFormatter,
    check_integer,
    check_joined,
    check_method,
    check_nested_size,
    check_power,
    check_printf,
    check_product,
    check_replaced,
    check_size,
    check_strip_chars,
)

STOP_FRACTION = 0.8  # of a render's time
WRITING_FILTERS = {  # filters that convert their arguments to text
    "capitalize", "center", "e", "escape", "forceescape", "format", "indent", "join", "lower", "replace", "safe",
    "string", "striptags", "title", "tojson", "trim", "truncate", "upper", "urlencode", "wordcount", "xmlattr",
}  # fmt: skip


class TimeExceeded(SecurityError):
    """A render ran too long."""


class RenderBudget:
    """The time budget of one render: a part of its `seconds` of wall-clock time, so that the template is stopped here
    with a reason before its process is killed."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + STOP_FRACTION * seconds

    def tick(self) -> None:
        """Raise TimeExceeded once the time is over."""
        if time.monotonic() > self._deadline:
            raise TimeExceeded(f"the template ran longer than {self.seconds:g} s")


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %}: marks the assistant's text for training; here a plain scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's protocol)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _InterceptLoops(NodeTransformer):
    """Passes loops and `~`, which the environment cannot intercept, through bounded filters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, " steps", [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(parts, " concat", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one template. `budget` is that of the current render; there is one render at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, GenerationTag],
            optimized=False,  # constant folding would run outside of the budget
            finalize=_check_output,
        )
        self.budget = RenderBudget(1.0)
        self.filters |= BOUNDED_FILTERS
        for name in ("urlize", "wordwrap", "pprint"):  # slow on long text, and not needed in chats
            del self.filters[name]
        self.filters = {name: self._wrap_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {" steps": self._with_ticks, " concat": self._concat}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _InterceptLoops().visit(super()._parse(source, name, filename))
        return tree

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a macro, call or set block."""
        pieces = list(parts)
        check_size(sum(map(len, pieces)))
        return "".join(pieces)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in UNSAFE_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Raise SecurityError at once: jinja2's default is a value that prints as nothing."""
        raise SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replace str.format and str.format_map by bounded versions."""
        if super().wrap_str_format(value) is None:
            return None
        text, mapped = value.__self__, value.__name__ == "format_map"

        def format(*args: Any, **kwargs: Any) -> str:
            if mapped and (len(args) != 1 or kwargs):
                raise TypeError("format_map takes one mapping")
            markup = hasattr(text, "__html__")
            formatter = BoundedEscapeFormatter(self, escape=text.escape) if markup else BoundedFormatter(self)
            given = ((), args[0]) if mapped else (args, kwargs)
            formatted: str = type(text)(formatter.vformat(text, *given))
            return formatted

        return format

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse huge results before they are computed."""
        self.budget.tick()
        if operator == "**":
            check_power(left, right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("the % operator formats no strings here")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or macro."""
        check_nested_size((*args, *kwargs.values()))
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join":  # the C function would exhaust a generator without budget checks
                args = tuple(map(__self._bounded_list, args))
            check_method(owner, __obj.__name__, args, kwargs)
        return __self._call_checked(super().call, (__context, __obj, *args), kwargs)

    def _wrap_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # keeps jinja2's attributes, such as pass_context
        def bounded(*args: Any, **kwargs: Any) -> Any:
            if name in WRITING_FILTERS:
                check_nested_size((*args, *kwargs.values()))
            return self._call_checked(function, args, kwargs)

        return bounded

    def _bounded_list(self, items: Iterable[Any]) -> list[Any]:
        result, size = [], 0
        for item in self._with_ticks(items):
            result.append(item)
            size += len(item) if isinstance(item, str) else 1
            check_size(max(size, len(result)))
        return result

    def _call_checked(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.budget.tick()
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                check_integer(value)
        result = function(*args, **kwargs)
        if isinstance(result, str | list | tuple):
            check_size(len(result))
        return result

    def _with_ticks(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.budget.tick()
            yield item

    def _concat(self, parts: tuple[Any, ...]) -> str:
        self.budget.tick()
        check_nested_size(parts)
        return self.concat(map(str, parts))


@pass_context
def _check_output(context: Context, value: Any) -> Any:
    """Check each output. Taking the context also keeps jinja2 from running this at compile time."""
    assert isinstance(context.environment, Sandbox)
    context.environment.budget.tick()
    check_nested_size((value,))
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
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as chat templates expect it, without HTML escapes."""
    deep = len(indent) if isinstance(indent, str) else max(indent or 0, 0)
    check_nested_size((value,), sum(map(len, separators or ())), deep)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(s: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    deep = len(width) if isinstance(width, str) else width
    check_size(len(s) + (s.count("\n") + 2) * deep)
    return filters.do_indent(s, width, first, blank)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    check_printf(str(value), args, kwargs)
    return filters.do_format(value, *args, **kwargs)


@pass_eval_context
def _join(eval_ctx: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    assert isinstance(eval_ctx.environment, Sandbox)
    items = eval_ctx.environment._bounded_list(value)
    check_joined(d, items)
    return filters.sync_do_join(eval_ctx, items, d, attribute)


@pass_eval_context
def _replace(eval_ctx: EvalContext, s: str, old: str, new: str, count: int | None = None) -> str:
    check_replaced(str(s), str(old), str(new))
    return filters.do_replace(eval_ctx, s, old, new, count)


@pass_environment
def _sum(environment: Sandbox, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """Sum with lists appended in place: adding each to the sum so far would copy it."""
    if not isinstance(start, list | tuple):
        return filters.sync_do_sum(environment, iterable, attribute, start + 0)  # numbers only
    parts = iterable if attribute is None else map(filters.make_attrgetter(environment, attribute), iterable)
    total = list(start)
    for part in environment._with_ticks(parts):
        if not isinstance(part, type(start)):
            raise SecurityError(f"sum can't add a {type(part).__name__} to a {type(start).__name__}")
        check_size(len(total) + len(part))
        total += part
    return type(start)(total)


def _trim(value: str, chars: str | None = None) -> str:
    check_strip_chars(chars)
    return filters.do_trim(value, chars)


@pass_environment
def _batch(environment: Sandbox, value: Iterable[Any], linecount: int, fill_with: Any = None) -> Iterator[list[Any]]:
    items = environment._bounded_list(value)
    if len(items) > MAX_BATCHES * linecount:
        raise SecurityError(f"batch makes at most {MAX_BATCHES} lists")
    return filters.do_batch(items, linecount, fill_with)


BOUNDED_FILTERS: dict[str, Callable[..., Any]] = {  # filters that multiply, with a check of the result's size
    "batch": _batch, "format": _format, "indent": _indent, "join": _join, "replace": _replace, "sum": _sum,
    "tojson": _tojson, "trim": _trim,
}  # fmt: skip
