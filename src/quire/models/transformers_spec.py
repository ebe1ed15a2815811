"""Models that transformers computes: their classes and configurations, and their ModelSpec, which a run without numbers
finds out. Imports torch and transformers.

Only classes of the installed transformers are used, never code of a checkpoint: `auto_map` is not read.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.errors import StartupError, short_repr
from quire.models.config_reader import MAX_SIZE, ConfigReader
from quire.models.decoder_config import MAX_LAYERS
from quire.models.transformers_plan import TP_REMEDY, divide
from quire.protocol.model_spec import LayerSpec, ModelSpec
from quire.protocol.parallel_layout import Shard

PAGED, INSPECTED = "quire", "quire_inspection"
"""The attention implementations that are registered with transformers: attention over the pages, and that of a run
which only looks at the arguments."""
REMEDY = "Use a model of another architecture, or another engine"
IGNORED_KEYS = ("auto_map", "distributed_config", "fusion_config", "transformers_weights", "quantization_config")
"""Keys of config.json that say how transformers loads a model: quire says it."""
HARMLESS_OPTIONS = {"dropout", "is_causal", "position_ids", "use_cache"}
"""Arguments of an attention function without an effect on inference without padding."""
INSPECTED_TOKENS = 256


class Mask(NamedTuple):
    """The mask of an inspected layer: `function(batch, head, query, key)` says what it attends to."""

    function: Callable[..., Tensor]
    local_size: int | None


class Inspection:
    """Stands for a step in a run that only looks at the arguments of each layer's attention."""

    def __init__(self, name: str) -> None:
        self.name, self.layers, self.masks = name, list[LayerSpec](), list[object]()

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: object, options: dict[str, Any]) -> Tensor:
        """Note the arguments; return a tensor of the output's shape [1, T, heads, value_dim]."""
        scale, softcap, window = (options.pop(name, None) for name in ("scaling", "softcap", "sliding_window"))
        given = {name for name, argument in options.items() if argument is not None and argument is not False}
        unknown = given - HARMLESS_OPTIONS
        if unknown:
            raise StartupError(
                f"the attention of transformers' {self.name} has {', '.join(sorted(unknown))}, which quire's has not",
                REMEDY,
            )
        if query.shape[1] % key.shape[1] or key.shape[1] != value.shape[1]:
            heads = ", ".join(str(part.shape[1]) for part in (query, key, value))
            raise StartupError(f"a layer of transformers' {self.name} has {heads} heads of queries, keys and values",
                               "The first must be a multiple of the other two, which must be equal")  # fmt: skip
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        head_dim = max(query.shape[-1], value.shape[-1])
        self.layers.append(LayerSpec(key.shape[1], head_dim, window, query.shape[1], scale, softcap))
        self.masks.append(mask)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])

    def layer_specs(self) -> tuple[LayerSpec, ...]:
        """Return the layers, with the windows of their masks. Raise StartupError if a layer has another window."""
        windows = [_read_window(self.name, mask) for mask in self.masks]
        for layer, window in zip(self.layers, windows):
            if layer.window not in (None, window):
                raise StartupError(
                    f"a layer of transformers' {self.name} has a window of {layer.window} tokens, and its mask "
                    f"one of {window}",
                    REMEDY,
                )
        return tuple(replace(layer, window=window) for layer, window in zip(self.layers, windows))


class _WithoutNumbers(TorchDispatchMode):
    """Lets a model run on the meta device where it asks for numbers: there, nothing is selected. `widest`: the most
    numbers of a token in any tensor that was computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.widest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default:
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        if func is torch.ops.aten._local_scalar_dense.default:
            return 0
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not any(result.alias_info for result in func._schema.returns):
            self.widest = max(self.widest, out.numel() // INSPECTED_TOKENS)
        return out


CURRENT_STEP: ContextVar[Any] = ContextVar("CURRENT_STEP")
"""The step, or Inspection, of the model that runs in this thread. Not all classes hand arguments on to attention."""


@contextmanager
def running(step: Any) -> Iterator[None]:
    """A context in which the attention of a model is that of `step`."""
    token = CURRENT_STEP.set(step)
    try:
        yield
    finally:
        CURRENT_STEP.reset(token)


def attend(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: object = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend by the current step: an attention function of transformers. query [1, heads, T, head_dim], key and value
    [1, kv_heads, T, ...], rotated; returns [1, T, heads, value_dim]."""
    return CURRENT_STEP.get().attend(query, key, value, attention_mask, options), None


