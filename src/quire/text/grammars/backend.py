"""Grammars of llguidance, within its limits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.errors import InputError
from quire.protocol.structured_output import PARAM_NAME
from quire.text.grammars.counted_strings import MIN_VOCAB, CountedStrings
from quire.text.grammars.errors import (
    one_line,
)
from quire.text.grammars.strings import StringTokens
from quire.text.grammars.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.text.tokenizer import Tokenizer

PROBE_WALKS, PROBE_TOKENS = 3, 12  # tried before a grammar is accepted, and tokens of each
PROBE_SECONDS = 0.5  # for the walks of one grammar
TOKEN_SECONDS = 0.05  # a token that takes longer would be felt by others
NO_TEXT = "no text fulfils it"
# masks that are computed one after another, and all of them where cores are few: a mask takes microseconds,
MAX_SERIAL_MASKS = 8
# and threads that wait for a core take milliseconds
SLICES = (r"[\x20\x0A\x0D\x09]+", *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (10, 12, 14, 16, 20)),
          r'[^"\\\x00-\x1F\x7F]+')  # fmt: skip
"""Tokens that llguidance need not walk through where all texts of such a form may follow: its own `general_slices`
with other lengths, for strings of counted characters that have less than 30 left."""
PARSER_LIMITS = {
    "max_items_in_row": 2000, "initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000,
    "max_lexer_states": 20_000, "max_grammar_size": 20_000, "verbose_errors": False,
}  # fmt: skip


class GrammarBackend:
    """llguidance over one vocabulary: its tokenizer, its limits, its threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        try:
            from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise InputError(
                "structured output needs llguidance: pip install 'quire[structured]'", PARAM_NAME
            ) from error
        if not eos_ids:
            raise InputError("structured output needs an end token, and this model has none", PARAM_NAME)
        hint = "structured output can't be had with this tokenizer"
        try:
            self._vocabulary = words = GrammarVocabulary(tokenizer, vocab_size, eos_ids)
            plain = LLTokenizer(TokenizerWrapper(words), n_vocab=vocab_size, eos_token=[*eos_ids], slices=[])
            # In two steps: other threads run between them.
            self.tokenizer: LLTokenizer = plain.with_slices(list(SLICES))
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{hint}: {one_line(str(error))}", PARAM_NAME) from error
        self.vocab_size, self.eos_ids, self.eos_id = vocab_size, frozenset(eos_ids), min(eos_ids)
        special = {id: words.tokens[id].hex() for id in words.special_token_ids}
        self.description = {
            "size": vocab_size,
            "ends": [*eos_ids],
            "special": special,
            "limits": PARSER_LIMITS,
        }  # for trials
        self.mask_words = -(-vocab_size // 32)
        self.mask_bytes = 4 * self.mask_words  # bytes of a mask
        self._matcher, self._limits = LLMatcher, LLParserLimits(**PARSER_LIMITS)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._executor: LLExecutor | None = LLExecutor(min(cores // 2, 16)) if cores > MAX_SERIAL_MASKS else None
        self.is_serial = self._executor is None
        self.probe_bits = _probe_bits(words)
        self.string_tokens = StringTokens(words, eos_ids)
        self.is_plain = self.string_tokens.is_plain
        self.counted_strings = CountedStrings(words, self.string_tokens, eos_ids) if vocab_size >= MIN_VOCAB else None
        ends = np.zeros(32 * self.mask_words, dtype=np.bool_)
        ends[list(eos_ids)] = True
        spoken = np.arange(32 * self.mask_words) < vocab_size
        self.full_mask = np.packbits(spoken, bitorder="little").tobytes()
        self.no_eos_mask = np.packbits(spoken & ~ends, bitorder="little").tobytes()  # all tokens but those that end
        if not self._strings_as_expected():
            self.string_tokens.closing_ids = [None, None]  # nothing is known of any strings

    def new_matcher(self, grammar: str, tokenizer: LLTokenizer | None = None) -> LLMatcher:
        """At the beginning of llguidance's own form of a grammar. Its error says why it can't be used."""
        return self._matcher(tokenizer or self.tokenizer, grammar, log_level=0, limits=self._limits)

    def from_lark(self, grammar: str) -> str:
        """llguidance's own form of a Lark grammar."""
        return str(self._matcher.grammar_from_lark(grammar))

    def bounds_exactly(self, key: str, bound: int) -> bool:
        """Whether integers are bounded just there: the last one that is allowed is, and the next one isn't."""
        inside = bound + {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(key, 0)
        outside = inside + (-1 if key in ("minimum", "exclusiveMinimum") else 1)
        schema = json.dumps({"type": "integer", key: bound})
        return self._accepts(schema, str(inside)) and not self._accepts(schema, str(outside))

    def _accepts(self, schema: str, text: str) -> bool:
        """Whether `text` is what a schema asks for."""
        place = self.new_matcher(self._matcher.grammar_from_json_schema(schema))
        tokens = self._vocabulary(text)
        return place.try_consume_tokens(tokens) == len(tokens) and place.is_accepting()

    def _strings_as_expected(self) -> bool:
        """Whether strings are, for this llguidance, what grammar_strings.py takes them for: plain tokens stand in free
        ones, and in counted ones those fit that have no more characters than are left."""
        quote, _ = self.string_tokens.closing_ids
        if quote is None:
            return True
        free = self.new_matcher(self._matcher.grammar_from_json_schema('{"type": "string"}'))
        free.consume_token(quote)
        plain = np.packbits(np.frombuffer(self.is_plain, np.bool_), bitorder="little")
        if (plain & ~np.frombuffer(free.compute_bitmask(), np.uint8)[: len(plain)]).any():
            return False
        if self.counted_strings is None:
            return True
        two = self._matcher.grammar_from_json_schema('{"type": "string", "maxLength": 2}')
        inner, brief = self.new_matcher(two), self.new_matcher(two, self.counted_strings.tokenizer)
        inner.consume_token(quote)
        return self.counted_strings.feed(brief, [quote]) and (
            self.counted_strings.mask(brief, 2) == inner.compute_bitmask()[: self.mask_bytes]
        )

    def probe(self, initial_matcher: LLMatcher) -> str:
        """Why a grammar can't be used that compiled: no text fulfils it, or it grows too complex or slow within some
        tokens. First, last and middle ones that may follow are taken."""
        end = time.thread_time() + PROBE_SECONDS  # of work, however busy the machine is
        for walk in range(PROBE_WALKS):
            at = initial_matcher.deep_copy()
            for _ in range(PROBE_TOKENS):
                began = time.thread_time()
                allowed = self.allowed_tokens(at.compute_bitmask())
                if at.is_error() or not len(allowed):
                    return one_line(at.get_error().replace("NoExtensionBias", "")) or NO_TEXT
                spoken = [token for token in allowed.tolist() if token not in self.eos_ids]
                if not spoken:
                    break
                at.try_consume_tokens([spoken[(len(spoken) - 1) * walk // (PROBE_WALKS - 1)]])
                at.compute_ff_tokens()
                if at.is_error():
                    return at.get_error()
                taken = time.thread_time() - began
                if taken > TOKEN_SECONDS:
                    return f"it is too complex: one token takes {1e3 * taken:.0f} ms, at most {1e3 * TOKEN_SECONDS:.0f}"
                if began + taken > end:
                    return f"it is too complex: a few tokens take more than {PROBE_SECONDS} s"
        return ""

    def allowed_tokens(self, mask: bytes) -> np.ndarray:
        """The tokens of a mask."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self.vocab_size])

    def compute_masks(self, matchers: Sequence[LLMatcher]) -> list[bytes]:
        """The masks of all of them, by several threads if they are many. Other threads of Python go on."""
        if self._executor is None or len(matchers) <= MAX_SERIAL_MASKS:
            return [matcher.compute_bitmask()[: self.mask_bytes] for matcher in matchers]
        masks = np.empty((len(matchers), self.mask_words), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)], masks.ctypes.data, self.mask_bytes, len(matchers)
        )
        return [mask.tobytes() for mask in masks]


def _probe_bits(vocabulary: GrammarVocabulary) -> list[tuple[int, int, int, int]]:
    """Two letters and two digits: where in a mask the bits of both are, as a byte's number and a bit of it. Where both
    of a pair may follow, no byte must, and so no token."""
    found = [[vocabulary.token_id(one), vocabulary.token_id(other)] for one, other in ((b"a", b"b"), (b"1", b"2"))]
    pairs = [[(id // 8, 1 << id % 8) for id in pair if id is not None] for pair in found]
    return [(*pair[0], *pair[1]) for pair in pairs if len(pair) == 2]
