"""A model before it is loaded: where it is, its settings, and its tokenizer and chat template. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config import GENERATION, EngineConfig
from quire.data.models import read_spec
from quire.data.models.configs import CONFIGS
from quire.data.models.seeing_settings import PREPARATION
from quire.data.weights.checkpoint import (
    has_own_head,
    locate,
    read_config,
    read_generation_config,
    read_preprocessor_config,
)
from quire.data.weights.packaged import PACKAGED, packaged
from quire.errors import InputError, StartupError
from quire.files import AGAIN
from quire.files import read_config as read_optional
from quire.vocabulary.layout import Part
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.pictures import Tiling
from quire.vocabulary.specs import ModelSpec

if TYPE_CHECKING:
    from quire.data.weights.gguf import GGUF
    from quire.text.chat import ChatTemplate
    from quire.text.eyes import Eyes
    from quire.text.renderer import Renderer
    from quire.text.sight import Sight
    from quire.text.tokenizer import Tokenizer

BUNDLED = "tiny"
ALL_BUNDLED = (BUNDLED, "tiny-draft", "tiny-vision")
POOLING = "1_Pooling/config.json"
UNTIED = (
    "lm_head.weight differs from the embedding, though config.json ties them: the head is the file's, as in "
    "transformers. Set tie_word_embeddings to false there to say so"
)
STATE_ITEMSIZES = {"auto": 4, "float32": 4, "bfloat16": 2}


class Source(NamedTuple):
    """A model before it is loaded. `folder` is None for a named shape with dummy weights; of a GGUF file it is the
    file's path, and `file` what it holds. `generation` is its generation_config.json, `defaults` what requests'
    parameters are unless they say otherwise. `notes`: what is to be said at start."""

    name: str
    folder: Path | None
    config: dict[str, Any]
    generation: dict[str, Any]
    spec: ModelSpec
    defaults: dict[str, Any]
    file: GGUF | None = None
    notes: tuple[str, ...] = ()

    def divided(self, part: Part) -> Source:
        """The same with the spec of a rank's part. StartupError for a model that can't be divided so."""
        return self._replace(spec=read_spec(self.config, part))

    def stored(self, config: EngineConfig, itemsize: int) -> Source:
        """The same where numbers have `itemsize` bytes, but for what `config` says of running states, keys and
        values."""
        spec = self.spec.stored(itemsize, STATE_ITEMSIZES[config.state_dtype])
        return self._replace(spec=spec.rounded() if config.kv_cache_dtype == "int8" else spec)


def read_source(config: EngineConfig, weights: bool = True) -> Source:
    """Find the model and read its configuration; nothing is loaded. `weights` says that they will be."""
    if config.model_config is not None:
        if config.model_config not in CONFIGS:
            raise StartupError(
                f"--model-config is {config.model_config!r}", f"Known shapes: {', '.join(sorted(CONFIGS))}"
            )
        if weights and not config.dummy_weights:
            raise StartupError(f"{config.model_config} is a shape without weights", "Add --dummy-weights")
        shape = CONFIGS[config.model_config]
        return Source(config.model_config, None, shape, {}, read_spec(shape), _defaults(config, {}))
    model = config.model or BUNDLED
    bundled = Path(__file__).parent / "assets" / model
    named = model in ALL_BUNDLED and not Path(model).is_dir()
    if named and config.revision is not None:
        raise StartupError(f"--revision is given, and {model} is the bundled model", "Give a model of the hub with it")
    if (file := _gguf(model)) is not None:
        return _read_file(config, model, file)
    folder = bundled if named else locate(model, weights and not config.dummy_weights, config.revision)
    settings, generation = read_config(folder), read_generation_config(folder)
    settings[PREPARATION] = read_preprocessor_config(folder)
    local = Path(model).expanduser()
    name = local.resolve().name if local.is_dir() else model
    defaults, notes = _defaults(config, generation), () if named else _notes(model)
    spec = read_spec(settings)
    if weights and not config.dummy_weights:
        untied = _untied(settings)
        larger = read_spec(untied)
        # A larger count means that config.json ties the head.
        if larger.parameters > spec.parameters and has_own_head(folder):
            settings, spec, notes = untied, larger, (*notes, UNTIED)
    return Source(name, folder, settings, generation, spec, defaults, None, notes)


def _untied(settings: dict[str, Any]) -> dict[str, Any]:
    """The same configuration with a head that is not the embedding."""
    parts = {name: part for name in ("text_config", "llm_config") if isinstance(part := settings.get(name), dict)}
    untied = {name: {**part, "tie_word_embeddings": False} for name, part in parts.items()}
    return {**settings, **untied, "tie_word_embeddings": False}


def _gguf(model: str) -> GGUF | None:
    """The GGUF file that is called so: a path, or the name of a package's; None if it is no such file."""
    path = Path(os.path.expanduser(model))
    if not os.path.lexists(path):
        if model not in PACKAGED:
            return None
        path = packaged(model)
    from quire.data.weights.gguf import is_gguf, read_gguf

    return read_gguf(path) if is_gguf(path) else None


