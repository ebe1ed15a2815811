"""Grammars of structured outputs, made by llguidance for one tokenizer and held by digest; and places in them.

llguidance is loaded with the first grammar. It compiles lazily and counts what it does: `limits` bound a grammar's
size, what a token may cost and the states that its lexer may have. What is left to chance is tried once, and not on the
engine's thread: some tokens are walked before a grammar is given to anybody.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import InputError
from quire.text.grammar_beginnings import Known, Room
from quire.text.grammar_source import place_of, source_of
from quire.text.grammar_tokens import Vocabulary
from quire.vocabulary.structured import ANY, NAME, Structured

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.text.tokenizer import Tokenizer

HELD = 128  # grammars; with their sources' characters bounded by MAX_SOURCE each
WALKS, WALKED = 3, 12  # tried before a grammar is accepted, and tokens of each
SECONDS = 0.5  # for the walks of one grammar
TOKEN_SECONDS = 0.05  # a token that takes longer would be felt by others
FEW = 8  # masks that are computed one after another, and all of them where cores are few: a mask takes microseconds,
# and threads that wait for a core take milliseconds
LIMITS = {
    "max_items_in_row": 2000, "initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000,
    "max_lexer_states": 20_000, "max_grammar_size": 20_000, "verbose_errors": False,
}  # fmt: skip


class Grammars:
    """Makes grammars over the vocabulary of `tokenizer`, padded to the model's `vocab_size`, that end with one of
    `eos_ids`. For any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._held: OrderedDict[bytes, tuple[LLMatcher, Known]] = OrderedDict()  # each at its beginning
        self._lock = threading.Lock()
        self._masker: Masker | None = None

    def get(self, asked: Structured) -> CompiledGrammar:
        """The grammar of a form of output: a held one, or a new one. InputError names what is wrong with it, and
        where."""
        masker = self._made_masker()
        if asked.kind == ANY:
            return CompiledGrammar(masker, None, None, asked)
        key = _key(asked)
        with self._lock:
            if (found := self._held.get(key)) is not None:
                self._held.move_to_end(key)
                return CompiledGrammar(masker, *found, asked)
        made = self._made(asked, masker), Known(Room())
        with self._lock:
            self._held[key] = made
            while len(self._held) > HELD:
                self._held.popitem(last=False)
        return CompiledGrammar(masker, *made, asked)

    def holds(self, asked: Structured) -> bool:
        """It costs nothing to get it."""
        return (asked.kind == ANY and self._masker is not None) or _key(asked) in self._held

    def _made(self, asked: Structured, masker: Masker) -> LLMatcher:
        text = source_of(asked, self.tokenizer)
        first = masker.matcher(text)
        if why := first.get_error() or masker.tried(first):
            raise InputError(f"{asked.kind}: {_short(why)}{place_of(asked, why)}", NAME)
        return first

    def _made_masker(self) -> Masker:
        with self._lock:
            if self._masker is None:
                self._masker = Masker(self.tokenizer, self.vocab_size, self.eos_ids)
            return self._masker


def _key(asked: Structured) -> bytes:
    return sha256(f"{asked.kind}\0{asked.source}".encode("utf-8", "surrogatepass")).digest()


