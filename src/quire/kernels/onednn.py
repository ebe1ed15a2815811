"""The shapes of products on a CPU, of which there should be few: oneDNN compiles a program for each that it meets,
which takes it a millisecond, and keeps it, which takes half a megabyte (docs/performance.md). No torch here."""

from __future__ import annotations

import os

ONEDNN_CACHE_SIZE = 64
"""What oneDNN keeps, in place of 1024."""

TORCH_CACHE_SIZE = 8
"""What torch keeps beside that, for each kind of product, in place of 1024: descriptions, which save it no time."""


def limit_onednn_cache() -> None:
    """Before the process' first product, have oneDNN and torch keep few programs. They read the environment then, and
    what the user wrote there stays."""
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_CACHE_SIZE))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(TORCH_CACHE_SIZE))


def round_up_bits(number: int, bits: int) -> int:
    """The least number, from this one on, that has `bits` significant bits at most; 1 gives powers of two."""
    step = 1 << max(number.bit_length() - bits, 0)
    return -(-number // step) * step
