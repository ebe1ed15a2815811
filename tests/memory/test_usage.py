"""Usage by category, on cases small enough to count by hand."""

from __future__ import annotations

from memories import MEMORIES, Build, reset, spec
from test_invariants import serve
from unlike import Kind, unlike

from quire.config import EngineConfig
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.memory.paged import PagedMemory
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sequence import Sequence


def resident(memory: PagedMemory, id: int, length: int) -> Sequence:
    seq = Sequence(id, [id * 100 + i for i in range(length)])
    assert serve(memory, seq) == 0
    return seq


def test_used_internal_cached_and_free() -> None:
    memory = MEMORIES["paged-4"](Build(tokens=40))
    token = memory.kv_config.groups[0].page_bytes // 4
    assert memory.account().usage == (0, 0, 0, 0, 0, 40 * token)
    first = resident(memory, 1, 9)
    assert memory.account().usage == (9 * token, 0, 0, 3 * token, 0, 28 * token)
    second = resident(memory, 2, 4)
    assert memory.account().usage == (13 * token, 0, 0, 3 * token, 0, 24 * token)
    memory.free(first)  # two full pages stay cached, the third is empty
    assert memory.account().usage == (4 * token, 8 * token, 0, 0, 0, 28 * token)
    assert memory.grow(second, 5)
    assert memory.account().usage == (5 * token, 8 * token, 0, 3 * token, 0, 24 * token)
    assert reset(memory) == 2
    assert memory.account().usage == (5 * token, 0, 0, 3 * token, 0, 32 * token)


def test_geometry() -> None:
    """One table for all layers, or one each; groups by kind of layer; pages of one size."""

    def geometry(*windows: int | None, **settings: str) -> KVCacheConfig:
        config = EngineConfig.of(page_size=4, max_num_seqs=8, **settings)
        return build_memory(config, spec(windows, 48), MemorySize(64, 48, 2)).kv_config

    one = geometry(None, None)
    assert [(group.layers, group.window) for group in one.groups] == [((0, 1), None)]
    (group,) = one.groups
    assert (group.ids, one.slots, group.table_width, group.page_bytes) == (range(1, 17), 9, 12, 4 * 2 * 2 * 4 * 2)
    assert (one.bytes, group.token_bytes) == (17 * group.page_bytes, 2 * 2 * 4 * 2)
    each = geometry(None, None, table_scope="layer")
    assert [group.layers for group in each.groups] == [(0,), (1,)]
    assert {(group.ids, group.page_bytes) for group in each.groups} == {(range(1, 33), 4 * 2 * 4 * 2)}
    assert each.bytes == 33 * 4 * 2 * 4 * 2
    mixed = geometry(None, 6, None)
    assert [(group.layers, group.window) for group in mixed.groups] == [((0, 2), None), ((1,), 6)]
    assert [(group.page_bytes, group.ids) for group in mixed.groups] == [(128, range(1, 25)), (64, range(2, 50))]
    assert (mixed.large_bytes, mixed.bytes) == (128, 25 * 128)  # 16 pages of each: 16 and 8 large ones
    mixed = geometry(None, 6, None, page_sizes="max")
    assert {(group.page_bytes, group.ids) for group in mixed.groups} == {(128, range(1, 33))}


def test_usage_by_layer_type_adds_up_to_what_is_used_and_cached() -> None:
    """Full layers in pages of their own size, two groups of them, and windows, which keep less."""
    memory = unlike(Kind(16, 4), Kind(24, 8), Kind(32, 4, window=6))(Build(tokens=256))
    first, second = Sequence(1, list(range(21))), Sequence(2, list(range(500, 522)))
    for seq in (first, second):
        assert serve(memory, seq) == 0
    memory.free(first)
    usage, _, types = memory.account()
    assert [one.layer_type for one in types] == ["full", "window-6"]
    full, window = types
    assert full.used == 22 * (16 + 24)
    assert window.used == 32 * (22 - 16)  # the tokens of its last two pages
    assert full.cached == 5 * 64 + 2 * 192
    assert sum(one.used for one in types) == usage.used
    assert sum(one.internal for one in types) == usage.internal
    assert sum(one.cached for one in types) == usage.cached > 0
    memory.prefix_cache.reset()
    assert [one.cached for one in memory.account().types] == [0, 0]
    memory.check()


def test_what_full_attention_had_is_counted_beside_what_was_found() -> None:
    memory = unlike(Kind(16, 4), Kind(16, 4, window=6))(Build(tokens=256))
    first = Sequence(1, list(range(30)))
    assert serve(memory, first) == 0
    memory.free(first)
    for page in list(memory.page_pool.index[1].values())[3:]:
        memory.page_pool.evict(1, page)
    assert serve(memory, Sequence(2, list(range(30)))) == 12
    sharing = memory.account().sharing
    assert (sharing.hits, sharing.full_hits) == (12, 28)


def test_uniform_memory_keeps_every_token_of_every_layer() -> None:
    """Nothing leaves behind a window, and of a cached prefix every page must be there: also the second of eight."""
    held, found = {}, {}
    for name in ("paged", "uniform"):
        config = EngineConfig.of(memory=name, page_size=4, max_num_seqs=8, max_num_batched_tokens=16, retention="paper")
        memory = build_memory(config, spec((None, 6), 48), MemorySize(256, 48, 2))
        assert isinstance(memory, PagedMemory)
        seq = resident(memory, 1, 30)
        held[name] = [sum(map(bool, table)) for table in memory.get_placement(seq).tables]
        memory.free(seq)
        memory.page_pool.evict(len(held[name]) - 1, list(memory.page_pool.index[-1].values())[1])
        found[name] = serve(memory, Sequence(2, list(range(100, 130))))
    assert held == {"paged": [8, 2], "uniform": [8]}
    assert found == {"paged": 28, "uniform": 4}
