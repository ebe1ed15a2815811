"""One branch of a request: its tokens, and how far they are computed."""

from __future__ import annotations

from quire.protocol.images import ImageItem
from quire.protocol.sampling_params import MAX_TOKENS
from quire.protocol.step_plan import TopLogprobs
from quire.protocol.structured_output import GrammarMatcher


def common_prefix_len(a: list[int], b: list[int], limit: int) -> int:
    """The length of the longest common prefix, at most `limit`; found by halving, a slice at a time."""
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

    computed <= planned <= len(tokens) + pending. tokens[:computed] have valid state in memory, confirmed by a collected
    result; `planned` counts tokens handed to the runner; `pending_samples` counts samples that the host has not seen
    yet.
    """

    __slots__ = (
        "branch_index",
        "cache_salt",
        "computed",
        "cumulative_logprob",
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
        "seed",
        "stop_reason",
        "tokens",
        "top_logprobs",
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
        self.branch_index = branch_index
        self.num_forks = 0  # siblings that will be forked from this one
        self.max_total_len = 0  # tokens that it will have at most, its prompt included; 0: that isn't known
        self.seed = seed
        self.cache_salt = cache_salt
        self.images: tuple[ImageItem, ...] = ()  # the pictures of its prompt, in order
        self.max_prefix_hit = MAX_TOKENS  # the longest prefix hit allowed; 0 when prompt log-probabilities are wanted
        self.page_keys: list[bytes] = []  # chained page keys: facts about tokens, filled by the memory as pages fill
        self.cumulative_logprob = 0.0
        self.top_logprobs: list[TopLogprobs] = []  # of its own tokens, where they are kept: methods, best_of
        self.prefix_source: Sequence | None = None  # computes what this one shares and hasn't computed itself
        self.prompt_logprobs: list[TopLogprobs] = []
        self.matcher: GrammarMatcher | None = None  # its place in the grammar of its output, behind `tokens`
        self.pooled: tuple[float, ...] = ()  # hidden states of its prompt: their sum so far, or the last one
        self.finish_reason: str | None = None  # why it ended; it may still be in flight
        self.stop_reason: int | str | None = None

    def __len__(self) -> int:
        """Tokens known or drawn, those still unseen by the host included."""
        return len(self.tokens) + self.pending_samples

    @property
    def not_in_flight(self) -> bool:
        """No step in flight names this sequence; only then may it be freed, forked or swapped."""
        return self.planned == self.computed

    @property
    def num_outputs(self) -> int:
        """Tokens generated so far, unseen ones included."""
        return len(self.tokens) + self.pending_samples - self.prompt_len

    def fork(self, id: int, branch_index: int, seed: int) -> Sequence:
        """A child with the same tokens and the same computed state. The parent must be quiet."""
        assert self.not_in_flight, f"sequence {self.id} is forked while in flight"
        assert not self.pending_samples, f"sequence {self.id} is forked with a sample unseen"
        child = Sequence(id, list(self.tokens), seed=seed, cache_salt=self.cache_salt, branch_index=branch_index)
        child.prompt_len, child.computed, child.planned = self.prompt_len, self.computed, self.planned
        child.max_total_len, child.max_prefix_hit, child.page_keys = (
            self.max_total_len,
            self.max_prefix_hit,
            list(self.page_keys),
        )
        child.images = self.images
        child.cumulative_logprob, child.top_logprobs = self.cumulative_logprob, list(self.top_logprobs)
        child.matcher = None if self.matcher is None else self.matcher.copy()
        child.prompt_logprobs = self.prompt_logprobs  # one prompt, scored once, before it is forked
        return child
