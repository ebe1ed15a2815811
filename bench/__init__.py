"""Measurements of parts of the engine, which `quire bench` runs in a checkout beside those of the package."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench import allocator, beams, control, events, histories, memory, mixed, parallel, profile, sights, start, wire
from quire.bench import Entry
from quire.bench.workloads import EXPECTED


def _limits(args: argparse.Namespace) -> list[dict[str, Any]]:
    from bench import limits  # imports torch

    return limits.run(args)


def _show_limits(results: Sequence[dict[str, Any]]) -> str:
    from bench import limits

    return limits.show(results)


def _limits_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("measurement")
    group.add_argument("--workload", action="append", metavar="NAME",
                       help=f"{EXPECTED}; may be given repeatedly (default: W1 to W4 of performance.md)")  # fmt: skip
    group.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each kind (default: %(default)s)")


def _control_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", metavar="N",
                        help="running sequences (default: 1 256 1000)")  # fmt: skip
    parser.add_argument("--contexts", type=int, nargs="+", metavar="N",
                        help="tokens of each sequence (default: 128 32768)")  # fmt: skip
    parser.add_argument("--beams", type=int, default=0, metavar="WIDTH",
                        help="instead of sequences: requests of WIDTH beams, half of them re-parented at each step "
                             "(default then: 64 requests of 512 tokens)")  # fmt: skip
    parser.add_argument("--groups", type=int, default=1, metavar="N",
                        help="groups of layers, all but the first with windows (default: %(default)s)")  # fmt: skip
    parser.add_argument("--unlike", action="store_true",
                        help="group i has i times as many layers as the first, so that page sizes differ")  # fmt: skip
    parser.add_argument("--steps", type=int, default=control.STEPS, metavar="N", help="steps (default: %(default)s)")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


ENTRIES: dict[str, Entry] = {
    "events": Entry("the cost of rare events in the control plane", events.run, events.show, events.flags),
    "control": Entry("the cost of scheduling and memory, without a model", control.run, control.show, _control_flags),
    "allocator": Entry("the cost of allocating and freeing a page", allocator.run, allocator.show, allocator.flags),
    "wire": Entry("the size of plans and results, and the time to encode them", wire.run, wire.show, wire.flags),
    "parallel": Entry(
        "tensor parallelism: links, exchange, models, starts, failures", parallel.run, parallel.show, parallel.flags
    ),
    "profile": Entry(
        "the time of steps on a GPU, by kernel", profile.run, profile.show, profile.flags, engine_flags=True
    ),
    "mixed": Entry(
        "steps with a prompt on a GPU, launched and replayed", mixed.run, mixed.show, mixed.flags, engine_flags=True
    ),
    "limits": Entry(
        "the limits of a CPU, and the time of each operation", _limits, _show_limits, _limits_flags, engine_flags=True
    ),
    "sights": Entry(
        "the cost of images, to encode and to decode with", sights.run, sights.show, sights.flags, engine_flags=True
    ),
    "start": Entry("the time of a start, to the first token", start.run, start.show, engine_flags=True),
    "memory": Entry("the peak use of memory, compared with the plan", memory.run, memory.show, engine_flags=True),
    "beams": Entry(
        "beam search with copy-on-write pages, and with eager copies", beams.run, beams.show, beams.flags,
        engine_flags=True,
    ),
    "histories": Entry(
        "histories of beams, for simulations of beam search", histories.run, histories.show, histories.flags,
        engine_flags=True,
    ),
}  # fmt: skip
