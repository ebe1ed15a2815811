"""The layout of a memory: which layers share page tables, how large their pages are, and how many there are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from quire.config import PAGE_TABLE_MEMORIES, EngineConfig
from quire.errors import StartupError
from quire.memory.jenga.page_sizes import (
    PAGE_ALIGNMENT,
    LayerType,
    max_large_bytes,
    max_page,
    plan_pages,
    split_into_equal_sets,
)
from quire.memory.page_pool import WATERMARK_DIVISOR
from quire.memory.requirements import check_int8_kv_cache, check_states, check_vision
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import ModelSpec, VisionSpec, place_page_ids

MIN_STATE_TOKENS, MAX_STATE_TOKENS = 16, 512
"""The fewest and the most tokens between two stored states, unless --state-tokens is given."""
STATE_SHARE = 1 / 16
"""The share of the memory that the states of one step's prompt tokens may take for a shorter interval."""
IMAGE_TYPE = str(())
"""The name of the LayerType of image embeddings: types are named by their first layer, and these have none."""
IMAGE_PADDING = Fraction(1, 4)
"""The most padding of pages of image embeddings if large pages would be too large otherwise. There are few of them."""
PAGE_SIZE_HINT = "Use --page-sizes max, or another --page-size"


class MemorySize(NamedTuple):
    """The size of a memory: `tokens` tokens in every layer, for sequences of up to `max_len` tokens.

    If `bytes` is given, and all layers share all of the memory, it has that many bytes: some layers can use what others
    do not."""

    tokens: int
    max_len: int
    itemsize: int
    bytes: int = 0


