"""PagedAttention, Figures 6, 7 and 8, block by block. The paper's physical block b is page b + 1: page 0 is scratch."""

from __future__ import annotations

from collections.abc import Iterable

from memories import spec

from quire.config import EngineConfig
from quire.memory import Size, build_memory
from quire.memory.paged import PagedMemory
from quire.plan import Copy, Sampled, StepPlan, StepResult, Table
from quire.request import Request, SamplingParams, Sequence
from quire.scheduler import Scheduler
from quire.sim.echo import EchoRunner

BLOCK = 4
BLOCKS = 9
WORDS = "Four score and seven years ago our fathers brought forth it was the best of times".lower().split()


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.lower().split()]


class Server:
    """A scheduler and an EchoRunner over nine blocks of four tokens, given out in the figures' order."""

    def __init__(self, order: Iterable[int]) -> None:
        config = EngineConfig(page_size=BLOCK, max_num_seqs=4)
        built = build_memory(config, spec((None,), 32), Size(BLOCKS * BLOCK, 32, 2))
        rest = [block for block in range(BLOCKS) if block not in set(order)]
        pages = [block + 1 for block in (*order, *rest)]
        self.memory = PagedMemory(built.geometry, chunk=64, caching=False, order=pages)
        self.scheduler = Scheduler(self.memory, budget=64, max_seqs=4, max_len=32)
        self.runner = EchoRunner(vocab_size=1000)
        self.runner.bind(self.memory.geometry)

    def add(self, text: str, n: int = 1) -> Sequence:
        seq = Sequence(self.scheduler.new_id(), ids(text))
        seq.branches = n - 1
        params = SamplingParams(n=n, max_tokens=16, ignore_eos=True)
        self.scheduler.add(Request(text, seq, params, arrival=0.0, max_tokens=16))
        return seq

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def compute(self, plan: StepPlan, *words: str) -> None:
        """Compute the step; the words that it "generates" are the figures'."""
        result = self.runner.collect(self.runner.submit(plan))
        drawn = iter(words)
        samples = tuple(Sampled(tuple(WORDS.index(next(drawn)) for _ in sampled.tokens)) for sampled in result.samples)
        for row, sampled in zip(plan.rows, samples):
            if sampled.tokens:
                self.runner.slots[row.slot].last = sampled.tokens[0]
        self.scheduler.update(plan, StepResult(samples, 0.0))
        self.memory.check()

    def step(self, *words: str) -> StepPlan:
        plan = self.plan()
        self.compute(plan, *words)
        return plan

    def table(self, seq: Sequence) -> list[tuple[int, int]]:
        """The block table as the figures draw it: (physical block, #filled) of each logical block."""
        (table,) = self.memory.place(seq).tables
        return [(page - 1, min(seq.computed - i * BLOCK, BLOCK)) for i, page in enumerate(table)]

    def refs(self, block: int) -> int:
        return self.memory.pages.refs[block + 1]

    def filled(self, block: int) -> int:
        """Positions of a block that hold a state on the device."""
        return int((self.runner.cells[block + 1] != 0).sum())


def test_figure_6_block_table_translation() -> None:
    server = Server(order=(7, 1, 3))
    seq = server.add("Four score and seven years ago our")

    # 1: the prompt's 7 tokens fill logical block 0 and three quarters of 1, mapped to physical blocks 7 and 1.
    plan = server.step("fathers")
    assert plan.journal == (Table(1, 0, 0, (7 + 1, 1 + 1)),)
    assert plan.rows[0].tokens == tuple(ids("Four score and seven years ago our"))
    assert server.table(seq) == [(7, 4), (1, 3)]
    assert (server.filled(7), server.filled(1)) == (4, 3)

    # 2: "fathers" goes into the slot that remains; only #filled changes, from 3 to 4.
    plan = server.step("brought")
    assert plan.journal == ()
    assert server.table(seq) == [(7, 4), (1, 4)]
    assert (server.filled(7), server.filled(1)) == (4, 4)

    # 3: the last logical block is full: "brought" is stored in a new one, physical block 3, with #filled 1.
    plan = server.step("forth")
    assert plan.journal == (Table(1, 0, 2, (3 + 1,)),)
    assert server.table(seq) == [(7, 4), (1, 4), (3, 1)]
    assert (server.filled(7), server.filled(1), server.filled(3)) == (4, 4, 1)

    text = "Four score and seven years ago our fathers brought forth"
    assert seq.tokens == ids(text)
    assert [block for block in range(BLOCKS) if server.filled(block)] == [1, 3, 7]


