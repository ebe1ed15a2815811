"""Offline use: `LLM(model).generate(prompts, sampling_params)`. One engine, driven by the caller's thread."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from quire.core.outputs import BranchOutput
from quire.errors import EngineDead, InputError, Overloaded
from quire.protocol.sampling_params import SamplingParams
from quire.text.embedding import EMBEDDING_PARAMS, embedding_vector
from quire.text.input_processor import InputProcessor, Messages, Prompt, engine_config
from quire.text.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    RequestOutput,
    RequestOutputBuilder,
    check_registered,
)
from quire.text.request_detokenizer import RequestDetokenizer
from quire.text.session import Node, session_params

if TYPE_CHECKING:
    from quire.core.engine import Engine
    from quire.pool import Pool
    from quire.startup.build import BuiltEngine
    from quire.startup.memory_plan import PoolMember
    from quire.text.tokenizer import Tokenizer

log = logging.getLogger("quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """The parameters of LLM.beam_search, with vLLM's names. `temperature` is accepted for compatibility and has no
    effect: beams are ranked by the model's own probabilities. SamplingParams(beam_width=...) offers more: early
    stopping, stop tokens, penalties, log-probabilities."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def sampling(self) -> SamplingParams:
        """Return the equivalent SamplingParams, which return every beam. Raise InputError for a value out of its
        range."""
        params = SamplingParams(
            beam_width=self.beam_width,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            length_penalty=self.length_penalty,
            logprobs=1,
        )
        return replace(params, n=self.beam_width)


class OfflineRequest(NamedTuple):
    """One request of a call."""

    id: str
    prompt: Prompt
    params: SamplingParams


