"""Where forms of outputs become grammars in the engine's process: a thread for each front, beside the one that reads
what the front sends and the engine's.

A request whose grammar isn't held waits there, and so does what the front sends about it; all else goes on.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.errors import EngineDead, InputError, Overloaded
from quire.link.messages import Abort, Add, Answer, FromFront, Prefixes, Register, Release, Stop

if TYPE_CHECKING:
    from quire.link.host import Host
    from quire.vocabulary.structured import Grammar, Maker

MOST_WAITING = 256  # messages; with more, the reader waits
log = logging.getLogger("quire.link")


class Lane:
    """The way of what `front` sends to `host`; `tell` answers the front. Used by the thread that reads."""

    def __init__(self, front: int, host: Host, tell: Callable[[Answer], None]) -> None:
        self.front, self._host, self._tell = front, host, tell
        self._changed = threading.Condition()
        self._waiting: deque[FromFront] = deque()  # the first is worked on
        self._numbers: Counter[int] = Counter()  # of requests, that those name
        self._thread: threading.Thread | None = None
        self._closed = False

    def take(self, message: FromFront) -> None:
        """Hand a message to the host, or have it wait. InputError for a form where none can be had."""
        with self._changed:
            now, later = self._parted(message)
            if now is not None:
                self._host.send(self.front, now)
            if later is not None:
                self._changed.wait_for(lambda: len(self._waiting) < MOST_WAITING or self._closed)
                self._put(later)

    def close(self) -> None:
        """The front is gone: nothing that waits reaches the host any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _put(self, message: FromFront) -> None:
        self._waiting.append(message)
        self._numbers.update(_named(message))
        self._changed.notify_all()
        if self._thread is None:
            name = f"quire-forms-{self.front}"
            self._thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._thread.start()

    def _parted(self, message: FromFront) -> tuple[FromFront | None, FromFront | None]:
        """What of a message can go on, and what must wait."""
        match message:
            case Add() if (asked := message.params.structured) is not None:
                grammar = self._maker().held(asked)
                return (None, message) if grammar is None else (_with(message, grammar), None)
            case Abort(None) if self._numbers:
                return message, Abort(tuple(self._numbers))
            case Abort(numbers) if numbers is not None and not self._numbers.keys().isdisjoint(numbers):
                rest = tuple(number for number in numbers if number not in self._numbers)
                late = tuple(number for number in numbers if number in self._numbers)
                return Abort(rest) if rest else None, Abort(late)
            case Stop(number) if number in self._numbers:
                return None, message
            case Register() | Release() | Prefixes() if self._waiting:  # in order, also among each other
                return None, message
        return message, None

    def _maker(self) -> Maker:
        if (maker := self._host.engine.grammars) is None:
            raise InputError("structured output isn't offered here", "structured_outputs")
        return maker

    # On a thread of its own

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                message = self._waiting[0]
            found = self._made(message) if isinstance(message, Add) else message
            with self._changed:
                if self._closed:
                    return
                self._waiting.popleft()
                self._numbers -= Counter(_named(message))
                self._changed.notify_all()
                if found is not None:
                    self._host.send(self.front, found)

    def _made(self, message: Add) -> Add | None:
        """The same with its grammar; None if there is none, and the front was told why."""
        assert message.params.structured is not None, "others don't wait"
        try:
            return _with(message, self._maker().get(message.params.structured))
        except (InputError, Overloaded) as error:
            self._tell(Answer(message.key, error))
        except BaseException as error:  # also what libraries raise beside Exception: its own request's alone
            log.error("a grammar can't be made", exc_info=error)
            why = f"the grammar of the request failed: {type(error).__name__}: {error}"[:300]
            self._tell(Answer(message.key, EngineDead(why)))
        return None


def _with(message: Add, grammar: Grammar) -> Add:
    return message._replace(params=replace(message.params, grammar=grammar))


def _named(message: FromFront) -> tuple[int, ...]:
    """The numbers of the requests that a message is about."""
    match message:
        case Add():
            return tuple(asked.number for asked in message.requests)
        case Abort(numbers):
            return numbers or ()
        case Stop(number) | Register(_, number):
            return (number,)
    return ()
