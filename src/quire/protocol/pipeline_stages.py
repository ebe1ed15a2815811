"""Pipeline stages, which are ranges of a model's layers, share one memory: pages have the same ids on every stage, and
the size that the stage with the most layers of each kind needs. Arithmetic only: no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from quire.errors import StartupError
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.parallel_layout import Shard

GroupKey = tuple[Any, ...]  # see LayerSpec.group_key
STAGE_BUFFER_STEPS = 2  # steps whose hidden states a stage on a GPU buffers from the stage before


def kv_layers_by_key(spec: ModelSpec, shard: Shard) -> dict[GroupKey, list[int]]:
    """Return the layers of a stage that keep something, by group key, in the order of the whole model's keys."""
    stage_layers = shard.layer_range(len(spec.layers))
    layers_by_key: dict[GroupKey, list[int]] = {spec.layers[i].group_key: [] for i in spec.kv_layers}
    for i in spec.kv_layers:
        if i in stage_layers:
            layers_by_key[spec.layers[i].group_key].append(i)
    return layers_by_key


def largest_stage_spec(spec: ModelSpec, stages: int) -> ModelSpec:
    """Return the spec of a stage with as many layers of each kind as any of the `stages` has: its memory fits all of
    them. Weights are not changed. Raise StartupError if the model can't be divided into that many stages."""
    check_pp_division(spec, stages)
    counts = Counter[GroupKey]()
    for stage in range(stages):
        for key, layers in kv_layers_by_key(spec, Shard(0, 1, stage, stages)).items():
            counts[key] = max(counts[key], len(layers))
    first: dict[GroupKey, LayerSpec] = {}
    for i in spec.kv_layers:
        first.setdefault(spec.layers[i].group_key, spec.layers[i])
    return replace(spec, layers=tuple(layer for key, layer in first.items() for _ in range(counts[key])))


def kv_config_of_stage(kv_config: KVCacheConfig, spec: ModelSpec, shard: Shard) -> KVCacheConfig:
    """Return the config for the stage of `shard`, from one whose layers are those of `largest_stage_spec`: these are
    replaced by the stage's layers. Page sizes don't change."""
    by_key, common = kv_layers_by_key(spec, shard), largest_stage_spec(spec, shard.pp_size)
    counts, stage_layers = Counter[GroupKey](), dict[int, int]()
    for i, layer in enumerate(common.layers):
        if counts[layer.group_key] < len(by_key[layer.group_key]):
            stage_layers[i] = by_key[layer.group_key][counts[layer.group_key]]
        counts[layer.group_key] += 1
    groups = (
        replace(group, layers=tuple(stage_layers[i] for i in group.layers if i in stage_layers))
        for group in kv_config.groups
    )
    sight = kv_config.sight if shard.is_first_stage else ""  # the first stage embeds tokens and images
    return replace(kv_config, groups=tuple(groups), sight=sight)


def has_uneven_stages(spec: ModelSpec, stages: int) -> bool:
    """Return True if a stage has fewer layers of some kind than another."""
    counts = [
        [len(layers) for layers in kv_layers_by_key(spec, Shard(0, 1, stage, stages)).values()]
        for stage in range(stages)
    ]
    return any(stage_counts != counts[0] for stage_counts in counts)


def check_pp_division(spec: ModelSpec, stages: int) -> None:
    """Raise StartupError, with the reason, if the model can't be divided into this many stages."""
    count = len(spec.layers)
    if stages > count:
        raise StartupError(f"--pp is {stages}, and the model has {count} layers", f"Use {count} or less")
    for i, layer in enumerate(spec.layers):
        if layer.kv_source_layer is None:
            continue
        stage = next(stage for stage in range(stages) if i in Shard(0, 1, stage, stages).layer_range(count))
        if layer.kv_source_layer not in Shard(0, 1, stage, stages).layer_range(count):
            raise StartupError(
                f"--pp is {stages}, and layer {i} reads the keys and values of layer {layer.kv_source_layer}, which "
                "another stage would have",
                "Use another --pp, or --tp alone",
            )
    if spec.min_budget:
        raise StartupError(
            f"--pp is {stages}, and a model that keeps a part of each prompt can't be divided into stages yet",
            "Use --tp alone",
        )
