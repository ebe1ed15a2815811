"""The engine: requests in, outputs out, one step at a time. `schedule -> submit -> update` is all there is to a step.

It joins a scheduler with a runner through two messages (vocabulary.plan) and knows neither tensors nor pages nor text.
Time comes in as a function, so that a simulator is this engine with another runner and clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

from quire.core.checked_method import CheckedMethod, make_checked_method
from quire.core.decoding import method_context
from quire.core.grammar_masks import build_masks
from quire.core.image_registry import ImageRegistry
from quire.core.outputs import BranchOutput, EngineStats, OutputBuilder
from quire.core.recovery import RunnerRestarter, recover
from quire.core.request import Request
from quire.core.runner import DeferredMaskRunner, Runner
from quire.core.scheduler import Scheduler
from quire.core.shared_memory import SharedMemoryGroup
from quire.core.sleep import PREFIX_PARAMS, SleepController
from quire.core.step_history import StepHistory
from quire.core.validation import EngineLimits, check_images, check_salt
from quire.errors import EngineDead, InputError, PrefixesFull, PrefixTaken, PromptTooLong, RanksLost
from quire.protocol.image_tiling import ImageTiling
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import StepPlan
from quire.protocol.structured_output import GrammarCompiler


class ValidatedRequest(NamedTuple):
    """A request that passed every check and isn't queued yet."""

    tokens: list[int]
    max_tokens: int
    width: int
    method: CheckedMethod | None
    images: tuple[ImageItem, ...]


