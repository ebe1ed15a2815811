"""An engine of token ids with a real tokenizer, and a server over it: what tests of the text plane stand on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from waiting import wait_until

sys.path.append(str(Path(__file__).parents[1]))  # for programs that tests start

from bench.echo_runner import EchoRunner
from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.core.recovery import RunnerRestarter
from quire.core.runner import can_defer_masks
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.ipc.child_process import ChildProcess
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.process_client import ProcessEngineClient
from quire.ipc.replicas import ReplicatedEngineClient
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.shared_host import SharedHostMemory
from quire.protocol.step_plan import SeqSlice, SliceResult, SlotInit, StepResult
from quire.text.chat_template import ChatTemplate
from quire.text.images.loader import ImageLoader
from quire.text.input_processor import InputProcessor
from quire.text.output_stream import OutputStream, RequestRecord
from quire.text.request_detokenizer import RequestDetokenizer
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # engines in processes of their own import this module without it
    import httpx

Placement = Literal["process", "thread", "replicas"]  # of the engine; of three engines
VOCAB = 512
MAX_LEN = 256
HOST_BYTES = 2**17  # of each engine, if they share host memory; echoes are made with as much
BRAKED = 0.2  # seconds a step
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if shout %}!{% endif %}{% endif %}"
)


class Plan:
    """Stands for a memory plan."""

    def to_lines(self) -> list[str]:
        return ["echo model, no weights"]


class EchoBuilt(NamedTuple):
    """The fields of quire.startup.build.BuiltEngine."""

    engine: Engine
    spec: ModelSpec
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    memory_plan: Plan
    notices: tuple[str, ...]
    default_sampling: dict[str, Any]
    name: str
    recipe: dict[str, Any] | None = None  # what another process makes the same of, if it can
    image_loader: ImageLoader | None = None


class Echo(EchoRunner):
    """An EchoRunner whose steps take `pause` seconds, and whose step `fail_at` raises. As long as the file `brake` is
    there they take BRAKED seconds, so that what a test does while requests run needs no haste."""

    def __init__(
        self, pause: float = 0.0, fail_at: int | None = None, depth: int = 2, brake: str | None = None,
        shared_host: SharedHostMemory | None = None,
    ) -> None:  # fmt: skip
        super().__init__(depth, vocab_size=VOCAB, shared_host=shared_host)
        self.pause, self.fail_at, self.brake = pause, fail_at, brake
        recipe = {"pause": pause, "fail_at": fail_at, "depth": depth, "brake": brake}
        self.recipe = recipe if type(self) is Echo else None

    def collect(self, ticket: int) -> StepResult:
        time.sleep(BRAKED if self.brake is not None and os.path.exists(self.brake) else self.pause)
        if self.collected == self.fail_at:
            raise RuntimeError("the device is gone")
        return super().collect(ticket)


class Saying(Echo):
    """An Echo that says a text, whatever the prompt, then ends; something else where a grammar forbids it. For an
    engine in this process."""

    def __init__(self, words: Tokenizer | None = None) -> None:
        super().__init__()
        self._words = words or tokenizer()
        self._scripts: list[list[int]] = [[]]
        self._slot_scripts: dict[int, list[int]] = {}

    def say(self, *texts: str) -> None:
        """What the next outputs are, one a text; the last text is that of all after it too."""
        self._scripts = [self._words.encode(text, add_special_tokens=False) for text in texts]

    def init_slot(self, init: SlotInit) -> None:
        super().init_slot(init)
        self._slot_scripts[init.slot] = self._scripts[0]
        self._scripts = self._scripts[1:] or self._scripts

    def compute_row(self, row: SeqSlice) -> SliceResult:
        sampled = super().compute_row(row)
        if not sampled.tokens:
            return sampled
        slot, at = self.slots[row.slot], row.start + len(row.tokens) - self.groups[0].prompt_lens[row.slot]
        script = self._slot_scripts[row.slot]
        token = script[at] if at < len(script) else 0
        masks = self.masks.get(row.slot)
        if masks and not masks[0][token // 8] >> token % 8 & 1:
            return sampled
        slot.last = token
        tops = tuple(top._replace(token=token) for top in sampled.top_logprobs)
        return sampled._replace(tokens=(token,) * len(sampled.tokens), top_logprobs=tops)


def trained(more: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """Byte-level BPE over a few words, with ChatML's special tokens, and `more` that aren't special."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(["once upon a time there was a quire of pages, and a reader of the pages"] * 4, trainer)
    backend.add_tokens([*more])
    return backend


