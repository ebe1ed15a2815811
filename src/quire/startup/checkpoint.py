"""A model before it is loaded: its location, its settings, its tokenizer and chat template. No torch here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.config import GENERATION_PARAMS, SPECULATION_HEADS, EngineConfig, Experiment
from quire.errors import InputError, StartupError, short_repr
from quire.files import DOWNLOAD_AGAIN, read_json_config
from quire.memory.page_layout import as_uniform
from quire.models import read_spec, uses_transformers
from quire.models.head_config import eagle3_config, mtp_config
from quire.models.named_configs import CONFIGS
from quire.models.vision.settings import PREPROCESSOR_KEY
from quire.protocol.image_tiling import ImageTiling
from quire.protocol.model_spec import ModelSpec
from quire.protocol.parallel_layout import Shard
from quire.protocol.sampling_params import SamplingParams
from quire.weights.checkpoint_files import (
    has_untied_head,
    locate_checkpoint,
    read_config,
    read_generation_config,
    read_preprocessor_config,
    tensor_names,
)
from quire.weights.packaged_models import PACKAGED_MODELS, packaged_model_path

if TYPE_CHECKING:
    from quire.text.chat_template import ChatTemplate
    from quire.text.images.loader import ImageLoader
    from quire.text.images.processor import ImageProcessor
    from quire.text.template_process import TemplateProcess
    from quire.text.tokenizer import Tokenizer
    from quire.weights.gguf_file import GGUFFile

DEFAULT_MODEL = "tiny"
BUNDLED_MODELS = (DEFAULT_MODEL, "tiny-draft", "tiny-vision")
POOLING_CONFIG = "1_Pooling/config.json"
UNTIED_NOTICE = (
    "lm_head.weight differs from the embedding, though config.json ties them: the head is the file's, as in "
    "transformers. Set tie_word_embeddings to false there to say so"
)
STATE_ITEMSIZES = {"auto": 4, "float32": 4, "bfloat16": 2}


class Checkpoint(NamedTuple):
    """A model before it is loaded. `path` is None for a named shape with dummy weights, and the file's path for a GGUF
    file, whose contents are `gguf`. `generation_config` is its generation_config.json, `default_sampling` the defaults
    of requests' parameters. `notices` are shown at start. `draft` is the draft model of speculative decoding, or
    the head."""

    name: str
    path: Path | None
    config: dict[str, Any]
    generation_config: dict[str, Any]
    spec: ModelSpec
    default_sampling: dict[str, Any]
    gguf: GGUFFile | None = None
    notices: tuple[str, ...] = ()
    draft: Checkpoint | None = None
    keeps_all_tokens: bool = False

    @property
    def pool_spec(self) -> ModelSpec:
        """The spec of all that the memory holds: of the model and its draft model, if any. Sequences have at most the
        length that both models take."""
        spec = self.spec
        if self.draft is not None:
            spec = spec.with_draft(self.draft.spec)
            spec = replace(spec, max_len=min(spec.max_len, self.draft.spec.max_len))
        return as_uniform(spec) if self.keeps_all_tokens else spec

    def for_shard(self, shard: Shard) -> Checkpoint:
        """Return the same with the spec of a rank's part. Raise StartupError if the model can't be divided so."""
        spec = read_spec(self.config, shard)
        try:
            return self._replace(spec=spec, draft=self.draft and self.draft.for_shard(shard))
        except StartupError as error:
            raise StartupError(f"the draft model: {error.cause}", error.remedy) from error

    def with_stored_dtypes(self, config: EngineConfig, itemsize: int) -> Checkpoint:
        """Return the same for numbers of `itemsize` bytes, except for what `config` says of running states, keys and
        values."""
        spec = self.spec.with_state_itemsize(itemsize, STATE_ITEMSIZES[config.state_dtype])
        return self._replace(
            spec=spec.with_int8_kv() if config.kv_cache_dtype == "int8" else spec,
            draft=self.draft and self.draft.with_stored_dtypes(config, itemsize),
        )


def read_checkpoint(config: EngineConfig, weights: bool = True) -> Checkpoint:
    """Find the model, and its draft model if there is one, and read their configurations; nothing is loaded. `weights`
    is True if the weights will be loaded."""
    checkpoint = _read_model(config, weights)._replace(keeps_all_tokens=config.experiment.keep_all_tokens)
    if checkpoint.keeps_all_tokens and checkpoint.spec.min_budget:
        raise StartupError(f"--keep-all-tokens is given, and {checkpoint.name} keeps a part of each prompt",
                           "Leave it out")  # fmt: skip
    if config.expert_parallel and not checkpoint.spec.experts and not uses_transformers(checkpoint.config):
        raise StartupError(f"--expert-parallel is given, and {checkpoint.name} has no experts",
                           "Leave it out")  # fmt: skip
    if config.speculation == "mtp":
        return checkpoint._replace(draft=_read_mtp_layer(checkpoint))
    if config.speculation == "eagle3":
        return checkpoint._replace(draft=_read_eagle3_head(config, checkpoint, weights))
    return checkpoint._replace(draft=_read_draft(config, weights)) if config.speculative_model else checkpoint


def _read_mtp_layer(target: Checkpoint) -> Checkpoint:
    """Return the MTP layer in the checkpoint of `target`. Raise StartupError if it has none."""
    if target.gguf is not None:
        raise StartupError(f"--speculative-method is mtp, and {target.name} is a GGUF file, which has no MTP layer",
                           "Use the checkpoint in safetensors, or another method")  # fmt: skip
    try:
        settings = mtp_config(target.config, target.spec)
    except StartupError as error:
        raise StartupError(f"--speculative-method is mtp, and {error.cause}", error.remedy) from error
    return Checkpoint(f"the MTP layer of {target.name}", target.path, settings, {}, read_spec(settings), {})


def _read_eagle3_head(config: EngineConfig, target: Checkpoint, weights: bool) -> Checkpoint:
    """Return the EAGLE-3 head for `target`, a folder or a hub id."""
    name = config.speculative_model or ""
    weights = weights and not config.dummy_weights
    try:
        folder = locate_checkpoint(name, weights)
        settings = eagle3_config(read_config(folder), target.spec, _head_tensors(folder, weights))
        return Checkpoint(Path(name).name, folder, settings, {}, read_spec(settings), {})
    except StartupError as error:
        raise StartupError(f"the EAGLE-3 head {name[:80]!r} can't be used: {error.cause}", error.remedy) from error


def _head_tensors(folder: Path, weights: bool) -> set[str] | None:
    """Return the names of a head's tensors; None if there are none, and no `weights` are needed."""
    try:
        return tensor_names(folder)
    except StartupError as error:
        if not weights:
            return None
        remedy = "Use a copy of the head in safetensors; pickled weights (.bin, .pt) are never opened"
        raise StartupError(error.cause, remedy) from error


