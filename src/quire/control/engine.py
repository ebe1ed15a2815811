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

from quire.control.checked import Checked, checked_method
from quire.control.decoding import context_of
from quire.control.edge import Limits, check_media, check_salt
from quire.control.matching import masks_of
from quire.control.outcomes import Outcomes, Output, Stats
from quire.control.pictures import Pictures
from quire.control.recent import Recent
from quire.control.recovery import Restarts, recover
from quire.control.request import Request, Sequence
from quire.control.rest import PREFIX, Rest
from quire.control.runners import Holding, Runner
from quire.control.scheduler import Scheduler
from quire.control.turns import Turns
from quire.errors import EngineDead, InputError, PrefixesFull, PrefixTaken, PromptTooLong, RanksLost
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.pictures import Tiling
from quire.vocabulary.plan import StepPlan
from quire.vocabulary.seeds import branch_seed
from quire.vocabulary.structured import Maker


class Accepted(NamedTuple):
    """A request that passed every check and isn't queued yet."""

    tokens: list[int]
    max_tokens: int
    width: int
    method: Checked | None
    media: tuple[Medium, ...]


class Engine:
    """`add` requests, `step` until nothing is left. Not thread-safe: one thread drives it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        limits: Limits,
        *,
        clock: Callable[[], float],
        seed: int = 0,
        depth: int | None = None,
        tiling: Tiling | None = None,
        pooling: str = "last",
    ) -> None:
        """`tiling` is how the model's pictures are cut; None: they are taken as they come. `pooling`: that of requests
        that leave it to the engine."""
        self.scheduler, self.runner, self.limits, self.clock = scheduler, runner, limits, clock
        self.pooling, self.pictures = pooling, Pictures(tiling)
        self.depth = depth or runner.depth
        self.seed = seed
        self.requests: dict[str, Request] = {}
        self.flight: deque[tuple[StepPlan, Any]] = deque()
        self.held = False  # the last of them waits for masks
        scheduler.late = self.depth > 1 and isinstance(runner, Holding)
        self.outbox: list[Output] = []  # outputs that no step brought: aborts
        self.stats = Stats()
        self.recent: Recent | None = None  # the last steps, while somebody watches
        self.outcomes = Outcomes(self.stats)
        self.added = self.batches = 0
        self.ended = 0  # requests, those ended by a stop string aside
        self.turns: Turns | None = None  # with engines that have the memory in common
        self.restarts: Restarts | None = None  # what to do once the runner is lost; None: nothing
        self.again: set[str] = set()  # requests that compute registered prefixes once more
        self.prefixes: dict[str, int] = {}  # registered ones, and those being computed: their lengths
        self.rest = Rest(self)
        self.grammars: Maker | None = None  # where fronts send forms of outputs to it

    # In

    def add(
        self,
        id: str,
        prompt: Seq[int],
        params: SamplingParams,
        *,
        salt: str = "",
        prefix: str | None = None,
        waits: bool = False,
        media: tuple[Medium, ...] = (),
        pixels: Seq[Pixels] = (),
    ) -> None:
        """Queue a request. Raises InputError (PromptTooLong) or Overloaded, and then nothing changed. `waits`: its
        method may leave its branches to whoever added it (text.session)."""
        self.add_all(
            [(id, prompt)], params, salt=salt, prefix=prefix, waits=waits, media=[media] if media else (), pixels=pixels
        )

    def add_all(
        self,
        prompts: Seq[tuple[str, Seq[int]]],
        params: SamplingParams,
        *,
        salt: str = "",
        prefix: str | None = None,
        waits: bool = False,
        media: Seq[tuple[Medium, ...]] = (),
        pixels: Seq[Pixels] = (),
        client: str = "",
    ) -> None:
        """Queue a request for each (id, prompt), all or none. Raises as `add`. They are one batch of `client`'s: see
        quire.control.queue. `media` are the pictures of each prompt,
        where there are any, and `pixels` those of all of them; the runner gets what it hasn't. `params` are resolved
        already (see quire.text.stream): words are token ids here."""
        self.rest.check_awake()
        waiting = self.scheduler.waiting
        self.limits.check_queue(len(prompts), waiting.batches, len(waiting))
        check_salt(salt)
        params = self.limits.settled(params, self.pooling, self.scheduler.part is not None)
        accepted: dict[str, Accepted] = {}
        for i, (id, prompt) in enumerate(prompts):
            if id in self.requests or id in accepted:
                raise InputError(f"request id {id[:80]!r} is in use", "request_id")
            accepted[id] = self._accept(prompt, params, waits, tuple(media[i]) if media else ())
        if media:
            joins = not self.scheduler.memory.geometry.sight
            self.pictures.check([one.media for one in accepted.values()], pixels, joins)
        self.batches += 1
        for id, one in accepted.items():
            self._queue(id, one, params, salt, prefix, client)
        for picture in self.pictures.keep(pixels):
            self.say(self.runner.see, picture)

    def _accept(self, prompt: Seq[int], params: SamplingParams, waits: bool, media: tuple[Medium, ...]) -> Accepted:
        geometry = self.scheduler.memory.geometry
        tokens = self.limits.tokens(prompt, () if geometry.sight else media)
        if media and params.prompt_logprobs is not None and max(tokens) >= self.limits.vocab_size:
            raise InputError(
                f"prompt_logprobs is {params.prompt_logprobs}, and token {max(tokens)}, which stands for a picture, is "
                f"none of the {self.limits.vocab_size} that have log-probabilities",
                "prompt_logprobs",
            )
        method = checked_method(params, self.limits.vocab_size, waits)
        width = params.width if method is None else method.width
        fits, max_seqs = self.scheduler.memory.fits, self.scheduler.max_seqs
        check_media(media, tokens, geometry)
        if media:
            fits = partial(fits, media=media)
        if geometry.both_ways and len(tokens) > self.scheduler.budget:
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens, which attend to one another both ways: one step computes all of "
                f"them, and a step has {self.scheduler.budget} at most (--max-num-batched-tokens)",
                "prompt",
            )
        max_tokens = self.limits.max_tokens(len(tokens), params, width, max_seqs, fits)
        if method is not None:
            method.settle(context_of(params, max_tokens, self.scheduler.eos_ids))
        return Accepted(tokens, max_tokens, width, method, media)

    def _queue(
        self, id: str, accepted: Accepted, params: SamplingParams, salt: str, prefix: str | None, client: str = ""
    ) -> None:
        seed = params.seed % 2**63 if params.seed is not None else branch_seed(self.seed, self.added << 20)
        self.added += 1
        seq = Sequence(self.scheduler.new_id(), accepted.tokens, seed=seed, salt=salt)
        seq.media = accepted.media
        seq.matcher = None if params.grammar is None else params.grammar.matcher()
        seq.branches, seq.final = accepted.width - 1, len(accepted.tokens) + accepted.max_tokens
        if params.prompt_logprobs is not None or params.pooling == "mean":  # all of its rows count
            seq.reusable = 0
        request = Request(id, seq, params, arrival=self.clock(), max_tokens=accepted.max_tokens)
        request.method, request.prefix, request.media = accepted.method, prefix, accepted.media
        request.client, request.batch = client, self.batches
        self.pictures.came(accepted.media)
        self.requests[id] = request
        self.scheduler.add(request)

    def abort(self, id: str) -> None:
        """End a request; its last outputs, with finish_reason "abort", come with the next step. Unknown ids pass."""
        request = self.requests.get(id)
        if request is None:
            return
        request.aborted = True
        told = [seq for seq in request.live if seq.finish is None]
        for seq in told:
            self.scheduler.finish(request, seq, "abort")
        self.outbox += self.told(self.outcomes.aborted(request, told))

    def stop(self, id: str, branch: int, reason: str) -> bool | None:
        """End a branch whose text has a stop string, as its reader found: no output tells of it. Unknown ones and those
        that ended meanwhile pass. Whether it was the last of its request; None: not yet, as other branches wait for
        what it computes for them after a preemption. Ask again after a step.

        What a method's readers see before its end is what all its branches agree on, so all of them end."""
        request = self.requests.get(id)
        if request is not None and request.method is not None:
            return self._stop_all(request, reason)
        seq = next((seq for seq in request.live if seq.index == branch), None) if request is not None else None
        if request is None or seq is None or seq.finish is not None:
            return False
        if any(_awaits(other, seq) for other in request.live):
            return None
        self.scheduler.finish(request, seq, "stop", reason)
        ended = self.outcomes.stopped(request, seq)
        if ended:
            self._forget(request)
        return ended

    def _forget(self, request: Request) -> None:
        """A request has ended. The runner keeps no picture that only this one had."""
        del self.requests[request.id]
        for key in self.pictures.left(request.media):
            self.say(self.runner.forget, key)

    def say(self, say: Callable[[Any], None], what: Any) -> None:
        """Say what the runner is to keep. To one that is lost it will be said when there is another one."""
        try:
            say(what)
        except RanksLost:
            if self.restarts is None:
                raise

    def _stop_all(self, request: Request, reason: str) -> bool:
        request.aborted = True  # no more is told of it
        for seq in [seq for seq in request.live if seq.finish is None]:
            self.scheduler.finish(request, seq, "stop", reason)
        self.outcomes.stopped_together(request)
        self._forget(request)
        return True

    def register_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Compute `tokens` and pin them as the prefix `name` (PagedAttention §4.4); an output of request "prefix:NAME"
        tells when it is ready, or by finish_reason "error" that it is not. PrefixTaken, PrefixesFull, or as `add`."""
        memory = self.scheduler.memory
        if self.scheduler.part is not None:
            raise PrefixesFull(
                f"the prefix {name[:60]!r} can't be kept: what is left of a prompt in this model depends on all of it",
                "prefix",
            )
        if name in self.prefixes:
            raise PrefixTaken(f"a prefix called {name[:60]!r} is registered already", "name")
        if memory.prefixes is None or not memory.prefixes.room(len(tokens)):
            raise PrefixesFull(
                f"a prefix of {len(tokens)} tokens exceeds what is left of what is kept for prefixes (--prefix-tokens)",
                "prefix",
            )
        self.add(f"prefix:{name}", tokens, PREFIX, prefix=name)
        self.prefixes[name] = len(tokens)

    def compute_prefix(self, name: str, tokens: Seq[int]) -> None:
        """Again, as the memory has lost it; whatever waits in the queue."""
        self._queue(f"prefix:{name}", self._accept(tokens, PREFIX, False, ()), PREFIX, "", name)

    def release_prefix(self, name: str) -> bool:
        """Let go of a prefix. False if there is none of that name."""
        if self.prefixes.pop(name, None) is None:
            return False
        if self.rest.prefixes.pop(name, None) is not None:  # it is to be computed when the engine wakes up
            return True
        request = self.requests.get(f"prefix:{name}")
        if request is not None and request.prefix == name:
            self.abort(request.id)
        assert self.scheduler.memory.prefixes is not None, "a prefix was registered where none is kept"
        self.scheduler.memory.prefixes.unpin(name)
        return True

    def reset_prefix_cache(self) -> int:
        """Forget every cached prefix and picture; registered prefixes stay. Requests that run keep what they hold, and
        nobody else finds it. Returns the number of pages that were emptied."""
        prefixes = self.scheduler.memory.prefixes
        return 0 if prefixes is None else prefixes.reset()

    # Step

    @property
    def unfinished(self) -> bool:
        """There is work or output left."""
        return bool(self.outbox) or self.scheduler.unfinished

    def step(self) -> list[Output]:
        """Plan and submit until `depth` steps are in flight, then take in the oldest. Returns what it brought: nothing
        if all that is left waits for its caller, or for engines that have the memory in common. EngineDead if nothing
        can be done and nobody is waited for; Overloaded if those engines wait for their callers."""
        outputs, self.outbox = self.outbox, []
        if self.turns is not None and self.turns.passes(self):
            return outputs
        try:
            idle = not self._advance(outputs) and not outputs
        except RanksLost as lost:
            return outputs + recover(self, lost)
        if idle and self.scheduler.unfinished and not any(map(_waits, self.scheduler.running)):
            self._stuck()
        return outputs

    def check(self) -> None:
        """While nothing is to be done: notice a runner, which has a `check`, that is lost, and go on with another."""
        try:
            self.runner.check()  # type: ignore[attr-defined]
        except RanksLost as lost:
            self.outbox += recover(self, lost)

    def ahead(self) -> bool:
        """A step for the sake of others, whose outputs the next `step` returns. Whether there was anything to do."""
        return self._advance(self.outbox)

    def _advance(self, outputs: list[Output]) -> bool:
        """Plan and submit, and add what the oldest step in flight brings to `outputs`. False if there is none."""
        while len(self.flight) < self.depth and not self.held:
            plan = self.scheduler.schedule()
            if plan is None:
                break
            self._planned(plan)
            self._submit(plan)
        if not self.flight:
            return False
        plan, ticket = self.flight.popleft()
        result = self.runner.collect(ticket)
        self.stats.step_seconds += result.seconds
        self.stats.idle_seconds += result.idle
        self.stats.computed_tokens += sum(len(row.tokens) for row in plan.rows)
        if self.recent is not None:
            self.recent.collected(self.stats.steps - len(self.flight), result.seconds)
        events = self.scheduler.update(plan, result)
        if self.held and len(self.flight) == 1:
            self._release()
        outputs += self.told(self.outcomes.of(events, self.clock()))
        return True

    def _submit(self, plan: StepPlan) -> None:
        """Hand a plan to the runner. What the rows of a grammar may draw depends on all tokens before: with steps in
        flight they begin, and draw once those are taken in."""
        if not self.scheduler.late or not self.scheduler.matched:
            self.flight.append((plan, self.runner.submit(plan)))
            return
        assert isinstance(self.runner, Holding), "masks may be late"
        self.held = True
        self.flight.append((plan, self.runner.hold(plan)))
        if len(self.flight) == 1:
            self._release()

    def _release(self) -> None:
        assert isinstance(self.runner, Holding), "masks may be late"
        plan, ticket = self.flight.pop()
        self.flight.append((plan, self.runner.release(ticket, masks_of(plan.rows, self.scheduler.by_slot))))
        self.held = False

    def _stuck(self) -> None:
        """Nothing can be planned: others hold the memory, or something is wrong."""
        if self.turns is None or len(self.turns.engines) == 1:
            raise EngineDead(f"no progress: {len(self.scheduler.waiting)} requests wait and nothing can be planned")
        self.turns.give_way(self)

    def _planned(self, plan: StepPlan) -> None:
        self.stats.steps += 1
        self.stats.rows += len(plan.rows)
        if self.recent is not None:
            self.recent.planned(self.stats.steps, plan)
        for birth in plan.births:
            # Whoever was swapped in without a row, a step being in flight, may have left again, its slot be another's.
            resident = self.scheduler.by_slot.get(birth.slot)
            if birth.parent >= 0 or resident is None or resident[1].id != birth.seq:
                continue
            request = resident[0]
            if request.scheduled is None:
                request.scheduled = self.clock()
                self.stats.prompt_tokens += birth.prompt_len

    def told(self, outputs: list[Output]) -> list[Output]:
        """Forget the requests that these outputs end, and prefixes not registered; nobody hears of those in `again`."""
        asked = [output for output in outputs if output.request not in self.again] if self.again else outputs
        for output in outputs:
            if output.done:
                self.ended += 1
                self.again.discard(output.request)
                request = self.requests[output.request]
                self._forget(request)
                if request.prefix is not None and output.finish_reason in ("abort", "error"):
                    self.prefixes.pop(request.prefix, None)
        return asked

    def close(self) -> None:
        """Release the runner. The engine can't be used afterwards."""
        self.flight.clear()
        self.runner.close()


def _awaits(other: Sequence, seq: Sequence) -> bool:
    """`seq` is still to compute what `other` shares with it."""
    computing = seq.sibling is not None or seq.planned < other.planned
    return other.sibling is seq and other.finish is None and computing


def _waits(request: Request) -> bool:
    """Its branches have all that they asked for: whoever added it says how they go on."""
    return request.method is not None and len(request.candidates) == len(request.live)