@functools.cache
def tokenizer(more: tuple[str, ...] = ()) -> Tokenizer:
    """What `trained` returns, as the text plane has it."""
    return Tokenizer(trained(more), {"eos_token": "<|end|>"})


class SharedTemplate(ChatTemplate):
    """A template whose process outlives the servers that use it."""

    def close(self) -> None:
        """Leave it to the others."""


@functools.cache
def template(source: str = TEMPLATE) -> ChatTemplate:
    return SharedTemplate(source, {})


def built(
    runner: EchoRunner | None = None,
    *,
    text: bool = True,
    chat: bool = True,
    kv_tokens: int = 1024,
    max_len: int = MAX_LEN,
    restarter: RunnerRestarter | None = None,
    **settings: Any,
) -> EchoBuilt:
    """An engine over `runner`; `settings` are EngineConfig's. End tokens are none, so that lengths are known. One of
    another length than MAX_LEN can't be made in another process. Unless `chat` it starts no process for templates."""
    runner = runner or Echo()
    recipe: dict[str, Any] | None = getattr(runner, "recipe", None) if max_len == MAX_LEN else None
    if recipe is not None:
        recipe = {"echo": recipe, "text": text, "kv_tokens": kv_tokens, "settings": settings}
    config = EngineConfig(**{"page_size": 4, "max_num_seqs": 16, "max_num_batched_tokens": 64, **settings})
    spec = ModelSpec("echo", (LayerSpec(1, 8),), VOCAB, max_len, 8, 1, 8, 0)
    memory = build_memory(config, spec, MemorySize(kv_tokens, max_len, 2), shared_host=runner.shared_host)
    runner.bind(memory.kv_config)
    scheduler = Scheduler(
        memory, token_budget=config.max_num_batched_tokens, max_seqs=config.max_num_seqs, max_len=max_len, eos_ids=(0,),
        preemption=config.preemption, deferred_masks=can_defer_masks(runner, runner.depth),
    )  # fmt: skip
    limits = EngineLimits(VOCAB, max_len, config.max_num_queued_reqs)
    engine = Engine(scheduler, runner, limits, clock=time.monotonic, seed=config.seed, restarter=restarter)
    words, written = tokenizer() if text else None, template() if text and chat else None
    return EchoBuilt(engine, spec, words, written, Plan(), ("an echo",), {}, "echo", recipe)


def linked(
    model: EchoBuilt | EngineConfig, stall_after: float = 60.0, placement: Placement = "process",
    policy: str = "prefix", restart: bool = False, num_prefill: int = 0, min_prefill_tokens: int = 4,
) -> AsyncLLM:  # fmt: skip
    """Return an AsyncLLM over `model`, an echo or a real model's config. Its engine has a process of its own, as a
    server's has by default, or a thread of this process. A model without a recipe can only have a thread. `policy`,
    `restart`, `num_prefill` and `min_prefill_tokens` are those of replicas."""
    if isinstance(model, EngineConfig):
        return AsyncLLM(engine_process=placement == "process", **model.flat())
    recipe = getattr(model, "recipe", None)
    if placement == "thread" or recipe is None:
        return AsyncLLM.of(model, stall_after=stall_after)  # type: ignore[arg-type]
    program = "-P", str(Path(__file__).parent / "echo_engine.py"), json.dumps(recipe)
    memory = FileIO(os.memfd_create("host-pages", os.MFD_CLOEXEC), "r+b") if num_prefill else None
    count = 3 if placement == "replicas" else 1
    links = [ProcessEngineClient(ChildProcess(1, program, shared_memory=memory)) for _ in range(count)]
    for i, link in enumerate(links):
        shared = None if memory is None else SharedHostMemory(memory.fileno(), i, count, HOST_BYTES)
        link.send_init(EngineInitMessage(EngineConfig(), (), stall_after, False, logging.WARNING, count > 1, i, shared))
    for link in links:
        link.wait_ready()
    client: Any = links[0]
    if count > 1:
        try:
            client = ReplicatedEngineClient(links, policy, restart, num_prefill, min_prefill_tokens)
        except BaseException:
            for link in links:
                link.close(5.0)
            if memory is not None:
                memory.close()
            raise
    return AsyncLLM.over(client, input_processor(model, client.ready.limits))


def input_processor(model: EchoBuilt, limits: EngineLimits) -> InputProcessor:
    return InputProcessor(model.tokenizer, model.chat_template, limits, model.default_sampling, model.image_loader)


def prompts() -> InputProcessor:
    model = built()
    return input_processor(model, model.engine.limits)


