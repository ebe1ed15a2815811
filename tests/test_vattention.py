"""The paper's interface: reqIds and lengths beside a model of them, on the driver that checks and over real pages; bad
input, shortage and failing calls change nothing; a thread maps what a call would."""

from __future__ import annotations

import random
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.fake_driver import FakeDriver
from quire import vattention
from quire.errors import InputError, StartupError
from quire.vattention import Counts, VAttention, init
from quire.worker.virtual import Driver, DriverError
from quire.worker.virtual.memfd import MemfdDriver

N, B, L, H, D, P, PAGE = 2, 4, 48, 2, 32, 4, 4096  # a page holds 16 tokens of a layer: 3 for a whole request
linux = pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")


def fake(cache: VAttention) -> FakeDriver:
    assert isinstance(cache.driver, FakeDriver)
    return cache.driver


def state(cache: VAttention) -> tuple[object, ...]:
    """What a refused call must leave as it is."""
    places = dict(fake(cache).mapping_table.page_by_address)
    return (
        [list(pages) for pages in cache.mapped],
        list(cache.lengths),
        list(cache.inactive),
        cache._count_free(),
        places,
    )


def counted(cache: VAttention) -> tuple[int, ...]:
    return cache.counts()[:6]


def examine(cache: VAttention) -> None:
    """The driver has mapped, in every buffer, what the ledger says, and nothing else."""
    cache.check()
    wanted = {
        cache._address_of(part, reqid, at): part * cache.pages + page - 1
        for part in range(cache.buffers.num_buffers)
        for reqid, pages in enumerate(cache.mapped)
        for at, page in enumerate(pages)
    }
    assert cache.driver.mapping_table.page_by_address == wanted  # type: ignore[attr-defined]


Make = Callable[..., VAttention]


@pytest.fixture
def made() -> Iterator[Make]:
    """Makes caches, and closes them at the end."""
    with ExitStack() as stack:

        def make(pages: int = 12, fail_at: int = 0, **more: Any) -> VAttention:
            one = init(N, B, L, H, D, P, PAGE, pages=pages, driver=FakeDriver(PAGE, fail_at), **more)
            stack.callback(one.close)
            return one

        yield make


@pytest.fixture
def cache(made: Make) -> VAttention:
    return made()


# Table 4


def test_it_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from quire.vattention import init\n"
        "from bench.fake_driver import FakeDriver\n"
        "assert init(2, 4, 48, 2, 32, 4, 4096, pages=4, driver=FakeDriver(4096)).step([0] * 4) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@linux
@pytest.mark.parametrize("layout", ["layer", "sliced", "sliced:2"])
def test_tensors(layout: str) -> None:
    """2N of [B, L, H, D], in which a request's tokens are its own, whatever pages they lie in."""
    with_padding = 40  # tokens: two and a half pages, so that a reqId's place is longer than L tokens
    for size, dtype in ((2, torch.float16), (1, torch.uint8)):
        other = init(1, 1, 64, 2, 32, size, PAGE, pages=1)
        assert other.tensors[0].dtype == dtype
        other.close()
    cache = init(3, B, with_padding, H, D, P, PAGE, pages=20, layout=layout)
    tensors = cache.tensors
    assert [tensor.shape for tensor in tensors] == 6 * [(B, with_padding, H, D)]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert all(tensor.stride()[-2:] == (D, 1) for tensor in tensors)
    one, two = cache.alloc_reqid(), cache.alloc_reqid()
    lens = [0] * B
    for lens[one], lens[two] in [(3, 17), (17, 18), (40, 40)]:
        assert cache.step(lens) == 0
    for i, tensor in enumerate(tensors):
        for reqid in (one, two):
            tensor[reqid, :40] = 10 * i + reqid
    assert all((tensors[i][reqid, :40] == 10 * i + reqid).all() for i in range(6) for reqid in (one, two))
    with pytest.raises(DriverError, match=r"tensors live over these addresses: float32\[4, 40, 2, 32\]"):
        cache.close()
    assert len(cache.tensors) == 6
    assert cache.step(lens) == 0
    del tensors, tensor
    cache.close()
    cache.close()
    assert cache.driver.physical() == 0
    with pytest.raises(InputError, match="closed"):
        cache.step(lens)


