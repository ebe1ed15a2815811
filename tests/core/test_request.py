"""SamplingParams refuse every bad value with an error that names field and limit; refused requests leave no trace."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from memories import MAX_LEN, MEMORIES, VOCAB
from traces import Asked, open_trace

from quire.errors import InputError, Overloaded, PromptTooLong, QuireError
from quire.protocol.sampling_params import PARAMS, SamplingParams
from quire.protocol.seeds import branch_seed, splitmix64

NAN, INF = math.nan, math.inf
NUMBERS = {  # field: (low, high)
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
}
INTEGERS = {
    "n": (1, 128),
    "top_k": (-1, 2**31 - 1),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "seed": (-(2**63), 2**63 - 1),
}
FLAGS = ("ignore_eos", "speculate", "skip_special_tokens", "include_stop_str_in_output", "detokenize")
MANY = dict.fromkeys(range(1025), 0.0)
LISTS: dict[str, list[Any]] = {
    "stop": [5, b"x", [5], [""], ["x" * 257], ["x"] * 17, {"a": 1}, [None], "", 0, True],
    "stop_token_ids": [5, "5", ["5"], [-1], [1.0], [True], [2**31], {1: 1}, 0, False, "", {}],
    "bad_words": [5, [b"x"], [""], ["x" * 257], ["x"] * 129, {"a": 1}],
    "logprob_token_ids": [5, "5", ["5"], [-1], [1.0], [True], [2**31], {1: 1}, list(range(129)), [1] * 129, 0, "", {}],
    "allowed_token_ids": [[], 5, "5", [-1], [None], [2**40], {1: 1}, 0],
    "logit_bias": [[1], "1", {"x": 1.0}, {-1: 1.0}, {1: NAN}, {1: 100.5}, {1: "1"}, {None: 1.0}, {"9" * 40: 1.0}, MANY],
}


def refused(field: str, value: Any) -> str:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value)
    assert caught.value.param is not None
    assert caught.value.param.startswith(field)
    assert len(str(caught.value)) < 300
    return str(caught.value)


def test_every_declared_parameter_is_listed_above() -> None:
    apart = {"length_penalty", "best_of", "beam_width"}  # their bounds depend on other parameters
    assert {one.name for one in PARAMS} == {*NUMBERS, *INTEGERS, *FLAGS} | apart


@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_are_finite_and_within_limits(field: str) -> None:
    low, high = NUMBERS[field]
    for value in (NAN, INF, -INF, 10**400, -(10**400), math.nextafter(low, -INF), math.nextafter(high, INF)):
        assert f"between {low} and {high}" in refused(field, value)
    assert getattr(SamplingParams(**{field: high}), field) == high
    if field == "top_p":
        assert "above 0" in refused(field, low)
    else:
        assert getattr(SamplingParams(**{field: low}), field) == low


@pytest.mark.parametrize("field", INTEGERS)
def test_integers_outside_their_limits(field: str) -> None:
    low, high = INTEGERS[field]
    for value in (low - 1, high + 1, 10**5000, -(10**5000)):
        assert f"between {low} and {high}" in refused(field, value)
    for value in (NAN, INF, 1.0, 1.5):
        assert "must be an integer" in refused(field, value)


@pytest.mark.parametrize("field", [*NUMBERS, *INTEGERS])
def test_wrong_types_of_numbers(field: str) -> None:
    optional = field in ("max_tokens", "logprobs", "prompt_logprobs", "seed")
    for value in ("1", b"1", [1], (1,), {}, {"a": 1}, True, object(), 1j, *(() if optional else (None,))):
        assert type(value).__name__ in refused(field, value)


@pytest.mark.parametrize("field", FLAGS)
def test_flags_are_true_or_false(field: str) -> None:
    for value in (0, 1, "true", [], NAN):
        refused(field, value)
    assert "NoneType" in refused(field, None)


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in LISTS.items() for v in values], ids=str)
def test_lists(field: str, value: Any) -> None:
    refused(field, value)


def test_what_does_not_go_together() -> None:
    with pytest.raises(InputError, match=r"min_tokens must be at most max_tokens \(5\), got 6"):
        SamplingParams(min_tokens=6, max_tokens=5)
    assert SamplingParams(min_tokens=5, max_tokens=5).min_tokens == 5
    with pytest.raises(InputError, match="detokenize"):
        SamplingParams(stop=["x"], detokenize=False)
    with pytest.raises(InputError, match="stop") as caught:
        SamplingParams(stop=["x"], beam_width=2)
    assert caught.value.param == "stop"


def test_values_are_normalised() -> None:
    params = SamplingParams(stop="END", stop_token_ids=[3, 4], top_k=-1, logit_bias={"7": 1}, temperature=1)
    assert (params.stop, params.stop_token_ids, params.top_k) == (("END",), (3, 4), 0)
    assert params.logit_bias == {7: 1.0}
    assert isinstance(params.temperature, float)
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None).stop == ()
    assert SamplingParams(logprob_token_ids=[7, 3, 7]).logprob_token_ids == (7, 3)
    assert SamplingParams(logprob_token_ids=[], logprobs=5, beam_width=2).logprob_token_ids is None


def test_named_log_probabilities_and_what_they_go_with() -> None:
    assert [SamplingParams(logprobs=k).num_logprobs for k in (None, 0, 20)] == [-1, 0, 20]
    assert SamplingParams(logprob_token_ids=range(128)).num_logprobs == 0  # type: ignore[arg-type]
    params = SamplingParams(logprob_token_ids=[5, 6, 5], logprobs=2, prompt_logprobs=3, n=2, best_of=3)
    assert (
        params.num_logprobs,
        params.to_device_params().logprob_token_ids,
        params.to_device_params().prompt_logprobs,
    ) == (0, (5, 6), 3)
    assert dataclasses.replace(params, n=1).logprob_token_ids == (5, 6)
    for k in (0, 1, 3):
        with pytest.raises(
            InputError, match=rf"logprobs must be None or the number of .*_ids \(2\), got {k}"
        ) as caught:
            SamplingParams(logprob_token_ids=[5, 6], logprobs=k)
        assert caught.value.param == "logprobs"
    for values, what in (({"beam_width": 2}, "beam search"), ({"method": lambda: None}, "a method")):
        with pytest.raises(InputError, match=f"logprob_token_ids can't be combined with {what}") as caught:
            SamplingParams(logprob_token_ids=[5], **values)  # type: ignore[arg-type]
        assert caught.value.param == "logprob_token_ids"


def test_token_ids_beyond_the_vocabulary() -> None:
    for field, value in (
        ("stop_token_ids", [64]), ("allowed_token_ids", [1, 64]), ("logit_bias", {64: 1.0}),
        ("logprob_token_ids", [5, 64]),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"{field} holds token 64, but the vocabulary has 64"):
            SamplingParams(**{field: value}).check_vocabulary(64)
        SamplingParams(**{field: value}).check_vocabulary(65)


OK = SamplingParams(seed=5, max_tokens=6)
REFUSALS: dict[str, tuple[Any, SamplingParams, type[QuireError], str]] = {
    "empty": ((), OK, InputError, "empty"),
    "negative token": ((1, -1), OK, InputError, f"from 0 to {VOCAB - 1}"),
    "token beyond the vocabulary": ((1, VOCAB), OK, InputError, f"token 1 is {VOCAB}"),
    "float token": ((1.0,), OK, InputError, "integers"),
    "boolean token": ((True,), OK, InputError, "integers"),
    "text": ("abc", OK, InputError, "integers"),
    "huge token": ((10**300,), OK, InputError, "prompt token 0"),
    "too long for the model": ((1,) * MAX_LEN, OK, PromptTooLong, f"{MAX_LEN} tokens"),
    "too long for the memory": ((1,) * 4, SamplingParams(n=3, max_tokens=40), PromptTooLong, "KV memory"),
    "more branches than sequences": ((1,), SamplingParams(n=9), InputError, "at most 8"),
    "stop token": ((1,), SamplingParams(stop_token_ids=[VOCAB]), InputError, "stop_token_ids"),
    "token of a log-probability": ((1,), SamplingParams(logprob_token_ids=[1, VOCAB]), InputError, "logprob_token_ids"),
    "bias": ((1,), SamplingParams(logit_bias={VOCAB: 1.0}), InputError, "logit_bias"),
    "id in use": ((1,), OK, InputError, "in use"),
    "queue full": ((1,), OK, Overloaded, "queue is full"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_request_leaves_the_engine_undisturbed(name: str) -> None:
    """A canary decodes beside it, and another comes after it: their outputs and the pages are as ever."""
    prompt, params, error, message = REFUSALS[name]
    trace = open_trace(MEMORIES["paged-4"], depth=2, tokens=64)
    trace.add(Asked("canary", (1, 2, 3), SamplingParams(seed=1, max_tokens=20, ignore_eos=True), ""))
    trace.step()
    if name == "queue full":
        trace.engine.limits = trace.engine.limits._replace(max_queued=0)

    def state() -> tuple[object, ...]:
        engine, scheduler = trace.engine, trace.scheduler
        return engine.num_added, scheduler.last_seq_id, len(scheduler.waiting), set(engine.requests)

    before = state()
    with pytest.raises(error, match=message):
        trace.engine.add("canary" if name == "id in use" else "bad", prompt, params)
    assert before == state()
    trace.engine.limits = trace.engine.limits._replace(max_queued=10)
    trace.add(Asked("late", (1, 2, 3, 4, 5), OK, ""))
    trace.finish()


# The seeds of branches: distinct, pinned, and the same for numbers and arrays of them


def test_split_mix_is_the_published_generator() -> None:
    """The first outputs of the reference implementation (prng.di.unimi.it/splitmix64.c) for the state 1234567."""
    states = [(1234567 + i * 0x9E3779B97F4A7C15) % 2**64 for i in range(1, 6)]
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [splitmix64(state) for state in states] == known


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_the_first_branch_keeps_the_seed_and_no_two_share_one(seed: int) -> None:
    seeds = [branch_seed(seed, i) for i in range(128)]
    assert seeds[0] == seed % 2**63
    assert len(set(seeds)) == 128
    assert all(0 <= one < 2**63 for one in seeds)


def test_small_seeds_and_branches_are_all_distinct() -> None:
    """Seeds 1, 2, 3 with n=3 must not give a sample twice, as they would if branch i had seed + i."""
    assert len({branch_seed(seed, i) for seed in range(300) for i in range(128)}) == 300 * 128


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**32)), min_size=1))
def test_arrays_give_what_numbers_give(pairs: list[tuple[int, int]]) -> None:
    seeds, indices = np.array(pairs, dtype=np.uint64).T
    found = branch_seed(seeds, indices)
    assert found.dtype == np.uint64
    assert found.tolist() == [branch_seed(seed, index) for seed, index in pairs]


def test_pinned() -> None:
    """Saved seeds must give tomorrow what they give today."""
    assert [branch_seed(1, i) for i in range(4)] == [1, 8841707400507832956, 8095962701997021336, 2387646179595654958]
