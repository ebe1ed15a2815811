"""Compilation of structured outputs to grammars with llguidance, for one tokenizer, with a cache.

llguidance is loaded with the first grammar. It compiles lazily, with limits on a grammar's size, the cost of a token
and the lexer's states. Compilation itself has no such limits, so a separate process compiles each grammar first
(trial_process.py). Then some tokens are walked to test the limits, not on the engine's thread, before a grammar is
used.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import InputError
from quire.protocol.structured_output import ANY_OUTPUT, PARAM_NAME, Structured, parse_source
from quire.text.grammars.backend import NO_TEXT, GrammarBackend
from quire.text.grammars.errors import (
    UnsupportedGrammar,
    closed_patterns,
    drop_keyword,
    large_bounds,
    unsupported_error,
)
from quire.text.grammars.matcher import GrammarMatcher, SharedGrammar
from quire.text.grammars.source import make_grammar_source
from quire.text.grammars.strings import make_string_detector
from quire.text.grammars.trial_process import GrammarTooComplex, TrialProcess

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

T = TypeVar("T")
MAX_CACHED = 128  # grammars; the length of each source is bounded by MAX_SOURCE_CHARS
MAX_DROPPED = 8  # keywords that may be dropped from a form; each takes a compilation


class GrammarCompiler:
    """Compiles grammars over the vocabulary of `tokenizer`, padded to the model's `vocab_size`, that end with one of
    `eos_ids`. `trusted`: the forms were checked by another process. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], *, trusted: bool = False) -> None:
        self.tokenizer, self.vocab_size, self.eos_ids, self.trusted = tokenizer, vocab_size, tuple(eos_ids), trusted
        self._cache: OrderedDict[bytes, SharedGrammar] = OrderedDict()
        self._nearest_cache: OrderedDict[bytes, tuple[Structured, tuple[str, ...]]] = OrderedDict()
        self._lock, self._backend_lock = threading.Lock(), threading.Lock()
        self._backend: GrammarBackend | None = None
        self._trial_process = TrialProcess()

    def get(self, structured: Structured) -> CompiledGrammar:
        """Return the grammar of an output form, cached or compiled. Raise InputError with what is wrong and where, or
        Overloaded if that cannot be checked now."""
        backend = self._get_backend()
        if (grammar := self.get_cached(structured)) is not None:
            return grammar
        key = _cache_key(structured)
        with self._lock:
            cached = self._cache.get(key)
        shared = self._compile(structured, backend) if cached is None else cached.usable()
        self._remember(self._cache, key, shared)
        return CompiledGrammar(backend, shared, structured)

    def _remember(self, cache: OrderedDict[bytes, T], key: bytes, value: T) -> None:
        with self._lock:
            cache[key] = value
            while len(cache) > MAX_CACHED:
                cache.popitem(last=False)

    def get_cached(self, structured: Structured) -> CompiledGrammar | None:
        """Return the grammar if it is cached and usable, else None."""
        backend = self._backend
        if backend is None or structured.kind == ANY_OUTPUT:
            return None if backend is None else CompiledGrammar(backend, None, structured)
        key = _cache_key(structured)
        with self._lock:
            shared = self._cache.get(key)
            if shared is None or shared.lexer_exhausted:
                return None
            self._cache.move_to_end(key)
        return CompiledGrammar(backend, shared, structured)

    def is_cached(self, structured: Structured) -> bool:
        """Return True if `get_cached` returns a grammar."""
        return self.get_cached(structured) is not None

    def nearest_supported(self, structured: Structured) -> tuple[Structured, tuple[str, ...]]:
        """Return the form without the keywords that no grammar supports, and their pointers. Raise InputError if there
        are more than MAX_DROPPED, or if there is no grammar for another reason."""
        key = _cache_key(structured)
        with self._lock:
            cached = self._nearest_cache.get(key)
        if cached is not None:
            return cached
        form, dropped = structured, list[str]()
        while True:
            try:
                self.get(form)
                break
            except UnsupportedGrammar as error:
                less = drop_keyword(form, error.pointer)
                if less is None or len(dropped) == MAX_DROPPED:
                    raise
                dropped.append(error.pointer)
                form = less
        self._remember(self._nearest_cache, key, (form, tuple(dropped)))
        return form, tuple(dropped)

    def close(self) -> None:
        """End the trial process. No grammar can be compiled afterwards."""
        self._trial_process.close()

    def _compile(self, structured: Structured, backend: GrammarBackend) -> SharedGrammar:
        source = make_grammar_source(structured, self.tokenizer)
        if not self.trusted:
            try:
                why = self._trial_process.check_grammar(source, backend.description)
            except GrammarTooComplex as error:
                raise InputError(f"{structured.kind}: it is too complex: {error}", PARAM_NAME) from error
            if why:
                raise unsupported_error(structured, source, why)
        shared = SharedGrammar(backend, source, make_string_detector(structured, backend.string_tokens))
        if why := shared.initial_matcher.get_error() or backend.probe(shared.initial_matcher):
            raise unsupported_error(structured, source, why)
        if structured.kind == "json":
            _check_faithful(parse_source(structured), backend)
        return shared

    def _get_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = GrammarBackend(self.tokenizer, self.vocab_size, self.eos_ids)
            return self._backend


