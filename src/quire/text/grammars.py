"""Grammars of structured outputs, made by llguidance for one tokenizer and held by digest; and places in them.

llguidance is loaded with the first grammar. It compiles lazily and counts what it does: `limits` bound a grammar's
size, what a token may cost and the states that its lexer may have. Making one isn't bounded so, and a process that is
makes each first (grammar_trials.py). What is left to chance is tried once, and not on the engine's thread: some tokens
are walked before a grammar is given to anybody.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import InputError
from quire.text.grammar_complaints import NoGrammar, closed_patterns, complaint, large_bounds, short, without
from quire.text.grammar_counted import LEAST, Counted
from quire.text.grammar_places import Place, Shared
from quire.text.grammar_source import source_of
from quire.text.grammar_strings import Tokens, strings_of
from quire.text.grammar_tokens import Vocabulary
from quire.text.grammar_trials import TooComplex, Trials
from quire.vocabulary.structured import ANY, NAME, Structured, read_json

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.text.tokenizer import Tokenizer

HELD = 128  # grammars; with their sources' characters bounded by MAX_SOURCE each
WALKS, WALKED = 3, 12  # tried before a grammar is accepted, and tokens of each
SECONDS = 0.5  # for the walks of one grammar
TOKEN_SECONDS = 0.05  # a token that takes longer would be felt by others
NO_TEXT = "no text fulfils it"
MAX_LOST = 8  # keywords that a form may do without: each takes a trial
FEW = 8  # masks that are computed one after another, and all of them where cores are few: a mask takes microseconds,
# and threads that wait for a core take milliseconds
SLICES = (r"[\x20\x0A\x0D\x09]+", *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (10, 12, 14, 16, 20)),
          r'[^"\\\x00-\x1F\x7F]+')  # fmt: skip
"""Tokens that llguidance need not walk through where all texts of such a form may follow: its own `general_slices`
with other lengths, for strings of counted characters that have less than 30 left."""
LIMITS = {
    "max_items_in_row": 2000, "initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000,
    "max_lexer_states": 20_000, "max_grammar_size": 20_000, "verbose_errors": False,
}  # fmt: skip


class Grammars:
    """Makes grammars over the vocabulary of `tokenizer`, padded to the model's `vocab_size`, that end with one of
    `eos_ids`. `trusted` are forms that were tried elsewhere. For any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], *, trusted: bool = False) -> None:
        self.tokenizer, self.vocab_size, self.eos_ids, self.trusted = tokenizer, vocab_size, tuple(eos_ids), trusted
        self._held: OrderedDict[bytes, Shared] = OrderedDict()
        self._nearest: OrderedDict[bytes, tuple[Structured, tuple[str, ...]]] = OrderedDict()
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._masker: Masker | None = None
        self._trials = Trials()

    def get(self, asked: Structured) -> CompiledGrammar:
        """The grammar of a form of output: a held one, or a new one. InputError names what is wrong with it, and
        where; Overloaded if that can't be found out now."""
        masker = self._made_masker()
        if (held := self.held(asked)) is not None:
            return held
        key = _key(asked)
        with self._lock:
            found = self._held.get(key)
        made = self._made(asked, masker) if found is None else found.sound()
        with self._lock:
            self._held[key] = made
            while len(self._held) > HELD:
                self._held.popitem(last=False)
        return CompiledGrammar(masker, made, asked)

    def nearest(self, asked: Structured) -> tuple[Structured, tuple[str, ...]]:
        """Return the form without the keywords that no grammar supports, and their places. InputError if that are more
        than MAX_LOST, or if there is no grammar for another reason."""
        key = _key(asked)
        with self._lock:
            found = self._nearest.get(key)
        if found is not None:
            return found
        form, lost = asked, list[str]()
        while True:
            try:
                self.get(form)
            except NoGrammar as error:
                less = without(form, error.place)
                if less is None or len(lost) == MAX_LOST:
                    raise
                lost.append(error.place)
                form = less
            else:
                break
        with self._lock:
            self._nearest[key] = form, tuple(lost)
            while len(self._nearest) > HELD:
                self._nearest.popitem(last=False)
        return form, tuple(lost)

    def held(self, asked: Structured) -> CompiledGrammar | None:
        """The grammar, if it costs nothing to get it."""
        masker = self._masker
        if masker is None or asked.kind == ANY:
            return None if masker is None else CompiledGrammar(masker, None, asked)
        key = _key(asked)
        with self._lock:
            found = self._held.get(key)
            if found is None or found.spoiled:
                return None
            self._held.move_to_end(key)
        return CompiledGrammar(masker, found, asked)

    def holds(self, asked: Structured) -> bool:
        """It costs nothing to get it."""
        return self.held(asked) is not None

    def close(self) -> None:
        """End the process that tries grammars; none can be made any more."""
        self._trials.close()

    def _made(self, asked: Structured, masker: Masker) -> Shared:
        source = source_of(asked, self.tokenizer)
        if not self.trusted:
            try:
                why = self._trials.why_not(source, masker.about)
            except TooComplex as error:
                raise InputError(f"{asked.kind}: it is too complex: {error}", NAME) from error
            if why:
                raise complaint(asked, source, why)
        made = Shared(masker, source, strings_of(asked, masker.spoken))
        if why := made.first.get_error() or masker.tried(made.first):
            raise complaint(asked, source, why)
        if asked.kind == "json":
            _check_promises(read_json(asked), masker)
        return made

    def _made_masker(self) -> Masker:
        with self._making:
            if self._masker is None:
                self._masker = Masker(self.tokenizer, self.vocab_size, self.eos_ids)
            return self._masker


