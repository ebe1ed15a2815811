"""Places in one grammar: what one output does to the lexer that all have in common, and what is computed when."""

from __future__ import annotations

import random
from dataclasses import replace

import echo_service
import pytest
from grammar_walks import FREE, TOO_MANY, Watched, form, grammars_of, spoken
from llguidance import LLExecutor

import quire.text.grammars.compiler
import quire.text.grammars.matcher
from quire.bench.structured import made_up
from quire.protocol.structured_output import Structured, StructuredOutputsParams
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from quire.text.grammars.counted_strings import MIN_VOCAB
from quire.text.grammars.matcher import MAX_FORCED, MAX_MASKS, MAX_NODES, PrefixNode, PrefixTreeBudget

END = 0
COUNTED = form({"type": "array", "items": {"type": "string", "maxLength": 3000}}, compact=True)
STATES = 1500  # of a lexer: a string of less than these many characters is within the bounds


def ids(text: str) -> list[int]:
    """A token a character: each is a step."""
    return [token for each in text for token in echo_service.tokenizer().encode(each, add_special_tokens=False)]


def go(place: GrammarMatcher, text: str) -> str:
    """Go on behind a text; the first complaint."""
    return next(filter(None, map(place.accept, ids(text))), "")


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quire.text.grammars.backend.PARSER_LIMITS, "max_lexer_states", STATES)


def grammars() -> GrammarCompiler:
    return grammars_of(echo_service.tokenizer(), echo_service.VOCAB)


def reference(asked: Structured, text: str) -> bytes:
    """What may follow `text` in a grammar that nobody else uses."""
    place = grammars().get(asked).new_matcher()
    assert go(place, text) == ""
    [mask] = grammars().get(COUNTED).compute_masks([place])
    return mask


def spoil(grammar: CompiledGrammar, by_masks: bool) -> GrammarMatcher:
    """A string so long that the lexer has too many states: the place that made them, which ends with an error."""
    place = grammar.new_matcher()
    place.backend.is_serial = not by_masks
    assert go(place, '["') == ""
    for _ in range(2 * STATES):
        if by_masks:
            grammar.compute_masks([place])
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
    others = [grammar.new_matcher() for _ in texts]
    for place, text in zip(others, texts):
        assert go(place, text) == ""
    copy = others[3].copy()
    spoil(grammar, by_masks)
    assert grammar.shared.lexer_exhausted
    assert not made.is_cached(COUNTED), "getting it costs time again"
    expected = [reference(COUNTED, text) for text in texts]
    assert grammar.compute_masks(others) == expected
    for place, rest in zip((*others, copy), ('["x"]', '"x"]', 'x"]', 'x"]', 'x"]', "]", 'x"]')):
        assert go(place, rest) == ""
        assert place.forced_tokens() == (END,)
        assert place.accept(END) == ""
    assert go(grammar.new_matcher(), '["x"]') == "", "one that is held goes on too"
    assert go(made.get(COUNTED).new_matcher(), '["x"]') == ""
    assert made.is_cached(COUNTED)


@pytest.mark.usefixtures("few_states")
def test_an_output_goes_on_in_a_grammar_made_anew_only_so_often() -> None:
    made = grammars()
    place = made.get(COUNTED).new_matcher()
    assert go(place, '["a') == ""
    for _ in range(quire.text.grammars.matcher.MAX_RENEWALS):
        spoil(made.get(COUNTED), by_masks=False)
        assert go(place, "b") == ""
    spoil(made.get(COUNTED), by_masks=False)
    assert "the grammar can't go on" in go(place, "c")


@pytest.mark.usefixtures("few_states")
def test_a_grammar_that_takes_long_to_make_is_not_made_while_outputs_wait() -> None:
    made = grammars()
    grammar = made.get(COUNTED)
    place = grammar.new_matcher()
    assert go(place, '["a') == ""
    grammar.shared.compile_seconds = 1.0
    spoil(grammar, by_masks=False)
    assert "the grammar can't go on" in go(place, "b")
    assert "the grammar can't go on" in go(grammar.new_matcher(), '["x"]' * 2), "one that begins waits neither"
    assert go(made.get(COUNTED).new_matcher(), '["x"]') == ""
    assert go(grammar.new_matcher(), '["x"]') == "", "it is made meanwhile"


LARGE = 1000  # states of a lexer: one with all that a string of LONG needs has fewer
LONG = form({"type": "array", "items": {"type": "string", "maxLength": 400}}, compact=True)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> GrammarCompiler:
    """Over a vocabulary in which strings of counted characters have masks of their own."""
    monkeypatch.setitem(quire.text.grammars.backend.PARSER_LIMITS, "max_lexer_states", LARGE)
    return grammars_of(made_up(MIN_VOCAB), MIN_VOCAB)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_within_a_counted_string_an_output_goes_on_though_another_spoils_both_lexers(
    counting: GrammarCompiler, one_by_one: bool
) -> None:
    grammar = counting.get(LONG)
    grammar.backend.is_serial = one_by_one
    texts = ["", "[", '["', '["abc', '["ab","', '["a\\n', '["a\\nbc', '["ab"']
    others = [grammar.new_matcher() for _ in texts]
    for place, text in zip(others, texts):
        assert spoken(grammar, place, text) == ""
    assert others[3]._chars_left > 0
    bad = grammar.new_matcher()
    assert "too many states" in spoken(grammar, bad, '["' + 200 * "\\né")
    assert grammar.shared.lexer_exhausted
    assert bad._counted_matcher.is_error()
    for place, rest in zip(others, ('["x"]', '"x"]', 'x"]', 'x"]', 'x"]', 'x"]', 'x"]', "]")):
        assert spoken(grammar, place, rest) == ""
        assert place.forced_tokens() == (END,)


