"""Outputs for a client that is slower than its engine: outputs of many steps are merged, one for each branch. No
sockets here.

The slower the client, the more steps its next message holds, so it lags by a bounded time, and the buffer grows by 4
bytes a token."""

from __future__ import annotations

from array import array

from quire.core.outputs import BranchOutput, MergedOutput
from quire.ipc.messages import QueueSizes, StepOutputs
from quire.protocol.columns import MAX_STEP_SLICES

BRANCH_BYTES = 600  # approximate bytes of a branch without its tokens
LOGPROB_BYTES = 400  # approximate bytes of a token's log-probabilities


class OutputBuffer:
    """Merged outputs by request and branch. `held_bytes` is the approximate number of bytes held."""

    def __init__(self) -> None:
        self.held_bytes = 0
        self._by_request: dict[int, dict[int, MergedOutput]] = {}  # by request number and branch
        self._now, self._last_queue_sizes = 0.0, QueueSizes()

    def __bool__(self) -> bool:
        return bool(self._by_request)

    def add(self, message: StepOutputs) -> StepOutputs | None:
        """Merge the outputs of a message. Return the rest of the message, which is to be sent now, or None.
        Log-probabilities and embeddings take less room as frames, so outputs with these are merged only if others of
        their request are."""
        self._now, self._last_queue_sizes = message.now, message.queues
        rest = [numbered_output for numbered_output in message.outputs if not self._merge_output(*numbered_output)]
        if rest or message.progress or message.computed or message.facts is not None:
            return message._replace(outputs=rest)
        return None

    def _merge_output(self, number: int, output: BranchOutput) -> bool:
        if (output.top_logprobs or output.prompt_logprobs or output.pooled) and number not in self._by_request:
            return False
        branches = self._by_request.setdefault(number, {})
        merged = branches.pop(output.branch, None)
        if merged is None:
            merged = MergedOutput(array("i"))
            self.held_bytes += BRANCH_BYTES
        branches[output.branch] = merged  # moved to the end: the output that ends a request is sent last
        merged.add(output)
        tops = len(output.top_logprobs) + len(output.prompt_logprobs or ())
        self.held_bytes += 4 * len(output.tokens) + LOGPROB_BYTES * tops
        return True

    def drain(self) -> list[StepOutputs]:
        """Remove all that is held, and return it as messages."""
        held = [(number, merged) for number, branches in self._by_request.items() for merged in branches.values()]
        self._by_request, self.held_bytes = {}, 0
        return [
            StepOutputs(
                self._now, self._last_queue_sizes, 0, (), [(number, merged.to_output()) for number, merged in part]
            )
            for part in (held[at : at + MAX_STEP_SLICES] for at in range(0, len(held), MAX_STEP_SLICES))
        ]
