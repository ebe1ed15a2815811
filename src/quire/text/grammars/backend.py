"""llguidance over one vocabulary: matchers, masks, and the tests of a grammar's cost and accuracy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import InputError
from quire.protocol.structured_output import PARAM_NAME
from quire.text.grammars.counted_strings import MIN_VOCAB, CountedStrings
from quire.text.grammars.errors import one_line
from quire.text.grammars.strings import StringTokens
from quire.text.grammars.vocabulary import GrammarVocabulary

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

    from quire.text.tokenizer import Tokenizer

PROBE_WALKS, PROBE_TOKENS = 3, 12  # walks before a grammar is accepted, and tokens of each
PROBE_SECONDS = 0.5  # CPU time of all walks
TOKEN_SECONDS = 0.05  # a slower token would delay other requests
NO_TEXT = "no text fulfils it"
# Up to this number masks are computed serially, and always with few cores: a mask takes microseconds, and waiting for a
# thread to get a core takes milliseconds.
MAX_SERIAL_MASKS = 8
SLICES = (r"[\x20\x0A\x0D\x09]+", *(rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (10, 12, 14, 16, 20)),
          r'[^"\\\x00-\x1F\x7F]+')  # fmt: skip
"""Classes of tokens that llguidance allows as a whole where any text of that form may follow. They are its own
`general_slices` with other lengths, for counted strings with less than 30 characters left."""
PARSER_LIMITS: dict[str, Any] = {
    "max_items_in_row": 2000, "initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "step_max_items": 20_000,
    "max_lexer_states": 20_000, "max_grammar_size": 20_000, "verbose_errors": False,
}  # fmt: skip


class GrammarBackend:
    """llguidance over one vocabulary, with its limits and threads."""

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
            self._vocabulary = vocabulary = GrammarVocabulary(tokenizer, vocab_size, eos_ids)
            plain = LLTokenizer(TokenizerWrapper(vocabulary), n_vocab=vocab_size, eos_token=[*eos_ids], slices=[])
            # In two steps, so that other threads can run in between.
            self.tokenizer: LLTokenizer = plain.with_slices(list(SLICES))
        except (ValueError, RuntimeError) as error:
            raise InputError(f"{hint}: {one_line(str(error))}", PARAM_NAME) from error
        self.vocab_size, self.eos_ids, self.eos_id = vocab_size, frozenset(eos_ids), min(eos_ids)
        special = {id: vocabulary.tokens[id].hex() for id in vocabulary.special_token_ids}
        # The first frame of the trial process.
        self.description = {"size": vocab_size, "ends": [*eos_ids], "special": special, "limits": PARSER_LIMITS}
        self.mask_words = -(-vocab_size // 32)
        self.mask_bytes = 4 * self.mask_words
        self._matcher, self._limits = LLMatcher, LLParserLimits(**PARSER_LIMITS)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._executor: LLExecutor | None = LLExecutor(min(cores // 2, 16)) if cores > MAX_SERIAL_MASKS else None
        self.is_serial = self._executor is None
        self.probe_bits = _probe_bits(vocabulary)
        self.string_tokens = StringTokens(vocabulary, eos_ids)
        self.is_plain = self.string_tokens.is_plain
        self.counted_strings = (
            CountedStrings(vocabulary, self.string_tokens, eos_ids) if vocab_size >= MIN_VOCAB else None
        )
        ends = np.zeros(32 * self.mask_words, dtype=np.bool_)
        ends[list(eos_ids)] = True
        tokens = np.arange(32 * self.mask_words) < vocab_size
        self.full_mask = np.packbits(tokens, bitorder="little").tobytes()
        self.no_eos_mask = np.packbits(tokens & ~ends, bitorder="little").tobytes()
        if not self._strings_as_expected():
            self.string_tokens.closing_ids = None

    def new_matcher(self, grammar: str, tokenizer: LLTokenizer | None = None) -> LLMatcher:
        """Return a matcher at the start of a grammar in llguidance's format. Its get_error() says why the grammar
        cannot be used."""
        return self._matcher(tokenizer or self.tokenizer, grammar, log_level=0, limits=self._limits)

    def compute_masks(self, matchers: Sequence[LLMatcher]) -> list[bytes]:
        """Compute the masks of all matchers, on several threads if they are many. The GIL is released."""
        if self._executor is None or len(matchers) <= MAX_SERIAL_MASKS:
            return [matcher.compute_bitmask()[: self.mask_bytes] for matcher in matchers]
        masks = np.empty((len(matchers), self.mask_words), dtype=np.int32)
        self._executor.unsafe_compute_mask_ptr(
            [(matcher, i) for i, matcher in enumerate(matchers)], masks.ctypes.data, self.mask_bytes, len(matchers)
        )
        return [mask.tobytes() for mask in masks]

    def allowed_tokens(self, mask: bytes) -> np.ndarray:
        """Return the tokens of a mask."""
        return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[: self.vocab_size])

    def probe(self, initial_matcher: LLMatcher) -> str:
        """Return why a compiled grammar cannot be used, or "": no text matches it, or it becomes too complex or slow
        within some tokens. The walks take the first, last and middle allowed tokens."""
        end = time.thread_time() + PROBE_SECONDS  # CPU time, so that it does not depend on the machine's load
        for walk in range(PROBE_WALKS):
            matcher = initial_matcher.deep_copy()
            for _ in range(PROBE_TOKENS):
                began = time.thread_time()
                allowed = self.allowed_tokens(matcher.compute_bitmask())
                if matcher.is_error() or not len(allowed):
                    return one_line(matcher.get_error().replace("NoExtensionBias", "")) or NO_TEXT
                tokens = [token for token in allowed.tolist() if token not in self.eos_ids]
                if not tokens:
                    break
                matcher.try_consume_tokens([tokens[(len(tokens) - 1) * walk // (PROBE_WALKS - 1)]])
                matcher.compute_ff_tokens()
                if matcher.is_error():
                    return matcher.get_error()
                taken = time.thread_time() - began
                if taken > TOKEN_SECONDS:
                    return f"it is too complex: one token takes {1e3 * taken:.0f} ms, at most {1e3 * TOKEN_SECONDS:.0f}"
                if began + taken > end:
                    return f"it is too complex: a few tokens take more than {PROBE_SECONDS} s"
        return ""

    def from_lark(self, grammar: str) -> str:
        """Convert a Lark grammar to llguidance's format."""
        return str(self._matcher.grammar_from_lark(grammar))

    def bounds_exactly(self, key: str, bound: int) -> bool:
        """Return True if llguidance applies the bound exactly: it allows the last integer within it, and not the next
        one."""
        inside = bound + {"exclusiveMinimum": 1, "exclusiveMaximum": -1}.get(key, 0)
        outside = inside + (-1 if key in ("minimum", "exclusiveMinimum") else 1)
        schema = json.dumps({"type": "integer", key: bound})
        return self._accepts(schema, str(inside)) and not self._accepts(schema, str(outside))

    def _accepts(self, schema: str, text: str) -> bool:
        """Return True if `text` matches a JSON schema."""
        matcher = self.new_matcher(self._matcher.grammar_from_json_schema(schema))
        tokens = self._vocabulary(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def _strings_as_expected(self) -> bool:
        """Return True if this version of llguidance treats strings as strings.py assumes: free strings allow all plain
        tokens, and counted ones those that have at most as many characters as are left."""
        if self.string_tokens.closing_ids is None:
            return True
        quote, _ = self.string_tokens.closing_ids
        free = self.new_matcher(self._matcher.grammar_from_json_schema('{"type": "string"}'))
        free.consume_token(quote)
        plain = np.packbits(np.frombuffer(self.is_plain, np.bool_), bitorder="little")
        if (plain & ~np.frombuffer(free.compute_bitmask(), np.uint8)[: len(plain)]).any():
            return False
        if self.counted_strings is None:
            return True
        two = self._matcher.grammar_from_json_schema('{"type": "string", "maxLength": 2}')
        full, counted = self.new_matcher(two), self.new_matcher(two, self.counted_strings.tokenizer)
        full.consume_token(quote)
        return self.counted_strings.feed(counted, [quote]) and (
            self.counted_strings.mask(counted, 2) == full.compute_bitmask()[: self.mask_bytes]
        )


def _probe_bits(vocabulary: GrammarVocabulary) -> list[tuple[int, int, int, int]]:
    """Return the mask bits (byte, bit, byte, bit) of two letters and of two digits. Where both tokens of a pair are
    allowed, no byte is forced, and so no token is."""
    ids = [[vocabulary.token_id(one), vocabulary.token_id(other)] for one, other in ((b"a", b"b"), (b"1", b"2"))]
    pairs = [[(id // 8, 1 << id % 8) for id in pair if id is not None] for pair in ids]
    return [(*pair[0], *pair[1]) for pair in pairs if len(pair) == 2]