class Running(NamedTuple):
    """A server on a real socket, and a client of it."""

    url: str
    llm: Any
    app: Any
    http: httpx.Client

    @property
    def engine(self) -> Engine:
        """The engine, for tests that look into it: their servers have the placement "thread"."""
        assert self.llm.engine_client.engine is not None, "the engine is in another process"
        found: Engine = self.llm.engine
        return found

    def metric(self, name: str) -> float:
        """The value of one sample of /metrics, of those that have no labels of their own."""
        text = self.http.get("/metrics").text
        start = name + '{engine="0",model_name="echo"} '
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(start))

    def idle(self) -> bool:
        """Wait until no request is left and every page is free or cached, and counts are exact; AssertionError if that
        takes too long. The memory of an engine in this process is checked too."""
        before = self.llm.account

        def so() -> bool:
            if self.llm.account is before:
                asyncio.run(self.llm.prefixes())  # after any answer the engine reports its state before it rests
            usage = self.llm.account.usage
            busy = self.llm.running or self.llm.queued or self.llm.account is before
            return not busy and usage.free + usage.cached == usage.total

        def state() -> str:
            fresh = self.llm.account is not before
            return f"{self.llm.running} run, {self.llm.queued} wait, {fresh=}, {self.llm.account}"

        found = wait_until(so, lambda: f"no request is left and pages are free or cached: {state()}")
        if self.llm.engine_client.engine is not None:
            self.engine.scheduler.memory.check()
        return found


def begun(running: Running, pool: ThreadPoolExecutor, ask: Callable[[], httpx.Response]) -> Future[httpx.Response]:
    """The answer of what `ask` requests, once the engine runs it: before, the requests that ran have to be seen to
    have ended, which the front hears a step after their last output."""
    wait_until(lambda: not running.llm.running, "no other request runs")
    answer = pool.submit(ask)
    wait_until(lambda: running.llm.running or answer.done(), "the request runs")
    assert not answer.done(), "it was over before it was seen"
    return answer


def new_stream(id: str, accepted: asyncio.Future[None], patient: bool = False) -> OutputStream:
    """A stream of an accepted request, whose outputs have their text already."""
    params = SamplingParams(detokenize=False)
    detokenizer = RequestDetokenizer(None, (), params, lambda branch, stop: None)
    return OutputStream(0, RequestRecord(id, 1, params, 0.0), detokenizer, accepted, patient)


def deliver(batch: Sequence[tuple[OutputStream, BranchOutput]]) -> None:
    """A step's outputs, each to its stream."""
    for stream, output in batch:
        stream.put(output)


@contextlib.contextmanager
def serving(
    model: Any = None,
    *,
    stall_after: float = 60.0,
    bounds: dict[str, float] | None = None,
    placement: Placement = "process",
    **options: Any,
) -> Iterator[Running]:
    """Serve `model` (an EchoBuilt or an EngineConfig) from a thread. `options` are create_app's and fields of
    ServeOptions, and `bounds` those of connections; `placement` is the engine's, as `linked` has it."""
    import httpx

    from quire.server.api_server import bind
    from quire.server.app import create_app
    from quire.server.options import ServeOptions
    from quire.server.web_server import WebServer

    llm = linked(model or built(), stall_after, placement)
    named = {name: options.pop(name) for name in [*options] if name in ServeOptions.__slots__}
    serve_options = ServeOptions(**named)
    app = create_app(llm, ["echo", "parrot"], serve_options, **options)
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    server = WebServer(app, serve_options, ready.set, limits=bounds)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        assert ready.wait(60), "the server did not start"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with httpx.Client(base_url=url, timeout=60) as http:
            yield Running(url, llm, app, http)
    finally:
        server.should_exit = True
        llm.close()
        thread.join()
        listener.close()


class Servers:
    """Running servers by their settings: each starts when it is first asked for. They are for tests that leave a server
    as they find it; others use `serving`."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack, self._running = stack, dict[str, Running]()

    def __call__(self, model: dict[str, Any] | None = None, **options: Any) -> Running:
        """Return the server of an echo. `model` are the arguments of `built`, and as "echo" those of Echo; `options`
        are the arguments of `serving`."""
        options = {"placement": "process", **options}
        key = json.dumps([model, options], sort_keys=True, default=repr)
        if key not in self._running:
            settings = dict(model or {})
            echo = built(Echo(**settings.pop("echo", {})), **settings)
            self._running[key] = self._stack.enter_context(serving(echo, **options))
        return self._running[key]
