"""Speculative decoding: the tokens are those of steps of one token, whatever is drafted, and the counts add up."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

import pytest
import traces
from echo_oracle import expected_proposals, expected_tokens
from memories import MAX_LEN, STATE, Build, paged
from traces import DEPTHS, WAYS, Asked, Checked, Trace, Watched

from bench.echo_runner import EchoRunner
from quire.core import speculation
from quire.core.preemption_costs import PreemptionCosts, SpeculationCosts
from quire.core.recovery import RunnerRestarter
from quire.core.request import Request
from quire.core.scheduler import Scheduler
from quire.core.speculation import Candidate, NgramIndex, Speculator, count_markers
from quire.errors import RanksLost
from quire.protocol.model_spec import LayerSpec
from quire.protocol.sampling_params import SamplingParams, Structured
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import SeqSlice, StepPlan, StepResult

VOCAB = 8  # few tokens, so that n-grams occur again and are followed by the same token
FREE = SpeculationCosts(PreemptionCosts(0.0, 0.0, 1.0, 0.0, 0.0), PreemptionCosts(0.0, 0.0, 0.0, 0.0, 0.0))
"""Costs with which more tokens in a step take no longer: there are always as many draft tokens as possible."""
SCARCE = SpeculationCosts(PreemptionCosts(0.0, 0.0, 1.0, 0.0, 0.0), PreemptionCosts(0.0, 0.0, 0.5, 0.0, 0.0))
"""Costs with which the draft model pays while most of what it proposes is accepted."""
DRAFT = LayerSpec(1, 4, is_draft=True)
METHODS = ("ngram", "draft", "both")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "VOCAB", VOCAB)
    monkeypatch.setattr(speculation, "MAX_LAG", 16)  # sequences are short
    monkeypatch.setattr(traces, "STEMS", tuple(tuple(token % 7 + 1 for token in stem) for stem in traces.STEMS))


class Recorded(Scheduler):
    """A scheduler that records what was drafted and accepted."""

    def record(self) -> None:
        # Sequence, slice, accepted draft tokens, and if they have masks.
        self.log: list[tuple[Sequence, SeqSlice, int, bool]] = []
        self.plans: list[StepPlan] = []

    def update(self, plan: StepPlan, result: StepResult) -> Any:
        drafts = [self.by_slot[row.slot][1] if row.draft_tokens else None for row in plan.slices]
        for seq, row, sampled in zip(drafts, plan.slices, result.slice_results):
            if seq is not None:
                assert self.num_in_flight == 1, "a step with draft tokens is not the only one"
                self.log.append((seq, row, len(sampled.tokens) - 1, seq.matcher is not None))
        tokens = sum(len(row.tokens) + len(row.draft_tokens) for row in plan.slices)
        assert tokens <= self.token_budget, "the model computes more than the budget"
        assert sum(len(row.tokens) for row in plan.draft_slices) <= self.token_budget, "the draft model does"
        self.plans.append(plan)
        return super().update(plan, result)


def opened(
    method: str, *, k: int = 3, page: int = 4, windows: tuple[Any, ...] = (None, None), tokens: int = 192,
    budget: int = 64, max_seqs: int = 8, host: int = 0, prefix_tokens: int = 0, costs: SpeculationCosts = FREE,
    settings: dict[str, Any] | None = None, depth: int = 1, defers_masks: bool = False, **how: Any,
) -> Trace:  # fmt: skip
    """A trace over a memory with a draft layer, if `method` has a draft model. `defers_masks`: if the runner does."""
    layers = windows if method == "ngram" else (*windows, DRAFT)
    memory = paged(layers, page_size=page, **(settings or {}))(
        Build(tokens, budget, max_seqs, MAX_LEN, host, prefix_tokens)
    )
    trace = Trace(
        memory, budget=budget, max_seqs=max_seqs, depth=depth, deferred_masks=defers_masks and depth > 1, **how
    )
    if defers_masks:
        runner: Any = trace.runner
        runner.submit_without_masks, runner.submit_masks = runner.submit, runner.runner.submit_masks
    scheduler = trace.scheduler
    scheduler.speculator = Speculator(method, k, lookup=(1, 3), costs=costs, deferred_masks=defers_masks)
    scheduler.__class__ = Recorded
    scheduler.record()  # type: ignore[attr-defined]
    return trace


def check_counts(trace: Trace) -> None:
    """Compare the counts with what was drafted, and the draft model's share of it with what it must propose."""
    log, stats = trace.scheduler.log, trace.engine.stats  # type: ignore[attr-defined]
    assert stats.num_drafts == len(log)
    assert stats.draft_tokens == sum(len(row.draft_tokens) for _, row, _, _ in log)
    assert stats.accepted_tokens == sum(accepted for _, _, accepted, _ in log) == sum(stats.accepted_per_pos)
    assert stats.accepted_per_pos == [sum(accepted > i for _, _, accepted, _ in log) for i in range(16)]
    for seq, row, accepted, is_masked in log:
        if (count := count_markers(row)) and not is_masked:  # proposals are not masked
            right = expected_proposals(seq.tokens, trace.groups, seq.prompt_len)[row.start : row.start + count]
            leading = len(list(takewhile(bool, right)))
            ended = leading == len(right) < count  # what it would have been followed by is not known
            assert accepted == leading or (ended and accepted > leading), "the draft model read other states"
    for plan in trace.scheduler.plans:  # type: ignore[attr-defined]
        for row in plan.draft_slices:
            assert row.slot in {slice.slot for slice in plan.slices}
    assert not trace.scheduler.speculator.seqs, "a sequence is kept that has ended"  # type: ignore[union-attr]


