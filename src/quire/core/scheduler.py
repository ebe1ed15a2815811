"""The scheduler: in the queue's order (quire.core.request_queue), one iteration at a time (PagedAttention §4.5).

`schedule` plans a step from how far sequences are planned, `update` takes in a step's result and reads the plan it is
given. There is no prompt phase: a sequence gets the tokens that bring `planned` up to its length, in chunks if the
budget asks for it. The scheduler never asks which memory it drives, and knows no clock.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from quire.core.branching import BranchOps, MethodDriver
from quire.core.decoding import append_token, record_pooled, record_prompt_logprobs, resolve_num_logprobs
from quire.core.encoder_budget import EncoderBudget
from quire.core.grammar_masks import build_masks, must_wait_for_token
from quire.core.preemption_costs import DEFAULT_COSTS, PreemptionCosts
from quire.core.request import Request, RequestStatus, SeqEvent
from quire.core.request_queue import RequestQueue
from quire.memory.answers import Deferred
from quire.memory.interface import KVMemory
from quire.protocol.seeds import branch_seed
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice, SliceResult, SlotInit, StepPlan, StepResult


class Scheduler:
    """`token_budget` tokens are computed in a step at most, and `max_seqs` sequences are resident. `preemption` is
    "swap", "recompute", or "auto": what `costs` says is cheaper for the victim. `static_batching` batches
    (FasterTransformer) take what the memory holds when nothing runs, whatever the budget, and nobody joins before their
    last member ends. Where the model has `pp_size`, steps in flight are of different sequences, dealt out so that there
    are as many of them."""

    def __init__(
        self,
        memory: KVMemory,
        *,
        token_budget: int,
        max_seqs: int,
        max_len: int,
        eos_ids: tuple[int, ...] = (),
        preemption: str = "recompute",
        costs: PreemptionCosts = DEFAULT_COSTS,
        static_batching: bool = False,
        pp_size: int = 1,
    ) -> None:
        self.memory, self.static_batching, self.pp_size = memory, static_batching, pp_size
        self.token_budget, self.max_seqs, self.max_len = token_budget, max_seqs, max_len
        self.eos_ids = frozenset(eos_ids)
        self.preemption, self.costs = preemption, costs
        geometry = memory.kv_config
        self.clip_chunk = geometry.clip_chunk if geometry.budget or geometry.both_ways else None
        self.encoder_budget = EncoderBudget(memory, token_budget) if geometry.has_images else None
        # Whether other engines may take pages before what was decided of them is done: it is sent without rows then
        self.memory_contended: Callable[[], bool] = lambda: False
        self.waiting, self.swapped = RequestQueue(), deque[Request]()
        self.running: dict[Request, None] = {}  # in order of arrival
        self.by_slot: dict[int, tuple[Request, Sequence]] = {}
        self.new_slots: list[SlotInit] = []
        self.num_grammar_requests = 0  # requests with a grammar
        self.deferred_masks = False  # the runner takes masks once a step is under way
        self.num_in_flight = 0  # plans made whose results are awaited
        self.last_seq_id = 0
        self.rebalance_due = False  # a newcomer is to get room that another client or batch has more of
        self.rebalance_target: Request | None = None  # the newcomer that room was made for
        self.preemption_counts = {"swap": 0, "recompute": 0}  # requests, by the way it was done
        self.num_prefix_waiters = 0  # waiting requests that the last look at the queue told to come later
        hands = BranchOps(self.new_seq_id, self._fork, self._free_seq, self._init_forked_slot, self.finish)
        self.method_driver = MethodDriver(hands, self.eos_ids)

    def new_seq_id(self) -> int:
        """A sequence id that was never used."""
        self.last_seq_id += 1
        return self.last_seq_id

    def add(self, request: Request) -> None:
        """Queue a request that the memory `fits`."""
        self.num_grammar_requests += request.params.grammar is not None
        self.waiting.add(request)

    @property
    def num_preemptions(self) -> int:
        """Requests preempted since the start."""
        return sum(self.preemption_counts.values())

    @property
    def has_unfinished_requests(self) -> bool:
        """There is a request to serve, or a step whose result is awaited."""
        return bool(self.waiting or self.swapped or self.running or self.num_in_flight)

    # schedule

    def schedule(self) -> StepPlan | None:
        """Plan the next step. None: there is nothing to do, or memory is short, or a preemption is due, and a result is
        awaited first."""
        if self.rebalance_due:
            if self.num_in_flight:
                return None
            self._rebalance()
        rows: list[SeqSlice] = []
        if self.encoder_budget is not None:
            self.encoder_budget.start_step()
        hurt = self._schedule_running(rows)
        # What was spread over large pages finds room when it comes back together.
        if hurt is not None and (not hurt or not self.running):
            self._schedule_waiting(rows)
        if hurt is None or (not rows and not hurt and (self.num_in_flight or not (self.new_slots and self.running))):
            sees = self.encoder_budget is not None and self.encoder_budget.used_parts > 0
            return self._make_plan([]) if (sees and hurt is not None) or self.memory_contended() else None
        for row in rows:
            seq = self.by_slot[row.slot][1]
            seq.planned = row.start + len(row.tokens)
            seq.pending_samples += row.num_samples > 0
        return self._make_plan(
            rows
        )  # none of them: a request comes back whose method waits, or victims' pages are taken

    def _make_plan(self, slices: list[SeqSlice]) -> StepPlan:
        births, self.new_slots = tuple(self.new_slots), []
        now, ahead = self.memory.take_page_ops()
        self.num_in_flight += 1
        masks = build_masks(slices, self.by_slot) if self.num_grammar_requests and not self.deferred_masks else ()
        return StepPlan(births, now, tuple(slices), ahead, masks)

    def _schedule_running(self, slices: list[SeqSlice]) -> bool | None:
        """Give each running sequence its next tokens, oldest request first; preempt the youngest when memory is short.
        Returns whether anybody was hurt; None when memory is short but steps are in flight, so that victims may be."""
        hurt, budget, staged = False, self.token_budget, self.pp_size > 1
        most, drawing = -(-len(self.by_slot) // self.pp_size), 0  # rows that draw: others are the next step's
        grow, wanted, sight = self.memory.grow, self._num_new_tokens, self.encoder_budget
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                break  # preempted above, and so is everyone younger
            first = len(slices)
            for seq in request.live_seqs:
                count = wanted(request, seq, budget)
                if count <= 0 or (staged and drawing == most and seq.planned + count >= len(seq.tokens)):
                    continue
                while not grow(seq, seq.planned + count):
                    if self.num_in_flight:
                        return None
                    hurt = True
                    self._preempt(next(reversed(self.running)))
                    if request.status is not RequestStatus.RUNNING:
                        del slices[first:]
                        return hurt
                if sight is not None and not (count := sight.schedule_encoding(seq, count)):
                    continue
                slices.append(self._make_slice(request, seq, count))
                if staged:
                    drawing += slices[-1].num_samples > 0
                budget -= count
        return hurt

    def _num_new_tokens(self, request: Request, seq: Sequence, budget: int) -> int:
        """Tokens that the sequence could compute next, of `token_budget`."""
        if seq.finish_reason is not None:
            return 0
        if seq.pending_samples:
            if seq.num_forks or request.method is not None or self.pp_size > 1:
                return 0  # what follows is decided when its sample arrives, or known to the first stage then
            if seq.matcher is not None and must_wait_for_token(request, seq, self.deferred_masks):
                return 0  # as what may be drawn is; others go on
            if len(seq.tokens) + seq.pending_samples - seq.prompt_len >= request.max_tokens:
                return 0  # its last token is on its way
        if seq.prefix_source is not None:
            if seq.prefix_source.prefix_source is not None or seq.prefix_source.planned < seq.planned:
                return 0  # what it shares is still to be computed, by the sibling or by that one's own
            seq.prefix_source = None
        count = min(len(seq.tokens) + seq.pending_samples - seq.planned, budget)
        return count if self.clip_chunk is None else self.clip_chunk(seq.prompt_len, seq.planned, count)

    def _make_slice(self, request: Request, seq: Sequence, count: int) -> SeqSlice:
        start, end, known = seq.planned, seq.planned + count, len(seq.tokens)
        tokens: tuple[int, ...] = (LAST_SAMPLED,)
        if start < known:
            tokens = (seq.tokens[start],) if count == 1 else tuple(seq.tokens[start:end])
        sample = 0
        if end == known + seq.pending_samples and request.params.pooling is None:
            sample = 1 if request.method is not None else 1 + seq.num_forks
        score: tuple[int, ...] = ()
        if start + 1 < seq.prompt_len and request.params.prompt_logprobs is not None:
            score = tuple(seq.tokens[start + 1 : min(end + 1, seq.prompt_len)])
        return SeqSlice(self.memory.slot(seq), tokens, start, sample, score)

    # Preemption: whole requests, all or nothing, and all sequences of a request together (§4.5)

    def _preempt(self, victim: Request) -> None:
        if self._preemption_mode(victim) == "swap":
            slots = [self.memory.slot(seq) for seq in victim.live_seqs]
            if self.memory.swap_out(victim.live_seqs):
                for slot in slots:
                    del self.by_slot[slot]
                del self.running[victim]
                victim.status = RequestStatus.SWAPPED
                _insert_by_order(self.swapped, victim)
                self._count_preemption(victim, "swap")
                return
        self._preempt_by_recompute(victim)

    def _preempt_by_recompute(self, victim: Request) -> None:
        """Every sequence leaves memory and will be recomputed, as one prompt of all its tokens so far."""
        del self.running[victim]
        for seq in victim.live_seqs:
            self._free_seq(seq)
            seq.computed = seq.planned = 0
        victim.candidates = {}  # they will be drawn again
        victim.status = RequestStatus.WAITING
        self.waiting.requeue(victim)
        self._count_preemption(victim, "recompute")

    def _count_preemption(self, victim: Request, mode: str) -> None:
        victim.preemptions += 1
        self.preemption_counts[mode] += 1

    def _preemption_mode(self, victim: Request) -> str:
        if self.preemption != "auto":
            return self.preemption
        held, tokens = self.memory.count_held(victim.live_seqs)
        return self.costs.cheaper_mode(held, tokens, [seq.computed for seq in victim.live_seqs])

    # Admission

    def _schedule_waiting(self, slices: list[SeqSlice]) -> None:
        """Bring requests in, in the queue's order, while the budget, the slots and the memory allow: nobody new is
        admitted before older ones that were preempted are back (§4.5), unless these have more than their share. Who is
        told to come later keeps its place and its slots, as the memory keeps room for it, and the next one is tried."""
        self.num_prefix_waiters = 0
        if (self.static_batching and self.running) or not (self.swapped or self.waiting):
            return
        budget = self.token_budget - sum(len(row.tokens) for row in slices)
        slots = self.max_seqs - sum(
            request.max_slots for request in self.running
        )  # those of forks to come are taken too
        later: list[Request] = []
        while (budget > 0 or self.static_batching) and (self.swapped or self.waiting):
            request = self._next_to_admit()
            back = request.status is RequestStatus.SWAPPED
            joined: list[SeqSlice] | Deferred | None = None
            if request.max_slots <= slots:
                joined = self._swap_in(request, budget) if back else self._admit(request, budget)
            if joined is None:
                self.rebalance_due = not self.static_batching and self._rebalance_victim() is not None
                break
            if isinstance(joined, Deferred) and request.preemptions:
                break
            if back:
                self.swapped.popleft()
            else:
                self.waiting.pop(request)
            slots -= request.max_slots
            if isinstance(joined, Deferred):
                later.append(request)
                continue
            request.status = RequestStatus.RUNNING
            late = bool(self.running) and next(reversed(self.running)).order > request.order
            self.running[request] = None
            if late:  # it was told to wait, or dropped because it couldn't be forked, and younger ones went on
                self.running = dict.fromkeys(sorted(self.running, key=lambda other: other.order))
            slices.extend(joined)
            budget -= sum(len(row.tokens) for row in joined)
        self.waiting.put_back(later)
        self.num_prefix_waiters = len(later)

    def _next_to_admit(self) -> Request:
        """Who is to join next."""
        favoured, self.rebalance_target = self.rebalance_target, None
        if favoured is not None and favoured is self.waiting.peek_new():
            return favoured
        new, fronts = self.waiting.peek_new(), [line[0] for line in (self.waiting.preempted, self.swapped) if line]
        back = min(fronts, key=lambda one: one.order, default=None)
        if back is None or (new is not None and (new.order < back.order or self._goes_first(new, back, 0))):
            assert new is not None, "somebody waits"
            return new
        return back

    # Room for newcomers whose client or batch has less than others

    def _rebalance(self) -> None:
        """Preempt those that have more than their share, until the newcomer that is next has a slot; at least one."""
        self.rebalance_due = False
        while (victim := self._rebalance_victim()) is not None:
            self._preempt(victim)
            self.rebalance_target = self.waiting.peek_new()
            taken = sum(request.max_slots for request in self.running)
            if self.rebalance_target is None or self.rebalance_target.max_slots <= self.max_seqs - taken:
                break

    def _rebalance_victim(self) -> Request | None:
        """Whom to preempt for the newcomer that is next: the youngest of the batch that has most slots, of the client
        that has most. None if that would not be fair."""
        new = self.waiting.peek_new()
        if new is None or not self.running or not self.waiting.is_contended:
            return None
        clients, batches = self._slots_in_use()
        client = max(clients, key=lambda key: clients[key])
        _, batch = max((key for key in batches if key[0] == client), key=lambda key: batches[key])
        youngest = next(one for one in reversed(self.running) if (one.client, one.batch_id) == (client, batch))
        return youngest if self._goes_first(new, youngest, youngest.max_slots) else None

    def _goes_first(self, new: Request, other: Request, freed_slots: int) -> bool:
        """Whether a newcomer goes before another request, whose client and batch have `freed_slots` slots without it:
        its own client or, of the same client, its batch has less then, too. A batch asks for a client's own slots only
        as long as it has none: exchanging more of them would cost the client, and gain it nothing."""
        if (new.client, new.batch_id) == (other.client, other.batch_id):
            return False
        clients, batches = self._slots_in_use()
        if new.client != other.client:
            return clients[new.client] + new.max_slots <= clients[other.client] - freed_slots
        return (
            not batches[new.client, new.batch_id]
            and new.max_slots <= batches[other.client, other.batch_id] - freed_slots
        )

    def _slots_in_use(self) -> tuple[Counter[str], Counter[tuple[str, int]]]:
        """Slots that each client and each batch has."""
        clients, batches = Counter[str](), Counter[tuple[str, int]]()
        for request in self.running:
            clients[request.client] += request.max_slots
            batches[request.client, request.batch_id] += request.max_slots
        return clients, batches

    def _swap_in(self, request: Request, budget: int) -> list[SeqSlice] | None:
        """Bring all live sequences of a swapped request back, or none."""
        return self._start_request(request, budget) if self.memory.swap_in(request.live_seqs) else None

    def _admit(self, request: Request, budget: int) -> list[SeqSlice] | Deferred | None:
        """Bring all live sequences of a request into memory, or none. What they have in common is computed by one of
        them, a step before the others."""
        admitted = self.memory.admit(request.live_seqs, budget)
        if not isinstance(admitted, list):
            return admitted
        for seq, (reused, after) in zip(request.live_seqs, admitted):
            seq.computed = seq.planned = reused
            seq.prefix_source = after
        if not request.preemptions:
            request.cached_tokens = request.live_seqs[0].planned
        return self._start_request(request, budget)

    def _start_request(self, request: Request, budget: int) -> list[SeqSlice]:
        """Its sequences are in memory; those that find room compute in this step."""
        rows: list[SeqSlice] = []
        for seq in request.live_seqs:
            self.by_slot[self.memory.slot(seq)] = (request, seq)
            self._init_slot(request, seq)
            count = self._num_new_tokens(request, seq, budget)
            if count <= 0 or not self.memory.grow(seq, seq.planned + count):
                continue
            if self.encoder_budget is None or (count := self.encoder_budget.schedule_encoding(seq, count)):
                rows.append(self._make_slice(request, seq, count))
                budget -= count
        return rows

    def _init_slot(self, request: Request, seq: Sequence, parent_slot: int = -1) -> None:
        sampling = request.device_params if parent_slot < 0 else None  # a fork's are its parent's
        history = tuple(seq.tokens) if request.device_params.needs_history else ()
        if request.num_logprobs is None:
            request.num_logprobs = resolve_num_logprobs(request, self.eos_ids)
        slot = self.memory.slot(seq)
        about = seq.seed, seq.prompt_len, history, request.num_logprobs, seq.images
        self.new_slots.append(SlotInit(slot, seq.id, parent_slot, sampling, *about))

    def _init_forked_slot(self, request: Request, seq: Sequence, parent: Sequence) -> None:
        self._init_slot(request, seq, self.memory.slot(parent))

    def _free_seq(self, seq: Sequence) -> None:
        del self.by_slot[self.memory.slot(seq)]
        self.memory.free(seq)

    # update

    def update(self, plan: StepPlan, result: StepResult) -> list[SeqEvent]:
        """Take in the result of the oldest plan in flight."""
        self.num_in_flight -= 1
        events, by_slot, commit = list[SeqEvent](), self.by_slot, self.memory.commit
        for row, sampled in zip(plan.slices, result.slice_results):
            request, seq = by_slot[row.slot]
            seq.computed = row.start + len(row.tokens)
            if row.score_tokens:
                record_prompt_logprobs(row, seq, sampled)
            if seq.finish_reason is None and not sampled.error:  # what a fault computed is not kept for others
                commit(seq)
            if row.num_samples:
                seq.pending_samples -= 1
                if seq.finish_reason is None:
                    self._process_sampled(request, seq, sampled, events)
            elif request.params.pooling is not None and record_pooled(request, seq, row, sampled):
                events.append(SeqEvent(request, seq))
            if seq.finish_reason is not None and request.status is not RequestStatus.DONE:
                self._retire(request, seq)
                if not request.live_seqs and (request.method is not None or request.params.returns_best_of):
                    events.append(SeqEvent(request, None))  # what is told at the end can be told now
        return events

    def _process_sampled(
        self, request: Request, seq: Sequence, slice_result: SliceResult, events: list[SeqEvent]
    ) -> None:
        if request.method is not None:
            if self.method_driver.on_candidates(request, seq, slice_result):
                events.append(SeqEvent(request, None))
                if not request.live_seqs:
                    del self.running[request]
                    request.status = RequestStatus.DONE
            return
        others = self._fork_branches(request, seq) if seq.num_forks else ()
        tokens = append_token(request, seq, slice_result, 0, self.eos_ids, self.max_len)
        events.append(SeqEvent(request, seq, tokens, slice_result.top_logprobs[:1]))
        for draw, branch in enumerate(others, 1):
            drawn = append_token(request, branch, slice_result, draw, self.eos_ids, self.max_len)
            events.append(SeqEvent(request, branch, drawn, slice_result.top_logprobs[draw : draw + 1]))
            if branch.finish_reason is not None:
                self._retire(request, branch)
            elif request.status is RequestStatus.RUNNING:
                self._init_slot(request, branch, parent_slot=self.memory.slot(seq))
        jumped = len(tokens) > 1  # over tokens that the device hasn't drawn
        if (
            jumped
            and request.device_params.needs_history
            and seq.finish_reason is None
            and request.status is RequestStatus.RUNNING
        ):
            self._init_slot(request, seq, parent_slot=self.memory.slot(seq))
        if request.prefix_name is not None and not slice_result.error:
            assert self.memory.prefix_cache is not None, "a prefix is registered where none is kept"
            if not self.memory.prefix_cache.pin(request.prefix_name, seq):
                seq.finish_reason, seq.stop_reason = "error", "the registered prefixes are full"

    def _fork_branches(self, request: Request, seq: Sequence) -> list[Sequence]:
        """Those that are forked from a sequence now."""
        children = [seq.fork(self.new_seq_id(), i, branch_seed(request.seed, i)) for i in range(1, 1 + seq.num_forks)]
        seq.num_forks = 0
        request.live_seqs += children
        self._fork(request, [(seq, child) for child in children])
        return children

    def _fork(self, request: Request, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Children share their parents' pages. If the memory can't fork, the whole request is preempted."""
        for i, (parent, child) in enumerate(pairs):
            if not self.memory.fork(parent, child):
                absent = [child for _, child in pairs[i:]]
                for child in absent:
                    child.computed = child.planned = 0
                order = request.live_seqs
                request.live_seqs = [seq for seq in order if seq not in absent]
                self._preempt_by_recompute(request)
                request.live_seqs = order
                return
            self.by_slot[self.memory.slot(child)] = (request, child)

    # Ends

    def finish(self, request: Request, seq: Sequence, why: str, reason: int | str | None = None) -> None:
        """End a sequence early (a stop string, an abort). It leaves memory once no step in flight names it."""
        if seq.finish_reason is None:
            seq.finish_reason, seq.stop_reason = why, reason
        if request.status is not RequestStatus.DONE and seq in request.live_seqs:
            self._retire(request, seq)

    def _retire(self, request: Request, seq: Sequence) -> None:
        if request.status is RequestStatus.RUNNING:
            if not seq.not_in_flight:
                return
            self._free_seq(seq)
        elif request.status is RequestStatus.SWAPPED:
            self.memory.free(seq)
        request.live_seqs.remove(seq)
        request.finished_seqs.append(seq)
        if not request.live_seqs:
            if request.status is RequestStatus.RUNNING:
                del self.running[request]
            else:
                (self.swapped if request.status is RequestStatus.SWAPPED else self.waiting).remove(request)
            request.status = RequestStatus.DONE
            self.num_grammar_requests -= request.params.grammar is not None


def _insert_by_order(queue: deque[Request], victim: Request) -> None:
    """Put a preempted request where its order says, near the front."""
    queue.insert(next((i for i, other in enumerate(queue) if other.order > victim.order), len(queue)), victim)
