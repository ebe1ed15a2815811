"""What stages, runs of a model's layers, have in common: one memory, whose pages have the same ids on each of them and
are as large as the stage with the most layers of a kind needs them. Arithmetic only: no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from quire.errors import StartupError
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.parallel_layout import Shard

GroupKey = tuple[Any, ...]  # see LayerSpec.kept
STAGE_BUFFER_STEPS = 2  # steps' rows that a stage on a GPU holds of the stage before


def kv_layers_by_key(spec: ModelSpec, shard: Shard) -> dict[GroupKey, list[int]]:
    """The layers of a stage that keep something, by what decides how: kinds in the order of the whole model's."""
    own = shard.layer_range(len(spec.layers))
    found: dict[GroupKey, list[int]] = {spec.layers[i].group_key: [] for i in spec.kv_layers}
    for i in spec.kv_layers:
        if i in own:
            found[spec.layers[i].group_key].append(i)
    return found


def largest_stage_spec(spec: ModelSpec, stages: int) -> ModelSpec:
    """A stage that has as many layers of each kind as any of `stages` has. A memory for it is one for all of them;
    weights are left as they are. StartupError for a model that can't be divided so."""
    check_pp_division(spec, stages)
    counts = Counter[GroupKey]()
    for stage in range(stages):
        for kept, layers in kv_layers_by_key(spec, Shard(0, 1, stage, stages)).items():
            counts[kept] = max(counts[kept], len(layers))
    first: dict[GroupKey, LayerSpec] = {}
    for i in spec.kv_layers:
        first.setdefault(spec.layers[i].group_key, spec.layers[i])
    return replace(spec, layers=tuple(layer for kept, layer in first.items() for _ in range(counts[kept])))


def kv_config_of_stage(kv_config: KVCacheConfig, spec: ModelSpec, shard: Shard) -> KVCacheConfig:
    """The same for the stage of `shard`, where the groups' layers are those of `largest_stage_spec`: its own in their
    places. Pages stay as large."""
    own, common = kv_layers_by_key(spec, shard), largest_stage_spec(spec, shard.pp_size)
    at, places = Counter[GroupKey](), dict[int, int]()
    for i, layer in enumerate(common.layers):
        if at[layer.group_key] < len(own[layer.group_key]):
            places[i] = own[layer.group_key][at[layer.group_key]]
        at[layer.group_key] += 1
    groups = (
        replace(group, layers=tuple(places[i] for i in group.layers if i in places)) for group in kv_config.groups
    )
    sight = (
        kv_config.sight if shard.is_first_stage else ""
    )  # rows take the places of embeddings, which the first stage has
    return replace(kv_config, groups=tuple(groups), sight=sight)


def has_uneven_stages(spec: ModelSpec, stages: int) -> bool:
    """Whether a stage has fewer layers of some kind than another."""
    counts = [
        [len(layers) for layers in kv_layers_by_key(spec, Shard(0, 1, stage, stages)).values()]
        for stage in range(stages)
    ]
    return any(one != counts[0] for one in counts)


def check_pp_division(spec: ModelSpec, stages: int) -> None:
    """StartupError for a model that can't have so many stages, which says why."""
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
                f"another "
                "stage would have",
                "Use another --pp, or --tp alone",
            )
    if spec.min_budget:
        raise StartupError(
            f"--pp is {stages}, and a model that keeps a part of each prompt can't be divided into stages yet",
            "Use --tp alone",
        )