class PageSpec(NamedTuple):
    """The pages of a group of layers: a page holds `page_tokens` tokens of `token_bytes` bytes each.

    With `is_state` a page holds one state of `token_bytes` bytes, after the last of `page_tokens` tokens. There are
    `fixed_count` pages, or, if it is 0, one for each `planned_tokens` tokens (0: `page_tokens`)."""

    layers: tuple[int, ...]
    token_bytes: int
    page_bytes: int
    page_tokens: int
    is_state: bool = False
    fixed_count: int = 0
    planned_tokens: int = 0

    def num_pages(self, tokens: int, seqs: int = 0) -> int:
        """Return the pages for `tokens` tokens, with a state for each of `seqs` sequences."""
        run = self.planned_tokens or self.page_tokens
        return self.fixed_count or max(-(-tokens // run), seqs if self.is_state else 0)


class PageLayout(NamedTuple):
    """The pages of each group; a token takes a place in a page of each. `large_bytes` is the size of the large pages
    that contain them, or 0 if there are none."""

    specs: tuple[PageSpec, ...]
    large_bytes: int = 0

    @property
    def small_pages_per_large(self) -> list[int]:
        """For each group the number of its pages in a large page."""
        return [self.large_bytes // page_spec.page_bytes for page_spec in self.specs]

    @property
    def token_granularity(self) -> int:
        """The tokens of the smallest page: a memory is sized in multiples of it."""
        return min(page_spec.page_tokens for page_spec in self.specs)

    @property
    def token_bytes(self) -> int:
        """The bytes of pages that a token takes, with padding. States do not count, unless there is nothing else: then
        a token takes its share of one."""
        specs = [page_spec for page_spec in self.specs if not page_spec.is_state] or self.specs
        return -(
            -sum(page_spec.page_bytes * self.token_granularity // page_spec.page_tokens for page_spec in specs)
            // self.token_granularity
        )

    def total_bytes(self, tokens: int, seqs: int = 0) -> int:
        """Return the bytes of a memory for `tokens` tokens in every group, and the states of `seqs` sequences."""
        counts = [page_spec.num_pages(tokens, seqs) for page_spec in self.specs]
        if self.large_bytes:
            return (
                sum(-(-count // ratio) for count, ratio in zip(counts, self.small_pages_per_large)) * self.large_bytes
            )
        return sum(count * page_spec.page_bytes for count, page_spec in zip(counts, self.specs))

    def max_tokens(self, pool_bytes: int) -> int:
        """Return the most tokens, in steps of `token_granularity`, that every group holds in `pool_bytes` bytes."""
        pool_bytes -= sum(page_spec.fixed_count * page_spec.page_bytes for page_spec in self.specs)
        cost = sum(
            Fraction(page_spec.page_bytes, page_spec.planned_tokens or page_spec.page_tokens)
            for page_spec in self.specs
            if not page_spec.fixed_count
        )
        if not cost:
            return (
                min(page_spec.fixed_count * page_spec.page_tokens for page_spec in self.specs) if pool_bytes >= 0 else 0
            )
        most, fixed = int(pool_bytes / cost) // self.token_granularity, self.total_bytes(0)
        while most > 0 and self.total_bytes(most * self.token_granularity) - fixed > pool_bytes:
            most -= 1
        return max(most, 0) * self.token_granularity


def as_uniform(spec: ModelSpec) -> ModelSpec:
    """Return the model as PagedAttention in vLLM 0.6.3 stores it: every layer keeps every token. The attention of
    layers does not change: the runner has the original model."""
    layers = (replace(one, window=None, chunk=None, budget=None, policy=None) for one in spec.layers)
    return replace(spec, layers=tuple(layers))


def plan_page_layout(config: EngineConfig, spec: ModelSpec, itemsize: int, pool_bytes: int = 0) -> PageLayout:
    """Return the layout of a memory of `pool_bytes` bytes, by `config`'s page sizes. StartupError if there is none, or
    its large pages would be too large for the pool."""
    [page_layout] = plan_joint_layouts([(config, spec, itemsize)], pool_bytes)
    return page_layout


def plan_joint_layouts(models: Sequence[tuple[EngineConfig, ModelSpec, int]], pool_bytes: int = 0) -> list[PageLayout]:
    """Return the layouts of models (config, spec, itemsize) that share a pool. The first config applies to all."""
    config = models[0][0]
    layer_sets = [group_layers(*model) for model in models]
    types = [
        [LayerType(str(layers[:1]), _page_bytes(*model, layers), _page_multiple(*model, layers)) for layers in sets]
        for model, sets in zip(models, layer_sets)
    ]
    all_types = [kind for model_types in types for kind in model_types]
    sizes, large = [-(-kind.page_bytes // kind.page_multiple) * kind.page_multiple for kind in all_types], 0
    if config.memory == "uniform":
        sizes = [
            size
            for model, sets, model_types in zip(models, layer_sets, types)
            for size in _uniform_page_bytes(model[1], sets, model_types)
        ]
    elif config.experiment.page_sizes == "max" or config.memory not in PAGE_TABLE_MEMORIES:
        sizes = [max_page(all_types)] * len(all_types)
    elif config.experiment.page_sizes == "lcm" and len(set(sizes)) > 1:
        sizes, large = _plan_large_pages(all_types, max_large_bytes(pool_bytes))
    remaining_sizes = iter(sizes)
    return [
        PageLayout(tuple(_page_spec(*model, layers, next(remaining_sizes), pool_bytes) for layers in sets), large)
        for model, sets in zip(models, layer_sets)
    ]


def check_large_pages(page_layout: PageLayout, pool_bytes: int) -> None:
    """Raise StartupError if `pool_bytes` bytes have fewer large pages than there are groups: each group needs one."""
    large, groups = page_layout.large_bytes, len(page_layout.specs)
    if large and pool_bytes // large < groups:
        least = plan_pages([LayerType("", page_spec.page_bytes) for page_spec in page_layout.specs], 0).large_bytes
        padded = f" ({least:,} if pages were padded by at most 3 %)" if least < large else ""
        raise StartupError(
            f"a large page has {large:,} bytes{padded}, and {pool_bytes:,} bytes of KV memory are "
            f"{pool_bytes // large} of them; "
            f"each of {groups} groups of layers needs one",
            f"{PAGE_SIZE_HINT}, or a larger --kv-gib",
        )


def tokens_for_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, pool_bytes: int) -> int:
    """Return the tokens that a memory of `pool_bytes` bytes holds in every layer."""
    page_layout = plan_page_layout(config, spec, itemsize, pool_bytes)
    if not spec.state_layers and (len(page_layout.specs) == 1 or config.memory == "virtual"):
        return pool_bytes // spec.token_bytes(itemsize)
    return page_layout.max_tokens(pool_bytes)


def group_layers(config: EngineConfig, spec: ModelSpec, itemsize: int) -> list[tuple[int, ...]]:
    """Return the layers of each group: those that share page tables."""
    owners = spec.kv_layers  # without the layers that use another layer's keys and values
    if spec.state_layers:
        check_states(config, spec)
    embed_groups: list[tuple[int, ...]] = []
    if spec.images_replace_tokens and config.experiment.vision_cache == "pages":
        embed_groups = [()]  # pages of no layer, for the embeddings that replace an image's tokens
    if spec.vision is not None:
        check_vision(config, spec, itemsize)
    if any(layer.has_int8_kv for layer in spec.layers):
        check_int8_kv_cache(config, spec)
    if config.memory == "uniform":
        of = {i: (bool(spec.layers[i].state_tensors), spec.layers[i].is_cross_attention) for i in owners}
        kinds = [tuple(i for i in owners if of[i] == kind) for kind in ((False, False), (False, True), (True, False))]
        return [layers for layers in kinds if layers] + embed_groups
    if config.experiment.table_scope == "layer":
        return [(i,) for i in owners] + embed_groups
    group_keys = {i: spec.layers[i].group_key for i in owners}
    sets = [tuple(i for i in owners if group_keys[i] == kind) for kind in dict.fromkeys(group_keys.values())]
    if config.experiment.page_sizes == "gcd" and len(sets) > 1:
        sizes = [(len(layers), spec.layers[layers[0]].token_bytes(itemsize)) for layers in sets]
        counts = split_into_equal_sets(sizes)
        if counts is None:
            shown = ", ".join(f"{many} of {size:,} bytes a token" for many, size in sizes)
            raise StartupError(
                f"--page-sizes is gcd, and no sets of layers have equal bytes: {shown}"[:400], PAGE_SIZE_HINT
            )
        return [layers[at : at + n] for layers, n in zip(sets, counts) for at in range(0, len(layers), n)]
    return sets + embed_groups


def _is_state(spec: ModelSpec, layers: Sequence[int]) -> bool:
    return bool(layers) and bool(spec.layers[layers[0]].state_tensors)


def _uniform_page_bytes(spec: ModelSpec, sets: Sequence[tuple[int, ...]], types: Sequence[LayerType]) -> list[int]:
    """Return the sizes of uniform pages: states have their own, and everything else, image embeddings included, takes a
    place in every layer (so Llama 3.2 Vision wastes 79.6 % in vLLM 0.6.3: Jenga §3.2)."""
    whole = sum(kind.page_bytes for layers, kind in zip(sets, types) if layers and not _is_state(spec, layers))
    return [kind.page_bytes if _is_state(spec, layers) else whole for layers, kind in zip(sets, types)]


def _page_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: Sequence[int]) -> int:
    """Return the bytes that a page of these layers holds: their tokens, then their states."""
    if not layers:
        assert spec.vision is not None, "pages of no layer hold image embeddings"
        return config.page_size * spec.vision.embed_dim * itemsize
    size = config.page_size * sum(spec.layers[i].token_bytes(itemsize) for i in layers)
    return size + sum(spec.layers[i].state_bytes for i in layers)


def _page_multiple(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: Sequence[int]) -> int:
    """Return the bytes of one head's tokens in a page, of which the page size must be a multiple."""
    if not layers or spec.layers[layers[0]].state_tensors:
        return PAGE_ALIGNMENT
    return math.lcm(*(spec.layers[i].cell_bytes(itemsize) * config.page_size for i in layers))


def _page_spec(
    config: EngineConfig,
    spec: ModelSpec,
    itemsize: int,
    layers: tuple[int, ...],
    page_bytes: int,
    pool_bytes: int,
) -> PageSpec:
    held = _page_bytes(config, spec, itemsize, layers)
    if not _is_state(spec, layers):
        return PageSpec(layers, held // config.page_size, page_bytes, config.page_size)
    # With uniform pages each sequence has one permanent state, separate from the pages (vLLM 0.6.3).
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    fixed = config.max_num_seqs + config.max_num_seqs // WATERMARK_DIVISOR + 1 if config.memory == "uniform" else 0
    interval = state_interval(config, spec, pool_bytes)
    # States at a shorter interval are stored for a step or two: few of them stay (quire.memory.jenga.retention).
    planned = max(interval, state_interval(config, spec))
    return PageSpec(layers, held, page_bytes, interval, True, fixed, planned)


def state_interval(config: EngineConfig, spec: ModelSpec, pool_bytes: int = 0) -> int:
    """Return the tokens between two stored states, in a memory of `pool_bytes` bytes. Without reuse of prefixes a
    sequence has only one state.

    A hit ends at a stored state, so a shorter interval finds more of a prefix; but a step stores the states of all its
    prompt tokens. Without --state-tokens the interval is halved while they fit in STATE_SHARE of a memory that all
    layers share."""
    if not stores_states(config):
        return -(-(config.max_model_len or spec.max_len) // config.page_size) * config.page_size
    if config.experiment.state_tokens is not None:
        return config.experiment.state_tokens
    interval = max(MAX_STATE_TOKENS // config.page_size, 1) * config.page_size
    is_shared = config.experiment.page_sizes == "lcm" and len(spec.state_layers) < len(spec.kv_layers)
    if not (is_shared and config.max_num_batched_tokens):
        return interval
    while (
        interval >= 2 * MIN_STATE_TOKENS
        and interval % (2 * config.page_size) == 0
        and 2 * spec.state_bytes * config.max_num_batched_tokens <= interval * STATE_SHARE * pool_bytes
    ):
        interval //= 2
    return interval


def stores_states(config: EngineConfig) -> bool:
    """Return True if states are stored where prefixes can be hit."""
    return config.memory != "uniform" and (config.enable_prefix_caching or config.prefix_tokens > 0)


def _plan_large_pages(types: Sequence[LayerType], limit: int) -> tuple[list[int], int]:
    """Return the page sizes of the types, and that of large pages, or 0 if padding makes all pages equal. StartupError
    if large pages exceed `limit` bytes, and the largest type's pages: those of states may have 100 MB and more."""
    limit = max(limit, *(kind.max_padded_bytes for kind in types))
    plan = plan_pages(types, limit)
    if plan.large_bytes > limit:
        padded = [kind._replace(max_padding=IMAGE_PADDING) if kind.name == IMAGE_TYPE else kind for kind in types]
        plan = plan_pages(padded, limit)
    if plan.large_bytes > limit:
        exact = plan_pages(types, None).large_bytes
        raise StartupError(
            f"a large page would have {exact:,} bytes ({plan.large_bytes:,} with pages that are padded by at most 3 %) "
            f"for pages of {', '.join(f'{kind.page_bytes:,}' for kind in types)}"[:400]
            + f"; at most {limit:,}",
            f"{PAGE_SIZE_HINT}, or a larger --kv-gib",
        )
    return list(plan.sizes), 0 if len(set(plan.sizes)) == 1 else plan.large_bytes


class GroupAllocation(NamedTuple):
    """The pages of a group of layers: `num_pages` pages, shared by groups with the same page size.

    The other fields are as in KVCacheGroup."""

    layers: tuple[int, ...]
    page_bytes: int
    token_bytes: int
    num_pages: int
    table_width: int
    run_tokens: int
    run_pages: int = 1
    parts: int = 1


def build_kv_config(
    config: EngineConfig, spec: ModelSpec, size: MemorySize, layout: KVCacheLayout = KVCacheLayout.PAGED
) -> KVCacheConfig:
    """Return the memory layout with pages for `size.tokens` tokens in every layer, or in `size.bytes` bytes."""
    pool = size.bytes or size.tokens * spec.token_bytes(size.itemsize)
    page_layout = plan_page_layout(config, spec, size.itemsize, pool)
    stored_spec = as_uniform(spec) if config.memory == "uniform" else spec
    allocations = _allocate_groups(page_layout, config, size)
    if page_layout.large_bytes:
        kv_config = _build_two_level_config(allocations, page_layout, config, stored_spec, size)
    else:
        kv_config = assign_pages(allocations, config, stored_spec, size, layout)
    least, groups = spec.min_budget, kv_config.groups
    if least and config.memory == "uniform":
        groups = tuple(replace(group, kind="uniform", budget=least) for group in groups)
    kv_config = replace(
        kv_config, groups=groups, budget=least, queries=spec.selection.observation_window if least else 0
    )
    return kv_config if spec.vision is None else _with_images(kv_config, config, spec, spec.vision)


def _with_images(kv_config: KVCacheConfig, config: EngineConfig, spec: ModelSpec, vision: VisionSpec) -> KVCacheConfig:
    """Return `kv_config` with what images need: tables with room for as many images as a request may have."""
    row_bytes = vision.embed_dim * kv_config.itemsize
    kv_config = replace(
        kv_config, sight=config.experiment.vision_cache if spec.images_replace_tokens else "",
        row_bytes=row_bytes if spec.images_replace_tokens else 0,
        part_tokens=vision.part_tokens, part_rows=vision.part_embeds, most_rows=vision.max_embeds,
        both_ways=vision.bidirectional_prompt, whole_images=vision.bidirectional_images,
    )  # fmt: skip
    widths = [group.table_width for group in kv_config.groups]
    for g, group in enumerate(kv_config.groups):
        if group.kind in ("cross", "vision"):
            widths[g] = max(config.max_images, 1) * group.num_pages(vision.max_embeds)
    if kv_config.sight == "inside":
        widths[kv_config.image_embed_group] += 1
    return replace(
        kv_config, groups=tuple(replace(group, table_width=width) for group, width in zip(kv_config.groups, widths))
    )


def _allocate_groups(page_layout: PageLayout, config: EngineConfig, size: MemorySize) -> list[GroupAllocation]:
    seqs = count_states(config, size.tokens)
    if size.bytes and page_layout.total_bytes(size.tokens, seqs) > size.bytes:
        seqs = 0
    return [
        GroupAllocation(
            page_spec.layers, page_spec.page_bytes, page_spec.token_bytes, page_spec.num_pages(size.tokens, seqs),
            -(-size.max_len // page_spec.page_tokens), page_spec.page_tokens,
        )
        for page_spec in page_layout.specs
    ]  # fmt: skip


def count_states(config: EngineConfig, tokens: int) -> int:
    """Return the number of sequences with a state each in a memory that is sized by tokens: `max_num_seqs`, or fewer if
    there are fewer pages of tokens."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    return min(config.max_num_seqs, -(-tokens // config.page_size))


def _build_two_level_config(
    allocations: Sequence[GroupAllocation],
    page_layout: PageLayout,
    config: EngineConfig,
    spec: ModelSpec,
    size: MemorySize,
) -> KVCacheConfig:
    """Return the layout with all groups' pages in large pages, after a scratch large page (Jenga §4.1)."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    large = page_layout.large_bytes
    count = (size.bytes or page_layout.total_bytes(size.tokens, count_states(config, size.tokens))) // large
    check_large_pages(page_layout, count * large)
    host_pages = min(int(config.swap_gib * 2**30) // large, count)
    groups = tuple(
        _build_group(allocation, spec, range(ratio, (count + 1) * ratio), range(1, host_pages * ratio + 1))
        for allocation, ratio in zip(allocations, page_layout.small_pages_per_large)
    )
    slots = config.max_num_seqs + 1
    return KVCacheConfig(
        KVCacheLayout.PAGED, (count + 1) * large, slots, groups, size.itemsize, host_pages * large, large
    )


def _build_group(allocation: GroupAllocation, spec: ModelSpec, ids: range, host_ids: range) -> KVCacheGroup:
    layers, page_bytes, token_bytes, _, width, run_tokens, run_pages, parts = allocation
    if not layers:
        return KVCacheGroup((), page_bytes, token_bytes, width, ids, host_ids, run_tokens, kind="vision")
    first = spec.layers[layers[0]]
    return KVCacheGroup(
        layers, page_bytes, token_bytes, width, ids, host_ids, run_tokens, run_pages, first.window, first.kind, parts,
        first.chunk, first.budget, first.is_draft, first.reads_hidden_states,
    )  # fmt: skip


def assign_pages(
    allocations: list[GroupAllocation], config: EngineConfig, spec: ModelSpec, size: MemorySize, layout: KVCacheLayout
) -> KVCacheConfig:
    """Return the layout with page ids for these pages.

    Ids begin after the scratch page, which is page 0 of every group; groups with pages of one size share them. Host
    pages are as many as `config.swap_gib` holds, in the same proportions, and at most those of the device
    (PagedAttention §4.5)."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    counts: dict[int, int] = {}  # page bytes -> pages; the smallest pages first, so that ids are small numbers
    for allocation in sorted(allocations, key=lambda allocation: allocation.page_bytes):
        counts[allocation.page_bytes] = counts.get(allocation.page_bytes, 0) + allocation.num_pages
    ids, end = place_page_ids(list(counts.items()), max(counts))
    swap, whole = int(config.swap_gib * 2**30), sum(page_bytes * count for page_bytes, count in counts.items())
    hosts = [(page_bytes, min(swap * count // whole, count)) for page_bytes, count in counts.items()]
    host_rows, host_end = place_page_ids(hosts, 0)
    own = dict(zip(counts, ids))
    own_host = {page_bytes: range(rows.start + 1, rows.stop + 1) for page_bytes, rows in zip(counts, host_rows)}
    groups = tuple(
        _build_group(allocation, spec, own[allocation.page_bytes], own_host[allocation.page_bytes])
        for allocation in allocations
    )
    return KVCacheConfig(layout, end, config.max_num_seqs + 1, groups, size.itemsize, host_end)


def build_joint_kv_configs(
    models: Sequence[tuple[EngineConfig, ModelSpec, MemorySize]], pool_bytes: int
) -> list[KVCacheConfig]:
    """Return the layouts of models that share a buffer of `pool_bytes` bytes, with separate host memory (Jenga §8).

    Their pages are parts of the same large pages, or all of one size, which are then the large pages."""
    layouts = plan_joint_layouts([(config, spec, size.itemsize) for config, spec, size in models], pool_bytes)
    specs = tuple(page_spec for layout in layouts for page_spec in layout.specs)
    large = layouts[0].large_bytes or specs[0].page_bytes
    check_large_pages(PageLayout(specs, large), pool_bytes)
    kv_configs = []
    for layout, (config, spec, size) in zip(layouts, models):
        layout, size = layout._replace(large_bytes=large), size._replace(bytes=pool_bytes)
        kv_config = _build_two_level_config(_allocate_groups(layout, config, size), layout, config, spec, size)
        kv_config = replace(kv_config, large_bytes=layouts[0].large_bytes)
        kv_configs.append(kv_config if spec.vision is None else _with_images(kv_config, config, spec, spec.vision))
    return kv_configs