def ask(trace: Trace, id: str, prompt: tuple[int, ...], **params: Any) -> None:
    params = {"seed": 7, "max_tokens": 24, "ignore_eos": True, **params}
    trace.add(Asked(id, prompt, SamplingParams(**params), ""))


class Foreseen(Speculator):
    """Proposes the tokens that will be sampled, each wrong with the probability `wrong`, as n-grams do."""

    wrong = 0.0

    def foresee(self, trace: Trace, wrong: float = 0.0) -> None:
        self.trace, self.wrong, self.rng = trace, wrong, random.Random(0)

    def _find_drafts(self, seq: Sequence, most: int, room: int) -> list[Candidate]:
        asked = next(
            asked for asked in self.trace.asked.values() if asked.prompt == tuple(seq.tokens[: seq.prompt_len])
        )
        params = replace(asked.params, max_tokens=MAX_LEN, stop_token_ids=(), ignore_eos=True)
        wanted = expected_tokens(
            asked.prompt, params, seq.seed, vocab_size=VOCAB, groups=self.trace.groups, max_len=MAX_LEN
        )
        tokens = [(token + (self.rng.random() < self.wrong)) % VOCAB for token in [*asked.prompt, *wanted][len(seq) :]]
        most = min(self.max_tokens, most)
        return [Candidate(seq, most, tuple(tokens[:most]), 1.0, 0.0)]


def foreseen(*, wrong: float = 0.0, **how: Any) -> Trace:
    trace = opened("ngram", **how)
    speculator = Foreseen("ngram", how.get("k", 3), costs=FREE)
    speculator.foresee(trace, wrong)
    trace.scheduler.speculator = speculator
    return trace


# Tokens