def _check_faithful(schema: Any, backend: GrammarBackend) -> None:
    """Raise UnsupportedGrammar where llguidance's grammar differs from the schema: it may allow a comma without a
    member after it, or round a bound of integers."""
    for pointer, lark in closed_patterns(schema):
        if backend.probe(backend.new_matcher(backend.from_lark(lark))) == NO_TEXT:
            why = "json: all names that match patternProperties are in properties: say there what they are"
            raise UnsupportedGrammar(f"{why}, at {pointer}", pointer)
    for pointer, (key, bound) in large_bounds(schema):
        if not backend.bounds_exactly(key, bound):
            raise UnsupportedGrammar(
                f"json: {key} is {bound}, and integers so large are not bounded exactly, at {pointer}", pointer
            )


def _cache_key(structured: Structured) -> bytes:
    return sha256(f"{structured.kind}\0{structured.source}".encode("utf-8", "surrogatepass")).digest()


class CompiledGrammar:
    """A compiled grammar (see quire.protocol.structured_output.Grammar). Without `shared` any output is allowed."""

    def __init__(self, backend: GrammarBackend, shared: SharedGrammar | None, structured: Structured) -> None:
        self.backend, self.structured, self.shared = backend, structured, shared

    def new_matcher(self) -> GrammarMatcher:
        """Return a matcher at the start, before the marker if there is one. Called on the engine's thread, so it does
        not wait for a slow compilation."""
        shared = None if self.shared is None else self.shared.usable(may_compile=False)
        return GrammarMatcher(self.backend, shared, self.structured)

    def compute_masks(self, matchers: Sequence[Any]) -> list[bytes]:
        """See the protocol. For matchers at the same node of the prefix tree one mask is computed. If one exhausts the
        lexer, the masks of the others are computed again."""
        result: list[Any] = [matcher.mask or matcher.cached_mask() for matcher in matchers]
        missing = [i for i, mask in enumerate(result) if mask is None]
        for i in missing:
            matchers[i].renew()
        while missing:
            groups: dict[int, list[int]] = {}  # by prefix node, or one by one
            for i in missing:
                groups.setdefault(id(matchers[i].node or matchers[i]), []).append(i)
            firsts = [matchers[group[0]] for group in groups.values()]
            masks = self.backend.compute_masks([first.matcher for first in firsts])
            failures = [first.check_failed() for first in firsts]
            for first, group, mask, failed in zip(firsts, groups.values(), masks, failures):
                for i in group:
                    result[i] = matchers[i].mask = mask
                    if first.node is not None and not failed and not first.shared.lexer_exhausted:
                        first.node.remember_mask(mask)
            missing = [i for i in missing if matchers[i].renew()]
        return result
