"""TokenText: stop strings across min_tokens, compiled once; bad words resolved once, and not too many of them."""

from __future__ import annotations

from itertools import pairwise

import echo_service
import pytest
from echo_service import tokenizer
from hypothesis import given
from hypothesis import strategies as st
from test_stop_strings import brute, words

from quire.control.outcomes import Output
from quire.errors import InputError
from quire.llm import LLM
from quire.text.stop import Automaton
from quire.text.stream import TokenText
from quire.text.transcript import Transcript
from quire.vocabulary.params import MAX_BAD_WORD_IDS, SamplingParams
from quire.vocabulary.plan import Top

TEXT = TokenText(tokenizer())


@given(st.text("abc", max_size=20), st.lists(words, max_size=4), st.integers(0, 12), st.lists(st.integers(0, 20)))
def test_min_tokens_ignores_what_ends_before_it_and_nothing_else(
    text: str, stops: list[str], min_tokens: int, cuts: list[int]
) -> None:
    ids = tokenizer().encode(text)
    pieces = [tokenizer().convert_id(id) for id in ids]
    wanted = brute("".join(pieces), stops, start=len("".join(pieces[:min_tokens])))
    flow = TEXT.stream([], TEXT.resolve(SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None)))
    shown, found = "", None
    for start, end in pairwise([0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]):
        if found is None:
            piece, found = flow.push(ids[start:end], False)
            shown += piece
    if found is None:
        piece, found = flow.push([], True)
        shown += piece
    assert (shown, found) == wanted


def test_what_is_held_back_is_shown_at_the_end() -> None:
    """The beginning of a stop string, and of a character; also when it comes with the last token."""
    for text, stop in (("once up", "upon"), ("once \U0001f701", "x")):
        ids = tokenizer().encode(text)
        for tokens in (ids, ids[:-1]):
            for stops in ([stop], []):
                flow = TEXT.stream([], SamplingParams(stop=stops))
                assert flow.push(tokens, True) == (tokenizer().decode(tokens), None)


def test_stops_are_compiled_once_for_all_branches_and_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    made, init = [], Automaton.__init__
    monkeypatch.setattr(Automaton, "__init__", lambda self, stops: made.append(stops) or init(self, stops))
    params = SamplingParams(n=4, max_tokens=4, stop=["upon a", "x" * 200], ignore_eos=True)
    with LLM.of(echo_service.built()) as llm:  # type: ignore[arg-type]
        results = llm.generate([[1], [2], [3]], params, use_tqdm=False)
    assert sum(len(result.outputs) for result in results) == 12
    assert made == [("upon a", "x" * 200)]


def test_what_is_behind_a_stop_is_dropped_with_its_log_probabilities() -> None:
    ids = tokenizer().encode("once upon a time")
    read = len(tokenizer().encode("once upon"))
    told = list[tuple[int, str]]()
    params = TEXT.resolve(SamplingParams(stop=["upon"], logprobs=0))
    transcript = Transcript(TEXT, [1], params, lambda branch, stop: told.append((branch, stop)))
    tops = tuple(Top(id, -1.0, 1) for id in ids)
    found = transcript.read(Output("r", 0, tuple(ids), "", tops, None, None, False, -float(len(ids))))
    assert (found.text, found.tokens, found.tops) == ("once ", tuple(ids[:read]), tops[:read])
    assert found.cumulative_logprob == -read
    assert told == [(0, "upon")]


def test_resolving_twice_changes_nothing() -> None:
    params = TEXT.resolve(SamplingParams(stop=["a", "b"], bad_words=["upon", "quire of"]))
    assert params.bad_word_ids
    assert TEXT.resolve(params) is params


def test_bad_words_are_bounded_in_all() -> None:
    with pytest.raises(InputError, match=f"at most {MAX_BAD_WORD_IDS} tokens") as refused:
        TEXT.resolve(SamplingParams(bad_words=["xyz" * 80 + str(i) for i in range(128)]))
    assert refused.value.param == "bad_words"


def test_a_bad_word_that_is_no_text_is_named() -> None:
    with pytest.raises(InputError, match=r"bad_words\[1\]: text holds a lone surrogate") as refused:
        TEXT.resolve(SamplingParams(bad_words=["a", "\ud800"]))
    assert refused.value.param == "bad_words"
    with pytest.raises(InputError, match=f"at most {MAX_BAD_WORD_IDS} tokens"):
        SamplingParams(bad_word_ids=((1,) * 600, (2,) * 600))
