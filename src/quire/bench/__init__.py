"""`quire bench NAME`: measurements of this engine, or of a server, on workloads that any engine can run.

A measurement is one entry of ENTRIES. A checkout has further ones, of parts of the engine, in its folder bench/. The
engine itself loads nothing of this.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench import arrivals, runs, traces
from quire.bench.arguments import add_numbers
from quire.bench.document import check_writable, document, grouped_table, write
from quire.bench.drive import Load
from quire.bench.fleet import EACH
from quire.bench.workloads import EXPECTED
from quire.cli.checkout import import_from_checkout
from quire.cli.flags import add_engine_flags
from quire.cli.parser import Parser
from quire.errors import StartupError

MINUTES = "minutes"
Run = Callable[[argparse.Namespace], list[dict[str, Any]]]


class Entry(NamedTuple):
    """The functions of a measurement: `run` measures, `show` formats the results as a table, `flags` adds command-line
    arguments, after those of the engine if `engine_flags`. `more` returns further fields of the document. `takes` is
    "seconds" or MINUTES, with the bundled model on two cores or on a GPU. `gpu` is True if a GPU is needed."""

    about: str
    run: Run
    show: Callable[[Sequence[dict[str, Any]]], str]
    flags: Callable[[argparse.ArgumentParser], None]
    engine_flags: bool = False
    more: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] = lambda results: {}
    takes: str = "seconds"
    gpu: bool = False

    @classmethod
    def of(
        cls, module: str, about: str, engine_flags: bool = False, takes: str = "seconds", gpu: bool = False
    ) -> Entry:
        """Return the entry whose functions have these names in a module, which is imported when one is called. `flags`
        and `more` may be missing there."""

        def function(name: str, absent: Any = None) -> Callable[[Any], Any]:
            return lambda argument: getattr(import_module(module), name, lambda _: absent)(argument)

        return cls(
            about, function("run"), function("show"), function("flags"), engine_flags, function("more", {}), takes, gpu
        )


def main(args: list[str]) -> int:
    """Run one measurement: print a table to stdout and progress to stderr, write JSON to --out."""
    groups = all_groups()
    entries = {name: entry for group in groups.values() for name, entry in group.items()}
    if args and not args[0].startswith("-") and args[0] not in (*entries, "list"):
        further = "; a checkout of the repository has further ones" if groups is GROUPS else ""
        remedy = f"Known: {', '.join(entries)}{further}"
        raise StartupError(f"there is no benchmark named {args[0][:40]!r}", remedy)
    given = _parser(groups, args[0] if args else "").parse_args(args)
    given.arguments = args
    if given.entry in (None, "list"):
        print(_listing(groups))
        return 0
    entry = entries[given.entry]
    if given.out:
        check_writable(Path(given.out))
    results = entry.run(given)
    print(entry.show(results))
    if given.out:
        write(Path(given.out), {**document(given.entry, "quire bench", args, results), **entry.more(results)})
    return 0


def all_groups() -> dict[str, dict[str, Entry]]:
    """Return GROUPS and, in a checkout, the group of its folder bench/."""
    further = import_from_checkout("bench")
    return GROUPS if further is None else {**GROUPS, "Measure parts of the engine": further.ENTRIES}


def _listing(groups: Mapping[str, Mapping[str, Entry]]) -> str:
    """Return a table of the entries, grouped by purpose."""
    rows = {
        purpose: [(name, one.takes, "GPU" if one.gpu else "", one.about) for name, one in entries.items()]
        for purpose, entries in groups.items()
    }
    return grouped_table(("name", "takes", "needs", "what"), rows)


def _parser(groups: Mapping[str, Mapping[str, Entry]], chosen: str) -> Parser:
    """Return the parser of all entries; only that of the `chosen` one has its arguments."""
    about = f"Measure this engine or a server. `quire bench NAME --help` shows the flags of one.\n\n{_listing(groups)}"
    parser = Parser(prog="quire bench", description=about, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="entry", metavar="NAME", parser_class=Parser, help="a measurement, or list")
    commands.add_parser("list")
    for name, entry in ((name, entry) for entries in groups.values() for name, entry in entries.items()):
        sub = commands.add_parser(name, description=entry.about, allow_abbrev=False)
        if name != chosen:
            continue
        if entry.engine_flags:
            add_engine_flags(sub)
        else:
            sub.add_argument("--debug", action="store_true", help="show tracebacks")
        entry.flags(sub)
        sub.add_argument("--out", metavar="FILE", help="write the results as JSON")
    return parser


def _workload_flags(default: str) -> Callable[[argparse.ArgumentParser], None]:
    def add(parser: argparse.ArgumentParser) -> None:
        group = add_numbers(
            parser, "measurement", repeat=(3, "measured runs"), warmup=(1, "warm-up runs"),
            n=(1, "sequences of each request"), best_of=(None, "sequences from which the n best are selected"),
            beam_width=(None, "beam search with N beams"),
            temperature=(0.0, "sampling temperature; 0 is greedy"),
            trace_requests=(None, "only the first N of each trace"),
        )  # fmt: skip
        group.add_argument("--workload", action="append", metavar="NAME",
                           help=f"{EXPECTED}; may be given repeatedly (default: {default})")  # fmt: skip
        group.add_argument("--trace", action="append", metavar="FILE",
                           help="requests of a file, JSONL or ShareGPT's JSON; may be given repeatedly")  # fmt: skip
        group.add_argument("--compare-speculation", action="store_true",
                           help="after each run measure another one without draft tokens")  # fmt: skip
        parser.set_defaults(default_workload=default)

    return add


def _serve_flags(parser: argparse.ArgumentParser) -> None:
    _workload_flags("sharegpt@64")(parser)
    group = add_numbers(
        parser, "service",
        concurrency=(8, "concurrent requests, if neither option nor a trace gives arrival times"),
        vocab_size=(1024, "with --url: prompts contain token ids below N"),
        clients=(None, f"with --url: processes that send requests and time responses (default: one for each {EACH} "
                       "concurrent requests, at most half the number of cores)"),
    )  # fmt: skip
    group.add_argument("--arrivals", metavar="HOW", help=f"arrival times: {arrivals.EXPECTED}")
    group.add_argument("--rate", type=float, metavar="X", help="the same as --arrivals poisson:X; inf: all at once")
    group.add_argument("--url", metavar="URL", help="measure the OpenAI-compatible server at URL, not a local engine")
    group.add_argument("--prompts", choices=("ids", "text"), default="ids",
                       help="with --url: send prompts as token ids (the default), or as the text that --tokenizer or "
                            "the model's decodes them to, whose tokens the server counts")  # fmt: skip
    group.add_argument("--chunk-usage", action="store_true",
                       help="with --url: request the number of tokens so far in each chunk, to divide the time between "
                            "chunks by the tokens of each")  # fmt: skip
    group.add_argument("--watch-memory", type=float, metavar="S",
                       help="with --url: sample the server's memory every S seconds, by layer type")  # fmt: skip


def _traced(run: Run) -> Run:
    """Return a `run` that measures the traces of --trace along with the workloads."""

    def with_traces(args: argparse.Namespace) -> list[dict[str, Any]]:
        args.workload = [*(args.workload or []), *traces.given(args)]
        return run(args)

    return with_traces


def _serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `serve`. Arrivals are given by --arrivals or --rate, else by a trace's own times, else by --concurrency."""
    if args.arrivals is not None:
        if args.rate is not None:
            raise StartupError("--arrivals and --rate are both given", "One says all: --rate X is poisson:X")
        how = arrivals.parse_arrivals(args.arrivals)
        return runs.measure(args, lambda workload, seed: Load(how.times(workload.requests, seed)))
    timed = [getattr(workload, "arrivals", None) is not None for workload in args.workload]
    if args.rate is not None or not any(timed):
        return runs.serve(args)
    if not all(timed):
        raise StartupError("some traces say when requests come, other workloads don't", "Give --arrivals, or run twice")
    return runs.measure(args, lambda workload, seed: Load(workload.arrivals))


