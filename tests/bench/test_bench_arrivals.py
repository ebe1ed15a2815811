"""Arrivals: their rates, that they never decrease, and that a wrong name is refused whatever it holds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.arrivals import Burst, Poisson, Ramp, Uniform, parse_arrivals, poisson
from quire.errors import StartupError


def test_poisson_arrivals() -> None:
    times = poisson(20_000, 4.0, seed=1)
    assert times == poisson(20_000, 4.0, seed=1) == Poisson(4.0).times(20_000, seed=1)
    assert times != poisson(20_000, 4.0, seed=2)
    gaps = np.diff([0.0, *times])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)  # exponential: deviation equals mean


def test_poisson_arrivals_stay_what_they_were() -> None:
    assert poisson(3, 2.0) == pytest.approx([0.06493056800199325, 0.17432200126102837, 0.4310614979532345])


def test_uniform_arrivals() -> None:
    assert parse_arrivals("uniform:4").times(5) == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_bursts() -> None:
    assert parse_arrivals("burst:3@10").times(7) == [0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 20.0]


@pytest.mark.parametrize(("first", "last"), [(10, 100), (100, 10), (0, 100), (50, 50)])
def test_a_ramp_has_the_rate_that_it_says(first: int, last: int) -> None:
    """Arrivals in each second of the ramp, and after it, over many seeds."""
    seconds, runs = 10, 300
    ramp = parse_arrivals(f"ramp:{first}:{last}:{seconds}")
    expected = (first + last) / 2 * seconds
    counts = np.zeros(12)
    for seed in range(runs):
        times = np.array(ramp.times(int(expected) + 3 * last + 200, seed))
        assert times[-1] > 12
        counts += np.histogram(times, bins=12, range=(0, 12))[0]
    for second, count in enumerate(counts / runs):
        rate = first + (last - first) * min(second + 0.5, seconds) / seconds if second < seconds else last
        assert count == pytest.approx(rate, abs=5 * (rate / runs) ** 0.5)


def test_a_ramp_that_stays_level_is_poisson() -> None:
    assert parse_arrivals("ramp:3:3:5").times(200, seed=4) == pytest.approx(poisson(200, 3.0, seed=4))


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("poisson:2", Poisson(2.0)), ("poisson:0.12345678901234568", Poisson(0.12345678901234568)),
        ("poisson:1e3", Poisson(1000.0)),
        ("uniform:2.5", Uniform(2.5)), ("burst:20@1e-3", Burst(20, 0.001)), ("ramp:0:4:60", Ramp(0.0, 4.0, 60.0)),
        ("ramp:0.0:4:60", Ramp(0.0, 4.0, 60.0)),
    ],
)  # fmt: skip
def test_names(text: str, arrivals: object) -> None:
    assert parse_arrivals(text) == arrivals


@pytest.mark.parametrize(
    "text",
    [
        "", "poisson", "poisson:", "poisson:0", "poisson:-1", "poisson:nan", "poisson:inf", "poisson:1:2",
        "poisson:1e7", "poisson:1e-7", "poisson:1e99", "poisson: 1", "poisson:1_0", "poisson:٣", "poisson:.5",
        "uniform:", "burst:3", "burst:0@1", "burst:1.5@1", "burst:100001@1", "burst:3@0", "burst:3:1", "ramp:1:2",
        "ramp:1:0:5", "ramp:1:2:0", "ramp:-0:1:2", "ramp::1:2", "poisson@1", "Poisson:1", "poisson:" + "9" * 5000,
    ],
)  # fmt: skip
def test_bad_names_are_refused(text: str) -> None:
    with pytest.raises(StartupError, match=r"Expected|whole number") as caught:
        parse_arrivals(text)
    assert len(str(caught.value)) < 400


NUMBERS = st.floats(1e-6, 1e6)


@given(
    st.one_of(
        NUMBERS.map(lambda rate: f"poisson:{rate!r}"),
        NUMBERS.map(lambda rate: f"uniform:{rate!r}"),
        st.builds("burst:{}@{!r}".format, st.integers(1, 100_000), NUMBERS),
        st.builds("ramp:{!r}:{!r}:{!r}".format, st.just(0.0) | NUMBERS, NUMBERS, NUMBERS),
    ),
    st.integers(1, 200),
    st.integers(0, 2**32),
)
def test_times_are_finite_and_never_decrease(text: str, count: int, seed: int) -> None:
    arrivals = parse_arrivals(text)
    times = arrivals.times(count, seed)
    assert times == arrivals.times(count, seed)
    assert len(times) == count
    assert np.isfinite(times).all()
    assert times[0] >= 0
    assert all(a <= b for a, b in pairwise(times))


@given(st.text(max_size=30) | st.from_regex(r"(poisson|uniform|burst|ramp):[0-9.@:eE+-]{0,12}", fullmatch=True))
def test_any_text_is_arrivals_or_refused(text: str) -> None:
    try:
        arrivals = parse_arrivals(text)
    except StartupError:
        return
    assert text.startswith(type(arrivals).__name__.lower() + ":")
    assert all(value >= 0 for value in arrivals)
