"""The outputs of one HTTP request's streams, on their way to the one client that reads them.

A client that keeps up gets what a step brought in one write, with no task to wake; what is more than that (a client
that is slow, a long text, the end) waits for the reader, an ordinary task, which finds all of it merged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from quire.control.outcomes import Output
from quire.text.streams import Delta, Stream

Items = list[tuple[int, Output]]  # by prompt
Writer = Callable[[Items], bool]


class Inbox:
    """(prompt index, Output) of `streams`, as an async iterator. A slow reader finds one merged Output a branch;
    patient streams wake it at the end only. An error is raised after the outputs before it.

    While the reader waits, `writer` is offered what the latest steps brought; it may say that it can't write it now."""

    def __init__(self, streams: Sequence[Stream], writer: Writer | None = None) -> None:
        self._left, self._patient, self._writer = len(streams), streams[0].patient, writer
        self._loop = asyncio.get_running_loop()
        self._held: dict[tuple[int, int], Output | Delta] = {}  # by prompt and branch
        self._error: Exception | None = None
        self._ready = asyncio.Event()
        self._waits = self._due = False  # the reader; a call of `_offer`
        for at, stream in enumerate(streams):
            stream.listen(partial(self._put, at), self._fail)

    def __aiter__(self) -> Inbox:
        return self

    async def __anext__(self) -> tuple[int, Output]:
        while not self._held or (self._patient and self._left):
            if self._error is not None:
                raise self._error
            if not self._left:
                raise StopAsyncIteration
            self._ready.clear()
            self._waits = True
            try:
                await self._ready.wait()
            finally:
                self._waits = False
        key = next(iter(self._held))
        return key[0], _output(self._held.pop(key))

    def _put(self, at: int, output: Output) -> None:
        """One more output, of prompt `at`."""
        key = at, output.branch
        held = self._held.get(key)
        self._held[key] = output if held is None else _merged(held, output)
        self._left -= output.done
        if self._writer is None:
            if not self._patient or not self._left:
                self._ready.set()
        elif not self._due:  # when all that the step brought is here
            self._due = True
            self._loop.call_soon(self._offer, self._writer)

    def _fail(self, error: Exception) -> None:
        """Nothing more will come of the streams that haven't ended."""
        if self._left:
            self._error = error
            self._ready.set()

    def _offer(self, writer: Writer) -> None:
        """Have written what is held, or else wake the reader; also at the end."""
        self._due = False
        if self._waits and self._held:
            try:
                if writer([(at, _output(held)) for (at, _), held in self._held.items()]):
                    self._held.clear()
            except Exception as error:  # the reader's to tell
                self._held.clear()
                self._error = error
        if self._held or not self._left or self._error is not None:
            self._ready.set()


def _merged(held: Output | Delta, output: Output) -> Delta:
    if not isinstance(held, Delta):
        first, held = held, Delta()
        held.add(first)
    held.add(output)
    return held


def _output(held: Output | Delta) -> Output:
    return held.output() if isinstance(held, Delta) else held
