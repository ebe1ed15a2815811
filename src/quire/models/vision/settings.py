"""Settings of a vision encoder, read from config.json and preprocessor_config.json: the tower, the connector after it,
the tiling; and derived sizes (parameters, activations). No torch. Defaults are transformers'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from quire.errors import StartupError, short_repr
from quire.kernels.limits import MAX_IMAGE_PARTS
from quire.models.config_reader import ConfigReader
from quire.models.vision.tower_settings import (
    ACTIVATIONS,
    CLIP,
    INTERN,
    MLLAMA,
    SIGLIP,
    TowerSettings,
    read_gemma4_tower,
    read_tower,
)
from quire.protocol.image_tiling import (
    AnyResTiling,
    ClosestAspectTiling,
    FittedCanvasTiling,
    HDTiling,
    ImageTiling,
    PooledTile,
    ScaledTiling,
    SingleTile,
)
from quire.protocol.model_spec import VisionSpec

PREPROCESSOR_KEY = "preprocessor_config"
"""The key under which a config.json that was read has preprocessor_config.json (see quire.weights.checkpoint_files)."""
PROJECTOR_ROWS = 4096  # rows that a connector with two products computes at a time
MAX_TILES = 64
MAX_SIZES = 256
ENCODER_COST_FACTOR = 2  # time per operation of a tower, relative to a prompt's: on an H200 1.1 to 2.3
LLAVA_TOWER = {
    "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14, "image_size": 384, "num_hidden_layers": 26,
    "num_attention_heads": 16,
}  # fmt: skip
PALIGEMMA_TOWER = {**LLAVA_TOWER, "image_size": 224, "num_hidden_layers": 27, "intermediate_size": 4096}
CLIP_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 14, "image_size": 336, "num_hidden_layers": 24,
    "num_attention_heads": 16,
}  # fmt: skip
PHI3_IMAGE_TOKEN = 32_044
"""<|image|> in Phi-3-Vision's vocabulary."""

RGB = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Normalization:
    """A byte x of a colour channel becomes (x * scale - mean) / std."""

    mean: RGB
    std: RGB
    scale: float = 1 / 255


