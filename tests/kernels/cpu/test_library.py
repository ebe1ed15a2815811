"""The kernels' pool and its programs, with kernels that say who ran what."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Thread

import pytest
import torch
from waiting import wait_until

import quire
from quire.kernels.cpu.build import HERE, compiler
from quire.kernels.cpu.library import SCRATCH, Library, RecordedOps
from quire.kernels.cpu.variants import COMPILE_FLAGS, LINK_FLAGS

pytestmark = pytest.mark.xdist_group(name="cpu_library")  # they share what takes seconds to make

THREADS = (1, 2, 3, 8)
SIZE = 64
Opened = Callable[[int], Library]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cxx = compiler()
    if cxx is None:
        pytest.skip("no compiler")
    path = tmp_path_factory.mktemp("counting") / "counting.so"
    sources = [str(Path(__file__).parent / "counting.cpp"), str(HERE / "native" / "pool.cpp")]
    command = [*cxx, *COMPILE_FLAGS, *LINK_FLAGS, "-Werror", f"-I{HERE / 'native'}", "-o", str(path), *sources]
    subprocess.run(command, check=True)
    return path


@pytest.fixture
def opened(built: Path) -> Iterator[Opened]:
    """Opens the library with a number of threads."""
    with ExitStack() as stack:
        yield lambda threads: stack.enter_context(closing(Library(built, threads)))


@pytest.fixture(params=THREADS)
def library(opened: Opened, request: pytest.FixtureRequest) -> Library:
    return opened(request.param)


def recorded(library: Library, calls: list[tuple[object, ...]]) -> RecordedOps:
    with library.record() as tape:
        for call in calls:
            library.call(*call)  # type: ignore[arg-type]
    return tape


@pytest.mark.parametrize("chunks", [1, 2, 7, 1000])
def test_each_chunk_runs_once(library: Library, chunks: int) -> None:
    counts = torch.zeros(chunks + 1, dtype=torch.int64)
    library.call("count", chunks, counts)
    assert counts.tolist() == [1] * chunks + [0]
    library.run(RecordedOps())
    tape = recorded(library, [("count", chunks, counts)] * 50)
    assert counts.sum() == chunks, "recording runs nothing"
    library.run(tape)
    library.run(tape)
    assert counts.tolist() == [101] * chunks + [0]


def test_operations_run_in_order(library: Library) -> None:
    """Each sums all that the one before it wrote, in operations of one chunk and of many."""
    sizes = [64, 1, 64, 64, 1, 1, 16, 2, 64]
    buffers = [torch.arange(SIZE), *(torch.zeros(SIZE, dtype=torch.int64) for _ in sizes)]
    sources = [SIZE, *sizes]
    tape = recorded(library, [("sum", size, buffers[i], buffers[i + 1], sources[i]) for i, size in enumerate(sizes)])
    expected = [torch.arange(SIZE)]
    for i, size in enumerate(sizes):
        expected.append(expected[-1][: sources[i]].sum() % 1000003 + torch.arange(size))
    for _ in range(200):
        for buffer in buffers[1:]:
            buffer.zero_()
        library.run(tape)
        for i, size in enumerate(sizes):
            assert torch.equal(buffers[i + 1][:size], expected[i + 1])


def test_100_000_programs(library: Library) -> None:
    counts, times = torch.zeros(5, dtype=torch.int64), 100_000 // len(THREADS)
    tape = recorded(library, [("count", 5, counts), ("count", 1, counts), ("count", 2, counts)])
    for _ in range(times):
        library.run(tape)
    assert counts.tolist() == [3 * times, 2 * times, times, times, times]


def test_tapes_keep_tensors(opened: Opened) -> None:
    library, counts = opened(2), torch.zeros(8, dtype=torch.int64)
    kept = weakref.ref(counts)
    tape = recorded(library, [("count", 8, counts)])
    del counts
    gc.collect()
    assert kept() is not None
    library.run(tape)
    assert kept().tolist() == [1] * 8
    del tape
    assert kept() is None


def test_several_threads_use_it(opened: Opened) -> None:
    """Each has its programs; and what one calls while another records isn't on that tape."""
    library = opened(3)
    counts = [torch.zeros(16, dtype=torch.int64) for _ in range(4)]
    taped = torch.zeros(16, dtype=torch.int64)

    def use(mine: torch.Tensor) -> None:
        for _ in range(500):
            library.call("count", 16, mine)

    with library.record() as tape:
        users = [Thread(target=use, args=(mine,)) for mine in counts]
        for user in users:
            user.start()
        for _ in range(100):
            library.call("count", 16, taped)
        for user in users:
            user.join()
    assert not taped.any()
    assert len(tape.operations) == 100
    for mine in counts:
        assert mine.tolist() == [500] * 16


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_read_next_is_brought_to_the_cache_and_changes_nothing(opened: Opened, threads: int) -> None:
    """Any range to read: more than there are chunks, less than a line, or nothing."""
    library, counts = opened(threads), torch.zeros(64, dtype=torch.int64)
    weights = [torch.ones(size) for size in (1, 100, 1 << 18)]
    calls = (1, None), (16, weights[0]), (64, weights[2]), (1, weights[1]), (2, weights[2]), (3, None)
    with library.record() as tape:
        for chunks, weight in calls:
            library.call("count", chunks, counts, reads=weight)
    assert [op.bytes for op in tape.operations] == [0, 4, 2**20, 400, 2**20, 0]
    for _ in range(200):
        library.run(tape)
    assert counts.tolist() == [200 * times for times in (6, 4, 3, *(2,) * 13, *(1,) * 48)]
    assert all(weight.eq(1).all() for weight in weights)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads aren't brought anywhere")
