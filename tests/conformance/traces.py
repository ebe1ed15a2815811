"""Random traces: an engine over a memory and an EchoRunner; steps are checked, outputs compared with the oracle."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from memories import MAX_LEN, VOCAB, Build, check_published, insides

from quire.engine import Engine, Limits, Output
from quire.errors import InputError
from quire.memory import KVMemory
from quire.plan import StepPlan, StepResult
from quire.request import SamplingParams, Sequence
from quire.scheduler import Scheduler
from quire.sim.echo import EchoRunner, expected, fake_top, states

EOS = frozenset({0})
STEMS = tuple(tuple(random.Random(stem).choices(range(1, VOCAB), k=MAX_LEN)) for stem in range(3))


class Watched:
    """A memory that is looked at: shortage must change nothing, and what a prefix hit gives must be that prefix."""

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory
        self.residents: dict[int, Sequence] = {}
        self.placed: deque[dict[int, tuple[tuple[int, ...], ...]]] = deque()  # one entry a plan in flight
        self.content: dict[tuple[int, int], tuple[str, tuple[int, ...]]] = {}  # (group, page) -> (salt, prefix)
        self.shortages = self.hits = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def _prefix(self, seq: Sequence, page: int) -> tuple[str, tuple[int, ...]]:
        return seq.salt, tuple(seq.tokens[: (page + 1) * self.memory.geometry.groups[0].page_tokens])

    def _unchanged(self, before: object) -> None:
        self.shortages += 1
        assert insides(self.memory) == before, "a call that reported shortage changed the memory"

    def admit(self, seq: Sequence, budget: int, sibling: Sequence | None = None) -> int | None:
        before = insides(self.memory)
        reused = self.memory.admit(seq, budget, sibling)
        if reused is None:
            self._unchanged(before)
            return None
        assert 0 <= reused < len(seq.tokens), f"{reused} of {len(seq.tokens)} tokens are reused"
        assert reused <= seq.reusable, "more is reused than the sequence allows"
        self.hits += reused > 0
        self.residents[seq.id] = seq
        size = self.memory.geometry.groups[0].page_tokens
        for g, table in enumerate(self.memory.place(seq).tables):
            for i, page in enumerate(table[: reused // size]):
                if page:
                    assert sibling is not None or self.content.get((g, page)) == self._prefix(seq, i), (
                        "a prefix hit has another content"
                    )
        return reused

    def grow(self, seq: Sequence, length: int) -> bool:
        before = insides(self.memory)
        grown = self.memory.grow(seq, length)
        if not grown:
            self._unchanged(before)
        return grown

    def commit(self, seq: Sequence) -> None:
        assert seq.computed <= len(seq.tokens), "a token that the sequence never got is published"
        size = self.memory.geometry.groups[0].page_tokens
        for g, table in enumerate(self.memory.place(seq).tables):
            for i, page in enumerate(table[: seq.computed // size]):
                if page:
                    self.content[g, page] = self._prefix(seq, i)
        self.memory.commit(seq)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        forked = self.memory.fork(parent, child)
        if forked:
            self.residents[child.id] = child
        return forked

    def free(self, seq: Sequence) -> None:
        assert seq.quiet, f"sequence {seq.id} is freed while in flight"
        del self.residents[seq.id]
        self.memory.free(seq)

    def take_journal(self) -> tuple[Any, Any]:
        places = [self.memory.place(seq) for seq in self.residents.values()]
        self.placed.append({place.slot: place.tables for place in places})
        return self.memory.take_journal()


class Checked:
    """A runner whose replayed tables are compared with the memory's as each step is collected."""

    def __init__(self, runner: EchoRunner, memory: Watched, budget: int) -> None:
        self.runner, self.memory, self.budget, self.depth = runner, memory, budget, runner.depth
        self.rows = 0

    def bind(self, geometry: Any) -> None:
        self.runner.bind(geometry)

    def submit(self, plan: StepPlan) -> int:
        assert 0 < sum(len(row.tokens) for row in plan.rows) <= self.budget, "a step exceeds the budget"
        assert len({row.slot for row in plan.rows}) == len(plan.rows), "a slot has two rows in a step"
        self.rows += len(plan.rows)
        return self.runner.submit(plan)

    def collect(self, ticket: int) -> StepResult:
        result = self.runner.collect(ticket)
        for slot, tables in self.memory.placed.popleft().items():
            for g, table in enumerate(tables):
                replayed = tuple(int(page) for page in self.runner.tables[g][slot, : len(table)])
                assert replayed == table, f"the replayed table of slot {slot} is {replayed}, not {table}"
        return result

    def close(self) -> None:
        self.runner.close()


