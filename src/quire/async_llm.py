"""AsyncLLM: an engine for asyncio callers; the basis of the server.

The engine runs on a thread of this process or in a process of its own (quire.ipc). Either way requests are sent to it
as messages, and the outputs of a step return as one. Text is produced here, on the callers' event loops.
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

from quire.core.sleep import SLEEP_LEVELS
from quire.errors import EngineDead, InputError, Overloaded, PrefixTaken, QuireError, UnknownPrefix, short_repr
from quire.ipc.engine_client import EngineClient, RequestTracker
from quire.ipc.heartbeat import Health
from quire.ipc.messages import (
    MAX_ID_CHARS,
    MAX_REQUESTS,
    MAX_TAGS,
    SLEEP_MODES,
    AbortRequests,
    AddRequests,
    AdminRequest,
    ListPrefixes,
    NewRequest,
    RegisterPrefix,
    ReleasePrefix,
    SnapshotRequest,
    engine_ready,
)
from quire.memory.answers import Account
from quire.protocol.columns import MAX_PIXEL_BYTES
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.text.input_processor import InputProcessor, Messages, Prompt, engine_config, num_chars
from quire.text.output_stream import OutputStream, RequestRecord, RequestTrace, describe_error, engine_dead_error
from quire.text.outputs import RequestOutput, RequestOutputBuilder, check_registered

if TYPE_CHECKING:
    from quire.startup.build import BuiltEngine

log = logging.getLogger("quire")
RETRY_AFTER = 2  # seconds
CLOSE_SECONDS = 10.0  # for the engine to end
PREFIX_PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)


class AsyncLLM(RequestTracker):
    """A model for asyncio callers. `settings` are those of EngineConfig.of. `engine_process` runs the engine in
    a process of its own.

    The engine counts as stalled if one iteration of its loop takes longer than `stall_after` seconds.
    """

    def __init__(
        self, model: str | None = None, *, progress: bool = False, engine_process: bool = False, **settings: Any
    ) -> None:
        config = engine_config(model, settings)
        if engine_process:
            from quire.startup.engine_process import launch_engine_process

            engine_client, prompts, _ = launch_engine_process(config, progress)
            self._set_up(engine_client, prompts)
        else:
            from quire.startup.build import build

            self._set_up(*_make_thread_client(build(config, progress), 60.0))

    @classmethod
    def of(cls, built: BuiltEngine, *, stall_after: float = 60.0) -> AsyncLLM:
        """Return an AsyncLLM over an engine that is already built, on a thread."""
        return cls.over(*_make_thread_client(built, stall_after))

    @classmethod
    def over(cls, link: EngineClient, prompts: InputProcessor) -> AsyncLLM:
        """Return an AsyncLLM over a connection to an engine."""
        self = cls.__new__(cls)
        self._set_up(link, prompts)
        return self

    def _set_up(self, engine_client: EngineClient, prompts: InputProcessor) -> None:
        self.accepting, self.restarting = True, False
        self._ids = itertools.count()
        self._registered_prefixes: dict[str, list[int]] = {}  # registered again after a restart
        atexit.register(self.close)
        super().__init__(engine_client, prompts)

    # For callers, on their event loops

    async def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        salt: str = "",
        media: tuple[ImageItem, ...] = (),
        pixels: Sequence[ImagePixels] = (),
    ) -> OutputStream:
        """Queue a request; return once the engine has accepted it. Raise InputError, Overloaded or EngineDead if it was
        not accepted. `media` are the prompt's images, `pixels` the encoder's inputs (see
        quire.text.input_processor.Prompt)."""
        id = request_id or f"async-{next(self._ids)}"
        images = [media] if media else ()
        [stream] = await self.submit_all([(id, prompt_ids)], params, salt=salt, media=images, pixels=pixels)
        return stream

    async def submit_all(
        self,
        prompts: Sequence[tuple[str, Sequence[int]]],
        params: SamplingParams,
        *,
        salt: str = "",
        patient: bool = False,
        media: Sequence[tuple[ImageItem, ...]] = (),
        pixels: Sequence[ImagePixels] = (),
        client: str = "",
        trace: RequestTrace | None = None,
    ) -> list[OutputStream]:
        """Like `submit`, for several (request id, token ids) at once: the engine accepts all of them, or none. `media`
        has the images of each prompt, or is empty. The requests of one `client` share its share of the engine. `trace`
        receives the ends of the requests, if they are accepted."""
        arrival = time.monotonic()
        for id, _ in prompts:
            if not 0 < len(id) <= MAX_ID_CHARS:
                raise InputError(f"a request id has 1 to {MAX_ID_CHARS} characters, got {len(id)}", "request_id")
        if len(prompts) > MAX_REQUESTS:
            raise InputError(f"there are {len(prompts)} prompts; at most {MAX_REQUESTS} are taken at once", "prompt")
        self._check_open()
        size = sum(map(len, (*(params.bad_words or ()), *(params.stop or ()), *(prompt for _, prompt in prompts))))
        validate = partial(self.prompts.validate, prompts, params, salt, media)
        if self.prompts.is_grammar_ready(params):
            tokens, resolved = await self.prompts.offload(size, validate)
        else:
            tokens, resolved = await self.prompts.run_grammar_work(params, validate, client)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        streams = []
        for (id, _), ids in zip(prompts, tokens):
            record = RequestRecord(id, len(ids), resolved, arrival, trace=trace)
            streams.append(self._new_stream(answer, record, ids, patient))
        each = zip(streams, tokens, media or repeat(()))
        requests = tuple(NewRequest(stream.number, stream.id, ids, images) for stream, ids, images in each)
        distinct = tuple({one.key: one for one in pixels}.values())
        if (bytes := sum(len(one.data) for one in distinct)) > MAX_PIXEL_BYTES:
            raise InputError(
                f"the images have {bytes} bytes, prepared; {MAX_PIXEL_BYTES} may be sent", "multi_modal_data"
            )
        await self._send_and_wait(
            lambda key: AddRequests(key, requests, resolved, salt, distinct, client), streams, answer
        )
        return streams

    def generate(
        self,
        prompt: str | Sequence[int] | Mapping[str, Any],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        """Continue a prompt (as in LLM.generate). Each output has the whole result so far; if the reader is slow,
        intermediate outputs are skipped. Leaving the iterator aborts the request."""
        return self._stream_results(
            partial(self.prompts.process_prompt_async, prompt, salt), sampling_params, request_id, salt
        )

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
        """Like `generate`, for the answer to a conversation. `kwargs` are variables of the chat template."""
        read = partial(
            self.prompts.process_chat_async, messages, add_generation_prompt, continue_final_message,
            documents=documents,
            add_special_tokens=add_special_tokens, variables=kwargs, salt=salt,
        )  # fmt: skip
        return self._stream_results(read, sampling_params, request_id, salt)

    async def _stream_results(
        self, read: Callable[[], Awaitable[Prompt]], given: SamplingParams | None, request_id: str | None, salt: str
    ) -> AsyncIterator[RequestOutput]:
        prompt = await read()
        params = given if given is not None else self.prompts.make_params()
        _, ids, images, pixels, _ = prompt
        stream = await self.submit(ids, params, request_id, salt=salt, media=images, pixels=pixels)
        builder = RequestOutputBuilder(stream.id, prompt.text, prompt.ids, params, self.prompts.decode_token)
        try:
            async for output in stream:
                builder.push(output)
                if output.done:
                    builder.finish(stream.record, time.monotonic())
                yield builder.snapshot()
        finally:
            if not stream.done:
                self.abort(stream.id)

    async def register_prefix(self, name: str, prefix: str | Sequence[int]) -> int:
        """Compute a text or token ids and pin them as the prefix `name`; return the number of tokens once requests can
        use it. Raise PrefixTaken, PrefixesFull, InputError, Overloaded or EngineDead. Cancelling the call aborts the
        registration."""
        self._check_open()
        tokens = await self.prompts.offload(num_chars(prefix), partial(self.prompts.process_prefix, name, prefix))
        record = RequestRecord(f"prefix:{name}", len(tokens), PREFIX_PARAMS, time.monotonic(), is_prefix=True)
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = self._new_stream(answer, record, tokens)
        if stream.id in self._streams_by_id:
            raise PrefixTaken(f"a prefix called {name[:60]!r} is registered already", "name")
        await self._send_and_wait(lambda key: RegisterPrefix(key, stream.number, name, tokens), [stream], answer)
        last = None
        try:
            async for output in stream:
                last = output
        finally:
            if not stream.done:
                self.abort(stream.id)
        assert last is not None, "a prefix was computed without an output"
        check_registered(name, last)
        self._registered_prefixes[name] = tokens
        return len(tokens)

    async def release_prefix(self, name: str) -> None:
        """Release a registered prefix; requests that use its pages keep them. Raise UnknownPrefix if there is none."""
        self._registered_prefixes.pop(name, None)
        if not await self._send_and_wait(lambda key: ReleasePrefix(key, name)):
            raise UnknownPrefix(f"no prefix called {name[:60]!r} is registered", "name")

    async def prefixes(self) -> tuple[dict[str, int], frozenset[str]]:
        """Return the lengths in tokens of the registered prefixes and of those being computed, and the names of those
        that are ready."""
        held, ready = await self._send_and_wait(ListPrefixes)
        return held, frozenset(ready)

    async def look(self) -> str:
        """Return a snapshot of the memory, page by page, as JSON (see quire.core.snapshot), after a header with its
        cost and the engine's load (see quire.ipc.messages.SnapshotRequest). Raise EngineDead if there is no engine."""
        snapshot = await self._send_and_wait(SnapshotRequest)
        assert isinstance(snapshot, str), "a snapshot is text"
        return snapshot

    async def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes and images but the registered prefixes. Running requests keep their pages, which
        other requests can no longer use. Return the number of pages that were freed."""
        return int(await self._send_and_wait(lambda key: AdminRequest(key, "reset")))

    async def sleep(self, level: int = 1, mode: str = "refuse") -> dict[str, Any]:
        """Release the KV memory and the weights until `wake_up`; meanwhile requests get Asleep. The weights are moved
        to host memory (`level` 1) or dropped (2). With unfinished requests raise NotIdle, or with `mode` "wait" wait
        for their end, or with "abort" abort them. Return the state, as `rest`."""
        if mode not in SLEEP_MODES:
            raise InputError(f"mode is {short_repr(mode)}; it is one of {', '.join(SLEEP_MODES)}", "mode")
        if type(level) is not int or level not in SLEEP_LEVELS:  # the engine's own message
            raise InputError(f"level is {short_repr(level)}: an engine sleeps at level 1 or 2", "level")
        return await self._admin("sleep", level=level, mode=mode)

    async def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Restore what `sleep` released, or only "weights" or "kv_cache", in that order. Once all is restored, requests
        are accepted, and registered prefixes are computed again. Raise Overloaded if that is not possible now. Return
        the state, as `rest`."""
        if len(tags or ()) > MAX_TAGS:
            raise InputError(f"there are {len(tags or ())} tags; {MAX_TAGS} are the most", "tags")
        return await self._admin("wake", tags=tuple(tags or ()))

    async def rest(self) -> dict[str, Any]:
        """Return whether the engine sleeps: {"is_sleeping", "level" (0: awake), "away": what is released}."""
        return await self._admin("rest")

    async def is_sleeping(self) -> bool:
        """Return True if the engine has released its weights or its KV memory."""
        return bool((await self.rest())["is_sleeping"])

    async def _admin(self, what: str, **how: Any) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(await self._send_and_wait(lambda key: AdminRequest(key, what, **how)))
        return state

    @property
    def account(self) -> Account:
        """The latest memory usage."""
        return self.engine_client.metrics.account

    @property
    def queued(self) -> int:
        """The number of requests that wait for their first step."""
        return self.engine_client.queue_sizes.waiting + self.num_pending

    @property
    def num_pending(self) -> int:
        """The number of requests that were sent and not accepted yet."""
        return sum(len(reply.streams) for reply in list(self._pending_replies.values()))

    @property
    def running(self) -> int:
        """The number of running requests."""
        return self.engine_client.queue_sizes.running

    @property
    def swapped(self) -> int:
        """The number of preempted requests that are in host memory."""
        return self.engine_client.queue_sizes.swapped

    @property
    def active(self) -> int:
        """The number of accepted requests that have not ended, and of those being submitted."""
        return len(self._streams_by_number)

    def heartbeat(self) -> Health:
        """Return the engine's health. No request is generated for it: only the loop's progress counts, so an idle
        engine is healthy."""
        if self.error is not None or self._closing:
            return Health(False, False, 0.0, describe_error(self.error))
        return self.engine_client.health()

    def stop_accepting(self) -> None:
        """Refuse new requests from now on."""
        self.accepting = False

    async def drain(self, timeout: float) -> bool:
        """Accept no more requests, wait until all have ended, and abort the rest after `timeout` seconds. Return False
        if some were aborted."""
        self.stop_accepting()
        end = time.monotonic() + timeout
        while self.active and self.error is None:
            if time.monotonic() >= end:
                self.engine_client.send(AbortRequests(None))
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self, timeout: float = CLOSE_SECONDS) -> bool:
        """Abort all requests, and end the engine and the chat template's process. Closing twice is allowed. Return
        False if the engine did not end: one whose step still hangs after `timeout` seconds is abandoned."""
        self._closing = True
        atexit.unregister(self.close)
        self.prompts.close()
        ended = self.engine_client.close(timeout)
        self._handle_engine_exit(EngineDead("the engine was closed"))
        return ended

    async def restart(self) -> None:
        """Restart an engine whose process died, and compute the registered prefixes again. The unfinished requests are
        lost. Raise StartupError if it cannot be started."""
        assert self.error is not None, "restart of a live engine"
        self.restarting, dead_client = True, self.engine_client
        try:
            self.connect(await asyncio.get_running_loop().run_in_executor(None, dead_client.start_replacement))
        except asyncio.CancelledError:
            dead_client.cancel_replacement()
            raise
        finally:
            self.restarting = False
        self.engine_client.attach_event_loop()
        for name, tokens in list(self._registered_prefixes.items()):
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
            raise engine_dead_error(self.error)
        if not self.accepting or self._closing:
            raise Overloaded("the server is shutting down", RETRY_AFTER)
        # Refuse at once: the engine's own check would come after the current step.
        waiting = self.engine_client.queue_sizes.batches + sum(
            bool(reply.streams) for reply in list(self._pending_replies.values())
        )
        if waiting >= self.limits.max_queued:
            self._count_rejected()
            most = self.limits.max_queued
            raise Overloaded(f"the queue is full: {waiting} of {most} requests are waiting", RETRY_AFTER)


def _make_thread_client(built: BuiltEngine, stall_after: float) -> tuple[EngineClient, InputProcessor]:
    """Return a client of an engine on a thread, and the processor of its prompts."""
    from quire.ipc.thread_client import ThreadEngineClient

    ready = engine_ready(built.engine, built.memory_plan.to_lines(), built.notices)
    eos_ids = tuple(built.engine.scheduler.eos_ids)
    prompts = InputProcessor(
        built.tokenizer, built.chat_template, built.engine.limits, built.default_sampling, built.image_loader, eos_ids
    )
    return ThreadEngineClient(built.engine, ready, stall_after), prompts
