"""PagedAttention, Figures 3 and 6 to 10, block by block. The paper's block b is page b + 1: page 0 is scratch."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
from memories import admit_one, spec

from bench.echo_runner import EchoRunner
from quire.config import EngineConfig
from quire.core.decoding import new_method
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.memory.baselines.reserved import ReservedMemory
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.protocol.method import Advance, Branch, Choice, Context
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy, SliceResult, StepPlan, StepResult, TableWrite

BLOCK = 4
BLOCKS = 9
WORDS = "Four score and seven years ago our fathers brought forth it was the best of times".lower().split()


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.lower().split()]


class Stepped:
    def __init__(self, memory: Any, longest: int) -> None:
        self.memory = memory
        self.scheduler = Scheduler(memory, token_budget=64, max_seqs=4, max_len=longest)
        self.runner = EchoRunner(vocab_size=1000)
        self.runner.bind(memory.kv_config)

    def begin(self, tokens: list[int], params: SamplingParams, prefix: str | None = None) -> Request:
        seq = Sequence(self.scheduler.new_seq_id(), list(tokens))
        longest = params.max_tokens or 16
        request = Request(str(seq.id), seq, params, arrival_time=0.0, max_tokens=longest)
        request.method, request.prefix_name = new_method(params), prefix
        seq.num_forks = (params.n if request.method is None else request.method.width) - 1
        seq.max_total_len = len(tokens) + longest
        self.scheduler.add(request)
        return request

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def run(self) -> StepPlan:
        """A step whose tokens are the runner's own."""
        plan = self.plan()
        self.scheduler.update(plan, self.runner.collect(self.runner.submit(plan)))
        self.memory.check()
        return plan


class Server(Stepped):
    """Over a few blocks of four tokens, given out in the figures' order. With `caching` a freed block keeps its content
    as long as others are empty."""

    def __init__(self, order: Iterable[int], blocks: int = BLOCKS, caching: bool = False, prefix: int = 0) -> None:
        config = EngineConfig(page_size=BLOCK, max_num_seqs=4)
        built = build_memory(config, spec((None,), 32), MemorySize(blocks * BLOCK, 32, 2))
        rest = [block for block in range(blocks) if block not in set(order)]
        pages = [block + 1 for block in (*order, *rest)]
        super().__init__(
            PagedMemory(built.kv_config, max_step_tokens=64, caching=caching, order=pages, prefix_tokens=prefix),
            longest=32,
        )

    def add(self, text: str, n: int = 1) -> Sequence:
        return self.begin(ids(text), SamplingParams(n=n, max_tokens=16, ignore_eos=True)).live_seqs[0]

    def blocks(self, seq: Sequence) -> list[int]:
        (table,) = self.memory.get_placement(seq).tables
        return [page - 1 for page in table]

    def compute(self, plan: StepPlan, *words: str) -> None:
        """Compute the step; the words that it "generates" are the figures'."""
        result = self.runner.collect(self.runner.submit(plan))
        drawn = iter(words)
        samples = tuple(
            SliceResult(tuple(WORDS.index(next(drawn)) for _ in sampled.tokens)) for sampled in result.slice_results
        )
        for row, sampled in zip(plan.slices, samples):
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
        (table,) = self.memory.get_placement(seq).tables
        return [(page - 1, min(seq.computed - i * BLOCK, BLOCK)) for i, page in enumerate(table)]

    def refs(self, block: int) -> int:
        return self.memory.page_pool.size_class_of[0].refs[block + 1]

    @property
    def available(self) -> int:
        """Blocks that no table names."""
        (pool,) = self.memory.page_pool.size_classes
        return pool.available

    def cells(self, block: int) -> list[bytes]:
        """What a block holds on the device, a token each."""
        return [bytes(cell) for cell in np.split(self.runner.groups[0].pages[block + 1], BLOCK)]

    def filled(self, block: int) -> int:
        """Positions of a block that hold a state on the device."""
        return sum(any(cell) for cell in self.cells(block))


