"""Construction of a `tokenizers` tokenizer from a GGUF file's metadata, equal to that of the original model folder.

Supported are byte-level BPE with the known pre-tokenizers, and SentencePiece, whose merges follow from the scores. The
module gets the metadata and reads no files.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from quire.errors import StartupError, short_repr
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizers_guard import errors_to_startup_error

KEY_PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER = 1, 2, 3, 4
SPACE = "▁"
MAX_MERGES = 4  # merges per token
MAX_ADDED_TOKENS = 1 << 16  # tokens without merges, which take over a kilobyte each
MAX_CHARACTERS = 1 << 22  # of all pieces whose merges are computed
MAX_SPLITS = 1 << 28  # of all pieces into two; takes about a second
REMEDY = "Give another one: --tokenizer FOLDER"
END_OF_TURN_TOKENS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>",
    "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<｜end▁of▁sentence｜>",
    "<|return|>", "<|call|>", "<turn|>", "<|tool_response>",
})  # fmt: skip
"""Tokens that end a turn even if the metadata do not say so, as in llama.cpp. In gpt-oss's harmony format `<|end|>`
ends a message, and `<|return|>` or `<|call|>` the turn."""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s|"
    r"%(number)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class PreTokenizer(NamedTuple):
    """How text is split before BPE: by the expressions one after another. `ignore_merges`: a word that is a token is
    not split. `add_bos`: BOS is added unless the metadata decide. `nfc`: text is normalized to NFC first."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


PLAIN = PreTokenizer((GPT2,))
DIGITS = PreTokenizer((r"\p{N}", GPT2))
LLAMA3 = PreTokenizer((GPT4 % r"\p{N}{1,3}",), ignore_merges=True, add_bos=True)
QWEN2 = PreTokenizer((GPT4 % r"\p{N}",), nfc=True)
PRE_TOKENIZERS = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo"), PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "command-r"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2"), LLAMA3),
    **dict.fromkeys(("smaug-bpe", "dbrx"), LLAMA3._replace(ignore_merges=False, add_bos=False)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "stablelm2": QWEN2._replace(nfc=False),
    "tekken": PreTokenizer((CASED % {"end": "", "number": r"\p{N}"},), ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer((CASED % {"end": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "number": r"\p{N}{1,3}"},)),
}
"""By the value of `tokenizer.ggml.pre`."""


def template_of(metadata: Mapping[str, Any]) -> str | None:
    """Return the chat template, or None."""
    template = metadata.get("tokenizer.chat_template")
    return template if isinstance(template, str) and template else None


def tokenizer_of(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    """Return the tokenizer in `metadata` of the file `where`. Raise StartupError if it has none, or an unsupported
    one."""
    kind, tokens = metadata.get(KEY_PREFIX + "model"), _tokens(metadata, where)
    types = _token_numbers(metadata, "token_type", tokens, where) or [NORMAL] * len(tokens)
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise StartupError(f"{where} has a token twice", REMEDY)
    if (added := sum(type in (CONTROL, USER) for type in types)) > MAX_ADDED_TOKENS:
        raise StartupError(
            f"{where} has {added:,} control and added tokens; at most {MAX_ADDED_TOKENS:,} are read", REMEDY
        )
    with errors_to_startup_error(f"the tokenizer of {where}"):
        if not isinstance(kind, str):
            raise StartupError(f"{where} has no kind of tokenizer", REMEDY)
        if kind == "gpt2":
            backend, begins = _byte_level(metadata, vocab, where)
        elif kind in ("llama", "gemma4"):
            backend, begins = _sentence_piece(metadata, vocab, types, where, kind == "gemma4"), True
        else:
            raise StartupError(
                f"{where} has a tokenizer of the kind {short_repr(kind)}; gpt2, llama and gemma4 are read", REMEDY
            )
        named = {name: _special_token_id(metadata, name, tokens) for name in ("bos", "eos", "unknown", "padding")}
        _add_tokens(backend, tokens, types)
        _set_post_processor(backend, metadata, begins, named, tokens)
    calls = {"unknown": "unk_token", "padding": "pad_token"}
    special = {calls.get(name, f"{name}_token"): tokens[id] for name, id in named.items() if id is not None}
    texts = END_OF_TURN_TOKENS - {"<|end|>"} if "<|return|>" in vocab else END_OF_TURN_TOKENS  # harmony: see below
    ends = [vocab[text] for text in sorted(texts & vocab.keys()) if types[vocab[text]] in (CONTROL, USER)]
    more = [id for name in ("eot", "eom") if (id := _special_token_id(metadata, name, tokens)) is not None]
    return Tokenizer(backend, special, template_of(metadata) is not None, more_eos_ids=(*more, *ends))


def _tokens(metadata: Mapping[str, Any], where: str) -> list[str]:
    given = metadata.get(KEY_PREFIX + "tokens")
    if not isinstance(given, Sequence) or isinstance(given, str) or not len(given):
        raise StartupError(f"{where} has no tokenizer", REMEDY)
    return [str(token) or f"[EMPTY_{id}]" for id, token in enumerate(given)]


def _token_numbers(metadata: Mapping[str, Any], name: str, tokens: list[str], where: str) -> list[Any]:
    """Return one number per token, or [] if the field is missing."""
    given = metadata.get(KEY_PREFIX + name)
    if given is None:
        return []
    if not hasattr(given, "tolist") or len(given) != len(tokens):
        raise StartupError(f"{KEY_PREFIX}{name} in {where} is not one number for each of {len(tokens)} tokens", REMEDY)
    numbers: list[Any] = given.tolist()
    return numbers


def _special_token_id(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> int | None:
    id = metadata.get(f"{KEY_PREFIX}{name}_token_id")
    return id if type(id) is int and 0 <= id < len(tokens) else None


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int], where: str) -> tuple[tokenizers.Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether BOS is added unless the metadata decide."""
    pre = metadata.get(KEY_PREFIX + "pre", "default")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise StartupError(f"{where} cuts text as {short_repr(pre)}; known are {', '.join(PRE_TOKENIZERS)}", REMEDY)
    words, merges = PRE_TOKENIZERS[pre], _stored_merges(metadata, vocab, where)
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=words.ignore_merges))
    cuts: list[Any] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in words.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if words.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, words.add_bos


def _stored_merges(metadata: Mapping[str, Any], vocab: dict[str, int], where: str) -> list[tuple[str, str]]:
    """Return the merges in the metadata. Raise StartupError if there are none, too many, or some aren't two tokens."""
    given = metadata.get(KEY_PREFIX + "merges")
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > MAX_MERGES * len(vocab):
        raise StartupError(f"{where} has no merges for its tokens, or too many", REMEDY)
    merges = []
    for merge in given:
        left, space, right = str(merge).partition(" ")
        if not space:
            raise StartupError(f"{where} has the merge {short_repr(merge)}, which is not two tokens", REMEDY)
        merges.append((left, right))
    return merges


def _sentence_piece(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], where: str, has_merges: bool
) -> tokenizers.Tokenizer:
    """Return a tokenizer of SentencePiece's pieces. If `has_merges` (Gemma-4), merges are in the file, and a space is
    added before a text only if the metadata demand it; else merges follow from the scores."""
    merges = _stored_merges(metadata, vocab, where) if has_merges else _scored_merges(metadata, vocab, types, where)
    unknown = next((token for token, id in vocab.items() if types[id] == UNKNOWN), None)
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback="<0x00>" in vocab)
    )
    prefix = metadata.get(KEY_PREFIX + "add_space_prefix", not has_merges) is not False
    replace: Any = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _scored_merges(
    metadata: Mapping[str, Any], vocab: dict[str, int], types: list[int], where: str
) -> list[tuple[str, str]]:
    """Return the merges that follow from the scores of tokens. Raise StartupError if scores are missing or not finite,
    or tokens have too many characters."""
    scores = _token_numbers(metadata, "scores", list(vocab), where)
    if not scores or not all(math.isfinite(score) for score in scores):
        raise StartupError(f"{KEY_PREFIX}scores in {where} are missing or not finite", REMEDY)
    lengths = [len(token) for token, id in vocab.items() if types[id] == NORMAL]
    if sum(map(len, vocab)) > MAX_CHARACTERS or sum(length * length for length in lengths) > MAX_SPLITS:
        longest = max(map(len, vocab))
        raise StartupError(f"the tokens of {where} have too many characters, up to {longest:,} of one", REMEDY)
    return list(_merges(vocab, types, scores))


