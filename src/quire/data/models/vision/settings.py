"""What the config.json of a model that reads pictures says of its eyes: the tower, the connector behind it, the tiles;
and the arithmetic on it (parameters, activations). No torch. Defaults are transformers'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from quire.data.kernels.limits import PARTS_AT_ONCE
from quire.data.models.fields import Fields
from quire.data.models.vision.pixels import CLIP_NORMAL, HALF_NORMAL, IMAGENET_NORMAL, Normal, read_normal
from quire.data.models.vision.towers import ACTIVATIONS, CLIP, INTERN, MLLAMA, SIGLIP, TowerSettings, read_tower
from quire.errors import StartupError, shown
from quire.vocabulary.pictures import AnyResolution, Closest, Fitted, HighDefinition, Single, Tiling
from quire.vocabulary.specs import VisionSpec

AT_ONCE = 4096  # rows that a connector with two products makes at a time
MAX_TILES = 64
MAX_SIZES = 256
LONGER = 2  # times as long as a prompt's operations those of a tower take: on an H200 1.1 to 2.3


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSettings:
    """Tower and connector. `kind` is the connector's; rows have `width` numbers. `merge` x `merge` patches become one
    row. `published` checkpoints have other names than transformers'. With `whole_first` (Phi-3) the whole picture's
    rows stand before its tiles'. `token` is the id that stands for a row in the text, where config.json tells it."""

    kind: str
    tower: TowerSettings
    width: int
    tiling: Tiling
    normal: Normal
    activation: str = "gelu"
    bias: bool = True
    merge: int = 1
    published: bool = False
    whole_first: bool = False
    token: int | None = None

    @classmethod
    def read(cls, config: dict[str, Any], preprocessor: dict[str, Any] | None = None) -> Self:
        """From config.json and preprocessor_config.json. StartupError for a value that is missing, wrong or not
        supported, and for a model without eyes."""
        name = (config.get("architectures") or [""])[0]
        if name not in READERS:
            raise StartupError(
                f"the architecture {shown(name)} reads no pictures", f"Those that do: {', '.join(READERS)}"
            )
        fields, said = Fields(config), Fields(preprocessor or {}, "preprocessor_config.json")
        read = READERS[name](fields, said)
        settings = cls(**read)
        tile = said_tile(said)
        if tile is not None and tile != settings.tiling.tile:
            cause = f"preprocessor_config.json makes tiles of {tile} pixels, the tower sees {settings.tiling.tile}"
            raise StartupError(cause, "Both files must be of one model")
        return settings

    @property
    def both_ways(self) -> bool:
        """Whether the tokens of a prompt attend to one another both ways."""
        return self.kind == "paligemma"

    @property
    def cross(self) -> bool:
        """Whether layers of their own attend to the rows, which then stand nowhere in the text."""
        return self.kind == "mllama"

    @property
    def most_rows(self) -> int:
        return self.tiling.most_rows

    @property
    def features(self) -> int:
        """Numbers of what the connector reads for one row."""
        return self.tower.out * self.merge**2

    @property
    def parameters(self) -> int:
        """Weights of tower and connector."""
        wide, out = self.features, self.width
        linear = wide * out + self.bias * out
        second = out * out + self.bias * out
        connector = {
            "llava": linear + second + out,
            "internvl": 2 * wide + linear + second,
            "phi3": linear + second + 2 * wide,
            "paligemma": linear,
            "mllama": linear,
        }
        return self.tower.parameters + connector[self.kind]

    def activation_bytes(self, parts: int, itemsize: int) -> int:
        """Bytes at most, beside its pixels as bytes, while the largest picture is normalised; while `parts` parts of it
        are encoded and the features of all the others are there; and while they are joined."""
        at_once, tiles = (self.tower.most_tiles,) * 2 if self.cross else (parts, self.tiling.most_parts)
        pixels, kept = tiles * 3 * self.tower.image**2, tiles * self.tower.patches
        rows = kept // self.merge**2
        projected = rows * (2 * self.features + self.width) + 2 * min(rows, AT_ONCE) * self.width
        joined = max(projected, (rows + 3 * min(rows, self.most_rows)) * self.width)
        numbers = kept * self.tower.out + max(at_once * self.tower.tile_numbers, joined)
        return pixels * itemsize + max(4 * pixels, numbers * itemsize)

    def part_bytes(self, itemsize: int) -> int:
        """Bytes of a part while its picture is encoded: opened, its features, and rows."""
        tiles = self.tower.most_tiles
        kept = self.tower.patches * (self.tower.out + self.width) + 3 * self.tower.image**2
        return tiles * kept * itemsize

    def begun_bytes(self, itemsize: int) -> int:
        """Bytes of the largest picture, opened, of which parts are left for another step."""
        parts = self.tiling.most_parts
        return 0 if self.cross or parts == 1 else parts * 3 * self.tower.image**2 * itemsize

    def spec(self, text: int) -> VisionSpec:
        """What a memory needs to know, beside a text of so many parameters."""
        at_once = min(PARTS_AT_ONCE, self.tiling.most_parts)
        products, attention = self.tower.operations
        return VisionSpec(
            self.width, self.most_rows, self.parameters, self.activation_bytes(at_once, 2), self.both_ways,
            -(-LONGER * (products + attention) // (2 * text)), self.part_bytes(2), self.begun_bytes(2),
            0 if self.cross else self.most_rows // self.tiling.most_parts, products,
        )  # fmt: skip


def _llava(fields: Fields, said: Fields) -> dict[str, Any]:
    text, vision = _text(fields), _section(fields, "vision_config")
    tower = read_tower(vision, SIGLIP, _layer(fields, "vision_feature_layer", -1), LLAVA_TOWER)
    if fields.text("vision_feature_select_strategy", "full") != "full":
        raise StartupError('vision_feature_select_strategy must be "full" for a tower without a class token')
    area = fields.text("vision_aspect_ratio", "anyres_max_9")
    tiles = area.removeprefix("anyres_max_")
    if tiles == area or not tiles.isdecimal() or not 1 <= int(tiles[:4]) <= MAX_TILES or len(tiles) > 4:
        raise StartupError(f"vision_aspect_ratio is {shown(area)}", f"anyres_max_1 to anyres_max_{MAX_TILES} are known")
    sizes = _sizes(fields, tower.image)
    if said.config.get("image_grid_pinpoints") not in (None, [list(size) for size in sizes]):
        raise StartupError("image_grid_pinpoints of preprocessor_config.json are not those of config.json")
    return {
        "kind": "llava",
        "tower": tower,
        "width": text.size("hidden_size"),
        "tiling": AnyResolution(tower.image, tower.side, sizes, int(tiles)),
        "normal": read_normal(said, CLIP_NORMAL),
        "activation": _activation(fields, "projector_hidden_act"),
        "bias": fields.flag("multimodal_projector_bias", True),
        "token": fields.size("image_token_index", fields.size("image_token_id", 151_646)),
    }


def _internvl(fields: Fields, said: Fields) -> dict[str, Any]:
    tower = read_tower(_section(fields, "vision_config"), INTERN, _layer(fields, "vision_feature_layer", -1))
    if fields.text("vision_feature_select_strategy", "default") != "default":
        raise StartupError('vision_feature_select_strategy must be "default": the class token stands for no row')
    merge = _merge(fields, tower.side)
    least, most = said.size("min_patches", 1), said.size("max_patches", 12, most=MAX_TILES)
    return {
        "kind": "internvl",
        "tower": tower,
        "width": _text(fields).size("hidden_size"),
        "tiling": Closest(tower.image, tower.side, merge, _least(least, most), most),
        "normal": read_normal(said, IMAGENET_NORMAL),
        "activation": _activation(fields, "projector_hidden_act"),
        "merge": merge,
        "token": fields.size("image_token_id", 151_667),
    }


def _internvl_published(fields: Fields, said: Fields) -> dict[str, Any]:
    vision = _section(fields, "vision_config")
    tower = read_tower(vision, INTERN, _layer(fields, "select_layer", -1), published=True)
    tile = fields.size("force_image_size", tower.image)
    if tile != tower.image:
        raise StartupError(f"force_image_size is {tile}, the tower sees {tower.image}", "They must be the same")
    if fields.text("ps_version", "v1") != "v2":
        raise StartupError("ps_version in config.json is not v2", "Only InternVL 1.5 and later ones are supported")
    merge = _merge(fields, tower.side)
    least, most = fields.size("min_dynamic_patch", 1), fields.size("max_dynamic_patch", 12, most=MAX_TILES)
    if not fields.flag("dynamic_image_size", True):
        least = most = 1
    text = Fields(fields.section("llm_config") or fields.section("text_config"), "llm_config of config.json")
    return {
        "kind": "internvl",
        "tower": tower,
        "width": text.size("hidden_size"),
        "tiling": Closest(tile, tower.side, merge, _least(least, most), most, fields.flag("use_thumbnail", True)),
        "normal": read_normal(said, IMAGENET_NORMAL),
        "merge": merge,
        "published": True,
    }


def _phi3(fields: Fields, said: Fields) -> dict[str, Any]:
    """Phi-3-Vision's tower is CLIP-L/14-336 and has no section of its own, unless img_processor holds one."""
    processor = Fields(fields.section("img_processor"), "img_processor of config.json")
    layer = Fields(fields.section("embd_layer"), "embd_layer of config.json")
    processor.refuse("name", "clip_vision_model")
    processor.refuse("type_feature", "patch")
    layer.refuse("projection_cls", "mlp")
    for name in ("use_hd_transform", "with_learnable_separator"):
        layer.refuse(name, True)
    order = layer.text("hd_transform_order", "glb_sub")
    if order not in ("glb_sub", "sub_glb"):
        raise StartupError(f"hd_transform_order is {shown(order)}", "sub_glb and glb_sub are known")
    vision = Fields({**CLIP_LARGE, **processor.section("vision_config")}, "img_processor of config.json")
    tower = read_tower(vision, CLIP, _layer(processor, "layer_idx", -2))
    if processor.size("image_dim_out", tower.hidden) != tower.hidden:
        raise StartupError(f"image_dim_out is {processor.config['image_dim_out']}, the tower's {tower.hidden}")
    if tower.side % 2:
        raise StartupError(f"{tower.side} x {tower.side} patches a tile can't be merged 2 x 2")
    most = said.size("num_crops", 16, most=MAX_TILES)
    return {
        "kind": "phi3",
        "tower": tower,
        "width": fields.size("hidden_size"),
        "tiling": HighDefinition(tower.image, tower.side, most),
        "normal": read_normal(said, CLIP_NORMAL),
        "merge": 2,
        "published": True,
        "whole_first": order == "glb_sub",
        "token": PHI3_IMAGE,
    }


def _paligemma(fields: Fields, said: Fields) -> dict[str, Any]:
    vision = Fields({**PALIGEMMA_TOWER, **fields.section("vision_config")}, "vision_config of config.json")
    tower = read_tower(vision, SIGLIP, None)
    width = _text(fields).size("hidden_size", 2048)
    made = vision.size("projection_dim", fields.size("projection_dim", width))
    if made != width:
        raise StartupError(f"projection_dim is {made}, the text's hidden_size {width}", "They must be the same")
    return {
        "kind": "paligemma",
        "tower": tower,
        "width": width,
        "tiling": Single(tower.image, tower.side),
        "normal": read_normal(said, HALF_NORMAL),
        "token": fields.size("image_token_index", fields.size("image_token_id", 256_000)),
    }


def _mllama(fields: Fields, said: Fields) -> dict[str, Any]:
    tower = read_tower(_section(fields, "vision_config"), MLLAMA, None)
    tiles = said.size("max_image_tiles", tower.most_tiles)
    if tiles > tower.most_tiles:
        raise StartupError(f"max_image_tiles is {tiles}, the tower sees {tower.most_tiles} at most")
    return {
        "kind": "mllama",
        "tower": tower,
        "width": _text(fields).size("hidden_size", 4096),
        "tiling": Fitted(tower.image, tower.side, tower.most_tiles),
        "normal": read_normal(said, CLIP_NORMAL),
        "token": fields.size("image_token_index", fields.size("image_token_id", 128_256)),
    }


READERS: dict[str, Callable[[Fields, Fields], dict[str, Any]]] = {
    "LlavaOnevisionForConditionalGeneration": _llava,
    "InternVLForConditionalGeneration": _internvl,
    "InternVLChatModel": _internvl_published,
    "Phi3VForCausalLM": _phi3,
    "PaliGemmaForConditionalGeneration": _paligemma,
    "MllamaForConditionalGeneration": _mllama,
}
LLAVA_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "patch_size": 14,
    "image_size": 384,
    "num_hidden_layers": 26,
    "num_attention_heads": 16,
}
PALIGEMMA_TOWER = {**LLAVA_TOWER, "image_size": 224, "num_hidden_layers": 27, "intermediate_size": 4096}
CLIP_LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "patch_size": 14,
    "image_size": 336,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