def test_others_at_the_place_of_one_that_fails_have_their_own_mask() -> None:
    grammar = grammars().get(COUNTED)
    rows = [grammar.new_matcher() for _ in range(4)]
    for place in rows:
        assert go(place, "[") == ""
    rows[0].matcher = Watched(rows[0].matcher, TOO_MANY)  # type: ignore[assignment]
    masks = grammar.compute_masks(rows)
    assert masks[0] == bytes(len(masks[0]))
    assert masks[1:] == [reference(COUNTED, "[")] * 3
    assert grammar.shared.root.children[ids("[")[0]].mask is None


def test_what_must_follow_is_not_remembered_where_it_is_long() -> None:
    """Behind each text that may come first the same long one must: each place would hold it."""
    text = "".join(chr(97 + i % 23) for i in range(2 * MAX_FORCED))
    grammar = grammars().get(StructuredOutputsParams(grammar=f'start: /[a-z]+/ ";" "{text}"').structured())
    for first in ("a", "b", "cd"):
        place = grammar.new_matcher()
        assert go(place, f"{first};") == ""
        assert place.node.forced is None
        run = place.forced_tokens()
        assert echo_service.tokenizer().decode(list(run)) == text
        for i, token in enumerate(run):
            assert place.forced_tokens() == run[i:]
            assert place.accept(token) == ""
        assert place.forced_tokens() == (END,)


# What is remembered of first tokens


FORM = form({
    "type": "object", "properties": {"name": FREE, "of": {"enum": ["first", "fifth"]}, "age": {"type": "integer"}},
    "required": ["name", "of"],
})  # fmt: skip


def without(place: GrammarMatcher) -> GrammarMatcher:
    """The same place of somebody who remembers nothing."""
    other = place.copy()
    other.node = None
    return other


@pytest.mark.parametrize("room", [(MAX_NODES, MAX_MASKS), (20, 3), (0, 0)])
@pytest.mark.parametrize("marker", [(), (7,)], ids=["", "behind a marker"])
@pytest.mark.parametrize("way", ["one by one", "together", "on threads"])
def test_masks_and_forced_tokens_are_those_that_would_be_computed(
    room: tuple[int, int], marker: tuple[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random walks of places that remember, beside the same walks of places that don't."""
    grammar = grammars().get(replace(FORM, after=marker))
    masker = grammar.backend
    masker.is_serial, masker._executor = way == "one by one", LLExecutor(2) if way == "on threads" else None
    monkeypatch.setattr("quire.text.grammars.backend.MAX_SERIAL_MASKS", 1)
    grammar.shared.root.budget.nodes, grammar.shared.root.budget.masks = room
    rng = random.Random(0)
    for _ in range(12):
        places = [grammar.new_matcher() for _ in range(4)]
        plain = [without(place) for place in places]
        for place in (*places, *plain):
            for token in marker:
                assert place.accept(token) == ""
        for step in range(25):
            masks = grammar.compute_masks(places)
            assert masks == grammar.compute_masks(plain)
            assert [place.forced_tokens() for place in places] == [place.forced_tokens() for place in plain]
            for i, mask in enumerate(masks):
                token = rng.choice(grammar.backend.allowed_tokens(mask)[:3].tolist())
                assert places[i].accept(token) == plain[i].accept(token) == ""
            if step == 5:
                places[3], plain[3] = places[0].copy(), plain[0].copy()
            ended = [place.matcher is not None and place.matcher.is_stopped() for place in places]
            places, plain = ([one for one, end in zip(some, ended) if not end] for some in (places, plain))
    nodes, masks_kept = counts(grammar.shared.root)
    assert nodes == room[0] - grammar.shared.root.budget.nodes <= room[0]
    assert masks_kept == room[1] - grammar.shared.root.budget.masks <= room[1]


def counts(known: PrefixNode) -> tuple[int, int]:
    """Of all below: places and masks."""
    below = [counts(one) for one in known.children.values()]
    return len(below) + sum(nodes for nodes, _ in below), (known.mask is not None) + sum(masks for _, masks in below)


def test_a_mask_is_kept_from_the_second_time_on() -> None:
    known = PrefixNode(PrefixTreeBudget(nodes=2, masks=1))
    known.remember_mask(b"a")
    assert known.mask is None
    known.remember_mask(b"a")
    assert known.mask == b"a"
    first, second = known.child(1), known.child(2)
    assert first is known.child(1) is not second
    assert known.child(3) is None
    assert first.child(3) is None
    for _ in range(2):
        first.remember_mask(b"b")
    assert first.mask is None, "no room"
