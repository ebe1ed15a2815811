"""Settings of a vision tower, read from config.json: one reader for four kinds of towers, and one for Gemma-4's. No
torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader

CLIP, SIGLIP, INTERN, MLLAMA, GEMMA4 = "clip", "siglip", "intern", "mllama", "gemma4"
MAX_LAYERS = 256
MAX_IMAGE = 4096  # pixels a side of a tile
MAX_PATCHES = 1 << 14  # of a tile
ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")
DEFAULTS: dict[str, dict[str, Any]] = {
    CLIP: {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
           "image_size": 224, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    SIGLIP: {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "image_size": 224, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6},
    INTERN: {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
             "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "layer_norm_eps": 1e-6},
    MLLAMA: {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "attention_heads": 16,
             "image_size": 448, "patch_size": 14, "hidden_act": "gelu", "norm_eps": 1e-5},
    GEMMA4: {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12,
             "num_key_value_heads": 12, "head_dim": 64, "patch_size": 16, "pooling_kernel_size": 3,
             "position_embedding_size": 10_240, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSettings:
    """The first `layers` of the `checkpoint_layers` are run; with `final_norm` a norm follows. A tile has `image_size`
    pixels a side, `patches_per_side` patches of `patch_size` pixels. Only Llama 3.2 Vision has `global_layers`,
    `intermediate_layers` (layers whose inputs are part of the output) and `max_tiles`: it encodes all tiles of an image
    at once."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    checkpoint_layers: int
    heads: int
    image_size: int
    patch_size: int
    activation: str
    norm_eps: float
    qkv_bias: bool = True
    qk_norm: bool = False
    use_rms_norm: bool = False
    final_norm: bool = False
    fused_qkv: bool = False
    global_layers: int = 0
    intermediate_layers: tuple[int, ...] = ()
    max_tiles: int = 1

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.patches_per_side**2

    @property
    def num_grid_shapes(self) -> int:
        """Return the number of grids of tiles that an image can have (Llama 3.2 Vision)."""
        return sum(self.max_tiles // rows for rows in range(1, self.max_tiles + 1))

    @property
    def tokens(self) -> int:
        """Return the tokens of a tile: patches, a class token (not SigLIP), padding to a multiple of 8 (mllama)."""
        count = self.patches + (self.kind != SIGLIP)
        return -(-count // 8) * 8 if self.kind == MLLAMA else count

    @property
    def out_features(self) -> int:
        """Return the number of features of a patch in the tower's output."""
        return self.hidden * (1 + len(self.intermediate_layers))

    @property
    def activations_per_tile(self) -> int:
        """Return the peak number of activations per encoded tile: the residual stream, two residuals, the norm's
        output, the MLP's output and twice its hidden activations (once on a GPU), or queries, keys, values and the
        attention's output; and the pixels as patches."""
        block = max(5 * self.hidden + 2 * self.intermediate, 8 * self.hidden)
        return self.tokens * (block + len(self.intermediate_layers) * self.hidden) + 3 * self.image_size**2

    @property
    def operations(self) -> tuple[int, int]:
        """Return the operations of a part: those of products with weights, and those of attention."""
        tokens, layers = self.tokens * self.max_tiles, self.layers + self.global_layers
        return 2 * self.parameters * self.patches * self.max_tiles, 4 * layers * self.hidden * tokens**2

    @property
    def parameters(self) -> int:
        h, positions = self.hidden, self.patches + (self.kind != SIGLIP)
        norm = h if self.use_rms_norm else 2 * h
        attention = 4 * h * h + self.qkv_bias * 3 * h + (self.kind != MLLAMA) * h + self.qk_norm * 2 * h
        layer = attention + 2 * h * self.intermediate + self.intermediate + h + 2 * norm + (self.kind == INTERN) * 2 * h
        embeddings = h * 3 * self.patch_size**2 + (self.kind in (SIGLIP, INTERN)) * h + positions * h
        embeddings += (self.kind != SIGLIP) * h
        if self.kind == MLLAMA:
            tables = (self.num_grid_shapes + 1) * self.max_tiles * h
            embeddings += tables * (positions + 2) + 3 + 2 * 2 * h + self.global_layers * 2
        if self.kind == CLIP:
            embeddings += 2 * h
        return embeddings + (self.layers + self.global_layers) * layer + self.final_norm * 2 * h


def read_tower(
    fields: ConfigReader, kind: str, feature_layer: int | None, defaults: dict[str, Any] | None = None,
    published: bool = False,
) -> TowerSettings:  # fmt: skip
    """Read a tower's section of config.json. `feature_layer`: -1 for the last layer's output, -2 for the one before;
    None for the last one's after the final norm. Raise StartupError for a value that is missing, wrong or not
    supported."""
    usual = {**DEFAULTS[kind], **(defaults or {})}
    fields.require_value("num_channels", 3)
    heads_name = "attention_heads" if kind == MLLAMA else "num_attention_heads"
    hidden, heads = fields.get_int("hidden_size", usual["hidden_size"]), fields.get_int(heads_name, usual[heads_name])
    image = _read_side(fields, "image_size", usual["image_size"])
    patch = _read_side(fields, "patch_size", usual["patch_size"])
    stored = fields.get_int("num_hidden_layers", usual["num_hidden_layers"], maximum=MAX_LAYERS)
    layers = stored + 1 + (-1 if feature_layer is None else feature_layer)
    activation = fields.get_str("hidden_act", usual["hidden_act"])
    if hidden % heads or (hidden // heads) % 2:
        raise StartupError(
            f"hidden_size {hidden} is not {heads_name} {heads} times an even number", f"Mend {fields.source}"
        )
    if not patch <= image <= MAX_IMAGE or (image // patch) ** 2 > MAX_PATCHES:
        cause = f"{fields.source}: tiles of {image} pixels in patches of {patch}"
        raise StartupError(cause, f"A tile has {MAX_IMAGE} pixels a side and {MAX_PATCHES} patches at most")
    if layers < 1:
        raise StartupError(
            f"num_hidden_layers in {fields.source} is {stored}", f"The feature layer {feature_layer} needs more"
        )
    if activation not in ACTIVATIONS:
        raise StartupError(
            f"hidden_act {short_repr(activation)} in {fields.source}", f"Supported: {', '.join(ACTIVATIONS)}"
        )
    eps = "norm_eps" if kind == MLLAMA else "layer_norm_eps"
    more: dict[str, Any] = {"final_norm": kind == SIGLIP and feature_layer is None}
    if kind == INTERN:
        more = _read_intern(fields, published, feature_layer)
    if kind == MLLAMA:
        more = _read_mllama(fields, layers, hidden)
    return TowerSettings(
        kind=kind,
        hidden=hidden,
        intermediate=fields.get_int("intermediate_size", usual["intermediate_size"]),
        layers=layers,
        checkpoint_layers=stored,
        heads=heads,
        image_size=image,
        patch_size=patch,
        activation=activation,
        norm_eps=fields.get_float(eps, usual[eps]),
        **more,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4TowerSettings(TowerSettings):
    """A tile is a square of patches that become one row. An image has at most `max_tiles` tiles; a patch's column and
    line are below `positions`. With `clipped` the inputs and outputs of products have bounds; with `standardized` the
    features are shifted and scaled."""

    head_dim: int
    rope_theta: float
    positions: int
    clipped: bool
    standardized: bool

    @property
    def tokens(self) -> int:
        return self.patches

    @property
    def activations_per_tile(self) -> int:
        """See TowerSettings. A product with bounds has a clipped copy of its input; queries and keys are rotated in
        float32 at most."""
        attention = 3 * self.hidden + 8 * self.heads * self.head_dim
        mlp = 5 * self.hidden + 4 * self.intermediate
        return self.tokens * max(attention, mlp) + 3 * self.image_size**2

    @property
    def operations(self) -> tuple[int, int]:
        tokens = self.tokens * self.max_tiles
        products = 2 * (self._layer_products * self.layers + 3 * self.patch_size**2 * self.hidden) * tokens
        return products, 4 * self.layers * self.heads * self.head_dim * tokens**2

    @property
    def parameters(self) -> int:
        layer = self._layer_products + 4 * self.hidden + 2 * self.head_dim + 7 * 4 * self.clipped
        embeddings = 3 * self.patch_size**2 * self.hidden + 2 * self.positions * self.hidden
        return embeddings + self.layers * layer + 2 * self.hidden * self.standardized

    @property
    def _layer_products(self) -> int:
        return 4 * self.hidden * self.heads * self.head_dim + 3 * self.hidden * self.intermediate


def read_gemma4_tower(fields: ConfigReader, max_rows: int) -> Gemma4TowerSettings:
    """Read Gemma-4's tower; an image has at most `max_rows` rows. Raise StartupError for a value that is missing, wrong
    or not supported."""
    usual = DEFAULTS[GEMMA4]
    sizes = {name: fields.get_int(name, value) for name, value in usual.items() if type(value) is int}
    heads, kv_heads, head_dim = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    layers = fields.get_int("num_hidden_layers", usual["num_hidden_layers"], maximum=MAX_LAYERS)
    fields.require_value("attention_bias", False)
    if kv_heads != heads:
        cause = f"num_key_value_heads in {fields.source} is {kv_heads}, and num_attention_heads {heads}"
        raise StartupError(cause, "Both must be the same")
    if head_dim % 4:
        raise StartupError(f"head_dim in {fields.source} is {head_dim}", "It must be a multiple of 4")
    merge, positions = sizes["pooling_kernel_size"], sizes["position_embedding_size"]
    tile = sizes["patch_size"] * merge
    if tile > MAX_IMAGE or max_rows * merge**2 > MAX_PATCHES:
        raise StartupError(
            f"{fields.source}: {max_rows} rows an image, each of {merge} x {merge} patches of {sizes['patch_size']} "
            "pixels",
            f"An image has {MAX_PATCHES} patches at most, and a row {MAX_IMAGE} pixels a side",
        )
    if positions < max_rows * merge:
        raise StartupError(
            f"position_embedding_size in {fields.source} is {positions}, and an image may have {max_rows * merge} "
            "patches a side",
            f"It must be at least {max_rows * merge}",
        )
    activation = fields.get_str("hidden_activation", usual["hidden_activation"])
    if activation not in ACTIVATIONS:
        raise StartupError(
            f"hidden_activation {short_repr(activation)} in {fields.source}", f"Supported: {', '.join(ACTIVATIONS)}"
        )
    rope = ConfigReader(fields.get_object("rope_parameters"), f"rope_parameters of {fields.source}")
    if rope.config.get("rope_type") != "default":  # published configs call it so
        rope.require_value("rope_type", "axial")
    return Gemma4TowerSettings(
        kind=GEMMA4,
        hidden=sizes["hidden_size"],
        intermediate=sizes["intermediate_size"],
        layers=layers,
        checkpoint_layers=layers,
        heads=heads,
        image_size=tile,
        patch_size=sizes["patch_size"],
        activation=activation,
        norm_eps=fields.get_float("rms_norm_eps", usual["rms_norm_eps"]),
        max_tiles=max_rows,
        head_dim=head_dim,
        rope_theta=rope.get_float("rope_theta", 100.0),
        positions=positions,
        clipped=fields.get_bool("use_clipped_linears", False),
        standardized=fields.get_bool("standardize", False),
    )


def _read_intern(fields: ConfigReader, published: bool, feature: int | None) -> dict[str, Any]:
    """Read InternViT's options by transformers' names, or by those of the original config (`published`)."""
    names = ("qkv_bias", "qk_normalization", "rms_norm") if published else ("attention_bias", "use_qk_norm", "rms_norm")
    norm = fields.get_str("norm_type", "rms_norm" if published else "layer_norm")
    if norm not in ("layer_norm", "rms_norm"):
        raise StartupError(f"norm_type {short_repr(norm)} in {fields.source}", "layer_norm and rms_norm are supported")
    fields.require_value("use_mask_token", False)
    fields.require_value("use_absolute_position_embeddings", True)
    return {
        "qkv_bias": fields.get_bool(names[0], False),
        "qk_norm": fields.get_bool(names[1], published),
        "use_rms_norm": norm == "rms_norm",
        "final_norm": not published and feature == -1 and not fields.get_bool("use_mean_pooling", True),
        "fused_qkv": published,
    }


def _read_mllama(fields: ConfigReader, layers: int, hidden: int) -> dict[str, Any]:
    tiles = fields.get_int("max_num_tiles", 4, maximum=16)
    indices = fields.config.get("intermediate_layers_indices")
    indices = [3, 7, 15, 23, 30] if indices is None else indices
    if not isinstance(indices, list) or not all(type(index) is int and 0 <= index < layers for index in indices):
        raise StartupError(
            f"intermediate_layers_indices in {fields.source} is {short_repr(indices)}", f"Layers are 0 to {layers - 1}"
        )
    if indices != sorted(set(indices)):
        raise StartupError(f"intermediate_layers_indices in {fields.source} is {short_repr(indices)}", "It must ascend")
    ratios = [[rows, columns] for rows in range(1, tiles + 1) for columns in range(1, tiles // rows + 1)]
    fields.require_value("supported_aspect_ratios", ratios)
    outputs = 1 + len(indices)
    output_dim = fields.get_int("vision_output_dim", hidden * outputs)
    if output_dim != hidden * outputs:
        raise StartupError(f"vision_output_dim is {output_dim}", f"It must be {outputs} times {hidden}")
    return {
        "qkv_bias": False,
        "global_layers": fields.get_int("num_global_layers", 8, maximum=MAX_LAYERS),
        "intermediate_layers": tuple(indices),
        "max_tiles": tiles,
    }


def _read_side(fields: ConfigReader, name: str, default: int) -> int:
    """Return the pixels of a side: a number, or a list of two equal numbers."""
    value = fields.config.get(name)
    if isinstance(value, list | tuple):
        if len(value) != 2 or value[0] != value[1]:
            raise StartupError(f"{name} in {fields.source} is {short_repr(value)}", "Tiles and patches must be squares")
        return int(ConfigReader({name: value[0]}, fields.source).get_int(name))
    return int(fields.get_int(name, default))