def _make_mask(*args: Any, mask_function: Callable[..., Tensor], local_size: int | None = None, **options: Any) -> Mask:
    return Mask(mask_function, local_size)


AttentionInterface.register(PAGED, attend)  # without a mask function, transformers makes no masks
AttentionInterface.register(INSPECTED, attend)
AttentionMaskInterface.register(INSPECTED, _make_mask)


def _read_window(name: str, mask: object) -> int | None:
    """Return the window of a layer's mask. Raise StartupError if that is neither causal nor a causal window."""
    if isinstance(mask, Mask):
        size = mask.local_size
        edges = (0, 1, 2, 1000) if size is None else (0, 1, 2, size - 1, size, size + 1, 2 * size + 1, 3 * size)
        zero, positions = torch.zeros((), dtype=torch.int64), torch.tensor(edges)
        query, key = positions[:, None], positions[None]
        expected = (key <= query) if size is None else (key <= query) & (key > query - size)
        if torch.equal(mask.function(zero, zero, query, key).expand_as(expected), expected):
            return size
    raise StartupError(f"the mask of a layer of transformers' {name} is neither causal nor a causal window", REMEDY)


def resolve_class(config: dict[str, Any]) -> type[Any]:
    """Return the class of transformers that config.json names. Raise StartupError if there is none that quire can
    run."""
    name, kind = config["architectures"][0], config.get("model_type")
    known = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    release = f"transformers {transformers.__version__}"
    if name not in known:
        near = get_close_matches(name, known, n=1)
        raise StartupError(
            f"the architecture {short_repr(name)} is none of quire's own, nor a causal language model of {release}",
            (f"Is it {near[0]}? " if near else "") + "docs/models.md lists both; code of a checkpoint is never run",
        )
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind if isinstance(kind, str) else "") != name:
        raise StartupError(f"the model_type {short_repr(kind)} of config.json is none of {name} in {release}", REMEDY)
    model_class: type[Any] = getattr(transformers, name)
    if name.endswith("ForConditionalGeneration"):
        raise StartupError(f"{name} takes more than text, which only quire's own models do", REMEDY)
    if not getattr(model_class, "_supports_attention_backend", False):
        raise StartupError(f"{name} of {release} has an attention that can't be replaced by quire's", REMEDY)
    return model_class


def make_config(config: dict[str, Any], attention: str) -> Any:
    """Return transformers' configuration object of a config.json. Raise StartupError if it is invalid."""
    kind = CONFIG_MAPPING[config["model_type"]]
    for size in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"):
        most = MAX_LAYERS if size == "num_hidden_layers" else MAX_SIZE
        for name in (size, kind.attribute_map.get(size, "")):
            if size == "num_hidden_layers" or type(config.get(name)) is int:  # other sizes may be those of each layer
                ConfigReader(config).get_int(name, None, most)
    settings = {name: value for name, value in config.items() if name not in IGNORED_KEYS and not name.startswith("_")}
    try:
        made = kind.from_dict(settings)
    except Exception as error:  # of any kind: config.json is untrusted
        raise StartupError(f"transformers can't read config.json: {_reason(error)}", "Mend the file") from error
    made._attn_implementation = attention
    return made


def read_spec(config: dict[str, Any], ranks: int = 1) -> ModelSpec:
    """Return the ModelSpec of a config.json whose model transformers computes; if `ranks` divide it, that of a rank's
    part, which is the same for all. Raise StartupError if it can't be computed or divided."""
    text = json.dumps(config, sort_keys=True)
    whole = _inspect(text)
    if ranks == 1:
        return whole
    part = _inspect(text, ranks)
    if part.vocab_size != whole.vocab_size:
        raise StartupError(f"--tp is {ranks}, and by transformers' plan for {whole.family} a rank has "
                           f"{part.vocab_size} of {whole.vocab_size} logits", TP_REMEDY)  # fmt: skip
    for layer, local in zip(whole.layers, part.layers, strict=True):
        heads, local_heads = layer.heads or 0, local.heads or 0
        if (heads, layer.kv_heads) not in (
            (local_heads, local.kv_heads), (local_heads * ranks, local.kv_heads * ranks)
        ):  # fmt: skip
            _check_heads(whole, ranks)
            raise StartupError(
                f"--tp is {ranks}, and by transformers' plan for {whole.family} a rank has {local_heads} of {heads} "
                f"heads and {local.kv_heads} of {layer.kv_heads} heads of keys",
                TP_REMEDY,
            )
    return part


