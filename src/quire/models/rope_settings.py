"""The rotary embedding in a config.json, and the sequence length that it reaches. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.errors import StartupError, short_repr
from quire.layers.rope_config import ROPE_KINDS, RopeConfig
from quire.models.config_reader import ConfigReader


def read_rope(
    fields: ConfigReader, partial: float | None = None, theta: float = 10000.0,
    longrope_names: tuple[str, ...] = ("longrope",),
) -> tuple[RopeConfig, int]:  # fmt: skip
    """Return the rotary embedding of all layers, and the length that it reaches. `theta` is the default. `partial`: see
    `read_rope_section`. `longrope_names`: the values of rope_type that mean LongRoPE.

    Newer configs have everything in `rope_parameters`; older ones have `rope_theta` and perhaps `rope_scaling`. If both
    are given `rope_scaling` is used, as in transformers.
    """
    where = "rope_scaling" if fields.config.get("rope_scaling") else "rope_parameters"
    section = fields.config.get(where) or {}
    if not isinstance(section, dict) or any(isinstance(value, dict) for value in section.values()):
        raise StartupError(
            f"{where} must be one flat object, got {short_repr(section)}", "One rope a model is supported"
        )
    if section.get("rope_type", section.get("type")) in longrope_names:
        section = {**section, "rope_type": "longrope"}
    rope = ConfigReader(section, f"{where} of config.json")
    max_position = fields.get_int("max_position_embeddings")
    return read_rope_section(fields, rope, max_position, fields.get_float("rope_theta", theta), partial)


def read_rope_section(
    fields: ConfigReader, rope: ConfigReader, max_position: int, theta: float, partial: float | None = None
) -> tuple[RopeConfig, int]:
    """Read the rotary embedding that `rope`, a section of `fields`, describes, and the length that it reaches. `theta`
    is the default. `partial`: it may rotate a part of each head, by default this one (None: whole heads only, unless it
    is proportional)."""
    share, kind = 1.0, rope.get_str("rope_type", rope.get_str("type", "default"))
    if kind == "proportional" and partial is None:
        partial = 1.0
    if partial is not None:
        share = float(rope.get_float("partial_rotary_factor", fields.get_float("partial_rotary_factor", partial)))
        if not 0 < share <= 1:
            raise StartupError(f"partial_rotary_factor is {share:g}", "It must be above 0, and at most 1")
    else:
        for options in (fields, rope):
            options.require_value("partial_rotary_factor", 1.0)
    if kind not in ROPE_KINDS:
        raise StartupError(f"the rope_type {short_repr(kind)} is not supported", f"Supported: {', '.join(ROPE_KINDS)}")
    theta = rope.get_float("rope_theta", theta)
    plain = RopeConfig(kind=kind, theta=theta, original_max_len=max_position, partial_rotary_factor=share)
    if kind == "default":
        return plain, max_position
    if kind == "proportional":
        factor = rope.get_float("factor", 1.0)
        return replace(plain, partial_rotary_factor=1.0, rotated_share=share, factor=factor), max_position
    if kind in ("linear", "dynamic"):  # max_position_embeddings is the length before scaling
        factor = rope.get_float("factor")
        return replace(plain, factor=factor), int(max_position * factor)
    original = fields.get_int(
        "original_max_position_embeddings", rope.get_int("original_max_position_embeddings", max_position)
    )
    plain = replace(plain, original_max_len=original)
    if kind == "llama3":
        low, high = rope.get_float("low_freq_factor"), rope.get_float("high_freq_factor")
        if low >= high:
            raise StartupError(
                f"low_freq_factor of {rope.source} is {low}, and high_freq_factor {high}", "It must be below that"
            )
        factor = rope.get_float("factor")
        return replace(plain, factor=factor, low_freq_factor=low, high_freq_factor=high), max_position
    if kind == "longrope":  # LongRoPE (Ding et al., 2024) as Phi-3 has it
        short, long = (rope.get_floats(f"{name}_factor") for name in ("short", "long"))
        if len(short) != len(long):
            cause = f"short_factor of {rope.source} has {len(short)} numbers, long_factor {len(long)}"
            raise StartupError(cause, "They must have equally many")
        factor = rope.get_float("factor", max_position / original)
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        attention = rope.get_float("attention_factor", usual)
        return replace(plain, attention_factor=attention, short_factors=short, long_factors=long), max_position
    factor = rope.get_float("factor", max_position / original)
    yarn = replace(
        plain,
        factor=factor,
        attention_factor=rope.get_float("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.get_float("beta_fast", 32.0),
        beta_slow=rope.get_float("beta_slow", 1.0),
        truncate=rope.get_bool("truncate", True),
    )
    return yarn, max(max_position, int(original * factor))


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    """YaRN section 3.4 (there 1/sqrt(t)); DeepSeek's configs give two scales, whose ratio is used."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, over = rope.config.get("mscale"), rope.config.get("mscale_all_dim")
    if mscale and over:
        return scale(rope.get_float("mscale")) / scale(rope.get_float("mscale_all_dim"))
    return scale(1.0)
