"""What a config.json's `quantization_config` says: which layers are in FP8 or in few bits, and by how many scales. No
torch.

Supported are checkpoints in FP8 (e4m3) as they are published: `fp8` (blocks of 128 x 128, or a scale a tensor),
`compressed-tensors` in the format `float-quantized`, and `fbgemm_fp8`; and in few bits `awq` and `gptq`. Scales of
activations are not read: rows are scaled by their own largest values (see quire.data.kernels.triton.scaled).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from quire.data.models.fields import Fields
from quire.errors import StartupError, shown

METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "awq", "gptq")
BLOCK = 128
"""Rows and columns of a block that has one scale, where there are blocks."""
WHERE = "quantization_config of config.json"
BLOCKS = "quire_blocks"
"""Of a config that a GGUF file's metadata make: whether its weights are in blocks of few bits."""
HEAD = "lm_head"  # is never quantised by two of the three methods, whether they name it or not
REMEDY = "Use the unquantised checkpoint, with --quantization fp8"
MAX_KEPT = 4096  # modules that are named as not quantised
MAX_PATTERNS = 64  # of these that are regular expressions: each is matched with each module
MAX_PATTERN = 200  # characters of one such name
MAX_REPEATS = 4  # in one pattern: matching it takes at most so high a power of a name's length