def _read_draft(config: EngineConfig, weights: bool) -> Checkpoint:
    """Return the draft model: a bundled model, a folder, a file or a hub id, or, with --model-config, a named shape."""
    name = config.speculative_model or ""
    other = os.path.lexists(name) or "/" in name or name in (*BUNDLED_MODELS, *PACKAGED_MODELS)
    shape = name if config.model_config is not None and not other else None
    own = replace(
        config, model=name, model_config=shape, revision=None, generation_config="vllm",
        override_generation_config=None, speculative_model=None, speculative_method=None, experiment=Experiment(),
    )  # fmt: skip
    try:
        return _read_model(own, weights)
    except StartupError as error:
        raise StartupError(f"--speculative-model {name[:80]!r} can't be used: {error.cause}", error.remedy) from error


def _read_model(config: EngineConfig, weights: bool) -> Checkpoint:
    """Return the model of `config` without a draft model."""
    if config.model_config is not None:
        if config.model_config not in CONFIGS:
            near = get_close_matches(config.model_config.lower(), CONFIGS, n=1)
            remedy = f"Did you mean {near[0]}?" if near else f"Known shapes: {', '.join(sorted(CONFIGS))}"
            raise StartupError(f"--model-config is {config.model_config[:80]!r}", remedy)
        if weights and not config.dummy_weights:
            raise StartupError(f"{config.model_config} is a shape without weights", "Add --dummy-weights")
        shape = CONFIGS[config.model_config]
        return Checkpoint(config.model_config, None, shape, {}, read_spec(shape), _default_sampling(config, {}))
    model = config.model or DEFAULT_MODEL
    bundled = Path(__file__).parents[1] / "assets" / model
    named = model in BUNDLED_MODELS and not Path(model).is_dir()
    if named and config.revision is not None:
        raise StartupError(f"--revision is given, and {model} is the bundled model", "Give a model of the hub with it")
    if (file := _open_gguf(model)) is not None:
        return _read_gguf_checkpoint(config, model, file)
    folder = bundled if named else _locate_model(model, weights and not config.dummy_weights, config.revision)
    settings, generation = read_config(folder), read_generation_config(folder)
    if uses_transformers(settings):
        _check_transformers_options(config, settings)
    settings[PREPROCESSOR_KEY] = read_preprocessor_config(folder)
    local = Path(model).expanduser()
    name = local.resolve().name if local.is_dir() else model
    defaults, notes = _default_sampling(config, generation), () if named else _shadowing_notices(model)
    spec = read_spec(settings)
    if weights and not config.dummy_weights:
        untied = _with_untied_head(settings)
        larger = read_spec(untied)
        # A larger count means that config.json ties the head.
        if larger.parameters > spec.parameters and has_untied_head(folder):
            settings, spec, notes = untied, larger, (*notes, UNTIED_NOTICE)
    return Checkpoint(name, folder, settings, generation, spec, defaults, None, notes)