CLIP_NORMAL = Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET_NORMAL = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF_NORMAL = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSettings:
    """Tower and connector. `kind` is the connector's; rows have `hidden` numbers. `merge` x `merge` patches become one
    row. `published_names`: checkpoints have the original weight names, not transformers'. `thumbnail_first` (Phi-3):
    the whole image's rows precede its tiles'. `image_token_id` is the placeholder token of a row, if config.json has
    it. With `bidirectional_images` the tokens of an image attend to each other in both directions."""

    kind: str
    tower: TowerSettings
    hidden: int
    tiling: ImageTiling
    normalization: Normalization
    activation: str = "gelu"
    bias: bool = True
    merge: int = 1
    published_names: bool = False
    thumbnail_first: bool = False
    image_token_id: int | None = None
    bidirectional_images: bool = False

    @classmethod
    def from_config(cls, config: dict[str, Any], preprocessor: dict[str, Any] | None = None) -> Self:
        """Read config.json and preprocessor_config.json. Raise StartupError for a value that is missing, wrong or not
        supported, and for a model without a vision encoder."""
        name = (config.get("architectures") or [""])[0]
        if name not in SETTINGS_READERS:
            raise StartupError(
                f"the architecture {short_repr(name)} has no vision encoder",
                f"Architectures with one: {', '.join(SETTINGS_READERS)}",
            )
        fields, preprocessor_fields = ConfigReader(config), ConfigReader(preprocessor or {}, "preprocessor_config.json")
        settings = cls(**SETTINGS_READERS[name](fields, preprocessor_fields))
        tile = None if settings.kind == "gemma4" else preprocessor_tile(preprocessor_fields)
        if tile is not None and tile != settings.tiling.tile_size:
            cause = f"preprocessor_config.json makes tiles of {tile} pixels, the tower has {settings.tiling.tile_size}"
            raise StartupError(cause, "Both files must be of one model")
        return settings

    @property
    def bidirectional(self) -> bool:
        """Return True if the tokens of a prompt attend to each other in both directions."""
        return self.kind == "paligemma"

    @property
    def causal_full_layers(self) -> bool:
        """Return True if layers without a window attend to earlier tokens only, also where `bidirectional_images`."""
        return self.kind == "gemma4"

    @property
    def encodes_whole_image(self) -> bool:
        """Return True if all tiles of an image are encoded together."""
        return self.kind in ("mllama", "gemma4")

    @property
    def uses_cross_attention(self) -> bool:
        """Return True if cross-attention layers attend to the rows, which are then not part of the text's sequence."""
        return self.kind == "mllama"

    @property
    def max_rows(self) -> int:
        return self.tiling.max_embeds

    @property
    def connector_in(self) -> int:
        """Return the number of inputs of the connector for one row."""
        return self.tower.out_features * self.merge**2

    @property
    def parameters(self) -> int:
        """Return the number of parameters of tower and connector."""
        width, out = self.connector_in, self.hidden
        linear = width * out + self.bias * out
        second = out * out + self.bias * out
        connector = {
            "llava": linear + second + out,
            "internvl": 2 * width + linear + second,
            "phi3": linear + second + 2 * width,
            "paligemma": linear,
            "gemma3": linear + width,
            "gemma4": linear,
            "mllama": linear,
        }
        return self.tower.parameters + connector[self.kind]

    def activation_bytes(self, parts: int, itemsize: int) -> int:
        """Return the peak bytes of encoding the largest image, beside its pixels as bytes: the maximum over normalising
        it, encoding `parts` parts with the features of all others in memory, and joining the features."""
        at_once, tiles = (self.tower.max_tiles,) * 2 if self.encodes_whole_image else (parts, self.tiling.max_parts)
        pixels, patches = tiles * 3 * self.tower.image_size**2, tiles * self.tower.patches
        rows = patches // self.merge**2
        projected = rows * (2 * self.connector_in + self.hidden) + 2 * min(rows, PROJECTOR_ROWS) * self.hidden
        joined = max(projected, (rows + 3 * min(rows, self.max_rows)) * self.hidden)
        numbers = patches * self.tower.out_features + max(at_once * self.tower.activations_per_tile, joined)
        return pixels * itemsize + max(4 * pixels, numbers * itemsize)

    def part_bytes(self, itemsize: int) -> int:
        """Return the bytes of a part while its image is encoded: its normalised pixels, features and rows."""
        tiles = self.tower.max_tiles
        numbers = self.tower.patches * (self.tower.out_features + self.hidden) + 3 * self.tower.image_size**2
        return tiles * numbers * itemsize

    def partial_image_bytes(self, itemsize: int) -> int:
        """Return the bytes of the normalised pixels of the largest image while parts of it wait for another step."""
        parts = self.tiling.max_parts
        return 0 if self.uses_cross_attention or parts == 1 else parts * 3 * self.tower.image_size**2 * itemsize

    def spec(self, text: int) -> VisionSpec:
        """Return the VisionSpec, for a text model of `text` parameters."""
        at_once = min(MAX_IMAGE_PARTS, self.tiling.max_parts)
        products, attention = self.tower.operations
        return VisionSpec(
            self.hidden, self.max_rows, self.parameters, self.activation_bytes(at_once, 2), self.bidirectional,
            -(-ENCODER_COST_FACTOR * (products + attention) // (2 * text)), self.part_bytes(2),
            self.partial_image_bytes(2),
            0 if self.uses_cross_attention else self.max_rows // self.tiling.max_parts, products,
            self.bidirectional_images, self.causal_full_layers,
        )  # fmt: skip


def _llava(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    text, vision = _text_section(fields), _section(fields, "vision_config")
    tower = read_tower(vision, SIGLIP, _feature_layer(fields, "vision_feature_layer", -1), LLAVA_TOWER)
    fields.require_value("vision_feature_select_strategy", "full")  # there is no class token
    area = fields.get_str("vision_aspect_ratio", "anyres_max_9")
    tiles = area.removeprefix("anyres_max_")
    if tiles == area or not tiles.isdecimal() or not 1 <= int(tiles[:4]) <= MAX_TILES or len(tiles) > 4:
        raise StartupError(
            f"vision_aspect_ratio is {short_repr(area)}", f"anyres_max_1 to anyres_max_{MAX_TILES} are known"
        )
    sizes = _grid_sizes(fields, tower.image_size)
    if preprocessor.config.get("image_grid_pinpoints") not in (None, [list(size) for size in sizes]):
        cause = "image_grid_pinpoints of preprocessor_config.json are not those of config.json"
        raise StartupError(cause, "Both files must be of one model")
    return {
        "kind": "llava",
        "tower": tower,
        "hidden": text.get_int("hidden_size"),
        "tiling": AnyResTiling(tower.image_size, tower.patches_per_side, sizes, int(tiles)),
        "normalization": read_normalization(preprocessor, CLIP_NORMAL),
        "activation": _activation(fields, "projector_hidden_act"),
        "bias": fields.get_bool("multimodal_projector_bias", True),
        "image_token_id": fields.get_int("image_token_index", fields.get_int("image_token_id", 151_646)),
    }


def _internvl(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    tower = read_tower(_section(fields, "vision_config"), INTERN, _feature_layer(fields, "vision_feature_layer", -1))
    fields.require_value("vision_feature_select_strategy", "default")  # the class token stands for no row
    limits = preprocessor.get_int("min_patches", 1), preprocessor.get_int("max_patches", 12, maximum=MAX_TILES)
    return {
        **_shuffled_tiles(fields, preprocessor, tower, *limits),
        "hidden": _text_section(fields).get_int("hidden_size"),
        "activation": _activation(fields, "projector_hidden_act"),
        "image_token_id": fields.get_int("image_token_id", 151_667),
    }


def _internvl_published(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    vision = _section(fields, "vision_config")
    tower = read_tower(vision, INTERN, _feature_layer(fields, "select_layer", -1), published=True)
    tile = fields.get_int("force_image_size", tower.image_size)
    if tile != tower.image_size:
        raise StartupError(f"force_image_size is {tile}, the tower has {tower.image_size}", "They must be the same")
    if fields.get_str("ps_version", "v1") != "v2":
        raise StartupError("ps_version in config.json is not v2", "Only InternVL 1.5 and later ones are supported")
    limits = fields.get_int("min_dynamic_patch", 1), fields.get_int("max_dynamic_patch", 12, maximum=MAX_TILES)
    if not fields.get_bool("dynamic_image_size", True):
        limits = 1, 1
    text = fields.get_object("llm_config") or fields.get_object("text_config")
    thumbnail = fields.get_bool("use_thumbnail", True)
    return {
        **_shuffled_tiles(fields, preprocessor, tower, *limits, thumbnail),
        "hidden": ConfigReader(text, "llm_config of config.json").get_int("hidden_size"),
        "published_names": True,
    }


def _shuffled_tiles(
    fields: ConfigReader, preprocessor: ConfigReader, tower: TowerSettings, least: int, most: int,
    thumbnail: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Return what both forms of InternVL's config share: `least` to `most` tiles, whose patches are merged."""
    side, merge = tower.patches_per_side, _merge(fields, tower.patches_per_side)
    if least > most:
        raise StartupError(f"the minimum of an image's tiles, {least}, is above the maximum, {most}", "Lower it")
    return {
        "kind": "internvl",
        "tower": tower,
        "tiling": ClosestAspectTiling(tower.image_size, side, merge, least, most, thumbnail),
        "normalization": read_normalization(preprocessor, IMAGENET_NORMAL),
        "merge": merge,
    }


def _phi3(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    """Phi-3-Vision's tower is CLIP-L/14-336; config.json has no section for it, unless in img_processor."""
    processor = ConfigReader(fields.get_object("img_processor"), "img_processor of config.json")
    layer = ConfigReader(fields.get_object("embd_layer"), "embd_layer of config.json")
    processor.require_value("name", "clip_vision_model")
    processor.require_value("type_feature", "patch")
    layer.require_value("projection_cls", "mlp")
    for name in ("use_hd_transform", "with_learnable_separator"):
        layer.require_value(name, True)
    order = layer.get_str("hd_transform_order", "glb_sub")
    if order not in ("glb_sub", "sub_glb"):
        raise StartupError(f"hd_transform_order is {short_repr(order)}", "sub_glb and glb_sub are known")
    vision = ConfigReader({**CLIP_LARGE, **processor.get_object("vision_config")}, "img_processor of config.json")
    tower = read_tower(vision, CLIP, _feature_layer(processor, "layer_idx", -2))
    if processor.get_int("image_dim_out", tower.hidden) != tower.hidden:
        raise StartupError(
            f"image_dim_out is {processor.config['image_dim_out']}, and the tower's hidden size is {tower.hidden}",
            "They must be the same",
        )
    if tower.patches_per_side % 2:
        cause = f"{tower.patches_per_side} x {tower.patches_per_side} patches a tile can't be merged 2 x 2"
        raise StartupError(cause, "image_size / patch_size must be even")
    most = preprocessor.get_int("num_crops", 16, maximum=MAX_TILES)
    return {
        "kind": "phi3",
        "tower": tower,
        "hidden": fields.get_int("hidden_size"),
        "tiling": HDTiling(tower.image_size, tower.patches_per_side, most),
        "normalization": read_normalization(preprocessor, CLIP_NORMAL),
        "merge": 2,
        "published_names": True,
        "thumbnail_first": order == "glb_sub",
        "image_token_id": PHI3_IMAGE_TOKEN,
    }


def _paligemma(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    vision = ConfigReader({**PALIGEMMA_TOWER, **fields.get_object("vision_config")}, "vision_config of config.json")
    tower = read_tower(vision, SIGLIP, None)
    width = _text_section(fields).get_int("hidden_size", 2048)
    projection = vision.get_int("projection_dim", fields.get_int("projection_dim", width))
    if projection != width:
        raise StartupError(f"projection_dim is {projection}, the text's hidden_size {width}", "They must be the same")
    return {
        "kind": "paligemma",
        "tower": tower,
        "hidden": width,
        "tiling": SingleTile(tower.image_size, tower.patches_per_side),
        "normalization": read_normalization(preprocessor, HALF_NORMAL),
        "image_token_id": fields.get_int("image_token_index", fields.get_int("image_token_id", 256_000)),
    }


def _gemma3(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    preprocessor.require_value("do_pan_and_scan", False)
    tower = read_tower(_section(fields, "vision_config"), SIGLIP, None)
    rows = fields.get_int("mm_tokens_per_image", 256, maximum=tower.patches)
    side = math.isqrt(rows)
    if side**2 != rows or tower.patches_per_side % side:
        raise StartupError(
            f"mm_tokens_per_image is {rows}, and the tower has {tower.patches_per_side} x {tower.patches_per_side} "
            "patches",
            "It must be the square of a number that divides them",
        )
    return {
        "kind": "gemma3",
        "tower": tower,
        "hidden": _text_section(fields).get_int("hidden_size", 2304),
        "tiling": PooledTile(tower.image_size, side),
        "normalization": read_normalization(preprocessor, HALF_NORMAL),
        "bias": False,
        "image_token_id": fields.get_int("image_token_index", fields.get_int("image_token_id", 262_144)),
        "bidirectional_images": True,
    }


def _gemma4(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    """Pixels are normalised to -1 to 1 by the published tower's code, so preprocessor_config.json must not do so."""
    for name, value in (("do_rescale", True), ("do_normalize", False)):
        preprocessor.require_value(name, value)
    vision = ConfigReader(fields.get_object("vision_config"), f"vision_config of {fields.source}")
    text = _text_section(fields)
    rows = preprocessor.get_int("max_soft_tokens", fields.get_int("vision_soft_tokens_per_image", 280))
    tower = read_gemma4_tower(vision, rows)
    for name, size in (("patch_size", tower.patch_size), ("pooling_kernel_size", tower.patches_per_side)):
        if (given := preprocessor.get_int(name, size)) != size:
            raise StartupError(
                f"{name} of {preprocessor.source} is {given}, the tower's is {size}", "Both files must be of one model"
            )
    return {
        "kind": "gemma4",
        "tower": tower,
        "hidden": text.get_int("hidden_size", 2304),
        "tiling": ScaledTiling(tower.image_size, tower.patches_per_side, rows),
        "normalization": replace(HALF_NORMAL, scale=preprocessor.get_float("rescale_factor", HALF_NORMAL.scale)),
        "bias": False,
        "image_token_id": fields.get_int("image_token_id", 258_880),
        "bidirectional_images": text.config.get("use_bidirectional_attention") == "vision",
    }


def _mllama(fields: ConfigReader, preprocessor: ConfigReader) -> dict[str, Any]:
    tower = read_tower(_section(fields, "vision_config"), MLLAMA, None)
    tiles = preprocessor.get_int("max_image_tiles", tower.max_tiles)
    if tiles > tower.max_tiles:
        raise StartupError(f"max_image_tiles is {tiles}", f"The tower takes {tower.max_tiles} at most")
    return {
        "kind": "mllama",
        "tower": tower,
        "hidden": _text_section(fields).get_int("hidden_size", 4096),
        "tiling": FittedCanvasTiling(tower.image_size, tower.patches_per_side, tower.max_tiles),
        "normalization": read_normalization(preprocessor, CLIP_NORMAL),
        "image_token_id": fields.get_int("image_token_index", fields.get_int("image_token_id", 128_256)),
    }


SETTINGS_READERS: dict[str, Callable[[ConfigReader, ConfigReader], dict[str, Any]]] = {
    "LlavaOnevisionForConditionalGeneration": _llava,
    "InternVLForConditionalGeneration": _internvl,
    "InternVLChatModel": _internvl_published,
    "Phi3VForCausalLM": _phi3,
    "PaliGemmaForConditionalGeneration": _paligemma,
    "Gemma3ForConditionalGeneration": _gemma3,
    "Gemma4ForConditionalGeneration": _gemma4,
    "MllamaForConditionalGeneration": _mllama,
}


def read_normalization(preprocessor: ConfigReader, default: Normalization) -> Normalization:
    """Read the normalization of pixels. Raise StartupError for a config without it, and for invalid numbers."""
    for name in ("do_rescale", "do_normalize"):
        preprocessor.require_value(name, True)
    mean, std = _read_rgb(preprocessor, "image_mean", default.mean), _read_rgb(preprocessor, "image_std", default.std)
    if min(std) <= 0:
        raise StartupError(f"image_std of {preprocessor.source} is {short_repr(list(std))}", "Each must be above 0")
    return Normalization(mean, std, preprocessor.get_float("rescale_factor", default.scale))


def _read_rgb(preprocessor: ConfigReader, name: str, default: RGB) -> RGB:
    rgb = preprocessor.config.get(name)
    if rgb is None:
        return default
    if not isinstance(rgb, list) or len(rgb) != 3 or not all(type(x) in (int, float) and -9 < x < 9 for x in rgb):
        raise StartupError(f"{name} of {preprocessor.source} is {short_repr(rgb)}", "It must be three numbers")
    return float(rgb[0]), float(rgb[1]), float(rgb[2])


def preprocessor_tile(preprocessor: ConfigReader) -> int | None:
    """Return the side of a tile in preprocessor_config.json, if it has one."""
    size = preprocessor.config.get("size")
    if isinstance(size, dict):
        side = ConfigReader(size, "size of preprocessor_config.json")
        tile = side.get_int("height", side.get_int("shortest_edge", None))
        if side.get_int("width", tile) != tile:
            raise StartupError(f"size of preprocessor_config.json is {short_repr(size)}", "Tiles must be squares")
        return tile if isinstance(tile, int) else None
    tile = preprocessor.get_int("size", None)
    return tile if isinstance(tile, int) else None


def _section(fields: ConfigReader, name: str) -> ConfigReader:
    section = fields.get_object(name)
    if not section:
        raise StartupError(f"{fields.source} has no {name}", "It must describe the vision tower")
    return ConfigReader(section, f"{name} of {fields.source}")


def _text_section(fields: ConfigReader) -> ConfigReader:
    return ConfigReader(fields.get_object("text_config"), f"text_config of {fields.source}")


def _feature_layer(fields: ConfigReader, name: str, default: int) -> int:
    """Return the layer whose output is used, counted from the end: -1 is the last one."""
    value = fields.config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value not in (-1, -2):
        raise StartupError(f"{name} in {fields.source} is {short_repr(value)}", "-1 and -2 are supported")
    return value


def _activation(fields: ConfigReader, name: str) -> str:
    act = fields.get_str(name, "gelu")
    if act not in ACTIVATIONS:
        raise StartupError(f"{name} in {fields.source} is {short_repr(act)}", f"Supported: {', '.join(ACTIVATIONS)}")
    return act


def _merge(fields: ConfigReader, side: int) -> int:
    """Return the side of the squares of patches that become one row: 2 for a downsample_ratio of a half."""
    ratio = fields.get_float("downsample_ratio", 0.5)
    merge = round(1 / ratio) if 1 / MAX_TILES <= ratio <= 1 else 0
    if merge < 1 or abs(merge * ratio - 1) > 1e-9 or side % merge:
        raise StartupError(
            f"downsample_ratio in {fields.source} is {short_repr(ratio)} for {side} x {side} patches a tile",
            "It must be 1 / n, where n is an integer that divides them",
        )
    return merge


def _grid_sizes(fields: ConfigReader, tile: int) -> tuple[tuple[int, int], ...]:
    """Return image_grid_pinpoints: (height, width) in pixels, whole tiles."""
    sizes = fields.config.get("image_grid_pinpoints")
    if sizes is None:
        sizes = [[rows * tile, columns * tile] for rows in range(1, 7) for columns in range(1, 7)]
    if not isinstance(sizes, list) or not 1 <= len(sizes) <= MAX_SIZES:
        raise StartupError(f"image_grid_pinpoints is {short_repr(sizes)}", f"It must list 1 to {MAX_SIZES} sizes")
    for size in sizes:
        whole = (
            isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 and not x % tile for x in size)
        )
        if not whole or size[0] * size[1] > MAX_TILES * tile**2:
            limit = f"Each must be a height and a width in whole tiles of {tile} pixels, {MAX_TILES} tiles at most"
            raise StartupError(f"image_grid_pinpoints has {short_repr(size)}", limit)
    return tuple((size[0], size[1]) for size in sizes)