class Engine:
    """`add` requests, `step` until nothing is left. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: EngineLimits,
        *,
        clock: Callable[[], float],
        seed: int = 0,
        depth: int | None = None,
        tiling: ImageTiling | None = None,
        pooling: str = "last",
    ) -> None:
        """`tiling` is how the model's pictures are cut; None: they are taken as they come. `pooling`: that of requests
        that leave it to the engine."""
        self.scheduler, self.runner, self.limits, self.clock = scheduler, runner, limits, clock
        self.pooling, self.image_registry = pooling, ImageRegistry(tiling)
        self.depth = depth or runner.depth
        self.seed = seed
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[tuple[StepPlan, Any]] = deque()
        self.is_awaiting_masks = False  # the last of them waits for masks
        scheduler.deferred_masks = self.depth > 1 and isinstance(runner, DeferredMaskRunner)
        self.pending_outputs: list[BranchOutput] = []  # outputs that no step brought: aborts
        self.stats = EngineStats()
        self.step_history: StepHistory | None = None  # the last steps, while somebody watches
        self.output_builder = OutputBuilder(self.stats)
        self.num_added = self.num_batches = 0
        self.num_ended = 0  # requests, those ended by a stop string aside
        self.shared_memory_group: SharedMemoryGroup | None = None  # with engines that have the memory in common
        self.restarter: RunnerRestarter | None = None  # what to do once the runner is lost; None: nothing
        self.prefix_recompute_ids: set[str] = set()  # requests that compute registered prefixes once more
        self.prefix_lengths: dict[str, int] = {}  # registered ones, and those being computed: their lengths
        self.sleep_controller = SleepController(self)
        self.grammar_compiler: GrammarCompiler | None = None  # where fronts send forms of outputs to it

    # In

    def add(
        self,
        id: str,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        salt: str = "",
        prefix: str | None = None,
        may_wait: bool = False,
        images: tuple[ImageItem, ...] = (),
        pixels: Seq[ImagePixels] = (),
    ) -> None:
        """Queue a request. Raises InputError (PromptTooLong) or Overloaded, and then nothing changed. `may_wait`: its
        method may leave its branches to whoever added it (text.session)."""
        self.add_all(
            [(id, prompt)],
            params,
            salt=salt,
            prefix=prefix,
            may_wait=may_wait,
            images=[images] if images else (),
            pixels=pixels,
        )

    def add_all(
        self,
        prompts: Seq[tuple[str, Seq[int]]],
        params: SamplingParams,
        *,
        salt: str = "",
        prefix: str | None = None,
        may_wait: bool = False,
        images: Seq[tuple[ImageItem, ...]] = (),
        pixels: Seq[ImagePixels] = (),
        client: str = "",
    ) -> None:
        """Queue a request for each (id, prompt), all or none. Raises as `add`. They are one batch of `client`'s: see
        quire.core.request_queue. `images` are the pictures of each prompt, where there are any, and `pixels` those of
        all of them; the runner gets what it hasn't. `params` are resolved already (see quire.text.text_backend): words
        are token ids here."""
        self.sleep_controller.check_awake()
        waiting = self.scheduler.waiting
        self.limits.check_queue(len(prompts), waiting.num_batches, len(waiting))
        check_salt(salt)
        params = self.limits.resolved(params, self.pooling, self.scheduler.clip_chunk is not None)
        accepted: dict[str, ValidatedRequest] = {}
        for i, (id, prompt) in enumerate(prompts):
            if id in self.requests or id in accepted:
                raise InputError(f"request id {id[:80]!r} is in use", "request_id")
            accepted[id] = self._validate(prompt, params, may_wait, tuple(images[i]) if images else ())
        if images:
            joins = not self.scheduler.memory.kv_config.sight
            self.image_registry.check([one.images for one in accepted.values()], pixels, joins)
        self.num_batches += 1
        for id, one in accepted.items():
            self._enqueue(id, one, params, salt, prefix, client)
        for picture in self.image_registry.take_new(pixels):
            self.send_to_runner(self.runner.add_image, picture)

    def _validate(
        self, prompt: Seq[int], params: SamplingParams, may_wait: bool, images: tuple[ImageItem, ...]
    ) -> ValidatedRequest:
        geometry = self.scheduler.memory.kv_config
        tokens = self.limits.check_prompt(prompt, () if geometry.sight else images)
        if images and params.prompt_logprobs is not None and max(tokens) >= self.limits.vocab_size:
            raise InputError(
                f"prompt_logprobs is {params.prompt_logprobs}, and token {max(tokens)}, which stands for a picture, is "
                f"none of the {self.limits.vocab_size} that have log-probabilities",
                "prompt_logprobs",
            )
        method = make_checked_method(params, self.limits.vocab_size, may_wait)
        width = params.width if method is None else method.width
        fits, max_seqs = self.scheduler.memory.fits, self.scheduler.max_seqs
        check_images(images, tokens, geometry)
        if images:
            fits = partial(fits, images=images)
        if geometry.both_ways and len(tokens) > self.scheduler.token_budget:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, which attend to one another both ways: one step computes all of "
                f"them, and a step has {self.scheduler.token_budget} at most (--max-num-batched-tokens)",
                "prompt",
            )
        max_tokens = self.limits.resolve_max_tokens(len(tokens), params, width, max_seqs, fits)
        if method is not None:
            method.resolve_top(method_context(params, max_tokens, self.scheduler.eos_ids))
        return ValidatedRequest(tokens, max_tokens, width, method, images)

    def _enqueue(
        self,
        id: str,
        validated: ValidatedRequest,
        params: SamplingParams,
        salt: str,
        prefix: str | None,
        client: str = "",
    ) -> None:
        seed = params.seed % 2**63 if params.seed is not None else branch_seed(self.seed, self.num_added << 20)
        self.num_added += 1
        seq = Sequence(self.scheduler.new_seq_id(), validated.tokens, seed=seed, cache_salt=salt)
        seq.images = validated.images
        seq.matcher = None if params.grammar is None else params.grammar.new_matcher()
        seq.num_forks, seq.max_total_len = validated.width - 1, len(validated.tokens) + validated.max_tokens
        if params.prompt_logprobs is not None or params.pooling == "mean":  # all of its rows count
            seq.max_prefix_hit = 0
        request = Request(id, seq, params, arrival_time=self.clock(), max_tokens=validated.max_tokens)
        request.method, request.prefix_name, request.images = validated.method, prefix, validated.images
        request.client, request.batch_id = client, self.num_batches
        self.image_registry.add_request(validated.images)
        self.requests[id] = request
        self.scheduler.add(request)

    def abort(self, id: str) -> None:
        """End a request; its last outputs, with finish_reason "abort", come with the next step. Unknown ids pass."""
        request = self.requests.get(id)
        if request is None:
            return
        request.aborted = True
        told = [seq for seq in request.live_seqs if seq.finish_reason is None]
        for seq in told:
            self.scheduler.finish(request, seq, "abort")
        self.pending_outputs += self.finish_outputs(self.output_builder.build_aborted(request, told))

    def stop(self, id: str, branch: int, reason: str) -> bool | None:
        """End a branch whose text has a stop string, as its reader found: no output tells of it. Unknown ones and those
        that ended meanwhile pass. Whether it was the last of its request; None: not yet, as other branches wait for
        what it computes for them after a preemption. Ask again after a step.

        What a method's readers see before its end is what all its branches agree on, so all of them end."""
        request = self.requests.get(id)
        if request is not None and request.method is not None:
            return self._stop_branches(request, reason)
        seq = (
            next((seq for seq in request.live_seqs if seq.branch_index == branch), None)
            if request is not None
            else None
        )
        if request is None or seq is None or seq.finish_reason is not None:
            return False
        if any(_waits_for_prefix_of(other, seq) for other in request.live_seqs):
            return None
        self.scheduler.finish(request, seq, "stop", reason)
        ended = self.output_builder.record_stop(request, seq)
        if ended:
            self._remove_request(request)
        return ended

    def _remove_request(self, request: Request) -> None:
        """A request has ended. The runner keeps no picture that only this one had."""
        del self.requests[request.id]
        for key in self.image_registry.remove_request(request.images):
            self.send_to_runner(self.runner.remove_image, key)

    def send_to_runner(self, send: Callable[[Any], None], item: Any) -> None:
        """Say what the runner is to keep. To one that is lost it will be said when there is another one."""
        try:
            send(item)
        except RanksLost:
            if self.restarter is None:
                raise

    def _stop_branches(self, request: Request, reason: str) -> bool:
        request.aborted = True  # no more is told of it
        for seq in [seq for seq in request.live_seqs if seq.finish_reason is None]:
            self.scheduler.finish(request, seq, "stop", reason)
        self.output_builder.record_stop_of_all(request)
        self._remove_request(request)
        return True

    def register_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Compute `tokens` and pin them as the prefix `name` (PagedAttention §4.4); an output of request "prefix:NAME"
        tells when it is ready, or by finish_reason "error" that it is not. PrefixTaken, PrefixesFull, or as `add`."""
        memory = self.scheduler.memory
        if self.scheduler.clip_chunk is not None:
            raise PrefixesFull(
                f"the prefix {name[:60]!r} can't be kept: what is left of a prompt in this model depends on all of it",
                "prefix",
            )
        if name in self.prefix_lengths:
            raise PrefixTaken(f"a prefix called {name[:60]!r} is registered already", "name")
        if memory.prefix_cache is None or not memory.prefix_cache.can_pin(len(tokens)):
            raise PrefixesFull(
                f"a prefix of {len(tokens)} tokens exceeds what is left of what is kept for prefixes (--prefix-tokens)",
                "prefix",
            )
        self.add(f"prefix:{name}", tokens, PREFIX_PARAMS, prefix=name)
        self.prefix_lengths[name] = len(tokens)

    def recompute_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Again, as the memory has lost it; whatever waits in the queue."""
        self._enqueue(f"prefix:{name}", self._validate(tokens, PREFIX_PARAMS, False, ()), PREFIX_PARAMS, "", name)

    def release_prefix(self, name: str) -> bool:
        """Let go of a prefix. False if there is none of that name."""
        if self.prefix_lengths.pop(name, None) is None:
            return False
        if (
            self.sleep_controller.saved_prefixes.pop(name, None) is not None
        ):  # it is to be computed when the engine wakes up
            return True
        request = self.requests.get(f"prefix:{name}")
        if request is not None and request.prefix_name == name:
            self.abort(request.id)
        assert self.scheduler.memory.prefix_cache is not None, "a prefix was registered where none is kept"
        self.scheduler.memory.prefix_cache.unpin(name)
        return True

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix and picture; registered prefixes stay. Requests that run keep what they hold, and
        nobody else finds it. Returns the number of pages that were emptied."""
        prefixes = self.scheduler.memory.prefix_cache
        return 0 if prefixes is None else prefixes.reset()

    # Step

    @property
    def has_unfinished_requests(self) -> bool:
        """There is work or output left."""
        return bool(self.pending_outputs) or self.scheduler.has_unfinished_requests

    def step(self) -> list[BranchOutput]:
        """Plan and submit until `depth` steps are in flight, then take in the oldest. Returns what it brought: nothing
        if all that is left waits for its caller, or for engines that have the memory in common. EngineDead if nothing
        can be done and nobody is waited for; Overloaded if those engines wait for their callers."""
        outputs, self.pending_outputs = self.pending_outputs, []
        if self.shared_memory_group is not None and self.shared_memory_group.should_skip_step(self):
            return outputs
        try:
            idle = not self._advance(outputs) and not outputs
        except RanksLost as lost:
            return outputs + recover(self, lost)
        if idle and self.scheduler.has_unfinished_requests and not any(map(_waits_for_caller, self.scheduler.running)):
            self._handle_no_progress()
        return outputs

    def check_runner(self) -> None:
        """While nothing is to be done: notice a runner, which has a `check_runner`, that is lost, and go on with "
        "another."""
        try:
            self.runner.check()  # type: ignore[attr-defined]
        except RanksLost as lost:
            self.pending_outputs += recover(self, lost)

    def step_for_others(self) -> bool:
        """A step for the sake of others, whose outputs the next `step` returns. Whether there was anything to do."""
        return self._advance(self.pending_outputs)

    def _advance(self, outputs: list[BranchOutput]) -> bool:
        """Plan and submit, and add what the oldest step in flight brings to `outputs`. False if there is none."""
        while len(self.in_flight) < self.depth and not self.is_awaiting_masks:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._record_plan(plan)
            self._submit(plan)
        if not self.in_flight:
            return False
        plan, ticket = self.in_flight.popleft()
        result = self.runner.collect(ticket)
        self.stats.step_seconds += result.seconds
        self.stats.idle_seconds += result.idle_seconds
        self.stats.computed_tokens += sum(len(row.tokens) for row in plan.slices)
        if self.step_history is not None:
            self.step_history.record_result(self.stats.steps - len(self.in_flight), result.seconds)
        events = self.scheduler.update(plan, result)
        if self.is_awaiting_masks and len(self.in_flight) == 1:
            self._submit_masks()
        outputs += self.finish_outputs(self.output_builder.build(events, self.clock()))
        return True

    def _submit(self, plan: StepPlan) -> None:
        """Hand a plan to the runner. What the rows of a grammar may draw depends on all tokens before: with steps in
        flight they begin, and draw once those are taken in."""
        if not self.scheduler.deferred_masks or not self.scheduler.num_grammar_requests:
            self.in_flight.append((plan, self.runner.submit(plan)))
            return
        assert isinstance(self.runner, DeferredMaskRunner), "masks may be late"
        self.is_awaiting_masks = True
        self.in_flight.append((plan, self.runner.submit_without_masks(plan)))
        if len(self.in_flight) == 1:
            self._submit_masks()

    def _submit_masks(self) -> None:
        assert isinstance(self.runner, DeferredMaskRunner), "masks may be late"
        plan, ticket = self.in_flight.pop()
        self.in_flight.append(
            (plan, self.runner.submit_masks(ticket, build_masks(plan.slices, self.scheduler.by_slot)))
        )
        self.is_awaiting_masks = False

    def _handle_no_progress(self) -> None:
        """Nothing can be planned: others hold the memory, or something is wrong."""
        if self.shared_memory_group is None or len(self.shared_memory_group.engines) == 1:
            raise EngineDead(f"no progress: {len(self.scheduler.waiting)} requests wait and nothing can be planned")
        self.shared_memory_group.yield_to_others(self)

    def _record_plan(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.rows += len(plan.slices)
        if self.step_history is not None:
            self.step_history.record_plan(self.stats.steps, plan)
        for birth in plan.new_slots:
            # Whoever was swapped in without a row, a step being in flight, may have left again, its slot be another's.
            resident = self.scheduler.by_slot.get(birth.slot)
            if birth.parent_slot >= 0 or resident is None or resident[1].id != birth.seq_id:
                continue
            request = resident[0]
            if request.scheduled_time is None:
                request.scheduled_time = self.clock()
                self.stats.prompt_tokens += birth.prompt_len

    def finish_outputs(self, outputs: list[BranchOutput]) -> list[BranchOutput]:
        """Forget the requests that these outputs end, and prefixes not registered; nobody hears of those in "
        "`prefix_recompute_ids`."""
        asked = (
            [output for output in outputs if output.request_id not in self.prefix_recompute_ids]
            if self.prefix_recompute_ids
            else outputs
        )
        for output in outputs:
            if output.done:
                self.num_ended += 1
                self.prefix_recompute_ids.discard(output.request_id)
                request = self.requests[output.request_id]
                self._remove_request(request)
                if request.prefix_name is not None and output.finish_reason in ("abort", "error"):
                    self.prefix_lengths.pop(request.prefix_name, None)
        return asked

    def close(self) -> None:
        """Release the runner. The engine can't be used afterwards."""
        self.in_flight.clear()
        self.runner.close()


def _waits_for_prefix_of(other: Sequence, seq: Sequence) -> bool:
    """`seq` is still to compute what `other` shares with it."""
    computing = seq.prefix_source is not None or seq.planned < other.planned
    return other.prefix_source is seq and other.finish_reason is None and computing


def _waits_for_caller(request: Request) -> bool:
    """Its branches have all that they asked for: whoever added it says how they go on."""
    return request.method is not None and len(request.candidates) == len(request.live_seqs)
