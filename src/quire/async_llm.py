"""AsyncLLM: an engine for asyncio callers. What the server stands on.

The engine is on a thread of this process, or in a process of its own (quire.link): either way requests are sent to it
as messages, and what a step brought comes back as one. Text is made here, on the event loops of the callers.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

from quire.control.memory import Account
from quire.control.rest import LEVELS
from quire.errors import EngineDead, InputError, Overloaded, PrefixTaken, QuireError, UnknownPrefix, shown
from quire.link.front import Front, Link
from quire.link.messages import (
    MODES,
    MOST_ID,
    MOST_REQUESTS,
    MOST_TAGS,
    Abort,
    Add,
    Asked,
    Care,
    Look,
    Prefixes,
    Register,
    Release,
    described,
)
from quire.link.pulse import Health
from quire.text.outputs import Assembly, RequestOutput, check_registered
from quire.text.prompts import Messages, Prompt, Prompts, characters, engine_config
from quire.text.streams import Observer, Record, Stream, dead, named
from quire.vocabulary.columns import MOST_PIXELS
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.build import Built

log = logging.getLogger("quire")
RETRY_AFTER = 2  # seconds
CLOSE_SECONDS = 10.0  # for the engine to end
PREFIX = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class AsyncLLM(Front):
    """A model for asyncio callers. `settings` are EngineConfig's fields; `observer` sees every step. `engine_process`
    gives the engine a process of its own.

    The engine counts as stalled when one turn of its loop takes longer than `stall_after` seconds.
    """

    def __init__(
        self, model: str | None = None, *, progress: bool = False, engine_process: bool = False, **settings: Any
    ) -> None:
        config = engine_config(model, settings)
        if engine_process:
            from quire.link.process import launch

            link, prompts, _ = launch(config, progress)
            self._set_up(link, prompts)
        else:
            from quire.build import build

            self._set_up(*_threaded(build(config, progress), 60.0))

    @classmethod
    def of(cls, built: Built, *, observer: Observer | None = None, stall_after: float = 60.0) -> AsyncLLM:
        """An AsyncLLM over an engine that is built already, on a thread."""
        return cls.over(*_threaded(built, stall_after), observer=observer)

    @classmethod
    def over(cls, link: Link, prompts: Prompts, *, observer: Observer | None = None) -> AsyncLLM:
        """An AsyncLLM over a link to an engine."""
        self = cls.__new__(cls)
        self._set_up(link, prompts, observer)
        return self

    def _set_up(self, link: Link, prompts: Prompts, observer: Observer | None = None) -> None:
        self.accepting, self.restarting = True, False
        self._ids = itertools.count()
        self._registered: dict[str, list[int]] = {}  # prefixes that are there, or are to be once the engine is
        atexit.register(self.close)
        super().__init__(link, prompts, observer)

    # For callers, on their event loops

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        salt: str = "",
        patient: bool = False,
        media: tuple[Medium, ...] = (),
        pixels: Sequence[Pixels] = (),
    ) -> Stream:
        """Queue a request; returns once the engine took it. InputError, Overloaded or EngineDead if it didn't. `media`
        are the prompt's pictures, `pixels` what the encoder gets of them (see quire.text.prompts.Prompt)."""
        id = request_id or f"async-{next(self._ids)}"
        seen = [media] if media else ()
        [stream] = await self.submit_all(
            [(id, prompt_ids)], params, salt=salt, patient=patient, media=seen, pixels=pixels
        )
        return stream

    async def submit_all(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams,
        *,
        salt: str = "",
        patient: bool = False,
        media: Sequence[tuple[Medium, ...]] = (),
        pixels: Sequence[Pixels] = (),
        client: str = "",
    ) -> list[Stream]:
        """As `submit`, for several (request id, token ids) at once: the engine takes all of them, or none. `media`:
        each prompt's, if any has some. Clients share the engine, and the requests of a client share its part."""
        arrival = time.monotonic()
        for id, _ in prompts:
            if not 0 < len(id) <= MOST_ID:
                raise InputError(f"a request id has 1 to {MOST_ID} characters, got {len(id)}", "request_id")
        if len(prompts) > MOST_REQUESTS:
            raise InputError(f"there are {len(prompts)} prompts; at most {MOST_REQUESTS} are taken at once", "prompt")
        self._check_open()
        size = sum(map(len, (*(params.bad_words or ()), *(params.stop or ()), *(prompt for _, prompt in prompts))))
        checked = partial(self.prompts.checked, prompts, params, salt, media)
        quick = self.prompts.quick(params)
        tokens, resolved = await (self.prompts.apart(size, checked) if quick else self.prompts.formed(checked))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        streams = []
        for (id, _), ids in zip(prompts, tokens):
            record = Record(id, len(ids), resolved, arrival)
            streams.append(self._stream(answer, record, ids, patient))
        each = zip(streams, tokens, media or repeat(()))
        asked = tuple(Asked(stream.number, stream.id, ids, seen) for stream, ids, seen in each)
        shown = tuple({one.key: one for one in pixels}.values())
        if (bytes := sum(len(one.data) for one in shown)) > MOST_PIXELS:
            raise InputError(
                f"the pictures have {bytes} bytes, prepared; {MOST_PIXELS} may be sent", "multi_modal_data"
            )
        await self._ask(answer, lambda key: Add(key, asked, resolved, salt, shown, client), streams)
        return streams

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
        return self._results(partial(self.prompts.read_one, prompt, salt), sampling_params, request_id, salt)

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
            add_special_tokens=add_special_tokens, variables=kwargs, salt=salt,
        )  # fmt: skip
        return self._results(read, sampling_params, request_id, salt)

    async def _results(
        self, read: Callable[[], Awaitable[Prompt]], given: SamplingParams | None, request_id: str | None, salt: str
    ) -> AsyncIterator[RequestOutput]:
        prompt = await read()
        params = given if given is not None else self.prompts.params()
        _, ids, media, pixels = prompt
        stream = await self.submit(ids, params, request_id, salt=salt, media=media, pixels=pixels)
        assembly = Assembly(stream.id, prompt.text, prompt.ids, params, self.prompts.decode_token)
        try:
            async for output in stream:
                assembly.push(output)
                if output.done:
                    assembly.finish(stream.record, time.monotonic())
                yield assembly.snapshot()
        finally:
            if not stream.done:
                self.abort(stream.id)

    async def register_prefix(self, name: str, prefix: str | Sequence[int]) -> int:
        """Compute a text or token ids and pin them as the prefix `name`; returns their number once requests find them.
        PrefixTaken, PrefixesFull, InputError, Overloaded or EngineDead otherwise. Leaving early ends it."""
        self._check_open()
        tokens = await self.prompts.apart(characters(prefix), partial(self.prompts.prefix, name, prefix))
        record = Record(f"prefix:{name}", len(tokens), PREFIX, time.monotonic(), prefix=True)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = self._stream(answer, record, tokens)
        if stream.id in self._named:
            raise PrefixTaken(f"a prefix called {name[:60]!r} is registered already", "name")
        await self._ask(answer, lambda key: Register(key, stream.number, name, tokens), [stream])
        last = None
        try:
            async for output in stream:
                last = output
        finally:
            if not stream.done:
                self.abort(stream.id)
        assert last is not None, "a prefix was computed without an output"
        check_registered(name, last)
        self._registered[name] = tokens
        return len(tokens)

    async def release_prefix(self, name: str) -> None:
        """Let go of a registered prefix; requests that use its pages keep them. UnknownPrefix if there is none."""
        self._registered.pop(name, None)
        if not await self._ask(asyncio.get_running_loop().create_future(), lambda key: Release(key, name)):
            raise UnknownPrefix(f"no prefix called {name[:60]!r} is registered", "name")

    async def prefixes(self) -> tuple[dict[str, int], frozenset[str]]:
        """The lengths in tokens of the registered prefixes and of those being computed, and which are ready."""
        held, ready = await self._ask(asyncio.get_running_loop().create_future(), Prefixes)
        return held, frozenset(ready)

    async def look(self) -> str:
        """What is in memory now, page by page, as JSON (see control.scene), behind what it took and how busy the engine
        was (see link.messages.Look). EngineDead if there is none."""
        found = await self._ask(asyncio.get_running_loop().create_future(), Look)
        assert isinstance(found, str), "a look is answered with text"
        return found

    async def reset_prefix_cache(self) -> int:
        """Forget every cached prefix and picture; registered prefixes stay. Requests that run keep what they hold, and
        nobody else finds it. Returns the number of pages that were emptied."""
        return int(await self._ask(asyncio.get_running_loop().create_future(), lambda key: Care(key, "reset")))

    async def sleep(self, level: int = 1, mode: str = "refuse") -> dict[str, Any]:
        """Let go of the KV memory, and of the weights: to host memory (`level` 1) or for good (2), until `wake_up`;
        meanwhile requests get Asleep. With requests under way NotIdle, or with `mode` "wait" once they have ended, or
        with "abort" when they were. Returns how it is, as `rest`."""
        if mode not in MODES:
            raise InputError(f"mode is {shown(mode)}; it is one of {', '.join(MODES)}", "mode")
        if type(level) is not int or level not in LEVELS:  # as the engine says it
            raise InputError(f"level is {shown(level)}: an engine sleeps at level 1 or 2", "level")
        return await self._care("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Take back what sleeps, or only "weights" or "kv_cache", in that order. With all of it there requests are
        taken, and registered prefixes computed again. Overloaded if that isn't possible now. Returns as `rest`."""
        if len(tags or ()) > MOST_TAGS:
            raise InputError(f"there are {len(tags or ())} tags; {MOST_TAGS} are the most", "tags")
        return await self._care("wake", tags=tuple(tags or ()))

    async def rest(self) -> dict[str, Any]:
        """Whether the engine sleeps: {"is_sleeping", "level" (0: it doesn't), "away": what sleeps}."""
        return await self._care("rest")

    async def is_sleeping(self) -> bool:
        """Whether anything of the engine does."""
        return bool((await self.rest())["is_sleeping"])

    async def _care(self, what: str, **how: Any) -> dict[str, Any]:
        answer = asyncio.get_running_loop().create_future()
        found: dict[str, Any] = json.loads(await self._ask(answer, lambda key: Care(key, what, **how)))
        return found

    @property
    def account(self) -> Account:
        """The memory, as it was lately."""
        return self.link.facts.account

    @property
    def queued(self) -> int:
        """Requests that wait for their first step."""
        return self.link.queues.waiting + sum(len(question.streams) for question in list(self._questions.values()))

    @property
    def running(self) -> int:
        """Requests in memory."""
        return self.link.queues.running

    @property
    def swapped(self) -> int:
        """Requests that were preempted and wait in host memory."""
        return self.link.queues.swapped

    @property
    def active(self) -> int:
        """Requests that were accepted and have not ended, and those being asked for."""
        return len(self._live)

    def heartbeat(self) -> Health:
        """Never a generated request: only whether the loop turns. An idle engine is well."""
        if self.error is not None or self._closing:
            return Health(False, False, 0.0, named(self.error))
        return self.link.health()

    async def drain(self, timeout: float) -> bool:
        """Accept nothing more, wait until all requests ended, and abort what is left after `timeout` seconds. Returns
        whether nothing had to be aborted."""
        self.accepting = False
        end = time.monotonic() + timeout
        while self.active and self.error is None:
            if time.monotonic() >= end:
                self.link.send(Abort(None))
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Abort everything, end the engine and the chat template's process; closing twice is fine. Returns whether the
        engine ended: one whose step still hangs after `timeout` seconds is left to itself."""
        self._closing = True
        atexit.unregister(self.close)
        self.prompts.close()
        ended = self.link.close(timeout)
        self._died(EngineDead("the engine was closed"))
        return ended

    async def restart(self) -> None:
        """Start an engine whose process died again, and compute the registered prefixes; what was under way stays lost.
        StartupError if it can't be started."""
        assert self.error is not None, "only a dead engine is started again"
        self.restarting, dead_link = True, self.link
        try:
            self.revive(await asyncio.get_running_loop().run_in_executor(None, dead_link.again))
        except asyncio.CancelledError:
            dead_link.abandon()
            raise
        finally:
            self.restarting = False
        self.link.attach()
        for name, tokens in list(self._registered.items()):
            try:
                await self.register_prefix(name, tokens)
            except EngineDead:
                raise
            except QuireError as error:
                log.error("the prefix %r can't be registered again: %s", name, error)

    def _check_open(self) -> None:
        if self.restarting:
            raise Overloaded("the engine stopped, and is being started again", RETRY_AFTER)
        if self.error is not None:
            raise dead(self.error)
        if not self.accepting or self._closing:
            raise Overloaded("the server is shutting down", RETRY_AFTER)
        # Refused at once: the engine's own check would come after the step under way.
        waiting = self.link.queues.batches + sum(bool(one.streams) for one in list(self._questions.values()))
        if waiting >= self.limits.max_queued:
            self._refused()
            most = self.limits.max_queued
            raise Overloaded(f"the queue is full: {waiting} of {most} requests are waiting", RETRY_AFTER)


def _threaded(built: Built, stall_after: float) -> tuple[Link, Prompts]:
    """A link to an engine on a thread, and what is known of its texts."""
    from quire.link.thread import ThreadLink

    ready = described(built.engine, built.plan.lines(), built.notices)
    ends = built.engine.scheduler.eos_ids
    prompts = Prompts(built.tokenizer, built.chat, built.engine.limits, built.defaults, built.sight, tuple(ends))
    return ThreadLink(built.engine, ready, stall_after), prompts
