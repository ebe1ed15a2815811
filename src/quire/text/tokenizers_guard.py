"""The `tokenizers` library's calls, as quire makes them: its failures become ours, its panics too, and what a
stranger's tokenizer would do is tried before it serves. It doesn't know what a tokenizer is for.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import InputError, QuireError, StartupError

TEST_TEXT = "Pages, 12 naïve words 日本 😀\n"  # that is tried at start
TEST_SECONDS = 2.0
MAX_GROWTH = 1 << 12  # times that a tokenizer's replacements may lengthen a text
PANIC = "PanicException"  # of the library's language; derives from BaseException, and no module exports it


@contextmanager
def translate_errors(to_error: Callable[[str], QuireError], *passthrough: type[Exception]) -> Iterator[None]:
    """What the library raises becomes `to_error` of the reason; `passthrough` and quire's own errors stay."""
    try:
        yield
    except (QuireError, *passthrough):
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise to_error(" ".join(str(error).split())[:200] or type(error).__name__) from error


def errors_to_input_error(what: str) -> Any:
    """A context in which the library's failures are InputErrors; a TypeError is its answer to what isn't its type."""
    return translate_errors(lambda reason: InputError(f"{what}: {reason}"), TypeError, OverflowError)


@contextmanager
def errors_to_startup_error(what: str | Path) -> Iterator[None]:
    """A context in which the library's failures are StartupErrors. For the start: what it writes to descriptor 2 when
    it panics is left out."""
    remedy = "Download the file again"
    with (
        translate_errors(lambda reason: StartupError(f"{what} is not a readable tokenizer: {reason}", remedy)),
        _capture_stderr(),
    ):
        yield


@contextmanager
def _capture_stderr() -> Iterator[None]:
    """Write what comes to descriptor 2 at the end, unless the library panicked."""
    try:
        there = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    with tempfile.TemporaryFile() as held:
        try:
            os.dup2(held.fileno(), 2)
            yield
        except BaseException as error:
            cause: BaseException | None = error
            while cause is not None and type(cause).__name__ != PANIC:
                cause = cause.__cause__
            if cause is not None:
                held.truncate(0)
            raise
        finally:
            os.dup2(there, 2)
            os.close(there)
            held.seek(0)
            if said := held.read():
                os.write(2, said)


def encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids. As a batch of one, which other threads needn't wait for; and without offsets, in a fraction of the
    time. InputError for text that isn't valid Unicode."""
    try:
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    except TypeError as error:  # how the library says "a lone surrogate"
        raise InputError("text holds a lone surrogate, which is not valid Unicode") from error
    return ids


def check_encodes(backend: tokenizers.Tokenizer) -> None:
    """Encode and decode a word. StartupError if the library panics, or if it takes more than 2 s."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with translate_errors(InputError):
                backend.decode_batch([encode(backend, TEST_TEXT, True)])
        except InputError as error:  # a word without its unknown token is the word's fault
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
    """StartupError for replacements of replacements that make much of little, which no time limit would stop."""
    for part in (backend.normalizer, backend.decoder):
        growth = 1
        for step in _flatten_steps(json.loads(part.__getstate__())) if part is not None else ():
            if step.get("type") == "Replace":
                growth *= max(len(step["content"]), 1)
            if step.get("type") == "Prepend":
                growth += len(step["prepend"])
            if growth > MAX_GROWTH:
                raise StartupError(
                    f"the tokenizer's replacements lengthen a text more than {MAX_GROWTH} times", "Use another one"
                )


def _flatten_steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The steps of a sequence of sequences."""
    if step.get("type") != "Sequence":
        yield step
    for inner in step.get("normalizers", step.get("decoders", ())) if step.get("type") == "Sequence" else ():
        yield from _flatten_steps(inner)
