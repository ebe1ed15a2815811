"""What is remembered of a grammar's first tokens. Many outputs of a form begin alike, often at the same time, and the
masks behind an opening quote or bracket are the dearest: nothing of a large vocabulary can be passed over there.
"""

from __future__ import annotations

MAX_NODES, MAX_MASKS = (
    1024,
    32,
)  # of a grammar: runs of first tokens, and masks behind them, of 16 kB for 128,000 tokens
MAX_FORCED = 64  # tokens that must follow, at most: a long text that must may be behind any of the nodes


class PrefixTreeBudget:
    """How much of a grammar may still be remembered."""

    __slots__ = ("masks", "nodes")

    def __init__(self, nodes: int = MAX_NODES, masks: int = MAX_MASKS) -> None:
        self.nodes, self.masks = nodes, masks


class PrefixNode:
    """What is remembered behind some first tokens: the `mask` of what may follow, and in `forced` the tokens that must.
    None: it isn't known."""

    __slots__ = ("budget", "children", "forced", "mask", "visited")

    def __init__(self, budget: PrefixTreeBudget) -> None:
        self.budget, self.children = budget, dict[int, PrefixNode]()
        self.mask: bytes | None = None
        self.forced: tuple[int, ...] | None = None
        self.visited = False

    def child(self, token: int) -> PrefixNode | None:
        """Behind one token more; None: that isn't remembered."""
        found = self.children.get(token)
        if found is None and self.budget.nodes:
            self.budget.nodes -= 1
            found = self.children[token] = PrefixNode(self.budget)
        return found

    def remember_forced(self, forced: tuple[int, ...]) -> None:
        """These tokens must follow here; it is remembered unless they are many."""
        if len(forced) <= MAX_FORCED:
            self.forced = forced

    def remember_mask(self, mask: bytes) -> None:
        """This is the mask here; it is remembered from the second time on."""
        if self.visited and self.mask is None and self.budget.masks:
            self.budget.masks -= 1
            self.mask = mask
        self.visited = True