def test_figure_6_block_table_translation() -> None:
    server = Server(order=(7, 1, 3))
    seq = server.add("Four score and seven years ago our")

    # 1: the prompt's 7 tokens fill logical block 0 and three quarters of 1, mapped to physical blocks 7 and 1.
    plan = server.step("fathers")
    assert plan.page_ops == (TableWrite(1, 0, 0, (7 + 1, 1 + 1)),)
    assert plan.slices[0].tokens == tuple(ids("Four score and seven years ago our"))
    assert server.table(seq) == [(7, 4), (1, 3)]
    assert (server.filled(7), server.filled(1)) == (4, 3)

    # 2: "fathers" goes into the slot that remains; only #filled changes, from 3 to 4.
    plan = server.step("brought")
    assert plan.page_ops == ()
    assert server.table(seq) == [(7, 4), (1, 4)]
    assert (server.filled(7), server.filled(1)) == (4, 4)

    # 3: the last logical block is full: "brought" is stored in a new one, physical block 3, with #filled 1.
    plan = server.step("forth")
    assert plan.page_ops == (TableWrite(1, 0, 2, (3 + 1,)),)
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
    assert [len(row.tokens) for row in plan.slices] == [1, 5]
    assert plan.page_ops == (TableWrite(2, 0, 0, (5 + 1, 2 + 1)),)
    assert server.table(a) == [(7, 4), (1, 4)]
    assert server.table(b) == [(5, 4), (2, 1)]

    plan = server.step("forth", "it")
    assert plan.page_ops == (TableWrite(1, 0, 2, (3 + 1,)),)
    assert server.table(a) == [(7, 4), (1, 4), (3, 1)]
    assert server.table(b) == [(5, 4), (2, 2)]
    assert [server.filled(block) for block in range(BLOCKS)] == [0, 4, 2, 1, 0, 4, 0, 4, 0]
    assert a.tokens == ids("Four score and seven years ago our fathers brought forth")
    assert b.tokens[:6] == ids("it was the best of times")

    # Waste is within one block a request; the neighbours of both lie apart.
    usage, block_bytes = server.memory.account().usage, server.memory.kv_config.groups[0].page_bytes
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
    assert server.available == BLOCKS - 2

    plan = server.plan()
    slot1, slot2 = server.memory.slot(a1), server.memory.slot(a2)
    assert plan.page_ops == (
        TableWrite(slot2, 0, 0, (7 + 1, 1 + 1)),  # the fork
        PageCopy(0, 1 + 1, 3 + 1),  # the copy on write, then A1's new table entry
        TableWrite(slot1, 0, 1, (3 + 1,)),
    )
    assert (server.refs(7), server.refs(1), server.refs(3)) == (2, 1, 1)
    before = server.cells(1)[:3]
    server.compute(plan, "it", "was")
    assert server.table(a1) == [(7, 4), (3, 4)]
    assert server.table(a2) == [(7, 4), (1, 4)]
    assert server.cells(3)[:3] == before == server.cells(1)[:3]
    assert server.cells(3)[3] != server.cells(1)[3]


class Figure9:
    """The candidates of Figure 9: one leaves after the prompt, three part after the third block, and from the fourth on
    those numbered 1 and 2 are continued twice each."""

    width = 4

    def top(self, context: Context) -> int:
        return 4

    def keep(self) -> int:
        return 4

    def advance(self, branches: Seq[Branch], context: Context) -> Advance:
        parents = {4: (0, 0), 12: (0, 0, 0, 1), 16: (1, 1, 2, 2)}
        chosen = parents.get(len(branches[0].tokens), range(len(branches)))
        return Advance(tuple(Choice(parent, 20 + i, -1.0) for i, parent in enumerate(chosen)))


