"""Measure beam search with pages that branches share and copy on write, against copying a beam's whole KV when it is
re-parented (PagedAttention §6.3), and against transformers' beam search. All run in turn in one process with the same
prompts.

A result has for each way `seconds`, `tokens_per_s` (of each request's best sequence), `speedup` (its time divided by
copy-on-write's) and `same_results` (requests with the same best sequence; with dummy weights transformers' differ).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, cast

from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.drive import Decoding, Load, drive
from quire.bench.machine import Others
from quire.bench.shapes import built
from quire.bench.workloads import Job, parse
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.memory.paged import PagedMemory
from quire.protocol.sequence import Sequence as Seq
from quire.startup.build import BuiltEngine

WIDTH = 4
REPEATS = 3
WORKLOAD = "fixed:256:64@4"
CASES = (EngineConfig(), EngineConfig(model_config="llama-125m", dummy_weights=True))
OURS, EAGER, PEER = "copy-on-write", "copy everything", "transformers"
MISSING = "transformers is not installed"


class EagerMemory(PagedMemory):
    """Paged memory whose fork copies every page at once: no page is shared."""

    def fork(self, parent: Seq, child: Seq) -> bool:
        needs = [group.num_pages(parent.computed) for group in self.groups]
        if not self.page_pool.can_allocate(needs) or not super().fork(parent, child):
            return False
        resident = self.seq_pages[child.id]
        for g, pages_of_group in enumerate(resident.tables):
            for at in range(resident.first_page[g], len(pages_of_group)):
                self._copy_on_write(resident, g, at)
        resident.needs_cow_check = self.seq_pages[parent.id].needs_cow_check = False
        return True


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    group = add_numbers(parser, "measurement", beam_width=(WIDTH, "beams a request"),
                        repeat=(REPEATS, "measured runs of each implementation"))  # fmt: skip
    group.add_argument("--workload", default=WORKLOAD, metavar="NAME", help="workload (default: %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for the given model; for the bundled model and a dummy llama-125m if none is given."""
    if args.repeat < 1:
        raise StartupError(f"--repeat is {args.repeat}", "It must be at least 1")
    if not 1 <= args.beam_width <= 64:
        raise StartupError(f"--beam-width is {args.beam_width}", "It must be between 1 and 64")
    workload = parse(args.workload)
    given = config_from(args)
    cases = [given]
    if not given.model and given.model_config is None:
        cases = [replace(given, model_config=case.model_config, dummy_weights=case.dummy_weights) for case in CASES]
    results = []
    for case in cases:
        config = replace(case, dtype="float32" if case.dtype == "auto" else case.dtype, enable_prefix_caching=False)
        with built(config) as made:
            jobs = workload.jobs(made.spec.vocab_size, config.seed)
            print(f"{made.name}: {workload.name}", file=sys.stderr)
            results.append(measure(made, config, workload.name, jobs, args.beam_width, args.repeat))
    return results


def measure(
    made: BuiltEngine, config: EngineConfig, workload: str, jobs: list[Job], width: int, repeats: int
) -> dict[str, Any]:
    """Measure tokens/s of each way: tokens of each request's best sequence over the time until the last request
    ends."""
    memory = cast(PagedMemory, made.engine.scheduler.memory)
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        OURS: partial(_ours, made.engine, memory, jobs, width),
        EAGER: partial(_ours, made.engine, _eager(made.engine), jobs, width),
    }
    note = MISSING
    if (peer := _peer(config)) is not None:
        ways[PEER], note = partial(_theirs, peer, jobs, width), ""
    tokens = sum(job.output for job in jobs)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
    others = Others()
    for turn in range(-1, repeats):  # the first round warms up
        for name, way in ways.items():
            done = way()
            if turn >= 0:
                runs[name].append(done)
    seconds = {name: median(run["seconds"] for run in some) for name, some in runs.items()}
    return {
        "model": made.name, "dtype": made.memory_plan.dtype, "page_size": config.page_size, "workload": workload,
        "beam_width": width, "threads": config.threads, "note": note,
        "seconds": {name: [run["seconds"] for run in some] for name, some in runs.items()},
        "tokens_per_s": {name: tokens / spent for name, spent in seconds.items()},
        "speedup": {name: spent / seconds[OURS] for name, spent in seconds.items()},
        "copied_pages": {name: runs[name][-1]["copied_pages"] for name in (OURS, EAGER)},
        "sharing_saved": {name: runs[name][-1]["sharing_saved"] for name in (OURS, EAGER)},
        "same_results": {name: _same(runs[OURS], some) for name, some in runs.items()},
        "requests": len(jobs),
        "cores_used_by_others": others.load(),
    }  # fmt: skip


