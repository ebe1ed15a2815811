"""The engine: requests in, outputs out, one step at a time. A step is `schedule -> submit -> update`.

The engine connects a scheduler to a runner through two messages (quire.protocol.step_plan). It handles no tensors,
pages or text. The clock is an argument, so a simulator is this engine with another runner and clock.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from quire.core.checked_method import CheckedMethod, make_checked_method
from quire.core.decoding import method_context
from quire.core.grammar_masks import build_masks, needs_proposals
from quire.core.image_registry import ImageRegistry
from quire.core.outputs import BranchOutput, EngineStats, OutputBuilder
from quire.core.recovery import RunnerRestarter
from quire.core.request import Request, RequestStatus
from quire.core.runner import DeferredMaskRunner, MonitoredRunner, Runner, SleepableRunner
from quire.core.scheduler import Scheduler
from quire.core.shared_memory import SharedMemoryGroup
from quire.core.sleep import SleepController
from quire.core.step_history import StepHistory
from quire.core.validation import EngineLimits, check_images, check_salt
from quire.errors import EngineDead, InputError, NotIdle, PrefixesFull, PrefixTaken, PromptTooLong, RanksLost
from quire.protocol.image_tiling import ImageTiling
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import StepPlan

T = TypeVar("T")
PREFIX_PARAMS = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
"""Sampling parameters of the requests that compute registered prefixes."""


class ValidatedRequest(NamedTuple):
    """A request that passed every check and is not queued yet."""

    tokens: list[int]
    max_tokens: int
    width: int
    method: CheckedMethod | None
    images: tuple[ImageItem, ...]


class Engine:
    """`add` requests, then `step` until `has_unfinished_requests` is False. Not thread-safe: one thread drives it."""

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
        shared_memory_group: SharedMemoryGroup | None = None,
        restarter: RunnerRestarter | None = None,
    ) -> None:
        """`depth`: the most steps in flight; the runner's by default. `tiling`: how the model tiles images; None:
        images are not checked against a tiling. `pooling`: the default of requests that name none.
        `shared_memory_group`: the engines that share this one's KV memory. `restarter`: starts another runner when this
        one is lost; without it RanksLost is raised."""
        self.scheduler, self.runner, self.limits, self.clock = scheduler, runner, limits, clock
        self.pooling, self.image_registry = pooling, ImageRegistry(tiling)
        self.depth = depth or runner.depth
        self.seed = seed
        self.requests: dict[str, Request] = {}
        self.in_flight: deque[tuple[StepPlan, Any]] = deque()
        self.is_awaiting_masks = False  # the last step in flight has no masks yet
        self.pending_outputs: list[BranchOutput] = []  # outputs for the next `step` to return
        self.stats = EngineStats()
        self.step_history: StepHistory | None = None  # see `watch_steps`
        self.output_builder = OutputBuilder(self.stats)
        self.num_added = self.num_batches = 0
        self.num_ended = 0  # ended requests, without those that a stop string ended
        self.shared_memory_group = shared_memory_group
        if shared_memory_group is not None:
            shared_memory_group.add(self)
        self.restarter = restarter
        self.prefix_recompute_ids: set[str] = set()  # requests that compute registered prefixes again
        self.prefix_lengths: dict[str, int] = {}  # by name, of prefixes that are registered or being computed
        self.sleep_controller = SleepController()

    # Requests

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
        """Queue a request. Raise InputError (PromptTooLong) or Overloaded and change nothing if it can't be accepted.
        `may_wait`: the request's method may suspend its branches until the caller continues them."""
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
        hands_over: bool = False,
    ) -> None:
        """Queue a request for each (id, prompt), all or none. Raises as `add`. The requests form one batch of `client`
        (see quire.core.request_queue). `images` are the images of each prompt, empty if no prompt has any. `pixels` are
        the pixels of all of them; those that the runner lacks are sent to it. `params` are resolved already (see
        quire.text.text_backend): words have become token ids. With `hands_over` they compute prompts for another
        engine, which counts the requests."""
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
            is_joined = not self.scheduler.memory.kv_config.sight
            self.image_registry.check([request.images for request in accepted.values()], pixels, is_joined)
        self.num_batches += 1
        for id, validated in accepted.items():
            self._enqueue(id, validated, params, salt, prefix, client, hands_over)
        for image in self.image_registry.take_new(pixels):
            self.send_to_runner(self.runner.add_image, image)

    def _validate(
        self, prompt: Seq[int], params: SamplingParams, may_wait: bool, images: tuple[ImageItem, ...]
    ) -> ValidatedRequest:
        kv_config = self.scheduler.memory.kv_config
        tokens = self.limits.check_prompt(prompt, () if kv_config.sight else images, params.min_output)
        if images and params.prompt_logprobs is not None and max(tokens) >= self.limits.vocab_size:
            raise InputError(
                f"prompt_logprobs is {params.prompt_logprobs}, and token {max(tokens)}, which stands for an image, has "
                f"no log-probability: only tokens below {self.limits.vocab_size} have one",
                "prompt_logprobs",
            )
        method = make_checked_method(params, self.limits.vocab_size, may_wait)
        width = params.width if method is None else method.width
        fits, max_seqs = self.scheduler.memory.fits, self.scheduler.max_seqs
        check_images(images, tokens, kv_config)
        if images:
            fits = partial(fits, images=images)
        if kv_config.both_ways and len(tokens) > self.scheduler.token_budget:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, which attend to one another both ways: one step computes all of "
                f"them, and a step has {self.scheduler.token_budget} at most (--max-num-batched-tokens)",
                "prompt",
            )
        widest = max((image.num_tokens for image in images), default=0)
        if kv_config.whole_images and widest > self.scheduler.token_budget:
            raise PromptTooLong(
                f"an image has {widest} tokens, which attend to one another: one step computes all of them, and a step "
                f"has {self.scheduler.token_budget} at most (--max-num-batched-tokens)",
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
        hands_over: bool = False,
    ) -> None:
        seed = params.seed % 2**63 if params.seed is not None else branch_seed(self.seed, self.num_added << 20)
        self.num_added += 1
        seq = Sequence(self.scheduler.new_seq_id(), validated.tokens, seed=seed, cache_salt=salt)
        seq.images = validated.images
        seq.matcher = None if params.grammar is None else params.grammar.new_matcher()
        seq.num_forks, seq.max_total_len = validated.width - 1, len(validated.tokens) + validated.max_tokens
        if params.prompt_logprobs is not None or params.pooling == "mean":  # every position must be computed
            seq.max_prefix_hit = 0
        request = Request(id, seq, params, arrival_time=self.clock(), max_tokens=validated.max_tokens)
        request.method, request.prefix_name, request.images = validated.method, prefix, validated.images
        request.client, request.batch_id, request.hands_over = client, self.num_batches, hands_over
        self.image_registry.add_request(validated.images)
        self.requests[id] = request
        self.scheduler.add(request)

    def abort(self, id: str) -> None:
        """End a request. The next step returns its last outputs, with finish_reason "abort". Ignore unknown ids."""
        request = self.requests.get(id)
        if request is None:
            return
        request.aborted = True
        unfinished = [seq for seq in request.live_seqs if seq.finish_reason is None]
        for seq in unfinished:
            self.scheduler.finish(request, seq, "abort")
        self.pending_outputs += self.finish_outputs(self.output_builder.build_aborted(request, unfinished))

    def stop(self, id: str, branch: int, reason: str) -> bool | None:
        """End a branch in whose text the client found a stop string; no output reports its end. Ignore unknown branches
        and those that ended meanwhile.

        Return True if this ended the request. Return None, and end nothing, while other branches wait for a prefix that
        this one recomputes after a preemption: call again after a step. If the request has a method, all its branches
        end, since clients see only tokens that all of them share."""
        request = self.requests.get(id)
        if request is None:
            return False
        if request.method is not None:
            return self._stop_branches(request, reason)
        seq = next((seq for seq in request.live_seqs if seq.branch_index == branch), None)
        if seq is None or seq.finish_reason is not None:
            return False
        if any(_waits_for_prefix_of(other, seq) for other in request.live_seqs):
            return None
        self.scheduler.finish(request, seq, "stop", reason)
        ended = self.output_builder.record_stop(request, seq)
        if ended:
            self._remove_request(request)
        return ended

    def _remove_request(self, request: Request) -> None:
        """Forget a request that has ended, and remove the images from the runner that only this request used."""
        del self.requests[request.id]
        for key in self.image_registry.remove_request(request.images):
            self.send_to_runner(self.runner.remove_image, key)

    def send_to_runner(self, send: Callable[[T], None], item: T) -> None:
        """Call `send(item)`, a method of the runner. If the runner is lost and will be restarted, ignore the failure:
        the restart sends all images again."""
        try:
            send(item)
        except RanksLost:
            if self.restarter is None:
                raise

    def _stop_branches(self, request: Request, reason: str) -> bool:
        request.aborted = True  # suppresses further outputs
        for seq in [seq for seq in request.live_seqs if seq.finish_reason is None]:
            self.scheduler.finish(request, seq, "stop", reason)
        self.output_builder.record_stop_of_all(request)
        self._remove_request(request)
        return True

    def lift_queue_limit(self) -> None:
        """Accept any number of waiting requests, for callers that add all of theirs at once."""
        self.limits = self.limits._replace(max_queued=sys.maxsize)

    # Branches that the caller continues (see quire.text.session)

    def append_tokens(self, request: Request, seq: Sequence, tokens: Seq[int]) -> None:
        """Append tokens to a branch that is not in flight. The next steps compute them and then its candidates."""
        request.candidates.pop(seq.id, None)
        seq.tokens += tokens

    def fork_branch(self, request: Request, seq: Sequence) -> Sequence:
        """Fork a new branch of a running request from `seq`, which has its candidates and is not in flight. The branch
        has the same candidates, unless forking preempted the request."""
        candidates = request.candidates[seq.id]
        child = self.scheduler.method_driver.fork(request, seq)
        if request.status is RequestStatus.RUNNING:
            request.candidates[child.id] = candidates
        return child

    def free_branch(self, request: Request, seq: Sequence) -> None:
        """End a branch; those forked from it remain."""
        request.candidates.pop(seq.id, None)
        self.scheduler.finish(request, seq, "stop")

    # Prefixes

    def register_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Compute `tokens` and pin them as the prefix `name` (PagedAttention §4.4). An output of request "prefix:NAME"
        reports the end: with finish_reason "error" it failed. Raise PrefixTaken, PrefixesFull, or as `add`."""
        memory = self.scheduler.memory
        if self.scheduler.clip_chunk is not None:
            raise PrefixesFull(
                f"the prefix {name[:60]!r} can't be registered: what this model keeps of a prompt depends on all its "
                "tokens",
                "prefix",
            )
        if name in self.prefix_lengths:
            raise PrefixTaken(f"a prefix called {name[:60]!r} is registered already", "name")
        if memory.prefix_cache is None or not memory.prefix_cache.can_pin(len(tokens)):
            raise PrefixesFull(
                f"a prefix of {len(tokens)} tokens exceeds the memory that is left for registered prefixes "
                "(--prefix-tokens)",
                "prefix",
            )
        self.add(f"prefix:{name}", tokens, PREFIX_PARAMS, prefix=name)
        self.prefix_lengths[name] = len(tokens)

    def recompute_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Queue a registered prefix again, as the memory has lost it, even if the queue is full."""
        self._enqueue(f"prefix:{name}", self._validate(tokens, PREFIX_PARAMS, False, ()), PREFIX_PARAMS, "", name)

    def release_prefix(self, name: str) -> bool:
        """Unregister a prefix. Return False if there is none of that name."""
        if self.prefix_lengths.pop(name, None) is None:
            return False
        if self.sleep_controller.saved_prefixes.pop(name, None) is not None:  # the engine sleeps
            return True
        request = self.requests.get(f"prefix:{name}")
        if request is not None and request.prefix_name == name:
            self.abort(request.id)
        assert self.scheduler.memory.prefix_cache is not None, "a prefix is registered without a prefix cache"
        self.scheduler.memory.prefix_cache.unpin(name)
        return True

    def reset_prefix_cache(self) -> int:
        """Forget all cached images, and all cached prefixes except registered ones. Return the number of pages that
        were freed. Running requests keep their pages, which later requests can't hit."""
        prefix_cache = self.scheduler.memory.prefix_cache
        return 0 if prefix_cache is None else prefix_cache.reset()

    # Sleep

    def check_sleep_level(self, level: int) -> None:
        """Raise InputError if the engine can't sleep at `level`."""
        self.sleep_controller.check_level(level)
        if self.shared_memory_group is not None:
            raise InputError("models that share a pool of KV memory don't sleep: close one instead", "level")
        if not isinstance(self.runner, SleepableRunner):
            raise InputError("the runner of this engine can't sleep", "level")

    def sleep(self, level: int) -> None:
        """Release the KV memory and the weights, which move to host memory (level 1) or are dropped (2). Cached
        prefixes are lost. Raise InputError if the engine can't sleep at `level`, NotIdle while it has requests; then
        nothing changed."""
        self.check_sleep_level(level)
        if self.has_unfinished_requests:
            running, waiting = len(self.scheduler.running), len(self.requests) - len(self.scheduler.running)
            raise NotIdle(f"{running} requests run and {waiting} wait: sleep again once they have ended")
        assert isinstance(self.runner, SleepableRunner), "checked above"
        self.scheduler.new_slots.clear()  # of sequences that have left since
        self.sleep_controller.sleep(level, self.runner, self.scheduler.memory)

    def wake(self, tags: Seq[str] | None = None) -> None:
        """Take back what `tags` name, everything by default. Once nothing is released any more, requests are accepted
        and registered prefixes are computed again. Raise InputError for unknown tags. If the runner raises, what it did
        not take back stays released."""
        for name, tokens in self.sleep_controller.wake(tags, self.runner).items():
            self.recompute_prefix(name, tokens)

    # Step

    @property
    def has_unfinished_requests(self) -> bool:
        """Return True if requests, steps in flight or outputs are left."""
        return bool(self.pending_outputs) or self.scheduler.has_unfinished_requests

    def step(self) -> list[BranchOutput]:
        """Plan and submit until `depth` steps are in flight, then process the result of the oldest. Return its outputs:
        none if all that is left waits for its caller or for engines that share the memory. Raise EngineDead if nothing
        can be planned although no caller is waited for; Overloaded if the other engines wait for their callers."""
        outputs, self.pending_outputs = self.pending_outputs, []
        if self.shared_memory_group is not None and self.shared_memory_group.should_skip_step(self):
            return outputs
        try:
            idle = not self._advance(outputs) and not outputs
        except RanksLost as lost:
            return outputs + self._recover(lost)
        if idle and self.scheduler.has_unfinished_requests and not any(map(_waits_for_caller, self.scheduler.running)):
            self._handle_no_progress()
        return outputs

    def check_runner(self) -> None:
        """Restart the runner if it is lost. Call it while the engine is idle; the runner must have `check`."""
        try:
            cast(MonitoredRunner, self.runner).check()
        except RanksLost as lost:
            self.pending_outputs += self._recover(lost)

    def step_for_others(self) -> bool:
        """Run a step that frees memory for another engine; the next `step` returns its outputs. Return False if there
        was nothing to do."""
        return self._advance(self.pending_outputs)

    def _advance(self, outputs: list[BranchOutput]) -> bool:
        """Plan and submit, then add the outputs of the oldest step in flight to `outputs`. Return False if none is."""
        self._fill()
        if not self.in_flight:
            return False
        if self.is_awaiting_masks and len(self.in_flight) == 1:
            self._submit_masks()
        plan, ticket = self.in_flight.popleft()
        result = self.runner.collect(ticket)
        self.stats.step_seconds += result.seconds
        self.stats.idle_seconds += result.idle_seconds
        self.stats.computed_tokens += sum(len(row.tokens) for row in plan.slices)
        if self.scheduler.drafts_in_flight:
            self.stats.record_drafts(plan, result)
        if self.step_history is not None:
            self.step_history.record_result(self.stats.steps - len(self.in_flight), result.seconds)
        events = self.scheduler.update(plan, result)
        if self.is_awaiting_masks and len(self.in_flight) == 1:
            self._submit_masks()
        if self.depth > 1 and not self.in_flight and self.scheduler.speculator is not None:
            self._fill()  # the device has nothing to do: drafts had to be verified before this step could be planned
        outputs += self.finish_outputs(self.output_builder.build(events, self.clock()))
        return True

    def _fill(self) -> None:
        """Plan and submit until `depth` steps are in flight."""
        while len(self.in_flight) < self.depth and not self.is_awaiting_masks:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._record_plan(plan)
            self._submit(plan)

    def _submit(self, plan: StepPlan) -> None:
        """Submit a plan to the runner. Grammar masks depend on all earlier tokens, so with steps in flight the step
        starts without masks, and they are submitted once the results of those steps are processed. Masks after tokens
        of the draft model are made while the model computes these, by the next `step`."""
        scheduler = self.scheduler
        if scheduler.num_grammar_requests:
            must_wait = needs_proposals(plan.slices, scheduler.by_slot)
            if scheduler.deferred_masks or must_wait:
                assert isinstance(self.runner, DeferredMaskRunner), "masks are deferred"
                self.is_awaiting_masks = True
                self.in_flight.append((plan, self.runner.submit_without_masks(plan)))
                if len(self.in_flight) == 1 and not must_wait:
                    self._submit_masks()
                return
            plan = plan._replace(masks=build_masks(plan.slices, scheduler.by_slot, scheduler.eos_ids, {}))
        self.in_flight.append((plan, self.runner.submit(plan)))

    def _submit_masks(self) -> None:
        assert isinstance(self.runner, DeferredMaskRunner), "masks are deferred"
        (plan, ticket), by_slot = self.in_flight.pop(), self.scheduler.by_slot
        proposals = self.runner.proposed_tokens(ticket) if needs_proposals(plan.slices, by_slot) else {}
        masks = build_masks(plan.slices, by_slot, self.scheduler.eos_ids, proposals)
        self.in_flight.append((plan, self.runner.submit_masks(ticket, masks)))
        self.is_awaiting_masks = False

    def _handle_no_progress(self) -> None:
        """Let other engines of a shared memory go on. Raise EngineDead if there are none."""
        if self.shared_memory_group is None or len(self.shared_memory_group.engines) == 1:
            raise EngineDead(f"no progress: {len(self.scheduler.waiting)} requests wait and nothing can be planned")
        self.shared_memory_group.yield_to_others(self)

    def _record_plan(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.rows += len(plan.slices)
        if self.step_history is not None:
            self.step_history.record_plan(self.stats.steps, plan)
        for init in plan.new_slots:
            # A sequence that was swapped in without a slice may have been preempted since, and its slot reused.
            occupant = self.scheduler.by_slot.get(init.slot)
            if init.parent_slot >= 0 or occupant is None or occupant[1].id != init.seq_id:
                continue
            request = occupant[0]
            if request.scheduled_time is None:
                request.scheduled_time = self.clock()
                self.stats.prompt_tokens += 0 if request.hands_over else init.prompt_len

    def finish_outputs(self, outputs: list[BranchOutput]) -> list[BranchOutput]:
        """Forget the requests that `outputs` end, and the prefixes that could not be registered. Return the outputs
        without those of prefixes that are computed again."""
        reported = outputs
        if self.prefix_recompute_ids:
            reported = [output for output in outputs if output.request_id not in self.prefix_recompute_ids]
        for output in outputs:
            if output.done:
                self.num_ended += 1
                self.prefix_recompute_ids.discard(output.request_id)
                request = self.requests[output.request_id]
                self._remove_request(request)
                if request.prefix_name is not None and output.finish_reason in ("abort", "error"):
                    self.prefix_lengths.pop(request.prefix_name, None)
        return reported

    def watch_steps(self, on: bool) -> None:
        """Start recording `step_history`, unless it is being recorded; or stop and discard it."""
        if not on:
            self.step_history = None
        elif self.step_history is None:
            self.step_history = StepHistory(self.scheduler.preemption_counts)

    # Recovery

    def _recover(self, lost: RanksLost) -> list[BranchOutput]:
        """Replace the lost runner and compute every sequence again. Return the outputs of requests that this ends.
        Raise EngineDead if no other runner can be started."""
        if self.restarter is None:
            raise lost
        self.in_flight.clear()
        self.is_awaiting_masks = False
        self.runner.close()
        prefix_cache = self.scheduler.memory.prefix_cache
        num_restarts = self.restarter.num_restarts
        try:
            self.runner, memory = self.restarter.restart(lost)
        finally:
            self.stats.restarts += self.restarter.num_restarts - num_restarts
        outputs = self.finish_outputs(self.output_builder.build(self.scheduler.reset(memory), self.clock()))
        self.sleep_controller.restore(self.runner)
        for image in self.image_registry.runner_pixels.values():
            self.send_to_runner(self.runner.add_image, image)
        if prefix_cache is not None:
            if prefix_cache.cache_log is not None and memory.prefix_cache is not None:
                memory.prefix_cache.continue_log(prefix_cache.cache_log)
            prefixes = prefix_cache.registered_prefixes.items()
            for request in [self._prefix_request(name, prefix.tokens) for name, prefix in prefixes]:
                self.scheduler.waiting.requeue(request)
        return outputs

    def _prefix_request(self, name: str, tokens: list[int]) -> Request:
        """Return a request that computes a registered prefix again. Its outputs are not reported, and requests that
        came before it may use the prefix."""
        seq = Sequence(self.scheduler.new_seq_id(), list(tokens))
        seq.max_total_len = len(tokens) + 1
        request = Request(f"prefix:{name}", seq, PREFIX_PARAMS, arrival_time=self.clock(), max_tokens=1)
        request.prefix_name = name
        self.requests[request.id] = request
        self.prefix_recompute_ids.add(request.id)
        return request

    def close(self) -> None:
        """Close the runner. The engine can't be used afterwards."""
        self.in_flight.clear()
        self.runner.close()


def _waits_for_prefix_of(other: Sequence, seq: Sequence) -> bool:
    """Return True if `seq` has yet to compute the prefix that `other` shares with it."""
    computing = seq.prefix_source is not None or seq.planned < other.planned
    return other.prefix_source is seq and other.finish_reason is None and computing


def _waits_for_caller(request: Request) -> bool:
    """Return True if every branch has its candidates and the caller must continue them."""
    return request.method is not None and len(request.candidates) == len(request.live_seqs)
