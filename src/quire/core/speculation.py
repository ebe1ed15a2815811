"""Speculative decoding: which draft tokens a step verifies, and how many.

Draft tokens are guesses of a sequence's next tokens, which one step verifies (see SeqSlice). They come from earlier
tokens of the request (n-grams, "prompt lookup"), or from a draft model or a speculation head. Only the device has the
tokens of the latter: a plan has the markers FIRST_DRAFT - i in their place. They are proposed at the end of the step
before; the host processes that step's result and plans the next one meanwhile.

A draft token pays if it is likely enough to be accepted for the time that it takes. The probability is estimated for
each sequence, and the time from SpeculationCosts. There is no clock: the same calls give the same draft tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from quire.config import SPECULATION_HEADS
from quire.core.grammar_masks import cut_drafts
from quire.core.preemption_costs import SpeculationCosts
from quire.core.request import Request
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import FIRST_DRAFT, SeqSlice

FIRST_ACCEPTANCE = 0.7
"""The estimated probability that a draft token is accepted, before any was verified."""
FIRST_WEIGHT = 4.0  # the first estimate counts as much as this many verified tokens
DECAY = 0.9  # factor of the weight of earlier verifications at each verification
RETURN_PER_TOKEN = 0.98  # factor of the distance to FIRST_ACCEPTANCE for each token without a verification
MIN_GAIN = 1.15  # the least ratio of the value of draft tokens to their cost: both estimates are rough
MAX_INDEXED_TOKENS = 1 << 15  # of a sequence: the latest ones
MAX_LAG = 64
"""The tokens by which the draft model may lag behind while it is not used. Pages are published only as far as it has
computed them, too; catching up more often costs more passes."""
ROWS_PER_SKIP = 16  # once draft tokens do not pay, none are chosen for one call for each 16 decoding sequences


class StepDrafts(NamedTuple):
    """The draft tokens that a step verifies, by sequence id, and how many tokens the draft model proposes at the end of
    the step for the next one, by sequence id."""

    drafts: Mapping[int, tuple[int, ...]]
    proposals: Mapping[int, int]


NO_DRAFTS = StepDrafts({}, {})


class NgramIndex:
    """The latest positions of the n-grams of one sequence, for n from `shortest` to `longest`.

    A longer n-gram is added only when the shorter one at its end occurs again, so most tokens take one entry. A step
    costs O(new tokens), and at most 2 * MAX_INDEXED_TOKENS tokens are indexed.
    """

    __slots__ = ("begin", "end", "last_ends", "longest", "match", "shortest")

    def __init__(self, shortest: int, longest: int) -> None:
        self.shortest, self.longest = shortest, longest
        self.last_ends: dict[int, int] = {}  # hash of an n-gram -> where it ended the last time
        self.begin = self.end = 0  # the indexed tokens
        self.match = 0  # where the longest n-gram that ends at `end` ended the time before; 0: nowhere

    def extend(self, tokens: list[int]) -> None:
        """Add the tokens after the first `end` ones."""
        if len(tokens) - self.begin > 2 * MAX_INDEXED_TOKENS:
            self.begin = self.end = len(tokens) - MAX_INDEXED_TOKENS
            self.last_ends.clear()
        ends = self.last_ends
        for end in range(self.end + 1, len(tokens) + 1):
            self.match = 0
            for n in range(self.shortest, min(self.longest, end - self.begin) + 1):
                key = hash(tuple(tokens[end - n : end]))
                before = ends.get(key)
                ends[key] = end
                if before is None:
                    break  # no longer one occurred either
                self.match = before
                if n < self.longest and before - n > self.begin:
                    ends.setdefault(hash(tuple(tokens[before - n - 1 : before])), before)
        self.end = len(tokens)

    def propose(self, tokens: list[int], count: int) -> tuple[int, ...]:
        """Return the `count` tokens that followed the longest n-gram at the end of `tokens` the last time it occurred,
        repeated if the repetition is not over; () if none occurred before."""
        self.extend(tokens)
        if not self.match:
            return ()
        period = len(tokens) - self.match
        return tuple(tokens[self.match + i % period] for i in range(count))


class Acceptance:
    """The estimated probability that a draft token of a sequence is accepted if those before it are: a decayed mean."""

    __slots__ = ("hits", "length", "trials")

    def __init__(self) -> None:
        self.hits, self.trials = FIRST_ACCEPTANCE * FIRST_WEIGHT, FIRST_WEIGHT
        self.length = 0  # of the sequence, at the last verification

    def record(self, drafted: int, accepted: int, length: int) -> None:
        """Record that `accepted` of `drafted` tokens were accepted. Those after the first rejected one do not count."""
        self.hits = self.hits * DECAY + accepted
        self.trials = self.trials * DECAY + min(accepted + 1, drafted)
        self.length = length

    def rate(self, length: int) -> float:
        """Return the estimate for a sequence that has `length` tokens now. Without verifications it approaches
        FIRST_ACCEPTANCE, so that draft tokens are tried again."""
        rate = self.hits / self.trials
        if self.length:
            rate += (FIRST_ACCEPTANCE - rate) * (1 - RETURN_PER_TOKEN ** max(length - self.length, 0))
        return rate


class SeqDrafts:
    """The n-grams of one sequence, and how many of its draft tokens are accepted, by their source."""

    __slots__ = ("by_model", "by_ngram", "index")

    def __init__(self, shortest: int, longest: int) -> None:
        self.index = NgramIndex(shortest, longest)
        self.by_model, self.by_ngram = Acceptance(), Acceptance()


class Candidate(NamedTuple):
    """A sequence that may have up to `most` draft tokens: `tokens` of an n-gram, or if () those that the draft model is
    to propose. A token is accepted with the probability `rate`, if those before it are, and takes `seconds`."""

    seq: Sequence
    most: int
    tokens: tuple[int, ...]
    rate: float
    seconds: float


class Speculator:
    """Chooses the draft tokens of each step, at most `max_tokens` of a sequence.

    `method` is one of quire.config.SPECULATIONS; a speculation head counts as a draft model. N-grams have from
    `lookup[0]` to `lookup[1]` tokens. Without `costs` a sequence always has as many draft tokens as it can have.
    `deferred_masks`: the runner accepts grammar masks after a step has started, once the draft model's tokens are
    known. `pipelined`: the model has stages, so sequences in flight have no part in the next step."""

    def __init__(
        self,
        method: str,
        max_tokens: int,
        *,
        lookup: tuple[int, int] = (2, 5),
        costs: SpeculationCosts | None,
        eos_ids: Iterable[int] = (),
        deferred_masks: bool = False,
        pipelined: bool = False,
    ) -> None:
        self.deferred_masks, self.pipelined = deferred_masks, pipelined
        self.has_head, self.has_model = method in SPECULATION_HEADS, method != "ngram"
        self.uses_ngrams = method in ("ngram", "both")
        self.max_tokens, self.lookup, self.costs, self.eos_ids = max_tokens, lookup, costs, frozenset(eos_ids)
        self.markers = [tuple(FIRST_DRAFT - i for i in range(count)) for count in range(max_tokens + 1)]
        self.seqs: dict[int, SeqDrafts] = {}  # by id
        # After draft tokens did not pay for `skipped_requests` requests, the next `num_skips` calls of `choose` return
        # none, unless half of the requests have ended.
        self.num_skips = self.skipped_requests = 0

    def drafts_for(self, request: Request) -> bool:
        """Return True if the draft model is to compute the tokens of a new request, too. It has no images."""
        params = request.params
        return (
            self.has_model and params.speculate and request.method is None and params.pooling is None
            and (self.deferred_masks or params.grammar is None) and not request.images and request.prefix_name is None
        )  # fmt: skip

    def choose(self, running: Collection[Request], max_len: int) -> StepDrafts:
        """Return the draft tokens of the next step, and what is to be proposed at its end: all tokens that were
        proposed are verified. A sequence has at most `max_len` tokens.

        While steps are in flight their samples are not known, and the answer only says whether to wait for them; with
        stages it is for the other sequences. While draft tokens don't pay, a call takes on average the time of
        ROWS_PER_SKIP sequences."""
        if self.num_skips and len(running) >= self.skipped_requests // 2:
            self.num_skips -= 1
            return NO_DRAFTS
        candidates, drafts, rows, pairs = list[Candidate](), dict[int, tuple[int, ...]](), 0, 0
        for request in running:
            for seq in request.live_seqs:
                length = len(seq)
                if length - seq.planned != 1 or seq.finish_reason is not None:
                    continue  # a prompt, or nothing to compute
                if self.pipelined and seq.pending_samples:
                    continue
                rows += 1
                pairs += length
                most = min(seq.prompt_len + request.max_tokens, max_len) - length - 1
                if most > 0 and request.params.speculate and self._is_eligible(request, seq):
                    if seq.proposed:
                        drafts[seq.id] = self.markers[min(seq.proposed, most)]
                    # At least one token comes before proposals, and all that are verified now may.
                    room = min(most - 1, max_len - length - 2 - min(seq.proposed, most))
                    candidates += self._find_drafts(seq, most, room)
        proposals: dict[int, int] = {}
        if candidates:
            counts = self._most_valuable(candidates, rows, pairs) if self.costs is not None else None
            for one in candidates:
                count = one.most if counts is None else counts.get(one.seq.id, 0)
                if count and one.tokens:
                    drafts[one.seq.id] = one.tokens[:count]
                elif count:
                    proposals[one.seq.id] = count
        is_off = not drafts and not proposals
        self.num_skips, self.skipped_requests = rows // ROWS_PER_SKIP if is_off else 0, len(running)
        return NO_DRAFTS if is_off else StepDrafts(drafts, proposals)

    @staticmethod
    def _is_eligible(request: Request, seq: Sequence) -> bool:
        """Return True if no fork, method or sibling decides what follows the sequence's next token."""
        return (
            request.method is None and not seq.num_forks and seq.prefix_source is None
            and request.params.pooling is None and request.prefix_name is None
        )  # fmt: skip

    def _find_drafts(self, seq: Sequence, most: int, room: int) -> list[Candidate]:
        """Return the candidate for a sequence that may have `most` draft tokens now and `room` proposals, or []: by an
        n-gram, unless these are accepted less than half as often as the draft model's tokens."""
        drafts = self.seqs.get(seq.id)
        if drafts is None:
            drafts = self.seqs[seq.id] = SeqDrafts(*self.lookup)
        length = len(seq.tokens)
        if self.uses_ngrams:
            count = min(self.max_tokens, most)
            tokens = drafts.index.propose(seq.tokens, count + seq.pending_samples)[seq.pending_samples :]
            if seq.matcher is not None and not seq.pending_samples:
                tokens = cut_drafts(seq.matcher, tokens, self.eos_ids)
            rate = drafts.by_ngram.rate(length)
            if tokens and not (seq.uses_draft_model and rate < drafts.by_model.rate(length) / 2):
                return [Candidate(seq, len(tokens), tokens, rate, self._token_seconds(length, False))]
        if seq.uses_draft_model and room > 0:
            most = min(self.max_tokens, room)
            return [Candidate(seq, most, (), drafts.by_model.rate(length), self._token_seconds(length, True))]
        return []

    def _token_seconds(self, length: int, by_model: bool) -> float:
        """Return the seconds of one draft token of a sequence of `length` tokens: to verify it, and if `by_model` to
        propose it, without the fixed time of a pass."""
        if self.costs is None:
            return 0.0
        models = (self.costs.model, self.costs.draft) if by_model else (self.costs.model,)
        return sum(costs.compute_token + length * costs.compute_pair for costs in models)

    def _most_valuable(self, candidates: list[Candidate], rows: int, pairs: int) -> Mapping[int, int]:
        """Return, by sequence id, the numbers of draft tokens that raise the tokens per second of a step of `rows`
        tokens, which attend to `pairs` positions.

        The i-th draft token of a sequence is accepted with probability rate ** i. It pays if that is more than the
        tokens of a step without draft tokens in the same time. The i-th pass of the draft model pays if the i-th tokens
        of all its sequences together do. A speculation head makes its first pass in any case."""
        costs = self.costs
        assert costs is not None, "draft tokens are chosen by their costs"
        pass_seconds, step_seconds = costs.draft.compute_fixed, costs.model.recompute_seconds(rows, pairs)
        tokens_per_second = rows / (step_seconds + (pass_seconds if self.has_head else 0.0))
        counts: dict[int, int] = {}
        gain, cost, passes = 0.0, 0.0, 0.0
        active = candidates
        for i in range(1, self.max_tokens + 1):
            pass_seconds = 0.0 if self.has_head and i == 1 else costs.draft.compute_fixed
            active = [one for one in active if one.most >= i and one.rate**i >= one.seconds * tokens_per_second]
            by_model = [one for one in active if not one.tokens]
            worth = sum(one.rate**i - one.seconds * tokens_per_second for one in by_model)
            if by_model and worth < pass_seconds * tokens_per_second:
                active, by_model = [one for one in active if one.tokens], []
            if not active:
                break
            gain += sum(one.rate**i for one in active)
            cost += sum(one.seconds for one in active)
            passes += pass_seconds if by_model else 0.0
            counts.update((one.seq.id, i) for one in active)
        cost += max(passes, costs.idle_seconds + rows * costs.idle_row)  # the host plans while the draft model proposes
        return counts if gain >= MIN_GAIN * cost * tokens_per_second else {}

    def record(self, seq: Sequence, row: SeqSlice, accepted: int) -> None:
        """Record that `accepted` draft tokens of a slice were accepted."""
        drafts = self.seqs.get(seq.id)
        if drafts is not None:
            acceptance = drafts.by_model if count_markers(row) else drafts.by_ngram
            acceptance.record(len(row.draft_tokens), accepted, row.start + 1)

    def forget(self, seq: Sequence) -> None:
        """Drop the n-grams and the estimates of a sequence that has ended."""
        self.seqs.pop(seq.id, None)