def _check_heads(spec: ModelSpec, ranks: int) -> None:
    """Raise StartupError, which names the possible numbers of ranks, if ranks can't have whole heads."""
    for layer in spec.layers:
        heads = layer.heads or 0
        if heads % ranks or layer.kv_heads % ranks:
            raise StartupError(
                f"--tp is {ranks}, which doesn't divide {spec.family}: it has {heads} heads and {layer.kv_heads} heads "
                "of keys, and transformers computes whole ones",
                f"Use {math.gcd(heads, layer.kv_heads)} or a number that divides it, or --replicas",
            )


@lru_cache(maxsize=4)
def _inspect(text: str, ranks: int = 1) -> ModelSpec:
    config = json.loads(text)
    model_class = resolve_class(config)
    name, settings = model_class.__name__, make_config(config, INSPECTED)
    inspection, run = Inspection(name), _WithoutNumbers()
    tokens = torch.zeros((1, INSPECTED_TOKENS), dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"), torch.inference_mode():
            model = model_class._from_config(settings, dtype=torch.bfloat16).eval()
            if ranks > 1:
                divide(model, Shard(0, ranks))
            parameters = sum(weight.numel() for weight in model.parameters())
            base = split_head(model)
            _check_parts(name, base)
            with run, running(inspection):
                hidden = base(
                    input_ids=tokens, position_ids=tokens, attention_mask=tokens.bool(), use_cache=False
                ).last_hidden_state
            vocab_size = model(inputs_embeds=hidden[:, :1], use_cache=False).logits.shape[-1]
    except StartupError:
        raise
    except Exception as error:  # of any kind: config.json is untrusted
        if ranks > 1 and not inspection.layers:  # it failed before any attention
            _check_heads(_inspect(text), ranks)
        given, remedy = (f"--tp is {ranks}, and so ", TP_REMEDY) if ranks > 1 else ("", REMEDY)
        raise StartupError(f"{given}transformers' {name} doesn't run with quire's attention: {_reason(error)}",
                           remedy) from error  # fmt: skip
    sizes, layers = settings.get_text_config(), inspection.layer_specs()
    if len(layers) < sizes.num_hidden_layers:
        raise StartupError(f"transformers' {name} has layers that don't attend", REMEDY)
    return ModelSpec(
        family=name,
        layers=layers,
        vocab_size=vocab_size,
        max_len=_read_max_len(name, sizes),
        hidden=hidden.shape[-1],
        heads=max(layer.heads or 0 for layer in layers),
        intermediate=run.widest,
        parameters=parameters,
        eos_ids=ConfigReader(config).get_token_ids("eos_token_id"),
        num_rope_tables=0,
    )


def split_head(model: Any) -> Any:
    """Return the part of a causal language model that makes hidden states. What is left of the model makes logits of
    `inputs_embeds`, the hidden states, by its own code: scales and soft caps included."""
    name, base = model.base_model_prefix, model.base_model
    if base is model:
        raise StartupError(f"transformers' {type(model).__name__} has no part that makes hidden states", REMEDY)
    setattr(model, name, _HiddenStates())
    return base


class _HiddenStates(torch.nn.Module):
    """Returns its input in place of a model's hidden states."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **options: Any) -> _Output:
        return _Output(last_hidden_state=inputs_embeds)


class _Output(MoeModelOutputWithPast):
    """The output of a model; fields that only some models have are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _check_parts(name: str, base: torch.nn.Module) -> None:
    """Raise StartupError for a model in which tokens see others without attention, or have no positions."""
    convolution = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in base.modules())
    if convolution or getattr(base, "_is_stateful", False):
        raise StartupError(f"transformers' {name} has convolutions, or other layers with states", REMEDY)
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        raise StartupError(f"transformers' {name} takes no positions", REMEDY)


def _read_max_len(name: str, sizes: Any) -> int:
    """Return the most tokens of a sequence. With LongRoPE that is the trained length: beyond it transformers takes
    other factors for all tokens of a step."""
    ropes = getattr(sizes, "rope_parameters", None) or {}
    ropes = [ropes, *(rope for rope in ropes.values() if isinstance(rope, dict))]
    limits = [getattr(sizes, "max_position_embeddings", None)]
    limits += [rope.get("original_max_position_embeddings") for rope in ropes if rope.get("rope_type") == "longrope"]
    lengths = [limit for limit in limits if type(limit) is int and limit > 0]
    if len(lengths) < len(limits):
        raise StartupError(f"config.json gives {name} no length", "It needs max_position_embeddings")
    return min(lengths)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
