"""Each layer's attention span in a Llama, and the layer whose keys and values it reads: keys of config.json beyond
transformers' for Llama. `layer_types`, `sliding_window` and `attention_chunk_size` are transformers' keys of other
families. `kv_sharing` is quire's: for each layer null, or the number of the earlier layer whose keys and values it
reads. No torch.
"""

from __future__ import annotations

from typing import NamedTuple

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader

LENGTH_KEYS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer type -> the key of its length in tokens."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layer types of the families without chunked attention."""


class AttentionKind(NamedTuple):
    """One layer attends to the last `window` positions, or to those of its `chunk`, or to all; it reads the keys and
    values of `kv_sharing_layer` if that is given."""

    window: int | None = None
    chunk: int | None = None
    kv_sharing_layer: int | None = None


def read_attention_kinds(fields: ConfigReader, layers: int) -> tuple[AttentionKind, ...]:
    """Return the kind of each layer. Raise StartupError for an invalid value."""
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
    """Return `layer_types`, one of the `known` names for each of `layers`; None if config.json has none."""
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
    """Raise StartupError unless `layer` may read the keys and values of layer `owner`."""
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
            f"kv_sharing says that layer {layer} shares with layer {owner}, but they attend to "
            f"{_describe(kinds[layer])} and {_describe(kinds[owner])}",
            "Layers that share must have one layer type",
        )


def _describe(kind: AttentionKind) -> str:
    if kind.chunk is not None:
        return f"chunks of {kind.chunk} tokens"
    return "all tokens" if kind.window is None else f"a window of {kind.window} tokens"
