"""Views of the one buffer that holds all pages: as pages of every size, and as each layer's keys and values, or states.

A page is a run of tokens of all layers of its group, one layer after another (Jenga §4.2's page-layer partition): keys,
then values, of each head the page's tokens, in 8 bits each with its scale behind it; or all parts of the state after a
run's latest token, each where any number may begin.
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
from quire.kernels.mamba_states import StateCache
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import STATE_ALIGNMENT, ModelSpec, StateTensor

USE_OTHER_PAGE_SIZE = "Use another --page-size or --table-scope"


def check_kv_cache_config(kv_config: KVCacheConfig, spec: ModelSpec) -> None:
    """StartupError for a geometry of which these views can't be made, with its numbers."""
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
    """For each size of pages, in bytes: the buffer as [pages, numbers], whosever they are."""
    found = {}
    for size in dict.fromkeys(group.page_bytes for group in kv_config.groups):
        numbers = size // buffer.itemsize
        count = len(buffer) // numbers
        found[size] = buffer[: count * numbers].view(count, numbers)
    return found


def layer_caches(buffer: Tensor, kv_config: KVCacheConfig, spec: ModelSpec) -> dict[int, LayerCache]:
    """The keys and values of each layer that attends to tokens, in the order of the layers."""
    caches: dict[int, LayerCache] = {}
    for g, group in enumerate(kv_config.groups):
        if group.kind not in ("state", "cross"):
            caches |= _group_caches(buffer, group, g, spec)
    return add_shared_layers(caches, spec)


def cross_caches(buffer: Tensor, kv_config: KVCacheConfig, spec: ModelSpec) -> dict[int, LayerCache]:
    """The keys and values of pictures' rows, of each layer that attends to them: which doesn't write them."""
    caches: dict[int, LayerCache] = {}
    for g, group in enumerate(kv_config.groups):
        if group.kind == "cross":
            caches |= {i: replace(cache, writes_kv=False) for i, cache in _group_caches(buffer, group, g, spec).items()}
    return {i: caches[i] for i in sorted(caches)}


def _group_caches(buffer: Tensor, group: KVCacheGroup, group_index: int, spec: ModelSpec) -> dict[int, LayerCache]:
    """Those of a group's layers, one behind the other in its pages."""
    caches: dict[int, LayerCache] = {}
    at = 0
    for i in group.layers:
        caches[i] = _layer_cache(buffer, group, group_index, i, at, spec)
        at += spec.layers[i].token_bytes(buffer.itemsize) * group.run_tokens
    return caches


def add_shared_layers(caches: dict[int, LayerCache], spec: ModelSpec) -> dict[int, LayerCache]:
    """Those of all layers, in order: one that shares reads its owner's keys and values, and writes none."""
    for i, layer in enumerate(spec.layers):
        if layer.kv_source_layer is not None and layer.kv_source_layer in caches:  # another stage's layers aren't here
            caches[i] = replace(caches[layer.kv_source_layer], writes_kv=False, **attention_settings(spec, i))
    return {i: caches[i] for i in sorted(caches)}


def state_caches(
    buffer: Tensor, kv_config: KVCacheConfig, spec: ModelSpec, state_dtype: torch.dtype
) -> dict[int, StateCache]:
    """The running states of each layer that has one: the convolution's of numbers as the buffer's are, the other of
    `state_dtype`."""
    caches: dict[int, StateCache] = {}
    for g, group in enumerate(kv_config.groups):
        at = 0
        for i in group.layers if group.kind == "state" else ():
            views = {}
            for part in spec.layers[i].state_tensors:
                dtype = state_dtype if part.name == "ssm" else buffer.dtype
                views[part.name] = _state_view(buffer, group, part, at, dtype)
                at += part.padded_bytes
            caches[i] = StateCache(views["conv"], views["ssm"], g, group.run_tokens)
    return caches


def _state_view(
    buffer: Tensor, group: KVCacheGroup, state_tensor: StateTensor, byte_offset: int, dtype: torch.dtype
) -> Tensor:
    """[pages, *part.shape]: what begins `byte_offset` bytes behind the beginning of a page."""
    size = dtype.itemsize
    assert size == state_tensor.itemsize, (
        f"{state_tensor.name} is of numbers of {state_tensor.itemsize} bytes, and the runner's have {size}"
    )
    plain = buffer.view(torch.uint8)
    pages = len(plain) // group.page_bytes
    numbers = plain[: pages * group.page_bytes].view(dtype)
    inner = [prod(state_tensor.shape[i + 1 :]) for i in range(len(state_tensor.shape))]
    return numbers.as_strided((pages, *state_tensor.shape), (group.page_bytes // size, *inner), byte_offset // size)


def image_embed_pages(buffer: Tensor, group: KVCacheGroup, embed_dim: int) -> Tensor:
    """[pages, run_tokens, width]: the rows of pictures that lie in a group's pages, one behind the other, from each
    page's beginning on."""
    page = group.page_bytes // buffer.itemsize
    assert group.run_tokens * embed_dim <= page, f"{group.run_tokens} rows of {embed_dim} numbers in a page of {page}"
    return buffer.as_strided((len(buffer) // page, group.run_tokens, embed_dim), (page, embed_dim, 1))


def attention_settings(spec: ModelSpec, layer: int) -> dict[str, Any]:
    """How a layer attends, as a LayerCache says it."""
    kept = spec.layers[layer]
    scale = kept.head_dim**-0.5 if kept.scale is None else kept.scale
    return {
        "heads": kept.heads or spec.heads, "scale": scale, "softcap": kept.softcap, "window": kept.window,
        "chunk": kept.chunk, "budget": kept.budget, "selection": spec.selection,
    }  # fmt: skip


def _layer_cache(
    buffer: Tensor, group: KVCacheGroup, group_index: int, layer: int, byte_offset: int, spec: ModelSpec
) -> LayerCache:
    """That of a layer whose keys begin `byte_offset` bytes behind the beginning of a page."""
    kept, tokens = spec.layers[layer], group.page_tokens
    numbers = buffer.view(torch.int8) if kept.has_int8_kv else buffer
    page, cell = group.page_bytes // numbers.itemsize, kept.cell_bytes(buffer.itemsize) // numbers.itemsize
    shape = len(numbers) // page, kept.kv_heads, tokens, kept.head_dim
    strides, first = (page, tokens * cell, cell, 1), byte_offset // numbers.itemsize
    keys, values = (numbers.as_strided(shape, strides, first + i * kept.kv_heads * tokens * cell) for i in range(2))
    return LayerCache(keys, values, group=group_index, **attention_settings(spec, layer))
