"""Reserved memories: what they reserve, copy, waste and pad; and that the engine's tokens are the same over them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from memories import EVERY, MAX_LEN, VOCAB, Build, admit_one, insides, reset, spec
from test_planted import Plant, found_by, instead_of
from traces import Asked, Trace, run_trace

from quire.bench import main as bench
from quire.build import build
from quire.config import RESERVED, EngineConfig
from quire.control.memory import Size, build_memory
from quire.control.memory.buddy import Buddy
from quire.control.memory.reserved import RULES, ReservedMemory
from quire.control.request import Request, Sequence, Status
from quire.control.scheduler import Scheduler
from quire.errors import StartupError
from quire.llm import LLM
from quire.sim.echo import EchoRunner
from quire.sim.padding import Padded, Padding
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Copy, Journal, Table
from quire.vocabulary.specs import Layout


def made(rule: str, tokens: int = 256, longest: int = 64, page: int = 4, seqs: int = 8) -> ReservedMemory:
    config = EngineConfig(memory=rule, page_size=page, max_num_seqs=seqs)
    memory = build_memory(config, spec((None,), longest), Size(tokens, longest, 2))
    assert isinstance(memory, ReservedMemory)
    return memory


def begun(memory: ReservedMemory, id: int, prompt: int, output: int, *, held: int = 0, branches: int = 0) -> Any:
    """A sequence that is told to get `output` tokens and has computed `held`; None if it isn't admitted."""
    seq = Sequence(id, [1] * prompt)
    seq.branches = branches
    seq.final = prompt + output
    if admit_one(memory, seq, 64) is None:
        return None
    assert memory.grow(seq, held)
    seq.tokens += [1] * (held - prompt)
    seq.planned = seq.computed = held
    return seq


def tokens_of(memory: ReservedMemory) -> tuple[float, ...]:
    """Usage in tokens: used, reserved, internal, external, free."""
    usage, token = memory.account().usage, memory.page_bytes * memory.groups / memory.page_tokens
    assert usage.cached == 0
    return tuple(part / token for part in (usage.used, usage.reserved, usage.internal, usage.external, usage.free))


@pytest.mark.parametrize(
    ("rule", "reserved"),
    [("orca-oracle", 125), ("orca-pow2", 132), ("orca-max", 2048), ("ft", 2048)],
)
def test_what_is_reserved_for_25_tokens_after_a_prompt_of_100(rule: str, reserved: int) -> None:
    """§6.1: "if the true output length is 25, it reserves 32 positions for outputs"."""
    assert RULES[rule](100, 25, 2048) == reserved


@pytest.mark.parametrize("output", range(1, 300))
def test_pow2_reserves_less_than_twice_the_output(output: int) -> None:
    reserved = RULES["orca-pow2"](0, output, 2048)
    assert output <= reserved < 2 * output or output == reserved == 1
    assert reserved & (reserved - 1) == 0
    assert RULES["orca-pow2"](2000, 40, 2048) == 2048


def test_the_three_orcas_coincide_for_chat() -> None:
    """Figure 17: with prompts of 1024 tokens the buddy allocator makes 2048 of whatever is reserved."""
    for rule in RESERVED[:3]:
        memory = made(rule, tokens=8192, longest=2048, page=16)
        assert [begun(memory, id, 1024, 1 + 200 * id, held=1024) is not None for id in range(5)] == [True] * 4 + [False]


@pytest.mark.parametrize("rule", RULES)
def test_a_run_is_contiguous_in_every_group_and_told_once(rule: str) -> None:
    config = EngineConfig(memory=rule, page_size=4, max_num_seqs=4)
    memory = build_memory(config, spec((None, 6, None), 32), Size(128, 32, 2))
    assert isinstance(memory, ReservedMemory)
    assert memory.geometry.layout is Layout.PAGED  # the pages follow one another, not the tokens in them
    first, second = begun(memory, 1, 9, 11), begun(memory, 2, 5, 3)
    assert len([entry for entry in memory.take_journal()[0] if isinstance(entry, Table)]) == 4
    pages = [list(table) for seq in (first, second) for table in memory.place(seq).tables]
    for table in pages:
        assert table == list(range(table[0], table[0] + len(table)))
    every = [page for table in pages for page in table]
    assert len(set(every)) == len(every)
    assert min(every) >= 1
    assert all(page in group.ids for group in memory.geometry.groups for page in every)
    assert memory.grow(first, 20)
    assert memory.take_journal() == ((), ())