def count_markers(row: SeqSlice) -> int:
    """Return how many of the draft tokens of a slice are the draft model's: all or none."""
    return len(row.draft_tokens) if row.draft_tokens and row.draft_tokens[0] <= FIRST_DRAFT else 0


def plan_head_slices(
    slices: Iterable[SeqSlice], by_slot: Mapping[int, tuple[Request, Sequence]], proposals: Mapping[int, int]
) -> tuple[SeqSlice, ...]:
    """Return what a speculation head computes at the end of a step: all tokens of each slice, since their hidden states
    are not kept, then `proposals` (by sequence id)."""
    draft_slices = list[SeqSlice]()
    for row in slices:
        seq, end = by_slot[row.slot][1], row.start + len(row.tokens)
        if seq.uses_draft_model:
            seq.proposed, seq.draft_planned = 0, end
            next_token = () if row.num_samples else (seq.tokens[end],)
            draft_slices.append(SeqSlice(row.slot, next_token, end, proposals.get(seq.id, 0)))
    return tuple(draft_slices)


def step_tokens(row: SeqSlice) -> int:
    """Return how many tokens of the step's budget a slice takes."""
    return len(row.tokens) + len(row.draft_tokens)


def plan_draft_slices(
    slices: Iterable[SeqSlice],
    by_slot: Mapping[int, tuple[Request, Sequence]],
    budget: int,
    proposals: Mapping[int, int],
) -> tuple[SeqSlice, ...]:
    """Return what the draft model computes at the end of a step, at most `budget` known tokens: those that it lacks of
    sequences which it then continues with `proposals` (by sequence id), and those of prompts of which it has computed
    all before. Other sequences are left behind, and catch up together, in chunks, once one of them lags by MAX_LAG
    tokens. So a draft model that has all tokens before a prompt's first slice keeps up with the prompt."""
    continued, prompts, lagging = list[SeqSlice](), list[SeqSlice](), list[SeqSlice]()
    for row in slices:
        seq = by_slot[row.slot][1]
        if seq.uses_draft_model:
            if seq.not_in_flight:
                seq.draft_planned = seq.drafted + (seq.proposed > 0)  # the last token is computed before proposals
            seq.proposed = 0
            count, start = proposals.get(seq.id, 0), seq.draft_planned
            draft = SeqSlice(row.slot, tuple(seq.tokens[start : row.start + len(row.tokens)]), start, count)
            is_prompt = start == row.start and (len(row.tokens) > 1 or not row.num_samples)
            (continued if count else prompts if is_prompt else lagging).append(draft)
    max_lag = min(MAX_LAG, budget // 2)  # so that a step has room to catch up and draft
    if all(len(draft.tokens) <= max_lag for draft in lagging):
        lagging = []
    draft_slices = list[SeqSlice]()
    for draft in (*prompts, *continued, *lagging):
        if len(draft.tokens) > budget:  # what follows must wait for the remaining tokens
            draft = draft._replace(tokens=draft.tokens[:budget], num_samples=0)
        if draft.tokens or draft.num_samples:
            draft_slices.append(draft)
            budget -= len(draft.tokens)
            by_slot[draft.slot][1].draft_planned = draft.start + len(draft.tokens)
    return tuple(draft_slices)
