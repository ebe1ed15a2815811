"""The text state of a sequence: incremental detokenization, stop strings, and bad words as token ids. Of requests it
knows only their SamplingParams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from quire.errors import InputError, input_error_at
from quire.protocol.sampling_params import MAX_BAD_WORD_IDS, SamplingParams
from quire.text.detokenizer import Detokenizer
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.stop_strings import StopAutomaton, StopChecker
from quire.text.tokenizer import Tokenizer

PROMPT_TAIL = 16  # last tokens of the prompt that the detokenizer needs


class TextBackend:
    """Makes the detokenizers of sequences, and resolves parameters with `tokenizer` and `grammars`."""

    def __init__(self, tokenizer: Tokenizer, grammars: GrammarCompiler) -> None:
        self.tokenizer, self.grammars = tokenizer, grammars

    def new_detokenizer(self, prompt: Sequence[int], params: SamplingParams) -> StopAwareDetokenizer:
        """Return the detokenizer of one sequence that continues `prompt`."""
        return StopAwareDetokenizer(self.tokenizer, prompt[-PROMPT_TAIL:], params)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """Return `params` with bad words as `bad_word_ids`, and with compiled stop strings and grammar. This is done
        once for all branches, and for all requests that use the result. Raise InputError for a bad word without tokens,
        for too many tokens, or for an output form that is not supported."""
        if params.structured is not None and params.grammar is None:
            params = replace(params, grammar=self.grammars.get(params.structured))
        automaton = get_stop_automaton(params)
        if not params.bad_words and automaton is params.stop_automaton:
            return params
        ids = dict.fromkeys(params.bad_word_ids)
        left = MAX_BAD_WORD_IDS - sum(map(len, ids))
        for i, word in enumerate(params.bad_words or ()):
            with input_error_at(f"bad_words[{i}]", True):
                new = [variant for variant in self._bad_word_variants(word) if variant not in ids]
            ids.update(dict.fromkeys(new))
            left -= sum(map(len, new))
            if left < 0:
                raise InputError(f"bad_words may have at most {MAX_BAD_WORD_IDS} tokens in all", "bad_words")
        return replace(params, bad_words=(), bad_word_ids=tuple(ids), stop_automaton=automaton)

    def _bad_word_variants(self, word: str) -> list[tuple[int, ...]]:
        """Return the spellings of a word: at the start of a text, after a space, and after another character. A
        spelling that ends with a shorter one is omitted, since the shorter one bans it."""
        bare = word.lstrip()
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        start = encode(bare) if bare else []
        if not start:
            raise InputError(f"bad_words holds {word[:60]!r}, which has no tokens", "bad_words")
        variants: list[tuple[int, ...]] = []
        for spelling in sorted((start, encode(" " + bare), self.tokenizer.encode_continuation(bare)), key=len):
            if not any(tuple(spelling[-len(other) :]) == other for other in variants):
                variants.append(tuple(spelling))
        return variants


def get_stop_automaton(params: SamplingParams) -> StopAutomaton | None:
    """Return the automaton of the stop strings; an existing one is reused if its stop strings are the same."""
    stops, known = tuple(params.stop or ()), params.stop_automaton
    if not stops or (isinstance(known, StopAutomaton) and known.stops == stops):
        return known if stops else None
    return StopAutomaton(stops)


class StopAwareDetokenizer:
    """The text of one sequence. A stop string counts if it ends in the text of a token after the first `min_tokens`."""

    __slots__ = ("_detokenizer", "_min_tokens_left", "_stop_checker")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_tail, params.skip_special_tokens)
        automaton = get_stop_automaton(params)
        self._stop_checker = (
            StopChecker(automaton, params.include_stop_str_in_output) if automaton is not None else None
        )
        self._min_tokens_left = params.min_tokens  # number of next tokens in whose text no stop string may end

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, str | None]:
        """Return the text that can be emitted now, and the stop string that ends the sequence, or None."""
        early, self._min_tokens_left = tokens[: self._min_tokens_left], max(self._min_tokens_left - len(tokens), 0)
        before = self._detokenizer.push(early) if early else ""
        text = self._detokenizer.push(tokens[len(early) :]) + (self._detokenizer.flush() if last else "")
        if self._stop_checker is None:
            return before + text, None
        opening, _ = self._stop_checker.push(before, may_end=False)
        shown, stop = self._stop_checker.push(text, may_end=not self._min_tokens_left)
        if last and stop is None:
            shown += self._stop_checker.flush()
        return opening + shown, stop