PHI3_IMAGE = 32_044
"""<|image|> in Phi-3-Vision's vocabulary."""


def said_tile(said: Fields) -> int | None:
    """The side of a tile that preprocessor_config.json names, if it does."""
    size = said.config.get("size")
    if isinstance(size, dict):
        side = Fields(size, "size of preprocessor_config.json")
        tile = side.size("height", side.size("shortest_edge", None))
        if side.size("width", tile) != tile:
            raise StartupError(f"size of preprocessor_config.json is {shown(size)}", "Tiles must be squares")
        return tile if isinstance(tile, int) else None
    tile = said.size("size", None)
    return tile if isinstance(tile, int) else None


def _section(fields: Fields, name: str) -> Fields:
    section = fields.section(name)
    if not section:
        raise StartupError(f"{fields.where} has no {name}", "It must describe the vision tower")
    return Fields(section, f"{name} of {fields.where}")


def _text(fields: Fields) -> Fields:
    return Fields(fields.section("text_config"), f"text_config of {fields.where}")


def _layer(fields: Fields, name: str, default: int) -> int:
    """A layer, counted from the end: -1 is the last one's output."""
    value = fields.config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value not in (-1, -2):
        raise StartupError(f"{name} in {fields.where} is {shown(value)}", "-1 and -2 are supported")
    return value


