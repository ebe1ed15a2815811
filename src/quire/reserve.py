"""What is made ready for a model while torch is imported: memory for its packed weights. No torch here."""

from __future__ import annotations

import os

import psutil

from quire.config import EngineConfig
from quire.data.kernels.cpu import loading as kernels
from quire.data.kernels.cpu.memory import memory
from quire.source import Source

GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
BITS = {"int8": 8.5, "int4": 4.75}
"""Of a number, by --quantization, its share of scales included."""


def reserve(config: EngineConfig, source: Source) -> None:
    """Make about as much memory ready as packed weights will take, as far as can be said before torch is imported:
    beside that it costs no time. Half of what is free at most: whether the model fits is asked later. Nothing where a
    GPU may compute, or ranks, or no kernels of our own."""
    if config.remote:
        return
    if config.device != "cpu" and any(map(os.path.exists, GPUS)):
        return
    if kernels.suited(os.environ.get("QUIRE_CPU_KERNELS", "")) is None:
        return
    spec, bits = source.spec, 32.0 if config.dtype == "float32" else 16.0
    if source.folder is not None and not config.dummy_weights:
        files = [source.folder] if source.file is not None else source.folder.glob("*.safetensors")
        bits = min(bits, sum(file.stat().st_size for file in files if file.is_file()) * 8 / spec.parameters)
    table = 0 if source.config.get("tie_word_embeddings") else spec.vocab_size * spec.hidden
    wanted = int((spec.parameters - table) * min(bits, BITS.get(config.quantization or "", bits)) / 8)
    memory().ahead(min(wanted, psutil.virtual_memory().available // 2))
