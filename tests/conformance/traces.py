"""Random traces: an engine over a memory and an EchoRunner; steps are checked, outputs compared with the oracle."""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from addresses import AddressedRunner, runner_for
from echo_oracle import BeamResult, expected_beams, expected_states, expected_tokens
from memories import MAX_LEN, VOCAB, Build, check_published, evictions, insides, is_static, is_unused

from bench.echo_runner import EchoRunner, fake_top
from quire.core.encoder_budget import EncoderBudget
from quire.core.engine import Engine
from quire.core.outputs import BranchOutput
from quire.core.preemption_costs import PreemptionCosts
from quire.core.recovery import RunnerRestarter
from quire.core.request import Request, RequestStatus
from quire.core.scheduler import Scheduler
from quire.core.validation import EngineLimits
from quire.errors import Asleep, InputError
from quire.memory.answers import Admission, Deferred, EvictionLimit
from quire.memory.interface import KVMemory
from quire.memory.paged import PagedMemory
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import ImageEncoding, StepPlan, StepResult

EOS = frozenset({0})
DEPTHS = (1, 2, 3)
WAYS = ("swap", "recompute", "auto")
AT_LENGTH = (pytest.mark.soak, pytest.mark.timeout(0))
"""Marks of the cases that run for hours."""
STEMS = tuple(tuple(random.Random(stem).choices(range(1, VOCAB), k=MAX_LEN)) for stem in range(3))