class LLM:
    """A model that is ready to generate. `settings` are those of EngineConfig.of (dtype, kv_tokens, ...).

    `model` is a folder, a hub id, or None for the bundled model. StartupError says what is wrong and what to change.
    Not thread-safe, and one call at a time. After a failed or interrupted call nothing of it remains, and the LLM stays
    usable. `custom_kv_cache`: a quire.Pool whose KV memory the model shares with others; it has the settings.
    """

    _pool: Pool | None = None
    _pool_member: PoolMember | None = None

    def __init__(
        self, model: str | None = None, *, progress: bool = False, custom_kv_cache: Pool | None = None, **settings: Any
    ) -> None:
        from quire.startup.build import build

        if custom_kv_cache is not None:
            custom_kv_cache.check_thread()
            self._pool, self._pool_member = custom_kv_cache, custom_kv_cache.member(model, settings)
            self._set_up(build(self._pool_member.config, progress, self._pool_member))
        else:
            self._set_up(build(engine_config(model, settings), progress))

    @classmethod
    def of(cls, built: BuiltEngine) -> LLM:
        """Return an LLM over an engine that is already built."""
        self = cls.__new__(cls)
        self._set_up(built)
        return self

    def _set_up(self, built: BuiltEngine) -> None:
        self.built, self.engine = built, built.engine
        eos_ids = tuple(built.engine.scheduler.eos_ids)
        self.prompts = InputProcessor(
            built.tokenizer,
            built.chat_template,
            built.engine.limits,
            built.default_sampling,
            built.image_loader,
            eos_ids,
        )
        self.engine.lift_queue_limit()  # the caller's list is the queue
        self._ids = count()
        self._detokenizers: dict[str, RequestDetokenizer] = {}  # of unfinished requests
        for notice in built.notices:
            log.info(notice)
        self._closed = False

    # Use

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt; return the results in the order of the prompts. `sampling_params`: one for all, one for
        each, or None for the model's defaults. Raise InputError for an invalid prompt or parameter, before anything is
        computed.

        A prompt is a text, token ids, or {"prompt": text}, which may have images: "multi_modal_data": {"image": bytes
        of a file, a uint8 array, a PIL image, or a list of these}."""
        return self._run(self._process_prompts(prompts), sampling_params, use_tqdm)

    def _process_prompts(self, prompts: Any) -> list[Prompt]:
        """Return one prompt, or each of several, as token ids."""
        single = isinstance(prompts, str | Mapping) or (bool(prompts) and type(prompts[0]) is int)
        return [self.prompts.process_prompt(prompt) for prompt in ([prompts] if single else prompts)]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        use_tqdm: bool = True,
        **kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several. `kwargs` are variables of the chat template. Images are
        image_url parts with data: URIs, as in HTTP requests."""
        single = not messages or isinstance(messages[0], Mapping)
        conversations = cast("Sequence[Messages]", [messages] if single else messages)
        rendered = [self.prompts.process_chat(item, add_generation_prompt, **kwargs) for item in conversations]
        return self._run(rendered, sampling_params, use_tqdm)

    def beam_search(self, prompts: Any, params: BeamSearchParams, *, use_tqdm: bool = False) -> list[BeamSearchOutput]:
        """Return the most likely continuations of each prompt that beam search finds, best first."""
        return [self._to_beam_output(result) for result in self.generate(prompts, params.sampling(), use_tqdm=use_tqdm)]

    def _to_beam_output(self, result: RequestOutput) -> BeamSearchOutput:
        beams = []
        for output in result.outputs:
            tokens = [*result.prompt_token_ids, *output.token_ids]
            text = None if self.tokenizer is None else self.tokenizer.decode(tokens)
            beams.append(
                BeamSearchSequence(
                    tokens, output.cumulative_logprob or 0.0, text, output.logprobs or [], output.finish_reason,
                    output.stop_reason,
                )
            )  # fmt: skip
        return BeamSearchOutput(beams)

    def register_prefix(self, name: str, prefix: str | Sequence[int]) -> int:
        """Compute a text or token ids once and keep them as the prefix `name`, for all prompts that begin with it.
        Return the number of tokens. Raise InputError, PrefixTaken, or PrefixesFull beyond the setting
        `prefix_tokens`."""
        tokens = self.prompts.process_prefix(name, prefix)
        self._check_idle()
        self.engine.register_prefix(name, tokens)
        last, done = None, False
        try:
            while self.engine.has_unfinished_requests:
                for last in self._step():
                    done = last.done
        finally:
            if not (done or self._closed):
                self.engine.release_prefix(name)
                self._abort_requests([])
        assert last is not None, "a prefix was computed without an output"
        check_registered(name, last)
        return len(tokens)

    def release_prefix(self, name: str) -> bool:
        """Release a registered prefix. Return False if there is none of that name."""
        self._check_idle()
        return self.engine.release_prefix(name)

    def reset_prefix_cache(self) -> int:
        """Drop all cached prefixes and images but the registered prefixes. Return the number of pages that were
        freed."""
        self._check_idle()
        return self.engine.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """Release the KV memory and the weights until `wake_up`. The weights are moved to host memory (level 1; on a
        CPU they stay) or dropped (level 2). Cached prefixes are lost."""
        self._check_idle()
        self.engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Restore what `sleep` released, or only "weights" or "kv_cache", in that order. Once all is restored,
        registered prefixes are computed again and prompts are accepted."""
        self._check_idle()
        self.engine.wake(tags)
        while self.engine.has_unfinished_requests:
            self._step()

    @property
    def prefixes(self) -> dict[str, int]:
        """The lengths in tokens of the registered prefixes, by name."""
        return dict(self.engine.prefix_lengths)

    def embed(self, texts: Any, *, dimensions: int | None = None) -> list[list[float]]:
        """Return the embedding of each text (a prompt as in `generate`, without images), scaled to length 1: `hidden`
        numbers, or the first `dimensions` of them. The setting `pooling` selects the kind of pooling. Raise InputError
        for an invalid text, before anything is computed."""
        self.prompts.limits.check_embedding(dimensions)
        prompts = self._process_prompts(texts)
        if any(prompt.images for prompt in prompts):
            raise InputError("images have no embeddings here", "prompt")
        jobs = self._add_requests(prompts, [EMBEDDING_PARAMS] * len(prompts))
        finished: dict[str, BranchOutput] = {}
        try:
            while len(finished) < len(jobs):
                finished |= {output.request_id: output for output in self._step() if output.done}
        finally:
            self._abort_requests(jobs)
        return [embedding_vector(finished[job.id], dimensions).tolist() for job in jobs]

    def stream(self, prompt: Any, params: SamplingParams | None = None) -> Iterator[BranchOutput]:
        """Continue one prompt and yield its outputs step by step. Leaving the iterator aborts the request."""
        ready = prompt if isinstance(prompt, Prompt) else self.prompts.process_prompt(prompt)
        jobs = self._add_requests([ready], [params or self.prompts.make_params()])
        done = False
        try:
            while not done:
                for output in self._step():
                    done = done or output.done
                    yield output
        finally:
            self._abort_requests(jobs)

    @contextmanager
    def session(self, prompt: Any, *, width: int = 8, max_tokens: int = 256, top: int = 20) -> Iterator[Node]:
        """Open a prompt that the caller continues token by token, in up to `width` branches of up to `max_tokens` (see
        quire.text.session). The memory must have room for all of them. No other call is possible until the session is
        left."""
        [job] = jobs = self._add_requests(
            [self.prompts.process_prompt(prompt)], [session_params(width, max_tokens, top)], waits=True
        )
        request = self.engine.requests[job.id]
        try:
            yield Node(self.engine, self._step, request, request.live_seqs[0])
        finally:
            self._abort_requests(jobs)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self.prompts.encode(text, add_special_tokens)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, or None."""
        return self.prompts.tokenizer

    def get_tokenizer(self) -> Tokenizer | None:
        """Return `tokenizer`."""
        return self.tokenizer

    def close(self) -> None:
        """Release the engine and end the chat template's process. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self.prompts.close()
            self.engine.close()
            if self._pool is not None and self._pool_member is not None:
                self._pool.leave(self.engine, self._pool_member.view)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The loop

    def _run(
        self, prompts: list[Prompt], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        jobs = self._add_requests(prompts, self._params_per_prompt(params, len(prompts)))
        decode = self.prompts.decode_token
        builders = {
            job.id: RequestOutputBuilder(job.id, job.prompt.text, job.prompt.ids, job.params, decode) for job in jobs
        }
        requests = {job.id: self.engine.requests[job.id] for job in jobs}
        try:
            with _ProgressBar(len(jobs), self.engine, use_tqdm) as bar, _DeferredInterrupts() as interrupts:
                left = len(jobs)
                while left:
                    for output in self._step(interrupts):
                        builders[output.request_id].push(output)
                        if output.done:
                            builders[output.request_id].finish(requests[output.request_id], self.engine.clock())
                            left -= 1
                    bar.show(len(jobs) - left)
        finally:
            self._abort_requests(jobs)
        return [builders[job.id].result for job in jobs]

    def _params_per_prompt(
        self, params: SamplingParams | Sequence[SamplingParams] | None, number: int
    ) -> list[SamplingParams]:
        """Return the parameters of each prompt."""
        if params is None or isinstance(params, SamplingParams):
            return [params or self.prompts.make_params()] * number
        each = list(params)
        if len(each) != number:
            raise InputError(f"there are {number} prompts, but {len(each)} sampling_params", "sampling_params")
        if not all(isinstance(item, SamplingParams) for item in each):
            raise InputError("sampling_params must be SamplingParams, or a list of them", "sampling_params")
        return each

    def _add_requests(
        self, prompts: list[Prompt], params: list[SamplingParams], waits: bool = False
    ) -> list[OfflineRequest]:
        """Add all requests to the engine, or none."""
        self._check_idle()
        jobs: list[OfflineRequest] = []
        distinct = {id(each): each for each in params}
        resolved = {key: self.prompts.resolve_params(each) for key, each in distinct.items()}
        try:
            for prompt, each in zip(prompts, params):
                job = OfflineRequest(f"offline-{next(self._ids)}", prompt, resolved[id(each)])
                jobs.append(job)
                _, ids, images, pixels, _ = prompt
                self.engine.add(job.id, ids, job.params, may_wait=waits, images=images, pixels=pixels)
                stop = partial(self.engine.stop, job.id)
                self._detokenizers[job.id] = RequestDetokenizer(self.prompts.text_backend, prompt.ids, job.params, stop)
        except BaseException:
            self._abort_requests(jobs)
            raise
        return jobs

    def _check_idle(self) -> None:
        if self._closed:
            raise EngineDead("this LLM is closed")
        if self._pool is not None:
            self._pool.check_thread()
        if self.engine.has_unfinished_requests:
            raise InputError("another call of this LLM is under way: finish it, or close its iterator, first")

    def _step(self, interrupts: _DeferredInterrupts | None = None) -> list[BranchOutput]:
        """Run one whole step; Ctrl-C during it is raised after it. `interrupts`: the caller's deferral, if it has
        one."""
        try:
            with _DeferredInterrupts() if interrupts is None else nullcontext(interrupts) as interrupts:
                outputs = self.engine.step()
        except Overloaded:  # another engine holds the shared memory: no step began
            raise
        except BaseException:
            self.close()  # an interrupted step leaves the engine inconsistent
            raise
        interrupts.check()
        return [with_text for output in outputs if (with_text := self._with_text(output)) is not None]

    def _with_text(self, output: BranchOutput) -> BranchOutput | None:
        """Return an output with its text, or None if the branch has ended at a stop string before."""
        detokenizer = self._detokenizers.get(output.request_id)
        with_text = output if detokenizer is None else detokenizer.process(output)
        if with_text is not None and with_text.done:
            self._detokenizers.pop(output.request_id, None)
        return with_text

    def _abort_requests(self, requests: list[OfflineRequest]) -> None:
        """Abort the unfinished requests of a call, and wait until no step with them is in flight."""
        if self._closed:
            return
        for job in requests:
            self.engine.abort(job.id)
            self._detokenizers.pop(job.id, None)
        with suppress(KeyboardInterrupt):  # the call is already being aborted
            while self.engine.has_unfinished_requests:
                self._step()
        if self.engine.has_unfinished_requests:
            self._abort_requests(requests)


class _DeferredInterrupts:
    """Defers Ctrl-C to the end of a step, so that the engine stays consistent. A second Ctrl-C is not deferred."""

    def __init__(self) -> None:
        self._interrupted = False
        self._on_main_thread = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> _DeferredInterrupts:
        if self._on_main_thread:
            self._previous_handler = signal.signal(signal.SIGINT, self._on_sigint)
        return self

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            raise KeyboardInterrupt
        self._interrupted = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._interrupted:
            raise KeyboardInterrupt

    def __exit__(self, *_: object) -> None:
        if self._on_main_thread:
            signal.signal(signal.SIGINT, self._previous_handler)


class _ProgressBar:
    """A progress bar of finished prompts, with the speed of input and output tokens as in vLLM. It is shown if `shown`
    and if stderr is a terminal, and drawn at most every INTERVAL seconds."""

    INTERVAL = 0.2

    def __init__(self, total: int, engine: Engine, shown: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="Processed prompts", disable=None if shown else True, dynamic_ncols=True)
        self._stats, self._first = engine.stats, engine.stats.copy()
        self._began = self._drawn = time.perf_counter()

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, finished: int) -> None:
        """Draw the bar with `finished` prompts, if INTERVAL has passed or all are finished."""
        now = time.perf_counter()
        if self._bar.disable or (now - self._drawn < self.INTERVAL and finished < self._bar.total):
            return
        self._drawn, self._bar.n = now, finished
        seconds = max(now - self._began, 1e-9)
        inputs = (self._stats.prompt_tokens - self._first.prompt_tokens) / seconds
        outputs = (self._stats.generated_tokens - self._first.generated_tokens) / seconds
        self._bar.set_postfix_str(f"est. speed input: {inputs:.2f} toks/s, output: {outputs:.2f} toks/s")
