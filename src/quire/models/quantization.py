"""The `quantization_config` of a config.json: the layers in FP8 or in few bits, and their scales. No torch.

Supported are published formats of FP8 (e4m3), `fp8` (blocks of 128 x 128, or one scale per tensor),
`compressed-tensors` in the format `float-quantized`, and `fbgemm_fp8`; and of few bits, `awq` and `gptq`. Scales of
activations are not read: rows are scaled by their own largest values (see quire.kernels.triton.fp8_linear).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from quire.errors import StartupError, short_repr
from quire.models.config_reader import ConfigReader

METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "awq", "gptq")
BLOCK = 128
"""Rows and columns of a block with one scale."""
SOURCE = "quantization_config of config.json"
GGUF_BLOCKS_KEY = "quire_blocks"
"""The key, in a config made from a GGUF file's metadata, that is true if its weights are in low-bit blocks."""
LM_HEAD = "lm_head"  # two of the three methods never quantise it, even if it is not among the exceptions
REMEDY = "Use the unquantised checkpoint, with --quantization fp8"
MXFP4 = "mxfp4"
MXFP4_ARCHITECTURE = "GptOssForCausalLM"  # the only one whose experts are read in MXFP4
MAX_IGNORED_MODULES = 4096
MAX_PATTERNS = 64  # regular expressions among the ignored modules: each is matched with each module
MAX_PATTERN_LENGTH = 200  # characters
MAX_REPEATS = 4  # repetitions in one pattern: the exponent of a name's length in the time of a match


