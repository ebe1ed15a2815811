"""Places in one grammar: what one output does to the lexer that all have in common, and what is computed when."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import echo_service
import pytest
from grammar_walks import TOO_MANY, Watched, form, grammars_of, listed, side_by_side, spoken

import quire.text.grammar_places
import quire.text.grammars
from quire.bench.structured import made_up
from quire.text.grammar_beginnings import QUEUE
from quire.text.grammar_counted import LEAST
from quire.text.grammars import CompiledGrammar, Grammars, Place
from quire.vocabulary.structured import Structured, StructuredOutputsParams

END = 0
COUNTED = form({"type": "array", "items": {"type": "string", "maxLength": 3000}}, compact=True)
STATES = 1500  # of a lexer: a string of less than these many characters is within the bounds


def ids(text: str) -> list[int]:
    """A token a character: each is a step."""
    return [token for each in text for token in echo_service.tokenizer().encode(each, add_special_tokens=False)]


def go(place: Place, text: str) -> str:
    """Go on behind a text; the first complaint."""
    return next(filter(None, map(place.accept, ids(text))), "")


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quire.text.grammars.LIMITS, "max_lexer_states", STATES)


def grammars() -> Grammars:
    return grammars_of(echo_service.tokenizer(), echo_service.VOCAB)


def reference(asked: Structured, text: str) -> bytes:
    """What may follow `text` in a grammar that nobody else uses."""
    place = grammars().get(asked).matcher()
    assert go(place, text) == ""
    [mask] = grammars().get(COUNTED).masks([place])
    return mask


def spoil(grammar: CompiledGrammar, by_masks: bool) -> Place:
    """A string so long that the lexer has too many states: the place that made them, which ends with an error."""
    place = grammar.matcher()
    place.masker.one_by_one = not by_masks
    assert go(place, '["') == ""
    for _ in range(2 * STATES):
        if by_masks:
            grammar.masks([place])
        if why := go(place, "a"):
            assert "too many states" in why
            return place
    raise AssertionError("the bound holds")


@pytest.mark.usefixtures("few_states")
@pytest.mark.parametrize("by_masks", [False, True])
def test_what_one_output_does_to_the_lexer_ends_only_that_output(by_masks: bool) -> None:
    made = grammars()
    grammar = made.get(COUNTED)
    texts = ["", "[", '["', '["abc', '["a","', '["ab"']
    others = [grammar.matcher() for _ in texts]
    for place, text in zip(others, texts):
        assert go(place, text) == ""
    copy = others[3].copy()
    spoil(grammar, by_masks)
    assert grammar.shared.spoiled
    assert not made.holds(COUNTED), "getting it costs time again"
    expected = [reference(COUNTED, text) for text in texts]
    assert grammar.masks(others) == expected
    for place, rest in zip((*others, copy), ('["x"]', '"x"]', 'x"]', 'x"]', 'x"]', "]", 'x"]')):
        assert go(place, rest) == ""
        assert place.forced() == (END,)
        assert place.accept(END) == ""
    assert go(grammar.matcher(), '["x"]') == "", "one that is held goes on too"
    assert go(made.get(COUNTED).matcher(), '["x"]') == ""
    assert made.holds(COUNTED)


@pytest.mark.usefixtures("few_states")
def test_an_output_goes_on_in_a_grammar_made_anew_only_so_often() -> None:
    made = grammars()
    place = made.get(COUNTED).matcher()
    assert go(place, '["a') == ""
    for _ in range(quire.text.grammar_places.AGAIN):
        spoil(made.get(COUNTED), by_masks=False)
        assert go(place, "b") == ""
    spoil(made.get(COUNTED), by_masks=False)
    assert "the grammar can't go on" in go(place, "c")


@pytest.mark.usefixtures("few_states")
def test_a_grammar_that_takes_long_to_make_is_not_made_while_outputs_wait() -> None:
    made = grammars()
    grammar = made.get(COUNTED)
    place = grammar.matcher()
    assert go(place, '["a') == ""
    grammar.shared.seconds = 1.0
    spoil(grammar, by_masks=False)
    assert "the grammar can't go on" in go(place, "b")
    assert "the grammar can't go on" in go(grammar.matcher(), '["x"]' * 2), "one that begins waits neither"
    assert go(made.get(COUNTED).matcher(), '["x"]') == ""
    assert go(grammar.matcher(), '["x"]') == "", "it is made meanwhile"


def test_a_token_that_a_grammar_bars_spoils_nothing() -> None:
    made = grammars()
    grammar = made.get(COUNTED)
    assert "can't go on" in go(grammar.matcher(), "{")
    assert not grammar.shared.spoiled


LARGE = 1000  # states of a lexer: one with all that a string of LONG needs has fewer
LONG = form({"type": "array", "items": {"type": "string", "maxLength": 400}}, compact=True)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Grammars:
    """Over a vocabulary in which strings of counted characters have masks of their own."""
    monkeypatch.setitem(quire.text.grammars.LIMITS, "max_lexer_states", LARGE)
    return grammars_of(made_up(LEAST), LEAST)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_within_a_counted_string_an_output_goes_on_though_another_spoils_both_lexers(
    counting: Grammars, one_by_one: bool
) -> None:
    grammar = counting.get(LONG)
    grammar.masker.one_by_one = one_by_one
    texts = ["", "[", '["', '["abc', '["ab","', '["a\\n', '["a\\nbc', '["ab"']
    others = [grammar.matcher() for _ in texts]
    for place, text in zip(others, texts):
        assert spoken(grammar, place, text) == ""
    assert others[3]._room > 0
    bad = grammar.matcher()
    assert "too many states" in spoken(grammar, bad, '["' + 200 * "\\né")
    assert grammar.shared.spoiled
    assert bad._brief.is_error()
    for place, rest in zip(others, ('["x"]', '"x"]', 'x"]', 'x"]', 'x"]', 'x"]', 'x"]', "]")):
        assert spoken(grammar, place, rest) == ""
        assert place.forced() == (END,)


def test_the_lexer_of_counted_strings_is_no_part_of_what_making_a_grammar_anew_takes(
    counting: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken over, and so outputs of a grammar go on though both would take more than outputs wait."""
    masker, clock, made = counting._made_masker(), [0.0], list[bool]()
    real = masker.matcher

    def slowly(text: str, tokenizer: Any = None) -> Any:
        clock[0] += 0.6 * quire.text.grammar_places.AGAIN_SECONDS
        made.append(tokenizer is not None)
        return real(text, tokenizer)

    monkeypatch.setattr(masker, "matcher", slowly)
    monkeypatch.setattr(quire.text.grammar_places, "time", SimpleNamespace(thread_time=lambda: clock[0]))
    grammar = counting.get(LONG)
    shared = grammar.shared
    place = grammar.matcher()
    assert spoken(grammar, place, '["abc","d') == ""
    shared.spoiled = True
    assert spoken(grammar, place, 'ef","g') == ""
    assert place.shared is shared._next
    assert made == [False, True, False]
    assert place.shared.brief is shared.brief
    assert place._room == 399


