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

from quire.kernels.cpu.library import Library, RecordedOps
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED
from quire.worker.step_context import make_decode_context
from quire.worker.store import Store

ALIGNMENT = 64  # bytes: where numbers of a tape begin
MAX_ROWS = 64  # of a tape; Python costs little beside what larger steps compute
ALLOCATING_OPS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
log = logging.getLogger(__name__)


def capture_sizes(max_rows: int) -> list[int]:
    """Batches that get a tape of their own: few rows, whose products take time by the row, all of them."""
    return [*(size for size in (*range(1, 9), 12, *range(16, MAX_ROWS, 8)) if size < max_rows), max_rows]


class UnsupportedOp(Exception):
    """An operation of torch's that computes."""


class RecordingGuard(TorchDispatchMode):
    """Of torch's operations only views and new tensors are let through: nothing computes but what is recorded.
    `allocated` are the new ones, which nobody has written."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler for that, a second and 100 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ALLOCATING_OPS:
            self.allocated.append(func(*args, **(kwargs or {})))
            return self.allocated[-1]
        if not func.is_view:
            raise UnsupportedOp(func.name())
        return func(*args, **(kwargs or {}))


def record_step(library: Library, step: Callable[[], Any]) -> tuple[RecordedOps, Any, list[Tensor]]:
    """What `step` would run, what it returns, and the tensors that it made. NotOurs if torch would compute."""
    library.recorded_ops, forbidding = RecordedOps(), RecordingGuard()
    tape = library.recorded_ops
    try:
        with forbidding:
            result = step()
    finally:
        library.recorded_ops = None
    return tape, result, forbidding.allocated


class ScratchArena:
    """Memory for what tapes compute in between: one tape runs at a time, so all of them have it in common. Nothing of
    it is touched before it is used."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def place_tensors(self, ops: RecordedOps, tensors: list[Tensor], result: Tensor, growth: int) -> Tensor:
        """Give the tensors that the tape `tensors` places here, as long as operations use them; `result`, one of them
        or a view, is kept from them all, and returned in its place. The tape doesn't hold the tensors any more.
        `growth`: how many times as large others will be."""
        begins = sorted({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.items())
        addresses = [begin for begin, _ in begins]

        def found(address: int) -> int | None:
            """The number of the tensor that an argument points into: no other argument is as large as an address."""
            at = bisect_right(addresses, address) - 1
            return at if at >= 0 and address < addresses[at] + max(begins[at][1], 1) else None

        uses: dict[int, list[int]] = {}
        pointers: list[tuple[Any, int, int]] = []  # arguments, which of them, and the tensor
        for number, (_, packed, *_) in enumerate(ops.operations):
            args = (ctypes.c_int64 * (len(packed) // 8)).from_buffer(packed)
            for place, arg in enumerate(args):
                if (at := found(arg)) is not None:
                    uses.setdefault(at, [number, number])[1] = number
                    pointers.append((args, place, at))
        kept = found(result.data_ptr())
        assert kept is not None, "a step makes its logits"
        uses.setdefault(kept, [0, 0])
        uses[kept] = [0, len(ops.operations)]
        places, size = _assign_offsets({at: (*span, begins[at][1]) for at, span in uses.items()})
        if size + ALIGNMENT > len(self.buffer):
            self.buffer = torch.empty(growth * size + ALIGNMENT, dtype=torch.uint8)
        base = -(-self.buffer.data_ptr() // ALIGNMENT) * ALIGNMENT
        for args, place, at in pointers:
            args[place] += base + places[at] - addresses[at]
        ops.tensors = [x for x in ops.tensors if found(x.untyped_storage().data_ptr()) is None] + [self.buffer]
        begin = base - self.buffer.data_ptr() + places[kept] + result.data_ptr() - addresses[kept]
        there = self.buffer[begin : begin + result.nbytes].view(result.dtype)
        assert result.is_contiguous(), "logits are rows"
        return there.view(result.shape)


def _assign_offsets(lifetimes: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Where each of these tensors goes, given its first use, last use and bytes, so that no two that are used at a time
    overlap; and where the last one ends. The lowest place that is free, first come first served."""
    places: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # begin, end, last use
    most = 0
    for at, (first, last, count) in sorted(lifetimes.items(), key=lambda item: item[1][:2]):
        taken = sorted(span for span in taken if span[2] >= first)
        begin = 0
        for other, end, _ in taken:
            if other - begin >= count:
                break
            begin = max(begin, -(-end // ALIGNMENT) * ALIGNMENT)
        places[at] = begin
        taken.append((begin, begin + count, last))
        most = max(most, begin + count)
    return places, most


class RecordedDecodeSteps:
    """Tapes for up to `max_rows` rows, MOST_ROWS of them at most. `epilogues` say what follows the logits, by name: a
    function of the logits [B, V] and the slots [B], recorded for each size; "" is nothing. What a replay returns is
    valid until the next one."""

    def __init__(
        self, model: Any, store: Store, backend: Any, last_sampled: Tensor, max_rows: int,
        epilogues: dict[str, Callable[[Tensor, Tensor], Any]], library: Library,
    ) -> None:  # fmt: skip
        self.model, self.store, self.backend, self.last_sampled = model, store, backend, last_sampled
        self.epilogues, self.library = epilogues, library
        self.max_rows = min(max_rows, MAX_ROWS)
        self.capture_sizes = capture_sizes(self.max_rows)
        self.is_unsupported = False
        self.inputs = torch.zeros((3, self.max_rows), dtype=torch.int64)  # slots, positions and tokens
        self.host_inputs = self.inputs.numpy()
        self.arena = ScratchArena()
        self.model_ops: dict[int, tuple[RecordedOps, Tensor]] = {}  # up to the logits
        self.programs: dict[tuple[int, str], tuple[RecordedOps, Any]] = {}

    def can_run(self, slices: SeqSlices) -> bool:
        """Every row computes one token and samples what follows it, and the model can be recorded."""
        count = len(slices)
        if count > self.max_rows or self.is_unsupported or not slices.is_decode_only:
            return False
        size = self._padded_size(count)
        return size in self.model_ops or self._record(size)

    def run(self, slices: SeqSlices, epilogue: str, has_images: bool = False) -> Any:
        """Run the step; what its tail leaves, padding included."""
        assert not has_images, "no tape sees a picture"
        count = len(slices)
        size = self._padded_size(count)
        if (size, epilogue) not in self.programs:
            self._append_epilogue(size, epilogue)
        host = self.host_inputs
        host[:, :count] = slices.decode_columns
        if count < size:
            host[:, count:size] = 0
        if LAST_SAMPLED in (tokens := slices.values(slices.tokens)):
            for place, token in enumerate(tokens):
                if token == LAST_SAMPLED:
                    host[2, place] = self.last_sampled[host[0, place]]
        program, result = self.programs[size, epilogue]
        self.library.run(program)
        return result

    def _padded_size(self, count: int) -> int:
        return self.capture_sizes[bisect_left(self.capture_sizes, count)]

    def _record(self, size: int) -> bool:
        """Record the model for a size; False if it can't be, now or ever."""
        try:
            tape, logits, made = record_step(self.library, lambda: self._compute_logits(size))
        except UnsupportedOp as operation:
            log.debug("decode steps run eagerly: the model needs %s", operation)
            self.is_unsupported = True
            return False
        self.model_ops[size] = tape, self.arena.place_tensors(tape, made, logits, -(-self.max_rows // size))
        return True

    def _append_epilogue(self, size: int, epilogue: str) -> None:
        """Put the model of a size and a tail together."""
        model, logits = self.model_ops[size]
        end, result = RecordedOps(), logits
        if epilogue:
            end, drawn, _ = record_step(self.library, lambda: self.epilogues[epilogue](logits, self.inputs[0, :size]))
            result = tuple(x.numpy() for x in drawn)
        program = RecordedOps()
        program.operations, program.tensors = model.operations + end.operations, model.tensors + end.tensors
        self.programs[size, epilogue] = program, result

    def _compute_logits(self, size: int) -> Tensor:
        slots, positions, tokens = self.inputs[:, :size].unbind()
        step = make_decode_context(self.store, self.backend, slots, positions)
        logits: Tensor = self.model.logits(self.model(tokens, step))
        return logits
