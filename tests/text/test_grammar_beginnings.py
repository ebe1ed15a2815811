"""What is remembered of first tokens is what would be computed, and it is bounded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import echo_service
import pytest
from grammar_walks import FREE, Watched, form, grammars_of
from llguidance import LLExecutor

import quire.text.grammars
from quire.text.grammar_beginnings import MASKS, NODES, Known, Room
from quire.text.grammars import CompiledGrammar, Masker, Place
from quire.vocabulary.structured import Structured

FORM = form({
    "type": "object", "properties": {"name": FREE, "of": {"enum": ["first", "fifth"]}, "age": {"type": "integer"}},
    "required": ["name", "of"],
})  # fmt: skip


def made(asked: Structured = FORM) -> CompiledGrammar:
    return grammars_of(echo_service.tokenizer(), echo_service.VOCAB).get(asked)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many masks each call computed."""
    counts, fill = list[int](), Masker.fill

    def filled(self: Masker, matchers: Any) -> list[bytes]:
        counts.append(len(matchers))
        return fill(self, matchers)

    monkeypatch.setattr(Masker, "fill", filled)
    return counts


def without(place: Place) -> Place:
    """The same place of somebody who remembers nothing."""
    other = place.copy()
    other.at = None
    return other


def test_rows_at_one_place_compute_one_mask(counted: list[int]) -> None:
    grammar = made(form({"type": ["string", "integer"]}))
    rows = [grammar.matcher() for _ in range(6)]
    masks = grammar.masks(rows)
    assert len(set(masks)) == 1
    assert counted == [1]
    assert grammar.masks([grammar.matcher()]) == masks[:1]  # kept
    assert counted == [1]
    quote, digit = (echo_service.tokenizer().encode(text)[0] for text in ('"', "7"))
    for i, place in enumerate(rows):
        assert place.accept(quote if i < 4 else digit) == ""
    masks = grammar.masks(rows)
    assert counted[1] == len(set(masks)) == 2
    assert masks == [grammar.masks([without(place)])[0] for place in rows]


@pytest.mark.parametrize("room", [(NODES, MASKS), (20, 3), (0, 0)])
@pytest.mark.parametrize("marker", [(), (7,)], ids=["", "behind a marker"])
@pytest.mark.parametrize("way", ["one by one", "together", "on threads"])
def test_masks_and_forced_tokens_are_those_that_would_be_computed(
    room: tuple[int, int], marker: tuple[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random walks of places that remember, beside the same walks of places that don't."""
    grammar = made(replace(FORM, after=marker))
    masker = grammar.masker
    masker.one_by_one, masker._executor = way == "one by one", LLExecutor(2) if way == "on threads" else None
    monkeypatch.setattr(quire.text.grammars, "FEW", 1)
    grammar.shared.start.room.nodes, grammar.shared.start.room.masks = room
    rng = random.Random(0)
    for _ in range(12):
        places = [grammar.matcher() for _ in range(4)]
        plain = [without(place) for place in places]
        for place in (*places, *plain):
            for token in marker:
                assert place.accept(token) == ""
        for step in range(25):
            masks = grammar.masks(places)
            assert masks == grammar.masks(plain)
            assert [place.forced() for place in places] == [place.forced() for place in plain]
            for i, mask in enumerate(masks):
                token = rng.choice(grammar.masker.allowed(mask)[:3].tolist())
                assert places[i].accept(token) == plain[i].accept(token) == ""
            if step == 5:
                places[3], plain[3] = places[0].copy(), plain[0].copy()
            ended = [place.inner is not None and place.inner.is_stopped() for place in places]
            places, plain = ([one for one, end in zip(some, ended) if not end] for some in (places, plain))
    nodes, masks_kept = counts(grammar.shared.start)
    assert nodes == room[0] - grammar.shared.start.room.nodes <= room[0]
    assert masks_kept == room[1] - grammar.shared.start.room.masks <= room[1]


def counts(known: Known) -> tuple[int, int]:
    """Of all below: places and masks."""
    below = [counts(one) for one in known.after.values()]
    return len(below) + sum(nodes for nodes, _ in below), (known.mask is not None) + sum(masks for _, masks in below)


def test_a_mask_is_kept_from_the_second_time_on() -> None:
    known = Known(Room(nodes=2, masks=1))
    known.keep(b"a")
    assert known.mask is None
    known.keep(b"a")
    assert known.mask == b"a"
    first, second = known.then(1), known.then(2)
    assert first is known.then(1) is not second
    assert known.then(3) is None
    assert first.then(3) is None
    for _ in range(2):
        first.keep(b"b")
    assert first.mask is None, "no room"


def test_masks_of_a_grammar_that_grew_too_complex_are_not_kept() -> None:
    grammar = made()
    rows = [grammar.matcher() for _ in range(3)]
    for place in rows:
        place.inner = Watched(place.inner, "it is too complex")  # type: ignore[assignment]
    grammar.masks(rows)
    assert not grammar.shared.start.seen
