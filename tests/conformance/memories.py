"""The memories that the conformance suite runs over: one entry of EVERY each. A new memory is one more entry; those in
pages, which share, swap and register prefixes, are MEMORIES."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.memory.answers import Deferred, Usage
from quire.memory.baselines.reserved import ReservedMemory
from quire.memory.build import build_memory
from quire.memory.interface import KVMemory
from quire.memory.jenga.shared_pool import PoolView
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_layout import MemorySize
from quire.memory.page_pool import PagePool
from quire.memory.paged import PagedMemory
from quire.memory.virtual.buffers import plan_buffers
from quire.memory.virtual.virtual_memory import VirtualMemory
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup, KVCacheLayout
from quire.protocol.model_spec import LayerSpec, ModelSpec, StateTensor, place_page_ids
from quire.protocol.sequence import Sequence

VOCAB = 64
MAX_LEN = 48


class Build(NamedTuple):
    """What a test asks of a memory; each entry of EVERY adds its own settings."""

    tokens: int = 256
    chunk: int = 64
    max_seqs: int = 8
    max_len: int = MAX_LEN
    host: int = 0  # host pages, for swapping
    prefix_tokens: int = 0
    device_page: int = 0  # bytes of a page of contiguous memory, and of a token so many more; 0: a few


Layer = int | LayerSpec | None
"""A layer's window, or none; or all that there is to say of it."""


def spec(kinds: tuple[Layer, ...], max_len: int, size: int = 4) -> ModelSpec:
    layers = tuple(kind if isinstance(kind, LayerSpec) else LayerSpec(1, size, kind) for kind in kinds)
    return ModelSpec("echo", layers, VOCAB, max_len, 4, 1, 4, 1)


def paged(windows: tuple[Layer, ...] = (None, None), **settings: Any) -> Callable[[Build], PagedMemory]:
    def make(build: Build) -> PagedMemory:
        config = EngineConfig.of(
            max_num_seqs=build.max_seqs,
            max_num_batched_tokens=build.chunk,
            prefix_tokens=build.prefix_tokens,
            swap_gib=0,
            **settings,
        )
        size = MemorySize(build.tokens, build.max_len, 2)
        memory = build_memory(config, spec(windows, build.max_len), size)
        if build.host:
            total = memory.account().usage.total
            count = sum(len(ids) for ids in {group.ids for group in memory.kv_config.groups})
            each = memory.kv_config.large_bytes or total / count
            config = replace(config, swap_gib=build.host * each / 2**30)
            memory = build_memory(config, spec(windows, build.max_len), size)
        assert isinstance(memory, PagedMemory)
        return memory

    return make


def retaining(retention: str, slack: int, **settings: Any) -> Callable[[Build], PagedMemory]:
    """Full and window layers, where pages are emptied soon after they left the window."""

    def make(build: Build) -> PagedMemory:
        memory = paged((None, 6, None, 2), page_size=2, retention=retention, **settings)(build)
        memory.retention.slack = slack
        return memory

    return make


def reserved(
    rule: str, windows: tuple[int | None, ...] = (None, None), **settings: Any
) -> Callable[[Build], ReservedMemory]:
    def make(build: Build) -> ReservedMemory:
        config = EngineConfig.of(
            memory=rule, max_num_seqs=build.max_seqs, max_num_batched_tokens=build.chunk, **settings
        )  # fmt: skip
        return ReservedMemory.build(config, spec(windows, build.max_len), MemorySize(build.tokens, build.max_len, 2))

    return make


def virtual(
    windows: tuple[int | None, ...] = (None, None), *, page: int, layout: str = "sliced", **settings: Any
) -> Callable[[Build], VirtualMemory]:
    """In pages of a few bytes: a layer's keys of a token take 8, and as many its values."""

    def make(build: Build) -> VirtualMemory:
        scale = build.device_page // page or 1
        geometry = contiguous(build, windows, scale * page, layout, scale * 8)
        return VirtualMemory(geometry, max_step_tokens=build.chunk, prefix_tokens=build.prefix_tokens, **settings)

    return make


