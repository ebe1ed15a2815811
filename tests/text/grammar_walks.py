"""Places in grammars: walks side by side, texts to go on behind, and matchers that are watched."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from quire.protocol.structured_output import Structured, StructuredOutputsParams
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher

END = 0
FREE = {"type": "string"}
TOO_MANY = "lexer error: too many states"
Pair = tuple[GrammarMatcher, GrammarMatcher]


def form(schema: Any, compact: bool = False) -> Structured:
    return StructuredOutputsParams(json=schema, disable_any_whitespace=compact).structured()


def listed(item: Any = FREE, **limits: int) -> dict[str, Any]:
    """Three or more of an item; `limits` are its own."""
    return {"type": "array", "items": {**item, **limits}, "minItems": 3}


def grammars_of(words: Any, size: int) -> GrammarCompiler:
    return GrammarCompiler(words, size, (END,))


def place_of(grammar: CompiledGrammar, remembered: bool) -> GrammarMatcher:
    place = grammar.new_matcher()
    if not remembered:
        place.node = None
    return place


def side_by_side(
    grammar: CompiledGrammar, other: CompiledGrammar, pair: Pair, rng: random.Random, steps: int,
    liked: Callable[[int], bool],
) -> Iterator[Pair]:  # fmt: skip
    """Walk through two grammars alike, most often by tokens that are `liked`: masks and what must follow are the same.
    Places before each step are given out; now and then they are copies."""
    place, told = pair
    for step in range(steps):
        [mask] = grammar.compute_masks([place])
        assert [mask] == other.compute_masks([told])
        assert place.forced_tokens() == told.forced_tokens()
        allowed = grammar.backend.allowed_tokens(mask).tolist()
        some = [token for token in allowed if liked(token)]
        token = rng.choice(some if some and rng.random() < 0.65 else allowed)
        if step % 9 == 5:
            place, told = place.copy(), told.copy()
        yield place, told
        assert place.accept(token) == told.accept(token) == ""
        if token == END:
            return


def spoken(grammar: CompiledGrammar, place: GrammarMatcher, text: str) -> str:
    """Go on behind a text, a byte a token, with the mask of each; the first complaint."""
    counted = grammar.backend.counted_strings
    for each in text.encode():
        [mask] = grammar.compute_masks([place])
        token = counted.vocabulary.token_id(bytes([each]))
        if why := place.accept(token) or ("" if mask[token // 8] >> token % 8 & 1 else "it was barred"):
            return why
    return ""


class Watched:
    """One of llguidance's matchers, and what it is asked; `broken` is the error of one that failed."""

    def __init__(self, inner: Any, broken: str = "") -> None:
        self.inner, self.broken, self.asked = inner, broken, list[str]()

    def is_error(self) -> bool:
        return bool(self.broken) or bool(self.inner.is_error())

    def get_error(self) -> str:
        return self.broken or str(self.inner.get_error())

    def compute_bitmask(self) -> bytes:
        self.asked.append("compute_bitmask")
        mask: bytes = self.inner.compute_bitmask()
        return bytes(len(mask)) if self.broken else mask

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.inner, name)
