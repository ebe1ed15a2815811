"""What stages, runs of a model's layers, have in common: one memory, whose pages have the same ids on each of them and
are as large as the stage with the most layers of a kind needs them. Arithmetic only: no torch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from quire.errors import StartupError
from quire.vocabulary.layout import Part
from quire.vocabulary.specs import Geometry, LayerSpec, ModelSpec

Kept = tuple[Any, ...]  # see LayerSpec.kept
INBOX = 2  # steps' rows that a stage on a GPU holds of the stage before


def owners_of(spec: ModelSpec, part: Part) -> dict[Kept, list[int]]:
    """The layers of a stage that keep something, by what decides how: kinds in the order of the whole model's."""
    own = part.layers(len(spec.layers))
    found: dict[Kept, list[int]] = {spec.layers[i].kept: [] for i in spec.owners}
    for i in spec.owners:
        if i in own:
            found[spec.layers[i].kept].append(i)
    return found


def staged(spec: ModelSpec, stages: int) -> ModelSpec:
    """A stage that has as many layers of each kind as any of `stages` has. A memory for it is one for all of them;
    weights are left as they are. StartupError for a model that can't be divided so."""
    check_stages(spec, stages)
    counts = Counter[Kept]()
    for stage in range(stages):
        for kept, layers in owners_of(spec, Part(0, 1, stage, stages)).items():
            counts[kept] = max(counts[kept], len(layers))
    first: dict[Kept, LayerSpec] = {}
    for i in spec.owners:
        first.setdefault(spec.layers[i].kept, spec.layers[i])
    return replace(spec, layers=tuple(layer for kept, layer in first.items() for _ in range(counts[kept])))


def of_stage(geometry: Geometry, spec: ModelSpec, part: Part) -> Geometry:
    """The same for the stage of `part`, where the groups' layers are those of `staged`: its own in their places. Pages
    stay as large."""
    own, common = owners_of(spec, part), staged(spec, part.stages)
    at, places = Counter[Kept](), dict[int, int]()
    for i, layer in enumerate(common.layers):
        if at[layer.kept] < len(own[layer.kept]):
            places[i] = own[layer.kept][at[layer.kept]]
        at[layer.kept] += 1
    groups = (replace(group, layers=tuple(places[i] for i in group.layers if i in places)) for group in geometry.groups)
    sight = geometry.sight if part.starts else ""  # rows take the places of embeddings, which the first stage has
    return replace(geometry, groups=tuple(groups), sight=sight)


def uneven(spec: ModelSpec, stages: int) -> bool:
    """Whether a stage has fewer layers of some kind than another."""
    counts = [
        [len(layers) for layers in owners_of(spec, Part(0, 1, stage, stages)).values()] for stage in range(stages)
    ]
    return any(one != counts[0] for one in counts)


def check_stages(spec: ModelSpec, stages: int) -> None:
    """StartupError for a model that can't have so many stages, which says why."""
    count = len(spec.layers)
    if stages > count:
        raise StartupError(f"--pp is {stages}, and the model has {count} layers", f"Use {count} or less")
    for i, layer in enumerate(spec.layers):
        if layer.shares is None:
            continue
        stage = next(stage for stage in range(stages) if i in Part(0, 1, stage, stages).layers(count))
        if layer.shares not in Part(0, 1, stage, stages).layers(count):
            raise StartupError(
                f"--pp is {stages}, and layer {i} reads the keys and values of layer {layer.shares}, which another "
                "stage would have",
                "Use another --pp, or --tp alone",
            )
    if spec.least_budget:
        raise StartupError(
            f"--pp is {stages}, and a model that keeps a part of each prompt can't be divided into stages yet",
            "Use --tp alone",
        )