def contiguous(build: Build, windows: tuple[int | None, ...], page: int, layout: str, token: int = 8) -> KVCacheConfig:
    """Groups of one window each, in pages of `page` bytes a buffer, with room for the tokens that are asked for in each
    of them; `token` bytes are a layer's keys of one."""
    kinds = [(tuple(i for i, other in enumerate(windows) if other == window), window) for window in set(windows)]
    kinds.sort(key=lambda kind: kind[0])
    cut = [plan_buffers(len(layers), token, page, layout) for layers, _ in kinds]
    counts: dict[int, int] = {}
    for buffers in cut:
        counts[buffers.page_bytes] = counts.get(buffers.page_bytes, 0) + buffers.num_pages(build.tokens)
    ids, end = place_page_ids(list(counts.items()), max(counts))
    rows, host_end = place_page_ids([(size, min(build.host, count)) for size, count in counts.items()], 0)
    own, own_host = dict(zip(counts, ids)), {size: range(r.start + 1, r.stop + 1) for size, r in zip(counts, rows)}
    groups = tuple(
        KVCacheGroup(
            layers, buffers.page_bytes, buffers.token_bytes, buffers.num_pages(build.max_len), own[buffers.page_bytes],
            own_host[buffers.page_bytes], buffers.run_tokens, buffers.run_pages, window,
            "full" if window is None else "window", buffers.num_buffers,
        )
        for buffers, (layers, window) in zip(cut, kinds)
    )  # fmt: skip
    return KVCacheConfig(KVCacheLayout.CONTIGUOUS, end, build.max_seqs + 1, groups, 2, host_end)


VIRTUAL: dict[str, Callable[[Build], VirtualMemory]] = {
    "virtual-1": virtual(page=8, layout="layer"),
    "virtual-4": virtual(page=64),
    "virtual-16": virtual(page=128, layout="layer"),
    "virtual-late": virtual(page=32, layout="layer", ahead=False),
    "virtual-uncached": virtual(page=64, caching=False),
    "virtual-poisoned": virtual(page=64, debug=True),
    "virtual-not-whole": virtual((None, None, None), page=32),
    "virtual-window": virtual((6, 6), page=64),
    "virtual-mixed": virtual((None, 6, None, 2), page=32, layout="layer"),
    "virtual-one-pool": virtual((None, 6, None, 2), page=64),
}
CHUNKED = LayerSpec(1, 4, chunk=10)
STATE = LayerSpec(0, 0, state_tensors=(StateTensor("conv", (8, 3), 2), StateTensor("ssm", (2, 4), 4)))
MEMORIES: dict[str, Callable[[Build], PagedMemory]] = {
    "paged-1": paged(page_size=1),
    "paged-4": paged(page_size=4),
    "paged-16": paged(page_size=16),
    "uncached": paged(page_size=4, enable_prefix_caching=False),
    "poisoned": paged(page_size=4, debug=True),
    "layer-tables": paged(page_size=4, table_scope="layer"),
    "window": paged((6, 6), page_size=4),
    "mixed": paged((None, 6, None, 2), page_size=4, page_sizes="max"),
    "mixed-16": paged((None, 2), page_size=16, page_sizes="max"),
    "own-sizes": paged((None, 6, 6), page_size=4, page_sizes="own"),
    "mixed-uncached": paged((6, None), page_size=4, page_sizes="max", enable_prefix_caching=False),
    "large": paged((None, 6, None, 2), page_size=4),
    "large-1": paged((None, 6, 6, 6), page_size=1, association="paper"),
    "large-16": paged((None, 6, None), page_size=16, association="none"),
    "large-uncached": paged((None, 6, 6, 9, 9, 9), page_size=4, enable_prefix_caching=False),
    "large-poisoned": paged((None, 6, 6), page_size=4, debug=True),
    "gcd": paged((None, 6, 6, 6), page_size=4, page_sizes="gcd"),
    "uniform": paged((None, 6, None, 2), page_size=4, memory="uniform"),
    "chunked": paged((CHUNKED, None), page_size=4, page_sizes="max"),
    "chunked-16": paged((CHUNKED, CHUNKED, 6), page_size=16),
    "shared": paged(
        (None, 6, LayerSpec(1, 4, kv_source_layer=0), LayerSpec(1, 4, 6, kv_source_layer=1)),
        page_size=4,
        page_sizes="own",
    ),
    "slack": retaining("slack", 3),
    "boundary": retaining("boundary", 5),
    "literal": retaining("paper", 0, page_sizes="own"),
    "states": paged((None, STATE, STATE), page_size=4, state_tokens=8, page_sizes="own", retention="paper"),
    "states-window": paged((STATE, 6, None), page_size=1, state_tokens=16, debug=True),
    "states-alone": paged((STATE,), page_size=4, state_tokens=8),
    **VIRTUAL,
}
CACHED = [name for name in MEMORIES if "uncached" not in name]
RESERVED: dict[str, Callable[[Build], ReservedMemory]] = {
    "orca-oracle": reserved("orca-oracle", page_size=4),
    "orca-pow2": reserved("orca-pow2", page_size=1),
    "orca-max": reserved("orca-max", page_size=4, debug=True),
    "ft": reserved("ft", page_size=4),
    "oracle-mixed": reserved("orca-oracle", (None, 6, None, 2), page_size=4),
    "pow2-layer-tables": reserved("orca-pow2", page_size=16, table_scope="layer"),
}
EVERY: dict[str, Callable[[Build], Any]] = {**MEMORIES, **RESERVED}


