"""How far back each layer of a Llama attends, and whose keys and values it reads: what a config.json may say beside
transformers' keys of a Llama. `layer_types`, `sliding_window` and `attention_chunk_size` are those of other families
there; `kv_sharing` is ours: for each layer null, or the number of the earlier layer whose keys and values it reads.

No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader

LENGTH_KEYS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""The names of layer types, and the key of their length in tokens."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Those of the families that have no chunks."""


class AttentionKind(NamedTuple):
    """What one layer sees: the last `window` positions, or those of its `chunk`, or all; and whose it reads."""

    window: int | None = None
    chunk: int | None = None
    kv_sharing_layer: int | None = None


def read_attention_kinds(fields: ConfigReader, layers: int) -> tuple[AttentionKind, ...]:
    """One for each layer. StartupError, with the value, for what can't be."""
    fields.require_value("num_kv_shared_layers", 0)
    types = read_layer_types(fields, layers, tuple(LENGTH_KEYS)) or ("full_attention",) * layers
    used = {name: fields.get_int(key) for name, key in LENGTH_KEYS.items() if key and name in types}
    kinds = [
        AttentionKind(*(used[name] if name == kind else None for kind in tuple(LENGTH_KEYS)[1:])) for name in types
    ]
    owners = fields.config.get("kv_sharing")
    if owners is None:
        return tuple(kinds)
    if not isinstance(owners, list) or len(owners) != layers:
        raise StartupError(
            f"kv_sharing in {fields.source} must be a list of {layers} layers or nulls, got {short_repr(owners)}"
        )
    for layer, owner in enumerate(owners):
        if owner is not None:
            _check_kv_sharing(layer, owner, owners, kinds)
    return tuple(kind._replace(kv_sharing_layer=owner) for kind, owner in zip(kinds, owners))


def read_layer_types(fields: ConfigReader, layers: int, known: tuple[str, ...] = LAYER_TYPES) -> tuple[str, ...] | None:
    """A name for each of so many layers, known ones only; None if there are none."""
    types = fields.config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise StartupError(f"layer_types in {fields.source} must be a list of {layers} names, got {short_repr(types)}")
    for name in types:
        if name not in known:
            raise StartupError(f"the layer type {short_repr(name)} is not supported", f"Supported: {', '.join(known)}")
    return tuple(types)


def _check_kv_sharing(layer: int, owner: object, owners: list[object], kinds: list[AttentionKind]) -> None:
    """Layer `layer` may read what `owner` keeps."""
    if isinstance(owner, bool) or not isinstance(owner, int) or not 0 <= owner < layer:
        raise StartupError(
            f"kv_sharing says that layer {layer} shares with layer {short_repr(owner)}", "It must be an earlier layer"
        )
    if owners[owner] is not None:
        raise StartupError(
            f"kv_sharing says that layer {layer} shares with layer {owner}, which shares with "
            f"{short_repr(owners[owner])}",
            "Name the layer that keeps the keys and values",
        )
    if kinds[owner] != kinds[layer]:
        raise StartupError(
            f"kv_sharing says that layer {layer} shares with layer {owner}, and they see {_describe(kinds[layer])} and "
            f"{_describe(kinds[owner])}",
            "Layers that share must have one layer type",
        )


def _describe(kind: AttentionKind) -> str:
    if kind.chunk is not None:
        return f"chunks of {kind.chunk} tokens"
    return "all tokens" if kind.window is None else f"a window of {kind.window} tokens"
