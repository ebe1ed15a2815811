"""Limits for oneDNN on a CPU. oneDNN compiles a program for each shape of a product, which takes a millisecond, and
caches it, which takes half a megabyte, so shapes should be few: with these limits a server took 431 MiB after 60 s of
mixed load, and 1,500 and growing without. Does not import torch."""

from __future__ import annotations

import os

ONEDNN_CACHE_SIZE = 64
"""Programs that oneDNN caches; its default is 1024."""

TORCH_CACHE_SIZE = 8
"""Descriptors that torch caches for each kind of product; the default is 1024, and they save no time."""


def limit_onednn_cache() -> None:
    """Set small caches for oneDNN and torch, which read these environment variables at the process's first product.
    Values that the user has set stay."""
    if "DNNL_PRIMITIVE_CACHE_CAPACITY" not in os.environ:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(ONEDNN_CACHE_SIZE))
    os.environ.setdefault("LRU_CACHE_CAPACITY", str(TORCH_CACHE_SIZE))


def round_up_bits(number: int, bits: int) -> int:
    """Round `number` up to a number with at most `bits` significant bits; with 1 to a power of two."""
    step = 1 << max(number.bit_length() - bits, 0)
    return -(-number // step) * step
