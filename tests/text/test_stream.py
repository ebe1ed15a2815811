"""Stop strings, compared with brute force over the whole text; TokenText: they and min_tokens, bad words."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from echo_service import VOCAB, tokenizer
from hypothesis import given
from hypothesis import strategies as st

from quire.core.outputs import BranchOutput
from quire.core.request import DraftCounts
from quire.errors import InputError
from quire.protocol.sampling_params import MAX_BAD_WORD_IDS, SamplingParams
from quire.protocol.step_plan import TopLogprobs
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.request_detokenizer import RequestDetokenizer
from quire.text.stop_strings import StopAutomaton, StopChecker
from quire.text.text_backend import TextBackend

words = st.text("ab", min_size=1, max_size=5)


def brute(text: str, stops: list[str], include: bool = False, start: int = 0) -> tuple[str, str | None]:
    """The text up to the first match that ends behind `start` characters, and the match."""
    for end in range(start + 1, len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.text("abc", max_size=40), st.lists(words, max_size=4), st.lists(st.integers(0, 40)), st.booleans())
def test_equals_brute_force_whatever_the_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    watch = StopChecker(StopAutomaton(tuple(stops)), include)
    borders = [0, *sorted(cuts), len(text)]
    shown, found, arrived = "", None, ""
    for start, end in pairwise(borders):
        piece, found = watch.push(text[start:end])
        arrived, shown = arrived + text[start:end], shown + piece
        if found is None:  # held back: just what may still become a stop string
            held = arrived[len(shown) :]
            longest = max((n for s in stops for n in range(len(s)) if arrived.endswith(s[:n])), default=0)
            assert len(held) == longest
    shown += watch.flush()
    assert (shown, found) == brute(text, stops, include)


def test_a_stop_over_three_tokens_is_never_leaked() -> None:
    watch = StopChecker(StopAutomaton(("</end>",)))
    assert watch.push("text <") == ("text ", None)
    assert watch.push("/en") == ("", None)
    assert watch.push("d> more") == ("", "</end>")
    assert watch.push("and more") == ("", "</end>")
    assert watch.flush() == ""


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InputError, match="empty"):
        StopAutomaton(("a", ""))


def test_adversarial_text_follows_a_failure_link_a_character() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, at: Any) -> Any:
            self.reads += 1
            return super().__getitem__(at)

    automaton = StopAutomaton(tuple("a" * 255 + end for end in "bcdefghijklmnopq"))
    links = automaton._fail = Counted(automaton._fail)
    watch = StopChecker(automaton)
    for _ in range(10_000):
        watch.push("a")
    assert 9000 < links.reads < 10_000


TEXT = TextBackend(tokenizer(), GrammarCompiler(tokenizer(), VOCAB, (0,)))


@given(st.text("abc", max_size=20), st.lists(words, max_size=4), st.integers(0, 12), st.lists(st.integers(0, 20)))
def test_min_tokens_ignores_what_ends_before_it_and_nothing_else(
    text: str, stops: list[str], min_tokens: int, cuts: list[int]
) -> None:
    ids = tokenizer().encode(text)
    pieces = [tokenizer().token_text(id) for id in ids]
    wanted = brute("".join(pieces), stops, start=len("".join(pieces[:min_tokens])))
    flow = TEXT.new_detokenizer([], TEXT.resolve(SamplingParams(stop=stops, min_tokens=min_tokens, max_tokens=None)))
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
                flow = TEXT.new_detokenizer([], SamplingParams(stop=stops))
                assert flow.push(tokens, True) == (tokenizer().decode(tokens), None)


def test_what_is_behind_a_stop_is_dropped_with_its_log_probabilities() -> None:
    ids = tokenizer().encode("once upon a time")
    read = len(tokenizer().encode("once upon"))
    told = list[tuple[int, str]]()
    params = TEXT.resolve(SamplingParams(stop=["upon"], logprobs=0))
    transcript = RequestDetokenizer(TEXT, [1], params, lambda branch, stop: told.append((branch, stop)))
    tops = tuple(TopLogprobs(id, -1.0, 1) for id in ids)
    found = transcript.process(BranchOutput("r", 0, tuple(ids), "", tops, None, None, False, -float(len(ids))))
    assert (found.text, found.tokens, found.top_logprobs) == ("once ", tuple(ids[:read]), tops[:read])
    assert found.cumulative_logprob == -read
    assert told == [(0, "upon")]


def test_a_stop_string_may_begin_in_one_run_of_tokens_and_end_in_the_next() -> None:
    ids = tokenizer().encode("once upon a time")
    read = len(tokenizer().encode("once upon"))
    params = TEXT.resolve(SamplingParams(stop=["upon"]))
    for cut in range(1, len(ids)):
        told = list[tuple[int, str]]()
        transcript = RequestDetokenizer(TEXT, [1], params, lambda branch, stop, told=told: told.append((branch, stop)))
        runs = [BranchOutput("r", 0, tuple(run), "", (), None, None, False, 0.0) for run in (ids[:cut], ids[cut:])]
        found = [output for output in map(transcript.process, runs) if output is not None]
        assert "".join(output.text for output in found) == "once "
        assert [token for output in found for token in output.tokens] == ids[:read]
        assert told == [(0, "upon")]


def test_draft_tokens_after_a_stop_string_are_not_accepted() -> None:
    """Of a run all tokens but the last one are draft tokens, and those up to the stop string count."""
    ids = tokenizer().encode("once upon a time")
    read = len(tokenizer().encode("once upon"))
    params = TEXT.resolve(SamplingParams(stop=["upon"]))
    for cut in range(1, read):
        transcript = RequestDetokenizer(TEXT, [1], params, lambda branch, stop: None)
        counts = DraftCounts(20, cut - 1), DraftCounts(40, len(ids) - 2)
        runs = [
            BranchOutput("r", 0, tuple(run), "", (), None, None, False, 0.0, drafts=drafts)
            for run, drafts in zip((ids[:cut], ids[cut:]), counts)
        ]
        first, last = map(transcript.process, runs)
        assert first is not None
        assert first.drafts == counts[0]
        assert last is not None
        accepted = min(len(ids) - cut - 1, read - cut)
        assert last.drafts == (40, cut - 1 + accepted)


def test_resolving_twice_changes_nothing() -> None:
    params = TEXT.resolve(SamplingParams(stop=["a", "b"], bad_words=["upon", "quire of"]))
    assert params.bad_word_ids
    assert TEXT.resolve(params) is params


def test_a_bad_word_that_is_no_text_is_named() -> None:
    with pytest.raises(InputError, match=r"bad_words\[1\]: text holds a lone surrogate") as refused:
        TEXT.resolve(SamplingParams(bad_words=["a", "\ud800"]))
    assert refused.value.param == "bad_words"
    with pytest.raises(InputError, match="bad_words holds '  ', which has no tokens"):
        TEXT.resolve(SamplingParams(bad_words=["  "]))
    with pytest.raises(InputError, match=f"at most {MAX_BAD_WORD_IDS} tokens") as refused:
        TEXT.resolve(SamplingParams(bad_words=["xyz" * 80 + str(i) for i in range(128)]))
    assert refused.value.param == "bad_words"
    with pytest.raises(InputError, match=f"at most {MAX_BAD_WORD_IDS} tokens"):
        SamplingParams(bad_word_ids=((1,) * 600, (2,) * 600))
