"""Compile grammars in the engine's process, on one thread for each client beside the client's reader and the engine's
thread.

A request whose grammar is not cached waits here, and with it later messages about it; all other messages pass."""

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

MAX_WAITING_MESSAGES = 256  # with more the reader waits
log = logging.getLogger("quire.ipc")


class GrammarQueue:
    """Passes the messages of `client_index` to `engine_loop`; `reply` answers the client. Used by the thread that reads
    the client's messages."""

    def __init__(
        self,
        client_index: int,
        engine_loop: EngineLoop,
        grammar_compiler: GrammarCompiler | None,
        reply: Callable[[Reply], None],
    ) -> None:
        self.client_index, self._engine_loop, self._reply = client_index, engine_loop, reply
        self._grammar_compiler = grammar_compiler
        self._condition = threading.Condition()
        self._messages: deque[ClientMessage] = deque()  # the first is being processed
        self._waiting_requests: Counter[int] = Counter()  # numbers of the requests in `_messages`
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, message: ClientMessage) -> None:
        """Pass a message to the engine loop, or queue it. Raise InputError if structured output is not available."""
        with self._condition:
            now, later = self._split(message)
            if now is not None:
                self._engine_loop.enqueue(self.client_index, now)
            if later is not None:
                self._condition.wait_for(lambda: len(self._messages) < MAX_WAITING_MESSAGES or self._closed)
                self._enqueue(later)

    def close(self) -> None:
        """Drop what waits: the client has left."""
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
        """Return the part of a message that can pass now, and the part that must wait."""
        match message:
            case AddRequests() if (form := message.params.structured) is not None:
                grammar = self._grammar_maker().get_cached(form)
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
            case RegisterPrefix() | ReleasePrefix() | ListPrefixes() if self._messages:  # these keep their order
                return None, message
        return message, None

    def _grammar_maker(self) -> GrammarCompiler:
        if self._grammar_compiler is None:
            raise InputError("this engine does not support structured output", "structured_outputs")
        return self._grammar_compiler

    # On the queue's own thread

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._messages or self._closed)
                if self._closed:
                    return
                message = self._messages[0]
            compiled = self._compile(message) if isinstance(message, AddRequests) else message
            with self._condition:
                if self._closed:
                    return
                self._messages.popleft()
                self._waiting_requests -= Counter(_request_numbers(message))
                self._condition.notify_all()
                if compiled is not None:
                    self._engine_loop.enqueue(self.client_index, compiled)

    def _compile(self, message: AddRequests) -> AddRequests | None:
        """Return the message with its grammar, or None if it can't be compiled; then the client gets the reason."""
        assert message.params.structured is not None, "others don't wait"
        try:
            return _with_grammar(message, self._grammar_maker().get(message.params.structured))
        except (InputError, Overloaded) as error:
            self._reply(Reply(message.key, error))
        except BaseException as error:  # libraries raise more than Exception; only this request fails
            log.error("a grammar can't be made", exc_info=error)
            why = f"the grammar of the request failed: {type(error).__name__}: {error}"[:300]
            self._reply(Reply(message.key, EngineDead(why)))
        return None


def _with_grammar(message: AddRequests, grammar: Grammar) -> AddRequests:
    return message._replace(params=replace(message.params, grammar=grammar))


def _request_numbers(message: ClientMessage) -> tuple[int, ...]:
    """Return the numbers of the requests that a message is about."""
    match message:
        case AddRequests():
            return tuple(request.number for request in message.requests)
        case AbortRequests(numbers):
            return numbers or ()
        case StopBranch(number) | RegisterPrefix(_, number):
            return (number,)
    return ()
