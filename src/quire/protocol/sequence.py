"""Sequences: one for each branch of a request."""

from __future__ import annotations

from quire.protocol.device_params import MAX_TOKENS
from quire.protocol.images import ImageItem
from quire.protocol.step_plan import TopLogprobs
from quire.protocol.structured_output import GrammarMatcher


def common_prefix_len(a: list[int], b: list[int], limit: int) -> int:
    """Return the length of the longest common prefix, at most `limit`. A binary search, which compares whole slices."""
    high = min(limit, len(a), len(b))
    if a[:high] == b[:high]:
        return high
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Sequence:
    """One branch of a request: its tokens, and how far they are computed.

    computed <= planned <= len(tokens) + pending_samples. tokens[:computed] have valid state in memory, as their results
    were collected. `planned` counts tokens in submitted plans, `pending_samples` samples that the host does not have
    yet. With draft tokens in flight `planned` counts these too; what is not accepted of them is taken back when the
    result is collected. With `uses_draft_model` the sequence has pages in the draft model's layers, where
    tokens[:drafted] are computed, at most `computed` ones; while it is in flight `draft_planned` counts those in
    submitted plans. `proposed` draft tokens for its next slice are on the device; the draft model has computed all
    tokens before them. It `was_admitted` to memory once, and may be again after a preemption.
    """

    __slots__ = (
        "branch_index",
        "cache_salt",
        "computed",
        "cumulative_logprob",
        "draft_planned",
        "drafted",
        "finish_reason",
        "id",
        "images",
        "matcher",
        "max_prefix_hit",
        "max_total_len",
        "num_forks",
        "page_keys",
        "pending_samples",
        "planned",
        "pooled",
        "prefix_source",
        "prompt_len",
        "prompt_logprobs",
        "proposed",
        "seed",
        "stop_reason",
        "tokens",
        "top_logprobs",
        "uses_draft_model",
        "was_admitted",
    )  # fmt: skip

    def __init__(
        self, id: int, tokens: list[int], *, seed: int = 0, cache_salt: str = "", branch_index: int = 0
    ) -> None:
        self.id = id
        self.tokens = tokens
        self.prompt_len = len(tokens)
        self.computed = 0
        self.planned = 0
        self.pending_samples = 0
        self.uses_draft_model = False
        self.was_admitted = False
        self.drafted = 0
        self.draft_planned = self.proposed = 0
        self.branch_index = branch_index
        self.num_forks = 0  # siblings to fork from this one
        self.max_total_len = 0  # the most tokens that it will have, with the prompt; 0: not known
        self.seed = seed
        self.cache_salt = cache_salt
        self.images: tuple[ImageItem, ...] = ()  # of its prompt, in order
        self.max_prefix_hit = MAX_TOKENS  # the longest allowed prefix hit; 0 with prompt log-probabilities
        self.page_keys: list[bytes] = []  # chained page keys of `tokens`, which the memory adds as pages fill
        self.cumulative_logprob = 0.0
        self.top_logprobs: list[TopLogprobs] = []  # of its outputs; only for methods and best_of
        self.prefix_source: Sequence | None = None  # the sibling that computes the prefix of this one
        self.prompt_logprobs: list[TopLogprobs] = []
        self.matcher: GrammarMatcher | None = None  # its state in the grammar, after `tokens`
        self.pooled: tuple[float, ...] = ()  # hidden state of its prompt: the sum so far, or the last one
        self.finish_reason: str | None = None  # set when it ends, even if it is still in flight
        self.stop_reason: int | str | None = None

    def __len__(self) -> int:
        """Return the number of tokens, with samples that the host does not have yet."""
        return len(self.tokens) + self.pending_samples

    @property
    def not_in_flight(self) -> bool:
        """True if no step in flight uses this sequence; only then may it be freed, forked or swapped."""
        return self.planned == self.computed

    def fork(self, id: int, branch_index: int, seed: int) -> Sequence:
        """Return a child with the same tokens and computed state. The sequence must not be in flight."""
        assert self.not_in_flight, f"sequence {self.id} is forked while in flight"
        assert not self.pending_samples, f"sequence {self.id} is forked with a sample unseen"
        child = Sequence(id, list(self.tokens), seed=seed, cache_salt=self.cache_salt, branch_index=branch_index)
        child.prompt_len, child.computed, child.planned = self.prompt_len, self.computed, self.planned
        child.uses_draft_model, child.drafted = self.uses_draft_model, self.drafted
        child.was_admitted = self.was_admitted
        child.max_total_len, child.max_prefix_hit = self.max_total_len, self.max_prefix_hit
        child.page_keys = list(self.page_keys)
        child.images = self.images
        child.cumulative_logprob, child.top_logprobs = self.cumulative_logprob, list(self.top_logprobs)
        child.matcher = None if self.matcher is None else self.matcher.copy()
        child.prompt_logprobs = self.prompt_logprobs  # shared: the prompt is scored before the fork
        return child
