"""A caller's decoding method, with everything that it says checked: what a method does wrong is bad input of its own
request, whose neighbours must not notice. Knows no scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any, TypeVar, overload

from quire.control.decoding import method_of
from quire.errors import InputError
from quire.vocabulary.method import Advance, Branch, Choice, Context, Ending, Method
from quire.vocabulary.params import SamplingParams

REASONS = ("stop", "length")
T = TypeVar("T")


class Misbehaved(Exception):
    """A method broke its contract: its class, and what was wrong."""


class ReadOnly(Sequence[int]):
    """The tokens of a branch as its method sees them: what it changed would no longer be what was computed."""

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

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._tokens)


class Checked:
    """A Method that is asked for its width, its candidates and how many results it keeps once; what it says of them
    later has no effect. Every Advance is one that the request's branches can take. Misbehaved otherwise."""

    def __init__(self, method: Method, vocab_size: int, waits: bool = False) -> None:
        self._method, self._vocab_size, self._waits = method, vocab_size, waits
        self._name = type(method).__name__
        self._top = 0
        self._ended = False  # a branch has
        self.width: int = self._count("width", lambda: method.width, 1)
        self._keep = self._count("keep()", lambda: method.keep(), 0 if waits else 1)
        if not callable(self._called("advance", lambda: getattr(method, "advance", None))):
            raise self._wrong("has no advance(branches, context)")

    def settle(self, context: Context) -> None:
        """Ask for the number of candidates, now that the request's lengths are known. InputError if it is none."""
        try:
            top = self._count("top()", lambda: self._method.top(context), 0)
        except Misbehaved as wrong:
            raise InputError(str(wrong), "method") from wrong
        self._top = min(top, self._vocab_size)

    def top(self, context: Context) -> int:
        """See Method. No more than there are tokens."""
        return self._top

    def keep(self) -> int:
        """See Method."""
        return self._keep

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance | None:
        """See Method. None only of a method that `waits` for its request's caller."""
        advance: Any = self._called("advance()", lambda: self._method.advance(branches, context))
        if advance is None:
            if self._waits:
                return None
            raise self._wrong("answered None, and nobody else continues its branches: only those of a session wait")
        if not isinstance(advance, Advance):
            raise self._wrong(f"answered with {_kind(advance)}: it must be an Advance")
        choices = self._every(Choice, advance.choices)
        endings = self._every(Ending, advance.endings)
        if len(choices) > self.width:
            raise self._wrong(f"continues {len(choices)} branches, but its width is {self.width}")
        if choices and len(branches[0].tokens) - branches[0].prompt_len + 1 >= context.max_tokens:
            raise self._wrong(f"goes on after max_tokens, which is {context.max_tokens}")
        for choice in choices:
            self._check(choice, len(branches))
        for ending in endings:
            self._check(ending, len(branches))
            self._check_ending(ending)
        self._ended = self._ended or bool(endings)
        if not (choices or self._ended):
            raise self._wrong("ends without a result")
        return Advance(choices, endings)

    def _every(self, kind: type[T], given: object) -> tuple[T, ...]:
        if not isinstance(given, tuple | list):
            raise self._wrong(f"gave {_kind(given)} in place of a tuple of {kind.__name__}")
        for item in given:
            if not isinstance(item, kind):
                raise self._wrong(f"gave {_kind(item)} in place of {_article(kind.__name__)}")
        return tuple(given)

    def _check(self, chosen: Choice | Ending, live: int) -> None:
        parent, token = chosen.parent, chosen.token
        if type(parent) is not int or not 0 <= parent < live:
            raise self._wrong(f"names branch {_shown(parent)}, but the live ones are 0 to {live - 1}")
        if type(token) is not int or not 0 <= token < self._vocab_size:
            raise self._wrong(f"chose token {_shown(token)}: token ids are integers from 0 to {self._vocab_size - 1}")
        if not _finite(chosen.logprob):
            raise self._wrong(f"gave the log-probability {_shown(chosen.logprob)}: it must be a finite number")

    def _check_ending(self, ending: Ending) -> None:
        if not _finite(ending.score):
            raise self._wrong(f"gave the score {_shown(ending.score)}: it must be a finite number")
        if not isinstance(ending.reason, str) or ending.reason not in REASONS:
            raise self._wrong(f'ended a branch for {_shown(ending.reason)}: the reason is "stop" or "length"')
        if ending.stop_reason is not None and type(ending.stop_reason) is not int:
            raise self._wrong(f"gave the stop_reason {_shown(ending.stop_reason)}: it must be a token id or None")

    def _count(self, what: str, ask: Callable[[], Any], least: int) -> int:
        value = self._called(what, ask)
        if type(value) is not int or value < least:
            raise self._wrong(f"has a {what} of {_shown(value)}: it must be an integer of at least {least}")
        return value

    def _called(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except Exception as error:
            raise self._wrong(f"failed in {what}: {_told(error)}") from error

    def _wrong(self, what: str) -> Misbehaved:
        return Misbehaved(f"the method {self._name} {what}")


def checked_method(params: SamplingParams, vocab_size: int, waits: bool = False) -> Checked | None:
    """A method for one request, or None: each branch goes on by itself. `waits`: it may leave its branches to the
    request's caller (text.session). InputError if there is no making one."""
    try:
        method = method_of(params)
    except Exception as error:
        raise InputError(f"method() failed: {_told(error)}", "method") from error
    if params.method is not None and method is None:
        raise InputError("method() returned None: it must make a method", "method")
    try:
        return None if method is None else Checked(method, vocab_size, waits)
    except Misbehaved as wrong:
        raise InputError(str(wrong), "method") from wrong


def _finite(value: object) -> bool:
    if type(value) is int:
        return abs(value) <= 2**53
    return isinstance(value, float) and math.isfinite(value)


def _shown(value: object) -> str:
    """A value of any kind, short: only of plain ones is the text known to be harmless."""
    if type(value) is int and abs(value) < 10**30:
        return str(value)
    if type(value) in (str, float):
        return repr(value)[:40]
    return _kind(value)


def _kind(value: object) -> str:
    return "None" if value is None else _article(type(value).__name__)


def _article(name: str) -> str:
    return f"{'an' if name[:1] in 'aeiouAEIOU' else 'a'} {name}"


def _told(error: Exception) -> str:
    """An exception of a caller's code: its kind, what it says, and where it was raised."""
    try:
        said = " ".join(str(error).split())[:200]
    except Exception:  # its own __str__ fails
        said = ""
    trace, where = error.__traceback__, ""
    while trace is not None:
        where = f" ({PurePath(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}{': ' * bool(said)}{said}{where}"
