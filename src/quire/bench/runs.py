"""Repeated runs of workloads on an engine in this process or on a server: throughput, latency, serve.

The prefix cache is emptied between runs, so that each does the same work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from quire.bench import served
from quire.bench.arrivals import poisson
from quire.bench.client import Asking, Client, progress
from quire.bench.copying import REQUEST
from quire.bench.document import document, short, table, write
from quire.bench.drive import Decoding, Load, drive
from quire.bench.latency import draft_line, latencies, totals
from quire.bench.machine import QUIET, Others, peak_rss, seconds_alive
from quire.bench.pictured import Eyes, posted
from quire.bench.traces import tokenizer_of
from quire.bench.workloads import Copying, Job, RequestSpec, Workload, parse
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.errors import InputError, StartupError
from quire.ipc.garbage_collection import freeze_loaded_objects
from quire.startup.checkpoint import read_checkpoint

Loads = Callable[[Workload, int], Load]
Attempt = Callable[[Sequence[Job], Load, bool], dict[str, Any]]


class Target(NamedTuple):
    """An engine or a server under measurement. `attempt` runs the jobs once, with draft tokens or without, and returns
    the measurements; `facts`, read at the end, hold for all runs. `seen` adds images to requests if the model has
    vision. `copy` makes the request to repeat a text."""

    vocab_size: int
    max_len: int | None
    attempt: Attempt
    facts: Callable[[], dict[str, Any]]
    seen: Callable[[Sequence[RequestSpec], Sequence[Job]], list[Job]] | None = None
    copy: Callable[[str], Job] | None = None

    def jobs(self, workload: Workload, seed: int) -> list[Job]:
        """Return a workload's requests."""
        if isinstance(workload, Copying) and self.copy is not None:
            return list(map(self.copy, workload.texts(seed)))
        jobs, specs = workload.jobs(self.vocab_size, seed), workload.specs(seed)
        pictured = any(request.pictures for request in specs)
        return self.seen(specs, jobs) if self.seen is not None and pictured else jobs