class Asked(NamedTuple):
    """One request of a trace."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str


class Told(NamedTuple):
    """What came of a trace."""

    finished: int
    aborted: int
    refused: int
    steps: int
    preemptions: int
    shortages: int
    hits: int
    evictions: int


def draw_request(rng: random.Random, id: str) -> Asked:
    """A request that shares a prefix with others now and then, and uses what the control plane must handle."""
    stem = rng.choice(STEMS)
    tail = rng.choices(range(1, VOCAB), k=rng.choice((0, 0, 1, 3, 6)))
    prompt = stem[: rng.choice((rng.randint(1, 30), 16))] + tuple(tail)
    max_tokens = rng.randint(1, MAX_LEN - len(prompt) - 1)
    params = SamplingParams(
        n=rng.choice((1, 1, 1, 2, 3, 4)),
        seed=rng.choice((rng.randrange(4), rng.randrange(2**62))),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, min(3, max_tokens))),
        stop_token_ids=rng.sample(range(1, VOCAB), rng.choice((0, 0, 6))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, None, None, 1)),
        frequency_penalty=rng.choice((0.0, 0.0, 0.5)),
    )
    return Asked(id, prompt, params, rng.choice(("", "", "adapter")))


class Trace:
    """One engine, driven by a seeded stream of arrivals and aborts."""

    def __init__(
        self, memory: KVMemory, *, seed: int, depth: int, budget: int, max_seqs: int, runner: EchoRunner | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.memory = Watched(memory)
        echo = runner or EchoRunner(depth, vocab_size=VOCAB)
        self.runner = Checked(echo, self.memory, budget)
        self.runner.bind(memory.geometry)
        self.windows = tuple(group.window for group in memory.geometry.groups)
        self.scheduler = Scheduler(self.memory, budget=budget, max_seqs=max_seqs, max_len=MAX_LEN, eos_ids=tuple(EOS))
        limits = Limits(VOCAB, MAX_LEN, 1000)
        self.engine = Engine(self.scheduler, self.runner, limits, clock=lambda: 0.0)
        self.total = memory.usage().total
        self.asked: dict[str, Asked] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.aborted: set[str] = set()
        self.refused = self.steps = 0

    def add(self, asked: Asked) -> None:
        try:
            self.engine.add(asked.id, asked.prompt, asked.params, salt=asked.salt)
        except InputError:
            self.refused += 1
            return
        self.asked[asked.id] = asked
        self.outputs[asked.id] = []

    def abort(self, id: str) -> None:
        if id in self.engine.requests:
            self.aborted.add(id)
        self.engine.abort(id)

    def step(self) -> list[Output]:
        self.steps += 1
        outputs = self.engine.step()
        for output in outputs:
            self.outputs[output.request].append(output)
        self.memory.check()
        check_published(self.memory.memory, self.memory.residents.values())
        assert self.memory.usage().total == self.total, f"usage doesn't add up: {self.memory.usage()}"
        assert min(self.memory.usage()) >= 0, f"usage is negative: {self.memory.usage()}"
        return outputs

    def run(self, requests: int = 16, aborts: float = 0.04, arrivals: float = 0.4) -> Told:
        """Serve a random stream, then check everything that must hold at the end."""
        added = 0
        while added < requests or self.engine.unfinished:
            while added < requests and (self.rng.random() < arrivals or not self.engine.unfinished):
                self.add(draw_request(self.rng, str(added)))
                added += 1
            if self.rng.random() < aborts and self.asked:
                self.abort(self.rng.choice(list(self.asked)))
            if self.engine.unfinished:
                self.step()
            assert self.steps < 400 * requests, "the engine makes no progress"
        self.drained()
        return Told(
            len(self.asked) - len(self.aborted),
            len(self.aborted),
            self.refused,
            self.steps,
            self.scheduler.preemptions,
            self.memory.shortages,
            self.memory.hits,
            self.memory.pages.evictions,
        )

    def drained(self) -> None:
        """Nothing is left, and every output is the oracle's."""
        usage = self.memory.usage()
        assert usage.used == usage.internal == usage.reserved == 0, f"pages did not come back: {usage}"
        assert not self.memory.residents, "sequences did not leave"
        assert not self.scheduler.running, "requests still run"
        assert not self.scheduler.by_slot, "slots are still mapped"
        assert not self.engine.requests, "requests are still known"
        for id, asked in self.asked.items():
            self._compare(asked, self.outputs[id])

    def _compare(self, asked: Asked, outputs: list[Output]) -> None:
        assert sum(output.done for output in outputs) == 1, f"request {asked.id} did not end once"
        assert outputs[-1].done, f"request {asked.id} went on after its end"
        for branch in range(asked.params.n):
            mine = [output for output in outputs if output.branch == branch]
            got = [token for output in mine for token in output.tokens]
            assert asked.params.seed is not None
            want = expected(
                asked.prompt,
                asked.params,
                asked.params.seed + branch,
                vocab_size=VOCAB,
                windows=self.windows,
                max_len=MAX_LEN,
                eos_ids=EOS,
            )
            if asked.id in self.aborted:
                assert got == want[: len(got)], f"aborted request {asked.id}, branch {branch}: {got} is not in {want}"
                continue
            assert got == want, f"request {asked.id}, branch {branch}: {got} instead of {want}"
            assert [o.finish_reason for o in mine[:-1]] == [None] * (len(mine) - 1), "a branch went on after its end"
            assert (mine[-1].finish_reason, mine[-1].stop_reason) == ending(asked.params, want)
            self._compare_tops(asked, mine, want)

    def _compare_tops(self, asked: Asked, mine: list[Output], want: list[int]) -> None:
        params, prompt = asked.params, asked.prompt
        known = states([*prompt, *want], self.windows)
        if params.logprobs is not None:
            tops = [top for output in mine for top in output.tops]
            assert tops == [fake_top(known[len(prompt) - 1 + i], t, params.logprobs, VOCAB) for i, t in enumerate(want)]
        if params.prompt_logprobs is not None and mine[0].branch == 0:
            assert mine[0].prompt_tops is not None
            assert list(mine[0].prompt_tops) == [
                fake_top(known[i], token, params.prompt_logprobs, VOCAB) for i, token in enumerate(prompt[1:])
            ]


def ending(params: SamplingParams, tokens: list[int]) -> tuple[str, int | None]:
    """Why a sequence with these outputs ended, and at which stop token."""
    if len(tokens) >= params.min_tokens:
        if tokens[-1] in EOS and not params.ignore_eos:
            return "stop", None
        if tokens[-1] in (params.stop_token_ids or ()):
            return "stop", tokens[-1]
    return "length", None


def run_trace(
    make: Callable[[Build], KVMemory],
    *,
    seed: int,
    depth: int,
    budget: int = 16,
    max_seqs: int = 8,
    tokens: int = 128,
    requests: int = 16,
    runner: EchoRunner | None = None,
) -> Told:
    """One random trace over a fresh memory."""
    memory = make(Build(tokens=tokens, chunk=budget, max_seqs=max_seqs))
    return Trace(memory, seed=seed, depth=depth, budget=budget, max_seqs=max_seqs, runner=runner).run(requests)
