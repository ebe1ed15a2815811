"""Reproduce vAttention Tables 3 and 7: the time of each virtual-memory call, and the rate at which memory can be mapped
while the device is idle and while it computes. They are measured on this machine's GPU, if any, and over memfd, with
one worker and with two processes at once.

The paper's pages below 2 MB need a patched driver; here such pages are the CPU's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

from papers.result import DIFFERS, HOLDS, MEASURED, Reproduction, Result
from quire.bench.document import table
from quire.worker.virtual import latencies
from quire.worker.virtual.latencies import CALL_INFOS, KIB, PAPER_BANDWIDTH, CallLatency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COUNT = 256  # pages
RUNS = (1, 16)
NATIVE = 2048 * KIB
SLOWER = 2.0  # times the paper's microseconds, at most
NEEDED = 0.6  # GB/s: the most that decodes needed in the paper, Figure 6c
MARGIN = 10  # times NEEDED is to be mapped: "more than an order of magnitude"
AT_ONCE = 2.0  # seconds that two workers map at the same time
ALONE = 0.5

Points = Sequence[dict[str, Any]]


def sizes(device: str) -> tuple[int, ...]:
    """Return the paper's page sizes that a device can map."""
    return (NATIVE,) if device.startswith("cuda") else latencies.PAGE_SIZES


def devices() -> list[str]:
    import torch

    return ["cuda:0", "cpu"] if torch.cuda.is_available() else ["cpu"]


def measured_rows(device: str, page: int) -> list[CallLatency]:
    """Measure all calls over pages of this size, idle and under load."""
    from quire.worker.virtual import open_driver

    if device.startswith("cuda"):
        return latencies.measure_latencies(open_driver(device, page), COUNT, RUNS, _products(device))
    rows = latencies.measure_latencies(open_driver(device, page), COUNT, RUNS)
    with _busy():
        loaded = latencies.measure_latencies(open_driver(device, page), COUNT, RUNS, lambda: None)
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


# Table 3


def table_3() -> Reproduction:
    """Measure the latency of every call, in microseconds a page."""
    points = [
        {"device": device, **row._asdict()}
        for device in devices()
        for page in sizes(device)
        for row in measured_rows(device, page)
    ]
    return Reproduction(judged_3(points), _text_3(points), partial(draw_3, points), points)


def judged_3(points: Points) -> list[Result]:
    """Judge that CUDA's calls take at most SLOWER times the paper's; other systems' calls have no claim."""
    results = []
    for kind, call in CALL_INFOS.items():
        for point in points:
            if point["kind"] != kind or point["run"] != 1 or point["loaded"]:
                continue
            paper = call.paper[latencies.PAGE_SIZES.index(point["page"])]
            native = point["device"] != "cpu"
            ours = round(point["p50"], 2)
            name = call.cuda if native else call.memfd
            slow = paper is not None and ours > SLOWER * paper
            verdict = (DIFFERS if slow else HOLDS) if native and paper is not None else MEASURED
            what = f"{name}, {call.description}, pages of {point['page'] // KIB:,} KB"
            beside = f" (the paper: {call.vmem})" if not native and call.vmem else ""
            results.append(Result("V-T3", what + beside, paper, ours, "us", verdict))
    return results


