"""Check the settings of a memory against the layers of a model: running states, 8-bit keys and values, images."""

from __future__ import annotations

import math

from quire.config import PAGE_TABLE_MEMORIES, EngineConfig
from quire.errors import StartupError
from quire.memory.jenga.page_sizes import PAGE_ALIGNMENT
from quire.protocol.model_spec import ModelSpec


def check_states(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise StartupError if the settings do not fit layers with a running state, or a state is not aligned."""
    for part in (part for i in spec.state_layers for part in spec.layers[i].state_tensors):
        if min(part.shape, default=0) < 1 or math.prod(part.shape) * part.itemsize % PAGE_ALIGNMENT:
            raise StartupError(
                f"a layer's state {part.name[:40]!r} is {part.shape} numbers of {part.itemsize} bytes"[:200]
                + f": no multiple of the {PAGE_ALIGNMENT} bytes that one access takes",
                f"Use a model whose states have a multiple of {PAGE_ALIGNMENT} bytes",
            )
    if config.memory not in PAGE_TABLE_MEMORIES:
        raise StartupError(
            f"--memory is {config.memory}, and the model's layers keep a running state, which this memory cannot hold",
            "Use --memory paged",
        )
    if config.memory == "uniform" and config.prefix_tokens:
        raise StartupError(
            f"--prefix-tokens is {config.prefix_tokens}, and --memory is uniform, where a state belongs to one "
            "sequence: none can be stored for a registered prefix",
            "Use --memory paged",
        )
    if config.experiment.page_sizes == "gcd" and len(spec.state_layers) < len(spec.kv_layers):
        raise StartupError(
            "--page-sizes is gcd, and a state is no number of tokens: its pages have a size of their own",
            "Use --page-sizes lcm, max or own",
        )
    if (interval := config.experiment.state_tokens) is not None and interval % config.page_size:
        raise StartupError(
            f"--state-tokens is {interval}, and pages hold {config.page_size} tokens (--page-size)",
            "Use a multiple of that: a prefix ends where a page of every layer does",
        )


def check_int8_kv_cache(config: EngineConfig, spec: ModelSpec) -> None:
    """Raise StartupError if a model or memory cannot store keys and values in 8 bits."""
    beside = {
        "running states": bool(spec.state_layers),
        "image embeddings": spec.vision is not None,
        "layers that prune the prompt by its keys": spec.min_budget > 0,
    }
    reason = next((what for what, there in beside.items() if there), None)
    if reason is not None:
        raise StartupError(
            f"--kv-cache-dtype is int8, and the model has {reason}, which can't be stored in 8 bits",
            "Leave --kv-cache-dtype out",
        )
    if config.memory == "virtual":
        raise StartupError(
            "--kv-cache-dtype is int8, and --memory is virtual, whose buffers have no scales", "Use --memory paged"
        )


def check_vision(config: EngineConfig, spec: ModelSpec, itemsize: int) -> None:
    """Raise StartupError if the settings do not fit a model with image input."""
    assert spec.vision is not None, "the model takes no images"
    if config.memory not in PAGE_TABLE_MEMORIES:
        raise StartupError(
            f"--memory is {config.memory}, and the model takes images, which this memory cannot hold",
            "Use --memory paged",
        )
    if spec.min_budget:
        raise StartupError(
            "the model takes images, and its layers prune the prompt, which is not supported together",
            "Use another model",
        )
    if config.experiment.page_sizes == "gcd":
        raise StartupError(
            "--page-sizes is gcd, and image embeddings have pages of another size",
            "Use --page-sizes lcm, max or own",
        )
    if spec.vision.bidirectional_prompt and config.prefix_tokens:
        raise StartupError(
            f"--prefix-tokens is {config.prefix_tokens}, and the keys and values of a prompt depend on all of it",
            "Leave --prefix-tokens out",
        )
    row = spec.vision.embed_dim * itemsize
    most = max(
        (sum(spec.layers[i].token_bytes(itemsize) for i in one) for one in _full_attention_layer_sets(config, spec)),
        default=0,
    )
    if spec.images_replace_tokens and config.experiment.vision_cache == "inside" and row > most:
        raise StartupError(
            f"--vision-cache is inside, and an image embedding has {row:,} bytes: more than the {most:,} that layers "
            "with full attention store for a token",
            "Use --vision-cache pages, or off",
        )


def _full_attention_layer_sets(config: EngineConfig, spec: ModelSpec) -> list[list[int]]:
    """Return the sets of full-attention layers that share page tables."""
    if config.memory == "uniform":
        return [
            [i for i in spec.kv_layers if not spec.layers[i].is_cross_attention and not spec.layers[i].state_tensors]
        ]
    full = [i for i in spec.kv_layers if spec.layers[i].kind == "full" and not spec.layers[i].is_draft]
    if config.experiment.table_scope == "layer":
        return [[i] for i in full]
    kinds = dict.fromkeys(spec.layers[i].group_key for i in full)
    return [[i for i in full if spec.layers[i].group_key == kind] for kind in kinds]
