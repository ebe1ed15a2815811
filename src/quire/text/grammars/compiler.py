"""Grammars of structured outputs, made by llguidance for one tokenizer and held by digest; and places in them.

llguidance is loaded with the first grammar. It compiles lazily and counts what it does: `limits` bound a grammar's
size, what a token may cost and the states that its lexer may have. Making one isn't bounded so, and a process that is
makes each first (grammar_trials.py). What is left to chance is tried once, and not on the engine's thread: some tokens
are walked before a grammar is given to anybody.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

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

MAX_CACHED = 128  # grammars; with their sources' characters bounded by MAX_SOURCE each
MAX_DROPPED = 8  # keywords that a form may do without: each takes a trial


class GrammarCompiler:
    """Makes grammars over the vocabulary of `tokenizer`, padded to the model's `vocab_size`, that end with one of
    `eos_ids`. `trusted` are forms that were tried elsewhere. For any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], *, trusted: bool = False) -> None:
        self.tokenizer, self.vocab_size, self.eos_ids, self.trusted = tokenizer, vocab_size, tuple(eos_ids), trusted
        self._cache: OrderedDict[bytes, SharedGrammar] = OrderedDict()
        self._nearest_cache: OrderedDict[bytes, tuple[Structured, tuple[str, ...]]] = OrderedDict()
        self._lock, self._backend_lock = threading.Lock(), threading.Lock()
        self._backend: GrammarBackend | None = None
        self._trial_process = TrialProcess()

    def get(self, structured: Structured) -> CompiledGrammar:
        """The grammar of a form of output: a held one, or a new one. InputError names what is wrong with it, and
        where; Overloaded if that can't be found out now."""
        masker = self._get_backend()
        if (held := self.get_cached(structured)) is not None:
            return held
        key = _cache_key(structured)
        with self._lock:
            found = self._cache.get(key)
        made = self._compile(structured, masker) if found is None else found.usable()
        with self._lock:
            self._cache[key] = made
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return CompiledGrammar(masker, made, structured)

    def nearest_supported(self, structured: Structured) -> tuple[Structured, tuple[str, ...]]:
        """Return the form without the keywords that no grammar supports, and their places. InputError if that are more
        than MAX_LOST, or if there is no grammar for another reason."""
        key = _cache_key(structured)
        with self._lock:
            found = self._nearest_cache.get(key)
        if found is not None:
            return found
        form, lost = structured, list[str]()
        while True:
            try:
                self.get(form)
            except UnsupportedGrammar as error:
                less = drop_keyword(form, error.pointer)
                if less is None or len(lost) == MAX_DROPPED:
                    raise
                lost.append(error.pointer)
                form = less
            else:
                break
        with self._lock:
            self._nearest_cache[key] = form, tuple(lost)
            while len(self._nearest_cache) > MAX_CACHED:
                self._nearest_cache.popitem(last=False)
        return form, tuple(lost)

    def get_cached(self, structured: Structured) -> CompiledGrammar | None:
        """The grammar, if it costs nothing to get it."""
        masker = self._backend
        if masker is None or structured.kind == ANY_OUTPUT:
            return None if masker is None else CompiledGrammar(masker, None, structured)
        key = _cache_key(structured)
        with self._lock:
            found = self._cache.get(key)
            if found is None or found.lexer_exhausted:
                return None
            self._cache.move_to_end(key)
        return CompiledGrammar(masker, found, structured)

    def is_cached(self, structured: Structured) -> bool:
        """It costs nothing to get it."""
        return self.get_cached(structured) is not None

    def close(self) -> None:
        """End the process that tries grammars; none can be made any more."""
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
        made = SharedGrammar(backend, source, make_string_detector(structured, backend.string_tokens))
        if why := made.initial_matcher.get_error() or backend.probe(made.initial_matcher):
            raise unsupported_error(structured, source, why)
        if structured.kind == "json":
            _check_faithful(parse_source(structured), backend)
        return made

    def _get_backend(self) -> GrammarBackend:
        with self._backend_lock:
            if self._backend is None:
                self._backend = GrammarBackend(self.tokenizer, self.vocab_size, self.eos_ids)
            return self._backend


def _check_faithful(schema: Any, backend: GrammarBackend) -> None:
    """NoGrammar for what llguidance makes a grammar of that is another than the schema's: one in which a comma may
    stand before no further member, and one of integers with a bound that was rounded."""
    for place, lark in closed_patterns(schema):
        if backend.probe(backend.new_matcher(backend.from_lark(lark))) == NO_TEXT:
            why = "json: all names that match patternProperties are in properties: say there what they are"
            raise UnsupportedGrammar(f"{why}, at {place}", place)
    for place, (key, bound) in large_bounds(schema):
        if not backend.bounds_exactly(key, bound):
            raise UnsupportedGrammar(
                f"json: {key} is {bound}, and integers so large are not bounded exactly, at {place}", place
            )


def _cache_key(structured: Structured) -> bytes:
    return sha256(f"{structured.kind}\0{structured.source}".encode("utf-8", "surrogatepass")).digest()


class CompiledGrammar:
    """A Grammar (see quire.protocol.structured_output). Without `shared` anything goes."""

    def __init__(self, backend: GrammarBackend, shared: SharedGrammar | None, structured: Structured) -> None:
        self.backend, self.structured, self.shared = backend, structured, shared

    def new_matcher(self) -> GrammarMatcher:
        """At its beginning, before its marker if it has one. On the engine's thread, which waits for no grammar."""
        shared = None if self.shared is None else self.shared.usable(may_compile=False)
        return GrammarMatcher(self.backend, shared, self.structured)

    def compute_masks(self, matchers: Sequence[Any]) -> list[bytes]:
        """See Grammar. Of those that are at one place that is remembered one is computed. Where one spoils the lexer,
        the others' are computed again."""
        found: list[Any] = [place.mask or place.cached_mask() for place in matchers]
        missing = [i for i, mask in enumerate(found) if mask is None]
        for i in missing:
            matchers[i].renew()
        while missing:
            alike: dict[int, list[int]] = {}  # by what is common to them: Known, or nothing
            for i in missing:
                alike.setdefault(id(matchers[i].node or matchers[i]), []).append(i)
            firsts = [matchers[some[0]] for some in alike.values()]
            masks = self.backend.compute_masks([place.matcher for place in firsts])
            broken = [place.check_failed() for place in firsts]
            for place, some, mask, fails in zip(firsts, alike.values(), masks, broken):
                for i in some:
                    found[i] = matchers[i].mask = mask
                    if place.node is not None and not fails and not place.shared.lexer_exhausted:
                        place.node.remember_mask(mask)
            missing = [i for i in missing if matchers[i].renew()]
        return found
