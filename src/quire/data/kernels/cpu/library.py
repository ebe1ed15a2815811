"""The kernels' library: which of the built ones this machine can run, its threads, and how operations are run or
recorded. It knows no model and no memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

SCRATCH = 1 << 20
"""Bytes that each thread has for itself while a kernel runs."""

Argument = Tensor | int | float | None


class Operation(ctypes.Structure):
    """A kernel, its arguments, and in how many chunks it is cut (native/quire.h)."""

    _fields_ = (("kernel", ctypes.c_void_p), ("args", ctypes.c_void_p), ("chunks", ctypes.c_int64))


class Arg(ctypes.Union):
    _fields_ = (("pointer", ctypes.c_void_p), ("integer", ctypes.c_int64), ("number", ctypes.c_double))


class Tape:
    """Operations in order, which run as one program; and the tensors that they use, kept alive."""

    def __init__(self) -> None:
        self.operations: list[tuple[int, ctypes.Array[Arg], int]] = []
        self.kept: list[Tensor] = []
        self.program: ctypes.Array[Operation] | None = None

    def add(self, kernel: int, args: ctypes.Array[Arg], chunks: int, tensors: Sequence[Tensor]) -> None:
        assert self.program is None, "a program that has run grows no more"
        self.operations.append((kernel, args, chunks))
        self.kept += tensors

    def ready(self) -> ctypes.Array[Operation]:
        if self.program is None:
            entries = [Operation(kernel, ctypes.addressof(args), chunks) for kernel, args, chunks in self.operations]
            self.program = (Operation * len(entries))(*entries)
        return self.program


class Library:
    """The kernels in one file, and a pool of threads. One thread at a time uses it."""

    def __init__(self, path: Path, threads: int, cpus: Sequence[int] = ()) -> None:
        """`cpus`: where each thread runs, the caller first; none: anywhere."""
        self.path, self.threads = path, threads
        self.native = ctypes.CDLL(str(path))
        self.native.quire_pool.restype = ctypes.c_void_p
        places = (ctypes.c_int64 * threads)(*cpus) if cpus else None
        self.pool = ctypes.c_void_p(self.native.quire_pool(ctypes.c_int64(threads), places, ctypes.c_int64(SCRATCH)))
        assert self.pool.value is not None, "threads have memory"
        self.addresses: dict[str, int] = {}
        self.tape: Tape | None = None

    def address(self, kernel: str) -> int:
        if kernel not in self.addresses:
            found = ctypes.cast(getattr(self.native, kernel), ctypes.c_void_p).value
            assert found is not None, f"{self.path.name} has {kernel}"
            self.addresses[kernel] = found
        return self.addresses[kernel]

    def call(self, kernel: str, chunks: int, *args: Argument) -> None:
        """Run a kernel; or, while a tape records, put it there. Tensors are passed as where their numbers begin."""
        packed = (Arg * len(args))()
        for place, arg in zip(packed, args):
            if isinstance(arg, Tensor):
                place.pointer = arg.data_ptr()
            elif isinstance(arg, float):
                place.number = arg
            else:
                place.integer = arg or 0
        if self.tape is not None:
            self.tape.add(self.address(kernel), packed, chunks, [arg for arg in args if isinstance(arg, Tensor)])
            return
        operation = Operation(self.address(kernel), ctypes.addressof(packed), chunks)
        self.native.quire_run(self.pool, ctypes.byref(operation), ctypes.c_int64(1))

    def run(self, tape: Tape) -> None:
        program = tape.ready()
        self.native.quire_run(self.pool, program, ctypes.c_int64(len(program)))

    def close(self) -> None:
        if self.pool.value is not None:
            self.native.quire_close(self.pool)
            self.pool = ctypes.c_void_p()