def throughput(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with all requests at once."""
    return measure(args, lambda workload, seed: Load((0.0,) * workload.requests))


def latency(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with one request at a time."""
    return measure(args, lambda workload, seed: Load(concurrency=1))


def serve(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure under Poisson arrivals at --rate a second (inf: all at once), or with --concurrency requests running at
    any time."""
    rate = args.rate
    if rate is not None and not rate > 0:
        raise StartupError(f"--rate is {rate}", "Give requests a second, above 0, or inf")
    if args.concurrency < 1:
        raise StartupError(f"--concurrency is {args.concurrency}", "It must be at least 1")
    if rate is None:
        return measure(args, lambda workload, seed: Load(concurrency=args.concurrency))
    if rate == float("inf"):
        return throughput(args)
    return measure(args, lambda workload, seed: Load(poisson(workload.requests, rate, seed)))


def measure(args: argparse.Namespace, loads: Loads) -> list[dict[str, Any]]:
    """Run each --workload --repeat times after --warmup runs. Return the run of median duration, and all runs. With
    --out the document is written after each workload."""
    if args.repeat < 1 or args.warmup < 0:
        raise StartupError(f"--repeat is {args.repeat} and --warmup {args.warmup}", "Repeat at least 1, warm up 0")
    config = config_from(args)
    if args.compare_speculation and (config.speculation is None or getattr(args, "url", None)):
        raise StartupError(
            "--compare-speculation is given, and there are no draft tokens to leave out",
            "Give --speculative-method or --speculative-model, and no --url",
        )
    workloads = [parse(name) for name in args.workload or [args.default_workload]]
    url = getattr(args, "url", None)
    decoding = _decoding(args)
    if url and not decoding.plain:
        raise StartupError("--url is given with --n, --best-of or --beam-width", "Measure those in this process")
    results = []
    with _server(url, args, config, workloads) if url else _engine(config, decoding) as target:
        asked = [(workload, target.jobs(workload, config.seed)) for workload in workloads]
        for workload, jobs in asked:
            _check_lengths(workload, jobs, target.max_len)
        for workload, jobs in asked:
            load = loads(workload, config.seed)
            for _ in range(args.warmup):
                target.attempt(jobs, load, True)
            runs, plain_runs = list[dict[str, Any]](), list[dict[str, Any]]()
            for i in range(args.repeat):
                runs.append(_run(target, workload, jobs, load, f"run {i + 1} of {args.repeat}"))
                if args.compare_speculation:
                    plain_runs.append(_run(target, workload, jobs, load, "without draft tokens", speculate=False))
            shown = {} if decoding.plain else {"decoding": decoding._asdict()}
            results.append({
                "workload": workload.name, **shown, **target.facts(), "median": _median(runs), "runs": runs,
                **(_compare(runs, plain_runs) if plain_runs else {}),
            })  # fmt: skip
            if args.out:  # also if the next one fails
                write(Path(args.out), document(args.entry, "quire bench", args.arguments, results))
    return results


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return sorted(runs, key=lambda run: float(run["seconds"]))[(len(runs) - 1) // 2]


def _compare(runs: Sequence[dict[str, Any]], plain_runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the runs without draft tokens, and how many times as long each took as the run before it."""
    speedups = [plain["seconds"] / run["seconds"] for run, plain in zip(runs, plain_runs)]
    return {
        "without_speculation": {"median": _median(plain_runs), "runs": plain_runs},
        "speedup": {"least": min(speedups), "median": median(speedups), "pairs": speedups},
    }


def _decoding(args: argparse.Namespace) -> Decoding:
    """Return how requests are decoded; temperature does not apply to beam search. Raise StartupError for values that
    SamplingParams refuses."""
    decoding = Decoding(args.temperature, args.n, args.best_of, args.beam_width)
    try:
        decoding.params(Job([0], 1))
    except InputError as error:
        raise StartupError(str(error), "See quire bench throughput --help") from error
    return decoding


@contextmanager
def _engine(config: EngineConfig, decoding: Decoding) -> Iterator[Target]:
    from quire.startup.build import build

    built = build(config)
    freeze_loaded_objects()
    start_up = seconds_alive()
    engine = built.engine
    engine.lift_queue_limit()

    def attempt(jobs: Sequence[Job], load: Load, speculate: bool) -> dict[str, Any]:
        if (prefixes := engine.scheduler.memory.prefix_cache) is not None:
            prefixes.reset()
        traces, facts = drive(engine, jobs, load, decoding._replace(speculate=speculate))
        end = max(trace.events[-1][0] for trace in traces)
        return {**totals(traces, end), **latencies(traces), **facts}

    def facts() -> dict[str, Any]:
        defaults = EngineConfig().flat()
        chosen = {name: value for name, value in config.flat().items() if value != defaults[name]}
        return {
            "model": built.name, "dtype": built.memory_plan.dtype, "config": chosen, "start_up_s": start_up,
            "peak_rss_bytes": peak_rss(),
        }  # fmt: skip

    def copy(text: str) -> Job:
        tokenizer, template = built.tokenizer, built.chat_template
        if tokenizer is None or template is None:
            raise StartupError(
                f"copy is a task for a model that follows instructions, and {built.name} has no chat template",
                "Use an instruct model",
            )
        prompt = template.render([{"role": "user", "content": REQUEST + text}])
        return Job(tokenizer.encode(prompt, add_special_tokens=False), len(tokenizer.encode(text, False)))

    try:
        eyes = Eyes.of(read_checkpoint(config).config, built.spec) if built.spec.vision is not None else None
        yield Target(
            built.spec.vocab_size, built.memory_plan.max_len, attempt, facts, eyes.jobs if eyes else None, copy
        )
    finally:
        engine.close()


@contextmanager
def _server(
    url: str, args: argparse.Namespace, config: EngineConfig, workloads: Sequence[Workload]
) -> Iterator[Target]:
    """Return the server as a target. For a workload with images and a model with vision, prompts are texts: a server
    does not accept images with token ids."""
    pictured = any(request.pictures for workload in workloads for request in workload.specs(config.seed)[:1])
    sees = pictured and read_checkpoint(config, weights=False).spec.vision is not None
    tokenizer = tokenizer_of(config) if sees or args.prompts == "text" else None
    asking = Asking(args.temperature, args.chunk_usage, tokenizer.decode if tokenizer else None)
    with Client(url, args.clients, asking, args.watch_memory) as client:
        facts = {"model": client.model, "url": url, "prompts": "text" if tokenizer else "ids"}
        vocab_size = tokenizer.vocab_size if tokenizer else args.vocab_size
        yield Target(
            vocab_size, None, lambda jobs, load, _: client.run(jobs, load), lambda: facts, posted if sees else None
        )


def _check_lengths(workload: Workload, jobs: Sequence[Job], max_len: int | None) -> None:
    longest = max(len(job.prompt) + job.output for job in jobs)
    if max_len is not None and longest > max_len:
        raise StartupError(
            f"a request of {workload.name} has {longest} tokens, but sequences may have {max_len}",
            "Use a shorter workload, another model or a larger --kv-gib",
        )


def _run(
    target: Target, workload: Workload, jobs: Sequence[Job], load: Load, label: str, speculate: bool = True
) -> dict[str, Any]:
    others = Others()
    run = target.attempt(jobs, load, speculate)
    busy = others.load() - sum(client["cpu_s"] / client["seconds"] for client in run.get("clients", ()))
    run["cores_used_by_others"] = max(0.0, busy)
    said = f"{short(run['seconds'])} s, {short(run['output_tokens_per_s'])} output tok/s"
    if "clients" in run:
        said += progress(run)
    elif busy > QUIET:
        said += f"; others used {busy:.2f} cores, so don't trust this"
    print(f"{workload.name}, {label}: {said}", file=sys.stderr)
    return run


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the median runs as a table; with a server, a paragraph each."""
    if results and "url" in results[0]:
        return served.show(results)
    head = ("workload", "s", "output tok/s", "total tok/s", "TTFT p50 ms", "p99", "inter-token ms", "p99",
            "normalised ms", "mean batch", "KV used", "preempted", "others' cores")  # fmt: skip
    rows = []
    for result in results:
        run = result["median"]
        memory = run.get("memory_bytes")
        used = short(100 * memory["used"] / sum(memory.values())) + "%" if memory else "-"
        rows.append((
            result["workload"], short(run["seconds"]), short(run["output_tokens_per_s"]),
            short(run["total_tokens_per_s"]), _ms(run["ttft_s"], "p50"), _ms(run["ttft_s"], "p99"),
            _ms(run["inter_token_s"], "mean"), _ms(run["inter_token_s"], "p99"), _ms(run["normalised_s"], "mean"),
            short(run.get("mean_batch")), used, run.get("preemptions", "-"), f"{run['cores_used_by_others']:.2f}",
        ))  # fmt: skip
    lines = [table(head, rows)]
    for result in results:
        if "num_drafts" in result["median"]:
            lines.append(f"{result['workload']}: {draft_line(result['median'])}")
        if "speedup" in result:
            times = result["speedup"]
            lines.append(
                f"{result['workload']}: {times['median']:.2f} times as fast as without draft tokens (the median of "
                f"{len(times['pairs'])} pairs of runs; {times['least']:.2f} at least)"
            )
    if results and "start_up_s" in results[0]:
        peak = max(result["peak_rss_bytes"] for result in results)
        ready = results[0]["start_up_s"]
        lines.append(f"ready {ready:.2f} s after the process started; peak memory {peak / 1e9:.2f} GB")
    return "\n".join(lines)


def _ms(spread: dict[str, float] | None, which: str) -> str:
    return short(spread[which] * 1000) if spread else "-"
