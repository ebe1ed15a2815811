"""Views of the buffer that holds all pages: as pages of every size, and as each layer's keys and values, or states.

A page holds a run of tokens of all layers of its group, one layer after another (Jenga §4.2's page-layer partition):
keys, then values, by head and token; an 8-bit one is followed by its scale. A page of states holds all parts of the
state after the run's last token, each aligned for any dtype.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from quire.errors import StartupError
from quire.kernels.forward_batch import LayerCache
from quire.kernels.limits import MAX_INDEX_ROWS
from quire.kernels.mamba_states import SavedInputs, StateCache
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import STATE_ALIGNMENT, ModelSpec, StateTensor

USE_OTHER_PAGE_SIZE = "Use another --page-size or --table-scope"


def check_kv_cache_config(kv_config: KVCacheConfig, spec: ModelSpec) -> None:
    """Raise StartupError for a geometry that these views cannot represent."""
    size, large = kv_config.itemsize, kv_config.large_bytes
    for group in kv_config.groups:
        tokens = sum(spec.layers[i].token_bytes(size) for i in group.layers)
        tokens += kv_config.row_bytes * (group.kind == "vision")
        keys = {spec.layers[i].token_bytes(size) // 2 * group.run_tokens for i in group.layers}
        if large and (large % group.page_bytes or any(bytes % STATE_ALIGNMENT for bytes in (group.page_bytes, *keys))):
            raise StartupError(
                f"a page of {group.page_bytes:,} bytes, of keys of {', '.join(map(str, sorted(keys)))} bytes a layer, "
                f"isn't a part of a large page of {large:,} bytes, or doesn't begin at multiples of {STATE_ALIGNMENT}",
                f"{USE_OTHER_PAGE_SIZE}, or --page-sizes max",
            )
        if group.page_bytes % size:
            raise StartupError(
                f"a page of {group.page_bytes:,} bytes isn't a whole number of numbers of {size} bytes",
                USE_OTHER_PAGE_SIZE,
            )
        if group.run_pages != 1 and kv_config.layout is KVCacheLayout.PAGED:
            raise StartupError(
                f"{group.run_tokens} tokens fill {group.run_pages} pages, and page tables need pages of whole tokens",
                USE_OTHER_PAGE_SIZE,
            )
        if group.page_bytes * group.run_pages < group.run_tokens * tokens:
            raise StartupError(
                f"a page of {group.page_bytes:,} bytes doesn't hold {group.run_tokens} tokens of {tokens:,} bytes",
                USE_OTHER_PAGE_SIZE,
            )
        states = sum(spec.layers[i].state_bytes for i in group.layers)
        if states and (group.page_bytes < states or group.page_bytes % STATE_ALIGNMENT):
            raise StartupError(
                f"a page of {group.page_bytes:,} bytes doesn't hold states of {states:,} bytes, each of whose parts "
                f"begins at a multiple of {STATE_ALIGNMENT}",
                f"{USE_OTHER_PAGE_SIZE}, or --page-sizes max",
            )
        if kv_config.bytes // group.page_bytes > MAX_INDEX_ROWS:
            raise StartupError(
                f"{kv_config.bytes:,} bytes are {kv_config.bytes // group.page_bytes:,} pages of {group.page_bytes:,}; "
                f"at most {MAX_INDEX_ROWS:,} have numbers",
                "Use a larger --page-size or a smaller --kv-gib",
            )


def pages_by_size(buffer: Tensor, kv_config: KVCacheConfig) -> dict[int, Tensor]:
    """Return the whole buffer as [pages, numbers] for each size of pages, in bytes."""
    views = {}
    for size in dict.fromkeys(group.page_bytes for group in kv_config.groups):
        numbers = size // buffer.itemsize
        count = len(buffer) // numbers
        views[size] = buffer[: count * numbers].view(count, numbers)
    return views


def layer_caches(buffer: Tensor, kv_config: KVCacheConfig, spec: ModelSpec) -> dict[int, LayerCache]:
    """Return the keys and values of each layer that attends to tokens, in the order of layers."""
    caches: dict[int, LayerCache] = {}
    for g, group in enumerate(kv_config.groups):
        if group.kind not in ("state", "cross"):
            caches |= _group_caches(buffer, group, g, spec)
    return add_shared_layers(caches, spec)


def cross_caches(buffer: Tensor, kv_config: KVCacheConfig, spec: ModelSpec) -> dict[int, LayerCache]:
    """Return the keys and values of image embeddings of each cross-attention layer, which only reads them."""
    caches: dict[int, LayerCache] = {}
    for g, group in enumerate(kv_config.groups):
        if group.kind == "cross":
            caches |= {i: replace(cache, writes_kv=False) for i, cache in _group_caches(buffer, group, g, spec).items()}
    return {i: caches[i] for i in sorted(caches)}


def _group_caches(buffer: Tensor, group: KVCacheGroup, group_index: int, spec: ModelSpec) -> dict[int, LayerCache]:
    """Return the caches of a group's layers, one after another in its pages."""
    caches: dict[int, LayerCache] = {}
    at = 0
    for i in group.layers:
        caches[i] = _layer_cache(buffer, group, group_index, i, at, spec)
        at += spec.layers[i].token_bytes(buffer.itemsize) * group.run_tokens
    return caches


