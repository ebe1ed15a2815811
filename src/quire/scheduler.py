"""The scheduler: first come first served, one iteration at a time (PagedAttention §4.5).

`schedule` plans a step from how far sequences are planned, `update` takes in a step's result and reads the plan it is
given. There is no prompt phase: a sequence gets the tokens that bring `planned` up to its length, in chunks if the
budget asks for it. The scheduler never asks which memory it drives, and knows no clock.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from quire.decoding import append, branch_seed
from quire.memory import KVMemory
from quire.plan import LAST, Birth, Row, Sampled, StepPlan, StepResult, Top
from quire.request import Request, Sequence, Status


class Event(NamedTuple):
    """What one step did to one sequence: `tokens` it gained; the sequence says whether it ended."""

    request: Request
    seq: Sequence
    tokens: tuple[int, ...]
    tops: tuple[Top, ...] = ()


class Scheduler:
    """`budget` tokens are computed in a step at most, and `max_seqs` sequences are resident."""

    def __init__(
        self, memory: KVMemory, *, budget: int, max_seqs: int, max_len: int, eos_ids: tuple[int, ...] = ()
    ) -> None:
        self.memory = memory
        self.budget, self.max_seqs, self.max_len = budget, max_seqs, max_len
        self.eos_ids = frozenset(eos_ids)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}  # in order of arrival; an aborted id may be back before its end
        self.by_slot: dict[int, tuple[Request, Sequence]] = {}
        self.births: list[Birth] = []
        self.flight = 0  # plans made whose results are awaited
        self.next_seq = 0
        self.preemptions = 0
        self.left = 0  # sequences that left memory
        self.blocked: tuple[Request, int] | None = None  # the request that failed to be admitted, `left` at that time

    def new_id(self) -> int:
        """A sequence id that was never used."""
        self.next_seq += 1
        return self.next_seq

    def add(self, request: Request) -> None:
        """Queue a request that the memory `fits`."""
        self.waiting.append(request)

    @property
    def unfinished(self) -> bool:
        """There is a request to serve, or a step whose result is awaited."""
        return bool(self.waiting or self.running or self.flight)

    # schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None: nothing to do, or memory is short and a result is awaited first."""
        rows: list[Row] = []
        hurt = self._continue_running(rows)
        if hurt is None:
            return None
        if not hurt:
            self._admit_waiting(rows)
        if not rows:
            return None
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
        if seq.finish is not None or (seq.branches and seq.pending):
            return 0  # ended, or its branches are forked when its sample arrives
        if seq.pending and len(seq.tokens) + seq.pending - seq.prompt_len >= request.max_tokens:
            return 0  # its last token is on its way
        return len(seq.tokens) + seq.pending - seq.planned

    def _row(self, request: Request, seq: Sequence, count: int) -> Row:
        start, end = seq.planned, seq.planned + count
        known = len(seq.tokens)
        tokens = (LAST,) if start >= known else tuple(seq.tokens[start:end])
        sample = (1 + seq.branches) if end == known + seq.pending else 0
        score: tuple[int, ...] = ()
        if request.params.prompt_logprobs is not None and start + 1 < seq.prompt_len:
            score = tuple(seq.tokens[start + 1 : min(end + 1, seq.prompt_len)])
        return Row(self.memory.slot(seq), tokens, start, sample, score)

    def _preempt(self, victim: Request) -> None:
        """Whole requests, all or nothing: every sequence leaves memory and will be recomputed (§4.5)."""
        del self.running[victim]
        for seq in victim.live:
            self._leave(seq)
            seq.computed = seq.planned = 0
        victim.status = Status.WAITING
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)

    def _admit_waiting(self, rows: list[Row]) -> None:
        """Admit in order of arrival while the budget, the slots and the memory allow."""
        if not self.waiting:
            return
        budget = self.budget - sum(len(row.tokens) for row in rows)
        held = sum(1 + seq.branches for _, seq in self.by_slot.values())
        while self.waiting and budget > 0:
            request = self.waiting[0]
            if self.blocked == (request, self.left):
                return  # some of its branches fit, not all: trying again would only evict
            held += sum(1 + seq.branches for seq in request.live)
            if held > self.max_seqs:
                return
            admitted = self._admit(request, budget)
            if admitted is None:
                return
            self.waiting.popleft()
            request.status = Status.RUNNING
            self.running[request] = None
            rows.extend(admitted)
            budget -= sum(len(row.tokens) for row in admitted)

    def _admit(self, request: Request, budget: int) -> list[Row] | None:
        """Bring all live sequences of a request into memory, or none."""
        for i, seq in enumerate(request.live):
            reused = self.memory.admit(seq, max(budget, 1))
            if reused is None:
                for earlier in request.live[:i]:
                    earlier.computed = earlier.planned = 0
                    self._leave(earlier)
                if i:
                    self.blocked = (request, self.left)
                return None
            seq.computed = seq.planned = reused
            self.by_slot[self.memory.slot(seq)] = (request, seq)
        rows = []
        for seq in request.live:
            self._born(request, seq)
            if request.preemptions == 0:
                request.cached_tokens = seq.planned
            count = min(len(seq) - seq.planned, budget)
            if count > 0:
                rows.append(self._row(request, seq, count))
                budget -= count
        return rows

    def _born(self, request: Request, seq: Sequence, parent: int = -1) -> None:
        history = tuple(seq.tokens) if request.params.needs_history else ()
        slot = self.memory.slot(seq)
        self.births.append(
            Birth(slot, seq.id, parent, request.params, seq.seed, seq.prompt_len, history, len(seq.tokens))
        )

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
            if seq.finish is None:
                self.memory.commit(seq)
            if row.sample:
                seq.pending -= 1
                if seq.finish is None:
                    self._sampled(request, seq, sampled, events)
            if seq.finish is not None:
                self._retire(request, seq)
        return events

    def _sampled(self, request: Request, seq: Sequence, sampled: Sampled, events: list[Event]) -> None:
        branches = [seq]
        if seq.branches:
            branches += self._fork(request, seq)
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

    def _fork(self, request: Request, seq: Sequence) -> list[Sequence]:
        """The branches of parallel sampling: they share the prompt's pages (§4.4)."""
        children = [seq.fork(self.new_id(), i, branch_seed(request.seed, i)) for i in range(1, 1 + seq.branches)]
        seq.branches = 0
        request.live += children
        for i, child in enumerate(children):
            if not self.memory.fork(seq, child):
                # The whole request is preempted, the branches not yet in memory with it.
                for absent in children[i:]:
                    absent.computed = absent.planned = 0
                self._preempt_partly(request, children[i:])
                break
            self.by_slot[self.memory.slot(child)] = (request, child)
        return children

    def _preempt_partly(self, request: Request, absent: list[Sequence]) -> None:
        request.live = [seq for seq in request.live if seq not in absent]
        self._preempt(request)
        request.live += absent

    def _score(self, row: Row, seq: Sequence, sampled: Sampled) -> None:
        for i, top in enumerate(sampled.scores):
            if row.start + i == len(seq.prompt_tops):  # a recomputed prompt is scored again; keep the first
                seq.prompt_tops.append(top)

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
        request.live.remove(seq)
        request.done.append(seq)
        if not request.live:
            if request.status is Status.RUNNING:
                del self.running[request]
            else:
                self.waiting.remove(request)
            request.status = Status.DONE
