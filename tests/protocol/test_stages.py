"""One memory for all stages: pages as large as any stage needs them, each stage's own layers in their places."""

from __future__ import annotations

import pytest

from quire.config import EngineConfig
from quire.errors import StartupError
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.parallel_layout import ParallelLayout, Shard
from quire.protocol.pipeline_stages import has_uneven_stages, kv_config_of_stage, largest_stage_spec
from quire.worker.cache_views import check_kv_cache_config

FULL, WINDOW = LayerSpec(2, 16), LayerSpec(2, 16, window=32)


def spec_of(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("llama", layers, 100, 256, 64, 4, 96, 1000)


@pytest.mark.parametrize("stages", range(1, 9))
def test_every_layer_is_in_one_stage(stages: int) -> None:
    for count in range(stages, 40):
        runs = [Shard(0, 1, stage, stages).layer_range(count) for stage in range(stages)]
        assert [layer for run in runs for layer in run] == list(range(count))
        assert max(map(len, runs)) - min(map(len, runs)) <= 1
        assert all(runs)


def test_ranks_are_numbered_stage_by_stage() -> None:
    parts = ParallelLayout(2, 3).shards()
    assert [(part.tp_rank, part.pp_rank, part.global_rank) for part in parts] == [
        (0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3), (0, 2, 4), (1, 2, 5),
    ]  # fmt: skip
    assert [part.returns_result for part in parts] == [False] * 4 + [True, False]
    assert ParallelLayout(2, 3).result_rank == 4


def test_a_stage_finds_its_own_layers_in_the_common_pages() -> None:
    spec = spec_of(FULL, WINDOW, WINDOW, FULL, FULL)  # 0 to 2, 3 and 4
    assert largest_stage_spec(spec, 2).layers == (FULL, FULL, WINDOW, WINDOW)
    assert has_uneven_stages(spec, 2)
    assert not has_uneven_stages(spec_of(FULL, WINDOW, FULL, WINDOW), 2)
    config = EngineConfig(page_size=4, max_num_seqs=4, kv_tokens=256)
    common = build_memory(config, largest_stage_spec(spec, 2), MemorySize(256, 64, 4)).kv_config
    assert [group.layers for group in common.groups] == [(0, 1), (2, 3)]
    first, second = (kv_config_of_stage(common, spec, Shard(0, 1, stage, 2)) for stage in range(2))
    assert [group.layers for group in first.groups] == [(0,), (1, 2)]
    assert [group.layers for group in second.groups] == [(3, 4), ()]
    for own in (first, second):
        check_kv_cache_config(own, spec)
        assert [group.page_bytes for group in own.groups] == [group.page_bytes for group in common.groups]


@pytest.mark.parametrize(
    ("layers", "stages", "told"),
    [
        ((FULL, FULL), 3, "--pp is 3, and the model has 2 layers. Use 2 or less"),
        (
            (FULL, LayerSpec(2, 16, kv_source_layer=0), LayerSpec(2, 16, kv_source_layer=0), FULL),
            2,
            "layer 2 reads .* of layer 0",
        ),
        ((LayerSpec(2, 16, budget=64), FULL), 2, "a model that keeps a part of each prompt can't be divided"),
    ],
)
def test_what_has_no_such_stages_is_refused(layers: tuple[LayerSpec, ...], stages: int, told: str) -> None:
    with pytest.raises(StartupError, match=told):
        largest_stage_spec(spec_of(*layers), stages)