@pytest.mark.parametrize("kind", [FakeDriver, pytest.param(MemfdDriver, marks=linux)])
def test_addresses_of_a_large_model(kind: Callable[[int], Driver]) -> None:
    """§5.1.1: Yi-34B on one of two workers, 500 requests of 200K tokens: 12 TB, with one page of memory for each."""
    page, tokens = 2**21, 200 * 1024
    cache = init(60, 500, tokens, 4, 128, 2, page, pages=1, driver=kind(page))
    assert len(cache.buffer_addresses) == 120
    assert cache.buffers.total_address_bytes(500, tokens) == 12 * 10**6 * 2**20
    last = cache.alloc_reqid()
    lens = [2048 * (reqid == last) for reqid in range(500)]
    assert cache.step(lens) == 0
    lens[last] += 1
    assert cache.step(lens) == -1
    if cache.tensors:
        cache.tensors[-1][last, 2047, -1, -1] = 1
    cache.close()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (("free_reqid", 4), "no reqId is 4; they are 0 to 3"),
        (("free_reqid", -1), "no reqId is -1"),
        (("free_reqid", None), "no reqId is None"),
        (("free_reqid", 2), "reqId 2 is not active"),
        (("step", [1, 1, 0]), "3 lengths; there must be one for each of B = 4"),
        (("step", [49, 1, 0, 0]), "a length of 49 tokens for reqId 0; it must be from 0 to L = 48"),
        (("step", [1, -1, 0, 0]), "a length of -1 tokens for reqId 1"),
        (("step", [1, 1.5, 0, 0]), "a length of 1.5 tokens"),
        (("step", [1, 10**100, 0, 0]), "a length of 1000"),
        (("step", [1, 1, 1, 0]), "a length of 1 tokens for reqId 2, which is not active"),
        (("alloc_reqid", 49), "from 0 to L = 48"),
    ],
)
def test_bad_input_changes_nothing(cache: VAttention, call: tuple[str, Any], words: str) -> None:
    cache.alloc_reqid()
    cache.alloc_reqid()
    assert cache.step([20, 1, 0, 0]) == 0
    before, (name, given_value) = state(cache), call
    with pytest.raises(InputError, match=words) as caught:
        getattr(cache, name)(given_value)
    assert caught.value.param in ("reqid", "seq_lens", "length")
    assert len(str(caught.value)) < 250
    assert state(cache) == before
    examine(cache)


@pytest.mark.parametrize(
    ("name", "value"),
    [("N", 0), ("B", -1), ("B", 10**6), ("L", 1.5), ("H", 0), ("D", "x"), ("P", 3), ("P", 16), ("page_size", 0),
     ("pages", 0), ("device", "tpu"), ("dtype", torch.float16), ("page_size", 8192)],
)  # fmt: skip
def test_bad_sizes(name: str, value: Any) -> None:
    given_values: dict[str, Any] = {"N": N, "B": B, "L": L, "H": H, "D": D, "P": P, "page_size": PAGE, "pages": 4}
    with pytest.raises(InputError, match=r"must be|not those of|have 4,096") as caught:
        init(**{**given_values, "driver": FakeDriver(PAGE), name: value})
    assert caught.value.param == ("P" if name == "dtype" else name)


def test_what_the_machine_can_not_have(made: Make) -> None:
    with pytest.raises(StartupError, match="is no layout"):
        made(layout="diced")
    with pytest.raises(StartupError, match="addresses in a row"):
        init(N, 2**16, 2**31, H, D, P, PAGE, pages=4, driver=FakeDriver(PAGE))
    with pytest.raises(StartupError, match="no multiple"):
        init(N, B, L, H, D, P, 5000, pages=4)
    with pytest.raises(StartupError, match=r"vm\.max_map_count"):
        init(32, 256, 2**20, 8, 128, 2, PAGE, pages=2**20)


def test_shortage_is_an_answer_and_changes_nothing(made: Make) -> None:
    cache = made(pages=4)
    for _ in range(3):
        cache.alloc_reqid()
    assert cache.step([32, 16, 0, 0]) == 0
    before = state(cache)
    assert cache.step([33, 17, 1, 0]) == -1
    assert cache.step([48, 16, 16, 0]) == -1
    assert state(cache) == before
    assert cache.counts().failures == 2
    cache.free_reqid(1)
    assert cache.step([48, 0, 16, 0]) == 0
    assert [len(pages) for pages in cache.mapped] == [3, 0, 1, 0], "what the freed one had went to others"
    assert cache.counts().reclaimed == 1
    examine(cache)


# The policies of §6


