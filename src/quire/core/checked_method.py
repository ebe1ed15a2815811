"""A caller's decoding method whose answers are checked: an invalid answer is bad input of its own request and must not
affect other requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeVar, overload

from quire.core.decoding import new_method
from quire.errors import InputError
from quire.protocol.method import Advance, Branch, Choice, Context, Ending, Method
from quire.protocol.sampling_params import SamplingParams

FINISH_REASONS = ("stop", "length")
T = TypeVar("T")


class MethodError(Exception):
    """A method broke its contract. The message names its class and the error."""


class ReadOnlyTokens(Sequence[int]):
    """The tokens of a branch, read-only: a change by the method would not match what was computed."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> list[int]: ...
    def __getitem__(self, at: int | slice) -> int | list[int]:
        return self._tokens[at]

    def __len__(self) -> int:
        return len(self._tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._tokens == list(other)

    def __repr__(self) -> str:
        return repr(self._tokens)


class CheckedMethod:
    """A Method whose width, number of candidates and number of results are read once; later changes have no effect.
    Every Advance is checked to be possible for the request's branches; MethodError otherwise."""

    def __init__(self, method: Method, vocab_size: int, may_wait: bool = False) -> None:
        self._method, self._vocab_size, self._may_wait = method, vocab_size, may_wait
        self._name = type(method).__name__
        self._top = 0
        self._has_ended = False  # whether a branch has
        self.width: int = self._ask_count("width", lambda: method.width, 1)
        self._keep = self._ask_count("keep()", lambda: method.keep(), 0 if may_wait else 1)
        if not callable(self._call("advance", lambda: getattr(method, "advance", None))):
            raise self._error("has no advance(branches, context)")

    def resolve_top(self, context: Context) -> None:
        """Read the number of candidates, now that the request's lengths are known. Raise InputError if it is
        invalid."""
        try:
            top = self._ask_count("top()", lambda: self._method.top(context), 0)
        except MethodError as error:
            raise InputError(str(error), "method") from error
        self._top = min(top, self._vocab_size)

    def top(self, context: Context) -> int:
        """See Method. At most the vocabulary size."""
        return self._top

    def keep(self) -> int:
        """See Method."""
        return self._keep

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance | None:
        """See Method. Return None only if the method may wait for its request's caller."""
        advance: Any = self._call("advance()", lambda: self._method.advance(branches, context))
        if advance is None:
            if self._may_wait:
                return None
            raise self._error("answered None, and nobody else continues its branches: only those of a session wait")
        if not isinstance(advance, Advance):
            raise self._error(f"answered with {_type_name(advance)}: it must be an Advance")
        choices = self._check_tuple(Choice, advance.choices)
        endings = self._check_tuple(Ending, advance.endings)
        if len(choices) > self.width:
            raise self._error(f"continues {len(choices)} branches, but its width is {self.width}")
        if choices and len(branches[0].tokens) - branches[0].prompt_len + 1 >= context.max_tokens:
            raise self._error(f"goes on after max_tokens, which is {context.max_tokens}")
        for choice in choices:
            self._check_choice(choice, len(branches))
        for ending in endings:
            self._check_choice(ending, len(branches))
            self._check_ending(ending)
        self._has_ended = self._has_ended or bool(endings)
        if not (choices or self._has_ended):
            raise self._error("ends without a result")
        return Advance(choices, endings)

    def _check_tuple(self, kind: type[T], given: object) -> tuple[T, ...]:
        if not isinstance(given, tuple | list):
            raise self._error(f"gave {_type_name(given)} in place of a tuple of {kind.__name__}")
        for item in given:
            if not isinstance(item, kind):
                raise self._error(f"gave {_type_name(item)} in place of {_with_article(kind.__name__)}")
        return tuple(given)

    def _check_choice(self, choice: Choice | Ending, live: int) -> None:
        parent, token = choice.parent, choice.token
        if type(parent) is not int or not 0 <= parent < live:
            raise self._error(f"names branch {_short_repr(parent)}, but the live ones are 0 to {live - 1}")
        if type(token) is not int or not 0 <= token < self._vocab_size:
            raise self._error(
                f"chose token {_short_repr(token)}: token ids are integers from 0 to {self._vocab_size - 1}"
            )
        if not _is_finite(choice.logprob):
            raise self._error(f"gave the log-probability {_short_repr(choice.logprob)}: it must be a finite number")

    def _check_ending(self, ending: Ending) -> None:
        if not _is_finite(ending.score):
            raise self._error(f"gave the score {_short_repr(ending.score)}: it must be a finite number")
        if not isinstance(ending.reason, str) or ending.reason not in FINISH_REASONS:
            raise self._error(f'ended a branch for {_short_repr(ending.reason)}: the reason is "stop" or "length"')
        if ending.stop_reason is not None and type(ending.stop_reason) is not int:
            raise self._error(f"gave the stop_reason {_short_repr(ending.stop_reason)}: it must be a token id or None")

    def _ask_count(self, what: str, ask: Callable[[], Any], least: int) -> int:
        value = self._call(what, ask)
        if type(value) is not int or value < least:
            raise self._error(f"has a {what} of {_short_repr(value)}: it must be an integer of at least {least}")
        return value

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._error(f"failed in {what}: {_describe_error(error)}") from error

    def _error(self, what: str) -> MethodError:
        return MethodError(f"the method {self._name} {what}")


def make_checked_method(params: SamplingParams, vocab_size: int, may_wait: bool = False) -> CheckedMethod | None:
    """Return the method of a request, or None if its branches are independent. `may_wait`: the method may suspend its
    branches until the request's caller continues them. Raise InputError if it can't be made or breaks its contract."""
    try:
        method = new_method(params)
    except Exception as error:
        raise InputError(f"method() failed: {_describe_error(error)}", "method") from error
    if params.method is not None and method is None:
        raise InputError("method() returned None: it must make a method", "method")
    try:
        return None if method is None else CheckedMethod(method, vocab_size, may_wait)
    except MethodError as error:
        raise InputError(str(error), "method") from error


def _is_finite(value: object) -> bool:
    if type(value) is int:
        return abs(value) <= 2**53
    return isinstance(value, float) and math.isfinite(value)


def _short_repr(value: object) -> str:
    """Return a short text for any value. Other types than int, str and float give their name: their repr may be
    unsafe."""
    if type(value) is int and abs(value) < 10**30:
        return str(value)
    if type(value) in (str, float):
        return repr(value)[:40]
    return _type_name(value)


def _type_name(value: object) -> str:
    return "None" if value is None else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def _describe_error(error: Exception) -> str:
    """Return the type, the message and the place of an exception that a caller's code raised."""
    try:
        message = " ".join(str(error).split())[:200]
    except Exception:  # its own __str__ fails
        message = ""
    trace, where = error.__traceback__, ""
    while trace is not None:
        where = f" ({PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}{': ' * bool(message)}{message}{where}"