def test_nothing_grows_beyond_its_reservation() -> None:
    memory = made("orca-oracle")
    seq = begun(memory, 1, 5, 6)
    before = insides(memory)
    assert not memory.grow(seq, 12)
    assert insides(memory) == before
    assert memory.grow(seq, 11)


def test_waste_by_category() -> None:
    """Pages of 4 tokens, 64 in all. A: 5 + 6 tokens in 3 pages of a block of 4; B: 5 + 9, rounded to 5 + 16, in 6 pages
    of a block of 8."""
    oracle, pow2 = made("orca-oracle", tokens=64, longest=64), made("orca-pow2", tokens=64, longest=64)
    assert tokens_of(oracle) == tokens_of(pow2) == (0, 0, 0, 0, 64)
    assert begun(oracle, 1, 5, 6, held=7)
    assert tokens_of(oracle) == (7, 4, 1, 4, 48)
    assert begun(pow2, 1, 5, 9, held=7)
    assert tokens_of(pow2) == (7, 7, 10, 8, 32)
    # What is free, but in too small pieces, is waste while somebody waits who needs a larger one.
    assert begun(oracle, 2, 30, 3) is None
    assert tokens_of(oracle) == (7, 4, 1, 4 + 48, 0)
    other = begun(oracle, 3, 30, 2, held=30)
    assert tokens_of(oracle) == (37, 6, 1, 4 + 16, 0)
    oracle.free(other)
    assert tokens_of(oracle) == (7, 4, 1, 4, 48)


def test_a_fork_copies_every_computed_page_into_a_run_of_its_own() -> None:
    memory = made("orca-oracle")
    parent = begun(memory, 1, 9, 7, held=9, branches=1)
    assert tokens_of(memory) == (9, 7 + 16, 0, 0, 256 - 32)
    memory.take_journal()
    child = parent.fork(2, 1, 0)
    assert memory.fork(parent, child)
    (mine,), (yours,) = memory.place(parent).tables, memory.place(child).tables
    assert not set(mine) & set(yours)
    assert memory.take_journal()[0] == (
        Table(memory.slot(child), 0, 0, yours),
        *(Copy(0, old, new) for old, new in zip(mine[:3], yours)),
    )
    assert memory.account().sharing.copies == 3
    assert memory.account().sharing.saved == 0
    assert tokens_of(memory) == (18, 14, 0, 0, 256 - 32)


def test_a_run_stays_with_its_request_until_the_last_branch_ends() -> None:
    """Beams end and fork at each step: there is always a run for the next one, whoever waits."""
    memory = made("orca-oracle", tokens=64)
    first = begun(memory, 1, 9, 7, held=9, branches=3)
    others = [first.fork(id, id, 0) for id in (2, 3, 4)]
    assert all(memory.fork(first, other) for other in others)
    assert begun(memory, 5, 1, 1) is None
    memory.free(others[0])
    assert begun(memory, 6, 1, 1) is None
    assert tokens_of(memory)[2] == 16  # nobody's
    again = first.fork(7, 1, 0)
    assert memory.fork(first, again)
    assert not memory.fork(first, first.fork(8, 1, 0))
    memory.check()
    for seq in (first, *others[1:], again):
        memory.free(seq)
    assert tokens_of(memory) == (0, 0, 0, 0, 64)


def test_prefixes_and_swapping_are_refused() -> None:
    memory = made("orca-max")
    seq = begun(memory, 1, 9, 7, held=9)
    assert not memory.swap_out([seq])
    assert not memory.swap_in([])
    assert memory.prefixes is None
    assert reset(memory) == 0
    assert memory.held([seq]) == (16 * memory.geometry.groups[0].page_bytes, 9)
    sharing = memory.account().sharing
    assert (sharing.saved, sharing.host_pages, sharing.prefix_capacity) == (0, 0, 0)
    memory.free(seq)  # which is still where it was
    assert tokens_of(memory) == (0, 0, 0, 0, 256)
    with pytest.raises(StartupError, match="shares no prefixes"):
        EngineConfig(memory="orca-max", prefix_tokens=16)


# FasterTransformer's static batches