def test_figure_9_beam_search() -> None:
    server = Server(order=(), blocks=16, caching=True)
    request = server.begin(ids("Four score and seven"), SamplingParams(method=Figure9, max_tokens=20))
    while len(request.live_seqs[0].tokens) < 16:
        server.run()
    plan = server.plan()  # the last token before the dotted line
    assert [server.blocks(seq) for seq in request.live_seqs] == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert [server.refs(block) for block in range(10)] == [4, 3, 1, 3, 1, 1, 1, 1, 1, 0]
    before = [list(seq.tokens) for seq in request.live_seqs]

    server.scheduler.update(plan, server.runner.collect(server.runner.submit(plan)))
    assert [seq.tokens[:16] for seq in request.live_seqs] == [before[1], before[1], before[2], before[2]]
    freed = [block for block in range(9) if server.refs(block) == 0]
    assert freed == [2, 4, 5, 8]
    assert [server.blocks(seq) for seq in request.live_seqs] == [[0, 1, 3, 6]] * 2 + [[0, 1, 3, 7]] * 2

    plan = server.run()
    assert not [entry for entry in plan.page_ops if isinstance(entry, PageCopy)]  # full blocks are never copied
    tables = [server.blocks(seq) for seq in request.live_seqs]
    assert tables == [[0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12]]
    assert [server.refs(block) for block in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    assert [server.refs(block) for block in (9, 10, 11, 12)] == [1, 1, 1, 1]


def test_figure_10_a_shared_prompt_is_mapped_and_its_last_block_copied_on_write() -> None:
    """A prefix of six tokens lies in blocks 0 and 1, which is half full; two tasks follow it."""
    server = Server(order=(), prefix=2 * BLOCK)
    prefix = ids("Four score and seven years ago")
    server.begin(prefix, SamplingParams(max_tokens=1), prefix="translate")
    server.run()
    assert not server.scheduler.has_unfinished_requests
    assert (server.refs(0), server.refs(1)) == (1, 1)
    assert server.available == BLOCKS - 2
    kept = server.cells(1)

    first = server.begin(prefix + ids("it was the best"), SamplingParams(max_tokens=4)).live_seqs[0]
    second = server.begin(prefix + ids("brought forth"), SamplingParams(max_tokens=4)).live_seqs[0]
    plan = server.run()
    # The prompt phase computes the user's part only.
    assert [(row.start, row.tokens) for row in plan.slices] == [
        (6, tuple(ids("it was the best"))),
        (6, tuple(ids("brought forth"))),
    ]
    assert [entry for entry in plan.page_ops if isinstance(entry, PageCopy)] == [
        PageCopy(0, 1 + 1, 2 + 1),
        PageCopy(0, 1 + 1, 4 + 1),
    ]
    assert server.blocks(first) == [0, 2, 3]
    assert server.blocks(second) == [0, 4]
    assert [server.refs(block) for block in range(5)] == [3, 1, 1, 1, 1]
    assert server.cells(1) == kept  # the prefix is as it was
    assert server.cells(2)[:2] == server.cells(4)[:2] == kept[:2]
    while server.scheduler.has_unfinished_requests:
        server.run()
    assert [server.refs(block) for block in range(BLOCKS)] == [1, 1] + [0] * (BLOCKS - 2)
    assert server.memory.prefix_cache.unpin("translate")
    assert server.available == BLOCKS


def test_figure_3_two_requests_waste_less_than_a_page_each() -> None:
    """Requests that may grow to 2048 and 512 tokens: nothing is reserved for what they may become, nothing lies between
    them, and what their last pages hold no tokens in is all that is wasted."""
    page = 16
    config = EngineConfig(page_size=page, max_num_seqs=4)
    memory = build_memory(config, spec((None,), 2048), MemorySize(2560, 2048, 2))
    token = memory.kv_config.groups[0].page_bytes // page
    server, seqs = Stepped(memory, 2048), []
    for prompt, longest in ((7, 2048), (3, 512)):
        params = SamplingParams(max_tokens=longest - prompt, ignore_eos=True)
        seqs += server.begin(list(range(100 * prompt, 100 * prompt + prompt)), params).live_seqs
    assert memory.fits([2048])
    for _ in range(40):
        server.run()
        usage = memory.account().usage
        wasted = [-seq.computed % page for seq in seqs]
        assert (usage.reserved, usage.external) == (0, 0)
        assert usage.internal == sum(wasted) * token
        assert max(wasted) < page
        assert usage.used == sum(seq.computed for seq in seqs) * token


class Chunks(Stepped):
    """Figure 3's chunk pre-allocation: 2048 slots for the request with a prompt of 7 tokens, 512 for that of 3, in a
    memory of 4096 slots. A memory page is one slot."""

    def __init__(self) -> None:
        config = EngineConfig(memory="orca-max", page_size=1, max_num_seqs=4)
        geometry = build_memory(config, spec((None,), 2048), MemorySize(4096, 2048, 2)).kv_config
        reserves = {7: 2048, 3: 512}
        super().__init__(ReservedMemory(geometry, lambda prompt, *_: reserves[prompt], max_len=2048), 2048)

    def add(self, prompt: int, output: int) -> Sequence:
        return self.begin(list(range(prompt)), SamplingParams(max_tokens=output, ignore_eos=True)).live_seqs[0]

    def iteration(self) -> StepPlan:
        """The prompts' iteration; then the next one is planned, which the figure shows."""
        self.run()
        plan = self.plan()
        self.memory.check()
        return plan

    def slots(self) -> tuple[int, ...]:
        """Used, reserved, internal, external, free."""
        usage, slot = self.memory.account().usage, self.memory.kv_config.groups[0].page_bytes
        return tuple(part // slot for part in (usage.used, usage.reserved, usage.internal, usage.external, usage.free))


A, B = (7, 3), (3, 2)  # "Four score and seven years ago our", "fathers brought forth"; "You only live", "once <eos>"


def test_figure_3_each_chunk() -> None:
    """A: 7 states of the prompt and that of the current iteration; 2 slots that will be used, 2038 that never will be.
    B: 3 and 1, 1, 507."""
    for request, slots in ((A, (7 + 1, 2, 2038, 0, 4096 - 2048)), (B, (3 + 1, 1, 507, 0, 4096 - 512))):
        chunks = Chunks()
        chunks.add(*request)
        chunks.iteration()
        assert chunks.slots() == slots


def test_figure_3_two_requests_keep_others_out() -> None:
    """Three kinds of waste: 12 of 4096 slots are used, and a request that needs 2048 is not admitted: what is free is
    in pieces of 1024 and 512."""
    chunks = Chunks()
    a, b = chunks.add(*A), chunks.add(*B)
    plan = chunks.iteration()
    assert chunks.slots() == (8 + 4, 2 + 1, 2038 + 507, 0, 1024 + 512)
    (first,), (second,) = chunks.memory.get_placement(a).tables, chunks.memory.get_placement(b).tables
    assert first == tuple(range(1, 1 + 2048))  # page 0 is scratch
    assert second == tuple(range(1 + 2048, 1 + 2048 + 512))
    assert [len(row.tokens) for row in plan.slices] == [1, 1]

    late = chunks.add(*A)
    assert admit_one(chunks.memory, late, 64) is None
    assert chunks.slots() == (8 + 4, 2 + 1, 2038 + 507, 1024 + 512, 0)