def test_deferred_reclamation_is_best_fit(made: Make) -> None:
    """A request gets the reqId with the fewest pages that suffice; with none that does, the one with the most."""
    cache = made(pages=30)
    ids = [cache.alloc_reqid() for _ in range(B)]
    assert cache.step([16, 48, 32, 0]) == 0
    for reqid in ids:
        cache.free_reqid(reqid)
    maps = fake(cache).counters.maps
    assert cache.alloc_reqid(length=20) == 2
    assert cache.step([0, 0, 20, 0]) == 0
    assert fake(cache).counters.maps == maps, "nothing had to be mapped"
    assert cache.alloc_reqid(length=48) == 1
    assert cache.alloc_reqid(length=33) == 0, "one page there is better than none"
    assert cache.step([33, 48, 20, 0]) == 0
    assert counted(cache)[3] == 1 + 3 + 2 + 2
    again = made(pages=30)
    assert (again.alloc_reqid(), again.alloc_reqid()) == (0, 1)
    assert again.step([0, 20, 0, 0]) == 0
    again.free_reqid(0)
    again.free_reqid(1)
    assert again.alloc_reqid() == 1, "an unknown length is a mean one: not the first that is inactive"


def test_eager_pages_are_given_up_where_others_need_them(made: Make) -> None:
    cache = made(pages=3)
    cache.alloc_reqid()
    assert cache.step([16, 0, 0, 0]) == 0
    cache.map_ahead()
    assert [len(pages) for pages in cache.mapped] == [2, 1, 0, 0]
    cache.alloc_reqid()
    cache.alloc_reqid()
    assert cache.step([16, 16, 16, 0]) == 0, "the page ahead is needed by another"
    assert [len(pages) for pages in cache.mapped] == [1, 1, 1, 0]
    examine(cache)


def test_reclamation_below_a_tenth_free() -> None:
    """Cached pages stay as long as a tenth of all is free. Then those of the longest unused reqId go, of the next one
    all but a mean request's; these only if there are no others."""
    cache = init(N, 8, 320, H, D, P, PAGE, pages=40, driver=FakeDriver(PAGE))

    def step(*pages: int) -> tuple[int, ...]:
        """Free, cached and active pages after a step of requests that fill so many."""
        assert cache.step([16 * count for count in pages] + [0] * (8 - len(pages))) == 0
        cache.map_ahead()
        examine(cache)
        return counted(cache)[:3]

    cache.alloc_reqid()
    assert cache.step([16] + 7 * [0]) == 0
    assert (cache.alloc_reqid(), cache.alloc_reqid()) == (1, 2)
    assert cache.step([16, 160, 160] + 5 * [0]) == 0
    cache.free_reqid(1)
    cache.free_reqid(2)
    assert step(15) == (4, 20, 16), "a page ahead, too; a tenth is still free"
    assert counted(cache)[5] == 0
    assert step(18) == (4, 17, 19)
    assert [len(pages) for pages in cache.mapped[:3]] == [19, 7, 10]
    assert cache.alloc_reqid() == 1
    assert step(18, 14) == (3, 3, 34), "the next reqId keeps what a mean request has"
    assert step(18, 17) == (0, 3, 37)
    assert step(19, 20) == (0, 1, 39)
    assert step(20, 20) == (0, 0, 40), "all that there is"
    cache.close()


def test_a_step_keeps_a_tenth_free_where_nobody_maps_ahead(made: Make) -> None:
    cache = made(pages=10)
    for _ in range(3):
        cache.alloc_reqid()
    assert cache.step([16, 16, 16, 0]) == 0
    assert cache.step([48, 48, 48, 0]) == 0
    cache.map_ahead()
    assert counted(cache)[:3] == (1, 0, 9), "nothing is mapped eagerly of the last tenth"
    cache.free_reqid(1)
    assert (cache.alloc_reqid(), cache.alloc_reqid()) == (1, 3)
    cache.free_reqid(1)
    assert cache.step([48, 0, 48, 16]) == 0
    assert [len(pages) for pages in cache.mapped] == [3, 2, 3, 1]
    assert counted(cache)[0] == 1


def test_the_next_requests_pages_go_before_those_ahead_of_active_ones(made: Make) -> None:
    cache = made(pages=4)
    cache.alloc_reqid()
    assert cache.step([16, 0, 0, 0]) == 0
    cache.map_ahead()
    assert cache.alloc_reqid() == 1
    cache.map_ahead()
    assert [len(pages) for pages in cache.mapped] == [2, 1, 1, 0]
    assert cache.step([16, 32, 0, 0]) == 0
    assert [len(pages) for pages in cache.mapped] == [2, 2, 0, 0]