class Batch:
    """A scheduler of static batches, whose members end when they are told to."""

    def __init__(self) -> None:
        self.memory = made("ft", tokens=256, longest=64)
        self.scheduler = Scheduler(self.memory, budget=64, max_seqs=8, max_len=64, static=True)
        self.runner = EchoRunner(vocab_size=VOCAB)
        self.runner.bind(self.memory.geometry)
        self.padding = Padding(self.scheduler)

    def add(self, prompt: int, output: int, n: int = 1) -> Request:
        seq = Sequence(self.scheduler.new_id(), [1] * prompt)
        seq.branches, seq.final = n - 1, prompt + output
        params = SamplingParams(n=n, max_tokens=output, ignore_eos=True)
        request = Request(str(seq.id), seq, params, arrival=0.0, max_tokens=output)
        self.scheduler.add(request)
        return request

    def step(self) -> Padded:
        plan = self.scheduler.schedule()
        assert plan is not None
        padded = self.padding(plan)
        self.scheduler.update(plan, self.runner.collect(self.runner.submit(plan)))
        self.memory.check()
        return padded


def test_padding_is_counted() -> None:
    """Prompts of 3, 9 and 5 tokens: 6 + 0 + 4 of padding. One member ends and is computed on for two steps."""
    batch = Batch()
    for prompt, output in ((3, 2), (9, 4), (5, 4)):
        batch.add(prompt, output)
    assert batch.step() == Padded(prompt=10, rows=0)
    late = batch.add(2, 5)
    assert batch.step() == Padded(prompt=0, rows=0)
    assert late.status is Status.WAITING
    assert tokens_of(batch.memory) == (10 + 6, 3 + 3, 2 * 64 - 22 + 64, 0, 64)  # its slot is still the batch's
    assert [batch.step(), batch.step()] == [Padded(prompt=0, rows=1)] * 2
    assert tokens_of(batch.memory) == (0, 0, 0, 0, 256)
    assert batch.step() == Padded(prompt=0, rows=0)  # another batch, of one
    assert late.status is Status.RUNNING


def test_branches_to_come_are_members_and_no_padding() -> None:
    """Until they are forked nothing is computed for them; each that ends is computed on."""
    batch = Batch()
    request = batch.add(3, 5, n=3)
    assert batch.step() == Padded(prompt=0, rows=0)
    assert len(request.live) == 3
    assert batch.step() == Padded(prompt=0, rows=0)
    batch.scheduler.finish(request, request.live[1], "stop")
    assert batch.step() == Padded(prompt=0, rows=1)
    batch.scheduler.finish(request, request.live[0], "stop")
    assert batch.step() == Padded(prompt=0, rows=2)


