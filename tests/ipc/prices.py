"""`python tests/ipc/prices.py FILE`: what a decoding row costs the engine's process beside the model, and a token the
front before it is rendered; processor time of one thread, no model, no sockets. JSON."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

sys.path.insert(0, str(Path(__file__).parent.parent))

import echo_service

import quire
from quire.async_llm import AsyncLLM
from quire.bench.machine import machine
from quire.core.outputs import BranchOutput
from quire.ipc.engine_loop import EngineLoop
from quire.ipc.frames import Frame, read_engine_message, write_engine_message
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.ipc.heartbeat import Health
from quire.ipc.messages import AddRequests, EngineMessage, NewRequest, QueueSizes, Reply, StepOutputs, engine_ready
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SliceResult, StepPlan, StepResult
from quire.server.metrics import Metrics
from quire.text.input_processor import InputProcessor
from quire.text.tokenizer import Tokenizer

ROWS, STEPS, REPEAT = 190, 180, 5
LONG = SamplingParams(max_tokens=220, ignore_eos=True)


class Blind(echo_service.Echo):
    """A runner that computes nothing."""

    def __init__(self) -> None:
        super().__init__(depth=2)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> int:
        self.plans.append(plan)
        return 0

    def collect(self, ticket: int) -> StepResult:
        drawn, none = SliceResult((7,)), SliceResult(())
        return StepResult(tuple(drawn if row.num_samples else none for row in self.plans.pop(0).slices), 0.001)


def engine_side() -> dict[str, float]:
    """Microseconds a decoding row: turns of the host without frames, and frames."""
    model = echo_service.built(
        Blind(), kv_tokens=ROWS * 256, max_num_seqs=256, max_num_batched_tokens=8192, page_size=16
    )
    spent, size = 0.0, 0

    def tell(front: int, message: EngineMessage) -> None:
        nonlocal spent, size
        began = time.thread_time()
        size += len(write_engine_message(message)[1])
        spent += time.thread_time() - began

    host = EngineLoop(model.engine, tell)
    host.enqueue(0, AddRequests(0, tuple(NewRequest(i, f"r{i}", range(1, 21)) for i in range(ROWS)), LONG))
    host._run_once()
    spent, size, began = 0.0, 0, time.thread_time()
    for _ in range(STEPS):
        host._run_once()
    turns = time.thread_time() - began - spent
    rows = ROWS * STEPS
    return {"turns_us": 1e6 * turns / rows, "frames_us": 1e6 * spent / rows, "bytes": size / rows}


def fed() -> Any:
    """A link whose engine says what it is told to."""
    ready = engine_ready(echo_service.built().engine, [], ())
    link = Mock(inside=False, engine=None, ready=ready, queues=QueueSizes(), facts=ready.facts)

    def send(message: object) -> bool:
        if isinstance(message, AddRequests):
            link.receive(Reply(message.key))
        return True

    link.start, link.send = partial(setattr, link, "receive"), send
    link.health.return_value = Health(True, False, 0.0, "")
    return link


async def front_side() -> dict[str, float]:
    """Microseconds a token: reading frames, and all up to the stream's listener: text, stop strings, metrics."""
    link, rng = fed(), random.Random(0)
    words = Tokenizer.load(Path(quire.__file__).parent / "assets" / "tiny")
    llm = AsyncLLM.over(link, InputProcessor(words, None, link.ready.limits, {}))
    Metrics(llm, "prices")
    params = SamplingParams(max_tokens=220, ignore_eos=True, stop=["zzzz"])
    streams = [await llm.submit([1, 2, 3], params, f"r{i}") for i in range(ROWS)]
    for stream in streams:
        stream.listen(lambda output: None, lambda error: None)

    def frame() -> Frame:
        told = [
            (s.number, BranchOutput("", 0, (rng.randrange(10, 3000),), "", (), None, None, False, -1.0))
            for s in streams
        ]
        kind, body = write_engine_message(StepOutputs(time.monotonic(), QueueSizes(), ROWS, (), told))
        return Frame(kind, memoryview(body))

    frames, read = [frame() for _ in range(STEPS)], 0.0
    began = time.thread_time()
    for each in frames:
        at = time.thread_time()
        message = read_engine_message(each)
        read += time.thread_time() - at
        link.receive(message)
    everything, tokens = time.thread_time() - began, ROWS * STEPS
    llm.close()
    return {"frames_us": 1e6 * read / tokens, "text_and_metrics_us": 1e6 * (everything - read) / tokens}


def main() -> None:
    freeze_loaded_objects()
    runs = [(engine_side(), asyncio.run(front_side())) for _ in range(REPEAT)]
    found = {
        side: {name: round(statistics.median(run[at][name] for run in runs), 2) for name in runs[0][at]}
        for at, side in enumerate(("engine, a decoding row", "front, a token"))
    }
    document = {"what": "us of processor time", "rows": ROWS, "repeat": REPEAT, "machine": machine(), "medians": found}
    print(json.dumps(found, indent=1))
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
