"""Ranks that fail and are started anew: what was under way ends as if nothing had been; how often, and what if not."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from echo_ranks import FaultyEcho, processes, threaded
from memories import MEMORIES, VOCAB, Build
from waiting import wait_until
from wired import drain, engine_over

from bench.echo_runner import EchoRunner
from quire.core.engine import Engine
from quire.core.recovery import RunnerRestarter
from quire.distributed.remote_runner import RemoteRunner
from quire.errors import EngineDead
from quire.memory.interface import KVMemory
from quire.protocol.sampling_params import SamplingParams

Start = Callable[[], RemoteRunner]
GONE = "rank 1 failed: RuntimeError: the device is gone"


def memory_of() -> KVMemory:
    return MEMORIES["paged-4"](Build(256, 32, prefix_tokens=16))


def opened(runner: Any, start: Start | None = None, most: int = 3, clock: Callable[[], float] = lambda: 0.0) -> Engine:
    """Return an engine over ranks; `start` starts new ones."""

    def anew() -> tuple[RemoteRunner, KVMemory]:
        made, memory = start(), memory_of()
        made.bind(memory.kv_config)
        return made, memory

    restarter = RunnerRestarter(anew, most, clock=clock) if start is not None else None
    return engine_over(runner, memory_of(), 32, restarter)


def ask(engine: Engine) -> None:
    """Add 32 requests: half of them sampled, some with branches, beams or penalties."""
    for i in range(32):
        more: dict[str, Any] = [{}, {"n": 3}, {"beam_width": 3, "n": 2}, {"frequency_penalty": 0.5}][i % 4]
        params = SamplingParams(temperature=float(i >= 16 and i % 4 != 2), seed=i, max_tokens=5 + i % 9, **more)
        engine.add(str(i), [(i * j) % 60 + 1 for j in range(1 + i % 23)], params)


def heard(engine: Engine) -> dict[tuple[str, int], list[int]]:
    told: dict[tuple[str, int], list[int]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            told.setdefault((output.request_id, output.branch), []).extend(output.tokens)
    return told


def undisturbed(depth: int = 1) -> dict[tuple[str, int], list[int]]:
    engine = opened(EchoRunner(depth, vocab_size=VOCAB))
    ask(engine)
    return heard(engine)


def clean(engine: Engine) -> None:
    """Check that no request is left."""
    engine.scheduler.memory.check()
    assert engine.scheduler.memory.account().sharing.tables == 0
    assert not engine.requests
    assert not engine.scheduler.by_slot


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("place", "step"), [("collect", 2), ("submit", 9), ("collect", 14)])
def test_streams_go_on_with_the_same_tokens(
    depth: int, place: str, step: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank fails in a prompt or while requests decode. Of the new ranks one fails at its start, which counts, and
    one of the next samples another token."""
    starts = iter([{"how": "raise", "place": place, "step": step}, {"how": "raise", "place": "bind"},
                   {"how": "draw", "step": 5}, {}])  # fmt: skip

    def start() -> RemoteRunner:
        fault = next(starts)
        return threaded(2, lambda rank: FaultyEcho(depth, VOCAB, **(fault if rank == 1 else {})))

    engine = opened(start(), start)
    ask(engine)
    assert heard(engine) == undisturbed(depth)
    assert engine.stats.restarts == 3
    assert f"{GONE} in step" in caplog.text
    assert "; ranks are started anew (1 of 3 within 600 s)" in caplog.text
    clean(engine)
    engine.close()


def failing(step: int, place: str = "collect") -> RemoteRunner:
    """Return two ranks of which one raises at `place`, in this step."""
    fault = {"how": "raise", "place": place, "step": step}
    return threaded(2, lambda rank: FaultyEcho(1, VOCAB, **(fault if rank == 1 else {})))


@pytest.mark.parametrize(
    ("starts", "most", "told"),
    [
        ([(4,), (2,), (3,)], 2, f"{GONE} in step 2; ranks were started anew 2 times within 600 s, first as {GONE}"),
        ([(0, "start")] * 3, 3, f"{GONE} at start; ranks were started anew 3 times within 600 s, first as {GONE}"),
        (None, 0, GONE),
    ],
    ids=["too many fail", "none starts", "none is allowed"],
)
def test_too_many_end_the_engine_and_the_first_cause_is_named(starts: Any, most: int, told: str) -> None:
    ranks = iter(starts or [])
    engine = opened(failing(4), None if starts is None else lambda: failing(*next(ranks)), most)
    ask(engine)
    with pytest.raises(EngineDead, match=f"^{told} in step 4$"):
        drain(engine)
    assert engine.stats.restarts == most
    engine.close()


def test_what_was_long_ago_does_not_count() -> None:
    now = [0.0]

    def start() -> RemoteRunner:
        now[0] += 400.0
        return failing(3 if now[0] < 2000 else 10**6)

    engine = opened(failing(4), start, most=2, clock=lambda: now[0])
    ask(engine)
    assert heard(engine) == undisturbed()
    assert engine.stats.restarts == 5
    engine.close()


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_that_go_while_nothing_is_done(sent: signal.Signals) -> None:
    """Registered prefixes are computed again, without an output."""
    runner = processes(2, all={"vocab_size": VOCAB})
    engine = opened(runner, partial(threaded, 2, lambda rank: FaultyEcho(1, VOCAB)))
    engine.register_prefix("p", range(1, 12))
    drain(engine)
    child = runner.ranks[1].child
    os.kill(child.process.pid, sent)
    wait_until(lambda: child.is_stopped() or child.has_exited(), "the signal has arrived")
    for _ in range(10):
        engine.check_runner()
    assert engine.stats.restarts == 1
    assert heard(engine) == {}
    assert engine.scheduler.memory.account().sharing.prefix_tokens == 11
    engine.add("0", [*range(1, 12), 40], SamplingParams(max_tokens=2, temperature=0))
    assert len(heard(engine)["0", 0]) == 2
    assert engine.release_prefix("p")
    clean(engine)
    engine.close()
