"""Time the calls that manage virtual memory, and the rate at which they make memory accessible, idle and while the
device computes: on this machine's GPU, if any, in pages of 2 MB, and over memfd in smaller ones too.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

from papers import call_latencies as latencies
from papers.call_latencies import KIB, CallLatency
from papers.entry import Point, left_out

NATIVE = 2048 * KIB


def _places() -> list[tuple[str, int]]:
    """Return each device of this machine with the page sizes of it that are measured."""
    import torch

    cuda = [("cuda:0", NATIVE)] if torch.cuda.is_available() else []
    return cuda + [("cpu", page) for page in latencies.PAGE_SIZES]


def calls(pages: int, runs: Sequence[int]) -> list[Point]:
    """Return percentiles of the microseconds a page of each `kind` of call (reserve and free: a call), over `pages`
    pages in runs of each length."""
    return [
        {"device": device, **row._asdict(), "kib": page // KIB, "load": "loaded" if row.loaded else "idle"}
        for device, page in _places()
        for row in _latencies(device, page, pages, runs)
    ]


def _latencies(device: str, page: int, pages: int, runs: Sequence[int]) -> list[CallLatency]:
    """Measure all calls over pages of this size, idle and under load."""
    from quire.worker.virtual import open_driver

    if device.startswith("cuda"):
        return latencies.measure_latencies(open_driver(device, page), pages, runs, _products(device))
    rows = latencies.measure_latencies(open_driver(device, page), pages, runs)
    with _busy():
        loaded = latencies.measure_latencies(open_driver(device, page), pages, runs, lambda: None)
    return rows + [row for row in loaded if row.loaded]


def _products(device: str) -> Callable[[], None]:
    """Return a function that launches a matrix product of about a tenth of a millisecond on the GPU, without
    waiting."""
    import torch

    with torch.cuda.device(device):
        a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device=device) for _ in range(2))
        out = torch.mm(a, b)

    def load() -> None:
        torch.mm(a, b, out=out)

    return load


@contextmanager
def _busy() -> Iterator[None]:
    """Multiply matrices in another thread of this process meanwhile."""
    import torch

    over = threading.Event()
    a = torch.randn(512, 512)

    def work() -> None:
        while not over.is_set():
            torch.mm(a, a)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# Bytes a second


def bandwidths(pages: int, alone: float, together: float) -> list[Point]:
    """Return the `gb_s` made accessible page by page: by one worker, for `alone` seconds idle and loaded, and by two
    processes at once, for `together` seconds."""
    import torch

    points: list[Point] = []
    for device, page in _places():
        found, began = list[tuple[float, float]](), time.perf_counter()
        while not found or time.perf_counter() - began < alone:
            rows = _latencies(device, page, pages, (1, 16))
            found.append((latencies.bandwidth(rows), latencies.bandwidth(rows, loaded=True)))
        where = {"device": device, "kib": page // KIB}
        for load, rates in zip(("idle", "loaded"), zip(*found)):
            points.append({**where, "workers": 1, "load": load, "gb_s": median(rates)})
        pair = ("cpu", "cpu") if device == "cpu" else ("cuda:0", "cuda:1")
        if device == "cpu" or torch.cuda.device_count() > 1:
            rate = sum(at_once(pair, page, pages, together))
            points.append({**where, "workers": 2, "load": "idle", "gb_s": rate})
    one = torch.cuda.device_count() == 1
    return points + left_out({"two workers on two GPUs": "there is one here"} if one else {})


def at_once(pair: Sequence[str], page: int, pages: int, seconds: float) -> list[float]:
    """Return the GB/s of each of two processes that map at the same time for `seconds`."""
    command = [sys.executable, "-m", "papers.mapping_costs"]
    workers = [
        subprocess.Popen([*command, device, str(page), str(pages), str(seconds)], stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE, text=True)
        for device in pair
    ]  # fmt: skip
    try:
        for worker in workers:
            assert worker.stdout is not None, "it has a pipe"
            assert worker.stdout.readline() == "ready\n", "a worker that maps pages did not start"
        for worker in workers:
            assert worker.stdin is not None, "it has a pipe"
            worker.stdin.write("go\n")
            worker.stdin.flush()
        return [float(json.loads(worker.communicate(timeout=60)[0])) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def work(device: str, page: int, pages: int, seconds: float) -> None:
    """Run one of the processes: report that it is ready, wait for a line, and print the median of its GB/s."""
    from quire.worker.virtual import open_driver

    latencies.measure_latencies(open_driver(device, page), 16, (1,))
    print("ready", flush=True)
    sys.stdin.readline()
    found, began = list[float](), time.perf_counter()
    while not found or time.perf_counter() - began < seconds:
        found.append(latencies.bandwidth(latencies.measure_latencies(open_driver(device, page), pages, (1,))))
    print(json.dumps(median(found)), flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
