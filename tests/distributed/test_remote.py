"""An engine over ranks that echo: what it says is what one rank in its own process would, and who differs is named."""

from __future__ import annotations

import random
from collections import deque
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
from addresses import runner_for
from echo_ranks import FaultyEcho, ThreadRank, started, threaded
from memories import VOCAB, Build
from pictured import LAYOUTS
from traces import MAX_LEN, Trace
from wired import drain, open_engine

from bench.echo_runner import EchoRunner
from quire.distributed.remote_runner import RemoteRunner
from quire.errors import EngineDead, StartupError
from quire.protocol.parallel_layout import ParallelLayout
from quire.protocol.step_plan import MappingStats, StepPlan, StepResult


class Wired(RemoteRunner):
    """Ranks on threads over one kind of runner. Of the first one `groups` has the tables as they were when it had done
    the step that was collected last: of stages it may be several steps ahead."""

    def __init__(self, layout: ParallelLayout, echoes: list[EchoRunner]) -> None:
        super().__init__(layout, 60.0, partial(ThreadRank, lambda hello: echoes[hello.part.global_rank]))
        self.echoes, self.groups = echoes, list[SimpleNamespace]()
        self._kept, self._done = deque[list[SimpleNamespace]](), echoes[0].collect
        echoes[0].collect = self._keeping  # type: ignore[method-assign]
        started(self)

    def _keeping(self, ticket: int) -> StepResult:
        result = self._done(ticket)
        self._kept.append([SimpleNamespace(table=pages.table.copy()) for pages in self.echoes[0].groups])
        return result

    def collect(self, ticket: int) -> StepResult:
        result = super().collect(ticket)
        self.groups = self._kept.popleft()
        return result


SOME = ("paged-4", "virtual-mixed", "pow2-layer-tables", "cross-unlike", "unlike-large-8-12-1-3", "states-window",
        "inside-4")  # fmt: skip


def run(name: str, seed: int) -> None:
    """Run a random trace over ranks of one stage or more."""
    rng = random.Random(seed)
    depth, layout = rng.choice((1, 2, 3)), ParallelLayout(*rng.choice(((1, 1), (2, 1), (1, 2), (4, 1), (1, 3), (2, 2))))
    budget = rng.choice((16, 64))
    memory = LAYOUTS[name](Build(rng.choice((96, 128, 256)), budget, 8, MAX_LEN, rng.choice((0, 12)), 0))
    runner = Wired(layout, [runner_for(memory.kv_config, depth, VOCAB) for _ in range(layout.world_size)])
    runner.depth = depth
    trace = Trace(
        memory, seed=seed, depth=depth, budget=budget, max_seqs=8, runner=runner,  # type: ignore[arg-type]
        preemption=rng.choice(("swap", "recompute")), stages=layout.pp,
    )  # fmt: skip
    trace.sleeps = [] if seed % 2 else None
    with closing(runner):
        trace.run(6)
        assert len({echo.op_checksum for echo in runner.echoes}) == 1


@pytest.mark.parametrize("name", SOME)
def test_random_traces_over_the_wire(name: str) -> None:
    run(name, SOME.index(name))


@pytest.mark.soak
@pytest.mark.parametrize("name", LAYOUTS)
def test_many_random_traces_over_the_wire(name: str) -> None:
    for seed in range(100, 110):
        run(name, seed)


@pytest.mark.parametrize(("how", "step"), [("skip", r"\d"), ("draw", "3")])
def test_a_rank_that_differs_is_named_with_the_step(how: str, step: str) -> None:
    """One rank skips a page operation, or samples another token."""
    with closing(threaded(3, lambda rank: FaultyEcho(1, VOCAB, how if rank == 1 else "", step=3))) as runner:
        engine = open_engine(runner)
        with pytest.raises(EngineDead, match=rf"rank 1 applied or sampled differently from rank 0 in step {step}$"):
            drain(engine)
        with pytest.raises(EngineDead, match="rank 1 applied or sampled differently"):
            engine.step()


def test_a_rank_that_applied_something_else_is_named() -> None:
    """Even if it samples the same tokens."""

    class Applying(EchoRunner):
        def submit(self, plan: StepPlan) -> int:
            ticket = super().submit(plan)
            self.op_checksum += ticket == 2
            return ticket

    runner = threaded(2, lambda rank: (Applying if rank else EchoRunner)(1, vocab_size=VOCAB))
    with pytest.raises(EngineDead, match=r"rank 1 applied or sampled differently from rank 0 in step 2$"):
        drain(open_engine(runner))
    runner.close()


class Capturing(EchoRunner):
    """One that would capture graphs of so many rows; None: it captures none."""

    def __init__(self, sizes: list[int] | None) -> None:
        super().__init__(1, vocab_size=VOCAB)
        if sizes is not None:
            self.decode_graphs = SimpleNamespace(capture_sizes=sizes)

    def warm_up(self, tokens: int, max_len: int) -> None:
        raise AssertionError("no rank may begin")


def test_a_rank_that_captures_none_where_others_do_is_named() -> None:
    """Or another size. In a graph of more rows a rank would wait for rows that the others never send."""
    for sizes, who, rows in (([1, 2], None, [1, 2]), 1, "None"), (([1, 2], [1, 2], [2]), 2, r"\[2\]"):
        runner = threaded(3, lambda rank, sizes=sizes: Capturing(sizes[rank]))
        told = rf"rank {who} captures graphs of decode steps of {rows} rows, rank 0 of \[1, 2\]"
        with pytest.raises(StartupError, match=told):
            runner.warm_up(64, 48)
        runner.close()


def test_questions_are_answered_by_every_rank() -> None:
    class Mapping(EchoRunner):
        mapping_stats = MappingStats(10, 2, 1, 0, 0.5, 0.25)

    runner = threaded(3, lambda rank: Mapping(1, vocab_size=VOCAB))
    assert runner.query("depth") == [1, 1, 1]
    assert runner.query("mapped") == [[10, 2, 1, 0, 0.5, 0.25]] * 3
    assert [seconds > 0 and size > 2**20 for seconds, size in runner.used] == [True] * 3
    assert runner.mapping_stats is None
    runner._virtual = True
    assert runner.mapping_stats == MappingStats(10, 2, 1, 0, 0.5, 0.25)
    runner.close()
