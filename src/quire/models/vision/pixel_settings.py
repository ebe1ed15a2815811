"""How bytes of pixels become the numbers that a tower reads: what preprocessor_config.json says of it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader

RGB = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Normalization:
    """A byte x of a colour becomes (x * scale - mean) / std."""

    mean: RGB
    std: RGB
    scale: float = 1 / 255


CLIP_NORMAL = Normalization((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET_NORMAL = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF_NORMAL = Normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def read_normalization(preprocessor: ConfigReader, default: Normalization) -> Normalization:
    """StartupError for steps that are left out, and for numbers that can't be meant."""
    for name in ("do_rescale", "do_normalize"):
        preprocessor.require_value(name, True)
    mean, std = _read_rgb(preprocessor, "image_mean", default.mean), _read_rgb(preprocessor, "image_std", default.std)
    if min(std) <= 0:
        raise StartupError(f"image_std of {preprocessor.source} is {short_repr(list(std))}", "Each must be above 0")
    return Normalization(mean, std, preprocessor.get_float("rescale_factor", default.scale))


def _read_rgb(preprocessor: ConfigReader, name: str, default: RGB) -> RGB:
    found = preprocessor.config.get(name)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != 3 or not all(type(x) in (int, float) and -9 < x < 9 for x in found):
        raise StartupError(f"{name} of {preprocessor.source} is {short_repr(found)}", "It must be three numbers")
    return float(found[0]), float(found[1]), float(found[2])