class Watched:
    """A memory that is looked at: shortage must change nothing, and what a prefix hit gives must be that prefix."""

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory
        self.residents: dict[int, Sequence] = {}
        self.away: set[int] = set()  # sequences that are swapped out
        self.later: set[int] = set()  # sequences that were told to come later
        self.placed: deque[dict[int, tuple[tuple[int, ...], ...]]] = deque()  # one entry a plan in flight
        self.content: dict[tuple[int, int], tuple[object, ...]] = {}  # (group, page) -> (salt, prefix, pictures)
        self.partial = 0  # hits that end within a page
        self.rng, self.unforked = random.Random(0), 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def _prefix(self, seq: Sequence, group: int, page: int) -> tuple[object, ...]:
        """What a full page holds: the tokens up to its end, a token that goes on in the next page included, and the
        pictures among them; where they see what is behind them, all of the prompt."""
        pages = self.memory.kv_config.groups[group]
        end = -(-(page + 1) * pages.run_tokens // pages.run_pages)
        if self.memory.kv_config.both_ways:
            end = max(end, seq.prompt_len)
        media = tuple((medium.key, medium.start) for medium in seq.images if medium.start < end)
        return seq.cache_salt, tuple(seq.tokens[:end]), media

    def _unchanged(self, before: object) -> None:
        assert insides(self.memory) == before, "a call that reported shortage changed the memory"

    def admit(
        self, seqs: Seq[Sequence], budget: int, limit: EvictionLimit | None = None
    ) -> list[Admission] | Deferred | None:
        before = insides(self.memory)
        admitted = self.memory.admit(seqs, budget, limit)
        if not isinstance(admitted, list):
            self._unchanged(before)
            self.later |= {seq.id for seq in seqs} if admitted else set()
            return admitted
        assert len(admitted) == len(seqs), "a branch was left behind"
        for seq, (reused, after, drafted) in zip(seqs, admitted):
            assert 0 <= reused < len(seq.tokens), f"{reused} of {len(seq.tokens)} tokens are reused"
            assert 0 <= drafted <= reused * seq.uses_draft_model, f"{drafted} of {reused} tokens are drafted"
            if len(seqs) == 1:  # what branches share was scored before they were forked
                assert reused <= seq.max_prefix_hit, "more is reused than the sequence allows"
            groups = self.memory.kv_config.groups
            of_tokens = [g for g, group in enumerate(groups) if group.kind not in ("cross", "vision")]
            self.partial += any(groups[g].num_pages(reused) > groups[g].num_full_pages(reused) for g in of_tokens)
            self.residents[seq.id] = seq
            for g, table in enumerate(self.memory.get_placement(seq).tables):
                end = groups[g].num_full_pages(drafted if groups[g].is_draft else reused)
                for i, page in enumerate(table[:end] if g in of_tokens else ()):
                    if page and after is None and len(seqs) == 1:
                        assert self.content.get((g, page)) == self._prefix(seq, g, i), "a hit has another content"
        return admitted

    def grow(self, seq: Sequence, length: int) -> bool:
        before = insides(self.memory)
        grown = self.memory.grow(seq, length)
        if not grown:
            self._unchanged(before)
        return grown

    def _hold(self, seq: Sequence) -> None:
        """Note what the sequence's full pages hold."""
        for g, table in enumerate(self.memory.get_placement(seq).tables):
            group = self.memory.kv_config.groups[g]
            computed = seq.drafted if group.is_draft else seq.computed
            for i, page in enumerate(table[: group.num_full_pages(computed)]):
                if page and group.kind not in ("cross", "vision"):
                    self.content[g, page] = self._prefix(seq, g, i)

    def commit(self, seq: Sequence) -> None:
        assert seq.computed <= len(seq.tokens), "a token that the sequence never got is published"
        self._hold(seq)
        self.memory.commit(seq)

    def commit_drafts(self, seq: Sequence) -> None:
        assert seq.computed <= len(seq.tokens), "a token that the sequence never got is published"
        self._hold(seq)
        self.memory.commit_drafts(seq)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        if self.rng.random() < self.unforked:
            return False  # no memory of ours does this, but one may
        forked = self.memory.fork(parent, child)
        if forked:
            self.residents[child.id] = child
        return forked

    def swap_out(self, seqs: Seq[Sequence]) -> bool:
        before = insides(self.memory)
        gone = self.memory.swap_out(seqs)
        if not gone:
            self._unchanged(before)
            return False
        for seq in seqs:
            del self.residents[seq.id]
            self.away.add(seq.id)
        return True

    def swap_in(self, seqs: Seq[Sequence]) -> bool:
        before = insides(self.memory)
        if not self.memory.swap_in(seqs):
            self._unchanged(before)
            return False
        for seq in seqs:
            self.residents[seq.id] = seq
            self.away.discard(seq.id)
            if seq.prefix_source is None:
                self._hold(seq)
        return True

    def free(self, seq: Sequence) -> None:
        assert seq.not_in_flight, f"sequence {seq.id} is freed while in flight"
        if seq.id in self.away:
            self.away.discard(seq.id)
        else:
            del self.residents[seq.id]
        self.memory.free(seq)

    def take_page_ops(self) -> tuple[Any, Any]:
        places = [self.memory.get_placement(seq) for seq in self.residents.values()]
        self.placed.append({place.slot: place.tables for place in places})
        return self.memory.take_page_ops()


class Checked:
    """A runner whose replayed tables are compared with the memory's as each step is collected."""

    def __init__(self, runner: EchoRunner, memory: Watched, budget: int) -> None:
        self.runner, self.memory, self.budget, self.depth = runner, memory, budget, runner.depth
        self.rows = self.parts = 0
        self.shown: set[bytes] = set()
        self.media: dict[int, tuple[ImageItem, ...]] = {}  # by slot

    def add_image(self, pixels: ImagePixels) -> None:
        assert pixels.key not in self.shown, "a picture is sent twice"
        self.shown.add(pixels.key)
        self.runner.add_image(pixels)

    def remove_image(self, key: bytes) -> None:
        self.shown.remove(key)
        self.runner.remove_image(key)

    def bind(self, geometry: Any) -> None:
        self.runner.bind(geometry)

    def sleep(self, level: int) -> None:
        self.runner.sleep(level)

    def wake(self, tags: Seq[str]) -> None:
        self.runner.wake(tags)

    def submit(self, plan: StepPlan) -> int:
        encodes = [entry for entry in plan.page_ops if isinstance(entry, ImageEncoding)]
        assert plan.slices or plan.new_slots or encodes, "a step does nothing"
        self.media |= {birth.slot: birth.images for birth in plan.new_slots}
        for entry in encodes:
            self.parts += entry.num_parts
            key = self.media[entry.slot][entry.image_index].key
            assert entry.first_part or key in self.shown, "a picture is encoded that the runner hasn't got"
        self._bounded(encodes)
        assert sum(len(row.tokens) for row in plan.slices) <= self.budget, "a step exceeds the budget"
        assert len({row.slot for row in plan.slices}) == len(plan.slices), "a slot has two rows in a step"
        self.rows += len(plan.slices)
        ticket = self.runner.submit(plan)
        if isinstance(self.runner, AddressedRunner):
            for mine, group in zip(self.memory.mapped_pages, self.runner.groups):
                for slot, lying in enumerate(mine):
                    there = group.lying[slot, : len(lying)].tolist()
                    assert there == lying, f"in slot {slot} lie pages {there}, not {lying}"
        return ticket

    def proposed_tokens(self, ticket: int) -> dict[int, tuple[int, ...]]:
        return self.runner.proposed_tokens(ticket)

    def _bounded(self, encodes: Seq[ImageEncoding]) -> None:
        """A step encodes no more than is planned for, where nothing is kept but for a picture, or a prompt's, alone."""
        geometry = self.memory.kv_config
        together = {(entry.slot, 0 if geometry.both_ways else entry.image_index) for entry in encodes}
        if encodes and not (geometry.sight == "off" and len(together) == 1):
            most, parts = EncoderBudget(self.memory, self.budget).max_parts, sum(entry.num_parts for entry in encodes)
            assert parts <= most, f"a step encodes {parts} parts, and {most} at most"

    def collect(self, ticket: int) -> StepResult:
        result = self.runner.collect(ticket)
        for slot, tables in self.memory.placed.popleft().items():
            for g, table in enumerate(tables):
                replayed = tuple(int(page) for page in self.runner.groups[g].table[slot, : len(table)])
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
    media: tuple[ImageItem, ...] = ()


class Told(NamedTuple):
    """What came of a trace."""

    finished: int
    aborted: int
    swapped: int
    recomputed: int
    partial: int  # hits that end within a page: a registered prefix
    evictions: int
    siblings: int  # sequences that waited for one to compute what they share
    aborts: Counter[str]  # by the state of the request
    parts: int = 0  # of pictures, that were encoded

    @property
    def preemptions(self) -> int:
        return self.swapped + self.recomputed


def draw_request(rng: random.Random, id: str) -> Asked:
    """A request that shares a prefix with others now and then, and uses what the control plane must handle."""
    stem = rng.choice(STEMS)
    tail = rng.choices(range(1, VOCAB), k=rng.choice((0, 0, 1, 3, 6)))
    prompt = stem[: rng.choice((rng.randint(1, 30), 16))] + tuple(tail)
    max_tokens = rng.randint(1, MAX_LEN - len(prompt) - 1)
    kind = rng.choice(("plain", "plain", "plain", "best", "beams"))
    n = rng.choice((1, 1, 1, 2, 3, 4)) if kind == "plain" else rng.randint(1, 3)
    params = SamplingParams(
        n=n,
        best_of=n + rng.randint(0, 2) if kind == "best" else None,
        beam_width=rng.randint(n, 6) if kind == "beams" else None,
        length_penalty=rng.choice((1.0, 0.0, 2.0, -1.0)),
        early_stopping=rng.choice((False, True, "never")),
        seed=rng.choice((rng.randrange(4), rng.randrange(2**62))),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, min(3, max_tokens))),
        stop_token_ids=rng.sample(range(1, VOCAB), rng.choice((0, 0, 6))),
        ignore_eos=rng.random() < 0.5,
        logprobs=rng.choice((None, None, 2)),
        prompt_logprobs=rng.choice((None, None, None, None, 1)),
        frequency_penalty=0.0 if kind == "beams" else rng.choice((0.0, 0.0, 0.5)),
    )
    return Asked(id, prompt, params, rng.choice(("", "", "adapter")))