def _short(why: str) -> str:
    """What llguidance says, on one line."""
    return " ".join(why.replace("<non-verbose/>", "").split())[:240]


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
            words = TokenizerWrapper(Vocabulary(tokenizer, vocab_size, min(eos_ids)))
            plain = LLTokenizer(words, n_vocab=vocab_size, eos_token=[*eos_ids], slices=[])
            # In two steps: other threads run between them.
            self.tokenizer: LLTokenizer = plain.with_slices(LLTokenizer.general_slices())
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{hint}: {_short(str(error))}", NAME) from error
        self.vocab_size, self.eos_ids, self.end = vocab_size, frozenset(eos_ids), min(eos_ids)
        self.words = -(-vocab_size // 32)
        self._matcher, self._limits = LLMatcher, LLParserLimits(**LIMITS)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._executor: LLExecutor | None = LLExecutor(min(cores // 2, 16)) if cores > FEW else None
        ends = np.zeros(32 * self.words, dtype=np.bool_)
        ends[list(eos_ids)] = True
        spoken = np.arange(32 * self.words) < vocab_size
        self.everything = np.packbits(spoken, bitorder="little").tobytes()
        self.unending = np.packbits(spoken & ~ends, bitorder="little").tobytes()  # all tokens but those that end

    def matcher(self, grammar: str) -> LLMatcher:
        """At the beginning of llguidance's own form of a grammar. Its error says why it can't be used."""
        return self._matcher(self.tokenizer, grammar, log_level=0, limits=self._limits)

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
                    return at.get_error().replace("NoExtensionBias", "") or "no text fulfils it"
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
            return [matcher.compute_bitmask()[: 4 * self.words] for matcher in matchers]
        size = 4 * self.words
        masks = np.empty((len(matchers), self.words), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)], masks.ctypes.data, size, len(matchers)
        )
        return [mask.tobytes() for mask in masks]


class CompiledGrammar:
    """A Grammar (see quire.vocabulary.structured). `first` is llguidance's, at its beginning, and `start` what is known
    there; None: anything goes."""

    def __init__(self, masker: Masker, first: LLMatcher | None, start: Known | None, asked: Structured) -> None:
        self.masker, self.asked, self._first, self._start = masker, asked, first, start

    def matcher(self) -> Place:
        """At its beginning, before its marker if it has one."""
        return Place(self.masker, None if self._first is None else self._first.deep_copy(), self._start, self.asked)

    def masks(self, matchers: Sequence[Any]) -> list[bytes]:
        """See Grammar. Of those that are at one place that is remembered one is computed."""
        found: list[bytes | None] = [place.known() for place in matchers]
        missing: dict[int, list[int]] = {}  # by what is common to them: Known, or nothing
        for i, mask in enumerate(found):
            if mask is None:
                missing.setdefault(id(matchers[i].at or matchers[i]), []).append(i)
        firsts = [alike[0] for alike in missing.values()]
        for alike, mask in zip(missing.values(), self.masker.fill([matchers[i].inner for i in firsts])):
            at, sound = matchers[alike[0]].at, not matchers[alike[0]].inner.is_error()
            for i in alike:
                found[i] = mask
                if at is not None and sound:
                    at.keep(mask)
        return [mask for mask in found if mask is not None]


class Place:
    """A Matcher (see quire.vocabulary.structured). `_queue` are tokens that must follow, in order; `_left` is how many
    thoughts may have; `at` is what is remembered here."""

    __slots__ = ("_after", "_begun", "_left", "_queue", "_recent", "at", "inner", "masker")

    def __init__(self, masker: Masker, inner: LLMatcher | None, start: Known | None, asked: Structured) -> None:
        self.masker, self.inner, self._after, self._left = masker, inner, asked.after, asked.budget
        self.at = start
        self._begun = not asked.after
        self._recent: deque[int] = deque(maxlen=len(asked.after) or 1)
        self._queue = asked.opening
        if self._begun:
            self._look()
        elif not self._queue and self._left == 0:
            self._queue = self._after

    def _think(self, token: int) -> None:
        """Go on before the marker, or behind it."""
        self._recent.append(token)
        if tuple(self._recent) == self._after:
            self._begun, self._queue = True, ()
            self._look()
        elif self._queue:
            self._queue = self._queue[1:]
        elif self._left:
            self._left -= 1
        if not self._begun and not self._queue and self._left == 0:
            self._queue = self._after

    def _look(self) -> None:
        if self.inner is None:
            return
        if self.at is not None and self.at.queue is not None:
            self._queue = self.at.queue
            return
        stopped = self.inner.is_stopped()
        self._queue = (self.masker.end,) if stopped else tuple(self.inner.compute_ff_tokens())
        if self.at is not None:
            self.at.queue = self._queue

    def accept(self, token: int) -> str:
        """See Matcher."""
        if not self._begun:
            self._think(token)
            return ""
        if self.inner is None:
            return ""
        if token in self.masker.eos_ids:
            return "" if self.inner.is_accepting() else f"token {token} ends the output before its grammar does"
        if not self.inner.try_consume_tokens([token]):
            return f"the grammar can't go on: {_short(self.inner.get_error())}"
        if self.at is not None:
            self.at = self.at.then(token)
        if self._queue[:1] == (token,) and len(self._queue) > 1:
            self._queue = self._queue[1:]
        else:
            self._look()
        return f"the grammar can't go on: {_short(self.inner.get_error())}" if self.inner.is_error() else ""

    def forced(self) -> tuple[int, ...]:
        """See Matcher."""
        return self._queue

    def free(self) -> bool:
        """See Matcher."""
        return self._begun and self.inner is None

    def known(self) -> bytes | None:
        """The mask, where it needn't be computed."""
        if not self._queue:
            if not self._begun:
                return self.masker.unending
            return self.masker.everything if self.inner is None else self.at.mask if self.at is not None else None
        mask, token = bytearray(4 * self.masker.words), self._queue[0]
        mask[token // 8] = 1 << token % 8
        return bytes(mask)

    def copy(self) -> Place:
        """See Matcher."""
        other = Place.__new__(Place)
        other.masker, other.inner = self.masker, None if self.inner is None else self.inner.deep_copy()
        other._after, other._left, other._begun, other.at = self._after, self._left, self._begun, self.at
        other._queue, other._recent = self._queue, self._recent.copy()
        return other