def _check_promises(schema: Any, masker: Masker) -> None:
    """NoGrammar for what llguidance makes a grammar of that is another than the schema's: one in which a comma may
    stand before no further member, and one of integers with a bound that was rounded."""
    for place, lark in closed_patterns(schema):
        if masker.tried(masker.matcher(masker.lark(lark))) == NO_TEXT:
            why = "json: all names that match patternProperties are in properties: say there what they are"
            raise NoGrammar(f"{why}, at {place}", place)
    for place, (key, bound) in large_bounds(schema):
        if not masker.exact(key, bound):
            raise NoGrammar(f"json: {key} is {bound}, and integers so large are not bounded exactly, at {place}", place)


def _key(asked: Structured) -> bytes:
    return sha256(f"{asked.kind}\0{asked.source}".encode("utf-8", "surrogatepass")).digest()


class Masker:
    """llguidance over one vocabulary: its tokenizer, its limits, its threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        try:
            from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise InputError("structured output needs llguidance: pip install 'quire[structured]'", NAME) from error
        if not eos_ids:
            raise InputError("structured output needs an end token, and this model has none", NAME)
        hint = "structured output can't be had with this tokenizer"
        try:
            self._words = words = Vocabulary(tokenizer, vocab_size, eos_ids)
            plain = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=[*eos_ids], slices=[])
            # In two steps: other threads run between them.
            self.tokenizer: LLTokenizer = plain.with_slices(list(SLICES))
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{hint}: {short(str(error))}", NAME) from error
        self.vocab_size, self.eos_ids, self.end = vocab_size, frozenset(eos_ids), min(eos_ids)
        special = {id: words.tokens[id].hex() for id in words.special_token_ids}
        self.about = {"size": vocab_size, "ends": [*eos_ids], "special": special, "limits": LIMITS}  # for trials
        self.words = -(-vocab_size // 32)
        self.size = 4 * self.words  # bytes of a mask
        self._matcher, self._limits = LLMatcher, LLParserLimits(**LIMITS)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._executor: LLExecutor | None = LLExecutor(min(cores // 2, 16)) if cores > FEW else None
        self.one_by_one = self._executor is None
        self.probes = _probes(words)
        self.spoken = Tokens(words, eos_ids)
        self.plain = self.spoken.plain
        self.counted = Counted(words, self.spoken, eos_ids) if vocab_size >= LEAST else None
        ends = np.zeros(32 * self.words, dtype=np.bool_)
        ends[list(eos_ids)] = True
        spoken = np.arange(32 * self.words) < vocab_size
        self.everything = np.packbits(spoken, bitorder="little").tobytes()
        self.unending = np.packbits(spoken & ~ends, bitorder="little").tobytes()  # all tokens but those that end
        if not self._as_supposed():
            self.spoken.closing = [None, None]  # nothing is known of any strings

    def matcher(self, grammar: str, tokenizer: LLTokenizer | None = None) -> LLMatcher:
        """At the beginning of llguidance's own form of a grammar. Its error says why it can't be used."""
        return self._matcher(tokenizer or self.tokenizer, grammar, log_level=0, limits=self._limits)

    def lark(self, grammar: str) -> str:
        """llguidance's own form of a Lark grammar."""
        return str(self._matcher.grammar_from_lark(grammar))

    def exact(self, key: str, bound: int) -> bool:
        """Whether integers are bounded just there: the last one that is allowed is, and the next one isn't."""
        inside = bound + {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(key, 0)
        outside = inside + (-1 if key in ("minimum", "exclusiveMinimum") else 1)
        schema = json.dumps({"type": "integer", key: bound})
        return self._says(schema, str(inside)) and not self._says(schema, str(outside))

    def _says(self, schema: str, text: str) -> bool:
        """Whether `text` is what a schema asks for."""
        place = self.matcher(self._matcher.grammar_from_json_schema(schema))
        tokens = self._words(text)
        return place.try_consume_tokens(tokens) == len(tokens) and place.is_accepting()

    def _as_supposed(self) -> bool:
        """Whether strings are, for this llguidance, what grammar_strings.py takes them for: plain tokens stand in free
        ones, and in counted ones those fit that have no more characters than are left."""
        quote, _ = self.spoken.closing
        if quote is None:
            return True
        free = self.matcher(self._matcher.grammar_from_json_schema('{"type": "string"}'))
        free.consume_token(quote)
        plain = np.packbits(np.frombuffer(self.plain, np.bool_), bitorder="little")
        if (plain & ~np.frombuffer(free.compute_bitmask(), np.uint8)[: len(plain)]).any():
            return False
        if self.counted is None:
            return True
        two = self._matcher.grammar_from_json_schema('{"type": "string", "maxLength": 2}')
        inner, brief = self.matcher(two), self.matcher(two, self.counted.tokenizer)
        inner.consume_token(quote)
        return self.counted.tell(brief, [quote]) and (
            self.counted.mask(brief, 2) == inner.compute_bitmask()[: self.size]
        )

    def tried(self, first: LLMatcher) -> str:
        """Why a grammar can't be used that compiled: no text fulfils it, or it grows too complex or slow within some
        tokens. First, last and middle ones that may follow are taken."""
        end = time.thread_time() + SECONDS  # of work, however busy the machine is
        for walk in range(WALKS):
            at = first.deep_copy()
            for _ in range(WALKED):
                began = time.thread_time()
                allowed = self.allowed(at.compute_bitmask())
                if at.is_error() or not len(allowed):
                    return short(at.get_error().replace("NoExtensionBias", "")) or NO_TEXT
                spoken = [token for token in allowed.tolist() if token not in self.eos_ids]
                if not spoken:
                    break
                at.try_consume_tokens([spoken[(len(spoken) - 1) * walk // (WALKS - 1)]])
                at.compute_ff_tokens()
                if at.is_error():
                    return at.get_error()
                taken = time.thread_time() - began
                if taken > TOKEN_SECONDS:
                    return f"it is too complex: one token takes {1e3 * taken:.0f} ms, at most {1e3 * TOKEN_SECONDS:.0f}"
                if began + taken > end:
                    return f"it is too complex: a few tokens take more than {SECONDS} s"
        return ""

    def allowed(self, mask: bytes) -> np.ndarray:
        """The tokens of a mask."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self.vocab_size])

    def fill(self, matchers: Sequence[LLMatcher]) -> list[bytes]:
        """The masks of all of them, by several threads if they are many. Other threads of Python go on."""
        if self._executor is None or len(matchers) <= FEW:
            return [matcher.compute_bitmask()[: self.size] for matcher in matchers]
        masks = np.empty((len(matchers), self.words), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)], masks.ctypes.data, self.size, len(matchers)
        )
        return [mask.tobytes() for mask in masks]


def _probes(words: Vocabulary) -> list[tuple[int, int, int, int]]:
    """Two letters and two digits: where in a mask the bits of both are, as a byte's number and a bit of it. Where both
    of a pair may follow, no byte must, and so no token."""
    found = [[words.find(one), words.find(other)] for one, other in ((b"a", b"b"), (b"1", b"2"))]
    pairs = [[(id // 8, 1 << id % 8) for id in pair if id is not None] for pair in found]
    return [(*pair[0], *pair[1]) for pair in pairs if len(pair) == 2]


class CompiledGrammar:
    """A Grammar (see quire.vocabulary.structured). Without `shared` anything goes."""

    def __init__(self, masker: Masker, shared: Shared | None, asked: Structured) -> None:
        self.masker, self.asked, self.shared = masker, asked, shared

    def matcher(self) -> Place:
        """At its beginning, before its marker if it has one. On the engine's thread, which waits for no grammar."""
        shared = None if self.shared is None else self.shared.sound(patient=False)
        return Place(self.masker, shared, self.asked)

    def masks(self, matchers: Sequence[Any]) -> list[bytes]:
        """See Grammar. Of those that are at one place that is remembered one is computed. Where one spoils the lexer,
        the others' are computed again."""
        found: list[Any] = [place.mask or place.known() for place in matchers]
        missing = [i for i, mask in enumerate(found) if mask is None]
        for i in missing:
            matchers[i].renew()
        while missing:
            alike: dict[int, list[int]] = {}  # by what is common to them: Known, or nothing
            for i in missing:
                alike.setdefault(id(matchers[i].at or matchers[i]), []).append(i)
            firsts = [matchers[some[0]] for some in alike.values()]
            masks = self.masker.fill([place.inner for place in firsts])
            broken = [place.fails() for place in firsts]
            for place, some, mask, fails in zip(firsts, alike.values(), masks, broken):
                for i in some:
                    found[i] = matchers[i].mask = mask
                    if place.at is not None and not fails and not place.shared.spoiled:
                        place.at.keep(mask)
            missing = [i for i in missing if matchers[i].renew()]
        return found