def test_equal_slots_leave_the_rest_of_the_pool_unused() -> None:
    memory = made("ft", tokens=256, longest=60)
    assert [begun(memory, i, 5, 5) is not None for i in range(5)] == [True] * 4 + [False]
    assert tokens_of(memory)[3:] == (16, 0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_static_batches_run_to_their_slowest_member(depth: int) -> None:
    """Those who fit come at once, whatever the budget; nobody joins before the last of them has ended."""
    trace = Trace(EVERY["ft"](Build(tokens=3 * 48)), seed=0, depth=depth, budget=8, max_seqs=8)
    for i in range(8):
        params = SamplingParams(max_tokens=5 + 3 * i, ignore_eos=True, seed=i)
        trace.add(Asked(str(i), tuple(range(1, 8)), params, ""))
    batches: list[set[str]] = []
    while trace.engine.unfinished:
        trace.step()
        running = {request.id for request in trace.scheduler.running}
        if running and not (batches and running <= batches[-1]):
            assert not batches or not running & batches[-1]
            batches.append(running)
    assert batches == [{"0", "1", "2"}, {"3", "4", "5"}, {"6", "7"}]
    trace.drained()


@pytest.mark.parametrize("name", [name for name, make in EVERY.items() if isinstance(make(Build()), ReservedMemory)])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_nobody_is_preempted(name: str, depth: int) -> None:
    """Whatever was admitted ends where it began: with branches, beams, and more to do than there is memory."""
    trace = Trace(EVERY[name](Build(tokens=1024)), seed=0, depth=depth, budget=16, max_seqs=8)
    kinds: tuple[dict[str, int], ...] = ({}, {"n": 3}, {"beam_width": 4}, {"best_of": 2})
    for i in range(16):
        prompt = tuple((5 * i + j) % (VOCAB - 1) + 1 for j in range(1 + i))
        params = SamplingParams(seed=i, max_tokens=MAX_LEN - 2 * i - 10, **kinds[i % 4])  # type: ignore[arg-type]
        trace.add(Asked(str(i), prompt, params, ""))
    waited = False
    while trace.engine.unfinished:
        trace.step()
        waited = waited or (bool(trace.scheduler.waiting) and bool(trace.scheduler.running))
    assert trace.refused == 0
    assert trace.scheduler.preemptions == 0
    assert waited
    trace.drained()


# Bugs planted on purpose: the traces must catch them


@instead_of(ReservedMemory, "take_journal")
def lost_copy(take: Any, memory: ReservedMemory) -> tuple[Journal, Journal]:
    now, ahead = take(memory)
    return tuple(entry for entry in now if not isinstance(entry, Copy)), ahead


@instead_of(ReservedMemory, "_pages")
def run_that_begins_a_page_late(pages: Any, memory: ReservedMemory, resident: Any, group: int) -> range:
    """Its last page is its neighbour's first one."""
    run = pages(memory, resident, group)
    return range(run.start + 1, run.stop + 1)


@instead_of(Buddy, "take")
def block_of_the_next_smaller_size(take: Any, pool: Buddy, units: int) -> int | None:
    base: int | None = take(pool, max(units // 2, 1))
    return base


@instead_of(ReservedMemory, "admit")
def branches_not_counted(admit: Any, memory: ReservedMemory, seqs: Seq[Sequence], *more: Any) -> Any:
    branches = [seq.branches for seq in seqs]
    for seq in seqs:
        seq.branches = 0
    admitted = admit(memory, seqs, *more)
    for seq, count in zip(seqs, branches):
        seq.branches = count
    return admitted


PLANTED: list[tuple[Plant, str]] = [  # and the message of what fails
    (lost_copy, r"request \w+, branch \d+: .* instead of "),
    (run_that_begins_a_page_late, r"slot \d+ uses page \d+, which is none of group \d+"),
    (block_of_the_next_smaller_size, "a run is longer than its block"),
    (branches_not_counted, "out of order"),
]


def run_traces(depth: int) -> None:
    """Traces without faults other than aborts, in which nobody may be preempted."""
    for seed, (name, tokens) in enumerate((("orca-oracle", 256), ("orca-pow2", 320), ("oracle-mixed", 512)) * 2):
        told = run_trace(EVERY[name], seed=seed, depth=depth, tokens=tokens, requests=20)
        assert told.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_traces_pass_without_a_bug(depth: int) -> None:
    run_traces(depth)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("plant", "message"), PLANTED)
def test_planted_bug_is_caught(plant: Plant, message: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with found_by(message):
        run_traces(depth)


# The bundled model

ASKED: tuple[dict[str, int], ...] = ({}, {"n": 2}, {"beam_width": 3}, {})
PROMPTS = ["Once upon a time", "The little dog", "Lily wanted to", "At night"]


@cache
def answers(memory: str) -> tuple[list[list[tuple[int, ...]]], int]:
    """Greedy and beam tokens of every branch, of requests that don't all fit at once; and requests preempted."""
    llm = LLM(memory=memory, dtype="float32", max_model_len=128, kv_tokens=640, seed=3, max_num_batched_tokens=48)
    params = [SamplingParams(temperature=0, max_tokens=40 + 5 * i, **kind) for i, kind in enumerate(ASKED)]  # type: ignore[arg-type]
    results = llm.generate(PROMPTS * 2, params * 2)
    preempted = llm.engine.scheduler.preemptions
    llm.close()
    return [[tuple(output.token_ids) for output in result.outputs] for result in results], preempted


@pytest.mark.parametrize("memory", RESERVED)
def test_tokens_are_those_of_paged_memory(memory: str) -> None:
    got, preempted = answers(memory)
    assert got == answers("paged")[0]
    assert preempted == 0


@pytest.mark.parametrize("memory", RESERVED)
def test_bench_throughput_runs(memory: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    flags = ["--memory", memory, "--kv-tokens", "1024", "--max-model-len", "128"]
    assert (
        bench(["throughput", *flags, "--workload", "fixed:9:5@6", "--repeat", "1", "--warmup", "0", "--out", str(out)])
        == 0
    )
    assert "internal" in out.read_text()


def test_a_memory_too_small_for_one_reservation_is_refused_at_start() -> None:
    with pytest.raises(StartupError, match="finds no room for a sequence of 100 tokens in 112"):
        build(EngineConfig(memory="orca-max", kv_tokens=100, max_model_len=100))
