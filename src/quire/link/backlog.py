"""What a front that lags behind its engine is still to be told: outputs of many steps merged, one a branch. Knows no
sockets. The longer a front is away, the more steps its next message holds, so one that is slower than its engine lags
by a bounded time, and what waits for it grows by 4 bytes a token.
"""

from __future__ import annotations

from array import array

from quire.control.outcomes import Output
from quire.link.messages import Queues, Stepped
from quire.vocabulary.columns import MOST_ROWS
from quire.vocabulary.plan import Top

ROW = 600  # bytes that a branch takes here, about, beside its tokens
TOP = 400  # a token's log-probability


class Merged:
    """Outputs of one branch: tokens are appended, and the last one says the rest."""

    __slots__ = ("_last", "_prompt_tops", "_tokens", "_tops")

    def __init__(self) -> None:
        self._tokens, self._tops = array("i"), list[Top]()
        self._prompt_tops: tuple[Top, ...] | None = None

    def add(self, output: Output) -> None:
        """Merge one more."""
        self._last = output
        self._tokens.extend(output.tokens)
        self._tops += output.tops
        if output.prompt_tops is not None:
            self._prompt_tops = output.prompt_tops

    def output(self) -> Output:
        """All of them as one."""
        tokens, tops = tuple(self._tokens), tuple(self._tops)
        return self._last._replace(tokens=tokens, tops=tops, prompt_tops=self._prompt_tops)


class Backlog:
    """`size` is about how many bytes are held."""

    def __init__(self) -> None:
        self.size = 0
        self._held: dict[int, dict[int, Merged]] = {}  # by the request's number and the branch
        self._now, self._queues = 0.0, Queues()

    def __bool__(self) -> bool:
        return bool(self._held)

    def add(self, message: Stepped) -> Stepped | None:
        """Merge what can be; the rest of the message, if there is any, is to be told now. Log-probabilities
        and embeddings take less room as frames, so outputs that have some aren't merged, unless others of their request
        are."""
        self._now, self._queues = message.now, message.queues
        rest = [found for found in message.outputs if not self._take(*found)]
        if rest or message.progress or message.computed or message.facts is not None:
            return message._replace(outputs=rest)
        return None

    def _take(self, number: int, output: Output) -> bool:
        if (output.tops or output.prompt_tops or output.pooled) and number not in self._held:
            return False
        branches = self._held.setdefault(number, {})
        merged = branches.pop(output.branch, None)
        if merged is None:
            merged = Merged()
            self.size += ROW
        branches[output.branch] = merged  # the last one now: whoever ends a request is told last
        merged.add(output)
        tops = len(output.tops) + len(output.prompt_tops or ())
        self.size += 4 * len(output.tokens) + TOP * tops
        return True

    def take(self) -> list[Stepped]:
        """All that is held, which is no more then."""
        held = [(number, merged) for number, branches in self._held.items() for merged in branches.values()]
        self._held, self.size = {}, 0
        return [
            Stepped(self._now, self._queues, 0, (), [(number, merged.output()) for number, merged in part])
            for part in (held[at : at + MOST_ROWS] for at in range(0, len(held), MOST_ROWS))
        ]