def _check_transformers_options(config: EngineConfig, settings: dict[str, Any]) -> None:
    """Raise StartupError for what a model that transformers computes doesn't have."""
    name = settings["architectures"][0]
    if settings.get("quantization_config"):
        raise StartupError(f"the checkpoint is quantized, and {short_repr(name)} is computed by transformers",
                           "Use a checkpoint in bfloat16, float16 or float32")  # fmt: skip
    for flag, given in (("--quantization", config.quantization is not None), ("--deterministic", config.deterministic)):
        if given:
            raise StartupError(f"{flag} is given, and {short_repr(name)} is computed by transformers", "Leave it out")
    if config.speculation in SPECULATION_HEADS:
        raise StartupError(
            f"--speculative-method is {config.speculation}, and {short_repr(name)} is computed by transformers, which "
            "leaves no hidden states for a head",
            "Use ngram, or a draft model",
        )


def _locate_model(model: str, weights: bool, revision: str | None) -> Path:
    """Return the folder of a model. Without one, raise StartupError, which suggests a bundled model or a shape of a
    similar name."""
    try:
        return locate_checkpoint(model, weights, revision)
    except StartupError as error:
        near = get_close_matches(model.lower(), (*BUNDLED_MODELS, *PACKAGED_MODELS, *CONFIGS), n=1, cutoff=0.8)
        if not near:
            raise
        flag = "--model-config " if near[0] in CONFIGS else ""
        raise StartupError(error.cause, f"Did you mean {flag}{near[0]}?") from error


