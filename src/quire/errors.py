"""The exceptions of quire.

    QuireError
    ├── InputError        an invalid request, parameter or option; names the value and the limit
    │   ├── PromptTooLong     more tokens than the model or the memory can ever hold
    │   ├── PrefixTaken       a prefix of that name is registered already
    │   ├── PrefixesFull      a prefix larger than the remaining memory for registered prefixes
    │   ├── UnknownPrefix     no prefix of that name is registered
    │   └── NotIdle           the operation needs an engine without requests
    ├── StartupError      the engine can't start; names the cause and a remedy
    ├── LogError          an invalid plan log; names the byte
    ├── Overloaded        the queue is full; retry after `retry_after` seconds
    │   └── Asleep            the engine sleeps, or is about to
    ├── PeerLost          another rank is gone or doesn't answer; its own error is the cause
    └── EngineDead        the engine has stopped
        ├── RanksLost         the rank processes have ended; they may be restarted
        └── APIServerDead     an HTTP process of the server is gone, and the server ends

Shortage of KV memory is a return value, not an exception. A broken invariant is an AssertionError.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

MAX_REPR_CHARS = 80  # of a value in an error


class QuireError(Exception):
    """The base class of quire's exceptions."""


class InputError(QuireError, ValueError):
    """Invalid input, rejected before anything is queued. `param`: the invalid field, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InputError):
    """A prompt, or a prompt with its outputs, longer than the model or the KV memory can hold. `length` and `limit`,
    such as "300 tokens" and "256", are given if the prompt alone is too long."""

    def __init__(self, message: str, param: str | None = None, length: str = "", limit: str = "") -> None:
        super().__init__(message, param)
        self.length, self.limit = length, limit


class PrefixTaken(InputError):
    """A prefix of that name is registered already, or being computed."""


class PrefixesFull(InputError):
    """A prefix larger than the remaining memory for registered prefixes."""


class UnknownPrefix(InputError):
    """No prefix of that name is registered."""


class NotIdle(InputError):
    """Requests run or wait, and the operation needs an engine without requests."""


class StartupError(QuireError):
    """The engine can't start. `remedy` says what to change."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}. {remedy}" if remedy else cause)
        self.cause, self.remedy = cause, remedy


class LogError(QuireError):
    """A plan log that can't be read, or whose steps contradict one another, at byte `offset`."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


class Overloaded(QuireError):
    """The queue is full, or models that share the KV memory hold all of it. The client may retry after `retry_after`
    seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Asleep(Overloaded):
    """The engine sleeps or is about to. It accepts requests once it is awake."""


class PeerLost(QuireError):
    """A rank can't reach another one, whose own error is the cause."""


class EngineDead(QuireError):
    """The engine has stopped; its requests fail with this."""


class RanksLost(EngineDead):
    """The rank processes have ended, for the reason in the message. The engine stops unless they are restarted."""


class APIServerDead(EngineDead):
    """A frontend process of the server is gone; the server and the engine end."""


@contextmanager
def input_error_at(place: str, show_place: bool) -> Iterator[None]:
    """Attribute InputErrors about the prompt to `place`, such as input[3]. With `show_place` the message begins with
    it."""
    try:
        yield
    except InputError as error:
        if error.param in (None, "prompt"):
            error.param = place.partition("[")[0]
            if show_place:
                error.args = (f"{place}: {error}",)
        raise


def short_repr(value: object) -> str:
    """Return the repr of a value in one printable line of at most MAX_REPR_CHARS characters, for errors."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = MAX_REPR_CHARS
    try:
        text = brief.repr(value)
    except ValueError:  # an integer with more digits than Python converts
        text = f"a {type(value).__name__} with a huge integer"
    return text if len(text) <= MAX_REPR_CHARS else f"{text[: MAX_REPR_CHARS - 3]}..."


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that is not empty."""
    lines = [line.strip() for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__)[:300].rstrip(".")