class FP8Scheme(NamedTuple):
    """Linear layers in FP8. `stored`: the checkpoint has FP8 numbers and scales; else they are made while loading, with
    one scale per row. `blocks`: one scale per block of BLOCK x BLOCK, instead of one per row or tensor.
    `ignored_modules`: modules that aren't in FP8, by the checkpoint's names or by regular expressions with the prefix
    "re:"."""

    stored: bool
    blocks: bool = False
    ignored_modules: tuple[str, ...] = ()

    def scales_per_row(self, depth: int) -> int:
        """Return the number of scales of a row of `depth` numbers."""
        return -(-depth // BLOCK) if self.blocks else 1


FP8_ON_LOAD = FP8Scheme(stored=False)
GROUP_SIZES = (32, 64, 128)


class LowBitScheme(NamedTuple):
    """Linear layers in few bits, with scales for groups of columns. `stored`: the format of a checkpoint ("awq",
    "gptq", or "mxfp4" of experts alone) or a GGUF file ("gguf"); if empty, weights are quantised while loading, in
    groups of 32. For GPTQ, `desc_act`: a group's columns may be anywhere; `zeros_minus_one`: zeros are stored minus
    1."""

    bits: int
    stored: str = ""
    group_size: int = 32
    ignored_modules: tuple[str, ...] = ()
    desc_act: bool = False
    zeros_minus_one: bool = True


SCHEMES_ON_LOAD = {"int8": LowBitScheme(8), "int4": LowBitScheme(4)}


def resolve_scheme(config: dict[str, Any], requested: str | None) -> FP8Scheme | LowBitScheme | None:
    """Return the quantization of a model's weights: that of its config.json, else the `requested` one (--quantization),
    applied while loading. Raise StartupError for an unsupported quantization_config."""
    stored = read_checkpoint_scheme(config)
    if stored is not None and requested and not (requested == "fp8" and isinstance(stored, FP8Scheme)):
        raise StartupError(
            f"--quantization is {requested}, and the model's weights are quantised already", "Leave --quantization out"
        )
    if config.get(GGUF_BLOCKS_KEY) and requested is None:
        return LowBitScheme(0, "gguf")
    return stored or SCHEMES_ON_LOAD.get(requested or "") or (FP8_ON_LOAD if requested == "fp8" else None)


def covers(scheme: FP8Scheme | LowBitScheme, module: str, prefixes: tuple[str, ...]) -> bool:
    """Return True if the checkpoint's `module`, given without one of `prefixes`, is quantised."""
    names = (module, *(prefix + module for prefix in prefixes))
    return not any(_matches(entry, name) for entry in scheme.ignored_modules for name in names)


def read_checkpoint_scheme(config: dict[str, Any]) -> FP8Scheme | LowBitScheme | None:
    """Return the scheme of `config`; None if it has none. Raise StartupError for an unsupported one."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    if not isinstance(section, dict):
        raise StartupError(f"quantization_config in config.json must be an object, got {short_repr(section)}")
    fields = ConfigReader(section, SOURCE)
    method = section.get("quant_method")
    if method == "fp8":
        return _read_fp8(fields)
    if method == "compressed-tensors":
        return _read_compressed_tensors(fields)
    if method == "fbgemm_fp8":
        return FP8Scheme(True, ignored_modules=(*_read_module_names(fields, "modules_to_not_convert"), LM_HEAD))
    methods = (*METHODS, MXFP4) if config.get("architectures") == [MXFP4_ARCHITECTURE] else METHODS
    if method == MXFP4 and method in methods:
        return LowBitScheme(4, MXFP4)
    if method in ("awq", "gptq"):
        return _read_awq_gptq(fields, str(method))
    raise StartupError(
        f"{SOURCE} has the quant_method {short_repr(method)}, which is not supported",
        f"Supported: {', '.join(methods)}. {REMEDY}",
    )


def _read_fp8(fields: ConfigReader) -> FP8Scheme:
    """`fp8`: blocks (DeepSeek, Qwen), or without weight_block_size one scale per tensor."""
    fields.require_value("fmt", "e4m3")
    _one_of(fields, "activation_scheme", "dynamic", "static")
    ignored = _read_module_names(fields, "modules_to_not_convert") + _read_module_names(fields, "ignored_layers")
    return FP8Scheme(True, _read_block_size(fields, "weight_block_size"), (*ignored, LM_HEAD))


def _read_compressed_tensors(fields: ConfigReader) -> FP8Scheme:
    """`compressed-tensors`: one group, of all Linear modules but those of `ignore`."""
    _one_of(fields, "format", "float-quantized")
    if fields.get_object("sparsity_config").get("format", "dense") != "dense" or fields.config.get("transform_config"):
        raise StartupError(f"{SOURCE} has a sparsity_config or a transform_config, which are not supported", REMEDY)
    groups = list(fields.get_object("config_groups").values())
    if len(groups) != 1 or not isinstance(groups[0], dict):
        raise StartupError(f"config_groups in {SOURCE} must have one object, and has {len(groups)} entries", REMEDY)
    group = ConfigReader(groups[0], f"config_groups of {SOURCE}")
    group.require_value("targets", ["Linear"])
    group.require_value("format", "float-quantized")
    weights = ConfigReader(group.get_object("weights"), f"the weights of {group.source}")
    _one_of(weights, "type", "float")
    if weights.get_int("num_bits") != 8 or not weights.get_bool("symmetric", True):
        raise StartupError(f"{weights.source} are not symmetric numbers of 8 bits; only these are supported", REMEDY)
    weights.require_value("dynamic", False)
    weights.require_value("group_size", None)
    strategy = _one_of(weights, "strategy", "tensor", "channel", "block")
    blocks = _read_block_size(weights, "block_structure")
    if blocks != (strategy == "block"):
        raise StartupError(
            f"{weights.source} have the strategy {strategy!r} and a block_structure that doesn't fit it",
            "Only the strategy block has one",
        )
    return FP8Scheme(True, blocks, _read_module_names(fields, "ignore"))


def _read_awq_gptq(fields: ConfigReader, method: str) -> LowBitScheme:
    """`awq` in the layout "gemm", and `gptq`."""
    bits, group = fields.get_int("bits"), fields.config.get("group_size", 128)
    allowed = (4,) if method == "awq" else (4, 8)
    if bits not in allowed:
        raise StartupError(f"bits in {SOURCE} is {bits}, which is not supported", f"{allowed}: these are. {REMEDY}")
    if type(group) is not int or group not in GROUP_SIZES:
        raise StartupError(
            f"group_size in {SOURCE} is {short_repr(group)}, which is not supported",
            f"{', '.join(map(str, GROUP_SIZES))}: these are",
        )
    ignored = (*_read_module_names(fields, "modules_to_not_convert"), LM_HEAD)
    if method == "awq":
        version = fields.get_str("version", "gemm").lower()
        if version != "gemm" or not fields.get_bool("zero_point", True):
            raise StartupError(
                f"{SOURCE} has the version {short_repr(version)}", "awq is read in gemm's, with zero_point"
            )
        return LowBitScheme(bits, "awq", group, ignored)
    fields.require_value("lm_head", False)
    if fields.config.get("dynamic"):
        raise StartupError(f"{SOURCE} has per-layer options (dynamic), which are not supported", REMEDY)
    version = _one_of(fields, "checkpoint_format", "gptq", "gptq_v2")
    return LowBitScheme(bits, "gptq", group, ignored, fields.get_bool("desc_act", False), version == "gptq")


def _read_block_size(fields: ConfigReader, name: str) -> bool:
    size = fields.config.get(name)
    if size is not None and size != [BLOCK, BLOCK]:
        raise StartupError(
            f"{name} in {fields.source} is {short_repr(size)}, which is not supported",
            f"[{BLOCK}, {BLOCK}] is. {REMEDY}",
        )
    return size is not None


def _one_of(fields: ConfigReader, name: str, *values: str) -> str:
    """Return an option that must be one of `values`; the first if it is absent."""
    value = fields.get_str(name, values[0])
    if value not in values:
        raise StartupError(
            f"{name} in {fields.source} is {short_repr(value)}, which is not supported",
            f"{', '.join(values)}: these are",
        )
    return value


def _read_module_names(fields: ConfigReader, name: str) -> tuple[str, ...]:
    """Return names and patterns of modules. Checkpoints are untrusted, so only patterns safe to match are accepted."""
    value = fields.config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise StartupError(f"{name} in {fields.source} must be a list of names, got {short_repr(value)}")
    if len(value) > MAX_IGNORED_MODULES:
        raise StartupError(
            f"{name} in {fields.source} has {len(value)} names", f"At most {MAX_IGNORED_MODULES:,} are read"
        )
    if (count := sum(entry.startswith("re:") for entry in value)) > MAX_PATTERNS:
        raise StartupError(f"{name} in {fields.source} has {count} patterns", f"At most {MAX_PATTERNS} are read")
    for entry in value:
        if entry.startswith("re:") and not _is_safe_pattern(entry[3:]):
            raise StartupError(
                f"{name} in {fields.source} has the pattern {short_repr(entry)}, which is not supported",
                f"Patterns have at most {MAX_PATTERN_LENGTH} characters and {MAX_REPEATS} repetitions, none of a group",
            )
    return tuple(value)


def _is_safe_pattern(pattern: str) -> bool:
    """Return True if `pattern` is a regular expression whose matching takes no exponential time."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > MAX_PATTERN_LENGTH or repeats > MAX_REPEATS or re.search(r"\)[*+?{]|\\[1-9]|\(\?[^:]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _matches(entry: str, name: str) -> bool:
    """Return True if `entry` matches a module: its name, the beginning or end of it, or a pattern for its beginning."""
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    entry = entry.removesuffix(".*")
    return entry == name or name.startswith(entry + ".") or name.endswith("." + entry)
