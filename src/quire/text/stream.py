"""The engine's view of a tokenizer: text as tokens come, stop strings in it, and bad words as token ids.

Implements quire.engine.Text; knows nothing of requests beyond their SamplingParams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quire.errors import InputError
from quire.request import SamplingParams
from quire.text.detokenize import Detokenizer
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer

PROMPT_TAIL = 16  # tokens of the prompt that the detokenizer must have seen


class TokenText:
    """What the engine needs of `tokenizer`: one TextFlow a sequence, and parameters with their words as ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> TextFlow:
        """The text of one sequence that continues `prompt`."""
        return TextFlow(self.tokenizer, prompt[-PROMPT_TAIL:], params)

    def resolve(self, params: SamplingParams) -> SamplingParams:
        """`params` with `bad_word_ids` filled in. InputError for a word that has no tokens."""
        if not params.bad_words:
            return params
        ids = [variant for word in params.bad_words for variant in self._variants(word)]
        return replace(params, bad_word_ids=(*params.bad_word_ids, *dict.fromkeys(ids)))

    def _variants(self, word: str) -> list[tuple[int, ...]]:
        """A word at the start of a text, and inside one where its leading space belongs to its first token."""
        bare = word.lstrip()
        plain = tuple(self.tokenizer.encode(bare, add_special_tokens=False)) if bare else ()
        if not plain:
            raise InputError(f"bad_words holds {word[:60]!r}, which has no tokens", "bad_words")
        spaced = tuple(self.tokenizer.encode(" " + bare, add_special_tokens=False))
        # A space that stays a token of its own would only ban the same word once more, after a space.
        return [plain, spaced] if len(spaced) == len(plain) and spaced[0] != plain[0] else [plain]


class TextFlow:
    """One sequence's text. Stop strings count once more than `min_tokens` tokens are out."""

    __slots__ = ("_count", "_detokenizer", "_min_tokens", "_stops")

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int], params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_tail, params.skip_special_tokens)
        stops = tuple(params.stop or ())
        self._stops = StopStrings(stops, params.include_stop_str_in_output) if stops else None
        self._min_tokens = params.min_tokens
        self._count = 0

    def push(self, tokens: Sequence[int], last: bool) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string that ends the sequence, if one was found."""
        self._count += len(tokens)
        text = self._detokenizer.push(tokens)
        if last:
            text += self._detokenizer.flush()
        if self._stops is None or self._count <= self._min_tokens:
            return text, None
        shown, stop = self._stops.push(text)
        if last and stop is None:
            shown += self._stops.flush()
        return shown, stop