def _with_untied_head(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration with a head that is not the embedding."""
    parts = {name: part for name in ("text_config", "llm_config") if isinstance(part := settings.get(name), dict)}
    untied = {name: {**part, "tie_word_embeddings": False} for name, part in parts.items()}
    return {**settings, **untied, "tie_word_embeddings": False}


def _open_gguf(model: str) -> GGUFFile | None:
    """Return the GGUF file of that path, or of that packaged model; None if it is no such file."""
    path = Path(os.path.expanduser(model))
    if not os.path.lexists(path):
        if model not in PACKAGED_MODELS:
            return None
        path = packaged_model_path(model)
    from quire.weights.gguf_file import is_gguf, read_gguf

    return read_gguf(path) if is_gguf(path) else None


def _shadowing_notices(model: str) -> tuple[str, ...]:
    """Return a notice that an existing path takes precedence over quire's own model of that name, if so."""
    if model not in (*BUNDLED_MODELS, *PACKAGED_MODELS) or not os.path.lexists(model):
        return ()
    return (f"{model} is {Path(model).absolute()}, and not quire's own model of that name",)


def _read_gguf_checkpoint(config: EngineConfig, model: str, file: GGUFFile) -> Checkpoint:
    """Return the model of a GGUF file."""
    from quire.weights.gguf_config import to_hf_config, to_hf_generation_config

    if config.revision is not None:
        raise StartupError(f"--revision is given, and {model!r} is a file", "Give a model of the hub with it")
    settings, generation = to_hf_config(file), to_hf_generation_config(file)
    try:
        spec = read_spec(settings)
    except StartupError as error:
        raise StartupError(f"the model of {file.path} can't be used: {error.cause}", error.remedy) from error
    if file.num_elements < spec.parameters:
        cause = (
            f"{file.path} makes {spec.parameters} parameters of its settings, and its tensors have {file.num_elements}"
        )
        raise StartupError(cause, DOWNLOAD_AGAIN)
    name, notes = file.path.stem, _shadowing_notices(model)
    if model in PACKAGED_MODELS and not notes:
        name, generation = model, PACKAGED_MODELS[model].sampling | generation
    return Checkpoint(name, file.path, settings, generation, spec, _default_sampling(config, generation), file, notes)


def read_tokenizer_and_template(
    config: EngineConfig, checkpoint: Checkpoint, renderer: TemplateProcess | None
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """Return the tokenizer and the chat template, or None for those that are missing. The template is rendered by
    `renderer`; without it, neither is read."""
    if renderer is None:
        return None, None
    from quire.text.chat_template import ChatTemplate

    file, folder = _tokenizer_source(config, checkpoint)
    tokenizer = _load_tokenizer(file, folder)
    if tokenizer is None or file is None:
        return tokenizer, None if folder is None else ChatTemplate.find(folder, process=renderer)
    from quire.text.gguf_tokenizer import template_of

    template = template_of(file.metadata)
    return tokenizer, None if template is None else ChatTemplate(template, tokenizer.special_tokens, process=renderer)


def read_tokenizer(config: EngineConfig, checkpoint: Checkpoint | None) -> Tokenizer | None:
    """Return the tokenizer of --tokenizer, or the model's own; None for a named shape."""
    return _load_tokenizer(*_tokenizer_source(config, checkpoint))


def _tokenizer_source(config: EngineConfig, checkpoint: Checkpoint | None) -> tuple[GGUFFile | None, Path | None]:
    """Return the file or the folder with the tokenizer and the chat template."""
    if config.tokenizer is not None:
        file = _open_gguf(config.tokenizer)
        return file, locate_checkpoint(config.tokenizer, weights=False) if file is None else None
    return (None, None) if checkpoint is None else (checkpoint.gguf, checkpoint.path)


def _load_tokenizer(file: GGUFFile | None, folder: Path | None) -> Tokenizer | None:
    if file is not None:
        from quire.text.gguf_tokenizer import tokenizer_of

        return tokenizer_of(file.metadata, str(file.path))
    if folder is None:
        return None
    from quire.text.tokenizer import Tokenizer

    return Tokenizer.load(folder)


def read_image_loader(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> ImageLoader | None:
    """Return the loader of images, or None if the model takes none."""
    processor = read_image_processor(checkpoint, tokenizer)
    if processor is None:
        return None
    from quire.text.images.decode import ImageLimits
    from quire.text.images.loader import ImageLoader

    return ImageLoader(processor, ImageLimits(config.max_image_pixels, config.max_image_bytes, config.max_images))


def read_image_processor(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> ImageProcessor | None:
    """Return the image processor of the model's architecture; None if it takes only text, or without a tokenizer. Raise
    StartupError if the image placeholder is not in the tokenizer, or not in the model's vocabulary."""
    if checkpoint.spec.vision is None or tokenizer is None:
        return None
    from quire.models.vision import VisionSettings
    from quire.text.images.placeholders import read_placeholder
    from quire.text.images.preprocessor import read_image_preprocessor
    from quire.text.images.processor import ImageProcessor

    settings = checkpoint.config.get(PREPROCESSOR_KEY) or {}
    vision = VisionSettings.from_config(checkpoint.config, settings)
    placeholder = read_placeholder(vision.kind, tokenizer.token_to_id, vision.image_token_id)
    if placeholder.token >= checkpoint.spec.vocab_size and not vision.uses_cross_attention:
        raise StartupError(
            f"{tokenizer.id_to_token(placeholder.token)} is token {placeholder.token} of the tokenizer, and "
            f"the model knows {checkpoint.spec.vocab_size}",
            "Both must be of one model",
        )
    preprocessor = read_image_preprocessor(settings, vision.tiling, vision.normalization.mean)
    ending = tokenizer.encode(placeholder.prompt_suffix, add_special_tokens=False) if placeholder.prompt_suffix else []
    return ImageProcessor(preprocessor, placeholder, tokenizer.id_to_token, ending)


def image_tiling(checkpoint: Checkpoint) -> ImageTiling | None:
    """Return how images are divided into tiles; None if the model takes no images."""
    if checkpoint.spec.vision is None:
        return None
    from quire.models.vision import VisionSettings

    return VisionSettings.from_config(checkpoint.config, checkpoint.config.get(PREPROCESSOR_KEY) or {}).tiling


def pooling_type(config: EngineConfig, checkpoint: Checkpoint) -> str:
    """Return how embeddings are pooled, "mean" or "last": as the configuration says, else as the checkpoint does (in
    the format of sentence-transformers)."""
    if config.pooling != "auto":
        return config.pooling
    there = checkpoint.path is not None and checkpoint.gguf is None
    settings = read_json_config(checkpoint.path, POOLING_CONFIG) if there and checkpoint.path is not None else {}
    return "mean" if settings.get("pooling_mode_mean_tokens") is True else "last"


def collect_eos_ids(checkpoint: Checkpoint, tokenizer_eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return every end token of generation_config.json, config.json and the tokenizer (`tokenizer_eos_ids`)."""
    ids: dict[int, None] = {}
    text = checkpoint.config.get("text_config") or checkpoint.config.get("llm_config")
    for settings in (checkpoint.generation_config, checkpoint.config, text if isinstance(text, dict) else {}):
        given = settings.get("eos_token_id")
        for value in given if isinstance(given, list) else [given]:
            if type(value) is int and 0 <= value < checkpoint.spec.vocab_size:
                ids[value] = None
    for value in tokenizer_eos_ids:
        if value < checkpoint.spec.vocab_size:
            ids[value] = None
    return tuple(ids)


def _default_sampling(config: EngineConfig, generation_config: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults of requests: those of the model's generation_config.json or another one, and the overrides.
    Raise StartupError for an invalid value. `do_sample` is ignored, as in vLLM: transformers takes a missing one as
    false too, and models with such files are sampled."""
    model_defaults, where = generation_config, "generation_config.json"
    if config.generation_config not in ("auto", "vllm"):
        folder = Path(str(config.generation_config)).expanduser()
        where = f"--generation-config {str(folder)[:200]!r}"
        if not (folder / "generation_config.json").is_file():
            raise StartupError(
                f"{where} has no generation_config.json", "Give auto, vllm or a folder that has such a file"
            )
        model_defaults = read_generation_config(folder)
    model_defaults = {} if config.generation_config == "vllm" else model_defaults
    override = config.override_generation_config or {}
    sources: tuple[tuple[str, Mapping[str, Any]], ...] = (
        (where, model_defaults),
        ("--override-generation-config", override),
    )
    for name, values in sources:
        try:
            SamplingParams(**{key: values[key] for key in GENERATION_PARAMS if values.get(key) is not None})
        except InputError as error:
            remedy = (
                "Give other values" if values is override else "Mend the file, or start with --no-generation-config"
            )
            raise StartupError(f"{name} can't be used: {error}", remedy) from error
    merged = {**model_defaults, **override}
    return {key: merged[key] for key in GENERATION_PARAMS if merged.get(key) is not None}
