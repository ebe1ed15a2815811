"""Measurements of parts of the engine, which `quire bench` runs in a checkout beside those of the package; and what
stands for a model (echo_runner.py) or a device (fake_driver.py) in measurements and tests."""

from __future__ import annotations

from quire.bench import MINUTES, Entry

ENTRIES: dict[str, Entry] = {
    "events": Entry.of("bench.events", "the cost of rare events in the control plane"),
    "control": Entry.of("bench.control", "the cost of scheduling and memory, without a model", takes=MINUTES),
    "allocator": Entry.of("bench.allocator", "the cost of allocating and freeing a page"),
    "wire": Entry.of("bench.wire", "the size of plans and results, and the time to encode them"),
    "router": Entry.of("bench.router", "the cost of routing a request to one of several engines"),
    "parallel": Entry.of(
        "bench.parallel", "tensor parallelism: links, exchange, models, starts, failures", takes=MINUTES
    ),
    "profile": Entry.of("bench.profile", "the time of steps on a GPU, by kernel", True, MINUTES, gpu=True),
    "mixed": Entry.of("bench.mixed", "steps with a prompt on a GPU, launched and replayed", True, MINUTES, gpu=True),
    "limits": Entry.of("bench.limits", "the limits of a CPU, and the time of each operation", True, MINUTES),
    "sights": Entry.of("bench.sights", "the cost of images, to encode and to decode with", True),
    "start": Entry.of("bench.start", "the time of a start, to the first token", True),
    "memory": Entry.of("bench.memory", "the peak use of memory, compared with the plan", True),
    "beams": Entry.of("bench.beams", "beam search with copy-on-write pages, and with eager copies", True, MINUTES),
    "histories": Entry.of("bench.histories", "histories of beams, for simulations of beam search", True, MINUTES),
}
