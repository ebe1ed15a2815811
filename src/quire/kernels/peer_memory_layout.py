"""The memory that a rank on a GPU has for the other ranks to write into, one piece: its parts, and how large it is. The
kernels of `triton.reduce`, `carried` and `owned` find their places by these numbers, `parallel.peers` allocates so many
bytes, and the memory plan counts them. They don't depend on the model. No torch here."""

from __future__ import annotations

PROGRAMS = 256  # at most, two of them a multiprocessor; all of a launch run at a time on every GPU that has peers
MAX_PEERS = 8  # ranks
REGION_BYTES = 128 * 1024  # bytes of a program's exchange memory, of each of two turns
FLAG_BYTES = PROGRAMS * 2 * MAX_PEERS * 8  # bytes; by program, phase and rank
ONE_SHOT_OFFSET = FLAG_BYTES + PROGRAMS * 2 * REGION_BYTES  # where the regions of what is sent whole begin
KERNEL_BYTES = (
    ONE_SHOT_OFFSET + PROGRAMS * 2 * REGION_BYTES
)  # of all that kernels send; what copy engines carry lies behind
COPY_FLAG_BYTES = 4096  # bytes of flags before the regions of rows that are carried
COPY_BYTES = 256 << 20  # bytes of such rows: each half holds 8,192 rows of 8,192 numbers


def copy_region_bytes(rows: int) -> int:
    """Bytes behind BYTES whose regions hold together so many bytes of rows."""
    return rows + COPY_FLAG_BYTES if rows else 0


def peer_bytes(ranks: int) -> int:
    """Bytes that each of so many ranks, of one stage, allocates where they reach each other's GPUs: none for one rank
    alone, nor of more than MOST, which don't meet this way."""
    return KERNEL_BYTES + copy_region_bytes(COPY_BYTES) if 1 < ranks <= MAX_PEERS else 0
