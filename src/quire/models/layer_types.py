"""The layers in a config.json: which tokens each attends to, and whose keys and values it reads. `layer_types`,
`sliding_window` and `attention_chunk_size` are transformers' keys. `kv_sharing` is quire's: for each layer null, or the
number of the earlier layer whose keys and values it reads. No torch.
"""

from __future__ import annotations

from quire.errors import StartupError, short_repr
from quire.layers.rope_config import RopeConfig
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import MAX_LAYERS, LayerConfig

LENGTH_KEYS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
"""Layer type -> the key of its length in tokens."""
LAYER_TYPES = FULL, LOCAL = "full_attention", "sliding_attention"
"""Layer types of the families without chunked attention."""
Windows = tuple[int | None, ...]
"""The window of each layer, None for one that attends to all tokens."""


def read_layer_count(fields: ConfigReader) -> int:
    """Return the number of layers."""
    count: int = fields.get_int("num_hidden_layers", maximum=MAX_LAYERS)
    return count


def read_layer_types(fields: ConfigReader, known: tuple[str, ...] = LAYER_TYPES) -> tuple[str, ...] | None:
    """Return `layer_types`, one of the `known` names for each layer; None if config.json has none."""
    types, layers = fields.config.get("layer_types"), read_layer_count(fields)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != layers:
        raise StartupError(
            f"layer_types in {fields.source} is {short_repr(types)}",
            f"It must be a list of {layers} names, one for each layer",
        )
    for name in types:
        if name not in known:
            raise StartupError(
                f"layer_types in {fields.source} has {short_repr(name)}, which is not supported",
                f"Supported: {', '.join(known)}",
            )
    return tuple(types)


def read_window(fields: ConfigReader, default: int = 4096) -> int | None:
    """Return `sliding_window`: `default` if it is absent, None if it is null."""
    window: int | None = fields.get_int("sliding_window", None if "sliding_window" in fields.config else default)
    return window


def windows_for_types(types: tuple[str, ...], window: int | None) -> Windows:
    """Return each layer's window, from its type."""
    if LOCAL in types and window is None:
        raise StartupError(
            "layer_types has sliding_attention, but there is no sliding window",
            "Give a sliding_window of 1 or more tokens",
        )
    return tuple(window if name == LOCAL else None for name in types)


def read_no_windows(fields: ConfigReader) -> Windows:
    """Return no window for each layer."""
    return (None,) * read_layer_count(fields)


def read_mistral_windows(fields: ConfigReader) -> Windows:
    """Return each layer's window: all have one, or those of `layer_types`."""
    window, types = read_window(fields), read_layer_types(fields)
    return (window,) * read_layer_count(fields) if types is None else windows_for_types(types, window)


def read_qwen_windows(fields: ConfigReader) -> Windows:
    """Return each layer's window: the layers that have one are given by `layer_types`, or by max_window_layers."""
    window = read_window(fields) if fields.get_bool("use_sliding_window", False) else None
    types = read_layer_types(fields)
    if types is not None:
        return windows_for_types(types, window)
    first = fields.config.get("max_window_layers", 28)
    layers = range(read_layer_count(fields))
    return tuple(window if isinstance(first, int) and layer >= first else None for layer in layers)


def read_llama_layers(fields: ConfigReader, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    """Return the layers of a Llama, with the keys beyond transformers' for it: those of other families, and
    `kv_sharing`. Raise StartupError for an invalid value."""
    fields.require_value("num_kv_shared_layers", 0)
    types = read_layer_types(fields, tuple(LENGTH_KEYS)) or (FULL,) * read_layer_count(fields)
    lengths = {name: fields.get_int(key) for name, key in LENGTH_KEYS.items() if key and name in types}
    layers = [
        LayerConfig(lengths[name] if name == LOCAL else None, lengths[name] if name == "chunked_attention" else None)
        for name in types
    ]
    owners = fields.config.get("kv_sharing")
    owners = [None] * len(layers) if owners is None else owners
    if not isinstance(owners, list) or len(owners) != len(layers):
        raise StartupError(
            f"kv_sharing in {fields.source} is {short_repr(owners)}",
            f"It must be a list of {len(layers)} layers or nulls",
        )
    for layer, owner in enumerate(owners):
        if owner is not None:
            _check_kv_sharing(layer, owner, owners, layers)
    return tuple(layer._replace(kv_sharing_layer=owner, rope=rope) for layer, owner in zip(layers, owners))


def _check_kv_sharing(layer: int, owner: object, owners: list[object], layers: list[LayerConfig]) -> None:
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
    if layers[owner] != layers[layer]:
        raise StartupError(
            f"kv_sharing says that layer {layer} shares with layer {owner}, but they attend to "
            f"{_describe(layers[layer])} and {_describe(layers[owner])}",
            "Layers that share must have one layer type",
        )


def _describe(layer: LayerConfig) -> str:
    if layer.chunk is not None:
        return f"chunks of {layer.chunk} tokens"
    return "all tokens" if layer.window is None else f"a window of {layer.window} tokens"
