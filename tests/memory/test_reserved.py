"""Reserved memories: what they reserve, copy, waste and pad; and that the engine's tokens are the same over them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from memories import EVERY, Build, admit_one, reset, spec
from test_planted import WRONG, Plant, found_by, instead_of
from traces import Asked, Trace, run_trace

from quire.bench import main as bench
from quire.config import RESERVED_MEMORIES, EngineConfig
from quire.errors import StartupError
from quire.llm import LLM
from quire.memory.baselines.buddy import BuddyAllocator
from quire.memory.baselines.reserved import RESERVATION_RULES, ReservedMemory
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import PageCopy
from quire.startup.build import build


def made(rule: str, tokens: int = 256, longest: int = 64, page: int = 4, seqs: int = 8) -> ReservedMemory:
    config = EngineConfig(memory=rule, page_size=page, max_num_seqs=seqs)
    memory = build_memory(config, spec((None,), longest), MemorySize(tokens, longest, 2))
    assert isinstance(memory, ReservedMemory)
    return memory


def begun(memory: ReservedMemory, id: int, prompt: int, output: int, *, held: int = 0, branches: int = 0) -> Any:
    """A sequence that is told to get `output` tokens and has computed `held`; None if it isn't admitted."""
    seq = Sequence(id, [1] * prompt)
    seq.num_forks = branches
    seq.max_total_len = prompt + output
    if admit_one(memory, seq, 64) is None:
        return None
    assert memory.grow(seq, held)
    seq.tokens += [1] * (held - prompt)
    seq.planned = seq.computed = held
    return seq


def tokens_of(memory: ReservedMemory) -> tuple[float, ...]:
    """Usage in tokens: used, reserved, internal, external, free."""
    usage, token = memory.account().usage, memory.page_bytes * memory.num_groups / memory.page_tokens
    assert usage.cached == 0
    return tuple(part / token for part in (usage.used, usage.reserved, usage.internal, usage.external, usage.free))


@pytest.mark.parametrize(
    ("rule", "reserved"),
    [("orca-oracle", 125), ("orca-pow2", 132), ("orca-max", 2048), ("ft", 2048)],
)
def test_what_is_reserved_for_25_tokens_after_a_prompt_of_100(rule: str, reserved: int) -> None:
    """§6.1: "if the true output length is 25, it reserves 32 positions for outputs"."""
    assert RESERVATION_RULES[rule](100, 25, 2048) == reserved
    assert [RESERVATION_RULES["orca-pow2"](0, output, 2048) for output in (1, 2, 3, 64, 65)] == [1, 2, 4, 64, 128]
    assert RESERVATION_RULES["orca-pow2"](2000, 40, 2048) == 2048


def test_the_three_orcas_coincide_for_chat() -> None:
    """Figure 17: with prompts of 1024 tokens the buddy allocator makes 2048 of whatever is reserved."""
    for rule in RESERVED_MEMORIES[:3]:
        memory = made(rule, tokens=8192, longest=2048, page=16)
        assert [begun(memory, id, 1024, 1 + 200 * id, held=1024) is not None for id in range(5)] == [True] * 4 + [False]


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
    assert memory.prefix_cache is None
    assert reset(memory) == 0
    assert memory.count_held([seq]) == (16 * memory.kv_config.groups[0].page_bytes, 9)
    sharing = memory.account().sharing
    assert (sharing.saved, sharing.host_pages, sharing.prefix_capacity) == (0, 0, 0)
    memory.free(seq)  # which is still where it was
    assert tokens_of(memory) == (0, 0, 0, 0, 256)
    with pytest.raises(StartupError, match="shares no prefixes"):
        EngineConfig(memory="orca-max", prefix_tokens=16)


# FasterTransformer's static batches


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
    while trace.engine.has_unfinished_requests:
        trace.step()
        running = {request.id for request in trace.scheduler.running}
        if running and not (batches and running <= batches[-1]):
            assert not batches or not running & batches[-1]
            batches.append(running)
    assert batches == [{"0", "1", "2"}, {"3", "4", "5"}, {"6", "7"}]
    trace.drained()


def run_traces(depth: int) -> None:
    """Traces without faults other than aborts, in which nobody may be preempted."""
    for seed, (name, tokens) in enumerate((("orca-oracle", 256), ("orca-pow2", 320), ("oracle-mixed", 512)) * 2):
        told = run_trace(EVERY[name], seed=seed, depth=depth, tokens=tokens, requests=20)
        assert told.preemptions == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_traces_pass_without_a_bug(depth: int) -> None:
    run_traces(depth)


@instead_of(ReservedMemory, "take_page_ops")
def lost_copy(take: Any, memory: ReservedMemory) -> Any:
    now, ahead = take(memory)
    return tuple(entry for entry in now if not isinstance(entry, PageCopy)), ahead


@instead_of(ReservedMemory, "_pages")
def run_that_begins_a_page_late(pages: Any, *given: Any) -> range:
    """Its last page is its neighbour's first one."""
    run = pages(*given)
    return range(run.start + 1, run.stop + 1)


@instead_of(ReservedMemory, "admit")
def branches_not_counted(admit: Any, memory: ReservedMemory, seqs: Seq[Sequence], *more: Any) -> Any:
    branches = [seq.num_forks for seq in seqs]
    for seq in seqs:
        seq.num_forks = 0
    admitted = admit(memory, seqs, *more)
    for seq, count in zip(seqs, branches):
        seq.num_forks = count
    return admitted


block_of_the_next_smaller_size = instead_of(BuddyAllocator, "allocate")(
    lambda take, pool, units: take(pool, max(units // 2, 1))
)
PLANTED: list[tuple[Plant, str]] = [  # bugs that the traces must catch, and the message of what fails
    (lost_copy, WRONG),
    (run_that_begins_a_page_late, r"slot \d+ uses page \d+, which is none of group \d+"),
    (block_of_the_next_smaller_size, "a run is longer than its block"),
    (branches_not_counted, "out of order"),
]


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
    preempted = llm.engine.scheduler.num_preemptions
    llm.close()
    return [[tuple(output.token_ids) for output in result.outputs] for result in results], preempted


@pytest.mark.parametrize("memory", RESERVED_MEMORIES)
def test_tokens_are_those_of_paged_memory(memory: str) -> None:
    got, preempted = answers(memory)
    assert got == answers("paged")[0]
    assert preempted == 0


@pytest.mark.parametrize("memory", RESERVED_MEMORIES)
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
