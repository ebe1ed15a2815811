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
from quire.ipc.messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    ListPrefixes,
    RegisterPrefix,
    ReleasePrefix,
    Reply,
    StopBranch,
)

if TYPE_CHECKING:
    from quire.ipc.engine_loop import EngineLoop
    from quire.protocol.structured_output import Grammar, GrammarCompiler

MAX_WAITING_MESSAGES = 256  # messages; with more, the reader waits
log = logging.getLogger("quire.ipc")


class GrammarQueue:
    """The way of what `client_index` sends to `engine_loop`; `reply` answers the front. Used by the thread that "
    "reads."""

    def __init__(self, client_index: int, engine_loop: EngineLoop, reply: Callable[[Reply], None]) -> None:
        self.client_index, self._engine_loop, self._reply = client_index, engine_loop, reply
        self._condition = threading.Condition()
        self._messages: deque[ClientMessage] = deque()  # the first is worked on
        self._waiting_requests: Counter[int] = Counter()  # of requests, that those name
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, message: ClientMessage) -> None:
        """Hand a message to the host, or have it wait. InputError for a form where none can be had."""
        with self._condition:
            now, later = self._split(message)
            if now is not None:
                self._engine_loop.enqueue(self.client_index, now)
            if later is not None:
                self._condition.wait_for(lambda: len(self._messages) < MAX_WAITING_MESSAGES or self._closed)
                self._enqueue(later)

    def close(self) -> None:
        """The front is gone: nothing that waits reaches the host any more."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _enqueue(self, message: ClientMessage) -> None:
        self._messages.append(message)
        self._waiting_requests.update(_request_numbers(message))
        self._condition.notify_all()
        if self._thread is None:
            name = f"quire-forms-{self.client_index}"
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def _split(self, message: ClientMessage) -> tuple[ClientMessage | None, ClientMessage | None]:
        """What of a message can go on, and what must wait."""
        match message:
            case AddRequests() if (asked := message.params.structured) is not None:
                grammar = self._grammar_maker().get_cached(asked)
                return (None, message) if grammar is None else (_with_grammar(message, grammar), None)
            case AbortRequests(None) if self._waiting_requests:
                return message, AbortRequests(tuple(self._waiting_requests))
            case AbortRequests(numbers) if numbers is not None and not self._waiting_requests.keys().isdisjoint(
                numbers
            ):
                rest = tuple(number for number in numbers if number not in self._waiting_requests)
                late = tuple(number for number in numbers if number in self._waiting_requests)
                return AbortRequests(rest) if rest else None, AbortRequests(late)
            case StopBranch(number) if number in self._waiting_requests:
                return None, message
            case RegisterPrefix() | ReleasePrefix() | ListPrefixes() if (
                self._messages
            ):  # in order, also among each other
                return None, message
        return message, None

    def _grammar_maker(self) -> GrammarCompiler:
        if (maker := self._engine_loop.engine.grammar_compiler) is None:
            raise InputError("structured output isn't offered here", "structured_outputs")
        return maker

    # On a thread of its own

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._messages or self._closed)
                if self._closed:
                    return
                message = self._messages[0]
            found = self._compile(message) if isinstance(message, AddRequests) else message
            with self._condition:
                if self._closed:
                    return
                self._messages.popleft()
                self._waiting_requests -= Counter(_request_numbers(message))
                self._condition.notify_all()
                if found is not None:
                    self._engine_loop.enqueue(self.client_index, found)

    def _compile(self, message: AddRequests) -> AddRequests | None:
        """The same with its grammar; None if there is none, and the front was told why."""
        assert message.params.structured is not None, "others don't wait"
        try:
            return _with_grammar(message, self._grammar_maker().get(message.params.structured))
        except (InputError, Overloaded) as error:
            self._reply(Reply(message.key, error))
        except BaseException as error:  # also what libraries raise beside Exception: its own request's alone
            log.error("a grammar can't be made", exc_info=error)
            why = f"the grammar of the request failed: {type(error).__name__}: {error}"[:300]
            self._reply(Reply(message.key, EngineDead(why)))
        return None


def _with_grammar(message: AddRequests, grammar: Grammar) -> AddRequests:
    return message._replace(params=replace(message.params, grammar=grammar))


def _request_numbers(message: ClientMessage) -> tuple[int, ...]:
    """The numbers of the requests that a message is about."""
    match message:
        case AddRequests():
            return tuple(asked.number for asked in message.requests)
        case AbortRequests(numbers):
            return numbers or ()
        case StopBranch(number) | RegisterPrefix(_, number):
            return (number,)
    return ()
