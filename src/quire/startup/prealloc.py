"""Prepare memory for a model's packed weights while torch is imported. No torch here."""

from __future__ import annotations

import os

import psutil

from quire.config import EngineConfig
from quire.kernels.cpu import library_loader as kernels
from quire.kernels.cpu.weight_arena import weight_arena
from quire.startup.checkpoint import Checkpoint
from quire.startup.early import GPU_DEVICE_FILES

QUANTIZED_BITS = {"int8": 8.5, "int4": 4.75}
"""Bits of a weight by --quantization, with its share of the scales."""


def preallocate_weights(config: EngineConfig, checkpoint: Checkpoint) -> None:
    """Prefault about as much memory as packed weights will take, as far as it is known before torch is imported; in
    parallel with the import it costs no time. At most half of the free memory is taken: whether the model fits is
    checked later. Do nothing if a GPU or ranks may compute, or without quire's kernels for CPUs."""
    if config.has_rank_processes:
        return
    if config.device != "cpu" and any(map(os.path.exists, GPU_DEVICE_FILES)):
        return
    if kernels.find_library(os.environ.get("QUIRE_CPU_KERNELS", "")) is None:
        return
    models = [checkpoint] if checkpoint.draft is None else [checkpoint, checkpoint.draft]
    wanted = sum(_packed_bytes(config, model) for model in models)
    weight_arena().prefault(min(wanted, psutil.virtual_memory().available // 2))


def _packed_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Return about how many bytes the packed weights of one model will take."""
    spec, bits = checkpoint.spec, 32.0 if config.dtype == "float32" else 16.0
    if checkpoint.path is not None and not config.dummy_weights:
        files = [checkpoint.path] if checkpoint.gguf is not None else checkpoint.path.glob("*.safetensors")
        bits = min(bits, sum(file.stat().st_size for file in files if file.is_file()) * 8 / spec.parameters)
    has_table = not checkpoint.config.get("tie_word_embeddings") and not spec.captured_width
    table = spec.vocab_size * spec.hidden if has_table else 0
    return int((spec.parameters - table) * min(bits, QUANTIZED_BITS.get(config.quantization or "", bits)) / 8)
