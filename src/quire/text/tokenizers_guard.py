"""Guarded calls of the `tokenizers` library: its errors and panics become quire's errors, and an untrusted tokenizer is
tested before it serves.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import InputError, QuireError, StartupError

TEST_TEXT = "Pages, 12 naïve words 日本 😀\n"  # encoded at startup
TEST_SECONDS = 2.0
MAX_GROWTH = 1 << 12  # factor by which a tokenizer's replacements may lengthen a text
PANIC = "PanicException"  # a Rust panic; derives from BaseException, and no module exports it


@contextmanager
def translate_errors(to_error: Callable[[str], QuireError], *passthrough: type[Exception]) -> Iterator[None]:
    """Convert the library's exceptions with `to_error`, given the reason. `passthrough` and quire's own errors pass
    unchanged."""
    unchanged: tuple[type[Exception], ...] = (QuireError, *passthrough)
    try:
        yield
    except unchanged:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise to_error(" ".join(str(error).split())[:200] or type(error).__name__) from error


def errors_to_input_error(what: str) -> AbstractContextManager[None]:
    """Return a context that converts the library's errors to InputError. TypeError and OverflowError pass: they mean an
    argument of a wrong type."""
    return translate_errors(lambda reason: InputError(f"{what}: {reason}"), TypeError, OverflowError)


@contextmanager
def errors_to_startup_error(what: str | Path) -> Iterator[None]:
    """Convert the library's errors to StartupError. For startup: what a panic writes to descriptor 2 is dropped."""
    remedy = "Download the file again"
    with (
        translate_errors(lambda reason: StartupError(f"{what} is not a readable tokenizer: {reason}", remedy)),
        _capture_stderr(),
    ):
        yield


@contextmanager
def _capture_stderr() -> Iterator[None]:
    """Buffer writes to descriptor 2 and write them at the end, unless the library panicked."""
    try:
        stderr = os.dup(2)
    except OSError:  # descriptor 2 is closed
        yield
        return
    with tempfile.TemporaryFile() as buffer:
        try:
            os.dup2(buffer.fileno(), 2)
            yield
        except BaseException as error:
            cause: BaseException | None = error
            while cause is not None and type(cause).__name__ != PANIC:
                cause = cause.__cause__
            if cause is not None:
                buffer.truncate(0)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            buffer.seek(0)
            if text := buffer.read():
                os.write(2, text)


def encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the token ids of `text`. Uses a batch of one, which releases the GIL, and the variant without offsets,
    which is several times faster. Raise InputError for invalid Unicode."""
    try:
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError as error:  # raised for a lone surrogate
        raise InputError("text holds a lone surrogate, which is not valid Unicode") from error
    return ids


def check_encodes(backend: tokenizers.Tokenizer) -> None:
    """Encode and decode a text. Raise StartupError if the library panics or takes more than 2 s."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with translate_errors(InputError):
                backend.decode_batch([encode(backend, TEST_TEXT, True)])
        except InputError as error:  # the vocabulary lacks an unknown token: not a fault
            if type(error.__cause__).__name__ == PANIC:
                failed.append(error)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="quire-tokenizer", daemon=True)
    thread.start()
    thread.join(TEST_SECONDS)
    if thread.is_alive():
        raise StartupError(f"the tokenizer takes more than {TEST_SECONDS:g} s for a word", "Use another --tokenizer")
    if failed:
        raise StartupError(f"the tokenizer fails at a word: {failed[0]}", "Download the file again") from failed[0]


def check_replacement_growth(backend: tokenizers.Tokenizer) -> None:
    """Raise StartupError for nested replacements that lengthen a text without bound, which no time limit would stop."""
    for part in (backend.normalizer, backend.decoder):
        growth = 1
        for step in flatten_steps(part):
            if step.get("type") == "Replace":
                growth *= max(len(step["content"]), 1)
            if step.get("type") == "Prepend":
                growth += len(step["prepend"])
            if growth > MAX_GROWTH:
                raise StartupError(
                    f"the tokenizer's replacements lengthen a text more than {MAX_GROWTH} times", "Use another one"
                )


def flatten_steps(part: Any) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or decoder, those of nested sequences in their place."""

    def flat(step: dict[str, Any]) -> list[dict[str, Any]]:
        if step.get("type") != "Sequence":
            return [step]
        return [one for inner in step.get("normalizers", step.get("decoders", ())) for one in flat(inner)]

    return [] if part is None else flat(json.loads(part.__getstate__()))
