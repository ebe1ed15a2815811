"""Decode steps as tapes, a CPU's CUDA graphs: a step in which every sequence computes one token is one native program,
from its embedding to its samples, whatever the model.

A tape is recorded for each size of batch when it is first needed; smaller batches are padded with rows of slot 0, which
read and write scratch memory. All that changes between replays lies in buffers that stay: tokens, slots and positions,
page tables, sampling parameters. A model that needs more than our operations is not recorded, and runs eagerly.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.data.kernels.cpu.library import Library, Tape
from quire.data.runner.step import token_step
from quire.data.runner.store import Store
from quire.vocabulary.plan import LAST
from quire.vocabulary.rows import Rows

ALIGNED = 64  # bytes: where numbers of a tape begin
MOST_ROWS = 64  # of a tape; Python costs little beside what larger steps compute
EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
log = logging.getLogger(__name__)


def sizes(largest: int) -> list[int]:
    """Batches that get a tape of their own: few rows, whose products take time by the row, all of them."""
    return [*(size for size in (*range(1, 9), 12, *range(16, MOST_ROWS, 8)) if size < largest), largest]


class NotOurs(Exception):
    """An operation of torch's that computes."""


class Forbidding(TorchDispatchMode):
    """Of torch's operations only views and new tensors are let through: nothing computes but what is recorded. `made`
    are the new ones, which nobody has written."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for that, a second and 100 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in EMPTY:
            self.made.append(func(*args, **(kwargs or {})))
            return self.made[-1]
        if not func.is_view:
            raise NotOurs(func.name())
        return func(*args, **(kwargs or {}))


def recorded(library: Library, step: Callable[[], Any]) -> tuple[Tape, Any, list[Tensor]]:
    """What `step` would run, what it returns, and the tensors that it made. NotOurs if torch would compute."""
    library.tape, forbidding = Tape(), Forbidding()
    tape = library.tape
    try:
        with forbidding:
            result = step()
    finally:
        library.tape = None
    return tape, result, forbidding.made


class Arena:
    """Memory for what tapes compute in between: one tape runs at a time, so all of them have it in common. Nothing of
    it is touched before it is used."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)

    def settle(self, tape: Tape, made: list[Tensor], result: Tensor, times: int) -> Tensor:
        """Give the tensors that the tape `made` places here, as long as operations use them; `result`, one of them or a
        view, is kept from them all, and returned in its place. The tape doesn't hold the tensors any more. `times`: how
        many times as large others will be."""
        begins = sorted({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in made}.items())
        addresses = [begin for begin, _ in begins]

        def found(address: int) -> int | None:
            """The number of the tensor that an argument points into: no other argument is as large as an address."""
            at = bisect_right(addresses, address) - 1
            return at if at >= 0 and address < addresses[at] + max(begins[at][1], 1) else None

        uses: dict[int, list[int]] = {}
        pointers: list[tuple[Any, int, int]] = []  # arguments, which of them, and the tensor
        for number, (_, packed, *_) in enumerate(tape.operations):
            args = (ctypes.c_int64 * (len(packed) // 8)).from_buffer(packed)
            for place, arg in enumerate(args):
                if (at := found(arg)) is not None:
                    uses.setdefault(at, [number, number])[1] = number
                    pointers.append((args, place, at))
        kept = found(result.data_ptr())
        assert kept is not None, "a step makes its logits"
        uses.setdefault(kept, [0, 0])
        uses[kept] = [0, len(tape.operations)]
        places, size = _places({at: (*span, begins[at][1]) for at, span in uses.items()})
        if size + ALIGNED > len(self.bytes):
            self.bytes = torch.empty(times * size + ALIGNED, dtype=torch.uint8)
        base = -(-self.bytes.data_ptr() // ALIGNED) * ALIGNED
        for args, place, at in pointers:
            args[place] += base + places[at] - addresses[at]
        tape.kept = [x for x in tape.kept if found(x.untyped_storage().data_ptr()) is None] + [self.bytes]
        begin = base - self.bytes.data_ptr() + places[kept] + result.data_ptr() - addresses[kept]
        there = self.bytes[begin : begin + result.nbytes].view(result.dtype)
        assert result.is_contiguous(), "logits are rows"
        return there.view(result.shape)


def _places(spans: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Where each of these tensors goes, given its first use, last use and bytes, so that no two that are used at a time
    overlap; and where the last one ends. The lowest place that is free, first come first served."""
    places: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # begin, end, last use
    most = 0
    for at, (first, last, count) in sorted(spans.items(), key=lambda item: item[1][:2]):
        taken = sorted(span for span in taken if span[2] >= first)
        begin = 0
        for other, end, _ in taken:
            if other - begin >= count:
                break
            begin = max(begin, -(-end // ALIGNED) * ALIGNED)
        places[at] = begin
        taken.append((begin, begin + count, last))
        most = max(most, begin + count)
    return places, most


class DecodeTapes:
    """Tapes for up to `largest` rows, MOST_ROWS of them at most. `tails` say what follows the logits, by name: a
    function of the logits [B, V] and the slots [B], recorded for each size; "" is nothing. What a replay returns is
    valid until the next one."""

    def __init__(
        self, model: Any, store: Store, backend: Any, last: Tensor, largest: int,
        tails: dict[str, Callable[[Tensor, Tensor], Any]], library: Library,
    ) -> None:  # fmt: skip
        self.model, self.store, self.backend, self.last = model, store, backend, last
        self.tails, self.library = tails, library
        self.largest = min(largest, MOST_ROWS)
        self.sizes = sizes(self.largest)
        self.refused = False
        self.inputs = torch.zeros((3, self.largest), dtype=torch.int64)  # slots, positions and tokens
        self.host = self.inputs.numpy()
        self.arena = Arena()
        self.models: dict[int, tuple[Tape, Tensor]] = {}  # up to the logits
        self.programs: dict[tuple[int, str], tuple[Tape, Any]] = {}

    def fits(self, rows: Rows) -> bool:
        """Every row computes one token and samples what follows it, and the model can be recorded."""
        count = len(rows)
        if count > self.largest or self.refused or not rows.decode:
            return False
        size = self._size(count)
        return size in self.models or self._record(size)

    def run(self, rows: Rows, tail: str, sees: bool = False) -> Any:
        """Run the step; what its tail leaves, padding included."""
        assert not sees, "no tape sees a picture"
        count = len(rows)
        size = self._size(count)
        if (size, tail) not in self.programs:
            self._end(size, tail)
        host = self.host
        host[:, :count] = rows.singles
        if count < size:
            host[:, count:size] = 0
        if LAST in (tokens := rows.values(rows.tokens)):
            for place, token in enumerate(tokens):
                if token == LAST:
                    host[2, place] = self.last[host[0, place]]
        program, result = self.programs[size, tail]
        self.library.run(program)
        return result

    def _size(self, count: int) -> int:
        return self.sizes[bisect_left(self.sizes, count)]

    def _record(self, size: int) -> bool:
        """Record the model for a size; False if it can't be, now or ever."""
        try:
            tape, logits, made = recorded(self.library, lambda: self._logits(size))
        except NotOurs as operation:
            log.debug("decode steps run eagerly: the model needs %s", operation)
            self.refused = True
            return False
        self.models[size] = tape, self.arena.settle(tape, made, logits, -(-self.largest // size))
        return True

    def _end(self, size: int, tail: str) -> None:
        """Put the model of a size and a tail together."""
        model, logits = self.models[size]
        end, result = Tape(), logits
        if tail:
            end, drawn, _ = recorded(self.library, lambda: self.tails[tail](logits, self.inputs[0, :size]))
            result = tuple(x.numpy() for x in drawn)
        program = Tape()
        program.operations, program.kept = model.operations + end.operations, model.kept + end.kept
        self.programs[size, tail] = program, result

    def _logits(self, size: int) -> Tensor:
        slots, positions, tokens = self.inputs[:, :size].unbind()
        step = token_step(self.store, self.backend, slots, positions)
        logits: Tensor = self.model.logits(self.model(tokens, step))
        return logits