def _notes(model: str) -> tuple[str, ...]:
    """That a path which is there goes before quire's own model of that name, if it does."""
    if model not in (*ALL_BUNDLED, *PACKAGED) or not os.path.lexists(model):
        return ()
    return (f"{model} is {Path(model).absolute()}, and not quire's own model of that name",)


def _read_file(config: EngineConfig, model: str, file: GGUF) -> Source:
    """The model of a GGUF file."""
    from quire.data.weights.gguf_model import config_of, generation_of

    if config.revision is not None:
        raise StartupError(f"--revision is given, and {model!r} is a file", "Give a model of the hub with it")
    settings, generation = config_of(file), generation_of(file)
    try:
        spec = read_spec(settings)
    except StartupError as error:
        raise StartupError(f"the model of {file.path} can't be used: {error.cause}", error.remedy) from error
    if file.numbers < spec.parameters:
        cause = f"{file.path} makes {spec.parameters} parameters of its settings, and its tensors have {file.numbers}"
        raise StartupError(cause, AGAIN)
    name, notes = file.path.stem, _notes(model)
    if model in PACKAGED and not notes:
        name, generation = model, PACKAGED[model].sampling | generation
    return Source(name, file.path, settings, generation, spec, _defaults(config, generation), file, notes)


def read_text(
    config: EngineConfig, source: Source, renderer: Renderer | None
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """The tokenizer and the chat template, as far as there are any; the latter runs in `renderer`."""
    if renderer is None:
        return None, None
    from quire.text.chat import ChatTemplate

    file, folder = _texts(config, source)
    tokenizer = _tokenizer(file, folder)
    if tokenizer is None or file is None:
        return tokenizer, None if folder is None else ChatTemplate.find(folder, renderer=renderer)
    from quire.text.gguf import template_of

    template = template_of(file.said)
    return tokenizer, None if template is None else ChatTemplate(template, tokenizer.special, renderer=renderer)


def read_tokenizer(config: EngineConfig, source: Source | None) -> Tokenizer | None:
    """The tokenizer of --tokenizer, or the model's own; None for a named shape."""
    return _tokenizer(*_texts(config, source))


def _texts(config: EngineConfig, source: Source | None) -> tuple[GGUF | None, Path | None]:
    """The file or the folder that holds the tokenizer and the chat template."""
    if config.tokenizer is not None:
        file = _gguf(config.tokenizer)
        return file, locate(config.tokenizer, weights=False) if file is None else None
    return (None, None) if source is None else (source.file, source.folder)


def _tokenizer(file: GGUF | None, folder: Path | None) -> Tokenizer | None:
    if file is not None:
        from quire.text.gguf import tokenizer_of

        return tokenizer_of(file.said, str(file.path))
    if folder is None:
        return None
    from quire.text.tokenizer import Tokenizer

    return Tokenizer.load(folder)


def read_sight(config: EngineConfig, source: Source, tokenizer: Tokenizer | None) -> Sight | None:
    """What pictures are read with, if the model sees any."""
    eyes = read_eyes(source, tokenizer)
    if eyes is None:
        return None
    from quire.text.images import ImageLimits
    from quire.text.sight import Sight

    return Sight(eyes, ImageLimits(config.max_image_pixels, config.max_image_bytes, config.max_images))


def read_eyes(source: Source, tokenizer: Tokenizer | None) -> Eyes | None:
    """A model's eyes, by its architecture; None: it reads only text, or there is no tokenizer. StartupError where what
    stands for pictures isn't in the tokenizer, or not in the model's vocabulary."""
    if source.spec.vision is None or tokenizer is None:
        return None
    from quire.data.models.vision import VisionSettings
    from quire.text.pictures import FamilyEyes, read_placeholder, read_preparation

    said = source.config.get(PREPARATION) or {}
    vision = VisionSettings.read(source.config, said)
    placeholder = read_placeholder(vision.kind, tokenizer.find, vision.token)
    if placeholder.token >= source.spec.vocab_size and not vision.cross:
        raise StartupError(
            f"{tokenizer.piece(placeholder.token)} is token {placeholder.token} of the tokenizer, and the model knows "
            f"{source.spec.vocab_size}",
            "Both must be of one model",
        )
    how = read_preparation(said, vision.tiling, vision.normal.mean)
    ending = tokenizer.encode(placeholder.ending, add_special_tokens=False) if placeholder.ending else []
    return FamilyEyes(how, placeholder, tokenizer.piece, ending)


def tiling_of(source: Source) -> Tiling | None:
    """How the model's pictures are cut; None: it sees none."""
    if source.spec.vision is None:
        return None
    from quire.data.models.vision import VisionSettings

    return VisionSettings.read(source.config, source.config.get(PREPARATION) or {}).tiling


def pooling_of(config: EngineConfig, source: Source) -> str:
    """What embeddings are made of: "mean" or "last", as the configuration says, or else the checkpoint (as
    sentence-transformers has it)."""
    if config.pooling != "auto":
        return config.pooling
    there = source.folder is not None and source.file is None
    said = read_optional(source.folder, POOLING) if there and source.folder is not None else {}
    return "mean" if said.get("pooling_mode_mean_tokens") is True else "last"


def eos_ids(source: Source, named: tuple[int, ...]) -> tuple[int, ...]:
    """Every end token that generation_config.json, config.json or the tokenizer (`named`) names."""
    ids: dict[int, None] = {}
    text = source.config.get("text_config") or source.config.get("llm_config")
    for source_of in (source.generation, source.config, text if isinstance(text, dict) else {}):
        given = source_of.get("eos_token_id")
        for value in given if isinstance(given, list) else [given]:
            if type(value) is int and 0 <= value < source.spec.vocab_size:
                ids[value] = None
    for value in named:
        if value < source.spec.vocab_size:
            ids[value] = None
    return tuple(ids)


def _defaults(config: EngineConfig, generation: dict[str, Any]) -> dict[str, Any]:
    """Requests' defaults: the model's generation_config.json or another, and what overrides it. StartupError for one
    that no request could use. `do_sample` isn't read, as in vLLM: to transformers a missing one is false as well, and
    models with such files are sampled from."""
    said, where = generation, "generation_config.json"
    if config.generation_config not in ("auto", "vllm"):
        folder = Path(str(config.generation_config)).expanduser()
        where = f"--generation-config {str(folder)[:200]!r}"
        if not (folder / "generation_config.json").is_file():
            raise StartupError(
                f"{where} has no generation_config.json", "Give auto, vllm or a folder that has such a file"
            )
        said = read_generation_config(folder)
    said = {} if config.generation_config == "vllm" else said
    override = config.override_generation_config or {}
    both: tuple[tuple[str, Mapping[str, Any]], ...] = ((where, said), ("--override-generation-config", override))
    for name, values in both:
        try:
            SamplingParams(**{key: values[key] for key in GENERATION if values.get(key) is not None})
        except InputError as error:
            remedy = (
                "Give other values" if values is override else "Mend the file, or start with --no-generation-config"
            )
            raise StartupError(f"{name} can't be used: {error}", remedy) from error
    merged = {**said, **override}
    return {key: merged[key] for key in GENERATION if merged.get(key) is not None}
