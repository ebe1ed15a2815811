"""Check that a model and its draft model, or its head, can decode speculatively together."""

from __future__ import annotations

import filecmp

from quire.config import SPECULATION_HEADS, EngineConfig
from quire.errors import StartupError
from quire.files import find_checkpoint_file, read_json_config
from quire.models import read_model_config
from quire.models.head_config import HeadConfig
from quire.startup.checkpoint import POOLING_CONFIG, Checkpoint, read_tokenizer

OTHER_METHODS = "Use a draft model, or --speculative-method ngram"
FAMILY_REMEDY = "Use a draft model of the same family, with the same tokens"


def check_speculation(config: EngineConfig, checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint`, of whole models, with a notice if the draft model limits the length of sequences. Raise
    StartupError if the model's memory cannot go back by some tokens, or the draft model does not fit the model."""
    if config.speculation is None:
        return checkpoint
    if reason := _irreversible_reason(checkpoint):
        raise StartupError(
            f"speculative decoding is on, and {checkpoint.name} {reason}, which cannot go back by rejected tokens",
            "Leave --speculative-model and --speculative-method out",
        )
    if config.pp > 1 and checkpoint.spec.state_layers:
        raise StartupError(
            f"--pp is {config.pp}, speculative decoding is on, and {checkpoint.name} keeps running states, which only "
            "the last stage knows how far to advance",
            "Use --tp, or leave speculation out",
        )
    draft = checkpoint.draft
    if draft is None:
        return checkpoint
    if config.speculation in SPECULATION_HEADS:
        _check_target(checkpoint, draft)
        return checkpoint
    if reason := _unsuitable_reason(draft):
        raise StartupError(f"the draft model {draft.name} {reason}", "Use a text model that only attends to tokens")
    if draft.spec.vocab_size != checkpoint.spec.vocab_size:
        raise StartupError(
            f"the draft model {draft.name} has {draft.spec.vocab_size} tokens, and {checkpoint.name} "
            f"{checkpoint.spec.vocab_size}",
            FAMILY_REMEDY,
        )
    if draft.spec.parameters > checkpoint.spec.parameters:
        raise StartupError(
            f"the draft model {draft.name} has {draft.spec.parameters:,} parameters, and {checkpoint.name} only "
            f"{checkpoint.spec.parameters:,}",
            "Use a smaller draft model: it computes each token that it proposes",
        )
    _check_tokens(config, checkpoint, draft)
    return _limit_length(config, checkpoint, draft)


def _check_target(checkpoint: Checkpoint, head: Checkpoint) -> None:
    """Raise StartupError if a head can't read the model's hidden states, or use its embedding."""
    model, declared = read_model_config(checkpoint.config), read_model_config(head.config)
    assert isinstance(declared, HeadConfig), "a head declares one"
    if any(layer.is_cross_attention for layer in checkpoint.spec.layers):
        raise StartupError(f"{checkpoint.name} attends to images by cross-attention, and {head.name} can't read that",
                           OTHER_METHODS)  # fmt: skip
    plain = model.embed_scale is None and model.embed_dim == declared.hidden and not model.positions
    if not declared.has_embedding and not plain:
        raise StartupError(
            f"{head.name} has no embedding of its own, and that of {checkpoint.name} is scaled, projected or added to",
            OTHER_METHODS,
        )


def _irreversible_reason(checkpoint: Checkpoint) -> str:
    """Return why the model's memory cannot go back by some tokens, as a predicate; "" if it can."""
    spec = checkpoint.spec
    if spec.min_budget:
        return "keeps a part of each prompt"
    return "attends both ways in prompts" if spec.vision is not None and spec.vision.bidirectional_prompt else ""


def _unsuitable_reason(draft: Checkpoint) -> str:
    """Return why a model can't be a draft model, as a predicate; "" if it can."""
    if draft.spec.vision is not None:
        return "takes images"
    if draft.path is not None and draft.gguf is None and read_json_config(draft.path, POOLING_CONFIG):
        return "makes embeddings"
    if draft.spec.state_layers:
        return "keeps running states"
    return _irreversible_reason(draft)


def _check_tokens(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint) -> None:
    """Raise StartupError if both models have tokenizers, and these give an id different tokens. Added tokens may
    differ: fine-tuned models rename some."""
    files = [
        find_checkpoint_file(model.path, "tokenizer.json")
        for model in (checkpoint, draft)
        if model.path is not None and model.gguf is None
    ]
    if len(files) == 2 and files[0] and files[1] and filecmp.cmp(files[0], files[1], shallow=False):
        return
    try:
        own, other = read_tokenizer(config, checkpoint), read_tokenizer(EngineConfig(), draft)
    except StartupError:  # the draft model's is needed for nothing else, and the start reports the model's
        return
    if own is None or other is None:
        return
    added = own.added_tokens.keys() | other.added_tokens.keys()
    for id in range(min(own.vocab_size, other.vocab_size)):
        if id not in added and own.id_to_token(id) != other.id_to_token(id):
            raise StartupError(
                f"token {id} is {other.id_to_token(id)[:40]!r} for the draft model {draft.name}, and "
                f"{own.id_to_token(id)[:40]!r} for {checkpoint.name}",
                FAMILY_REMEDY,
            )


def _limit_length(config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with a notice if the draft model takes shorter sequences. Raise StartupError if longer ones
    are asked for."""
    longest = draft.spec.max_len
    if longest >= (config.max_model_len or checkpoint.spec.max_len):
        return checkpoint
    if config.max_model_len is not None:
        raise StartupError(
            f"--max-model-len is {config.max_model_len}, and the draft model {draft.name} takes {longest} tokens",
            f"Use --max-model-len {longest} or less, or another draft model",
        )
    notice = f"sequences may have {longest:,} tokens, as many as the draft model was made for"
    return checkpoint._replace(notices=(*checkpoint.notices, notice))
