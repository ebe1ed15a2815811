"""AsyncLLM: the engine on one background thread, for asyncio callers. What the server stands on.

Commands go in through a bounded deque; a step's outputs go out with one call_soon_threadsafe an event loop. The thread
waits on a condition when there is nothing to do. Everything named `_live` belongs to that thread.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from quire.control.memory import Account
from quire.control.outcomes import Output
from quire.control.request import Request
from quire.errors import EngineDead, InputError, Overloaded, UnknownPrefix
from quire.text.outputs import Assembly, RequestOutput, check_registered
from quire.text.prompts import Messages, Prompt, Prompts, characters, engine_config
from quire.text.pulse import Health, Pulse
from quire.text.streams import Observer, Stream, dead, deliver, named, settle, told
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.build import Built

FACTS_EVERY = 0.25  # seconds between two looks at the memory's usage while busy
RETRY_AFTER = 2  # seconds
CLOSE_SECONDS = 10.0  # for the engine's thread to end
T = TypeVar("T")


class AsyncLLM:
    """A model for asyncio callers. `settings` are EngineConfig's fields; `observer` sees every step.

    The engine counts as stalled when one turn of its loop takes longer than `stall_after` seconds.
    """

    def __init__(self, model: str | None = None, *, progress: bool = False, **settings: Any) -> None:
        from quire.build import build

        self._start(build(engine_config(model, settings), progress), None, 60.0)

    @classmethod
    def of(cls, built: Built, *, observer: Observer | None = None, stall_after: float = 60.0) -> AsyncLLM:
        """An AsyncLLM over an engine that is built already."""
        self = cls.__new__(cls)
        self._start(built, observer, stall_after)
        return self

    def _start(self, built: Built, observer: Observer | None, stall_after: float) -> None:
        self.built, self.engine, self.prompts = built, built.engine, Prompts(built)
        self.observer, self._pulse = observer, Pulse(stall_after)
        self.account: Account = self.engine.scheduler.memory.account()
        self.aborted = self.rejected = 0
        self.error: BaseException | None = None
        self.accepting = True
        self.on_death: Callable[[], object] | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._taken: deque[Callable[[], None]] = deque()  # by the thread, which works them off
        self._wake = threading.Condition()
        self._closing = False
        self._live: dict[str, Stream] = {}
        self._ids = itertools.count()
        self._looked = time.monotonic()
        # A daemon, so that one that hangs doesn't hold up the program's end; one that works is closed by then.
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    # For callers, on their event loops

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        salt: str = "",
        patient: bool = False,
    ) -> Stream:
        """Queue a request; returns once the engine took it. InputError, Overloaded or EngineDead if it didn't."""
        id = request_id or f"async-{next(self._ids)}"
        [stream] = await self.submit_all([(id, prompt_ids)], params, salt=salt, patient=patient)
        return stream

    async def submit_all(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams,
        *,
        salt: str = "",
        patient: bool = False,
    ) -> list[Stream]:
        """As `submit`, for several (request id, token ids) at once: the engine takes all of them, or none."""
        self._check_open(len(prompts))
        size = sum(map(len, (*(params.bad_words or ()), *(params.stop or ()))))
        resolved = await self.prompts.apart(size, partial(self.prompts.resolve, params))
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        streams = [Stream(id, accepted, patient) for id, _ in prompts]
        await self._accepted(streams, lambda: self.engine.add_all(prompts, resolved, salt=salt))
        return streams

    async def _accepted(self, streams: list[Stream], add: Callable[[], None]) -> None:
        """Have the engine's thread `add` the requests of `streams`, which share one answer."""
        if not self._send(lambda: self._add(streams, add)):
            raise dead(self.error)
        try:
            await streams[0].accepted
        except asyncio.CancelledError:
            for stream in streams:
                self.abort(stream.id)
            raise

    def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt (as LLM.generate takes it): all that there is of it, each time that there is more. Of what
        came while its reader was away only the last is seen. Leaving the iterator aborts the request."""
        text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        read = partial(self.prompts.apart, characters(text), partial(self.prompts.prompt, prompt))
        return self._results(read, sampling_params, request_id, salt)

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Messages | None = None,
        add_special_tokens: bool = False,
        **kwargs: Any,
    ) -> AsyncIterator[RequestOutput]:
        """As `generate`, for the answer to a conversation. `kwargs` are variables of the chat template."""
        read = partial(
            self.prompts.converse, messages, add_generation_prompt, continue_final_message, documents=documents,
            add_special_tokens=add_special_tokens, variables=kwargs,
        )  # fmt: skip
        return self._results(read, sampling_params, request_id, salt)

    async def _results(
        self, read: Callable[[], Awaitable[Prompt]], given: SamplingParams | None, request_id: str | None, salt: str
    ) -> AsyncIterator[RequestOutput]:
        prompt = await read()
        params = given if given is not None else self.prompts.params()
        stream = await self.submit(prompt.ids, params, request_id, salt=salt)
        assembly = Assembly(stream.id, prompt.text, prompt.ids, params, self.prompts.decode_token)
        try:
            async for output in stream:
                assembly.push(output)
                if output.done:
                    assembly.finish(stream.request, self.engine.clock())
                yield assembly.snapshot()
        finally:
            if not stream.done:
                self.abort(stream.id)

    def abort(self, request_id: str) -> None:
        """End a request whose caller left. From any thread; unknown ids pass."""
        self._send(lambda: self._abort(request_id))

    async def register_prefix(self, name: str, prefix: str | Sequence[int]) -> int:
        """Compute a text or token ids and pin them as the prefix `name`; returns their number once requests find them.
        PrefixTaken, PrefixesFull, InputError, Overloaded or EngineDead otherwise. Leaving early ends it."""
        self._check_open()
        tokens = await self.prompts.apart(characters(prefix), partial(self.prompts.prefix, name, prefix))
        stream = Stream(f"prefix:{name}", asyncio.get_running_loop().create_future())
        await self._accepted([stream], lambda: self.engine.register_prefix(name, tokens))
        last = None
        try:
            async for output in stream:
                last = output
        finally:
            if not stream.done:
                self.abort(stream.id)
        assert last is not None, "a prefix was computed without an output"
        check_registered(name, last)
        return len(tokens)

    async def release_prefix(self, name: str) -> None:
        """Let go of a registered prefix; requests that use its pages keep them. UnknownPrefix if there is none."""
        if not await self._ask(lambda: self.engine.release_prefix(name)):
            raise UnknownPrefix(f"no prefix called {name[:60]!r} is registered", "name")

    async def prefixes(self) -> tuple[dict[str, int], frozenset[str]]:
        """The lengths in tokens of the registered prefixes and of those being computed, and which are ready."""
        held, live = self.engine.prefixes, self.engine.requests
        return await self._ask(lambda: (dict(held), frozenset(n for n in held if f"prefix:{n}" not in live)))

    @property
    def queued(self) -> int:
        """Requests that wait for their first step."""
        return len(self.engine.scheduler.waiting) + len(self._taken) + len(self._commands)

    @property
    def running(self) -> int:
        """Requests in memory."""
        return len(self.engine.scheduler.running)

    @property
    def swapped(self) -> int:
        """Requests that were preempted and wait in host memory."""
        return len(self.engine.scheduler.swapped)

    @property
    def active(self) -> int:
        """Requests that were accepted and have not ended."""
        return len(self._live) + len(self._taken) + len(self._commands)

    def heartbeat(self) -> Health:
        """Never a generated request: only whether the loop turns. An idle engine is well."""
        alive = self.error is None and self._thread.is_alive()
        return self._pulse.health("" if alive else named(self.error))

    async def drain(self, timeout: float) -> bool:
        """Accept nothing more, wait until all requests ended, and abort what is left after `timeout` seconds. Returns
        whether nothing had to be aborted."""
        self.accepting = False
        end = time.monotonic() + timeout
        while self.active and self.error is None:
            if time.monotonic() >= end:
                self._send(self._abort_all)
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Abort everything, end the thread and the chat template's process and release the engine; closing twice is
        fine. Returns whether the thread ended: one whose step still hangs after `timeout` seconds is left to itself."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        atexit.unregister(self.close)
        if self.built.chat is not None:
            self.built.chat.close()
        if self._thread is threading.current_thread():
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _check_open(self, more: int = 1) -> None:
        if self.error is not None:
            raise dead(self.error)
        if not self.accepting or self._closing:
            raise Overloaded("the server is shutting down", RETRY_AFTER)
        # Refused at once: the engine's own check would come after the step under way.
        limit = self.engine.limits.max_queued
        if more <= limit < self.queued + more:
            self.rejected += 1
            raise Overloaded(f"the queue is full: {self.queued} requests are waiting", RETRY_AFTER)

    def _send(self, command: Callable[[], None]) -> bool:
        """Hand a command to the engine's thread; False when that thread takes no more."""
        with self._wake:
            if self._closing:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    async def _ask(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, on the engine's thread."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                if self.error is not None:
                    raise dead(self.error)
                result = work()
            except BaseException as error:
                self._call(loop, settle, answer, None, told(error))
                if not isinstance(error, Exception):
                    raise  # it ends the engine
            else:
                self._call(loop, settle, answer, result, None)

        if not self._send(run):
            raise dead(self.error)
        return await answer

    # On the engine's thread

    def _run(self) -> None:
        error: BaseException = EngineDead("the engine was closed")
        try:
            while self._turn():
                pass
        except BaseException as failure:  # whoever ends the thread, SystemExit too, is named to those who wait
            error = failure
        self._end(error)

    def _turn(self) -> bool:
        """One turn: commands, then a step. False when it is time to end."""
        with self._wake:
            while not (self._commands or self._closing or self.engine.unfinished):
                self._pulse.rest()
                self._look(time.monotonic())
                self._wake.wait(timeout=1.0)
            if self._closing:
                return False
            self._taken, self._commands = self._commands, self._taken
            self._pulse.turn(self.engine.stats.steps - len(self.engine.flight) + 1)
        while self._taken:
            self._taken.popleft()()
        if self.engine.unfinished:
            self._publish(self.engine.step())
        now = time.monotonic()
        if now - self._looked > FACTS_EVERY:
            self._look(now)
        return True

    def _look(self, now: float) -> None:
        memory = self.engine.scheduler.memory
        self.account, self._looked = memory.account(), now

    def _add(self, streams: list[Stream], add: Callable[[], None]) -> None:
        first = streams[0]
        try:
            if self.error is not None:
                raise dead(self.error)
            for stream in streams:
                if stream.id in self._live:  # also one that ended, but whose end isn't told yet
                    raise InputError(f"request id {stream.id[:80]!r} is in use", "request_id")
            add()
        except BaseException as error:
            self.rejected += isinstance(error, Overloaded)
            self._call(first.loop, first.fail, told(error))
            if not isinstance(error, Exception):
                raise  # it ends the engine
            return
        for stream in streams:
            stream.request = self.engine.requests[stream.id]
            self._live[stream.id] = stream
        self._call(first.loop, first.accept)

    def _abort(self, id: str) -> None:
        if id in self._live:
            self.engine.abort(id)

    def _abort_all(self) -> None:
        for id in list(self._live):
            self.engine.abort(id)

    def _publish(self, outputs: list[Output]) -> None:
        """Hand a step's outputs to their streams: one call an event loop."""
        loops: dict[asyncio.AbstractEventLoop, list[tuple[Stream, Output]]] = {}
        seen: list[tuple[Output, Request]] = []
        for output in outputs:
            stream = self._live[output.request]
            assert stream.request is not None, "an output of a request that wasn't taken"
            loops.setdefault(stream.loop, []).append((stream, output))
            if stream.request.prefix is None:  # what the operator registers isn't a client's request
                seen.append((output, stream.request))
                self.aborted += output.done and output.finish_reason == "abort"
            if output.done:
                del self._live[output.request]
        for loop, batch in loops.items():
            self._call(loop, deliver, batch)
        if self.observer is not None:
            self.observer.stepped(seen, self.engine.clock())

    def _call(self, loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the caller's loop is closed
            for id in [stream.id for stream in self._live.values() if stream.loop is loop]:
                self.engine.abort(id)

    def _end(self, error: BaseException) -> None:
        """Nothing will be served any more: tell everybody, then release the engine."""
        with self._wake:
            died, self._closing = not self._closing, True
            self.error = error if died else EngineDead("the engine was closed")
            commands = [*self._taken, *self._commands]  # adds among them fail, now that `error` is set; aborts pass
            self._taken.clear()
            self._commands.clear()
            streams, self._live = list(self._live.values()), {}
        for command in commands:
            command()
        for stream in streams:
            self._call(stream.loop, stream.fail, dead(error))
        try:
            if died and self.on_death is not None:
                self.on_death()
        finally:
            self.engine.close()