def add_shared_layers(caches: dict[int, LayerCache], spec: ModelSpec) -> dict[int, LayerCache]:
    """Add layers that only read another layer's keys and values. Return all caches in the order of layers."""
    for i, layer in enumerate(spec.layers):
        if layer.kv_source_layer is not None and layer.kv_source_layer in caches:  # else on another stage
            caches[i] = replace(caches[layer.kv_source_layer], writes_kv=False, **attention_settings(spec, i))
    return {i: caches[i] for i in sorted(caches)}


def state_caches(
    buffer: Tensor, kv_config: KVCacheConfig, spec: ModelSpec, state_dtype: torch.dtype, saved_tokens: int = 0
) -> dict[int, StateCache]:
    """Return the running states of each layer that has one: the convolution's in the buffer's dtype, the SSM's in
    `state_dtype`. Each has room for the inputs of `saved_tokens` tokens."""
    caches: dict[int, StateCache] = {}
    for g, group in enumerate(kv_config.groups):
        at = 0
        for i in group.layers if group.kind == "state" else ():
            views = {}
            for part in spec.layers[i].state_tensors:
                dtype = state_dtype if part.name == "ssm" else buffer.dtype
                views[part.name] = _state_view(buffer, group, part, at, dtype)
                at += part.padded_bytes
            inputs, saved = spec.layers[i].saved_inputs, None
            if saved_tokens:
                saved = SavedInputs.allocate(saved_tokens, inputs, buffer.dtype, buffer.device)
            caches[i] = StateCache(views["conv"], views.get("ssm"), g, group.run_tokens, saved)
    return caches


def _state_view(
    buffer: Tensor, group: KVCacheGroup, state_tensor: StateTensor, byte_offset: int, dtype: torch.dtype
) -> Tensor:
    """Return the view [pages, *state_tensor.shape] that begins `byte_offset` bytes into each page."""
    size = dtype.itemsize
    assert size == state_tensor.itemsize, (
        f"{state_tensor.name} has elements of {state_tensor.itemsize} bytes, and the runner's have {size}"
    )
    plain = buffer.view(torch.uint8)
    pages = len(plain) // group.page_bytes
    numbers = plain[: pages * group.page_bytes].view(dtype)
    inner = [prod(state_tensor.shape[i + 1 :]) for i in range(len(state_tensor.shape))]
    return numbers.as_strided((pages, *state_tensor.shape), (group.page_bytes // size, *inner), byte_offset // size)


def image_embed_pages(buffer: Tensor, group: KVCacheGroup, embed_dim: int) -> Tensor:
    """Return the image embeddings in a group's pages, [pages, run_tokens, embed_dim], from each page's beginning."""
    page = group.page_bytes // buffer.itemsize
    assert group.run_tokens * embed_dim <= page, f"{group.run_tokens} rows of {embed_dim} numbers in a page of {page}"
    return buffer.as_strided((len(buffer) // page, group.run_tokens, embed_dim), (page, embed_dim, 1))


def attention_settings(spec: ModelSpec, layer: int) -> dict[str, Any]:
    """Return the fields of a LayerCache that define how a layer attends."""
    layer_spec = spec.layers[layer]
    scale = layer_spec.head_dim**-0.5 if layer_spec.scale is None else layer_spec.scale
    return {
        "heads": layer_spec.heads or spec.heads, "scale": scale, "softcap": layer_spec.softcap,
        "window": layer_spec.window, "chunk": layer_spec.chunk, "budget": layer_spec.budget,
        "selection": spec.selection,
    }  # fmt: skip


def _layer_cache(
    buffer: Tensor, group: KVCacheGroup, group_index: int, layer: int, byte_offset: int, spec: ModelSpec
) -> LayerCache:
    """Return the cache of a layer whose keys begin `byte_offset` bytes into each page."""
    layer_spec, tokens = spec.layers[layer], group.page_tokens
    numbers = buffer.view(torch.int8) if layer_spec.has_int8_kv else buffer
    page, cell = group.page_bytes // numbers.itemsize, layer_spec.cell_bytes(buffer.itemsize) // numbers.itemsize
    shape = len(numbers) // page, layer_spec.kv_heads, tokens, layer_spec.head_dim
    strides, first = (page, tokens * cell, cell, 1), byte_offset // numbers.itemsize
    half = layer_spec.kv_heads * tokens * cell  # all keys of a page
    keys, values = (numbers.as_strided(shape, strides, first + i * half) for i in range(2))
    return LayerCache(keys, values, group=group_index, **attention_settings(spec, layer))
