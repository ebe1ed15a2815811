"""The memory that a rank on a GPU has for the other ranks to write into, one piece: its parts, and how large it is. The
kernels of `triton.reduce`, `carried` and `owned` find their places by these numbers, `parallel.peers` allocates so many
bytes, and the memory plan counts them. They don't depend on the model. No torch here."""

from __future__ import annotations

PROGRAMS = 256  # at most, two of them a multiprocessor; all of a launch run at a time on every GPU that has peers
MOST = 8  # ranks
REGION = 128 * 1024  # bytes of a program's exchange memory, of each of two turns
FLAGS = PROGRAMS * 2 * MOST * 8  # bytes; by program, phase and rank
WHOLE = FLAGS + PROGRAMS * 2 * REGION  # where the regions of what is sent whole begin
BYTES = WHOLE + PROGRAMS * 2 * REGION  # of all that kernels send; what copy engines carry lies behind
HEAD = 4096  # bytes of flags before the regions of rows that are carried
CARRIED = 256 << 20  # bytes of such rows: each half holds 8,192 rows of 8,192 numbers


def carried_bytes(rows: int) -> int:
    """Bytes behind BYTES whose regions hold together so many bytes of rows."""
    return rows + HEAD if rows else 0


def peer_bytes(ranks: int) -> int:
    """Bytes that each of so many ranks, of one stage, allocates where they reach each other's GPUs: none for one rank
    alone, nor of more than MOST, which don't meet this way."""
    return BYTES + carried_bytes(CARRIED) if 1 < ranks <= MOST else 0
