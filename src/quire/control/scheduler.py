"""The scheduler: in the queue's order (quire.control.queue), one iteration at a time (PagedAttention §4.5).

`schedule` plans a step from how far sequences are planned, `update` takes in a step's result and reads the plan it is
given. There is no prompt phase: a sequence gets the tokens that bring `planned` up to its length, in chunks if the
budget asks for it. The scheduler never asks which memory it drives, and knows no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from quire.control.branching import Branching, Hands
from quire.control.costs import DEFAULT, Costs
from quire.control.decoding import append, pooled, score, top_of
from quire.control.matching import masks_of, waits
from quire.control.memory import KVMemory, Later
from quire.control.queue import Queue
from quire.control.request import Event, Request, Sequence, Status
from quire.control.sight import Sight
from quire.vocabulary.plan import LAST, Birth, Row, Sampled, StepPlan, StepResult
from quire.vocabulary.seeds import branch_seed


class Scheduler:
    """`budget` tokens are computed in a step at most, and `max_seqs` sequences are resident. `preemption` is "swap",
    "recompute", or "auto": what `costs` says is cheaper for the victim. `static` batches (FasterTransformer) take what
    the memory holds when nothing runs, whatever the budget, and nobody joins before their last member ends. Where the
    model has `stages`, steps in flight are of different sequences, dealt out so that there are as many of them."""

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
        stages: int = 1,
    ) -> None:
        self.memory, self.static, self.stages = memory, static, stages
        self.budget, self.max_seqs, self.max_len = budget, max_seqs, max_len
        self.eos_ids = frozenset(eos_ids)
        self.preemption, self.costs = preemption, costs
        geometry = memory.geometry
        self.part = geometry.part if geometry.budget or geometry.both_ways else None
        self.sight = Sight(memory, budget) if geometry.sees else None
        # Whether other engines may take pages before what was decided of them is done: it is sent without rows then
        self.pressing: Callable[[], bool] = lambda: False
        self.waiting, self.swapped = Queue(), deque[Request]()
        self.running: dict[Request, None] = {}  # in order of arrival
        self.by_slot: dict[int, tuple[Request, Sequence]] = {}
        self.births: list[Birth] = []
        self.matched = 0  # requests with a grammar
        self.late = False  # the runner takes masks once a step is under way
        self.flight = 0  # plans made whose results are awaited
        self.next_seq = 0
        self.pressed = False  # a newcomer is to get room that another client or batch has more of
        self.favoured: Request | None = None  # the newcomer that room was made for
        self.preempted = {"swap": 0, "recompute": 0}  # requests, by the way it was done
        self.deferred = 0  # waiting requests that the last look at the queue told to come later
        hands = Hands(self.new_id, self._fork, self._leave, self._born_of, self.finish)
        self.branching = Branching(hands, self.eos_ids)

    def new_id(self) -> int:
        """A sequence id that was never used."""
        self.next_seq += 1
        return self.next_seq

    def add(self, request: Request) -> None:
        """Queue a request that the memory `fits`."""
        self.matched += request.params.grammar is not None
        self.waiting.add(request)

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
        """Plan the next step. None: there is nothing to do, or memory is short, or a preemption is due, and a result is
        awaited first."""
        if self.pressed:
            if self.flight:
                return None
            self._make_room()
        rows: list[Row] = []
        if self.sight is not None:
            self.sight.begin()
        hurt = self._continue_running(rows)
        # What was spread over large pages finds room when it comes back together.
        if hurt is not None and (not hurt or not self.running):
            self._join(rows)
        if hurt is None or (not rows and not hurt and (self.flight or not (self.births and self.running))):
            sees = self.sight is not None and self.sight.spent > 0
            return self._plan([]) if (sees and hurt is not None) or self.pressing() else None
        for row in rows:
            seq = self.by_slot[row.slot][1]
            seq.planned = row.start + len(row.tokens)
            seq.pending += row.sample > 0
        return self._plan(rows)  # none of them: a request comes back whose method waits, or victims' pages are taken

    def _plan(self, rows: list[Row]) -> StepPlan:
        births, self.births = tuple(self.births), []
        now, ahead = self.memory.take_journal()
        self.flight += 1
        masks = masks_of(rows, self.by_slot) if self.matched and not self.late else ()
        return StepPlan(births, now, tuple(rows), ahead, masks)

    def _continue_running(self, rows: list[Row]) -> bool | None:
        """Give each running sequence its next tokens, oldest request first; preempt the youngest when memory is short.
        Returns whether anybody was hurt; None when memory is short but steps are in flight, so that victims may be."""
        hurt, budget, staged = False, self.budget, self.stages > 1
        most, drawing = -(-len(self.by_slot) // self.stages), 0  # rows that draw: others are the next step's
        grow, wanted, sight = self.memory.grow, self._wanted, self.sight
        for request in list(self.running):
            if request.status is not Status.RUNNING:
                break  # preempted above, and so is everyone younger
            first = len(rows)
            for seq in request.live:
                count = wanted(request, seq, budget)
                if count <= 0 or (staged and drawing == most and seq.planned + count >= len(seq.tokens)):
                    continue
                while not grow(seq, seq.planned + count):
                    if self.flight:
                        return None
                    hurt = True
                    self._preempt(next(reversed(self.running)))
                    if request.status is not Status.RUNNING:
                        del rows[first:]
                        return hurt
                if sight is not None and not (count := sight.clear(seq, count)):
                    continue
                rows.append(self._row(request, seq, count))
                if staged:
                    drawing += rows[-1].sample > 0
                budget -= count
        return hurt

    def _wanted(self, request: Request, seq: Sequence, budget: int) -> int:
        """Tokens that the sequence could compute next, of `budget`."""
        if seq.finish is not None:
            return 0
        if seq.pending:
            if seq.branches or request.method is not None or self.stages > 1:
                return 0  # what follows is decided when its sample arrives, or known to the first stage then
            if seq.matcher is not None and waits(request, seq, self.late):
                return 0  # as what may be drawn is; others go on
            if len(seq.tokens) + seq.pending - seq.prompt_len >= request.max_tokens:
                return 0  # its last token is on its way
        if seq.sibling is not None:
            if seq.sibling.sibling is not None or seq.sibling.planned < seq.planned:
                return 0  # what it shares is still to be computed, by the sibling or by that one's own
            seq.sibling = None
        count = min(len(seq.tokens) + seq.pending - seq.planned, budget)
        return count if self.part is None else self.part(seq.prompt_len, seq.planned, count)

    def _row(self, request: Request, seq: Sequence, count: int) -> Row:
        start, end, known = seq.planned, seq.planned + count, len(seq.tokens)
        tokens: tuple[int, ...] = (LAST,)
        if start < known:
            tokens = (seq.tokens[start],) if count == 1 else tuple(seq.tokens[start:end])
        sample = 0
        if end == known + seq.pending and request.params.pooling is None:
            sample = 1 if request.method is not None else 1 + seq.branches
        score: tuple[int, ...] = ()
        if start + 1 < seq.prompt_len and request.params.prompt_logprobs is not None:
            score = tuple(seq.tokens[start + 1 : min(end + 1, seq.prompt_len)])
        return Row(self.memory.slot(seq), tokens, start, sample, score)

    # Preemption: whole requests, all or nothing, and all sequences of a request together (§4.5)

    def _preempt(self, victim: Request) -> None:
        if self._cheaper(victim) == "swap":
            slots = [self.memory.slot(seq) for seq in victim.live]
            if self.memory.swap_out(victim.live):
                for slot in slots:
                    del self.by_slot[slot]
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
        self.waiting.give_back(victim)
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
        """Bring requests in, in the queue's order, while the budget, the slots and the memory allow: nobody new is
        admitted before older ones that were preempted are back (§4.5), unless these have more than their share. Who is
        told to come later keeps its place and its slots, as the memory keeps room for it, and the next one is tried."""
        self.deferred = 0
        if (self.static and self.running) or not (self.swapped or self.waiting):
            return
        budget = self.budget - sum(len(row.tokens) for row in rows)
        slots = self.max_seqs - sum(request.width for request in self.running)  # those of forks to come are taken too
        later: list[Request] = []
        while (budget > 0 or self.static) and (self.swapped or self.waiting):
            request = self._next()
            back = request.status is Status.SWAPPED
            joined: list[Row] | Later | None = None
            if request.width <= slots:
                joined = self._swap_in(request, budget) if back else self._admit(request, budget)
            if joined is None:
                self.pressed = not self.static and self._victim() is not None
                break
            if isinstance(joined, Later) and request.preemptions:
                break
            if back:
                self.swapped.popleft()
            else:
                self.waiting.take(request)
            slots -= request.width
            if isinstance(joined, Later):
                later.append(request)
                continue
            request.status = Status.RUNNING
            late = bool(self.running) and next(reversed(self.running)).order > request.order
            self.running[request] = None
            if late:  # it was told to wait, or dropped because it couldn't be forked, and younger ones went on
                self.running = dict.fromkeys(sorted(self.running, key=lambda other: other.order))
            rows.extend(joined)
            budget -= sum(len(row.tokens) for row in joined)
        self.waiting.put_back(later)
        self.deferred = len(later)

    def _next(self) -> Request:
        """Who is to join next."""
        favoured, self.favoured = self.favoured, None
        if favoured is not None and favoured is self.waiting.newcomer():
            return favoured
        new, fronts = self.waiting.newcomer(), [line[0] for line in (self.waiting.returned, self.swapped) if line]
        back = min(fronts, key=lambda one: one.order, default=None)
        if back is None or (new is not None and (new.order < back.order or self._due(new, back, 0))):
            assert new is not None, "somebody waits"
            return new
        return back

    # Room for newcomers whose client or batch has less than others

    def _make_room(self) -> None:
        """Preempt those that have more than their share, until the newcomer that is next has a slot; at least one."""
        self.pressed = False
        while (victim := self._victim()) is not None:
            self._preempt(victim)
            self.favoured = self.waiting.newcomer()
            taken = sum(request.width for request in self.running)
            if self.favoured is None or self.favoured.width <= self.max_seqs - taken:
                break

    def _victim(self) -> Request | None:
        """Whom to preempt for the newcomer that is next: the youngest of the batch that has most slots, of the client
        that has most. None if that would not be fair."""
        new = self.waiting.newcomer()
        if new is None or not self.running or not self.waiting.contended:
            return None
        clients, batches = self._taken()
        client = max(clients, key=lambda key: clients[key])
        _, batch = max((key for key in batches if key[0] == client), key=lambda key: batches[key])
        youngest = next(one for one in reversed(self.running) if (one.client, one.batch) == (client, batch))
        return youngest if self._due(new, youngest, youngest.width) else None

    def _due(self, new: Request, other: Request, less: int) -> bool:
        """Whether a newcomer goes before another request, whose client and batch have `less` slots without it: its own
        client or, of the same client, its batch has less then, too. A batch asks for a client's own slots only as long
        as it has none: exchanging more of them would cost the client, and gain it nothing."""
        if (new.client, new.batch) == (other.client, other.batch):
            return False
        clients, batches = self._taken()
        if new.client != other.client:
            return clients[new.client] + new.width <= clients[other.client] - less
        return not batches[new.client, new.batch] and new.width <= batches[other.client, other.batch] - less

    def _taken(self) -> tuple[Counter[str], Counter[tuple[str, int]]]:
        """Slots that each client and each batch has."""
        clients, batches = Counter[str](), Counter[tuple[str, int]]()
        for request in self.running:
            clients[request.client] += request.width
            batches[request.client, request.batch] += request.width
        return clients, batches

    def _swap_in(self, request: Request, budget: int) -> list[Row] | None:
        """Bring all live sequences of a swapped request back, or none."""
        return self._enter(request, budget) if self.memory.swap_in(request.live) else None

    def _admit(self, request: Request, budget: int) -> list[Row] | Later | None:
        """Bring all live sequences of a request into memory, or none. What they have in common is computed by one of
        them, a step before the others."""
        admitted = self.memory.admit(request.live, budget)
        if not isinstance(admitted, list):
            return admitted
        for seq, (reused, after) in zip(request.live, admitted):
            seq.computed = seq.planned = reused
            seq.sibling = after
        if not request.preemptions:
            request.cached_tokens = request.live[0].planned
        return self._enter(request, budget)

    def _enter(self, request: Request, budget: int) -> list[Row]:
        """Its sequences are in memory; those that find room compute in this step."""
        rows: list[Row] = []
        for seq in request.live:
            self.by_slot[self.memory.slot(seq)] = (request, seq)
            self._born(request, seq)
            count = self._wanted(request, seq, budget)
            if count <= 0 or not self.memory.grow(seq, seq.planned + count):
                continue
            if self.sight is None or (count := self.sight.clear(seq, count)):
                rows.append(self._row(request, seq, count))
                budget -= count
        return rows

    def _born(self, request: Request, seq: Sequence, parent: int = -1) -> None:
        sampling = request.sampling if parent < 0 else None  # a fork's are its parent's
        history = tuple(seq.tokens) if request.sampling.needs_history else ()
        if request.top is None:
            request.top = top_of(request, self.eos_ids)
        slot = self.memory.slot(seq)
        about = seq.seed, seq.prompt_len, history, request.top, seq.media
        self.births.append(Birth(slot, seq.id, parent, sampling, *about))

    def _born_of(self, request: Request, seq: Sequence, parent: Sequence) -> None:
        self._born(request, seq, self.memory.slot(parent))

    def _leave(self, seq: Sequence) -> None:
        del self.by_slot[self.memory.slot(seq)]
        self.memory.free(seq)

    # update

    def update(self, plan: StepPlan, result: StepResult) -> list[Event]:
        """Take in the result of the oldest plan in flight."""
        self.flight -= 1
        events, by_slot, commit = list[Event](), self.by_slot, self.memory.commit
        for row, sampled in zip(plan.rows, result.samples):
            request, seq = by_slot[row.slot]
            seq.computed = row.start + len(row.tokens)
            if row.score:
                score(row, seq, sampled)
            if seq.finish is None and not sampled.error:  # what a fault computed is not kept for others
                commit(seq)
            if row.sample:
                seq.pending -= 1
                if seq.finish is None:
                    self._sampled(request, seq, sampled, events)
            elif request.params.pooling is not None and pooled(request, seq, row, sampled):
                events.append(Event(request, seq))
            if seq.finish is not None and request.status is not Status.DONE:
                self._retire(request, seq)
                if not request.live and (request.method is not None or request.params.ranked):
                    events.append(Event(request, None))  # what is told at the end can be told now
        return events

    def _sampled(self, request: Request, seq: Sequence, sampled: Sampled, events: list[Event]) -> None:
        if request.method is not None:
            if self.branching.sampled(request, seq, sampled):
                events.append(Event(request, None))
                if not request.live:
                    del self.running[request]
                    request.status = Status.DONE
            return
        others = self._branches(request, seq) if seq.branches else ()
        tokens = append(request, seq, sampled, 0, self.eos_ids, self.max_len)
        events.append(Event(request, seq, tokens, sampled.tops[:1]))
        for draw, branch in enumerate(others, 1):
            drawn = append(request, branch, sampled, draw, self.eos_ids, self.max_len)
            events.append(Event(request, branch, drawn, sampled.tops[draw : draw + 1]))
            if branch.finish is not None:
                self._retire(request, branch)
            elif request.status is Status.RUNNING:
                self._born(request, branch, parent=self.memory.slot(seq))
        jumped = len(tokens) > 1  # over tokens that the device hasn't drawn
        if jumped and request.sampling.needs_history and seq.finish is None and request.status is Status.RUNNING:
            self._born(request, seq, parent=self.memory.slot(seq))
        if request.prefix is not None and not sampled.error:
            assert self.memory.prefixes is not None, "a prefix is registered where none is kept"
            if not self.memory.prefixes.pin(request.prefix, seq):
                seq.finish, seq.stop_reason = "error", "the registered prefixes are full"

    def _branches(self, request: Request, seq: Sequence) -> list[Sequence]:
        """Those that are forked from a sequence now."""
        children = [seq.fork(self.new_id(), i, branch_seed(request.seed, i)) for i in range(1, 1 + seq.branches)]
        seq.branches = 0
        request.live += children
        self._fork(request, [(seq, child) for child in children])
        return children

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
            self.memory.free(seq)
        request.live.remove(seq)
        request.done.append(seq)
        if not request.live:
            if request.status is Status.RUNNING:
                del self.running[request]
            else:
                (self.swapped if request.status is Status.SWAPPED else self.waiting).remove(request)
            request.status = Status.DONE
            self.matched -= request.params.grammar is not None


def _enqueue(queue: deque[Request], victim: Request) -> None:
    """Put a preempted request where its order says, near the front."""
    queue.insert(next((i for i, other in enumerate(queue) if other.order > victim.order), len(queue)), victim)
