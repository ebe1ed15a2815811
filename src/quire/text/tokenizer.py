"""Conversion of text to token ids and back with the `tokenizers` library.

tokenizer.json is loaded as it is. Folders with only older files are converted by transformers (extra `hf`). No code of
a model folder is executed: `auto_map` is ignored. Errors and panics of the library become quire's errors
(tokenizers_guard.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from quire.errors import InputError, StartupError, short_repr
from quire.files import MAX_BYTES_BY_FILE, find_checkpoint_file, read_bounded
from quire.text.decoder_rules import DecoderRules
from quire.text.tokenizer_files import is_unicode, special_tokens, tokenizer_config
from quire.text.tokenizers_guard import (
    check_encodes,
    check_replacement_growth,
    encode,
    errors_to_input_error,
    errors_to_startup_error,
    translate_errors,
)

MAX_DIGITS = 9  # of an added token's id


class Tokenizer:
    """A vocabulary and its rules. `special_tokens` are the named special tokens ({"eos_token": "</s>", ...}), `config`
    is the content of tokenizer_config.json. `more_eos_ids` are end tokens besides eos_token."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        has_chat_template: bool = False,
        config: dict[str, Any] | None = None,
        more_eos_ids: Sequence[int] = (),
    ) -> None:
        with errors_to_startup_error("the tokenizer"):
            backend.no_truncation()
            backend.no_padding()
            self.special_tokens, self.config = special_tokens, config or {}
            self.has_chat_template = has_chat_template
            self.added_tokens: dict[int, AddedToken] = backend.get_added_tokens_decoder()
            self.special_ids = frozenset(id for id, token in self.added_tokens.items() if token.special)
            self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
            self.bos_id = self._special_id("bos_token", backend)
            eos = self._special_id("eos_token", backend)
            self.eos_ids = tuple(dict.fromkeys((*(() if eos is None else (eos,)), *more_eos_ids)))
            check_replacement_growth(backend)
            self.decoder_rules = DecoderRules.from_decoder(backend.decoder)
            check_encodes(backend)
        self._backend = backend
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Load the tokenizer of a model folder. Raise StartupError if there is none or it cannot be read."""
        folder = Path(folder)
        if not folder.is_dir():
            raise StartupError(f"{folder} is not a folder", "Give a folder that holds tokenizer.json")
        config = tokenizer_config(folder)
        has_chat_template = find_checkpoint_file(folder, "chat_template.jinja") is not None or bool(
            config.get("chat_template")
        )
        file = find_checkpoint_file(folder, "tokenizer.json")
        if file is None:
            return cls(*_convert_slow_tokenizer(folder), has_chat_template, config)
        data = read_bounded(file, MAX_BYTES_BY_FILE["tokenizer.json"], str(folder / "tokenizer.json"), follow=False)
        with errors_to_startup_error(folder / "tokenizer.json"):
            backend = tokenizers.Tokenizer.from_buffer(data)
            special = special_tokens(config)
            _add_config_tokens(backend, config, special)
        return cls(backend, special, has_chat_template, config)

    def _special_id(self, name: str, backend: tokenizers.Tokenizer) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else backend.token_to_id(text)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`. `add_special_tokens` applies the tokenizer's post-processor, which may add
        BOS. Raise InputError for invalid Unicode."""
        if not isinstance(text, str):
            raise InputError(f"text must be a string, got {type(text).__name__}")
        with errors_to_input_error("text can't be encoded"):
            return encode(self._backend, text, add_special_tokens)

    def encode_continuation(self, text: str) -> list[int]:
        """Return the token ids of `text` as the continuation of another text: some tokenizers put a space before the
        first word of a text."""
        line, ids = (self.encode(part, add_special_tokens=False) for part in ("\n", "\n" + text))
        splits = ids[: len(line)] == line
        return ids[len(line) :] if splits else self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`. Ids without a token (padding of the model's vocabulary) have none. Raise InputError
        for negative ids."""
        try:
            with errors_to_input_error("token ids can't be decoded"):
                # A batch of one, since batch calls release the GIL.
                [text] = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
                return str(text)
        except (OverflowError, TypeError) as error:
            raise InputError(f"token ids must be integers between 0 and {self.vocab_size - 1}") from error

    def has_id(self, id: int) -> bool:
        """Return True if `id` has a token."""
        return self._piece(id) is not None

    def token_to_id(self, text: str) -> int | None:
        """Return the id of the token `text`, or None."""
        id: int | None = self._backend.token_to_id(text)
        return id

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes that a token adds after others, or b"" for an id without a token. Incomplete UTF-8
        characters stay incomplete."""
        known = self._bytes.get(id)
        if known is None:
            piece = self._piece(id)
            known = self._bytes[id] = b"" if piece is None else self.decoder_rules.bytes_of(piece, first=False)
        return known

    def first_token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token that begins the text: some decoders drop its leading space."""
        piece = self._piece(id)
        return b"" if piece is None else self.decoder_rules.bytes_of(piece, first=True)

    def token_text(self, id: int) -> str:
        """Return a token as text, for log-probabilities; incomplete characters become U+FFFD."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def id_to_token(self, id: int) -> str:
        """Return a token as the vocabulary spells it, or "" for an id without a token."""
        return self._piece(id) or ""

    def _piece(self, id: int) -> str | None:
        return self._backend.id_to_token(id) if 0 <= id < self.vocab_size else None


def _add_config_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], special: dict[str, str]) -> None:
    """Add the tokens and flags that only tokenizer_config.json declares, as transformers does.

    Its add_bos_token and add_eos_token are ignored, as in transformers 5: the post-processor of tokenizer.json
    decides."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    declared, named = config.get("added_tokens_decoder"), set(special.values())
    added = []
    for _, entry in sorted((declared if isinstance(declared, dict) else {}).items(), key=_entry_id):
        content = entry.get("content") if isinstance(entry, dict) else None
        if isinstance(content, str) and content not in known:
            if not is_unicode(content):
                raise StartupError(
                    f"tokenizer_config.json adds the token {short_repr(content)}, which is no valid Unicode"
                )
            flags = {name: bool(entry.get(name)) for name in ("lstrip", "normalized", "rstrip", "single_word")}
            added.append(AddedToken(content, special=bool(entry.get("special")) or content in named, **flags))
            known.add(content)
    backend.add_tokens(added)  # in one call, since each call scans all tokens
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in dict.fromkeys(special.values())]
    )
    backend.encode_special_tokens = config.get("split_special_tokens") is True


def _entry_id(item: tuple[str, Any]) -> int:
    return int(item[0]) if item[0].isdecimal() and len(item[0]) <= MAX_DIGITS else -1


def _convert_slow_tokenizer(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return the backend and the special tokens of a folder with slow tokenizer files, converted by transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise StartupError(
            f"{folder} has no tokenizer.json, and converting older files needs transformers", "pip install 'quire[hf]'"
        ) from error
    for path in folder.iterdir():  # transformers may read any of them
        if not path.is_dir():
            find_checkpoint_file(folder, path.name)
    remedy = "Add its tokenizer.json to the folder"
    with translate_errors(
        lambda reason: StartupError(f"{folder} holds no tokenizer that can be loaded: {reason}", remedy)
    ):
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise StartupError(f"The tokenizer of {folder} has no fast form", "Add its tokenizer.json to the folder")
    return backend, special_tokens(loaded.special_tokens_map)