def test_pages_that_lie_apart(made: Make) -> None:
    """What comes back is not in a row: each page is mapped for itself."""
    cache = made(pages=6)
    assert (cache.alloc_reqid(), cache.alloc_reqid()) == (0, 1)
    for length in (16, 32, 48):
        assert cache.step([length, length, 0, 0]) == 0
    assert cache.mapped[:2] == [[1, 3, 5], [2, 4, 6]]
    assert cache.alloc_reqid() == 2
    assert cache.step([0, 48, 48, 0]) == 0
    assert cache.mapped[:3] == [[], [2, 4, 6], [1, 3, 5]]
    examine(cache)


def test_enqueued_work_is_waited_for_before_anything_is_unmapped(made: Make) -> None:
    cache = made(pages=3)
    reqid = cache.alloc_reqid()
    assert cache.step([48, 0, 0, 0]) == 0
    token = fake(cache).pin(cache._address_of(0, reqid, 0), 3 * PAGE)  # a step in flight that reads it
    cache.free_reqid(reqid)
    other = cache.alloc_reqid(length=1)
    assert other == reqid
    another = cache.alloc_reqid()
    lens = [0] * B
    lens[another] = 48
    assert cache.step(lens) == 0, "the pages of the active one without tokens"
    fake(cache).unpin(token)
    examine(cache)


# Calls that fail


def test_a_failing_map_is_rolled_back(made: Make) -> None:
    """At the k-th page of a step, whichever: the same step succeeds when tried again."""
    first = 8 * 2 * N  # pages that init maps once
    for k in range(1, 2 * N * 4 + 1):
        cache = made(pages=8, fail_at=first + 2 * N * 2 + k)
        cache.alloc_reqid()
        cache.alloc_reqid()
        assert cache.step([20, 0, 0, 0]) == 0
        before = state(cache)
        with pytest.raises(DriverError, match="is refused"):
            cache.step([40, 48, 0, 0])
        assert state(cache) == before
        assert cache.step([40, 48, 0, 0]) == 0
        assert [len(pages) for pages in cache.mapped] == [3, 3, 0, 0]
        examine(cache)


