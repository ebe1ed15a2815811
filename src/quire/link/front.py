"""The front's side of a link: requests that are under way, questions that wait for an answer, and what the engine tells
of both, on its way to the event loops that asked.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from quire.control.engine import Engine
from quire.control.outcomes import Output
from quire.errors import EngineDead, InputError, Overloaded
from quire.link.messages import (
    MOST_NUMBER,
    Abort,
    Answer,
    Died,
    Facts,
    FromEngine,
    FromFront,
    Progress,
    Queues,
    Ready,
    Stepped,
    Stop,
)
from quire.link.pulse import Health
from quire.text.prompts import Prompts
from quire.text.streams import Observer, Record, Stream, dead, settle
from quire.text.transcript import Transcript

log = logging.getLogger("quire")


class Link(Protocol):
    """The way to an engine, and what is known of it."""

    @property
    def engine(self) -> Engine | None: ...  # where it is in this process
    @property
    def inside(self) -> bool: ...  # the engine is in this process
    @property
    def ready(self) -> Ready: ...

    def start(self, receive: Callable[[FromEngine], None]) -> None: ...
    def attach(self) -> None: ...
    def send(self, message: FromFront) -> bool: ...
    @property
    def queues(self) -> Queues: ...
    @property
    def facts(self) -> Facts: ...
    def health(self) -> Health: ...
    def again(self) -> Link: ...
    def abandon(self) -> None: ...
    def close(self, timeout: float) -> bool: ...


class Question(NamedTuple):
    """What the engine was asked, until it answers; `streams` are those of the requests that it was to take."""

    answer: asyncio.Future[Any]
    streams: Sequence[Stream]


class Front:
    """What is under way over `link`. `observer` sees every step."""

    def __init__(self, link: Link, prompts: Prompts, observer: Observer | None = None) -> None:
        self.prompts, self.observer = prompts, observer
        self.aborted = self.rejected = 0
        self._counting = threading.Lock()  # of those that are refused, on the engine's thread and on callers'
        self.on_death: Callable[[], object] | None = None
        self._closing = False
        self._live: dict[int, Stream] = {}  # by number, from when they are asked for
        self._named: dict[str, Stream] = {}  # the same by id
        self._questions: dict[int, Question] = {}
        self._numbers, self._keys = itertools.count(), itertools.count()  # they begin anew behind MOST_NUMBER
        self.revive(link)

    def revive(self, link: Link) -> None:
        """Go on over another link, after the engine's death; the first one too."""
        self.link = link
        self.error: BaseException | None = None
        self.limits, self.cache = link.ready.limits, link.ready.cache
        self.prompts.limits = self.limits
        link.start(self._receive)

    @property
    def engine(self) -> Engine:
        """The engine, where it is in this process."""
        assert self.link.engine is not None, "the engine has a process of its own"
        return self.link.engine

    @property
    def facts(self) -> Facts:
        """What the engine has counted, and its memory, as they were lately."""
        return self.link.facts

    # For callers, on their event loops

    def _stream(
        self, answer: asyncio.Future[None], record: Record, prompt: Sequence[int], patient: bool = False
    ) -> Stream:
        """The stream of a request to come."""
        stream = Stream(record.id, answer, patient)
        stream.number, stream.record = next(self._numbers) & MOST_NUMBER, record
        stop = partial(self._stopped, stream.number)
        stream.transcript = Transcript(self.prompts.text, prompt, record.params, stop)
        return stream

    async def _ask(
        self, answer: asyncio.Future[Any], message: Callable[[int], FromFront], streams: Sequence[Stream] = ()
    ) -> Any:
        """The engine's answer to `message` of a key; the requests of `streams` share it."""
        if self.error is not None or self._closing:
            raise dead(self.error)
        for at, stream in enumerate(streams):
            if stream.id in self._named or any(stream.id == other.id for other in streams[:at]):
                raise InputError(f"request id {stream.id[:80]!r} is in use", "request_id")
        key = next(self._keys) & MOST_NUMBER
        for stream in streams:
            self._live[stream.number] = self._named[stream.id] = stream
        self._questions[key] = Question(answer, streams)
        self.link.attach()
        try:
            if not self.link.send(message(key)):
                self._settle(key, None, dead(self.error))
        except BaseException as error:  # of what can't be sent
            self._settle(key, None, error)
        try:
            return await answer
        except asyncio.CancelledError:
            for stream in streams:
                self.abort(stream.id)
            raise

    def abort(self, request_id: str) -> None:
        """End a request whose caller left. From any thread; unknown ids pass."""
        stream = self._named.get(request_id)
        if stream is not None:
            self.link.send(Abort((stream.number,)))

    def _stopped(self, number: int, branch: int, reason: str) -> None:
        """A stop string was found in a branch's text."""
        self.link.send(Stop(number, branch, reason))

    def _refused(self) -> None:
        """Count a request for which the queue had no room."""
        with self._counting:
            self.rejected += 1

    # What the engine tells, on whichever thread it comes

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Stepped):
            self._stepped(message)
        elif isinstance(message, Answer):
            question = self._questions.get(message.key)
            if isinstance(message.error, Overloaded) and (question is None or question.streams):
                self._refused()
            self._settle(message.key, message.value, message.error)
        else:
            assert isinstance(message, Died), "there are three kinds"
            self._died(message.error)

    def _settle(self, key: int, value: Any, error: BaseException | None) -> None:
        question = self._questions.pop(key, None)
        if question is None:
            return
        if error is not None:
            for stream in question.streams:
                self._forget(stream)
        self._call(question.answer.get_loop(), settle, question.answer, value, error)

    def _stepped(self, message: Stepped) -> None:
        """Hand a step's outputs to their streams: one call an event loop."""
        for progress in message.progress:
            if (stream := self._live.get(progress.number)) is not None:
                _note(stream.record, progress)
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Output]]] = {}
        for number, output in message.outputs:
            if (found := self._live.get(number)) is not None:
                batches.setdefault(found.loop, []).append((found, output))
        for loop, batch in batches.items():
            self._call(loop, self._deliver, batch, message.now)
        if self.observer is not None and message.computed:
            self.observer.computed(message.computed)

    def _deliver(self, batch: list[tuple[Stream, Output]], now: float) -> None:
        """On the loop: a step's outputs become text, and go each to its stream."""
        seen: list[tuple[Output, Record]] = []
        for stream, output in batch:
            if stream.failed:
                continue
            try:
                found = stream.transcript.read(output)
                if found is None:
                    continue
                if found.done:
                    self._forget(stream)
                stream.put(found)
            except BaseException as error:  # also what libraries raise beside Exception: its own request's alone
                self._failed(stream, error)
                continue
            if not stream.record.prefix:  # what the operator registers isn't a client's request
                seen.append((found, stream.record))
                self.aborted += found.done and found.finish_reason == "abort"
        if self.observer is not None:
            self.observer.told(seen, now)

    def _failed(self, stream: Stream, error: BaseException) -> None:
        """A request whose text can't be made."""
        log.error("the text of request %s failed", stream.id, exc_info=error)
        self.abort(stream.id)
        self._forget(stream)
        stream.fail(EngineDead(f"the text of the request failed: {type(error).__name__}: {error}"[:300]))

    def _forget(self, stream: Stream) -> None:
        self._live.pop(stream.number, None)
        if self._named.get(stream.id) is stream:
            del self._named[stream.id]

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
        """Call a function on an event loop, at once if it is this one."""
        try:
            if asyncio._get_running_loop() is loop:
                function(*args)
            else:
                loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the caller's loop is closed
            if not loop.is_closed():
                raise
            for stream in [stream for stream in list(self._live.values()) if stream.loop is loop]:
                self.abort(stream.id)
                self._forget(stream)

    def _died(self, error: BaseException) -> None:
        """Nothing will be served any more: tell everybody."""
        if self.error is not None:
            return
        closed = self._closing
        self.error = EngineDead("the engine was closed") if closed else error
        for key in list(self._questions):
            self._settle(key, None, dead(self.error))
        streams, self._live, self._named = list(self._live.values()), {}, {}
        for stream in streams:
            self._call(stream.loop, stream.fail, dead(self.error))
        if not closed and self.on_death is not None:
            self.on_death()


def _note(record: Record, progress: Progress) -> None:
    _, record.max_tokens, record.scheduled, record.first_token, record.cached_tokens, record.preemptions = progress
