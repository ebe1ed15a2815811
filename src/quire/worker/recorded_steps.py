"""Recorded decode steps, a CPU's CUDA graphs: a step in which every sequence computes one token is one native program,
from its embedding to its samples.

A program is recorded for each batch size when it is first needed; smaller batches are padded with rows of slot 0, which
read and write scratch memory. What changes between replays is in fixed buffers: tokens, slots and positions, page
tables, sampling parameters. A model that needs other operations than quire's native ones is not recorded and runs
eagerly.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.kernels.cpu.library import Library, RecordedOps
from quire.models.hidden_states import HiddenStates
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED
from quire.worker.step_context import make_decode_context
from quire.worker.store import Store

ALIGNMENT = 64  # bytes: tensors begin at multiples
MAX_ROWS = 64  # of a program; in larger steps Python's share of the time is small
ALLOCATING_OPS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
}
log = logging.getLogger(__name__)


def capture_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that have programs: all small ones, since their matrix products take time by the row."""
    return [*(size for size in (*range(1, 9), 12, *range(16, MAX_ROWS, 8)) if size < max_rows), max_rows]


class UnsupportedOp(Exception):
    """A torch operation that computes, which cannot be recorded."""


class RecordingGuard(TorchDispatchMode):
    """Allows only torch's views and allocations and raises UnsupportedOp for other operations, so that everything that
    computes is recorded. `allocated` are the new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.allocated: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler, which takes a second and 100 MB."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ALLOCATING_OPS:
            self.allocated.append(func(*args, **(kwargs or {})))
            return self.allocated[-1]
        if not func.is_view:
            raise UnsupportedOp(func.name())
        return func(*args, **(kwargs or {}))


def record_step(library: Library, step: Callable[[], Any]) -> tuple[RecordedOps, Any, list[Tensor]]:
    """Return the operations of `step`, its result, and the tensors that it allocated. Raise UnsupportedOp if torch
    computes."""
    with library.record() as recorded_ops, RecordingGuard() as guard:
        result = step()
    return recorded_ops, result, guard.allocated


class ScratchArena:
    """Memory for intermediate tensors. All programs share it, since one runs at a time."""

    def __init__(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def place_tensors(self, ops: RecordedOps, tensors: list[Tensor], result: Tensor, growth: int) -> Tensor:
        """Move `tensors` of a recording into the arena, each for the span of operations that use it, and drop them from
        `ops`. `result`, one of them or a view, overlaps none of the others; return it in its new place. `growth`:
        allocate this many times the size, for larger batches.
        """
        begins = sorted({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.items())
        addresses = [begin for begin, _ in begins]

        def tensor_at(address: int) -> int | None:
            """Return the index of the tensor that an argument points into. No other argument is as large as an
            address."""
            at = bisect_right(addresses, address) - 1
            return at if at >= 0 and address < addresses[at] + max(begins[at][1], 1) else None

        uses: dict[int, list[int]] = {}  # tensor -> its first and last operation
        pointers: list[tuple[Any, int, int]] = []  # arguments, index of the argument, index of the tensor
        for number, (_, packed, *_) in enumerate(ops.operations):
            args = (ctypes.c_int64 * (len(packed) // 8)).from_buffer(packed)
            for place, arg in enumerate(args):
                if (at := tensor_at(arg)) is not None:
                    uses.setdefault(at, [number, number])[1] = number
                    pointers.append((args, place, at))
        result_index = tensor_at(result.data_ptr())
        assert result_index is not None, "a step allocates its logits"
        uses.setdefault(result_index, [0, 0])
        uses[result_index] = [0, len(ops.operations)]
        offsets, size = _assign_offsets({at: (first, last, begins[at][1]) for at, (first, last) in uses.items()})
        if size + ALIGNMENT > len(self.buffer):
            self.buffer = torch.empty(growth * size + ALIGNMENT, dtype=torch.uint8)
        base = -(-self.buffer.data_ptr() // ALIGNMENT) * ALIGNMENT
        for args, place, at in pointers:
            args[place] += base + offsets[at] - addresses[at]
        ops.tensors = [x for x in ops.tensors if tensor_at(x.untyped_storage().data_ptr()) is None] + [self.buffer]
        begin = base - self.buffer.data_ptr() + offsets[result_index] + result.data_ptr() - addresses[result_index]
        moved = self.buffer[begin : begin + result.nbytes].view(result.dtype)
        assert result.is_contiguous(), "logits are contiguous"
        return moved.view(result.shape)


def _assign_offsets(lifetimes: dict[int, tuple[int, int, int]]) -> tuple[dict[int, int], int]:
    """Return an offset for each tensor, given its first use, last use and bytes, so that no two in use at the same time
    overlap; and the end of the last one. Tensors get the lowest free offset, in the order of their first use."""
    offsets: dict[int, int] = {}
    taken: list[tuple[int, int, int]] = []  # begin, end, last use
    most = 0
    for at, (first, last, count) in sorted(lifetimes.items(), key=lambda item: item[1][:2]):
        taken = sorted(span for span in taken if span[2] >= first)
        begin = 0
        for other, end, _ in taken:
            if other - begin >= count:
                break
            begin = max(begin, -(-end // ALIGNMENT) * ALIGNMENT)
        offsets[at] = begin
        taken.append((begin, begin + count, last))
        most = max(most, begin + count)
    return offsets, most


class RecordedDecodeSteps:
    """Programs for up to `max_rows` rows, at most MAX_ROWS. `epilogues` are functions of the logits [B, V] and the
    slots [B], by name, recorded for each size; "" stands for none. Results are valid until the next replay.
    `hidden_states` keeps those of all rows."""

    def __init__(
        self, model: Any, store: Store, backend: Any, sampled_tokens: Tensor, max_rows: int,
        epilogues: dict[str, Callable[[Tensor, Tensor], Any]], library: Library,
        hidden_states: HiddenStates | None = None,
    ) -> None:  # fmt: skip
        self.model, self.store, self.backend, self.sampled_tokens = model, store, backend, sampled_tokens.numpy()
        self.epilogues, self.library, self.hidden_states = epilogues, library, hidden_states
        self.max_rows = min(max_rows, MAX_ROWS)
        self.capture_sizes = capture_sizes(self.max_rows)
        self.is_unsupported = False
        self.inputs = torch.zeros((3, self.max_rows), dtype=torch.int64)  # slots, positions and tokens
        self.host_inputs = self.inputs.numpy()
        self.arena = ScratchArena()
        self.model_ops: dict[int, tuple[RecordedOps, Tensor]] = {}  # up to the logits
        self.programs: dict[tuple[int, str], tuple[RecordedOps, Any]] = {}

    def can_run(self, slices: SeqSlices) -> bool:
        """Return True if every slice computes one token and samples the next, and the model can be recorded."""
        return slices.is_decode_only and self.has_room(len(slices))

    def has_room(self, rows: int) -> bool:
        """Return True if a step of `rows` rows can be recorded."""
        if rows > self.max_rows or self.is_unsupported:
            return False
        size = self._padded_size(rows)
        return size in self.model_ops or self._record(size)

    def run(self, columns: np.ndarray, epilogue: str, has_images: bool = False) -> Any:
        """Run a step of rows, `columns` [3, R] of which are their slots, positions and tokens. Return the result of its
        epilogue, padding included."""
        assert not has_images, "recorded steps have no cross-attention"
        count = columns.shape[1]
        size = self._padded_size(count)
        if (size, epilogue) not in self.programs:
            self._append_epilogue(size, epilogue)
        host = self.host_inputs
        host[:, :count] = columns
        if count < size:
            host[:, count:size] = 0
        if len(places := (host[2, :count] < 0).nonzero()[0]):  # see resolve_tokens
            host[2, places] = self.sampled_tokens[LAST_SAMPLED - host[2, places], host[0, places]]
        program, result = self.programs[size, epilogue]
        self.library.run(program)
        return result

    def _padded_size(self, count: int) -> int:
        return self.capture_sizes[bisect_left(self.capture_sizes, count)]

    def _record(self, size: int) -> bool:
        """Record the model for a size. Return False if it cannot be recorded for any size."""
        try:
            ops, logits, allocated = record_step(self.library, lambda: self._compute_logits(size))
        except UnsupportedOp as operation:
            log.info("decode steps run eagerly, which is slower: the model needs %s", operation)
            self.is_unsupported = True
            return False
        self.model_ops[size] = ops, self.arena.place_tensors(ops, allocated, logits, -(-self.max_rows // size))
        return True

    def _append_epilogue(self, size: int, epilogue: str) -> None:
        """Join the model of a size and an epilogue to one program."""
        model, logits = self.model_ops[size]
        end = RecordedOps()
        result: Any = logits
        if epilogue:
            end, outputs, _ = record_step(self.library, lambda: self.epilogues[epilogue](logits, self.inputs[0, :size]))
            result = tuple(x.numpy() for x in outputs)
        program = RecordedOps()
        program.operations, program.tensors = model.operations + end.operations, model.tensors + end.tensors
        self.programs[size, epilogue] = program, result

    def _compute_logits(self, size: int) -> Tensor:
        slots, positions, tokens = self.inputs[:, :size].unbind()
        step = make_decode_context(self.store, self.backend, slots, positions, hidden_states=self.hidden_states)
        logits: Tensor = self.model.logits(self.model(tokens, step))
        return logits
