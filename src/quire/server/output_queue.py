"""The outputs of the streams of one HTTP request, on their way to the client.

If the client keeps up, the outputs of a step are sent in one write, without waking a task. Otherwise (a slow client, a
long text, the end) they wait for the reader, an ordinary task, which gets them merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from quire.core.outputs import BranchOutput, MergedOutput
from quire.text.output_stream import OutputStream

MANY_TOKENS = 256  # tokens of an output, above which the event loop gets a turn
IndexedOutputs = list[tuple[int, BranchOutput]]  # (prompt index, output)
TryWrite = Callable[[IndexedOutputs], bool]


class OutputQueue:
    """An async iterator of (prompt index, output) from `streams`. A slow reader gets one merged output per branch.
    Final-only streams wake the reader only at the end. An error is raised after the outputs before it.

    While the reader waits, `writer` is called with the outputs of the latest steps. It returns False if it cannot write
    them now.
    """

    def __init__(self, streams: Sequence[OutputStream], writer: TryWrite | None = None) -> None:
        self._streams_left, self._final_only, self._writer = len(streams), streams[0].final_only, writer
        self._loop = asyncio.get_running_loop()
        self._pending: dict[tuple[int, int], BranchOutput | MergedOutput] = {}  # by (prompt index, branch)
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._reader_waits = self._offer_scheduled = False
        for at, stream in enumerate(streams):
            stream.listen(partial(self._put, at), self._fail)

    def __aiter__(self) -> OutputQueue:
        return self

    async def __anext__(self) -> tuple[int, BranchOutput]:
        while not self._pending or (self._final_only and self._streams_left):
            if self._error is not None:
                raise self._error
            if not self._streams_left:
                raise StopAsyncIteration
            self._ready.clear()
            self._reader_waits = True
            try:
                await self._ready.wait()
            finally:
                self._reader_waits = False
        key = next(iter(self._pending))
        return key[0], _to_output(self._pending.pop(key))

    async def collect(self) -> list[tuple[int, BranchOutput]]:
        """Return all outputs, one per prompt and branch, in order. For final-only streams."""
        outputs: list[tuple[int, BranchOutput]] = []
        async for at, output in self:
            outputs.append((at, output))
            if len(output.tokens) > MANY_TOKENS:
                await asyncio.sleep(0)
        return sorted(outputs, key=lambda item: (item[0], item[1].branch))

    def _put(self, at: int, output: BranchOutput) -> None:
        """Add an output of prompt `at`."""
        key = at, output.branch
        held = self._pending.get(key)
        self._pending[key] = output if held is None else _merge(held, output)
        self._streams_left -= output.done
        if self._writer is None:
            if not self._final_only or not self._streams_left:
                self._ready.set()
        elif not self._offer_scheduled:  # runs after all outputs of the step have been added
            self._offer_scheduled = True
            self._loop.call_soon(self._offer, self._writer)

    def _fail(self, error: Exception) -> None:
        """Store an error, unless all streams have ended."""
        if self._streams_left:
            self._error = error
            self._ready.set()

    def _offer(self, writer: TryWrite) -> None:
        """Have the pending outputs written, or else wake the reader, also at the end."""
        self._offer_scheduled = False
        if self._reader_waits and self._pending:
            try:
                if writer([(at, _to_output(held)) for (at, _), held in self._pending.items()]):
                    self._pending.clear()
            except Exception as error:  # raised to the reader
                self._pending.clear()
                self._error = error
        if self._pending or not self._streams_left or self._error is not None:
            self._ready.set()


def _merge(pending: BranchOutput | MergedOutput, output: BranchOutput) -> MergedOutput:
    if not isinstance(pending, MergedOutput):
        first, pending = pending, MergedOutput()
        pending.add(first)
    pending.add(output)
    return pending


def _to_output(pending: BranchOutput | MergedOutput) -> BranchOutput:
    return pending.to_output() if isinstance(pending, MergedOutput) else pending
