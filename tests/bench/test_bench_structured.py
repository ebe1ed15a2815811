"""`quire bench structured`, `wire`, `start`, `histories` and `allocator`, and what a GPU's profile
is made of."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
from benching import bench, results

from bench import allocator
from bench.beam_histories import load_histories
from bench.histories import LONGEST, cut, parted
from bench.mixed import Timed, show
from bench.wire import ROWS
from quire.bench.structured import made_up
from quire.core import grammar_masks
from quire.distributed.rank_queries import divide_time, kernel_kind
from quire.memory.jenga.two_level_pool import TwoLevelPagePool
from quire.memory.page_pool import PagePool


def test_structured(tmp_path: Path) -> None:
    least = grammar_masks.JUMP_AHEAD_MIN_TOKENS
    given = ["--rows", "2", "--tokens", "8", "--repeat", "1", "--vocabulary", "1500", "--max-model-len", "160"]
    rows, one, forced, masks = results(tmp_path, "structured", *given, "--max-num-seqs", "2")
    assert (rows["held"], one["held"]) == (2, 1)
    assert set(rows["tokens_per_second"]) == set(one["tokens_per_second"]) == {"free", "schema"}
    assert forced["times"] > 0
    assert all(masks[name]["mask_us"]["p50"] <= masks[name]["mask_us"]["p99"] for name in ("text", "record", "counted"))
    assert least == grammar_masks.JUMP_AHEAD_MIN_TOKENS


def test_made_up_vocabularies() -> None:
    tokenizer = made_up(2000, 7)
    assert tokenizer.vocab_size == 2000
    assert tokenizer.eos_ids == (7,)
    assert {tokenizer.token_bytes(id) for id in range(2000) if id != 7} >= {bytes([byte]) for byte in range(256)}


def test_every_message_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["message"]: one for one in results(tmp_path, "wire", "--repeat", "2", "--ranks", "1")}
    assert found["plan of a fork"]["bytes"] < 64
    assert found["plan of 256 rows"]["bytes"] < 18 * 256
    there = [one for one in found.values() if "round_us" in one]
    assert len(there) == len(ROWS)
    for one in there:
        assert 0 < one["submit_us"]["best"] < one["round_us"]["best"] <= one["round_us"]["p50"]
    for one in (found["order without contents to 1 rank"], *there):
        assert 0 < one["arrays_us"]["best"] <= one["arrays_us"]["p50"] < 1e6
    for one in (one for one in found.values() if "encode_us" in one):
        assert 0 < one["encode_us"]["best"] <= one["encode_us"]["p50"]
        assert 0 < one["decode_us"]["best"] <= one["decode_us"]["p50"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in found)


def test_a_start_is_measured_to_its_third_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [result] = results(tmp_path, "start", "--device", "cpu", "--kv-tokens", "256")
    assert 0 < result["ready_s"] < result["token_s"][0] < result["token_s"][1] < result["token_s"][2]
    assert "tiny" in capsys.readouterr().out


def test_time_that_kernels_cover_together_is_counted_once() -> None:
    assert divide_time([]) == []
    assert divide_time([(0, 2), (5, 6)]) == [2, 1]
    assert divide_time([(5, 9), (0, 6), (1, 2), (9, 10)]) == [3, 5, 1, 1]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_decode", "_decode"),
        ("void at::native::elementwise<4>(int, float*)", "at::native::elementwise"),
        ("nvjet_sm90_tst_256x128_64x4_TNT", "nvjet_sm90_tst_256x128_64x4_TNT"),
    ],
)
def test_kernels_are_named_without_their_arguments(name: str, expected: str) -> None:
    assert kernel_kind(name) == expected


def test_steps_are_told_apart_by_their_prompts_and_ways() -> None:
    timed = Timed.__new__(Timed)
    timed.host = {(1, False): [2.0], (1, True): [1.0, 3.0, 9.0], (200, True): [4.0]}
    timed.device = {(1, False): [20.0], (1, True): [10.0, 30.0, 90.0], (200, True): [40.0]}
    assert timed.medians() == {
        0: {"eager_host_ms": 2, "eager_device_ms": 20, "eager_steps": 1,
            "replayed_host_ms": 3, "replayed_device_ms": 30, "replayed_steps": 3},
        200: {"replayed_host_ms": 4, "replayed_device_ms": 40, "replayed_steps": 1},
    }  # fmt: skip
    assert "200" in show([{"rows": 1, "context": 2, "prompt": 200, **timed.medians()[200]}])


def test_a_recording_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.histories.STORY", 200)
    flags = ("--threads", "1", "--prompts", "3", "--steps", "9", "--beam-width", "2", "--beam-width", "3")
    bench(tmp_path, "histories", "tiny", *flags)
    found = load_histories("sharegpt", tmp_path / "benched/result.json")
    assert {width: len(histories) for width, histories in found.items()} == {2: 3, 3: 3}
    assert all(len(history) == 9 for histories in found.values() for history in histories)
    assert "steps that fork" in capsys.readouterr().out


def test_prompts_are_cut_to_a_workloads_lengths() -> None:
    text = list(range(LONGEST + 100))
    jobs = cut("alpaca", 5, text)
    assert [job.prompt for job in jobs] == [text[job.prompt[0] :][: len(job.prompt)] for job in jobs]
    assert len({len(job.prompt) for job in jobs}) > 1


def test_steps_that_fork() -> None:
    assert parted("00 . 10 11") == 0.5  # a change of order forks nobody


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a tenth of the benchmark's pages, and no collection of all that the tests of this process hold."""
    monkeypatch.setattr(allocator, "PAGES", 625)
    monkeypatch.setattr("gc.collect", lambda: 0)


@pytest.mark.usefixtures("small")
def test_every_case_is_measured_in_one_level_and_in_two() -> None:
    results = allocator.run(Namespace(repeats=1))
    assert [(one["ledger"], one["case"]) for one in results] == [
        (ledger, case) for ledger in ("one level", "two levels") for case in allocator.CASES
    ]
    assert all(one["us_a_page"] > 0 for one in results)
    assert len(allocator.show(results).splitlines()) == 1 + len(results)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("case", [case for case in allocator.CASES if "evicting" in case])
@pytest.mark.parametrize("build", [allocator.one_level, allocator.two_level])
def test_what_is_said_to_evict_does(case: str, build: type[PagePool] | type[TwoLevelPagePool]) -> None:
    ledger = build()  # type: ignore[call-arg]
    _, pages = allocator.CASES[case](ledger)
    assert ledger.evictions > 0.9 * pages
