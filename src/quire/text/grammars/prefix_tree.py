"""Masks and forced tokens of a grammar's first tokens, cached. Many outputs of one grammar begin alike, often at the
same time, and the masks after an opening quote or bracket are the most expensive: llguidance can skip nothing of a
large vocabulary there.
"""

from __future__ import annotations

MAX_NODES = 1024  # per grammar
MAX_MASKS = 32  # per grammar; a mask takes 16 kB for 128,000 tokens
MAX_FORCED = 64  # forced tokens per node: each node may store a long forced text


class PrefixTreeBudget:
    """The number of nodes and masks that a grammar may still store."""

    __slots__ = ("masks", "nodes")

    def __init__(self, nodes: int = MAX_NODES, masks: int = MAX_MASKS) -> None:
        self.nodes, self.masks = nodes, masks


class PrefixNode:
    """The state after some first tokens: the `mask`, and in `forced` the tokens that must follow. None: not known."""

    __slots__ = ("budget", "children", "forced", "mask", "visited")

    def __init__(self, budget: PrefixTreeBudget) -> None:
        self.budget, self.children = budget, dict[int, PrefixNode]()
        self.mask: bytes | None = None
        self.forced: tuple[int, ...] | None = None
        self.visited = False

    def child(self, token: int) -> PrefixNode | None:
        """Return the node after one more token, or None if the budget is exhausted."""
        node = self.children.get(token)
        if node is None and self.budget.nodes:
            self.budget.nodes -= 1
            node = self.children[token] = PrefixNode(self.budget)
        return node

    def remember_forced(self, forced: tuple[int, ...]) -> None:
        """Store the tokens that must follow, unless they are too many."""
        if len(forced) <= MAX_FORCED:
            self.forced = forced

    def remember_mask(self, mask: bytes) -> None:
        """Store the mask, from the second time on."""
        if self.visited and self.mask is None and self.budget.masks:
            self.budget.masks -= 1
            self.mask = mask
        self.visited = True