GROUPS: dict[str, dict[str, Entry]] = {
    "Serve requests": {
        "throughput": Entry("all requests at once", _traced(runs.throughput), runs.show,
                            _workload_flags("sharegpt@64"), engine_flags=True),
        "latency": Entry("one request at a time", _traced(runs.latency), runs.show,
                         _workload_flags("fixed:128:128@4"), engine_flags=True),
        "serve": Entry("requests that arrive over time, at a local engine or a server", _traced(_serve), runs.show,
                       _serve_flags, engine_flags=True, takes=MINUTES),
    },
    "Compare parts": {
        "kernels": Entry.of("quire.bench.kernels", "every kernel, compared with the device's ceilings",
                            takes=MINUTES, gpu=True),
        "structured": Entry.of("quire.bench.structured", "the cost of grammars, and the gain of forced tokens", True,
                               MINUTES),
    },
    "Calibrate the scheduler and the simulator": {
        "preemption": Entry.of("quire.bench.preemption", "the cost of swapping and recomputation, for --calibration; "
                               "--compare: their gain", True, MINUTES),
        "calibrate": Entry.of("quire.bench.calibrate", "the cost of steps, for quire simulate --calibration", True,
                              MINUTES),
    },
}  # fmt: skip
ENTRIES = {name: entry for entries in GROUPS.values() for name, entry in entries.items()}
