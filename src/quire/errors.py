"""The failures that quire reports, as one tree.

    QuireError
    ├── InputError        a request, parameter or option that can't be served; names the value and the limit
    │   ├── PromptTooLong     more tokens than the model or the memory can ever hold
    │   ├── PrefixTaken       a prefix of that name is registered already
    │   ├── PrefixesFull      a prefix larger than what is left of the memory kept for prefixes
    │   ├── UnknownPrefix     no prefix of that name is registered
    │   └── NotIdle           requests are there, and what was asked for needs that there are none
    ├── StartupError      the engine can't start; names the cause and a remedy
    ├── LogError          a log of plans that can't be read, or doesn't hold together; names the byte
    ├── Overloaded        the queue is full; come back after `retry_after` seconds
    │   └── Asleep            the engine sleeps, or is about to
    ├── PeerLost          another rank is gone or doesn't answer: its own failure is the cause
    └── EngineDead        the engine stopped; nothing more will be served
        ├── RanksLost         the processes that compute have ended, for this cause; they may be started anew
        └── FrontDead         a process of the server that speaks HTTP is gone, and the server ends

Shortage of memory is never an exception: it is a return value of the memory. A broken invariant is an assert.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager

MAX_REPR_CHARS = 80  # characters of a value in an error


class QuireError(Exception):
    """Anything that quire reports on purpose."""


class InputError(QuireError, ValueError):
    """Bad input, refused at the edge before anything is queued. `param` names the offending field, if one does."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InputError):
    """A prompt, or a prompt with its outputs, longer than the model or the KV memory can hold."""


class PrefixTaken(InputError):
    """A prefix of that name is registered already, or being computed."""


class PrefixesFull(InputError):
    """A prefix larger than what is left of the memory kept for prefixes."""


class UnknownPrefix(InputError):
    """No prefix of that name is registered."""


class NotIdle(InputError):
    """Requests run or wait, and what was asked for needs that none do."""


class StartupError(QuireError):
    """The engine can't start. `remedy` says what to change."""

    def __init__(self, cause: str, remedy: str = "") -> None:
        super().__init__(f"{cause}. {remedy}" if remedy else cause)
        self.cause, self.remedy = cause, remedy


class LogError(QuireError):
    """A log of plans that can't be read, or whose steps don't hold together, from byte `offset` on."""

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message)
        self.offset = offset


class Overloaded(QuireError):
    """The bounded queue is full, or models that share the KV memory hold all of it; the client may retry after
    `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Asleep(Overloaded):
    """The engine sleeps, or is about to: it takes requests once it was woken up."""


class PeerLost(QuireError):
    """A rank can't reach another one: an echo of what that one failed of."""


class EngineDead(QuireError):
    """The engine's loop ended; requests in flight fail with this."""


class RanksLost(EngineDead):
    """The ranks of an engine have ended, for this cause. Without them it ends, unless they are started anew."""


class APIServerDead(EngineDead):
    """A front of the server is gone: without it the server ends, and the engine with it."""


@contextmanager
def input_error_at(place: str, show_place: bool) -> Iterator[None]:
    """Within, errors about a prompt are about that at `place`, such as input[3]. `show_place`: they say so."""
    try:
        yield
    except InputError as error:
        if error.param in (None, "prompt"):
            error.param = place.partition("[")[0]
            if show_place:
                error.args = (f"{place}: {error}",)
        raise


def short_repr(value: object) -> str:
    """A value as errors show it: as Python writes it, in one printable line of at most 80 characters."""
    brief = reprlib.Repr()
    brief.maxstring = brief.maxother = brief.maxlong = MAX_REPR_CHARS
    try:
        text = brief.repr(value)
    except ValueError:  # an integer, here or within, of more digits than this process writes
        text = f"a {type(value).__name__} with a huge integer"
    return text if len(text) <= MAX_REPR_CHARS else f"{text[: MAX_REPR_CHARS - 3]}..."