def _same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> int:
    """Return the number of requests whose best sequence is the same."""
    return sum(a == b for a, b in zip(ours[-1]["best"], theirs[-1]["best"]))


def _eager(engine: Engine) -> EagerMemory:
    """Return a memory of the same KV cache configuration, for the same tensors."""
    memory = cast(PagedMemory, engine.scheduler.memory)
    return EagerMemory(memory.kv_config, max_step_tokens=memory.max_step_tokens, caching=False)


def _ours(engine: Engine, memory: PagedMemory, jobs: list[Job], width: int) -> dict[str, Any]:
    engine.scheduler.memory = memory
    best: dict[str, list[int]] = {str(i): [] for i in range(len(jobs))}
    traces, facts = drive(engine, jobs, Load((0.0,) * len(jobs)), Decoding(beam_width=width), best)
    return {
        "seconds": max(trace.events[-1][0] for trace in traces),
        "copied_pages": facts["copied_pages"],
        "sharing_saved": facts["sharing_saved"],
        "best": list(best.values()),
    }


def _peer(config: EngineConfig) -> Any:
    """Return transformers' model. Its weights are random if ours are, so only the bundled model gives the same text."""
    try:
        import transformers
    except ImportError:
        return None
    import torch

    from quire.startup.checkpoint import read_checkpoint

    source = read_checkpoint(config)
    auto: Any = transformers.AutoModelForCausalLM
    dtype = getattr(torch, config.dtype)
    if source.path is not None and not config.dummy_weights:
        model = auto.from_pretrained(source.path, dtype=dtype)
    else:
        shape = dict(source.config)
        torch.manual_seed(config.seed)
        made = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
        model = auto.from_config(made, dtype=dtype)
    device = "cuda" if torch.cuda.is_available() and config.device != "cpu" else "cpu"
    return model.eval().to(device)


def _theirs(model: Any, jobs: list[Job], width: int) -> dict[str, Any]:
    """Run one batch in transformers, which needs prompts and outputs of equal length."""
    import torch

    prompts = torch.tensor([job.prompt for job in jobs], device=model.device)
    output = jobs[0].output
    began = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), num_beams=width, do_sample=False, use_cache=True,
            min_new_tokens=output, max_new_tokens=output, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens = found[:, prompts.shape[1] :].tolist()
    return {"seconds": time.perf_counter() - began, "best": tokens}


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the tokens/s as a table."""
    head = ("model", "way", "s", "tokens/s", "time / ours", "copied pages", "saved %", "same results")
    rows = []
    for r in results:
        for name, rate in r["tokens_per_s"].items():
            saved = r["sharing_saved"].get(name)
            rows.append((
                r["model"], name, short(median(r["seconds"][name])), short(rate), f"{r['speedup'][name]:.2f}",
                r["copied_pages"].get(name, "-"), "-" if saved is None else f"{100 * saved:.1f}",
                f"{r['same_results'][name]}/{r['requests']}",
            ))  # fmt: skip
    notes = sorted({r["note"] for r in results if r["note"]})
    return "\n".join([table(head, rows), *notes])