def _activation(fields: Fields, name: str) -> str:
    act = fields.text(name, "gelu")
    if act not in ACTIVATIONS:
        raise StartupError(f"{name} in {fields.where} is {shown(act)}", f"Supported: {', '.join(ACTIVATIONS)}")
    return act


def _least(least: int, most: int) -> int:
    if least > most:
        raise StartupError(f"a picture is cut into {least} tiles at least, but {most} at most")
    return least


def _merge(fields: Fields, side: int) -> int:
    """Patches a side that become one row: 2 for a downsample_ratio of a half."""
    ratio = fields.number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if 1 / MAX_TILES <= ratio <= 1 else 0
    if merge < 1 or abs(merge * ratio - 1) > 1e-9 or side % merge:
        raise StartupError(
            f"downsample_ratio in {fields.where} is {shown(ratio)} for {side} x {side} patches a tile",
            "It must be one part of a whole number that divides them",
        )
    return merge


def _sizes(fields: Fields, tile: int) -> tuple[tuple[int, int], ...]:
    """image_grid_pinpoints: heights and widths, in whole tiles."""
    found = fields.config.get("image_grid_pinpoints")
    if found is None:
        found = [[rows * tile, columns * tile] for rows in range(1, 7) for columns in range(1, 7)]
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_SIZES:
        raise StartupError(f"image_grid_pinpoints is {shown(found)}", f"It must list 1 to {MAX_SIZES} sizes")
    for size in found:
        whole = (
            isinstance(size, list) and len(size) == 2 and all(type(x) is int and x > 0 and not x % tile for x in size)
        )
        if not whole or size[0] * size[1] > MAX_TILES * tile**2:
            limit = f"Each must be a height and a width in whole tiles of {tile} pixels, {MAX_TILES} tiles at most"
            raise StartupError(f"image_grid_pinpoints has {shown(size)}", limit)
    return tuple((size[0], size[1]) for size in found)