class FP8(NamedTuple):
    """Linear layers in FP8. `stored`: the checkpoint has their numbers and scales; else they are made while loading,
    with a scale a row. `blocks`: a scale for every block of BLOCK x BLOCK, not for all of a row or all rows. `kept`
    names modules that aren't in FP8, as the checkpoint calls them, or by regular expressions behind "re:"."""

    stored: bool
    blocks: bool = False
    kept: tuple[str, ...] = ()

    def covers(self, module: str, prefixes: tuple[str, ...] = ()) -> bool:
        """Whether the checkpoint's `module`, named without one of `prefixes`, is quantised."""
        names = (module, *(prefix + module for prefix in prefixes))
        return not any(_matches(entry, name) for entry in self.kept for name in names)

    def groups(self, depth: int) -> int:
        """Scales of a row of `depth` numbers."""
        return -(-depth // BLOCK) if self.blocks else 1


MADE = FP8(stored=False)
GROUPS = (32, 64, 128)


class Few(NamedTuple):
    """Linear layers in few bits, by groups of columns. `stored`: as a checkpoint has them ("awq", "gptq"), or a GGUF
    file ("gguf"); else they are made while loading, in groups of 32. Of GPTQ, `ordered` says that a group's columns
    may lie anywhere, and `one_off` that zeros are stored less 1."""

    bits: int
    stored: str = ""
    group: int = 32
    kept: tuple[str, ...] = ()
    ordered: bool = False
    one_off: bool = True

    def covers(self, module: str, prefixes: tuple[str, ...] = ()) -> bool:
        """Whether the checkpoint's `module`, named without one of `prefixes`, is quantised."""
        names = (module, *(prefix + module for prefix in prefixes))
        return not any(_matches(entry, name) for entry in self.kept for name in names)


BITS = {"int8": Few(8), "int4": Few(4)}


def scheme_of(config: dict[str, Any], asked: str | None) -> FP8 | Few | None:
    """How the weights of a model are quantised: as its config.json says; else, where it is `asked` for
    (--quantization), made while loading. StartupError for a quantization_config that isn't supported."""
    stored = read_stored(config)
    if stored is not None and asked in BITS:
        raise StartupError(
            f"--quantization is {asked}, and the model's weights are quantised already", "Leave --quantization out"
        )
    if config.get(BLOCKS) and asked is None:
        return Few(0, "gguf")
    return stored or BITS.get(asked or "") or (MADE if asked == "fp8" else None)


def fp8_of(config: dict[str, Any], asked: str | None) -> FP8 | None:
    """The same, of FP8 alone."""
    found = scheme_of(config, asked)
    return found if isinstance(found, FP8) else None


def read_stored(config: dict[str, Any]) -> FP8 | Few | None:
    """What `config` says; None where it says nothing."""
    said = config.get("quantization_config") or config.get("compression_config")
    if not said:
        return None
    if not isinstance(said, dict):
        raise StartupError(f"quantization_config in config.json must be an object, got {shown(said)}")
    fields = Fields(said, WHERE)
    method = said.get("quant_method")
    if method == "fp8":
        return _fine(fields)
    if method == "compressed-tensors":
        return _compressed(fields)
    if method == "fbgemm_fp8":
        return FP8(True, kept=(*_names(fields, "modules_to_not_convert"), HEAD))
    if method in ("awq", "gptq"):
        return _grouped(fields, str(method))
    raise StartupError(
        f"{WHERE} has the quant_method {shown(method)}, which is not supported",
        f"Supported: {', '.join(METHODS)}. {REMEDY}",
    )


def _fine(fields: Fields) -> FP8:
    """`fp8`: blocks, as DeepSeek and Qwen publish them, or without weight_block_size a scale a tensor."""
    fields.refuse("fmt", "e4m3")
    _one_of(fields, "activation_scheme", "dynamic", "static")
    kept = _names(fields, "modules_to_not_convert") + _names(fields, "ignored_layers")
    return FP8(True, _blocks(fields, "weight_block_size"), (*kept, HEAD))


def _compressed(fields: Fields) -> FP8:
    """`compressed-tensors`: one group, of all Linear modules but those of `ignore`."""
    _one_of(fields, "format", "float-quantized")
    if fields.section("sparsity_config").get("format", "dense") != "dense" or fields.config.get("transform_config"):
        raise StartupError(f"{WHERE} has a sparsity_config or a transform_config, which are not supported", REMEDY)
    groups = list(fields.section("config_groups").values())
    if len(groups) != 1 or not isinstance(groups[0], dict):
        raise StartupError(f"config_groups in {WHERE} must have one object, and has {len(groups)} entries", REMEDY)
    group = Fields(groups[0], f"config_groups of {WHERE}")
    group.refuse("targets", ["Linear"])
    group.refuse("format", "float-quantized")
    weights = Fields(group.section("weights"), f"the weights of {group.where}")
    _one_of(weights, "type", "float")
    if weights.size("num_bits") != 8 or not weights.flag("symmetric", True):
        raise StartupError(f"{weights.where} are not symmetric numbers of 8 bits, which are supported alone", REMEDY)
    weights.refuse("dynamic", False)
    weights.refuse("group_size", None)
    strategy = _one_of(weights, "strategy", "tensor", "channel", "block")
    blocks = _blocks(weights, "block_structure")
    if blocks != (strategy == "block"):
        raise StartupError(f"{weights.where} have the strategy {strategy!r} and a block_structure that doesn't fit it")
    return FP8(True, blocks, _names(fields, "ignore"))


def _grouped(fields: Fields, method: str) -> Few:
    """`awq` in the layout "gemm", and `gptq`."""
    bits, group = fields.size("bits"), fields.config.get("group_size", 128)
    allowed = (4,) if method == "awq" else (4, 8)
    if bits not in allowed:
        raise StartupError(f"bits in {WHERE} is {bits}, which is not supported", f"{allowed}: these are. {REMEDY}")
    if type(group) is not int or group not in GROUPS:
        raise StartupError(
            f"group_size in {WHERE} is {shown(group)}, which is not supported",
            f"{', '.join(map(str, GROUPS))}: these are",
        )
    kept = (*_names(fields, "modules_to_not_convert"), HEAD)
    if method == "awq":
        version = fields.text("version", "gemm").lower()
        if version != "gemm" or not fields.flag("zero_point", True):
            raise StartupError(f"{WHERE} has the version {shown(version)}", "awq is read in gemm's, with zero_point")
        return Few(bits, "awq", group, kept)
    fields.refuse("lm_head", False)
    if fields.config.get("dynamic"):
        raise StartupError(f"{WHERE} has layers of their own kinds (dynamic), which are not supported", REMEDY)
    form = _one_of(fields, "checkpoint_format", "gptq", "gptq_v2")
    return Few(bits, "gptq", group, kept, fields.flag("desc_act", False), form == "gptq")


def _blocks(fields: Fields, name: str) -> bool:
    size = fields.config.get(name)
    if size is not None and size != [BLOCK, BLOCK]:
        raise StartupError(
            f"{name} in {fields.where} is {shown(size)}, which is not supported", f"[{BLOCK}, {BLOCK}] is. {REMEDY}"
        )
    return size is not None


def _one_of(fields: Fields, name: str, *values: str) -> str:
    """One of `values`, the first one where it is absent."""
    value = fields.text(name, values[0])
    if value not in values:
        raise StartupError(
            f"{name} in {fields.where} is {shown(value)}, which is not supported", f"{', '.join(values)}: these are"
        )
    return value


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    """Names of modules, or patterns that are safe to match: they come with a checkpoint, from anyone."""
    value = fields.config.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(entry, str) and entry for entry in value):
        raise StartupError(f"{name} in {fields.where} must be a list of names, got {shown(value)}")
    if len(value) > MAX_KEPT:
        raise StartupError(f"{name} in {fields.where} has {len(value)} names", f"At most {MAX_KEPT:,} are read")
    if (count := sum(entry.startswith("re:") for entry in value)) > MAX_PATTERNS:
        raise StartupError(f"{name} in {fields.where} has {count} patterns", f"At most {MAX_PATTERNS} are read")
    for entry in value:
        if entry.startswith("re:") and not _safe(entry[3:]):
            raise StartupError(
                f"{name} in {fields.where} has the pattern {shown(entry)}, which is not supported",
                f"Patterns have at most {MAX_PATTERN} characters and {MAX_REPEATS} repetitions, none of a group",
            )
    return tuple(value)


def _safe(pattern: str) -> bool:
    """It is a regular expression, and matching it takes no exponential time."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    if len(pattern) > MAX_PATTERN or repeats > MAX_REPEATS or re.search(r"\)[*+?{]|\\[1-9]|\(\?[^:]", pattern):
        return False
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError):
        return False
    return True


def _matches(entry: str, name: str) -> bool:
    """An entry is a module's name, the end or the beginning of one, or a pattern for its beginning."""
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    entry = entry.removesuffix(".*")
    return entry == name or name.startswith(entry + ".") or name.endswith("." + entry)