def _merges(vocab: dict[str, int], types: list[int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Return all pairs of pieces that form a third one, ordered by descending score of the third, as SentencePiece
    merges them."""
    merges = []
    for piece, id in vocab.items():
        if types[id] != NORMAL:
            continue
        halves = ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        pairs = [(vocab[left], vocab[right], left, right) for left, right in halves if left in vocab and right in vocab]
        merges += [(-scores[id], left, right) for _, _, left, right in sorted(pairs)]
    merges.sort(key=lambda merge: merge[0])
    return ((left, right) for _, left, right in merges)


def _add_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Add the tokens that no merge makes and that may occur in text. They are in the vocabulary already and keep their
    ids."""
    for kind, special in ((CONTROL, True), (USER, False)):
        texts = (token for token, type in zip(tokens, types) if type == kind)
        added = [AddedToken(text, special=special, normalized=False) for text in texts]
        (backend.add_special_tokens if special else backend.add_tokens)(added)


def _set_post_processor(
    backend: tokenizers.Tokenizer, metadata: Mapping[str, Any], add_bos: bool, special_ids: dict[str, int | None],
    tokens: list[str],
) -> None:  # fmt: skip
    """Set the special tokens that are added before and after a text."""
    settings = metadata.get(KEY_PREFIX + "add_bos_token", add_bos), metadata.get(KEY_PREFIX + "add_eos_token", False)
    ids = [special_ids[name] if wanted is True else None for name, wanted in zip(("bos", "eos"), settings)]
    if ids == [None, None]:
        return
    first, last = ([] if id is None else [tokens[id]] for id in ids)
    framed = [(tokens[id], id) for id in dict.fromkeys(ids) if id is not None]
    backend.post_processor = TemplateProcessing(single=[*first, "$A", *last], special_tokens=framed)