def evictions(memory: KVMemory) -> int:
    """Cached pages given out anew."""
    return memory.page_pool.evictions if isinstance(memory, PagedMemory) else 0


def is_static(memory: KVMemory) -> bool:
    """Whether it is for static batches."""
    return isinstance(memory, ReservedMemory) and memory.static


def check_published(memory: KVMemory, seqs: Iterable[Sequence]) -> None:
    """A page that can be found by its key is full, and all of its tokens are confirmed."""
    if isinstance(memory, ReservedMemory):
        return
    assert isinstance(memory, PagedMemory)
    for seq in seqs:
        for g, table in enumerate(memory.get_placement(seq).tables):
            published = set(memory.page_pool.index[g].values())
            computed = seq.drafted if seq.uses_draft_model and memory.groups[g].is_draft else seq.computed
            coming = memory.policies[g].writes(seq, computed, computed + 1)
            for page in table[coming.start :] if coming else ():
                assert page not in published, f"page {page} is published before it is computed"


def contents(pages: PagePool | TwoLevelPagePool | PoolView) -> tuple[object, ...]:
    """All that a ledger keeps, in the order in which it would give it out."""
    if isinstance(pages, PoolView):
        return contents(pages.page_pool)
    if isinstance(pages, PagePool):
        return tuple(
            (tuple(p.empty), tuple(p.cached), tuple(p.spared), tuple(p.refs), tuple(p.keys)) for p in pages.size_classes
        )
    kept = {name: value for name, value in vars(pages).items() if name != "spare_large"}
    return (repr(kept),)


def total_bytes(geometry: KVCacheConfig) -> int:
    """Bytes of all pages but the scratch ones. Groups with the same ids have the same pages."""
    if geometry.large_bytes:
        return geometry.bytes - geometry.large_bytes
    return sum({group.ids: len(group.ids) * group.page_bytes for group in geometry.groups}.values())


def insides(memory: KVMemory) -> tuple[object, ...]:
    """All state that later calls could tell apart: equal before and after a call that reports shortage. A memory with
    state of its own adds it here."""
    if isinstance(memory, ReservedMemory):
        return (
            sorted(memory.allocator.allocated.items()),
            memory.allocator.available,
            tuple(memory.free_slots),
            tuple(memory.page_ops),
            {id: (r.slot, r.base, r.requested_tokens, r.request_reservation) for id, r in memory.seq_pages.items()},
            [
                (f.live_branches, f.pending_branches, tuple(f.spare_bases))
                for f in (r.request_reservation for r in memory.seq_pages.values())
            ],
            memory.batch_units,
        )
    assert isinstance(memory, PagedMemory)
    pages, swap = memory.page_pool, memory.swap
    return (
        memory.account(),
        contents(pages),
        tuple(memory.free_slots),
        tuple(memory.page_ops),
        {
            id: (r.slot, r.capacity, r.published_tokens, tuple(map(tuple, r.tables)))
            for id, r in memory.seq_pages.items()
        },
        {id: tuple(map(tuple, r.tables)) for id, r in swap.seq_pages.items()},
        contents(swap.host_pool),
        tuple(memory.prefix_cache.registered_prefixes),
        pages.evictions,
        {picture: (one.parts_done, one.num_waiting) for picture, one in memory.encoder_cache.encodings.items()},
        dict(memory.encoder_cache.page_counts),
        [tuple(queue.premapped.items()) for queue in memory.empty_queues] if isinstance(memory, VirtualMemory) else (),
    )


def admit_one(memory: KVMemory, seq: Sequence, budget: int = 64) -> int | Deferred | None:
    """Admit a sequence alone: the length that it reuses, if it came in."""
    admitted = memory.admit([seq], budget)
    return admitted[0].reused_tokens if isinstance(admitted, list) else admitted


def reset(memory: KVMemory) -> int:
    """Forget cached prefixes: the pages emptied."""
    return memory.prefix_cache.reset() if memory.prefix_cache is not None else 0


def usage_of(memory: KVMemory) -> Usage:
    """Empty pages are free wherever they are mapped ahead: nobody holds them."""
    usage = memory.account().usage
    ahead = usage.reserved if isinstance(memory, VirtualMemory) else 0
    return usage._replace(reserved=usage.reserved - ahead, free=usage.free + ahead)


def is_unused(memory: KVMemory) -> bool:
    """Nothing is held for anybody."""
    usage = usage_of(memory)
    return usage.used == usage.internal == usage.reserved == 0


def host_free(memory: PagedMemory) -> int:
    """Host pages that nothing is in."""
    return host_total(memory) - sum(memory.swap.host_pool.used)


def host_total(memory: PagedMemory) -> int:
    """Host pages."""
    return memory.swap.host_pool.total
