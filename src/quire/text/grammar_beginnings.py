"""What is remembered of a grammar's first tokens. Many outputs of a form begin alike, often at the same time, and the
masks behind an opening quote or bracket are the dearest: nothing of a large vocabulary can be passed over there.
"""

from __future__ import annotations

NODES, MASKS = 1024, 32  # of a grammar: runs of first tokens, and masks behind them, of 16 kB for 128,000 tokens
QUEUE = 64  # tokens that must follow, at most: a long text that must may be behind any of the nodes


class Room:
    """How much of a grammar may still be remembered."""

    __slots__ = ("masks", "nodes")

    def __init__(self, nodes: int = NODES, masks: int = MASKS) -> None:
        self.nodes, self.masks = nodes, masks


class Known:
    """What is remembered behind some first tokens: the `mask` of what may follow, and in `queue` the tokens that must.
    None: it isn't known."""

    __slots__ = ("after", "mask", "queue", "room", "seen")

    def __init__(self, room: Room) -> None:
        self.room, self.after = room, dict[int, Known]()
        self.mask: bytes | None = None
        self.queue: tuple[int, ...] | None = None
        self.seen = False

    def then(self, token: int) -> Known | None:
        """Behind one token more; None: that isn't remembered."""
        found = self.after.get(token)
        if found is None and self.room.nodes:
            self.room.nodes -= 1
            found = self.after[token] = Known(self.room)
        return found

    def follow(self, queue: tuple[int, ...]) -> None:
        """These tokens must follow here; it is remembered unless they are many."""
        if len(queue) <= QUEUE:
            self.queue = queue

    def keep(self, mask: bytes) -> None:
        """This is the mask here; it is remembered from the second time on."""
        if self.seen and self.mask is None and self.room.masks:
            self.room.masks -= 1
            self.mask = mask
        self.seen = True
