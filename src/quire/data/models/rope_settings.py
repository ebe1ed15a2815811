"""What a config.json says of a rotary embedding, and of the length that it reaches. No torch."""

from __future__ import annotations

import math
from dataclasses import replace

from quire.data.layers.rope import KINDS, Rope
from quire.data.models.fields import Fields
from quire.errors import StartupError, shown


def read_rope(fields: Fields, max_position: int, partial: bool = False) -> tuple[Rope, int]:
    """Read the rotary embedding of all layers, and the length that it reaches; `partial`: see `read_rope_section`.

    Newer configs hold everything in `rope_parameters`; older ones hold `rope_theta` and perhaps `rope_scaling`. Where
    both are given `rope_scaling` counts, as in transformers.
    """
    where = "rope_scaling" if fields.config.get("rope_scaling") else "rope_parameters"
    section = fields.config.get(where) or {}
    if not isinstance(section, dict) or any(isinstance(value, dict) for value in section.values()):
        raise StartupError(f"{where} must be one flat object, got {shown(section)}", "One rope a model is supported")
    rope = Fields(section, f"{where} of config.json")
    return read_rope_section(fields, rope, max_position, fields.number("rope_theta", 10000.0), partial)


def read_rope_section(
    fields: Fields, rope: Fields, max_position: int, theta: float, partial: bool = False
) -> tuple[Rope, int]:
    """Read the rotary embedding that `rope`, a section of `fields`, describes, and the length that it reaches. `theta`
    is the default. `partial`: it may rotate a part of each head."""
    share = 1.0
    if partial:
        share = float(rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0)))
        if not 0 < share <= 1:
            raise StartupError(f"partial_rotary_factor is {share:g}", "It must be above 0, and 1 at most")
    else:
        for options in (fields, rope):
            options.refuse("partial_rotary_factor", 1.0)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in (*KINDS, "su"):
        raise StartupError(f"the rope_type {shown(kind)} is not supported", f"Supported: {', '.join(KINDS)}")
    if kind == "su" or (kind == "yarn" and "short_factor" in rope.config):  # as Phi-3's first configs call it
        kind = "longrope"
    theta = rope.number("rope_theta", theta)
    plain = Rope(kind=kind, theta=theta, original_len=max_position, share=share)
    if kind == "default":
        return plain, max_position
    if kind in ("linear", "dynamic"):  # max_position_embeddings is the length before scaling
        factor = rope.number("factor")
        return replace(plain, factor=factor), int(max_position * factor)
    original = fields.size(
        "original_max_position_embeddings", rope.size("original_max_position_embeddings", max_position)
    )
    plain = replace(plain, original_len=original)
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low == high:
            raise StartupError(f"low_freq_factor and high_freq_factor of {rope.where} must differ, both are {low}")
        factor = rope.number("factor")
        return replace(plain, factor=factor, low_freq_factor=low, high_freq_factor=high), max_position
    if kind == "longrope":  # LongRoPE (Ding et al., 2024) as Phi-3 has it
        short, long = (rope.numbers(f"{name}_factor") for name in ("short", "long"))
        if len(short) != len(long):
            raise StartupError(f"short_factor of {rope.where} has {len(short)} numbers, long_factor {len(long)}")
        factor = rope.number("factor", max_position / original)
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
        attention = rope.number("attention_factor", usual)
        return replace(plain, attention_factor=attention, short=short, long=long), max_position
    factor = rope.number("factor", max_position / original)
    yarn = replace(
        plain,
        factor=factor,
        attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=rope.flag("truncate", True),
    )
    return yarn, max(max_position, int(original * factor))


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """YaRN section 3.4 (there 1/sqrt(t)); DeepSeek's configs give two scales and mean their ratio."""

    def scale(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, over = rope.config.get("mscale"), rope.config.get("mscale_all_dim")
    if mscale and over:
        return scale(rope.number("mscale")) / scale(rope.number("mscale_all_dim"))
    return scale(1.0)
