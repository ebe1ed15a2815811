"""One shared library of kernels, its thread pool, and recorded operations."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import error as NotANumber
from struct import pack
from threading import Lock, local
from typing import NamedTuple
from weakref import finalize

from torch import Tensor

SCRATCH = 1 << 20
"""Bytes of scratch memory of each thread."""

MAX_CHUNKS = (1 << 24) - 1

Argument = Tensor | int | float | None


class Operation(ctypes.Structure):
    """A kernel's address, its packed arguments, the number of chunks, and the memory that the chunks read in order, or
    none (native/quire.h)."""

    _fields_ = (
        ("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p), ("chunks", ctypes.c_int64),
        ("reads", ctypes.c_void_p), ("bytes", ctypes.c_int64),
    )  # fmt: skip


class RecordedOp(NamedTuple):
    """A recorded call: `kernel` is the kernel's address; its chunks read `bytes` bytes at address `reads` in order (0:
    none)."""

    kernel: int
    args: ctypes.Array[ctypes.c_char]
    chunks: int
    reads: int = 0
    bytes: int = 0


class RecordedOps:
    """Recorded operations in order, which run as one program, and the tensors that they use, to keep these alive."""

    def __init__(self) -> None:
        self.operations: list[RecordedOp] = []
        self.tensors: list[Tensor] = []
        self.program: ctypes.Array[Operation] | None = None

    def add(self, operation: RecordedOp, tensors: Sequence[Tensor]) -> None:
        assert self.program is None, "operations cannot be added after the first run"
        self.operations.append(operation)
        self.tensors += tensors

    def as_program(self) -> ctypes.Array[Operation]:
        """Return the array for `quire_run`, made at the first call."""
        if self.program is None:
            entries = [Operation(op.kernel, ctypes.addressof(op.args), op.chunks, op.reads or None, op.bytes)
                       for op in self.operations]  # fmt: skip
            self.program = (Operation * len(entries))(*entries)
        return self.program


class ThreadRecording(local):
    """The recording of the current thread, if any."""

    recorded_ops: RecordedOps | None = None


class Library:
    """A shared library of kernels and its thread pool, which ends with this object.

    Several threads may use it; their operations run one at a time. In a process forked from this one, the caller
    computes all chunks itself."""

    pool: int
    close_pool: finalize[[int], Library]

    def __init__(self, path: Path, threads: int, cpus: Sequence[int] = ()) -> None:
        """`cpus`: the CPU of each thread, the caller first (empty: not pinned)."""
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

    @contextmanager
    def record(self) -> Iterator[RecordedOps]:
        """Record the operations that this thread calls within the block, instead of running them. Other threads are not
        affected."""
        assert self.thread_recording.recorded_ops is None, "this thread is recording already"
        self.thread_recording.recorded_ops = recorded_ops = RecordedOps()
        try:
            yield recorded_ops
        finally:
            self.thread_recording.recorded_ops = None

    def resize(self, threads: int, cpus: Sequence[int] = ()) -> None:
        """Replace the thread pool. Raise OSError, and keep the old pool, if the system has no memory or threads for the
        new one."""
        assert threads >= 1, "the caller is one of the threads"
        assert len(cpus) in (0, threads), "a CPU for each thread, or none"
        with self.lock:
            cpu_array = (ctypes.c_int64 * threads)(*cpus) if cpus else None
            pool = self.native.quire_pool(threads, cpu_array, SCRATCH)
            if pool is None:
                raise OSError(f"the system has no {threads} threads to give")
            if self.threads:
                self.close_pool()
            self.pool, self.threads = pool, threads
            self.close_pool = finalize(self, self.native.quire_close, pool)
            self.close_pool.atexit = False  # a thread may still run a program; the process's exit ends all threads

    def address(self, kernel: str) -> int:
        """Return the address of a kernel."""
        if kernel not in self.addresses:
            function = getattr(self.native, kernel, None)
            assert function is not None, f"{self.path.name} has no kernel {kernel}"
            address = ctypes.cast(function, ctypes.c_void_p).value
            assert address is not None, f"{self.path.name} has no kernel {kernel}"
            self.addresses[kernel] = address
        return self.addresses[kernel]

    def call(self, kernel: str, chunks: int, *args: Argument, reads: Tensor | None = None) -> None:
        """Run a kernel, or record it while this thread records. Tensors are passed as the address of their data.
        `reads` is a tensor of which each chunk reads an equal part, in order: in a recorded program, threads that would
        wait for the operation before prefetch it into the cache."""
        assert 1 <= chunks <= MAX_CHUNKS, f"{kernel} in {chunks} chunks"
        packed = pack_args(kernel, args)
        address = self.addresses.get(kernel) or self.address(kernel)
        recorded_ops = self.thread_recording.recorded_ops
        if recorded_ops is not None:
            args_copy = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
            begin, size = (0, 0) if reads is None else (reads.data_ptr(), reads.nbytes)
            operation = RecordedOp(address, args_copy, chunks, begin, size)
            recorded_ops.add(operation, [arg for arg in args if isinstance(arg, Tensor)])
            return
        with self.lock:
            assert self.threads, "the library is closed"
            self.native.quire_call(self.pool, address, packed, chunks)

    def run(self, recorded_ops: RecordedOps) -> None:
        """Run recorded operations in order, by one native call."""
        program = recorded_ops.as_program()
        with self.lock:
            assert self.threads, "the library is closed"
            self.native.quire_run(self.pool, program, len(program))

    def close(self) -> None:
        """End the threads. Nothing can run after this."""
        with self.lock:
            self.close_pool()
            self.threads = 0


def pack_args(kernel: str, args: Sequence[Argument]) -> bytes:
    """Pack the arguments as 8 bytes each. This is most of a call's time in Python; isinstance would take twice as long
    as comparing types."""
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
                # Anything else without data_ptr is an error, reported below.
                values.append(0 if arg is None else arg.data_ptr())  # type: ignore[union-attr]  # a check would cost time on each call
        return pack(kinds, *values)
    except (AttributeError, NotANumber) as error:
        shown = ", ".join("a tensor" if isinstance(arg, Tensor) else repr(arg)[:80] for arg in args)
        raise AssertionError(f"cannot pass ({shown}) to {kernel}: {error}") from error
