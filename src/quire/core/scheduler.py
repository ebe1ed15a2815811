"""The scheduler: plans one step at a time (PagedAttention §4.5), in the order of the queue (quire.core.request_queue).

`schedule` plans a step, `update` processes a step's result with the plan of that step. There is no prompt phase: a
sequence gets the tokens that bring `planned` up to its length, in chunks if the budget is short. The scheduler works
over any memory and reads no clock.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections import Counter, deque
from operator import attrgetter

from quire.core.branching import BranchOps, MethodDriver
from quire.core.decoding import (
    append_token,
    can_append_all,
    record_pooled,
    record_prompt_logprobs,
    resolve_num_logprobs,
)
from quire.core.encoder_budget import EncoderBudget
from quire.core.grammar_masks import must_wait_for_token
from quire.core.preemption_costs import DEFAULT_COSTS, PreemptionCosts
from quire.core.request import DraftCounts, Request, RequestStatus, SeqEvent
from quire.core.request_queue import RequestQueue
from quire.core.speculation import (
    NO_DRAFTS,
    Speculator,
    StepDrafts,
    plan_draft_slices,
    plan_head_slices,
    step_tokens,
)
from quire.memory.answers import Deferred, EvictionLimit
from quire.memory.interface import KVMemory
from quire.memory.prefix_demand import MAX_EXPECTED
from quire.protocol.images import clip_at_image
from quire.protocol.seeds import branch_seed
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import (
    LAST_SAMPLED,
    MAX_STEP_DRAFTS,
    SeqSlice,
    SliceResult,
    SlotInit,
    StepPlan,
    StepResult,
    TableWrite,
)

FIRST_MEAN_OUTPUT, OUTPUTS_IN_MEAN = 256, 32
"""The tokens that an output is expected to have at first, and the number of outputs that change it."""
EXPECTED_TOKENS = 16384  # tokens of waiting prompts, about, whose prefixes become expected in a step


class Scheduler:
    """Schedules requests: at most `token_budget` tokens in a step, and `max_seqs` sequences in memory.

    `preemption` is "swap", "recompute", or "auto": whichever `costs` estimates to be cheaper for the victim.
    `step_costs`, of the model's steps, decide whether a request is admitted at the cost of cached prefixes. With
    `static_batching` (FasterTransformer) a batch takes what the memory holds when nothing runs, whatever the budget,
    and no request joins before the last member ends. With `pp_size` pipeline stages the steps in flight are of
    different sequences, which are divided evenly among that many steps.

    `deferred_masks`: the runner accepts grammar masks after a step has started. `shares_memory`: other engines allocate
    from the same memory, so page operations are sent in a plan without slices rather than kept for the next plan.
    `speculator` chooses draft tokens; unless the model has stages, a step that verifies some is the only one in
    flight."""

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
        step_costs: PreemptionCosts = DEFAULT_COSTS,
        static_batching: bool = False,
        pp_size: int = 1,
        deferred_masks: bool = False,
        shares_memory: bool = False,
        speculator: Speculator | None = None,
    ) -> None:
        self.memory, self.static_batching, self.pp_size = memory, static_batching, pp_size
        self.token_budget, self.max_seqs, self.max_len = token_budget, max_seqs, max_len
        self.eos_ids = frozenset(eos_ids)
        self.preemption, self.costs, self.step_costs = preemption, costs, step_costs
        self.unexpected = deque[Request]()  # new requests, by arrival, whose prefixes the memory does not expect yet
        self.mean_output = float(FIRST_MEAN_OUTPUT)
        self.num_schedules = 0  # calls of `_schedule_waiting` with requests that wait
        self.refused_since: tuple[Request | None, int] = None, 0  # the last request without room, and since when
        self.deferred_masks, self.shares_memory = deferred_masks, shares_memory
        self.speculator, self.has_head = speculator, speculator is not None and speculator.has_head
        self.drafts_in_flight = False  # with stages: some step so far had drafts
        kv_config = memory.kv_config
        self.clip_chunk = kv_config.clip_chunk if kv_config.budget or kv_config.both_ways else None
        self.whole_images = kv_config.whole_images
        self.encoder_budget = EncoderBudget(memory, token_budget) if kv_config.has_images else None
        self.waiting, self.swapped = RequestQueue(), deque[Request]()
        self.running: dict[Request, None] = {}  # in order of arrival
        self.by_slot: dict[int, tuple[Request, Sequence]] = {}
        self.new_slots: list[SlotInit] = []
        self.num_grammar_requests = 0
        self.num_in_flight = 0  # plans whose results are awaited
        self.flushes_page_ops = False  # page operations are to be sent even if nothing is computed
        self.last_seq_id = 0
        self.rebalance_due = False  # a new request is to get slots of a client or batch that has more
        self.rebalance_target: Request | None = None  # the new request that slots were freed for
        self.preemption_counts = {"swap": 0, "recompute": 0}
        self.num_prefix_waiters = 0  # requests that the last admission deferred
        branch_ops = BranchOps(self.new_seq_id, self._fork, self._free_seq, self._init_slot, self.finish)
        self.method_driver = MethodDriver(branch_ops, self.eos_ids)

    def new_seq_id(self) -> int:
        """Return a sequence id that was never used."""
        self.last_seq_id += 1
        return self.last_seq_id

    def add(self, request: Request) -> None:
        """Queue a request. It must fit the memory (`KVMemory.fits`)."""
        self.num_grammar_requests += request.params.grammar is not None
        if self.speculator is not None:
            request.live_seqs[0].uses_draft_model = self.speculator.drafts_for(request)
        self.waiting.add(request)
        if self.memory.prefix_demand is not None:
            self.unexpected.append(request)

    @property
    def num_preemptions(self) -> int:
        """Requests preempted since the start."""
        return sum(self.preemption_counts.values())

    @property
    def has_unfinished_requests(self) -> bool:
        """Return True if there are requests, or steps whose results are awaited."""
        return bool(self.waiting or self.swapped or self.running or self.num_in_flight or self.flushes_page_ops)

    # schedule

    def schedule(self) -> StepPlan | None:
        """Plan the next step, without grammar masks. Return None if there is nothing to do, or if a result must be
        awaited first, as memory is short, a preemption is due, or draft tokens are or should be verified."""
        if self.rebalance_due:
            if self.num_in_flight:
                return None
            self._rebalance()
        chosen = NO_DRAFTS
        if self.speculator is not None and not (self.drafts_in_flight and self.pp_size == 1):
            chosen = self.speculator.choose(self.running, self.max_len)
        # With stages a step has other sequences than those in flight.
        if self.num_in_flight and self.pp_size == 1 and (self.drafts_in_flight or chosen is not NO_DRAFTS):
            return None
        slices: list[SeqSlice] = []
        if self.encoder_budget is not None:
            self.encoder_budget.start_step()
        budget = self.token_budget
        if chosen.drafts:  # they take at most half of the budget from other tokens
            budget -= min(sum(map(len, chosen.drafts.values())), budget // 2)
        preempted, proposals = self._schedule_running(slices, budget), dict[int, int]()
        if chosen is not NO_DRAFTS and preempted is False:
            proposals = self._add_drafts(slices, chosen)
        # If nothing runs any more, admit at once: requests that were spread over large pages may fit when readmitted.
        if preempted is not None and (not preempted or not self.running):
            self._schedule_waiting(slices)
        if preempted is None or (
            not slices and not preempted and (self.num_in_flight or not (self.new_slots and self.running))
        ):
            encodes = self.encoder_budget is not None and self.encoder_budget.used_parts > 0
            must_send = (encodes and preempted is not None) or self._must_send_page_ops()
            return self._make_plan([]) if must_send else None
        draft_slices: tuple[SeqSlice, ...] = ()
        if self.has_head:
            draft_slices = plan_head_slices(slices, self.by_slot, proposals)
        elif self.speculator is not None:
            draft_slices = plan_draft_slices(slices, self.by_slot, self.token_budget, proposals)
        for row in slices:
            seq = self.by_slot[row.slot][1]
            seq.planned = row.start + len(row.tokens)
            seq.pending_samples += row.num_samples > 0
        if chosen is not NO_DRAFTS:
            for row in slices:
                seq = self.by_slot[row.slot][1]
                seq.planned += len(row.draft_tokens)
                seq.pending_samples += len(row.draft_tokens)
                self.drafts_in_flight |= bool(row.draft_tokens)
            self.drafts_in_flight |= any(row.num_samples for row in draft_slices)
        # There are no slices if a method suspends its branches, or victims were swapped out.
        return self._make_plan(slices, draft_slices)

    def _must_send_page_ops(self) -> bool:
        """Return True if page operations are pending on pages that other engines may take before the next plan, or that
        other engines wait for."""
        if self.flushes_page_ops:
            return True
        page_ops = getattr(self.memory, "page_ops", ()) if self.shares_memory else ()
        return any(type(op) is not TableWrite for op in page_ops)

    def _make_plan(self, slices: list[SeqSlice], draft_slices: tuple[SeqSlice, ...] = ()) -> StepPlan:
        new_slots, self.new_slots = tuple(self.new_slots), []
        page_ops, ahead = self.memory.take_page_ops()
        self.num_in_flight, self.flushes_page_ops = self.num_in_flight + 1, False
        return StepPlan(new_slots, page_ops, tuple(slices), ahead, (), draft_slices)

    def _schedule_running(self, slices: list[SeqSlice], budget: int) -> bool | None:
        """Give each running sequence its next tokens, oldest request first. Preempt the youngest while memory is short.
        Return True if a request was preempted, None if one must be but steps are in flight."""
        preempted, pipelined = False, self.pp_size > 1
        # With stages: slices that sample in this step. The remaining ones are left to the next steps.
        max_samples, num_samples = -(-len(self.by_slot) // self.pp_size), 0
        grow, num_new_tokens, encoder_budget = self.memory.grow, self._num_new_tokens, self.encoder_budget
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                break  # preempted above, and so are all younger ones
            first = len(slices)
            for seq in request.live_seqs:
                count = num_new_tokens(request, seq, budget)
                if count <= 0 or (pipelined and num_samples == max_samples and seq.planned + count >= len(seq.tokens)):
                    continue
                while not grow(seq, seq.planned + count):
                    if self.num_in_flight:
                        return None
                    preempted = True
                    self._preempt(next(reversed(self.running)))
                    if request.status is not RequestStatus.RUNNING:
                        del slices[first:]
                        return preempted
                if encoder_budget is not None and not (count := encoder_budget.schedule_encoding(seq, count)):
                    continue
                slices.append(self._make_slice(request, seq, count))
                if pipelined:
                    num_samples += slices[-1].num_samples > 0
                budget -= count
        return preempted

    def _num_new_tokens(self, request: Request, seq: Sequence, budget: int) -> int:
        """Return how many tokens, at most `budget`, the sequence can compute next."""
        if seq.finish_reason is not None:
            return 0
        if seq.pending_samples:
            if seq.num_forks or request.method is not None or self.pp_size > 1:
                return 0  # its sample decides what follows, or must reach the first stage
            if seq.matcher is not None and must_wait_for_token(request, seq, self.deferred_masks):
                return 0  # the mask depends on the sample
            if len(seq.tokens) + seq.pending_samples - seq.prompt_len >= request.max_tokens:
                return 0  # its last token is in flight
        if seq.prefix_source is not None:
            if seq.prefix_source.prefix_source is not None or seq.prefix_source.planned < seq.planned:
                return 0  # its prefix is not computed yet, by the sibling or by the sibling's own source
            seq.drafted = min(seq.drafted, seq.prefix_source.draft_planned)
            seq.prefix_source = None
        count = min(len(seq.tokens) + seq.pending_samples - seq.planned, budget)
        count = count if self.clip_chunk is None else self.clip_chunk(seq.prompt_len, seq.planned, count)
        return clip_at_image(seq.images, seq.planned, count) if self.whole_images else count

    def _add_drafts(self, slices: list[SeqSlice], chosen: StepDrafts) -> dict[int, int]:
        """Add draft tokens to slices, oldest request first, as many as the budget has room for, if the memory has:
        nothing is preempted. Return the numbers of tokens that the draft model is to propose, by sequence id: those
        whose slots the memory has room for."""
        budget, num_left = self.token_budget - sum(len(row.tokens) for row in slices), MAX_STEP_DRAFTS
        drafts, proposals = chosen.drafts, dict[int, int]()
        for i, row in enumerate(slices):
            seq = self.by_slot[row.slot][1]
            draft_tokens = drafts.get(seq.id, ())[: max(min(num_left, budget), 0)]
            end = seq.planned + 1 + len(draft_tokens)
            if draft_tokens and self.memory.grow(seq, end):
                slices[i] = row._replace(draft_tokens=draft_tokens)
                budget, num_left = budget - len(draft_tokens), num_left - len(draft_tokens)
            count = chosen.proposals.get(seq.id, 0)
            if count and self.memory.grow(seq, end + count):
                proposals[seq.id] = count
        return proposals

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

    # Preemption: all sequences of a request together (§4.5)

    def _preempt(self, victim: Request) -> None:
        if self._preemption_mode(victim) == "swap":
            slots = [self.memory.slot(seq) for seq in victim.live_seqs]
            if self.memory.swap_out(victim.live_seqs):
                for slot in slots:
                    del self.by_slot[slot]
                del self.running[victim]
                victim.status = RequestStatus.SWAPPED
                insort(self.swapped, victim, key=attrgetter("order"))
                self._count_preemption(victim, "swap")
                return
        self._preempt_by_recompute(victim)

    def _preempt_by_recompute(self, victim: Request) -> None:
        """Free every sequence. Each will be recomputed, as one prompt of all its tokens so far."""
        del self.running[victim]
        for seq in victim.live_seqs:
            self._free_seq(seq)
            seq.computed = seq.planned = seq.drafted = 0
        victim.candidates = {}  # they will be sampled again
        victim.status = RequestStatus.WAITING
        self.waiting.requeue(victim)
        self._count_preemption(victim, "recompute")

    def _count_preemption(self, victim: Request, mode: str) -> None:
        victim.preemptions += 1
        self.preemption_counts[mode] += 1

    def _preemption_mode(self, victim: Request) -> str:
        if self.preemption != "auto":
            return self.preemption
        pages, tokens = self.memory.count_held(victim.live_seqs)
        return self.costs.cheaper_mode(pages, tokens, [seq.computed for seq in victim.live_seqs])

    # Admission

    def _schedule_waiting(self, slices: list[SeqSlice]) -> None:
        """Admit requests in the queue's order while the budget, the slots and the memory allow. Preempted requests come
        before new ones (§4.5), unless their client or batch has more than its share. A deferred request keeps its place
        in the queue, and slots and memory stay reserved for it; the next one is tried."""
        self.num_prefix_waiters = 0
        if (self.static_batching and self.running) or not (self.swapped or self.waiting):
            return
        self.num_schedules += 1
        self._expect_prefixes()
        budget = self.token_budget - sum(map(step_tokens, slices))
        slots = self.max_seqs - sum(request.max_slots for request in self.running)  # slots of later forks count too
        deferred: list[Request] = []
        while (budget > 0 or self.static_batching) and (self.swapped or self.waiting):
            request = self._next_to_admit()
            is_swapped = request.status is RequestStatus.SWAPPED
            joined: list[SeqSlice] | Deferred | None = None
            if request.max_slots <= slots:
                if not is_swapped:
                    joined = self._admit(request, budget)
                elif self.memory.swap_in(request.live_seqs):
                    joined = self._start_request(request, budget)
            if joined is None:
                self.rebalance_due = not self.static_batching and self._rebalance_victim() is not None
                break
            if isinstance(joined, Deferred) and request.preemptions:
                break
            if is_swapped:
                self.swapped.popleft()
            else:
                self.waiting.pop(request)
            slots -= request.max_slots
            if isinstance(joined, Deferred):
                deferred.append(request)
                continue
            self._forget_prefix(request.live_seqs[0], admitted=True)
            request.status = RequestStatus.RUNNING
            out_of_order = bool(self.running) and next(reversed(self.running)).order > request.order
            self.running[request] = None
            if out_of_order:  # it was deferred, or dropped because it could not be forked, and younger ones run
                self.running = dict.fromkeys(sorted(self.running, key=lambda other: other.order))
            slices.extend(joined)
            budget -= sum(len(row.tokens) for row in joined)
        self.waiting.put_back(deferred)
        self.num_prefix_waiters = len(deferred)

    def _expect_prefixes(self) -> None:
        """Tell the memory which prefixes the next requests will look up, of some tokens a step."""
        demand, tokens = self.memory.prefix_demand, EXPECTED_TOKENS
        if demand is None:
            return
        if len(self.unexpected) > 2 * len(self.waiting) + MAX_EXPECTED:  # most have been aborted
            self.unexpected = deque(one for one in self.unexpected if one.status is RequestStatus.WAITING)
        while self.unexpected and demand.has_room and tokens > 0:
            request = self.unexpected.popleft()
            if request.status is RequestStatus.WAITING and not request.preemptions:
                demand.expect(request.live_seqs[0])
                tokens -= request.prompt_len

    def _forget_prefix(self, seq: Sequence, admitted: bool) -> None:
        if self.memory.prefix_demand is not None:
            self.memory.prefix_demand.forget(seq, admitted)

    def _eviction_limit(self, request: Request) -> EvictionLimit | None:
        """Return how many tokens of prefixes that waiting requests will find the admission of a request may cost: those
        that could be computed in the time that it saves. One more running request shares the fixed cost of all steps
        until it ends, in which it would otherwise run later. What it would have saved while it was refused counts, too,
        so its wait is bounded by the time to compute them."""
        demand = self.memory.prefix_demand
        if demand is None or not demand.prefixes or not self.running:
            return None
        refused, since = self.refused_since
        waited = self.num_schedules - since if refused is request else 0
        outputs, costs = min(request.max_tokens, self.mean_output) + waited, self.step_costs
        worth = outputs * costs.compute_fixed / (costs.compute_token * (len(self.running) + 1))
        left = sum(
            max(min(other.max_tokens, self.mean_output) - (len(seq.tokens) - seq.prompt_len), 0)
            for other in self.running
            for seq in other.live_seqs
        )
        return EvictionLimit(worth, int(left / 2))

    def _next_to_admit(self) -> Request:
        """Return the request to admit next."""
        favoured, self.rebalance_target = self.rebalance_target, None
        if favoured is not None and favoured is self.waiting.peek_new():
            return favoured
        new, heads = self.waiting.peek_new(), [line[0] for line in (self.waiting.preempted, self.swapped) if line]
        preempted = min(heads, key=lambda request: request.order, default=None)
        if preempted is None or (
            new is not None and (new.order < preempted.order or self._goes_first(new, preempted, 0))
        ):
            assert new is not None, "a request waits"
            return new
        return preempted

    # Slots for new requests whose client or batch has fewer than others

    def _rebalance(self) -> None:
        """Preempt requests of clients or batches with more than their share, at least one, until the next new request
        has its slots."""
        self.rebalance_due = False
        while (victim := self._rebalance_victim()) is not None:
            self._preempt(victim)
            self.rebalance_target = self.waiting.peek_new()
            taken = sum(request.max_slots for request in self.running)
            if self.rebalance_target is None or self.rebalance_target.max_slots <= self.max_seqs - taken:
                break

    def _rebalance_victim(self) -> Request | None:
        """Return the request to preempt for the next new request: the youngest of the batch with most slots, of the
        client with most slots. None if that would not be fair."""
        new = self.waiting.peek_new()
        if new is None or not self.running or not self.waiting.is_contended:
            return None
        clients, batches = self._slots_in_use()
        client = max(clients, key=lambda key: clients[key])
        _, batch = max((key for key in batches if key[0] == client), key=lambda key: batches[key])
        youngest = next(
            request for request in reversed(self.running) if (request.client, request.batch_id) == (client, batch)
        )
        return youngest if self._goes_first(new, youngest, youngest.max_slots) else None

    def _goes_first(self, new: Request, other: Request, freed_slots: int) -> bool:
        """Return True if a new request goes before `other`, whose client and batch have `freed_slots` fewer slots
        without it: if the client of `new` then still has no more slots than the client of `other` or, for the same
        client, its batch than the other batch. Within a client a batch preempts another only while it has no slot:
        exchanging more slots would cost the client work and gain it nothing."""
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
        """Return the slots of each client and of each (client, batch)."""
        clients, batches = Counter[str](), Counter[tuple[str, int]]()
        for request in self.running:
            clients[request.client] += request.max_slots
            batches[request.client, request.batch_id] += request.max_slots
        return clients, batches

    def _admit(self, request: Request, budget: int) -> list[SeqSlice] | Deferred | None:
        """Admit all live sequences of a request to memory, or none. A prefix that they share is computed by one of
        them, a step before the others. Return None if memory is short."""
        admitted = self.memory.admit(request.live_seqs, budget, self._eviction_limit(request))
        if admitted is None and self.refused_since[0] is not request:
            self.refused_since = request, self.num_schedules
        if not isinstance(admitted, list):
            return admitted
        for seq, (reused, prefix_source, drafted) in zip(request.live_seqs, admitted):
            seq.computed = seq.planned = reused
            seq.drafted, seq.prefix_source = drafted, prefix_source
        if not request.preemptions:
            request.cached_tokens = request.live_seqs[0].planned
        return self._start_request(request, budget)

    def _start_request(self, request: Request, budget: int) -> list[SeqSlice]:
        """Initialize the slots of a request that was admitted or swapped in. Return slices of the sequences that can
        grow in this step."""
        slices: list[SeqSlice] = []
        for seq in request.live_seqs:
            self.by_slot[self.memory.slot(seq)] = (request, seq)
            self._init_slot(request, seq)
            count = self._num_new_tokens(request, seq, budget)
            if count <= 0 or not self.memory.grow(seq, seq.planned + count):
                continue
            if self.encoder_budget is None or (count := self.encoder_budget.schedule_encoding(seq, count)):
                slices.append(self._make_slice(request, seq, count))
                budget -= count
        return slices

    def _init_slot(self, request: Request, seq: Sequence, parent: Sequence | None = None) -> None:
        parent_slot = -1 if parent is None else self.memory.slot(parent)
        sampling = request.device_params if parent is None else None  # a fork has its parent's
        history = tuple(seq.tokens) if request.device_params.needs_history else ()
        if request.num_logprobs is None:
            request.num_logprobs = resolve_num_logprobs(request, self.eos_ids)
        slot, seq.proposed = self.memory.slot(seq), 0
        init = SlotInit(
            slot, seq.id, parent_slot, sampling, seq.seed, seq.prompt_len, history, request.num_logprobs, seq.images
        )
        self.new_slots.append(init)

    def _free_seq(self, seq: Sequence) -> None:
        del self.by_slot[self.memory.slot(seq)]
        self.memory.free(seq)

    # update

    def update(self, plan: StepPlan, result: StepResult) -> list[SeqEvent]:
        """Process the result of the oldest plan in flight."""
        self.num_in_flight -= 1
        has_drafts = self.drafts_in_flight or bool(plan.draft_slices)
        self.drafts_in_flight = has_drafts and self.pp_size > 1  # with stages, of any step so far
        events, by_slot = list[SeqEvent](), self.by_slot
        commit = self.memory.commit_drafts if has_drafts else self.memory.commit
        draft_slices = {row.slot: row for row in plan.draft_slices} if has_drafts else {}
        for row, sampled in zip(plan.slices, result.slice_results):
            request, seq = by_slot[row.slot]
            seq.computed = row.start + len(row.tokens)
            if has_drafts:
                draft = draft_slices.get(row.slot)
                if draft is not None:
                    has_all_tokens = draft.num_samples or self.has_head
                    seq.drafted = sys.maxsize if has_all_tokens else draft.start + len(draft.tokens)
                    seq.proposed = draft.num_samples
                if row.draft_tokens:
                    self._process_drafts(request, seq, row, sampled, events)
                    continue
                seq.drafted = min(seq.drafted, seq.computed)
            if row.score_tokens:
                record_prompt_logprobs(row, seq, sampled)
            if seq.finish_reason is None and not sampled.error:  # pages with faulty values are not shared
                commit(seq)
            if row.num_samples:
                seq.pending_samples -= 1
                if seq.finish_reason is None:
                    self._process_sampled(request, seq, sampled, events)
            elif request.params.pooling is not None and record_pooled(request, seq, row, sampled):
                events.append(SeqEvent(request, seq))
            if seq.finish_reason is not None and request.status is not RequestStatus.DONE:
                self._retire_and_report(request, seq, events)
        return events

    def _process_drafts(
        self, request: Request, seq: Sequence, row: SeqSlice, sampled: SliceResult, events: list[SeqEvent]
    ) -> None:
        """Append the accepted draft tokens of a slice and the sample after them, up to the sequence's end. The state of
        rejected tokens is overwritten by the next step."""
        assert self.speculator is not None, "a slice has draft tokens"
        accepted = len(sampled.tokens) - 1
        self.speculator.record(seq, row, accepted)
        seq.pending_samples -= 1 + len(row.draft_tokens)
        end, tokens = row.start + len(sampled.tokens), list[int]()
        if seq.finish_reason is None:
            if can_append_all(request, seq, sampled, self.eos_ids, self.max_len):
                seq.tokens += sampled.tokens
                tokens += sampled.tokens
            else:
                without_error = sampled._replace(error="")  # an error is the last token's
                for i in range(len(sampled.tokens)):
                    if i == accepted:  # after the last one the grammar may force tokens
                        seq.computed = seq.planned = end
                    one = sampled if i == accepted else without_error
                    tokens += append_token(request, seq, one, i, self.eos_ids, self.max_len)
                    if seq.finish_reason is not None:
                        break
            events.append(SeqEvent(request, seq, tuple(tokens), sampled.top_logprobs[: len(tokens)]))
        seq.computed = seq.planned = min(end, row.start + 1 + len(tokens))
        seq.drafted = min(seq.drafted, seq.computed)
        counts = request.draft_counts
        request.draft_counts = DraftCounts(
            counts.drafted + len(row.draft_tokens), counts.accepted + min(accepted, len(tokens))
        )
        if tokens and not sampled.error:
            self.memory.commit_drafts(seq)
        if len(tokens) > len(sampled.tokens):
            self._send_history(request, seq)
        if seq.finish_reason is not None:
            self._retire_and_report(request, seq, events)

    def _send_history(self, request: Request, seq: Sequence) -> None:
        """Send the tokens of a sequence to the device if it needs them: its grammar forced some, which the device has
        not sampled."""
        if (
            request.device_params.needs_history
            and seq.finish_reason is None
            and request.status is RequestStatus.RUNNING
        ):
            self._init_slot(request, seq, seq)

    def _retire_and_report(self, request: Request, seq: Sequence, events: list[SeqEvent]) -> None:
        """Retire a sequence that has ended, and report the end of a request whose outputs wait for it."""
        self._retire(request, seq)
        if not request.live_seqs and (request.method is not None or request.params.returns_best_of):
            events.append(SeqEvent(request, None))

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
        children = self._fork_branches(request, seq) if seq.num_forks else ()
        tokens = append_token(request, seq, slice_result, 0, self.eos_ids, self.max_len)
        events.append(SeqEvent(request, seq, tokens, slice_result.top_logprobs[:1]))
        for i, child in enumerate(children, 1):
            child_tokens = append_token(request, child, slice_result, i, self.eos_ids, self.max_len)
            events.append(SeqEvent(request, child, child_tokens, slice_result.top_logprobs[i : i + 1]))
            if child.finish_reason is not None:
                self._retire(request, child)
            elif request.status is RequestStatus.RUNNING:
                self._init_slot(request, child, seq)
        if len(tokens) > 1:
            self._send_history(request, seq)
        if request.prefix_name is not None and not slice_result.error:
            assert self.memory.prefix_cache is not None, "a prefix is registered without a prefix cache"
            if not self.memory.prefix_cache.pin(request.prefix_name, seq):
                seq.finish_reason, seq.stop_reason = "error", "the registered prefixes are full"

    def _fork_branches(self, request: Request, seq: Sequence) -> list[Sequence]:
        """Fork the branches of a sequence. Return the children."""
        children = [seq.fork(self.new_seq_id(), i, branch_seed(request.seed, i)) for i in range(1, 1 + seq.num_forks)]
        seq.num_forks = 0
        request.live_seqs += children
        self._fork(request, [(seq, child) for child in children])
        return children

    def _fork(self, request: Request, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Have children share their parents' pages. If the memory can't fork, preempt the whole request."""
        for i, (parent, child) in enumerate(pairs):
            if not self.memory.fork(parent, child):
                absent = [child for _, child in pairs[i:]]
                for child in absent:
                    child.computed = child.planned = child.drafted = 0
                order = request.live_seqs
                request.live_seqs = [seq for seq in order if seq not in absent]
                self._preempt_by_recompute(request)
                request.live_seqs = order
                return
            self.by_slot[self.memory.slot(child)] = (request, child)

    # End

    def finish(self, request: Request, seq: Sequence, why: str, reason: int | str | None = None) -> None:
        """End a sequence early (a stop string, an abort). Its memory is freed once no step in flight uses it."""
        if seq.finish_reason is None:
            seq.finish_reason, seq.stop_reason = why, reason
        if request.status is not RequestStatus.DONE and seq in request.live_seqs:
            self._retire(request, seq)

    def _retire(self, request: Request, seq: Sequence) -> None:
        if request.status is RequestStatus.RUNNING:
            if not seq.not_in_flight:
                return
            self._free_seq(seq)
            self.mean_output += (len(seq.tokens) - seq.prompt_len - self.mean_output) / OUTPUTS_IN_MEAN
        elif request.status is RequestStatus.SWAPPED:
            self.memory.free(seq)
        else:
            self._forget_prefix(seq, admitted=False)
        if self.speculator is not None:
            self.speculator.forget(seq)
        request.live_seqs.remove(seq)
        request.finished_seqs.append(seq)
        if not request.live_seqs:
            if request.status is RequestStatus.RUNNING:
                del self.running[request]
            else:
                (self.swapped if request.status is RequestStatus.SWAPPED else self.waiting).remove(request)
            request.status = RequestStatus.DONE
            self.num_grammar_requests -= request.params.grammar is not None

    # After the loss of the runner

    def reset(self, memory: KVMemory) -> list[SeqEvent]:
        """Go on over `memory`, which is empty, with all requests in the queue in order of arrival. Steps in flight are
        forgotten. Sequences that only awaited a step in flight to end are ended; return the events of the requests that
        this ends and whose end is still to be reported."""
        in_memory = sorted([*self.running, *self.swapped], key=lambda request: request.order)
        requests = sorted([*in_memory, *self.waiting], key=lambda request: request.order)
        self.memory = memory
        self.by_slot, self.new_slots, self.running = {}, [], {}
        self.num_in_flight = self.num_prefix_waiters = 0
        self.flushes_page_ops = False
        self.drafts_in_flight = False
        if self.speculator is not None:
            self.speculator.seqs.clear()
        self.rebalance_due, self.rebalance_target = False, None
        if self.encoder_budget is not None:
            self.encoder_budget = EncoderBudget(memory, self.token_budget)
        self.swapped.clear()
        events = [event for request in requests for event in _reset_request(request)]
        self.unexpected.clear()
        if memory.prefix_demand is not None:
            self.unexpected.extend(request for request in self.waiting if not request.preemptions)
        for request in in_memory:
            self.waiting.requeue(request)
        for request in requests:
            if not request.live_seqs:
                self.waiting.remove(request)
        return events


def _reset_request(request: Request) -> list[SeqEvent]:
    request.preemptions += request.status is not RequestStatus.WAITING
    request.status, request.candidates = RequestStatus.WAITING, {}
    for seq in request.live_seqs:
        seq.planned = seq.computed = seq.drafted = seq.pending_samples = 0
        seq.prefix_source = None
    request.finished_seqs += [seq for seq in request.live_seqs if seq.finish_reason is not None]
    request.live_seqs = [seq for seq in request.live_seqs if seq.finish_reason is None]
    if request.live_seqs:
        return []
    request.status = RequestStatus.DONE
    return [SeqEvent(request, None)] if request.method is not None or request.params.returns_best_of else []