def test_neighbours_change_nothing(opened: Opened) -> None:
    """Threads that lose their cores are brought to others while they compute; then each may run where it might."""

    def places() -> dict[str, set[int]]:
        return {task.name: os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}

    library, own, counts = opened(3), torch.zeros(12, dtype=torch.int64), torch.zeros(12, dtype=torch.int64)
    tape = recorded(library, [("fill", 12, own, SCRATCH // 8), ("count", 12, counts)] * 10)
    before, busy = places(), "while True: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", busy]) for _ in range(len(os.sched_getaffinity(0)))]
    try:
        for _ in range(50):
            library.run(tape)
            assert own.all()
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
    assert counts.tolist() == [500] * 12

    def back() -> bool:  # the last to be brought may be on its way
        return all(place == before.get(task, place) for task, place in places().items())

    wait_until(back, lambda: f"threads may run where they might before: {before}, {places()}")


def test_threads_are_exchanged(opened: Opened) -> None:
    library, counts = opened(1), torch.zeros(16, dtype=torch.int64)
    tape = recorded(library, [("count", 16, counts)])
    for threads in (4, 1, 2):
        library.resize(threads)
        library.run(tape)
    assert counts.tolist() == [3] * 16


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory has other limits")
def test_threads_that_there_are_not(built: Path) -> None:
    """Those that were there stay, and no other."""
    script = f"""
import resource, torch
from pathlib import Path
from quire.kernels.cpu.library import Library
library, counts = Library(Path({str(built)!r}), 2), torch.zeros(16, dtype=torch.int64)
pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (pages + (1 << 27),) * 2)
try:
    library.resize(1000)
except OSError as error:
    print(error)
library.call("count", 16, counts)
print(library.threads, counts.sum().item())
"""
    environment = os.environ | {"PYTHONPATH": str(Path(quire.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (0, "the system has no 1000 threads to give\n2 16\n"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a thread blocks")
def test_its_threads_take_no_signals(opened: Opened) -> None:
    """Signals go to the program's threads: this one must be able to take them."""

    def blocked() -> dict[str, int]:
        tasks = Path("/proc/self/task").iterdir()
        return {task.name: int((task / "status").read_text().split("SigBlk:")[1].split()[0], 16) for task in tasks}

    before = blocked()
    opened(4)
    new = [mask for task, mask in blocked().items() if task not in before]
    terminal = sum(1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD))
    assert len(new) == 3
    assert all(mask & terminal == terminal for mask in new)
    assert not before[str(threading.get_native_id())] & terminal


def test_errors_are_named(built: Path) -> None:
    library, counts = Library(built, 2), torch.zeros(4)
    with pytest.raises(AssertionError, match=r"counting\.so has no kernel nothing"):
        library.call("nothing", 1)
    for chunks in (0, -1, 2**24):
        with pytest.raises(AssertionError, match=f"count in {chunks} chunks"):
            library.call("count", chunks, counts)
    for wrong in ("x", 2**63, [1]):
        with pytest.raises(AssertionError, match="to count: "):
            library.call("count", 1, wrong)  # type: ignore[arg-type]
    tape = recorded(library, [("count", 1, counts)])
    library.run(tape)
    with pytest.raises(AssertionError, match="after the first run"):
        tape.add(tape.operations[0], ())
    library.close()
    library.close()
    with pytest.raises(AssertionError, match="closed"):
        library.call("count", 1, counts)
    with pytest.raises(AssertionError, match="caller"):
        Library(built, 0)


PROGRAM = """
import os, sys, threading, torch
from pathlib import Path
from quire.kernels.cpu.library import Library
library, counts = Library(Path(sys.argv[1]), 4), torch.zeros(64, dtype=torch.int64)
library.call("count", 64, counts)
{}
"""
FORKED = """
child = os.fork()
if not child:
    library.call("count", 64, counts)
    library.close()
    os._exit(0 if counts.tolist() == [2] * 64 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
library.call("count", 64, counts)
assert counts.tolist() == [2] * 64
"""
LEFT_RUNNING = """
def use():
    while True:
        library.call("count", 64, counts)
threading.Thread(target=use, daemon=True).start()
"""


@pytest.mark.share(4)
@pytest.mark.parametrize("what", ["", FORKED, LEFT_RUNNING, "del library", "library.close()"])
def test_processes_end_cleanly(built: Path, what: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(what), str(built)]
    environment = {"PYTHONPATH": str(Path(quire.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
