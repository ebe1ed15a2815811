"""Layout and size of the memory of a rank's GPU into which the other ranks write. `triton.all_reduce`,
`copy_engine_pair` and `copy_engine_allreduce` compute addresses from these numbers, `distributed.peer_buffers`
allocates `peer_bytes`, and the memory plan counts them. They do not depend on the model. Does not import torch."""

from __future__ import annotations

PROGRAMS = 256  # the most of a launch, two a multiprocessor: all must run at the same time on every GPU
MAX_PEERS = 8  # ranks
REGION_BYTES = 128 * 1024  # a program has two regions, used in turn
FLAG_BYTES = PROGRAMS * 2 * MAX_PEERS * 8  # 8 bytes for each program, phase and rank
ONE_SHOT_OFFSET = FLAG_BYTES + PROGRAMS * 2 * REGION_BYTES  # begin of the regions of one-shot sums
KERNEL_BYTES = ONE_SHOT_OFFSET + PROGRAMS * 2 * REGION_BYTES  # all that kernels write; copy engines write after it
COPY_FLAG_BYTES = 4096  # flags before the regions of rows that copy engines write
COPY_BYTES = 256 << 20  # bytes of such rows: each half holds 8,192 rows of 8,192 numbers in 16 bits


def copy_region_bytes(rows: int) -> int:
    """Return the bytes after KERNEL_BYTES that copy engines need, for regions of `rows` bytes together."""
    return rows + COPY_FLAG_BYTES if rows else 0


def peer_bytes(ranks: int) -> int:
    """Return the bytes that each of the `ranks` ranks of a stage allocates, if their GPUs reach each other's memory: 0
    for one rank and for more than MAX_PEERS, which exchange by other means."""
    return KERNEL_BYTES + copy_region_bytes(COPY_BYTES) if 1 < ranks <= MAX_PEERS else 0