def test_a_lexer_of_counted_strings_that_is_spoiled_is_asked_no_more_until_the_grammar_is_made_anew(
    counting: Grammars,
) -> None:
    grammar = counting.get(LONG)
    shared = grammar.shared
    place, other = grammar.matcher(), grammar.matcher()
    for one in (place, other):
        assert spoken(grammar, one, '["ab') == ""
    place._brief, place.mask = Watched(place._brief, TOO_MANY), None  # type: ignore[assignment]
    assert grammar.masks([place]) == grammar.masks([other])
    assert (place._room, other._room) == (0, 398)
    assert shared.brief is None
    fresh = grammar.matcher()
    for one in (place, other, fresh):
        assert spoken(grammar, one, '["ab' if one is fresh else 'c","ab') == ""
    assert (place._room, other._room, fresh._room) == (0, 0, 0)
    shared.spoiled = True
    for one in (place, other, fresh):
        assert spoken(grammar, one, 'c","ab') == ""
        assert one._room == 398
        assert one.shared is shared._next


def test_others_at_the_place_of_one_that_fails_have_their_own_mask() -> None:
    grammar = grammars().get(COUNTED)
    rows = [grammar.matcher() for _ in range(4)]
    for place in rows:
        assert go(place, "[") == ""
    rows[0].inner = Watched(rows[0].inner, TOO_MANY)  # type: ignore[assignment]
    masks = grammar.masks(rows)
    assert masks[0] == bytes(len(masks[0]))
    assert masks[1:] == [reference(COUNTED, "[")] * 3
    assert grammar.shared.start.after[ids("[")[0]].mask is None


def test_what_must_follow_is_not_remembered_where_it_is_long() -> None:
    """Behind each text that may come first the same long one must: each place would hold it."""
    text = "".join(chr(97 + i % 23) for i in range(2 * QUEUE))
    grammar = grammars().get(StructuredOutputsParams(grammar=f'start: /[a-z]+/ ";" "{text}"').structured())
    for first in ("a", "b", "cd"):
        place = grammar.matcher()
        assert go(place, f"{first};") == ""
        assert place.at.queue is None
        run = place.forced()
        assert echo_service.tokenizer().decode(list(run)) == text
        for i, token in enumerate(run):
            assert place.forced() == run[i:]
            assert place.accept(token) == ""
        assert place.forced() == (END,)


def test_where_letters_may_follow_nobody_asks_what_must() -> None:
    grammar = grammars().get(COUNTED)
    place = grammar.matcher()
    place.at, place.masker.one_by_one = None, True
    assert go(place, '["') == ""
    place.inner = watched = Watched(place.inner)  # type: ignore[assignment]
    assert go(place, "some text") == ""
    assert "compute_ff_tokens" not in watched.asked
    assert go(place, '"]') == ""
    assert "compute_ff_tokens" in watched.asked
    assert place.forced() == (END,)


def test_where_one_letter_must_follow_it_is_forced() -> None:
    grammar = grammars().get(StructuredOutputsParams(regex="[xy](a|1)a1b2a1b2").structured())
    for text in ("xa", "y1"):
        place = grammar.matcher()
        place.at, place.masker.one_by_one = None, True
        assert go(place, text[0]) == ""
        assert place.forced() == ()
        assert go(place, text[1]) == ""
        assert echo_service.tokenizer().decode(list(place.forced())) == "a1b2a1b2"


def test_what_is_passed_over_at_once_is_what_would_be_walked_through() -> None:
    """Strings of counted characters, over words: masks with slices are those without."""
    asked, words = form(listed(minLength=5, maxLength=34)), made_up(3000)
    sliced, plain = (grammars_of(words, 3000) for _ in range(2))
    masker = plain._made_masker()
    masker.tokenizer = masker.tokenizer.with_slices([])
    grammar, other, rng = sliced.get(asked), plain.get(asked), random.Random(0)
    for _ in range(12):
        for _ in side_by_side(grammar, other, (grammar.matcher(), other.matcher()), rng, 60, lambda token: True):
            pass
