"""The numbers of the workloads, fixed: another engine was measured on them, so they must never change.
Endless sequences, and arrivals."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from quire.bench.arrivals import Burst, Poisson, Ramp, Uniform, parse_arrivals, poisson
from quire.bench.copying import PARTS
from quire.bench.workloads import BLOCK, MAX_PROMPT_TOKENS, MAX_REQUESTS, Copying, Endless, RequestSpec, parse
from quire.errors import StartupError

# From the generators that the other engines' runs used: name, seed, first lengths, sums of prompts and of outputs.
KNOWN = [
    ("sharegpt@1000", 0, [(92, 699), (66, 290), (180, 259)], 149518, 339714),
    ("sharegpt@64", 5, [(27, 826)], 7927, 17104),
    ("alpaca@1000", 0, [(17, 112), (14, 50), (23, 45)], 17797, 57453),
    ("alpaca@64", 5, [(9, 130)], 1042, 2885),
    ("longdoc@1000", 0, [(101785, 78), (90033, 54), (83113, 59)], 83378031, 75456),
    ("longdoc@64", 5, [(91894, 51)], 5226383, 4788),
    ("fixed:128:64@3", 0, [(128, 64)] * 3, 384, 192),
    ("shared:512:32:16@2", 0, [(544, 16)] * 2, 1088, 32),
]


@pytest.mark.parametrize(("name", "seed", "first", "prompts", "outputs"), KNOWN)
def test_lengths(name: str, seed: int, first: list[tuple[int, int]], prompts: int, outputs: int) -> None:
    lengths = parse(name).lengths(seed)
    assert lengths[: len(first)] == first
    assert sum(prompt for prompt, _ in lengths) == prompts
    assert sum(output for _, output in lengths) == outputs


@pytest.mark.parametrize(
    ("name", "start", "total", "last"),
    [
        ("sharegpt@1000", [15142, 16378, 24160, 30405], 2392271823, 15759),
        ("fixed:128:128@32", [15142, 16378, 24160, 30405], 66137590, 27032),
        ("shared:512:32:32@32", [15142, 16378, 24160], 283253840, 29215),
    ],
)
def test_prompts(name: str, start: list[int], total: int, last: int) -> None:
    workload = parse(name)
    jobs = workload.jobs(32000)
    assert jobs[0].prompt[: len(start)] == start
    assert sum(sum(job.prompt) for job in jobs) == total
    assert jobs[-1].prompt[-1] == last
    assert [(len(job.prompt), job.output) for job in jobs] == workload.lengths()


@pytest.mark.parametrize(
    ("mean_in", "mean_out", "ratio", "seed"),
    [(200, 330, "0.6", 11), (32, 64, ".25", 0), (7, 5, "0.3", 3), (9, 1, "0", 2)],
)
def test_a_range_has_the_lengths_of_vllms_random_data_set(mean_in: int, mean_out: int, ratio: str, seed: int) -> None:
    """Its `--random-range-ratio`, for a tokenizer that adds no special tokens: the same seed, the same lengths."""
    rng, share = np.random.default_rng(seed), float(ratio)
    drawn = [
        rng.integers(max(1, math.floor(mean * (1 - share))), math.ceil(mean * (1 + share)) + 1, size=500)
        for mean in (mean_in, mean_out)
    ]
    lengths = parse(f"range:{mean_in}:{mean_out}:{ratio}@500").lengths(seed)
    assert lengths == list(zip(*(one.tolist() for one in drawn)))
    for at, mean in enumerate((mean_in, mean_out)):
        assert np.mean([pair[at] for pair in lengths]) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize(
    "name",
    [
        "range:5:5@3", "range:5:5:1@3", "range:5:5:1.5@3", "range:5:5:-0.1@3", "range:5:5:nan@3", "range:5:5:@3",
        "range:0:5:0.5@3", "range:5:5:0.5:0.5@3",
        "", "sharegpt", "sharegpt@", "sharegpt@0", "sharegpt@-1", "sharegpt@1e3", "sharegpt@100001", "wmt@10",
        "fixed@4", "fixed:1@4", "fixed:1:2:3@4", "fixed:0:1@4", "fixed:1:x@4", "fixed:1:99999999999@4",
        "shared:1:2@3", "sharegpt:1@3", "alpaca@٣", "alpaca@" + "9" * 5000,
    ],
)  # fmt: skip
def test_bad_names_say_what_was_expected(name: str) -> None:
    with pytest.raises(StartupError, match=r"Expected sharegpt@N, alpaca@N, longdoc@N, fixed:IN:OUT@N") as caught:
        parse(name)
    assert len(str(caught.value)) < 400


def test_bounds() -> None:
    with pytest.raises(StartupError, match="vocabulary of more than 20"):
        parse("alpaca@1").jobs(20)
    with pytest.raises(StartupError, match=f"At most {MAX_PROMPT_TOKENS:,}"):
        parse("fixed:100000:1@100000").jobs(32000)


# name, mean prompt and output, how far off as a share, and the longest request there may be. Where the paper states a
# mean, the share is small; the others pin what is assumed.
MEANS = [
    ("sharegpt@20000", 161, 338, 0.03, 2048),
    ("alpaca@20000", 18.5, 57, 0.03, 640),
    ("longdoc@20000", 82_500, 75, 0.01, 110_100),
    ("sharegpt1085@20000", 350, 735, 0.03, 8192),
    ("mmlu-pro@20000", 1395, 212, 0.02, 3076),  # Jenga: at most 3076
    ("mmmu-pro@20000", 6193 + 43, 212, 0.02, 6193 + 256 + 512),  # Jenga: 6193 and 43
    ("wmt1shot@20000", 80 + 27.5, 35.5, 0.02, 80 + 96 + 128),
    ("wmt5shot@20000", 341 + 27.5, 35.5, 0.02, 341 + 96 + 128),
    ("chat@20000", 820, 302, 0.03, 2048),
    ("arxiv-qa@20000", 92_333, 75, 0.01, 131_072),  # Jenga: 92,408 together
    ("docqa:200:20000@20000", 20_040, 75, 0.03, 25_164),
    ("ramp:38000:118000@20000", 78_000, 75, 0.01, 129_900),
]


@pytest.mark.parametrize(("name", "prompt", "output", "share", "longest"), MEANS)
def test_means_and_limits(name: str, prompt: float, output: float, share: float, longest: int) -> None:
    lengths = np.array(parse(name).lengths(seed=11))
    assert lengths.shape == (20_000, 2)
    assert parse(name).lengths(seed=12) != lengths.tolist()
    assert lengths[:, 0].mean() == pytest.approx(prompt, rel=share)
    assert lengths[:, 1].mean() == pytest.approx(output, rel=share)
    assert lengths.min() >= 1
    assert lengths.sum(1).max() <= longest


def test_means_that_papers_state_of_whole_requests() -> None:
    assert np.mean([sum(pair) for pair in parse("sharegpt1085@50000").lengths()]) == pytest.approx(1085.04, rel=0.01)
    assert np.mean([sum(pair) for pair in parse("arxiv-qa@50000").lengths()]) == pytest.approx(92_408, rel=0.005)
    texts = [prompt - 6193 for prompt, _ in parse("mmmu-pro@50000").lengths()]
    assert np.mean(texts) == pytest.approx(43, rel=0.02)


def test_most_chat_prompts_are_cut() -> None:
    """PagedAttention §6.5: "the input prompts for most requests have 1024 tokens"; no KV outlives a round."""
    specs = parse("chat@5000").specs()
    assert 0.5 < sum(request.prompt_len == 1024 for request in specs) / len(specs) < 0.8
    assert max(request.prompt_len for request in specs) == 1024
    assert max(request.output_len for request in specs) == 1024
    assert {request.prefix_len for request in specs} == {0}


@pytest.mark.parametrize(("name", "prefix"), [("wmt1shot@30", 80), ("wmt5shot@30", 341), ("shared:512:32:2@4", 512)])
def test_translations_share_their_examples(name: str, prefix: int) -> None:
    jobs = parse(name).jobs(5000)
    assert len({tuple(job.prompt[:prefix]) for job in jobs}) == 1
    assert all(a.prompt[prefix : prefix + 4] != b.prompt[prefix : prefix + 4] for a, b in combinations(jobs, 2))


@pytest.mark.parametrize(("name", "documents", "each"), [("docqa:3:400@10", 3, {3, 4}), ("arxiv-qa@8", 2, {4})])
def test_questions_share_their_document(name: str, documents: int, each: set[int]) -> None:
    workload = parse(name)
    specs = workload.specs()
    asked = Counter(request.prefix_id for request in specs)
    assert len(asked) == documents
    assert set(asked.values()) == each
    jobs = workload.jobs(5000)
    for (one, a), (other, b) in combinations(zip(specs, jobs), 2):
        shared = one.prefix_id == other.prefix_id
        assert (one.prefix_len == other.prefix_len) or not shared
        assert (a.prompt[: one.prefix_len] == b.prompt[: other.prefix_len]) == shared
        assert a.prompt[one.prefix_len :] != b.prompt[other.prefix_len :]


@pytest.mark.parametrize(("name", "first", "last"), [("ramp:40:4000@3000", 40, 4000), ("ramp:900:90@3000", 900, 90)])
def test_mean_lengths_ramp(name: str, first: int, last: int) -> None:
    prompts = np.array([prompt for prompt, _ in parse(name).lengths(seed=5)])
    means = np.linspace(first, last, 3000)
    assert (abs(prompts / means - 1) < 0.13).all()
    assert prompts[1000:2000].mean() == pytest.approx((first + last) / 2, rel=0.02)
    assert np.corrcoef(prompts, means)[0, 1] > 0.95


def test_a_workload_is_parsed_already() -> None:
    workload = parse("alpaca@3")
    assert parse(workload) is workload
    assert workload.specs() == [RequestSpec(*pair) for pair in workload.lengths()]


NAMES = ("sharegpt", "alpaca", "chat", "wmt1shot", "arxiv-qa", "docqa:3:900", "shared:9:9:9", "fixed:9:9")


@pytest.mark.parametrize("name", NAMES)
def test_a_longer_sequence_begins_with_a_shorter_one(name: str) -> None:
    long = Endless(name, BLOCK + 30).specs(7)
    assert len(long) == BLOCK + 30
    for count in (1, 63, 65, BLOCK, BLOCK + 1):
        assert Endless(name, count).specs(7) == long[:count]


@pytest.mark.parametrize("name", ["arxiv-qa", "docqa:3:900"])
def test_blocks_have_documents_of_their_own(name: str) -> None:
    made = Endless(name, 2 * BLOCK)
    lengths: dict[str, int] = {}
    for request in made.specs():
        assert lengths.setdefault(request.prefix_id, request.prefix_len) == request.prefix_len
    assert len(lengths) == (6 if name.startswith("docqa") else 2 * BLOCK // 4)


def test_prefixes_of_every_request_stay_one() -> None:
    for name in ("wmt1shot", "shared:9:9:9"):
        assert len({request.prefix_id for request in Endless(name, BLOCK + 1).specs()}) == 1


@pytest.mark.parametrize(("rate", "seconds", "count"), [(1e-6, 1, 1), (2, 3, 6), (2.1, 3, 7), (1e5, 1, MAX_REQUESTS)])
def test_as_many_as_come(rate: float, seconds: float, count: int) -> None:
    assert Endless.lasting("alpaca", rate, seconds).requests == count


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("poisson:2", [0.06493056800199325, 0.17432200126102837, 0.4310614979532345]),
        ("uniform:4", [0.0, 0.25, 0.5, 0.75, 1.0]),
        ("burst:3@10", [0.0, 0.0, 0.0, 10.0, 10.0, 10.0, 20.0]),
    ],
)
def test_times(text: str, times: list[float]) -> None:
    assert parse_arrivals(text).times(len(times)) == pytest.approx(times)


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
    times = parse_arrivals("ramp:3:3:5").times(200, seed=4)
    assert times == pytest.approx(poisson(200, 3.0, seed=4))
    assert times == sorted(times) != parse_arrivals("ramp:3:3:5").times(200, seed=5)


@pytest.mark.parametrize(
    ("text", "arrivals"),
    [
        ("poisson:0.12345678901234568", Poisson(0.12345678901234568)),
        ("poisson:1e3", Poisson(1000.0)),
        ("uniform:2.5", Uniform(2.5)),
        ("burst:20@1e-3", Burst(20, 0.001)),
        ("ramp:0:4:60", Ramp(0.0, 4.0, 60.0)),
    ],
)
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


def test_texts_to_copy_are_of_a_seed_and_no_part_is_twice_in_one() -> None:
    copying = parse("copy:8@3")
    assert isinstance(copying, Copying)
    texts = copying.texts(seed=5)
    assert texts == copying.texts(seed=5)
    assert len({*texts, *copying.texts(seed=6)}) == 6
    for text in texts:
        assert text.count(".") == 8
        assert all(sum(text.count(part) for part in parts) == 8 for parts in PARTS)
        assert max(text.count(part) for parts in PARTS for part in parts) == 1
    with pytest.raises(StartupError, match="lengths only a model's tokenizer gives"):
        copying.jobs(1000)
    with pytest.raises(StartupError, match="'13' in the workload 'copy:13@1' is not a whole number from 1 to 12"):
        parse("copy:13@1")
