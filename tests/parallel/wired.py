"""An engine over ranks that echo."""

from __future__ import annotations

from memories import MEMORIES, VOCAB, Build
from traces import MAX_LEN

from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.scheduler import Scheduler
from quire.parallel.remote import RemoteRunner
from quire.vocabulary.params import SamplingParams


def open_engine(runner: RemoteRunner, requests: int = 2) -> Engine:
    """An engine over ranks, with requests under way."""
    memory = MEMORIES["paged-4"](Build(256, 64))
    runner.bind(memory.geometry)
    scheduler = Scheduler(memory, budget=64, max_seqs=8, max_len=MAX_LEN)
    engine = Engine(scheduler, runner, Limits(VOCAB, MAX_LEN, 100), clock=lambda: 0.0)
    for i in range(requests):
        engine.add(str(i), [1, 2, 3 + i], SamplingParams(n=2, max_tokens=12, ignore_eos=True, seed=i))
    return engine


def drain(engine: Engine) -> None:
    while engine.unfinished:
        engine.step()
