"""How a memory is cut into pages: which layers share page tables, how large their pages are, and how many there are."""

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

PAGE_SIZE_HINT = "Use --page-sizes max, or another --page-size"


class MemorySize(NamedTuple):
    """How large a memory is to be: `tokens` of capacity in every layer, for sequences of up to `max_len` tokens. Where
    all layers have all of the memory in common it has `bytes`, if they are given: what some don't use others may."""

    tokens: int
    max_len: int
    itemsize: int
    bytes: int = 0


class PageSpec(NamedTuple):
    """The pages of some layers: `page_tokens` tokens fill one, `token_bytes` each; or a state of `token_bytes` bytes is
    one, after the latest of so many tokens. There are `fixed_count` of them, or 0: as many as tokens need."""

    layers: tuple[int, ...]
    token_bytes: int
    page_bytes: int
    page_tokens: int
    is_state: bool = False
    fixed_count: int = 0

    def num_pages(self, tokens: int, seqs: int = 0) -> int:
        """Pages for so many tokens, with a state for each of `seqs` sequences."""
        return self.fixed_count or max(-(-tokens // self.page_tokens), seqs if self.is_state else 0)


class PageLayout(NamedTuple):
    """The pages of each group, of which a token takes a place in one of each; and the bytes of the large pages that all
    of them are parts of, or 0 where there are none."""

    specs: tuple[PageSpec, ...]
    large_bytes: int = 0

    @property
    def small_pages_per_large(self) -> list[int]:
        """Pages of a large one, a group."""
        return [self.large_bytes // sheet.page_bytes for sheet in self.specs]

    @property
    def token_granularity(self) -> int:
        """Tokens of the smallest run: a memory is for a multiple of so many."""
        return min(sheet.page_tokens for sheet in self.specs)

    @property
    def token_bytes(self) -> int:
        """Bytes of pages that a token takes, what pads them included. States are none of any token's, unless there is
        nothing else: then a token has its part of one."""
        sheets = [sheet for sheet in self.specs if not sheet.is_state] or self.specs
        return -(
            -sum(sheet.page_bytes * self.token_granularity // sheet.page_tokens for sheet in sheets)
            // self.token_granularity
        )

    def total_bytes(self, tokens: int, seqs: int = 0) -> int:
        """Bytes of a memory that holds so many tokens in every group, and states of so many sequences."""
        counts = [sheet.num_pages(tokens, seqs) for sheet in self.specs]
        if self.large_bytes:
            return (
                sum(-(-count // ratio) for count, ratio in zip(counts, self.small_pages_per_large)) * self.large_bytes
            )
        return sum(count * sheet.page_bytes for count, sheet in zip(counts, self.specs))

    def max_tokens(self, pool_bytes: int) -> int:
        """The most tokens that every group holds at once in so many bytes: whole steps."""
        pool_bytes -= sum(sheet.fixed_count * sheet.page_bytes for sheet in self.specs)
        cost = sum(Fraction(sheet.page_bytes, sheet.page_tokens) for sheet in self.specs if not sheet.fixed_count)
        if not cost:
            return min(sheet.fixed_count * sheet.page_tokens for sheet in self.specs) if pool_bytes >= 0 else 0
        most, fixed = int(pool_bytes / cost) // self.token_granularity, self.total_bytes(0)
        while most > 0 and self.total_bytes(most * self.token_granularity) - fixed > pool_bytes:
            most -= 1
        return max(most, 0) * self.token_granularity


def as_uniform(spec: ModelSpec) -> ModelSpec:
    """The model as PagedAttention has it, of vLLM 0.6.3: every layer keeps every token. What layers look at stays what
    it is: the runner knows."""
    layers = (replace(one, window=None, chunk=None, budget=None, policy=None) for one in spec.layers)
    return replace(spec, layers=tuple(layers))


def plan_page_layout(config: EngineConfig, spec: ModelSpec, itemsize: int, pool_bytes: int = 0) -> PageLayout:
    """The pages of a memory of `pool_bytes` bytes, as `config.page_sizes` says. StartupError if layers can't be cut so,
    or if large pages were larger than the pool can have them."""
    [sheets] = plan_joint_layouts([(config, spec, itemsize)], pool_bytes)
    return sheets


def plan_joint_layouts(models: Sequence[tuple[EngineConfig, ModelSpec, int]], pool_bytes: int = 0) -> list[PageLayout]:
    """The same for models that have the pool in common: (config, spec, itemsize) each. Pages are cut as the first one's
    config says."""
    config = models[0][0]
    parts = [group_layers(*model) for model in models]
    types = [
        [LayerType(str(layers[:1]), _page_bytes(*model, layers), _page_multiple(*model, layers)) for layers in sets]
        for model, sets in zip(models, parts)
    ]
    every = [kind for own in types for kind in own]
    sizes, large = [-(-kind.page_bytes // kind.page_multiple) * kind.page_multiple for kind in every], 0
    if config.memory == "uniform":
        sizes = [
            size for model, sets, own in zip(models, parts, types) for size in _uniform_page_bytes(model[1], sets, own)
        ]
    elif config.page_sizes == "max" or config.memory not in PAGE_TABLE_MEMORIES:
        sizes = [max_page(every)] * len(every)
    elif config.page_sizes == "lcm" and len(set(sizes)) > 1:
        sizes, large = _plan_large_pages(every, max_large_bytes(pool_bytes))
    left = iter(sizes)
    return [
        PageLayout(tuple(_page_spec(*model, layers, next(left)) for layers in sets), large)
        for model, sets in zip(models, parts)
    ]


def check_large_pages(page_layout: PageLayout, pool_bytes: int) -> None:
    """StartupError if there are fewer large pages in so many bytes than groups, each of which needs one."""
    large, groups = page_layout.large_bytes, len(page_layout.specs)
    if large and pool_bytes // large < groups:
        least = plan_pages([LayerType("", sheet.page_bytes) for sheet in page_layout.specs], 0).large_bytes
        padded = f" ({least:,} if pages were padded by at most 3 %)" if least < large else ""
        raise StartupError(
            f"a large page has {large:,} bytes{padded}, and {pool_bytes:,} bytes of KV memory are "
            f"{pool_bytes // large} of them; "
            f"each of {groups} groups of layers needs one",
            f"{PAGE_SIZE_HINT}, or a larger --kv-gib",
        )


def tokens_for_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, pool_bytes: int) -> int:
    """Tokens that a memory of so many bytes holds in every layer."""
    sheets = plan_page_layout(config, spec, itemsize, pool_bytes)
    if not spec.state_layers and (len(sheets.specs) == 1 or config.memory == "virtual"):
        return pool_bytes // spec.token_bytes(itemsize)
    return sheets.max_tokens(pool_bytes)


def group_layers(config: EngineConfig, spec: ModelSpec, itemsize: int) -> list[tuple[int, ...]]:
    """The layers of each group: those that share page tables."""
    owners = spec.kv_layers  # a layer that shares another's keys and values keeps none
    if spec.state_layers:
        check_states(config, spec)
    rows: list[tuple[int, ...]] = [()] if has_embed_pages(config, spec) else []  # pages of no layer
    if spec.vision is not None:
        check_vision(config, spec, itemsize)
    if any(layer.has_int8_kv for layer in spec.layers):
        check_int8_kv_cache(config, spec)
    if config.memory == "uniform":
        of = {i: (bool(spec.layers[i].state_tensors), spec.layers[i].is_cross_attention) for i in owners}
        kinds = [tuple(i for i in owners if of[i] == kind) for kind in ((False, False), (False, True), (True, False))]
        return [layers for layers in kinds if layers] + rows
    if config.table_scope == "layer":
        return [(i,) for i in owners] + rows
    kept = {i: spec.layers[i].group_key for i in owners}
    sets = [tuple(i for i in owners if kept[i] == kind) for kind in dict.fromkeys(kept.values())]
    if config.page_sizes == "gcd" and len(sets) > 1:
        sizes = [(len(layers), spec.layers[layers[0]].token_bytes(itemsize)) for layers in sets]
        counts = split_into_equal_sets(sizes)
        if counts is None:
            shown = ", ".join(f"{many} of {size:,} bytes a token" for many, size in sizes)
            raise StartupError(
                f"--page-sizes is gcd, and no sets of layers have equal bytes: {shown}"[:400], PAGE_SIZE_HINT
            )
        return [layers[at : at + n] for layers, n in zip(sets, counts) for at in range(0, len(layers), n)]
    return sets + rows


def has_embed_pages(config: EngineConfig, spec: ModelSpec) -> bool:
    """Whether rows that take the places of a picture's tokens have pages of their own."""
    return spec.images_replace_tokens and config.vision_cache == "pages"


def _is_state(spec: ModelSpec, layers: Sequence[int]) -> bool:
    return bool(layers) and bool(spec.layers[layers[0]].state_tensors)


def _uniform_page_bytes(spec: ModelSpec, sets: Sequence[tuple[int, ...]], types: Sequence[LayerType]) -> list[int]:
    """The sizes of uniform pages: states are apart, and whatever else has a place, a picture's rows too, has one in
    every layer (so Llama 3.2 Vision wastes 79.6 % in vLLM 0.6.3: Jenga §3.2)."""
    whole = sum(kind.page_bytes for layers, kind in zip(sets, types) if layers and not _is_state(spec, layers))
    return [kind.page_bytes if _is_state(spec, layers) else whole for layers, kind in zip(sets, types)]


def _page_bytes(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: Sequence[int]) -> int:
    """Bytes of the tokens of these layers in a page; of their states, one after another."""
    if not layers:
        assert spec.vision is not None, "pages of no layer hold rows of pictures"
        return config.page_size * spec.vision.embed_dim * itemsize
    size = config.page_size * sum(spec.layers[i].token_bytes(itemsize) for i in layers)
    return size + sum(spec.layers[i].state_bytes for i in layers)


def _page_multiple(config: EngineConfig, spec: ModelSpec, itemsize: int, layers: Sequence[int]) -> int:
    """Bytes of a head's tokens in a page: pages are a whole number of them."""
    if not layers or spec.layers[layers[0]].state_tensors:
        return PAGE_ALIGNMENT
    return math.lcm(*(spec.layers[i].cell_bytes(itemsize) * config.page_size for i in layers))


def _page_spec(
    config: EngineConfig, spec: ModelSpec, itemsize: int, layers: tuple[int, ...], page_bytes: int
) -> PageSpec:
    held = _page_bytes(config, spec, itemsize, layers)
    if not _is_state(spec, layers):
        return PageSpec(layers, held // config.page_size, page_bytes, config.page_size)
    # Uniform pages leave each sequence a state for good, which is apart from them (vLLM 0.6.3).
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    fixed = config.max_num_seqs + config.max_num_seqs // WATERMARK_DIVISOR + 1 if config.memory == "uniform" else 0
    return PageSpec(layers, held, page_bytes, state_interval(config, spec), True, fixed)


def state_interval(config: EngineConfig, spec: ModelSpec) -> int:
    """Tokens behind each of which there is a state: where none is ever found again a sequence has one alone."""
    if config.memory != "uniform" and (config.enable_prefix_caching or config.prefix_tokens):
        return config.state_tokens
    return -(-(config.max_model_len or spec.max_len) // config.page_size) * config.page_size


def _plan_large_pages(types: Sequence[LayerType], limit: int) -> tuple[list[int], int]:
    """The sizes of the types' pages, and that of the large ones; 0 where padding made them equal."""
    plan = plan_pages(types, limit)
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
    """What a group of layers has of a memory: `num_pages` pages, which other groups with pages of that size have too.
    The rest is as in Group."""

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
    """The pages for `size.tokens` tokens in every layer, or those in `size.bytes`."""
    pool = size.bytes or size.tokens * spec.token_bytes(size.itemsize)
    sheets = plan_page_layout(config, spec, size.itemsize, pool)
    kept = as_uniform(spec) if config.memory == "uniform" else spec
    shares = _allocate_groups(sheets, config, size)
    if sheets.large_bytes:
        found = _build_two_level_config(shares, sheets, config, kept, size)
    else:
        found = assign_pages(shares, config, kept, size, layout)
    least, groups = spec.min_budget, found.groups
    if least and config.memory == "uniform":
        groups = tuple(replace(group, kind="uniform", budget=least) for group in groups)
    found = replace(found, groups=groups, budget=least, queries=spec.selection.observation_window if least else 0)
    return found if spec.vision is None else _with_images(found, config, spec, spec.vision)


def _with_images(kv_config: KVCacheConfig, config: EngineConfig, spec: ModelSpec, vision: VisionSpec) -> KVCacheConfig:
    """The same for pictures: tables have places for as many as a request may have."""
    rows = vision.embed_dim * kv_config.itemsize
    kv_config = replace(
        kv_config, sight=config.vision_cache if spec.images_replace_tokens else "",
        row_bytes=rows if spec.images_replace_tokens else 0,
        part_tokens=vision.part_tokens, part_rows=vision.part_embeds, most_rows=vision.max_embeds,
        both_ways=vision.bidirectional_prompt,
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
            sheet.layers, sheet.page_bytes, sheet.token_bytes, sheet.num_pages(size.tokens, seqs),
            -(-size.max_len // sheet.page_tokens), sheet.page_tokens,
        )
        for sheet in page_layout.specs
    ]  # fmt: skip


def count_states(config: EngineConfig, tokens: int) -> int:
    """Sequences that are to have a state each, in a memory that is sized by its tokens: all of them, or as many as have
    a page of tokens."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    return min(config.max_num_seqs, -(-tokens // config.page_size))


def _build_two_level_config(
    allocations: Sequence[GroupAllocation],
    page_layout: PageLayout,
    config: EngineConfig,
    spec: ModelSpec,
    size: MemorySize,
) -> KVCacheConfig:
    """All groups' pages in large pages, behind a scratch one (Jenga §4.1)."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    large = page_layout.large_bytes
    count = (size.bytes or page_layout.total_bytes(size.tokens, count_states(config, size.tokens))) // large
    check_large_pages(page_layout, count * large)
    hosts = min(int(config.swap_gib * 2**30) // large, count)
    groups = tuple(
        _build_group(share, spec, range(ratio, (count + 1) * ratio), range(1, hosts * ratio + 1))
        for share, ratio in zip(allocations, page_layout.small_pages_per_large)
    )
    slots = config.max_num_seqs + 1
    return KVCacheConfig(KVCacheLayout.PAGED, (count + 1) * large, slots, groups, size.itemsize, hosts * large, large)


def _build_group(allocation: GroupAllocation, spec: ModelSpec, ids: range, host_ids: range) -> KVCacheGroup:
    if not allocation.layers:
        return KVCacheGroup(
            (),
            allocation.page_bytes,
            allocation.token_bytes,
            allocation.table_width,
            ids,
            host_ids,
            allocation.run_tokens,
            kind="vision",
        )
    first = spec.layers[allocation.layers[0]]
    return KVCacheGroup(
        allocation.layers, allocation.page_bytes, allocation.token_bytes, allocation.table_width, ids, host_ids,
        allocation.run_tokens,
        allocation.run_pages, first.window, first.kind, allocation.parts, first.chunk, first.budget,
    )  # fmt: skip


def assign_pages(
    allocations: list[GroupAllocation], config: EngineConfig, spec: ModelSpec, size: MemorySize, layout: KVCacheLayout
) -> KVCacheConfig:
    """Where these pages lie. Page ids begin behind the scratch page, which every group sees as its page 0; groups with
    pages of one size have them in common. Host pages are as many as `config.swap_gib` holds, in the same proportions,
    and never more than the device has (PagedAttention §4.5)."""
    assert config.max_num_seqs is not None, "a memory is built for a known number of sequences"
    counts: dict[int, int] = {}  # page bytes -> pages; small ones first, so that ids are small numbers
    for share in sorted(allocations, key=lambda share: share.page_bytes):
        counts[share.page_bytes] = counts.get(share.page_bytes, 0) + share.num_pages
    ids, end = place_page_ids(list(counts.items()), max(counts))
    swap, whole = int(config.swap_gib * 2**30), sum(page_bytes * count for page_bytes, count in counts.items())
    hosts = [(page_bytes, min(swap * count // whole, count)) for page_bytes, count in counts.items()]
    host_rows, host_end = place_page_ids(hosts, 0)
    own = dict(zip(counts, ids))
    own_host = {page_bytes: range(rows.start + 1, rows.stop + 1) for page_bytes, rows in zip(counts, host_rows)}
    groups = tuple(
        _build_group(share, spec, own[share.page_bytes], own_host[share.page_bytes]) for share in allocations
    )
    return KVCacheConfig(layout, end, config.max_num_seqs + 1, groups, size.itemsize, host_end)


def build_joint_kv_configs(
    models: Sequence[tuple[EngineConfig, ModelSpec, MemorySize]], pool_bytes: int
) -> list[KVCacheConfig]:
    """Geometries of models that have all of one buffer of `pool_bytes` bytes in common (Jenga §8), and host memory each
    of its own. Their pages are parts of the same large pages, or all of one size: then those are the large pages."""
    cut = plan_joint_layouts([(config, spec, size.itemsize) for config, spec, size in models], pool_bytes)
    sheets = tuple(sheet for one in cut for sheet in one.specs)
    large = cut[0].large_bytes or sheets[0].page_bytes
    check_large_pages(PageLayout(sheets, large), pool_bytes)
    made = []
    for one, (config, spec, size) in zip(cut, models):
        one, size = one._replace(large_bytes=large), size._replace(bytes=pool_bytes)
        geometry = _build_two_level_config(_allocate_groups(one, config, size), one, config, spec, size)
        geometry = replace(geometry, large_bytes=cut[0].large_bytes)
        made.append(geometry if spec.vision is None else _with_images(geometry, config, spec, spec.vision))
    return made
