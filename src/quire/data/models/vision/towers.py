"""What a config.json says of a vision tower: one reader for the four kinds there are. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.data.models.fields import Fields
from quire.errors import StartupError, shown

CLIP, SIGLIP, INTERN, MLLAMA = "clip", "siglip", "intern", "mllama"
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
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSettings:
    """`layers` are run, of those `stored` in the checkpoint; `final_norm` is put behind the last. `image` pixels a side
    are `side` patches of `patch` pixels. Of Llama 3.2 Vision's: `global_layers`, `taps` (the layers whose inputs are
    given out too) and the tiles of a picture, all of which it sees at once."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    stored: int
    heads: int
    image: int
    patch: int
    activation: str
    norm_eps: float
    qkv_bias: bool = True
    qk_norm: bool = False
    rms: bool = False
    final_norm: bool = False
    fused: bool = False
    global_layers: int = 0
    taps: tuple[int, ...] = ()
    most_tiles: int = 1

    @property
    def side(self) -> int:
        return self.image // self.patch

    @property
    def patches(self) -> int:
        return self.side**2

    @property
    def shapes(self) -> int:
        """Of Llama 3.2 Vision: grids of tiles that a picture can have."""
        return sum(self.most_tiles // rows for rows in range(1, self.most_tiles + 1))

    @property
    def tokens(self) -> int:
        """What a tile is within the tower: its patches, a class token (not SigLIP), and what rounds mllama's up."""
        count = self.patches + (self.kind != SIGLIP)
        return -(-count // 8) * 8 if self.kind == MLLAMA else count

    @property
    def out(self) -> int:
        """Numbers that the tower gives for each patch."""
        return self.hidden * (1 + len(self.taps))

    @property
    def tile_numbers(self) -> int:
        """Numbers that are there at once, at most, for each tile that is encoded: the stream, what was added to it last
        and what is to be next, its norm, the MLP's result and twice its inside (once on a GPU), or queries, keys and
        values with what attention finds; and its patches, cut."""
        block = max(5 * self.hidden + 2 * self.intermediate, 8 * self.hidden)
        return self.tokens * (block + len(self.taps) * self.hidden) + 3 * self.image**2

    @property
    def operations(self) -> tuple[int, int]:
        """Of a part: those of products with all weights, and those of attention among all that is seen at once."""
        tokens, layers = self.tokens * self.most_tiles, self.layers + self.global_layers
        return 2 * self.parameters * self.patches * self.most_tiles, 4 * layers * self.hidden * tokens**2

    @property
    def parameters(self) -> int:
        h, positions = self.hidden, self.patches + (self.kind != SIGLIP)
        norm = h if self.rms else 2 * h
        attention = 4 * h * h + self.qkv_bias * 3 * h + (self.kind != MLLAMA) * h + self.qk_norm * 2 * h
        layer = attention + 2 * h * self.intermediate + self.intermediate + h + 2 * norm + (self.kind == INTERN) * 2 * h
        embeddings = h * 3 * self.patch**2 + (self.kind in (SIGLIP, INTERN)) * h + positions * h
        embeddings += (self.kind != SIGLIP) * h
        if self.kind == MLLAMA:
            tables = (self.shapes + 1) * self.most_tiles * h
            embeddings += tables * (positions + 2) + 3 + 2 * 2 * h + self.global_layers * 2
        if self.kind == CLIP:
            embeddings += 2 * h
        return embeddings + (self.layers + self.global_layers) * layer + self.final_norm * 2 * h


def read_tower(
    fields: Fields, kind: str, feature: int | None, defaults: dict[str, Any] | None = None, published: bool = False
) -> TowerSettings:
    """A section of a config.json. `feature`: -1 for the last layer's output, -2 for the one before; None for the last
    one's behind the final norm. StartupError for what is missing, wrong or not supported."""
    usual = {**DEFAULTS[kind], **(defaults or {})}
    fields.refuse("num_channels", 3)
    heads_name = "attention_heads" if kind == MLLAMA else "num_attention_heads"
    hidden, heads = fields.size("hidden_size", usual["hidden_size"]), fields.size(heads_name, usual[heads_name])
    image, patch = _side(fields, "image_size", usual["image_size"]), _side(fields, "patch_size", usual["patch_size"])
    stored = fields.size("num_hidden_layers", usual["num_hidden_layers"], most=MAX_LAYERS)
    layers = stored + 1 + (-1 if feature is None else feature)
    activation = fields.text("hidden_act", usual["hidden_act"])
    if hidden % heads or (hidden // heads) % 2:
        raise StartupError(f"{fields.where}: hidden_size {hidden} is not {heads_name} ({heads}) times an even size")
    if not patch <= image <= MAX_IMAGE or (image // patch) ** 2 > MAX_PATCHES:
        cause = f"{fields.where}: tiles of {image} pixels in patches of {patch}"
        raise StartupError(cause, f"A tile has {MAX_IMAGE} pixels a side and {MAX_PATCHES} patches at most")
    if layers < 1:
        raise StartupError(f"{fields.where}: of {stored} layers none is left before the one whose output is read")
    if activation not in ACTIVATIONS:
        raise StartupError(f"hidden_act {shown(activation)} in {fields.where}", f"Supported: {', '.join(ACTIVATIONS)}")
    eps = "norm_eps" if kind == MLLAMA else "layer_norm_eps"
    more: dict[str, Any] = {"final_norm": kind == SIGLIP and feature is None}
    if kind == INTERN:
        more = _intern(fields, published, feature)
    if kind == MLLAMA:
        more = _mllama(fields, layers, hidden)
    return TowerSettings(
        kind=kind,
        hidden=hidden,
        intermediate=fields.size("intermediate_size", usual["intermediate_size"]),
        layers=layers,
        stored=stored,
        heads=heads,
        image=image,
        patch=patch,
        activation=activation,
        norm_eps=fields.number(eps, usual[eps]),
        **more,
    )


def _intern(fields: Fields, published: bool, feature: int | None) -> dict[str, Any]:
    """transformers' names of the options, or those of the config that was published with the weights."""
    names = ("qkv_bias", "qk_normalization", "rms_norm") if published else ("attention_bias", "use_qk_norm", "rms_norm")
    norm = fields.text("norm_type", "rms_norm" if published else "layer_norm")
    if norm not in ("layer_norm", "rms_norm"):
        raise StartupError(f"norm_type {shown(norm)} in {fields.where}", "layer_norm and rms_norm are supported")
    fields.refuse("use_mask_token", False)
    fields.refuse("use_absolute_position_embeddings", True)
    return {
        "qkv_bias": fields.flag(names[0], False),
        "qk_norm": fields.flag(names[1], published),
        "rms": norm == "rms_norm",
        "final_norm": not published and feature == -1 and not fields.flag("use_mean_pooling", True),
        "fused": published,
    }


def _mllama(fields: Fields, layers: int, hidden: int) -> dict[str, Any]:
    tiles = fields.size("max_num_tiles", 4, most=16)
    taps = fields.config.get("intermediate_layers_indices")
    taps = [3, 7, 15, 23, 30] if taps is None else taps
    if not isinstance(taps, list) or not all(type(tap) is int and 0 <= tap < layers for tap in taps):
        raise StartupError(
            f"intermediate_layers_indices in {fields.where} is {shown(taps)}", f"Layers are 0 to {layers - 1}"
        )
    if taps != sorted(set(taps)):
        raise StartupError(f"intermediate_layers_indices in {fields.where} is {shown(taps)}", "It must ascend")
    ratios = [[rows, columns] for rows in range(1, tiles + 1) for columns in range(1, tiles // rows + 1)]
    fields.refuse("supported_aspect_ratios", ratios)
    made = fields.size("vision_output_dim", hidden * (1 + len(taps)))
    if made != hidden * (1 + len(taps)):
        raise StartupError(f"vision_output_dim is {made}, but {1 + len(taps)} times {hidden} numbers are made")
    return {
        "qkv_bias": False,
        "global_layers": fields.size("num_global_layers", 8, most=MAX_LAYERS),
        "taps": tuple(taps),
        "most_tiles": tiles,
    }


def _side(fields: Fields, name: str, default: int) -> int:
    """Pixels a side: a number, or a list of two equal ones."""
    value = fields.config.get(name)
    if isinstance(value, list | tuple):
        if len(value) != 2 or value[0] != value[1]:
            raise StartupError(f"{name} in {fields.where} is {shown(value)}", "Tiles and patches must be squares")
        return int(Fields({name: value[0]}, fields.where).size(name))
    return int(fields.size(name, default))
