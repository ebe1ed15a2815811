"""The scheduler: first come first served, one iteration at a time (PagedAttention §4.5).

`schedule` plans a step from how far sequences are planned, `update` takes in a step's result and reads the plan it is
given. There is no prompt phase: a sequence gets the tokens that bring `planned` up to its length, in chunks if the
budget asks for it. The scheduler never asks which memory it drives, and knows no clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from quire.control.costs import DEFAULT, Costs
from quire.control.decoding import append, context_of
from quire.control.memory import KVMemory
from quire.control.request import Request, Sequence, Status, common_prefix
from quire.vocabulary.method import Branch
from quire.vocabulary.plan import LAST, Birth, Row, Sampled, StepPlan, StepResult, Top
from quire.vocabulary.seeds import branch_seed


class Event(NamedTuple):
    """What one step did to one sequence: `tokens` it gained; the sequence says whether it ended. Without a sequence:
    the request's method took a step, or all branches of a request ended."""

    request: Request
    seq: Sequence | None
    tokens: tuple[int, ...] = ()
    tops: tuple[Top, ...] = ()


class Scheduler:
    """`budget` tokens are computed in a step at most, and `max_seqs` sequences are resident. `preemption` is "swap",
    "recompute", or "auto": what `costs` says is cheaper for the victim. `static` batches (FasterTransformer) take what
    the memory holds when nothing runs, whatever the budget, and nobody joins before their last member ends."""

    def __init__(
        self,
        memory: KVMemory,
        *,
        budget: int,
        max_seqs: int,
        max_len: int,
        eos_ids: tuple[int, ...] = (),
        preemption: str = "recompute",
        costs: Costs = DEFAULT,
        static: bool = False,
    ) -> None:
        self.memory, self.static = memory, static
        self.budget, self.max_seqs, self.max_len = budget, max_seqs, max_len
        self.eos_ids = frozenset(eos_ids)
        self.preemption, self.costs = preemption, costs
        self.waiting: deque[Request] = deque()
        self.swapped: deque[Request] = deque()
        self.running: dict[Request, None] = {}  # in order of arrival
        self.by_slot: dict[int, tuple[Request, Sequence]] = {}
        self.births: list[Birth] = []
        self.flight = 0  # plans made whose results are awaited
        self.next_seq = self.added = 0
        self.left = 0  # sequences that left memory, swapped out or for good
        self.blocked: tuple[Request, int] | None = None  # the request that failed to be admitted, `left` at that time
        self.preempted = {"swap": 0, "recompute": 0}  # requests, by the way it was done

    def new_id(self) -> int:
        """A sequence id that was never used."""
        self.next_seq += 1
        return self.next_seq

    def add(self, request: Request) -> None:
        """Queue a request that the memory `fits`."""
        self.added += 1
        request.order = self.added
        self.waiting.append(request)

    @property
    def preemptions(self) -> int:
        """Requests preempted since the start."""
        return sum(self.preempted.values())

    @property
    def unfinished(self) -> bool:
        """There is a request to serve, or a step whose result is awaited."""
        return bool(self.waiting or self.swapped or self.running or self.flight)

    # schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or memory is short and a result is awaited first."""
        rows: list[Row] = []
        hurt = self._continue_running(rows)
        if hurt is None:
            return None
        if not hurt:
            self._join(rows)
        if not rows and (self.flight or not (self.births and self.running)):
            return None  # a step without rows brings a request back whose method waits, and nothing else
        for row in rows:
            seq = self.by_slot[row.slot][1]
            seq.planned = row.start + len(row.tokens)
            seq.pending += row.sample > 0
        births, self.births = tuple(self.births), []
        now, ahead = self.memory.take_journal()
        self.flight += 1
        return StepPlan(births, now, tuple(rows), ahead)

    def _continue_running(self, rows: list[Row]) -> bool | None:
        """Give each running sequence its next tokens, oldest request first; preempt the youngest when memory is short.
        Returns whether anybody was hurt; None when memory is short but steps are in flight, so that victims may be."""
        hurt, budget = False, self.budget
        grow = self.memory.grow
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                break  # preempted above, and so is everyone younger
            first = len(rows)
            for seq in request.live:
                count = min(self._wanted(request, seq), budget)
                if count <= 0:
                    continue
                while not grow(seq, seq.planned + count):
                    if self.flight:
                        return None
                    hurt = True
                    self._preempt(next(reversed(self.running)))
                    if request.status is not Status.RUNNING:
                        del rows[first:]
                        return hurt
                rows.append(self._row(request, seq, count))
                budget -= count
        return hurt

    @staticmethod
    def _wanted(request: Request, seq: Sequence) -> int:
        """Tokens that the sequence could compute next."""
        if seq.finish is not None or (seq.pending and (seq.branches or request.method is not None)):
            return 0  # ended, or what follows is decided when its sample arrives
        if seq.pending and len(seq.tokens) + seq.pending - seq.prompt_len >= request.max_tokens:
            return 0  # its last token is on its way
        if seq.sibling is not None:
            if seq.sibling.sibling is not None or seq.sibling.planned < seq.planned:
                return 0  # what it shares is still to be computed, by the sibling or by that one's own
            seq.sibling = None
        return len(seq.tokens) + seq.pending - seq.planned

    def _row(self, request: Request, seq: Sequence, count: int) -> Row:
        start, end = seq.planned, seq.planned + count
        known = len(seq.tokens)
        tokens = (LAST,) if start >= known else tuple(seq.tokens[start:end])
        sample = 0
        if end == known + seq.pending:
            sample = 1 if request.method is not None else 1 + seq.branches
        score: tuple[int, ...] = ()
        if request.params.prompt_logprobs is not None and start + 1 < seq.prompt_len:
            score = tuple(seq.tokens[start + 1 : min(end + 1, seq.prompt_len)])
        return Row(self.memory.slot(seq), tokens, start, sample, score)

    # Preemption: whole requests, all or nothing, and all sequences of a request together (§4.5)

    def _preempt(self, victim: Request) -> None:
        if self._cheaper(victim) == "swap":
            slots = [self.memory.slot(seq) for seq in victim.live]
            if self.memory.swap_out(victim.live):
                for slot in slots:
                    del self.by_slot[slot]
                self.left += len(slots)
                del self.running[victim]
                victim.status = Status.SWAPPED
                _enqueue(self.swapped, victim)
                self._count(victim, "swap")
                return
        self._drop(victim)

    def _drop(self, victim: Request) -> None:
        """Every sequence leaves memory and will be recomputed, as one prompt of all its tokens so far."""
        del self.running[victim]
        for seq in victim.live:
            self._leave(seq)
            seq.computed = seq.planned = 0
        victim.candidates = {}  # they will be drawn again
        victim.status = Status.WAITING
        _enqueue(self.waiting, victim)
        self._count(victim, "recompute")

    def _count(self, victim: Request, way: str) -> None:
        victim.preemptions += 1
        self.preempted[way] += 1

    def _cheaper(self, victim: Request) -> str:
        if self.preemption != "auto":
            return self.preemption
        held, tokens = self.memory.held(victim.live)
        return self.costs.cheaper(held, tokens, [seq.computed for seq in victim.live])

    # Admission

    def _join(self, rows: list[Row]) -> None:
        """Bring requests in, oldest first, while the budget, the slots and the memory allow. Whoever was preempted is
        older than whoever wasn't admitted yet, so nobody new is admitted until the preempted are back (§4.5)."""
        if self.static and self.running:
            return
        if not (self.swapped or self.waiting):
            return
        budget = self.budget - sum(len(row.tokens) for row in rows)
        slots = self.max_seqs - sum(map(_width, self.running))  # those of sequences to be forked are taken too
        while (budget > 0 or self.static) and (self.swapped or self.waiting):
            queue = min((q for q in (self.swapped, self.waiting) if q), key=lambda q: q[0].order)
            request = queue[0]
            slots -= _width(request)
            if slots < 0:
                return
            joined = self._swap_in(request, budget) if queue is self.swapped else self._admit(request, budget)
            if joined is None:
                return
            queue.popleft()
            request.status = Status.RUNNING
            late = bool(self.running) and next(reversed(self.running)).order > request.order
            self.running[request] = None
            if late:  # it was dropped because it couldn't be forked, and younger ones went on
                self.running = dict.fromkeys(sorted(self.running, key=lambda other: other.order))
            rows.extend(joined)
            budget -= sum(len(row.tokens) for row in joined)

    def _swap_in(self, request: Request, budget: int) -> list[Row] | None:
        """Bring all live sequences of a swapped request back, or none; those that find room compute in this step."""
        if not self.memory.swap_in(request.live):
            return None
        rows: list[Row] = []
        for seq in request.live:
            self.by_slot[self.memory.slot(seq)] = (request, seq)
            self._born(request, seq)
            count = min(self._wanted(request, seq), budget)
            if count > 0 and self.memory.grow(seq, seq.planned + count):
                rows.append(self._row(request, seq, count))
                budget -= count
        return rows

    def _admit(self, request: Request, budget: int) -> list[Row] | None:
        """Bring all live sequences of a request into memory, or none. Those of a preempted group share again what they
        have in common: one computes it, the others follow a step later."""
        if self.blocked == (request, self.left):
            return None  # some of its branches fit, not all: trying again would only evict
        live = request.live
        for i, seq in enumerate(live):
            sibling, common = _closest(seq, live[:i])
            reused = self.memory.admit(seq, budget if len(live) == 1 else len(seq.tokens), sibling)
            if reused is None:
                for earlier in live[:i]:
                    earlier.computed = earlier.planned = 0
                    self._leave(earlier)
                if i:
                    self.blocked = (request, self.left)
                return None
            seq.computed = seq.planned = reused
            seq.sibling = sibling if reused <= common else None  # more was found elsewhere, and is computed
            self.by_slot[self.memory.slot(seq)] = (request, seq)
        rows = []
        for seq in live:
            self._born(request, seq)
            if request.preemptions == 0:
                request.cached_tokens = seq.planned
            count = min(self._wanted(request, seq), budget)
            if count > 0:
                rows.append(self._row(request, seq, count))
                budget -= count
        return rows

    def _born(self, request: Request, seq: Sequence, parent: int = -1) -> None:
        sampling = request.sampling if parent < 0 else None  # a fork's are its parent's
        history = tuple(seq.tokens) if request.sampling.needs_history else ()
        if request.top is None:
            request.top = self._top(request)
        slot = self.memory.slot(seq)
        self.births.append(Birth(slot, seq.id, parent, sampling, seq.seed, seq.prompt_len, history, request.top))

    def _top(self, request: Request) -> int:
        """How many most likely tokens a row returns with its sample; -1: no log-probabilities at all."""
        top = -1 if request.params.logprobs is None else request.params.logprobs
        if request.method is not None:
            return max(top, request.method.top(context_of(request, self.eos_ids)))
        return max(top, 0) if request.params.ranked else top

    def _leave(self, seq: Sequence) -> None:
        del self.by_slot[self.memory.slot(seq)]
        self.memory.free(seq)
        self.left += 1

    # update

    def update(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in the result of the oldest plan in flight."""
        self.flight -= 1
        events: list[Event] = []
        for row, sampled in zip(plan.rows, result.samples):
            request, seq = self.by_slot[row.slot]
            seq.computed = row.start + len(row.tokens)
            if row.score:
                self._score(row, seq, sampled)
            if seq.finish is None and not sampled.error:  # what a fault computed is not kept for others
                self.memory.commit(seq)
            if row.sample:
                seq.pending -= 1
                if seq.finish is None:
                    self._sampled(request, seq, sampled, events)
            if seq.finish is not None and request.status is not Status.DONE:
                self._retire(request, seq)
                if not request.live and (request.method is not None or request.params.ranked):
                    events.append(Event(request, None))  # what is told at the end can be told now
        return events

    def _sampled(self, request: Request, seq: Sequence, sampled: Sampled, events: list[Event]) -> None:
        if request.method is not None:
            self._candidates(request, seq, sampled, events)
            return
        branches = [seq]
        if seq.branches:
            children = [seq.fork(self.new_id(), i, branch_seed(request.seed, i)) for i in range(1, 1 + seq.branches)]
            seq.branches = 0
            branches += children
            request.live += children
            self._fork(request, [(seq, child) for child in children])
        for draw, branch in enumerate(branches):
            append(request, branch, sampled, draw, self.eos_ids, self.max_len)
            tops = sampled.tops[draw : draw + 1]
            events.append(Event(request, branch, sampled.tokens[draw : draw + 1], tops))
            if branch is seq:
                continue
            if branch.finish is not None:
                self._retire(request, branch)
            elif request.status is Status.RUNNING:
                self._born(request, branch, parent=self.memory.slot(seq))
        if request.prefix is not None and not sampled.error and not self.memory.pin(request.prefix, seq):
            seq.finish, seq.stop_reason = "error", "the registered prefixes are full"

    def _fork(self, request: Request, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Children share their parents' pages. If the memory can't fork, the whole request is preempted."""
        for i, (parent, child) in enumerate(pairs):
            if not self.memory.fork(parent, child):
                absent = [child for _, child in pairs[i:]]
                for child in absent:
                    child.computed = child.planned = 0
                order = request.live
                request.live = [seq for seq in order if seq not in absent]
                self._drop(request)
                request.live = order
                return
            self.by_slot[self.memory.slot(child)] = (request, child)

    def _score(self, row: Row, seq: Sequence, sampled: Sampled) -> None:
        for i, top in enumerate(sampled.scores):
            if row.start + i == len(seq.prompt_tops):  # a recomputed prompt is scored again; keep the first
                seq.prompt_tops.append(top)

    # Methods: all branches of a request take a step together

    def _candidates(self, request: Request, seq: Sequence, sampled: Sampled, events: list[Event]) -> None:
        if sampled.error:
            request.candidates, request.results = {}, []
            seq.finish, seq.stop_reason = "error", sampled.error  # `update` retires it
            for other in [other for other in request.live if other is not seq]:
                self.finish(request, other, "error", sampled.error)
            return
        request.candidates[seq.id] = sampled.tops[0]
        if len(request.candidates) == len(request.live) and self._advance(request):
            events.append(Event(request, None))

    def fork(self, request: Request, seq: Sequence) -> Sequence:
        """A new branch of a running request with a method, as `seq` is now; `seq` must be quiet."""
        child = seq.fork(self.new_id(), len(request.live), seq.seed)
        seq.branches = 0
        request.live.append(child)
        self._fork(request, [(seq, child)])
        if request.status is Status.RUNNING:
            self._born(request, child, parent=self.memory.slot(seq))
        return child

    def _advance(self, request: Request) -> bool:
        """Free the branches that don't go on, fork those that go on more than once, append to all. False if the method
        hasn't decided: then its branches stay as they are, until somebody changes them."""
        assert request.method is not None
        live, tops, request.candidates = request.live, request.candidates, {}
        branches = [Branch(s.tokens, s.prompt_len, s.cumulative_logprob, tops[s.id]) for s in live]
        advance = request.method.advance(branches, context_of(request, self.eos_ids))
        if advance is None:
            request.candidates = tops
            return False
        assert len(advance.choices) <= request.method.width, "a method continues more branches than its width"
        for ending in advance.endings:
            parent = live[ending.parent]
            ended = parent.fork(self.new_id(), 0, parent.seed)
            _extend(ended, ending.token, ending.logprob, tops[parent.id], request)
            ended.finish, ended.stop_reason = ending.reason, ending.stop_reason
            request.results.append((ending.score, ended))
        request.results.sort(key=lambda result: -result[0])
        del request.results[request.method.keep() :]
        going = {choice.parent for choice in advance.choices}
        for i, seq in enumerate(live):
            seq.branches = 0
            if i not in going:
                self._leave(seq)
        if not advance.choices:
            request.live = []
            del self.running[request]
            request.status = Status.DONE
            return True
        last = live[0].outputs + 1 >= request.max_tokens
        assert not last, f"a method goes on after max_tokens, which is {request.max_tokens}"
        request.live = []
        forks: list[tuple[Sequence, Sequence]] = []
        used: set[int] = set()
        for choice in advance.choices:
            seq = live[choice.parent]
            if choice.parent in used:
                child = seq.fork(self.new_id(), len(request.live), seq.seed)
                forks.append((seq, child))
                seq = child
            used.add(choice.parent)
            request.live.append(seq)
        self._fork(request, forks)
        for seq, choice in zip(request.live, advance.choices):
            _extend(seq, choice.token, choice.logprob, tops[live[choice.parent].id], request)
        if request.status is Status.RUNNING:
            for parent, child in forks:
                self._born(request, child, parent=self.memory.slot(parent))
            if request.params.needs_history:  # the device has recorded its own choice, which wasn't the method's
                for seq in {id(live[choice.parent]): live[choice.parent] for choice in advance.choices}.values():
                    self._born(request, seq, parent=self.memory.slot(seq))
        return True

    # Ends

    def finish(self, request: Request, seq: Sequence, why: str, reason: int | str | None = None) -> None:
        """End a sequence early (a stop string, an abort). It leaves memory once no step in flight names it."""
        if seq.finish is None:
            seq.finish, seq.stop_reason = why, reason
        if request.status is not Status.DONE and seq in request.live:
            self._retire(request, seq)

    def _retire(self, request: Request, seq: Sequence) -> None:
        if request.status is Status.RUNNING:
            if not seq.quiet:
                return
            self._leave(seq)
        elif request.status is Status.SWAPPED:
            self.memory.drop_swapped(seq)
        request.live.remove(seq)
        request.done.append(seq)
        if not request.live:
            if request.status is Status.RUNNING:
                del self.running[request]
            else:
                (self.swapped if request.status is Status.SWAPPED else self.waiting).remove(request)
            request.status = Status.DONE


def _width(request: Request) -> int:
    """Slots that a request holds or may come to hold."""
    if request.method is not None:
        return request.method.width
    return len(request.live) + sum(seq.branches for seq in request.live)


def _enqueue(queue: deque[Request], victim: Request) -> None:
    """Put a preempted request where its order says, near the front."""
    queue.insert(next((i for i, other in enumerate(queue) if other.order > victim.order), len(queue)), victim)


def _closest(seq: Sequence, others: list[Sequence]) -> tuple[Sequence | None, int]:
    """The one of `others` with the longest common prefix, and its length."""
    best, length = None, 0
    for other in others:
        shared = common_prefix(seq.tokens, other.tokens, len(seq.tokens))
        if shared > length:
            best, length = other, shared
    return best, length


def _extend(seq: Sequence, token: int, logprob: float, top: Top, request: Request) -> None:
    """Append a method's choice, with what its log-probabilities looked like."""
    seq.tokens.append(token)
    seq.cumulative_logprob += logprob
    if (count := request.params.logprobs) is not None:
        rank = top.ids.index(token) + 1 if token in top.ids else 0
        seq.tops.append(Top(token, logprob, rank, top.ids[:count], top.logprobs[:count]))