def _text_3(points: Points) -> str:
    names = dict.fromkeys((p["device"], p["page"], p["run"], p["loaded"]) for p in points)
    by = {(p["device"], p["page"], p["run"], p["loaded"], p["kind"]): p["p50"] for p in points}
    rows = [
        (*(device, page // KIB, run, "loaded" if loaded else "idle"),
         *(f"{by[device, page, run, loaded, kind]:.2f}" if (device, page, run, loaded, kind) in by else "-"
           for kind in CALL_INFOS))
        for device, page, run, loaded in names
    ]  # fmt: skip
    head = ("device", "KB", "pages a call", "device is", *(f"{kind}, us" for kind in CALL_INFOS))
    return "Medians, in microseconds a page (reserve and free: a call).\n\n" + table(head, rows)


def draw_3(data: Points) -> Figure:
    """Draw map, access and unmap by page size, with the paper's numbers beside ours."""
    from quire.bench.plots import COLOURS, figure

    fig = figure(11, 4)
    for axes, kind in zip(fig.subplots(1, 4), ("create", "map", "access", "unmap")):
        bars: dict[str, float] = {}
        for size, paper in zip(latencies.PAGE_SIZES, CALL_INFOS[kind].paper):
            if paper is not None:
                bars[f"paper, {size // KIB} KB"] = paper
        for p in data:
            if p["kind"] == kind and p["run"] == 1:
                load = ", loaded" if p["loaded"] else ""
                bars[f"{p['device'].partition(':')[0]}, {p['page'] // KIB} KB{load}"] = p["p50"]
        axes.barh(list(bars), list(bars.values()), color=[COLOURS[not name.startswith("paper")] for name in bars])
        axes.tick_params(labelsize=6)
        axes.invert_yaxis()
        axes.set_title(f"{CALL_INFOS[kind].description}, us", fontsize=9)
    fig.suptitle("vAttention Table 3: latency of calls, median")
    return fig


# Table 7


def table_7() -> Reproduction:
    """Measure the GB/s that become accessible, page by page."""
    import torch

    points: list[dict[str, Any]] = []
    for device in devices():
        for page in sizes(device):
            (idle, loaded) = _rates(device, page, ALONE)
            for load, rate in (("idle", idle), ("loaded", loaded)):
                points.append({"device": device, "page": page, "workers": 1, "load": load, "gb_s": rate})
            pair = ("cpu", "cpu") if device == "cpu" else ("cuda:0", "cuda:1")
            if device == "cpu" or torch.cuda.device_count() > 1:
                both = at_once(pair, page)
                points.append({"device": device, "page": page, "workers": 2, "load": "idle", "gb_s": sum(both)})
    rows = [(p["device"], p["page"] // KIB, p["workers"], p["load"], f"{p['gb_s']:.2f}") for p in points]
    text = table(("device", "KB", "workers", "device is", "GB/s"), rows)
    if torch.cuda.device_count() == 1:
        text += "\nTwo workers on two GPUs: not run, there is one here"
    return Reproduction(judged_7(points), text, partial(draw_7, points), points)


def judged_7(points: Points) -> list[Result]:
    """Judge that a GPU is as fast as the paper's, and that any device maps MARGIN times what the paper's decodes
    needed."""
    results = []
    for p in points:
        paper = round(p["workers"] * PAPER_BANDWIDTH[latencies.PAGE_SIZES.index(p["page"])], 2)
        what = f"{p['device']}, pages of {p['page'] // KIB:,} KB, {p['workers']} workers, {p['load']}: mapped"
        native = p["device"] != "cpu" and p["load"] == "idle"
        verdict = (HOLDS if p["gb_s"] >= paper else DIFFERS) if native else MEASURED
        results.append(Result("V-T7", what, paper, round(p["gb_s"], 2), "GB/s", verdict))
    for device in dict.fromkeys(p["device"] for p in points):
        least = min(p["gb_s"] for p in points if p["device"] == device and p["workers"] == 1)
        what = f"{device}: the least of these by one worker / {NEEDED} GB/s, the paper's most demand of decodes"
        ratio = round(least / NEEDED, 1)
        results.append(
            Result("V-T7", what, f"more than {MARGIN}", ratio, "times", HOLDS if ratio >= MARGIN else DIFFERS)
        )
    return results


def _rates(device: str, page: int, seconds: float) -> tuple[float, float]:
    """Return GB/s while idle and while loaded: medians of repeated measurements for `seconds`."""
    found, began = list[tuple[float, float]](), time.perf_counter()
    while not found or time.perf_counter() - began < seconds:
        rows = measured_rows(device, page)
        found.append((latencies.bandwidth(rows), latencies.bandwidth(rows, loaded=True)))
    idle, loaded = zip(*found)
    return median(idle), median(loaded)


def at_once(pair: Sequence[str], page: int, seconds: float = AT_ONCE) -> list[float]:
    """Return the GB/s of each of two processes that map at the same time for `seconds`."""
    command = [sys.executable, "-m", "papers.mapping_costs"]
    workers = [
        subprocess.Popen([*command, device, str(page), str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                         text=True)
        for device in pair
    ]  # fmt: skip
    try:
        for worker in workers:
            assert worker.stdout is not None, "it has a pipe"
            assert worker.stdout.readline() == "ready\n", "a worker that maps pages did not start"
        answers = []
        for worker in workers:
            assert worker.stdin is not None, "it has a pipe"
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            answers.append(float(json.loads(worker.communicate(timeout=60)[0])))
        return answers
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def work(device: str, page: int, seconds: float) -> None:
    """Run one of the processes: report that it is ready, wait for a line, and print the median of its GB/s."""
    from quire.worker.virtual import open_driver

    latencies.measure_latencies(open_driver(device, page), 16, (1,))
    print("ready", flush=True)
    sys.stdin.readline()
    found, began = list[float](), time.perf_counter()
    while not found or time.perf_counter() - began < seconds:
        found.append(latencies.bandwidth(latencies.measure_latencies(open_driver(device, page), COUNT, (1,))))
    print(json.dumps(median(found)), flush=True)


def draw_7(data: Points) -> Figure:
    from quire.bench.plots import lines

    points = [
        {"page": page / KIB, "gb_s": workers * rate, "panel": "GB/s mapped", "line": f"paper, TP-{workers}"}
        for workers in (1, 2)
        for page, rate in zip(latencies.PAGE_SIZES, PAPER_BANDWIDTH)
    ] + [
        {"page": p["page"] / KIB, "gb_s": p["gb_s"], "panel": "GB/s mapped",
         "line": f"{p['device']}, {p['workers']} workers, {p['load']}"}
        for p in data
    ]  # fmt: skip
    return lines(points, "page", "gb_s", "line", "panel", "vAttention Table 7: bytes mapped", ("KB a page", "GB/s"))


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