def test_figure_7_two_requests_at_the_same_time() -> None:
    """Request A as in Figure 6; request B, "it was the best of times", in physical blocks 5 and 2."""
    server = Server(order=(7, 1, 5, 2, 3))
    a = server.add("Four score and seven years ago our")
    server.step("fathers")
    assert server.table(a) == [(7, 4), (1, 3)]

    b = server.add("it was the best of")
    plan = server.step("brought", "times")
    assert [len(row.tokens) for row in plan.rows] == [1, 5]
    assert plan.journal == (Table(2, 0, 0, (5 + 1, 2 + 1)),)
    assert server.table(a) == [(7, 4), (1, 4)]
    assert server.table(b) == [(5, 4), (2, 1)]

    plan = server.step("forth", "it")
    assert plan.journal == (Table(1, 0, 2, (3 + 1,)),)
    assert server.table(a) == [(7, 4), (1, 4), (3, 1)]
    assert server.table(b) == [(5, 4), (2, 2)]
    assert [server.filled(block) for block in range(BLOCKS)] == [0, 4, 2, 1, 0, 4, 0, 4, 0]
    assert a.tokens == ids("Four score and seven years ago our fathers brought forth")
    assert b.tokens[:6] == ids("it was the best of times")

    # Waste is within one block a request; the neighbours of both lie apart.
    usage, block_bytes = server.memory.usage(), server.memory.geometry.page_bytes
    assert usage.internal == (3 + 2) * block_bytes // BLOCK
    assert usage.free == (BLOCKS - 5) * block_bytes


def test_figure_8_parallel_sampling_copies_on_write() -> None:
    """Two samples of one prompt share blocks 7 and 1; A1 writes first and gets a copy of 1 in 3; A2 writes in place."""
    server = Server(order=(7, 1, 3))
    a1 = server.add("Four score and seven years ago our", n=2)
    server.step("fathers", "brought")  # two samples, one prompt
    _, a2 = (seq for _, seq in server.scheduler.by_slot.values())
    assert a1.tokens == ids("Four score and seven years ago our fathers")
    assert a2.tokens == ids("Four score and seven years ago our brought")
    assert server.table(a1) == server.table(a2) == [(7, 4), (1, 3)]
    assert (server.refs(7), server.refs(1)) == (2, 2)
    assert server.memory.pages.available == BLOCKS - 2

    plan = server.plan()
    slot1, slot2 = server.memory.slot(a1), server.memory.slot(a2)
    assert plan.journal == (
        Table(slot2, 0, 0, (7 + 1, 1 + 1)),  # the fork
        Copy(0, 1 + 1, 3 + 1),  # the copy on write, then A1's new table entry
        Table(slot1, 0, 1, (3 + 1,)),
    )
    assert (server.refs(7), server.refs(1), server.refs(3)) == (2, 1, 1)
    before = list(server.runner.cells[1 + 1, :3])
    server.compute(plan, "it", "was")
    assert server.table(a1) == [(7, 4), (3, 4)]
    assert server.table(a2) == [(7, 4), (1, 4)]
    assert list(server.runner.cells[3 + 1, :3]) == before == list(server.runner.cells[1 + 1, :3])
    assert server.runner.cells[3 + 1, 3] != server.runner.cells[1 + 1, 3]
