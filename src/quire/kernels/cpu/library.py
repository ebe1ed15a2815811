"""The kernels in one file, their threads, and how operations are run or recorded. It knows no model and no memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from struct import error as NotANumber
from struct import pack
from threading import Lock, local
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

SCRATCH = 1 << 20
"""Bytes that each thread has for itself while a kernel runs."""

MAX_CHUNKS = (1 << 24) - 1

Argument = Tensor | int | float | None


class Operation(ctypes.Structure):
    """A kernel, its arguments, in how many chunks it is cut, and what these read one after another, if it is much
    (native/quire.h)."""

    _fields_ = (
        ("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p), ("chunks", ctypes.c_int64),
        ("reads", ctypes.c_void_p), ("bytes", ctypes.c_int64),
    )  # fmt: skip


class RecordedOp(NamedTuple):
    """An operation on a tape: `kernel` is its address, `reads` that of `bytes` bytes, or 0."""

    kernel: int
    args: ctypes.Array[ctypes.c_char]
    chunks: int
    reads: int = 0
    bytes: int = 0


class RecordedOps:
    """Operations in order, which run as one program; and the tensors that they use, kept alive."""

    def __init__(self) -> None:
        self.operations: list[RecordedOp] = []
        self.tensors: list[Tensor] = []
        self.program: ctypes.Array[Operation] | None = None

    def add(self, operation: RecordedOp, tensors: Sequence[Tensor]) -> None:
        assert self.program is None, "a program that has run grows no more"
        self.operations.append(operation)
        self.tensors += tensors

    def as_program(self) -> ctypes.Array[Operation]:
        if self.program is None:
            entries = [Operation(op.kernel, ctypes.addressof(op.args), op.chunks, op.reads or None, op.bytes)
                       for op in self.operations]  # fmt: skip
            self.program = (Operation * len(entries))(*entries)
        return self.program


class ThreadRecording(local):
    """What the thread that looks records, if anything."""

    recorded_ops: RecordedOps | None = None


class Library:
    """The kernels in one file, and a pool of threads, which end with it. Several threads may use it: one at a time runs
    its operations, the others wait. In a process forked from this one, the caller computes all by itself."""

    def __init__(self, path: Path, threads: int, cpus: Sequence[int] = ()) -> None:
        """`cpus`: where each thread runs, the caller first; none: anywhere."""
        self.path, self.threads, self.thread_recording = path, 0, ThreadRecording()
        self.native = ctypes.CDLL(str(path))
        address, number = ctypes.c_void_p, ctypes.c_int64
        self.native.quire_pool.restype = address
        self.native.quire_pool.argtypes = number, address, number
        self.native.quire_call.argtypes = address, address, ctypes.c_char_p, number
        self.native.quire_run.argtypes = address, address, number
        self.native.quire_close.argtypes = (address,)
        self.addresses: dict[str, int] = {}
        self.lock = Lock()
        self.resize(threads, cpus)

    @property
    def recorded_ops(self) -> RecordedOps | None:
        """What this thread records on; None: what it calls is run. Each thread has its own."""
        return self.thread_recording.recorded_ops

    @recorded_ops.setter
    def recorded_ops(self, tape: RecordedOps | None) -> None:
        self.thread_recording.recorded_ops = tape

    def resize(self, threads: int, cpus: Sequence[int] = ()) -> None:
        """Other threads in place of those that are there, if any. OSError, and nothing has changed, where the system
        has no memory for so many, or no threads."""
        assert threads >= 1, "the caller is one"
        assert len(cpus) in (0, threads), "a place for each thread, or none"
        with self.lock:
            places = (ctypes.c_int64 * threads)(*cpus) if cpus else None
            pool = self.native.quire_pool(threads, places, SCRATCH)
            if pool is None:
                raise OSError(f"the system has no {threads} threads to give")
            if self.threads:
                self.close_pool()
            self.pool, self.threads = pool, threads
            self.close_pool = finalize(self, self.native.quire_close, pool)
            self.close_pool.atexit = False  # a thread may be in a program still; the process's end is theirs too

    def address(self, kernel: str) -> int:
        if kernel not in self.addresses:
            found = ctypes.cast(getattr(self.native, kernel, None), ctypes.c_void_p).value
            assert found is not None, f"{self.path.name} has no kernel {kernel}"
            self.addresses[kernel] = found
        return self.addresses[kernel]

    def call(self, kernel: str, chunks: int, *args: Argument, reads: Tensor | None = None) -> None:
        """Run a kernel; or, while this thread records a tape, put it there. Tensors are passed as where their numbers
        begin. `reads` is one that the chunks read one part after another, as much each: on a tape it is brought to the
        cache by threads that have nothing to do before."""
        assert 1 <= chunks <= MAX_CHUNKS, f"{kernel} in {chunks} chunks"
        packed = pack_args(kernel, args)
        address = self.addresses.get(kernel) or self.address(kernel)
        tape = self.thread_recording.recorded_ops
        if tape is not None:
            kept = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
            begin, size = (0, 0) if reads is None else (reads.data_ptr(), reads.nbytes)
            operation = RecordedOp(address, kept, chunks, begin, size)
            tape.add(operation, [arg for arg in args if isinstance(arg, Tensor)])
            return
        with self.lock:
            assert self.threads, "it isn't closed"
            self.native.quire_call(self.pool, address, packed, chunks)

    def run(self, recorded_ops: RecordedOps) -> None:
        program = recorded_ops.as_program()
        with self.lock:
            assert self.threads, "it isn't closed"
            self.native.quire_run(self.pool, program, len(program))

    def close(self) -> None:
        """End its threads. It runs nothing more."""
        with self.lock:
            self.close_pool()
            self.threads = 0


def pack_args(kernel: str, args: Sequence[Argument]) -> bytes:
    """8 bytes each. This is most of what a call costs in Python: types are compared, as isinstance takes twice as
    long."""
    kinds, values = "", []
    try:
        for arg in args:
            kind = type(arg)
            if kind is int:
                kinds += "q"
                values.append(arg)
            elif kind is float:
                kinds += "d"
                values.append(arg)
            else:
                kinds += "q"
                values.append(0 if arg is None else arg.data_ptr())
        return pack(kinds, *values)
    except (AttributeError, NotANumber) as error:
        shown = ", ".join("a tensor" if isinstance(arg, Tensor) else repr(arg)[:80] for arg in args)
        raise AssertionError(f"{kernel} is given ({shown}): {error}") from error