def some_declined(trace: Trace) -> None:
    """Some requests turn speculation off."""
    draw = trace.draw

    def drawn(rng: random.Random, id: str) -> Asked:
        asked = draw(rng, id)
        return asked._replace(params=replace(asked.params, speculate=rng.random() < 0.8))

    trace.draw = drawn  # type: ignore[method-assign]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_single_steps(method: str, page: int, depth: int) -> None:
    """Random requests in a memory of 192 tokens: chunks, hits, both preemptions, branches, stop tokens and lengths
    within a run, min_tokens, log-probabilities of prompts and outputs, penalties, aborts. The draft model lags behind
    where it does not pay for many sequences."""
    accepted = 0
    for seed in range(4):
        rng = random.Random(f"{method} {page} {depth} {seed}")
        trace = opened(
            method, k=rng.choice((1, 3, 5)), page=page, windows=rng.choice(((None, None), (None, 6))), depth=depth,
            seed=seed, budget=rng.choice((3, 8, 16, 64)), max_seqs=rng.choice((3, 8)), host=rng.choice((0, 12, 1000)),
            preemption=rng.choice(WAYS), tokens=rng.choice((96, 192)), unforked=rng.choice((0.0, 0.1)),
            prefix_tokens=rng.choice((0, 24)), costs=rng.choice((FREE, FREE, SCARCE)),
        )  # fmt: skip
        some_declined(trace)
        trace.run(12)
        check_counts(trace)
        accepted += trace.engine.stats.accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("preemption", WAYS)
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_tokens_are_those_of_single_steps_if_many_drafts_are_right(wrong: float, preemption: str) -> None:
    accepted = 0
    for seed in range(8):
        trace = foreseen(
            wrong=wrong, k=(3, 7)[seed % 2], page=(1, 4, 16)[seed % 3], depth=seed % 3 + 1, seed=seed,
            budget=(8, 16, 64)[seed % 3], tokens=(72, 192)[seed // 4], host=12, preemption=preemption,
        )  # fmt: skip
        trace.run(12)
        check_counts(trace)
        accepted += trace.engine.stats.accepted_tokens
    assert accepted > 150


@pytest.mark.parametrize("windows", [(STATE,), (None, STATE, 6)])
@pytest.mark.parametrize("method", [*METHODS, "foreseen"])
def test_running_states_are_those_after_accepted_tokens(method: str, windows: tuple[Any, ...]) -> None:
    accepted = 0
    for seed in range(9):
        page = (1, 4, 16)[seed % 3]
        settings: dict[str, Any] = {
            "k": (3, 1, 6)[seed // 3], "page": page, "windows": windows, "settings": {"state_tokens": max(page, 8)},
            "depth": seed % 3 + 1, "seed": seed, "budget": (8, 64, 16)[seed % 3], "tokens": (96, 192)[seed % 2],
            "host": (12, 1000)[seed % 2], "preemption": WAYS[seed // 3], "prefix_tokens": (0, 24)[seed % 2],
        }  # fmt: skip
        trace = foreseen(wrong=0.3, **settings) if method == "foreseen" else opened(method, **settings)
        trace.run(12)
        check_counts(trace)
        accepted += trace.engine.stats.accepted_tokens
    assert accepted > 50


@pytest.mark.parametrize("depth", DEPTHS)
def test_right_drafts_save_steps(depth: int) -> None:
    trace = foreseen(depth=depth)
    ask(trace, "a", (1, 2, 3), max_tokens=22)
    trace.finish()
    check_counts(trace)
    stats = trace.engine.stats
    assert [len(output.tokens) for output in trace.outputs["a"]] == [1, 4, 4, 4, 4, 4, 1], "no draft beyond the end"
    assert (stats.num_drafts, stats.draft_tokens, stats.accepted_tokens) == (5, 15, 15)
    assert trace.outputs["a"][-1].drafts == (15, 15)
    assert stats.accepted_per_pos[:4] == [5, 5, 5, 0]
    assert stats.computed_tokens == 3 + 21


@pytest.mark.parametrize("at", range(1, 9))
def test_a_stop_token_ends_a_run_in_its_middle(at: int) -> None:
    trace = foreseen(k=7)
    prompt = next(prompt for prompt in product(range(1, VOCAB), repeat=3) if first_seen(trace, prompt, at))
    wanted = outputs_of(trace, prompt)
    ask(trace, "a", prompt, stop_token_ids=[wanted[at]], logprobs=1)
    trace.finish()
    check_counts(trace)
    assert [len(output.tokens) for output in trace.outputs["a"]] == ([1, at] if at < 8 else [1, 8])
    assert trace.memory.account().sharing.tables == 0


def outputs_of(trace: Trace, prompt: tuple[int, ...]) -> list[int]:
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    return expected_tokens(prompt, params, 7, vocab_size=VOCAB, groups=trace.groups, max_len=MAX_LEN)


def first_seen(trace: Trace, prompt: tuple[int, ...], at: int) -> bool:
    wanted = outputs_of(trace, prompt)
    return wanted[at] not in wanted[:at]


def test_a_rejected_tail_is_not_published() -> None:
    """Pages that only rejected tokens filled are found by nobody, and the next tokens overwrite them."""
    trace = foreseen(k=7, page=1, wrong=1.0)
    ask(trace, "a", (1, 2, 3))
    trace.finish()
    assert trace.engine.stats.accepted_tokens == 0
    assert trace.engine.stats.num_drafts == 22
    keys = sum(len(index) for index in trace.memory.memory.page_pool.index)
    assert keys == 3 + 23, "a page for each computed token, and no other"


@pytest.mark.parametrize("end", ["abort", "stop"])
def test_a_request_ends_while_its_drafts_are_in_flight(end: str) -> None:
    trace = foreseen()
    ask(trace, "a", (1, 2, 3))
    ask(trace, "b", (4, 5, 6, 7), max_tokens=9)
    trace.step()
    trace.step()
    scheduler, engine = trace.scheduler, trace.engine
    plan = scheduler.schedule()
    assert plan is not None
    assert [len(row.draft_tokens) for row in plan.slices] == [3, 3]
    ticket = trace.runner.submit(plan)
    assert scheduler.schedule() is None, "another step is planned"
    if end == "abort":
        trace.abort("a")
    else:
        assert engine.stop("a", 0, "text")
        del trace.asked["a"]
    result = trace.runner.collect(ticket)
    engine.stats.record_drafts(plan, result)
    events = scheduler.update(plan, result)
    assert [(event.request.id, len(event.tokens)) for event in events] == [("b", 4)]
    trace.outputs["b"] += engine.finish_outputs(engine.output_builder.build(events, 0.0))
    trace.finish()


def test_a_runner_is_lost_while_drafts_are_in_flight() -> None:
    trace = foreseen(restarter=RunnerRestarter(lambda: anew(), max_restarts=1))

    def anew() -> Any:
        memory = paged((None, None), page_size=4)(Build(192, 64, 8, MAX_LEN, 0, 0))
        trace.memory = Watched(memory)
        trace.runner = Checked(EchoRunner(vocab_size=VOCAB), trace.memory, 64)
        trace.runner.bind(memory.kv_config)
        return trace.runner, trace.memory

    def lost(ticket: int) -> StepResult:
        raise RanksLost("the device is gone")

    ask(trace, "a", (1, 2, 3))
    trace.step()
    trace.step()
    trace.runner.collect = lost  # type: ignore[method-assign]
    trace.step()
    assert not trace.scheduler.drafts_in_flight
    trace.finish()
    assert trace.engine.stats.restarts == 1


def test_a_short_memory_has_no_room_for_drafts_before_somebody_is_preempted() -> None:
    """Drafts take pages that are free, and no others."""
    trace = foreseen(page=1, tokens=60)
    ask(trace, "a", (1, 2, 3), max_tokens=26)
    ask(trace, "b", (4, 5, 6), max_tokens=26)
    trace.finish()
    assert trace.scheduler.num_preemptions == 0
    assert trace.engine.stats.num_drafts > 0


def test_a_request_turns_speculation_off() -> None:
    trace = foreseen()
    ask(trace, "a", (1, 2, 3), speculate=False)
    trace.finish()
    assert trace.engine.stats.num_drafts == 0


@pytest.mark.parametrize("kind", [{"n": 2}, {"beam_width": 2}, {"best_of": 2}])
def test_branches_fork_in_a_step_without_drafts(kind: dict[str, int]) -> None:
    trace = foreseen()
    ask(trace, "a", (1,), **kind)
    trace.finish()
    assert trace.engine.stats.num_drafts > 0 or "beam_width" in kind


# Grammars


class Chain:
    """A matcher that allows one or two tokens after each, so that what followed once follows again; where it allows one
    at a time, these are forced. With every third seed it allows most tokens."""

    def __init__(self, seed: int, last: int = 0, count: int = 0) -> None:
        self.seed, self.last, self.count = seed, last, count

    def allowed(self, last: int) -> list[int]:
        rng = random.Random(f"{self.seed} {last}")
        counts = (1, 1, 1, 1, 2) if self.seed % 3 else (4, 5, 6)
        return rng.sample(range(1, VOCAB), rng.choice(counts)) + [0] * (rng.random() < 0.1)

    def accept(self, token: int) -> str:
        if token not in self.allowed(self.last):
            return f"token {token} can't follow"
        self.last, self.count = token, self.count + 1
        return ""

    def forced_tokens(self) -> tuple[int, ...]:
        run, last = list[int](), self.last
        while len(run) < 6 and len(self.allowed(last)) == 1:
            [last] = self.allowed(last)
            run.append(last)
        return tuple(run)

    def is_unconstrained(self) -> bool:
        return False

    def copy(self) -> Chain:
        return Chain(self.seed, self.last, self.count)


class Chains:
    """A grammar of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def new_matcher(self) -> Chain:
        return Chain(self.seed)

    def compute_masks(self, matchers: Seq[Chain]) -> list[bytes]:
        return [struct.pack("<I", sum(1 << token for token in {*one.allowed(one.last)})) for one in matchers]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("method", METHODS)
def test_drafts_follow_grammars(method: str, depth: int, deferred: bool) -> None:
    """N-grams are drafted up to the first token that the grammar refuses, and it may force tokens after a run. The
    draft model's tokens are masked once they are known, if masks can be deferred."""
    forced, accepted = 0, {"ngram": list[int](), "draft": list[int]()}
    for seed in range(12):
        trace = opened(
            method, depth=depth, seed=seed, host=12, preemption=WAYS[seed % 3], tokens=96, defers_masks=deferred,
            windows=((None, None), (None, STATE))[seed % 2], settings={"state_tokens": 8},
        )  # fmt: skip
        draw = trace.draw

        def drawn(rng: random.Random, id: str, draw: Any = draw) -> Asked:
            asked: Asked = draw(rng, id)
            if asked.params.beam_width is not None or rng.random() < 0.3:
                return asked
            grammar = Chains(rng.randrange(9))
            params = replace(asked.params, structured=Structured("regex", "chains"), grammar=grammar, min_tokens=0,
                             ignore_eos=False)  # fmt: skip
            return asked._replace(params=params)

        trace.draw = drawn  # type: ignore[method-assign]
        trace.run(10)
        check_counts(trace)
        for _, row, count, is_masked in trace.scheduler.log:  # type: ignore[attr-defined]
            if is_masked:
                accepted["draft" if count_markers(row) else "ngram"].append(count)
        forced += sum(len(output.tokens) > 5 for outputs in trace.outputs.values() for output in outputs)
    assert forced > 0
    for kind, counts in accepted.items():
        if method in (kind, "both") and (deferred or kind == "ngram"):
            assert len(counts) > 20
            assert sum(counts) > 10
            assert max(counts) > 1
        else:
            assert not counts, f"there are drafts of the {kind}"


class Cycle(Chain):
    """Two choices of two tokens, then five that are forced, again and again."""

    def allowed(self, last: int) -> list[int]:
        return [1, 2] if self.count % 7 < 2 else [self.count % 7 + 1]

    def forced_tokens(self) -> tuple[int, ...]:
        return tuple(range(self.count % 7 + 1, 8)) if self.count % 7 >= 2 else ()

    def copy(self) -> Cycle:
        return Cycle(self.seed, self.last, self.count)


class Cycles(Chains):
    """A grammar of them."""

    def new_matcher(self) -> Cycle:
        return Cycle(self.seed)


@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_grammar_forces_tokens_after_a_run_only(penalty: float) -> None:
    """A run goes on after a token that forces some, which it has already."""
    trace = opened("ngram")
    grammar: dict[str, Any] = {"structured": Structured("regex", "cycle"), "grammar": Cycles(0), "ignore_eos": False}
    ask(trace, "a", (1, 2, 3), max_tokens=45, frequency_penalty=penalty, **grammar)
    trace.finish()
    check_counts(trace)
    tokens = [output.tokens for output in trace.outputs["a"]]
    assert trace.engine.stats.accepted_tokens > 0
    assert max(map(len, tokens)) > 4, "nothing is forced"


# What is drafted


@pytest.mark.parametrize("lookup", [(1, 1), (1, 3), (2, 5), (4, 4)])
def test_ngrams_are_found_as_by_search(lookup: tuple[int, int]) -> None:
    shortest, longest = lookup
    for seed in range(60):
        rng = random.Random(seed)
        tokens, index = rng.choices(range(rng.choice((2, 4))), k=rng.randint(1, 20)), NgramIndex(*lookup)
        for _ in range(20):
            count = rng.randint(1, 6)
            found = index.propose(tokens, count)
            end = len(tokens)
            matches = [
                at
                for n in range(min(longest, end - 1), shortest - 1, -1)
                for at in range(end - 1, n - 1, -1)
                if tokens[at - n : at] == tokens[end - n :]
            ]
            following = [*tokens, *found][matches[0] :][:count] if matches else []
            assert list(found) == following
            tokens += rng.choices(range(3), k=rng.randint(1, 3))


def test_an_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MAX_INDEXED_TOKENS", 32)
    rng, index, tokens = random.Random(0), NgramIndex(1, 3), list[int]()
    for _ in range(500):
        tokens += rng.choices(range(1000), k=2)
        index.extend(tokens)
        assert index.end - index.begin <= 64
        assert len(index.last_ends) <= 3 * 64
    again = tokens[-20:-10]
    tokens += again
    assert list(index.propose(tokens, 5)) == tokens[-20:-15]


def lone(tokens: list[int], **params: Any) -> Request:
    """A request that decodes, alone."""
    seq = Sequence(1, list(tokens))
    seq.planned = seq.computed = len(tokens) - 1
    return Request("a", seq, SamplingParams(**params), arrival_time=0.0, max_tokens=params.get("max_tokens", 1000))


def chosen(speculator: Speculator, requests: list[Request], max_len: int = 2**20) -> list[int]:
    """How many tokens the draft model is to propose for each one-branch request."""
    for i, request in enumerate(requests):
        request.live_seqs[0].id, request.live_seqs[0].uses_draft_model = i, speculator.has_model
    drafts, proposals = speculator.choose(requests, max_len)
    assert not drafts, "nothing was proposed yet"
    return [proposals.get(i, 0) for i in range(len(requests))]


GPU = SpeculationCosts(PreemptionCosts(0, 0, 6e-3, 2e-5, 5e-8), PreemptionCosts(0, 0, 1e-3, 3e-6, 1e-8))
CPU = SpeculationCosts(PreemptionCosts(0, 0, 9e-3, 3e-3, 1e-6), PreemptionCosts(0, 0, 3e-3, 1e-3, 1e-7))
"""Costs of a GPU, where a step takes as long for a hundred tokens as for one, and of a CPU, where it does not."""


@pytest.mark.parametrize(
    ("costs", "batch", "context", "wanted"),
    [(GPU, 1, 100, 4), (GPU, 8, 100, 4), (GPU, 64, 100, 2), (GPU, 64, 20_000, 0), (GPU, 1000, 100, 0), (CPU, 1, 100, 1),
     (CPU, 8, 100, 0)],
)  # fmt: skip
def test_there_are_fewer_drafts_the_more_they_cost(
    costs: SpeculationCosts, batch: int, context: int, wanted: int
) -> None:
    """A pass of the draft model is shared by all sequences, a verified token is not."""
    counts = chosen(Speculator("draft", 16, costs=costs), [lone([*range(context)]) for _ in range(batch)])
    assert counts == [wanted] * batch


def test_a_head_drafts_where_its_first_pass_would_not_pay() -> None:
    """It makes that pass in any case."""
    slow = GPU._replace(draft=PreemptionCosts(0, 0, 6e-3, 3e-6, 1e-8))
    by_method = {
        method: chosen(Speculator(method, 16, costs=slow), [lone([*range(100)])])
        for method in ("draft", "eagle3", "mtp")
    }
    assert by_method == {"draft": [0], "eagle3": [1], "mtp": [1]}


def test_drafts_are_at_most_what_a_sequence_may_have() -> None:
    speculator = Speculator("draft", 4, costs=FREE)
    assert chosen(speculator, [lone([1] * 5, max_tokens=count) for count in (1, 2, 3, 4, 9)]) == [0, 0, 1, 2, 4]
    assert [chosen(speculator, [lone([1] * 5)], max_len=length) for length in (7, 8)] == [[0], [1]]
    assert chosen(speculator, [lone([1] * 5, speculate=False), lone([1] * 5, beam_width=2)]) == [0, 4]


@pytest.mark.parametrize(("max_tokens", "max_len", "wanted"), [(9, 99, (3, 4)), (3, 99, (2, 1)), (9, 10, (3, 0))])
def test_what_was_proposed_is_verified_before_more_is_proposed(
    max_tokens: int, max_len: int, wanted: tuple[int, int]
) -> None:
    """All of it may be accepted: with 5 tokens, 3 drafts and a sample, the last of 10 is proposed for nothing."""
    speculator, request = Speculator("draft", 4, costs=FREE), lone([1] * 5, max_tokens=max_tokens)
    [seq] = request.live_seqs
    seq.uses_draft_model, seq.proposed = True, 3
    drafts, proposals = speculator.choose([request], max_len)
    assert (len(drafts[seq.id]), proposals.get(seq.id, 0)) == wanted


def test_a_step_has_a_bounded_number_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest sequences have them."""
    monkeypatch.setattr("quire.core.scheduler.MAX_STEP_DRAFTS", 7)
    trace = opened("draft", k=3, page=4)
    for i in range(4):
        ask(trace, f"r{i}", (i + 1, 2, 3, 4))
    trace.finish()
    counts = [[len(row.draft_tokens) for row in plan.slices] for plan in trace.scheduler.plans]  # type: ignore[attr-defined]
    assert max(map(sum, counts)) == 7
    assert [3, 3, 1, 0] in counts


def test_drafts_that_are_wrong_are_given_up_and_tried_again() -> None:
    speculator, request = Speculator("draft", 4, costs=GPU), lone([*range(100)])
    [seq] = request.live_seqs
    counts = []
    for _ in range(200):
        [count] = chosen(speculator, [request])
        counts.append(count)
        if count:
            speculator.record(seq, SeqSlice(1, (1,), seq.planned, 1, (), speculator.markers[count]), 0)
        seq.tokens.append(7)
        seq.planned += 1
    assert counts[0] == 4
    assert counts[:40].count(0) > 20, "they are not given up"
    assert any(counts[100:]), "they are not tried again"
    assert counts.count(0) > 150


def test_a_batch_drafts_by_the_rate_of_each_sequence() -> None:
    speculator, requests = Speculator("draft", 4, costs=GPU), [lone([*range(100)]) for _ in range(40)]
    chosen(speculator, requests)
    for request in requests[::2]:
        for accepted in (0, 4) * 4:
            row = SeqSlice(1, (1,), 99, 1, (), speculator.markers[4])
            speculator.record(request.live_seqs[0], row, accepted * (request is requests[0]))
    counts = chosen(speculator, requests)
    assert counts[2::2] == [0] * 19, "those of which all were wrong have none"
    assert counts[0] >= counts[1] > 0
    assert counts[1::2] == [counts[1]] * 20


def test_a_draft_model_that_is_not_used_catches_up_for_all_at_once() -> None:
    unused = SpeculationCosts(FREE.model, PreemptionCosts(0, 0, 1e9, 0, 0))
    trace = opened("draft", costs=unused, page=4)
    for id in "abc":
        ask(trace, id, (1, 2, ord(id) % 8), max_tokens=40)
    trace.finish()
    plans = [plan for plan in trace.scheduler.plans if plan.slices]  # type: ignore[attr-defined]
    counts = [len(plan.draft_slices) for plan in plans]
    assert counts[0] == 3, "it computes the prompts"
    assert [count for count in counts[1:] if count] == [3, 3], "it runs twice for 40 tokens of each"
    assert {len(row.tokens) for plan in plans[1:] for row in plan.draft_slices} == {17}
    check_counts(trace)


def test_ngrams_that_are_wrong_give_way_to_the_draft_model() -> None:
    speculator, request = Speculator("both", 4, costs=FREE), lone([1, 2, 3] * 20)
    [seq] = request.live_seqs
    sources = []
    for _ in range(20):
        seq.tokens += [1, 2, 3]
        seq.planned = seq.computed = len(seq.tokens) - 1
        seq.uses_draft_model = True
        drafts, proposals = speculator.choose([request], 2**20)
        row, seq.proposed = SeqSlice(1, (3,), seq.planned, 1, (), drafts.get(seq.id, ())), proposals.get(seq.id, 0)
        sources.append(count_markers(row) > 0)
        speculator.record(seq, row, 4 if sources[-1] else 0)
    assert not any(sources[:3])
    assert sources.count(True) > 5


def test_a_draft_model_catches_up_before_it_drafts() -> None:
    """After n-grams it goes on where they ended, in the same step."""
    trace = opened("both", k=2)
    ask(trace, "a", (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4), max_tokens=30)
    trace.finish()
    check_counts(trace)
    caught_up = [len(row.tokens) for plan in trace.scheduler.plans for row in plan.draft_slices if row.num_samples]  # type: ignore
    assert max(caught_up) > 2


LONG = tuple(i * i % 7 + 1 for i in range(24))


def test_a_prompt_cached_without_drafts_is_found_by_a_request_with_drafts() -> None:
    """Its draft model catches up in chunks of the budget, and drafts only then; other prompts go before."""
    trace = opened("draft", k=2, budget=8)
    ask(trace, "plain", LONG, speculate=False, max_tokens=1)
    trace.finish()
    scheduler, plans = trace.scheduler, trace.scheduler.plans  # type: ignore[attr-defined]
    assert not any(plan.draft_slices for plan in plans)
    plans.clear()
    ask(trace, "a", LONG)
    ask(trace, "b", LONG[1:14], max_tokens=4)
    trace.step()
    [a], [b] = [request.live_seqs for request in scheduler.running]
    slots = {seq: trace.memory.slot(seq) for seq in (a, b)}
    assert (a.planned, a.drafted) == (24, 4)
    assert next(iter(scheduler.running)).cached_tokens == 20
    trace.finish()
    check_counts(trace)
    caught_up = [row for plan in plans for row in plan.draft_slices if row.slot == slots[a]]
    first = next(i for i, row in enumerate(caught_up) if row.num_samples)
    assert first >= 24 // 8
    ends = [row.start + len(row.tokens) for row in caught_up[:first]]
    assert [0, *ends[:-1]] == [row.start for row in caught_up[:first]]
    for plan in plans:
        rows = {row.slot: row for row in plan.draft_slices}
        for row in plan.slices:
            if row.slot == slots[b] and row.start < 12:
                assert (rows[row.slot].start, rows[row.slot].tokens) == (row.start, row.tokens)
    assert trace.engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("windows", [(None, None), (None, 6)])
@pytest.mark.parametrize("speculate", [False, True])
def test_a_prompt_is_found_whether_it_was_drafted_for_or_not(speculate: bool, windows: tuple[Any, ...]) -> None:
    trace = opened("draft", windows=windows)
    for id, drafts in (("a", speculate), ("b", not speculate), ("c", True)):
        ask(trace, id, LONG, speculate=drafts, max_tokens=20)
        trace.step()
        [request] = trace.scheduler.running
        assert request.cached_tokens == (20 if id != "a" else 0)
        starts = [row.start for row in trace.scheduler.plans[-1].draft_slices]  # type: ignore[attr-defined]
        assert starts == [20 * (id == "c")] * drafts
        trace.finish()
    check_counts(trace)
    assert trace.engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("windows", [(None, None), (None, 6)])
def test_branches_go_on_where_their_draft_model_is(windows: tuple[Any, ...]) -> None:
    """They are forked while it lags behind, preempted, and return together."""
    trace = opened("draft", windows=windows, budget=8, tokens=120, k=2)
    ask(trace, "plain", LONG, speculate=False, max_tokens=1)
    trace.finish()
    ask(trace, "a", LONG, n=3, max_tokens=20)
    for _ in range(3):
        trace.step()
    [request] = trace.scheduler.running
    assert len(request.live_seqs) == 3
    lags = [seq.computed - seq.drafted for seq in request.live_seqs]
    assert max(lags) > 8
    trace.scheduler._preempt_by_recompute(request)
    trace.finish()
    check_counts(trace)


@pytest.mark.parametrize("depth", DEPTHS)
def test_branches_that_wait_for_a_common_prefix_draft_from_where_the_first_does(depth: int) -> None:
    """With windows the first branch computes it, after a hit without drafts, and passes it on while in flight."""
    trace = opened("draft", windows=(None, 6), budget=4, depth=depth, k=2)
    scheduler, trace.engine.depth = trace.scheduler, 1
    ask(trace, "a", LONG, n=3, max_tokens=20)
    request = trace.engine.requests["a"]
    while len(request.live_seqs) < 3 or len(request.live_seqs[0].tokens) < 28:
        trace.step()
    scheduler._preempt_by_recompute(request)
    trace.memory.memory.prefix_cache.reset()
    scheduler.waiting.pop(request)
    ask(trace, "plain", LONG[:17], speculate=False, max_tokens=1)
    while scheduler.has_unfinished_requests:
        trace.step()
    scheduler.waiting.requeue(request)
    trace.engine.depth = depth
    trace.step()
    assert (request.live_seqs[0].computed, request.live_seqs[0].drafted) == (20, 4)
    assert [seq.planned for seq in request.live_seqs[1:]] == [24, 24]
    trace.finish()
    check_counts(trace)
    assert trace.engine.stats.accepted_tokens > 0


def test_a_branch_that_waited_for_a_prefix_has_no_more_of_it_drafted_than_its_source() -> None:
    """The source's draft model may lag behind when the prefix is computed."""
    request, source = lone([1, 2, 3, 4, 5, 6, 7, 8]), Sequence(2, [1, 2, 3, 4, 5, 6, 7, 8])
    [seq] = request.live_seqs
    scheduler = opened("draft", k=2).scheduler
    for lag in (0, 3):
        seq.prefix_source, seq.drafted = source, seq.planned
        source.planned, source.draft_planned = seq.planned, seq.planned - lag
        assert scheduler._num_new_tokens(request, seq, 8) == 1
        assert (seq.prefix_source, seq.drafted) == (None, seq.planned - lag)