def with_pictures(asked: Asked, geometry: KVCacheConfig) -> Asked:
    """The same request, or one with pictures in it, some of which others have too, at places that others have too."""
    rng = random.Random(asked.id)
    prompt, media = list(asked.prompt), list[ImageItem]()
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        number = rng.randrange(5)
        rows, parts = (3, 8, 5, 11, 8)[number], (1, 3, 2, 1, 4)[number]
        tokens = rows if geometry.sight else 1
        at = (media[-1].end if media else 0) + rng.choice((0, 1, 2, 4))
        if geometry.both_ways or at > len(prompt) or len(prompt) + tokens > MAX_LEN - 8:
            at = len(prompt) if at > len(prompt) else at
        if len(prompt) + tokens > MAX_LEN - 8:
            break
        prompt[at:at] = [VOCAB - 1] * tokens
        key = hashlib.sha256(f"{number} {asked.salt}".encode()).digest()
        media.append(ImageItem(key, at, tokens, rows, parts))
    most = min(asked.params.max_tokens or 1, MAX_LEN - len(prompt) - 1)
    params = replace(asked.params, max_tokens=most, min_tokens=min(asked.params.min_tokens, most))
    return asked._replace(prompt=tuple(prompt), media=tuple(media), params=params)


class Trace:
    """One engine, driven by a seeded stream of arrivals, aborts, and prefixes that come and go."""

    def __init__(
        self,
        memory: KVMemory,
        *,
        seed: int = 0,
        depth: int = 1,
        budget: int = 64,
        max_seqs: int = 8,
        runner: EchoRunner | None = None,
        preemption: str = "recompute",
        unforked: float = 0.0,
        stages: int = 1,
        deferred_masks: bool = False,
        restarter: RunnerRestarter | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.memory = Watched(memory)
        self.memory.rng, self.memory.unforked = random.Random(seed), unforked
        echo = runner or runner_for(memory.kv_config, depth, VOCAB)
        self.runner = Checked(echo, self.memory, budget)
        self.runner.bind(memory.kv_config)
        self.groups = memory.kv_config.groups
        # Under "auto" victims of a few pages are swapped, larger ones recomputed.
        costs = PreemptionCosts(0, 1, 6 * max(group.page_bytes for group in self.groups), 0, 0)
        self.scheduler = Scheduler(
            self.memory, token_budget=budget, max_seqs=max_seqs, max_len=MAX_LEN, eos_ids=tuple(EOS),
            preemption=preemption, costs=costs, static_batching=is_static(memory), pp_size=stages,
            deferred_masks=deferred_masks,
        )  # fmt: skip
        limits = EngineLimits(VOCAB, MAX_LEN, 1000)
        self.engine = Engine(self.scheduler, self.runner, limits, clock=lambda: 0.0, restarter=restarter)
        self.total = memory.account().usage.total
        self.asked: dict[str, Asked] = {}
        self.outputs: dict[str, list[BranchOutput]] = {}
        self.aborted: set[str] = set()
        self.aborts: Counter[str] = Counter()
        self.ran: set[Request] = set()
        self.refused = self.steps = self.siblings = 0
        self.sleeps: list[int] | None = None  # if it sleeps where it has nothing to do: the levels
        self.registers = memory.prefix_cache is not None and memory.account().sharing.prefix_capacity > 0

    def draw(self, rng: random.Random, id: str) -> Asked:
        """A request, with pictures where there may be any."""
        asked = draw_request(rng, id)
        return with_pictures(asked, self.memory.kv_config) if self.memory.kv_config.has_images else asked

    def add(self, asked: Asked) -> None:
        try:
            pixels = [ImagePixels(medium.key, (1, 1, 1, 3), bytes(3)) for medium in asked.media]
            self.engine.add(asked.id, asked.prompt, asked.params, salt=asked.salt, images=asked.media, pixels=pixels)
        except InputError:
            self.refused += 1
            return
        self.asked[asked.id] = asked
        self.outputs[asked.id] = []

    def abort(self, id: str) -> None:
        request = self.engine.requests.get(id)
        if request is not None:
            self.aborted.add(id)
            first = request.live_seqs[0]
            forking = (
                request.status is RequestStatus.RUNNING
                and len(request.live_seqs) == 1
                and first.num_forks
                and first.pending_samples
            )
            self.aborts["forking" if forking else request.status.value] += 1
        self.engine.abort(id)

    def prefixes(self) -> None:
        """Register one, or release one, computed or not, used or not."""
        name = str(self.rng.randrange(4))
        if name in self.engine.prefix_lengths:
            assert self.engine.release_prefix(name)
        else:
            try:
                self.engine.register_prefix(name, self.rng.choice(STEMS)[: self.rng.randint(1, 15)])
            except InputError:
                self.refused += 1

    def step(self) -> list[BranchOutput]:
        self.steps += 1
        outputs = self.engine.step()
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)
        self._scheduled()
        self.memory.check()
        check_published(self.memory.memory, self.memory.residents.values())
        usage = self.memory.account().usage
        assert usage.total == self.total, f"usage doesn't add up: {usage}"
        assert min(usage) >= 0, f"usage is negative: {usage}"
        return outputs

    def _scheduled(self) -> None:
        """First come first served, all sequences of a request together, nobody new while somebody older is swapped."""
        queues = self.scheduler.running, self.scheduler.swapped, self.scheduler.waiting
        running, swapped, waiting = ([*queue] for queue in queues)
        # Who was admitted and, since it couldn't be forked, dropped within one step was never seen running.
        self.ran |= {request for request in (*swapped, *waiting) if request.preemptions}
        fresh = set(running) - self.ran
        self.ran |= fresh
        oldest = min((request.order for request in swapped), default=0)
        assert not any(request.order > oldest > 0 for request in fresh), "a request was admitted before a swapped one"
        away = sorted([*swapped, *waiting], key=lambda request: request.order)
        # Whoever waits for what another one computes lets others pass.
        held_up = [request for request in away if not self.memory.later & {seq.id for seq in request.live_seqs}]
        for queue in (running, swapped, waiting, [] if self.memory.unforked else [*running, *held_up]):
            assert [request.order for request in queue] == sorted(request.order for request in queue), "out of order"
        for request in (*running, *away):
            where = (
                RequestStatus.SWAPPED
                if request in swapped
                else RequestStatus.WAITING
                if request in waiting
                else RequestStatus.RUNNING
            )
            assert request.status is where, f"request {request.id} is {request.status}, but stands with {where}"
            for seq in request.live_seqs:
                assert (seq.id in self.memory.residents) == (where is RequestStatus.RUNNING), "a branch is elsewhere"
                assert (seq.id in self.memory.away) == (where is RequestStatus.SWAPPED), "a branch is elsewhere"
                self.siblings += seq.prefix_source is not None

    def run(self, requests: int = 16, aborts: float = 0.04, arrivals: float = 0.4) -> Told:
        """Serve a random stream, then check everything that must hold at the end."""
        added = 0
        for _ in range(3 if self.registers else 0):
            self.prefixes()
        while added < requests or self.engine.has_unfinished_requests:
            if self.sleeps is not None and not self.engine.has_unfinished_requests:
                self.sleep()
            while added < requests and (self.rng.random() < arrivals or not self.engine.has_unfinished_requests):
                self.add(self.draw(self.rng, str(added)))
                added += 1
            if self.rng.random() < aborts and self.asked:
                self.abort(self.rng.choice(list(self.asked)))
            if self.registers and self.rng.random() < 0.04:
                self.prefixes()
            if self.engine.has_unfinished_requests:
                self.step()
            assert self.steps < 400 * requests, "the engine makes no progress"
        self.drained()
        return Told(
            len(self.asked) - len(self.aborted),
            len(self.aborted),
            self.scheduler.preemption_counts["swap"],
            self.scheduler.preemption_counts["recompute"],
            self.memory.partial,
            evictions(self.memory.memory),
            self.siblings,
            self.aborts,
            self.runner.parts,
        )

    def sleep(self) -> None:
        """Nothing is left to do: sleep, and wake up, maybe in two steps. Nothing is found then but what registered
        prefixes are computed to again."""
        assert self.sleeps is not None
        self.sleeps.append(len(self.sleeps) % 2 + 1)
        self.engine.sleep(self.sleeps[-1])
        self.memory.check()
        assert is_unused(self.memory.memory), "something is held"
        for tags in (None,) if len(self.sleeps) % 3 else (("weights",), ("kv_cache",)):
            with pytest.raises(Asleep):
                self.engine.add("asleep", [1], SamplingParams())
            self.engine.wake(tags)
        self.memory.check()

    def exhaust(self) -> None:
        """Do what was asked for."""
        while self.engine.has_unfinished_requests:
            self.step()

    def finish(self) -> None:
        """Do what was asked for, then check everything that must hold at the end."""
        self.exhaust()
        self.drained()

    def drained(self) -> None:
        """Nothing is left but registered prefixes, then nothing; and every output is the oracle's."""
        memory = self.memory.memory
        sharing = memory.account().sharing
        assert sharing.tables == 0, "sequences still hold pages"
        if isinstance(memory, PagedMemory):
            assert sum(memory.page_pool.used) == len(memory.prefix_cache.pin_counts), "pages did not come back"
        for name in list(self.engine.prefix_lengths):
            assert self.engine.release_prefix(name)
        assert is_unused(memory), f"pages did not come back: {memory.account().usage}"
        assert sharing.host_pages_used == 0, "host pages did not come back"
        assert len(memory.free_slots) == memory.kv_config.slots - 1, "slots did not come back"
        assert not self.memory.residents, "sequences did not leave"
        assert not self.scheduler.running, "requests still run"
        assert not self.scheduler.by_slot, "slots are still mapped"
        assert not self.engine.requests, f"requests are still known: {list(self.engine.requests)}"
        self.memory.check()
        assert not self.runner.shown, "pictures are kept for nobody"
        for id, asked in self.asked.items():
            self._compare(asked, self.outputs[id])

    def _wanted(self, asked: Asked) -> list[BeamResult]:
        """What each branch must be, computed without a memory."""
        params, settings = asked.params, {"vocab_size": VOCAB, "groups": self.groups, "max_len": MAX_LEN}
        pictures = {"media": asked.media, "both_ways": self.memory.kv_config.both_ways}
        settings |= pictures
        if params.beam_width is not None:
            return expected_beams(asked.prompt, params, eos_ids=EOS, **settings)
        found = []
        assert params.seed is not None
        for branch in range(params.width):
            tokens = expected_tokens(asked.prompt, params, branch_seed(params.seed, branch), eos_ids=EOS, **settings)
            known = expected_states([*asked.prompt, *tokens], self.groups, prompt=len(asked.prompt), **pictures)
            known = known[len(asked.prompt) - 1 :]
            logprob = sum(fake_top(state, token, 0, VOCAB).logprob for state, token in zip(known, tokens))
            found.append(BeamResult(tokens, logprob, *ending(params, tokens)))
        return sorted(found, key=lambda one: -one.logprob)[: params.n] if params.returns_best_of else found[: params.n]

    def _compare(self, asked: Asked, outputs: list[BranchOutput]) -> None:
        assert sum(output.done for output in outputs) == 1, f"request {asked.id} did not end once"
        assert outputs[-1].done, f"request {asked.id} went on after its end"
        for branch, want in enumerate(self._wanted(asked)):
            mine = [output for output in outputs if output.branch == branch]
            got = [token for output in mine for token in output.tokens]
            if asked.id in self.aborted:
                assert got == want.tokens[: len(got)], f"aborted request {asked.id}, branch {branch}: {got}, not {want}"
                continue
            assert got == want.tokens, f"request {asked.id}, branch {branch}: {got} instead of {want.tokens}"
            assert [o.finish_reason for o in mine[:-1]] == [None] * (len(mine) - 1), "a branch went on after its end"
            assert (mine[-1].finish_reason, mine[-1].stop_reason) == (want.reason, want.stop_reason)
            if asked.params.num_logprobs >= 0 or asked.params.beam_width or asked.params.returns_best_of:
                assert mine[-1].cumulative_logprob == want.logprob
            self._compare_tops(asked, mine, want.tokens)

    def _compare_tops(self, asked: Asked, mine: list[BranchOutput], want: list[int]) -> None:
        params, prompt = asked.params, asked.prompt
        both_ways = self.memory.kv_config.both_ways
        known = expected_states(
            [*prompt, *want], self.groups, prompt=len(prompt), media=asked.media, both_ways=both_ways
        )
        if params.num_logprobs >= 0:
            tops, named = [top for output in mine for top in output.top_logprobs], tuple(params.logprob_token_ids or ())
            states_of = known[len(prompt) - 1 :]
            assert tops == [fake_top(state, t, params.num_logprobs, VOCAB, named) for state, t in zip(states_of, want)]
            assert not named or {top.ids for top in tops} <= {named}
        if params.prompt_logprobs is not None and mine[0].branch == 0:
            assert mine[0].prompt_logprobs is not None
            assert list(mine[0].prompt_logprobs) == [
                fake_top(known[i], token, params.prompt_logprobs, VOCAB) for i, token in enumerate(prompt[1:])
            ], f"the log-probabilities of the prompt of request {asked.id} are wrong"