def test_a_failing_unmap_is_rolled_back(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for k in range(2 * N):
        cache = made(pages=3)
        cache.alloc_reqid()
        assert cache.step([48, 0, 0, 0]) == 0
        cache.free_reqid(0)
        cache.alloc_reqid(length=48)
        cache.alloc_reqid()
        before, real, calls = state(cache), cache.driver.unmap, [0]

        def unmap(address: int, count: int = 1, k: int = k, real: Any = real, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] == k + 1:
                raise DriverError("unmap", "refused")
            real(address, count)

        monkeypatch.setattr(cache.driver, "unmap", unmap)
        with pytest.raises(DriverError, match="refused"):
            cache.step([0, 16, 0, 0])
        assert state(cache) == before
        examine(cache)
        assert cache.step([0, 16, 0, 0]) == 0


def test_what_fails_in_the_thread_is_raised_by_the_next_call(made: Make) -> None:
    cache = made(pages=8, fail_at=8 * 2 * N + 2 * N + 2, background=True)
    cache.alloc_reqid()
    assert cache.step([16, 0, 0, 0]) == 0
    with pytest.raises(DriverError, match="is refused"):
        cache.step([17, 0, 0, 0])
    examine(cache)
    assert cache.step([17, 0, 0, 0]) == 0
    examine(cache)


@pytest.mark.parametrize("fails", [False, True])
def test_lengths_that_shrink_give_pages_up_only_to_others(made: Make, fails: bool) -> None:
    """Also if these can't be mapped there: what is behind the new length is gone then."""
    cache = made(pages=3, fail_at=(3 + 3) * 2 * N + 1 if fails else 0)
    cache.alloc_reqid()
    cache.alloc_reqid()
    assert cache.step([48, 0, 0, 0]) == 0
    assert cache.step([16, 0, 0, 0]) == 0
    assert len(cache.mapped[0]) == 3
    assert cache.step([48, 0, 0, 0]) == 0
    if fails:
        with pytest.raises(DriverError, match="is refused"):
            cache.step([16, 32, 0, 0])
        examine(cache)
        assert (cache.lengths[0], len(cache.mapped[0])) == (16, 1)
    assert cache.step([16, 32, 0, 0]) == 0
    assert [len(pages) for pages in cache.mapped] == [1, 2, 0, 0]
    examine(cache)


# Beside a model

ops = st.lists(
    st.tuples(st.sampled_from(["alloc", "free", "step", "step", "step"]), st.integers(0, 47), st.booleans()),
    max_size=60,
)


class Model:
    """What the calls promise, without pages: which reqIds are active, and whether lengths fit."""

    def __init__(self, cache: VAttention) -> None:
        self.cache = cache
        self.lens: dict[int, int] = {}
        self.written: dict[int, int] = {}  # memfd: reqId -> its mark

    def apply(self, op: str, number: int, ahead: bool) -> None:
        cache = self.cache
        if op == "alloc":
            reqid = cache.alloc_reqid(number if ahead else 0)
            assert (reqid == -1) == (len(self.lens) == B)
            assert reqid not in self.lens
            if reqid != -1:
                self.lens[reqid] = 0
        elif op == "free" and self.lens:
            reqid = sorted(self.lens)[number % len(self.lens)]
            cache.free_reqid(reqid)
            del self.lens[reqid]
        elif op == "step" and self.lens:
            self._step(sorted(self.lens)[number % len(self.lens)], number, ahead)

    def _step(self, reqid: int, number: int, ahead: bool) -> None:
        wanted = {**self.lens, reqid: min(self.lens[reqid] + 1 + number, L)}
        pages = sum(-(-length // 16) for length in wanted.values())
        answer = self.cache.step([wanted.get(i, 0) for i in range(B)])
        assert answer == (0 if pages <= self.cache.pages else -1)
        if answer == 0:
            self.write(wanted)
            self.lens = wanted
        if ahead:
            self.cache.map_ahead()

    def write(self, wanted: dict[int, int]) -> None:
        """Each token's row says whose it is; what was there before still says so."""
        for i, tensor in enumerate(self.cache.tensors):
            for reqid, length in wanted.items():
                mark = 100.0 * i + reqid
                assert (tensor[reqid, : self.lens[reqid]] == mark).all()
                tensor[reqid, self.lens[reqid] : length] = mark


@linux
@given(ops, st.integers(2, 9), st.sampled_from(["fake", "memfd"]))
def test_random_calls(given_ops: list[tuple[str, int, bool]], pages: int, kind: str) -> None:
    driver = FakeDriver(PAGE) if kind == "fake" else MemfdDriver(PAGE)
    cache = init(N, B, L, H, D, P, PAGE, pages=pages, driver=driver)
    model = Model(cache)
    try:
        for op in given_ops:
            model.apply(*op)
            examine(cache)
            free, cached, active = cache.counts()[:3]
            assert free + cached + active == pages
            assert driver.physical() == pages * 2 * N * PAGE
    finally:
        cache.close()


@linux
def test_it_decodes_as_over_ordinary_tensors(capsys: pytest.CaptureFixture[str]) -> None:
    """The example: a plain transformer gives over virtual tensors what it gives over ordinary ones, in few lines."""
    example = Path(__file__).parents[1] / "examples" / "virtual_memory.py"
    texts, worst = runpy.run_path(str(example))["main"]()
    assert [len(text) for text in texts] == [10 + 40, 120 + 40, 66 + 40]
    assert len(set(texts[0][10:])) > 5, "a text of one word would say little"
    assert worst < 1e-4
    assert "failures=0" in capsys.readouterr().out
    assert len(example.read_text().splitlines()) < 60


def served(driver: Driver, background: bool, steps: int) -> list[list[list[int]]]:
    """The mappings after each step of requests that come, decode and go; ahead of need by a thread or by a call."""
    rng, history = random.Random(7), list[list[list[int]]]()
    cache = init(N, 8, L, H, D, P, PAGE, pages=16, driver=driver, background=background)
    lens: dict[int, int] = {}
    for _ in range(steps):
        if rng.random() < 0.2 and (reqid := cache.alloc_reqid()) != vattention.FAILED:
            lens[reqid] = rng.randint(1, 30)
        while cache.step([lens.get(i, 0) for i in range(8)]) == vattention.FAILED:
            victim = rng.choice(sorted(lens))
            del lens[victim]
            cache.free_reqid(victim)
        if not background:
            cache.map_ahead()
        for reqid, length in list(lens.items()):
            if length == L or rng.random() < 0.02:
                del lens[reqid]
                cache.free_reqid(reqid)
            else:
                lens[reqid] = length + 1
        cache.check()
        history.append([list(pages) for pages in cache.mapped])
    counts: Counts = cache.counts()
    assert min(counts.in_step, counts.ahead, counts.reclaimed, counts.failures) > 0
    assert counts.ahead > counts.in_step
    cache.close()
    return history


@pytest.mark.parametrize("kind", [FakeDriver, pytest.param(MemfdDriver, marks=linux)])
def test_a_thread_maps_what_a_call_would(kind: Callable[[int], Driver]) -> None:
    """2,000 steps with the interpreter switching threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threaded = served(kind(PAGE), background=True, steps=2000)
    finally:
        sys.setswitchinterval(interval)
    assert threaded == served(FakeDriver(PAGE), background=False, steps=2000)