def ending(params: SamplingParams, tokens: list[int]) -> tuple[str, int | None]:
    """Why a sequence with these outputs ended, and at which stop token."""
    if len(tokens) >= params.min_tokens:
        if tokens[-1] in EOS and not params.ignore_eos:
            return "stop", None
        if tokens[-1] in (params.stop_token_ids or ()):
            return "stop", tokens[-1]
    return "length", None


def open_trace(
    make: Callable[[Build], KVMemory], *, tokens: int = 256, budget: int = 64, max_seqs: int = 8, host: int = 0,
    prefix_tokens: int = 0, **how: Any,
) -> Trace:  # fmt: skip
    """One over a fresh memory; `how` as for Trace."""
    memory = make(Build(tokens, budget, max_seqs, MAX_LEN, host, prefix_tokens))
    return Trace(memory, budget=budget, max_seqs=max_seqs, **how)


def run_trace(
    make: Callable[[Build], KVMemory], *, tokens: int = 128, budget: int = 16, requests: int = 16, aborts: float = 0.04,
    **how: Any,
) -> Told:  # fmt: skip
    """One random trace over a fresh memory; `how` as for open_trace."""
    return open_trace(make, tokens=tokens, budget=budget, **how).run(requests, aborts)


def drawn_trace(
    make: Callable[[Build], KVMemory],
    seed: int,
    depth: int,
    *,
    least: int = 1,
    scale: int = 1,
    tokens: Seq[int] = (64, 96, 128, 256),
    hosts: Seq[int] = (0, 12, 1000),
    prefixes: Seq[int] = (0, 24),
) -> Told:
    """One whose settings are drawn too. `least` is the least budget; `tokens` are multiplied by `scale`."""
    rng = random.Random(seed)
    return run_trace(
        make,
        seed=seed,
        depth=depth,
        budget=max(rng.choice((1, 3, 8, 16, 64)), least),
        tokens=rng.choice(tokens) * scale,
        max_seqs=rng.choice((3, 8)),
        preemption=rng.choice(WAYS),
        host=rng.choice(hosts),
        prefix_tokens=rng.choice(prefixes),
        unforked=rng.choice((0.0, 0.0, 0.1)),
    )
