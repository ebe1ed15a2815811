"""Record beam histories for simulations: the parent beam of each beam in searches of the bundled model.

`quire bench histories --out FILE` writes the document that bench.beam_histories reads. The model decodes stories that
it wrote itself, cut to the prompt lengths of PagedAttention's data sets; sampled end tokens do not end a sequence.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from bench.beam_histories import pack_history
from quire.bench.arguments import add_numbers
from quire.bench.document import table
from quire.bench.shapes import built
from quire.bench.workloads import Job, parse
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.core.decoding import BeamSearch
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.protocol.method import Advance, Branch, Context
from quire.protocol.sampling_params import SamplingParams
from quire.startup.checkpoint import read_checkpoint

SEED = 0
STORIES, STORY = 8, 1500  # number of stories, and tokens of each
LONGEST = 1024  # tokens of a prompt
WIDTHS = (2, 4, 6)
WORKLOADS = {"alpaca": (64, 512), "sharegpt": (16, 1024)}  # prompts, and steps of each (maximum output length)


class Recorded(BeamSearch):
    """Beam search that records in `steps` the parent of each beam."""

    def __init__(self, width: int, steps: list[tuple[int, ...]]) -> None:
        super().__init__(width)
        self.steps = steps

    def advance(self, branches: Sequence[Branch], context: Context) -> Advance:
        """Advance the search. The last step, in which all beams end, has no choices."""
        done = super().advance(branches, context)
        if done.choices:
            self.steps.append(tuple(choice.parent for choice in done.choices))
        return done


def stories(engine: Engine) -> list[int]:
    """Return the tokens of stories that the model generates, one after another."""
    params = SamplingParams(temperature=1.0, max_tokens=STORY, seed=SEED, n=STORIES, ignore_eos=True, detokenize=False)
    engine.add("stories", [0], params)
    told: list[list[int]] = [[] for _ in range(STORIES)]
    while engine.has_unfinished_requests:
        for output in engine.step():
            told[output.branch] += output.tokens
    return [token for story in told for token in story]


def cut(name: str, count: int, text: list[int]) -> list[Job]:
    """Return `count` requests with a workload's lengths; each prompt is a random part of the text."""
    lengths = parse(f"{name}@{count}").lengths(SEED)
    starts = np.random.default_rng(SEED).integers(0, len(text) - LONGEST, count).tolist()
    return [Job(text[start : start + prompt], output) for start, (prompt, output) in zip(starts, lengths)]


def record(engine: Engine, prompts: Sequence[list[int]], width: int, steps: int) -> list[list[tuple[int, ...]]]:
    """Return the histories of beam searches of `prompts`, `steps` steps each."""
    histories: list[list[tuple[int, ...]]] = [[] for _ in prompts]
    for i, (prompt, history) in enumerate(zip(prompts, histories)):
        params = SamplingParams(
            temperature=0.0, method=partial(Recorded, width, history), max_tokens=steps + 1, ignore_eos=True,
            detokenize=False,
        )  # fmt: skip
        engine.add(str(i), prompt, params)
    while engine.has_unfinished_requests:
        engine.step()
    return histories


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    counts = ", ".join(f"{count} {name}" for name, (count, _) in WORKLOADS.items())
    group = add_numbers(parser, "recording", prompts=(None, f"prompts of each workload (default: {counts})"),
                        steps=(None, "steps of each search (default: the workload's longest output)"))  # fmt: skip
    group.add_argument("--beam-width", type=int, action="append", metavar="N",
                       help=f"beams; may be given repeatedly (default: {' '.join(map(str, WIDTHS))})")  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each workload and width."""
    widths = args.beam_width or list(WIDTHS)
    if not all(1 <= width <= 36 for width in widths):
        raise StartupError(f"--beam-width is {' '.join(map(str, widths))}", "It must be between 1 and 36")
    if any(number is not None and number < 1 for number in (args.prompts, args.steps)):
        raise StartupError("--prompts or --steps is below 1", "They must be at least 1")
    given = config_from(args)
    config = replace(given, dtype="float32" if given.dtype == "auto" else given.dtype, enable_prefix_caching=False)
    results = []
    with built(config) as made:
        text = stories(made.engine)
        for name, (count, steps) in WORKLOADS.items():
            count, steps = args.prompts or count, args.steps or steps
            prompts = [job.prompt for job in cut(name, count, text)]
            for width in widths:
                print(f"{name}: {width} beams", file=sys.stderr)
                found = record(made.engine, prompts, width, steps)
                results.append({
                    "workload": name, "beam_width": width, "prompts": count, "steps": steps, "model": made.name,
                    "weights": weights_of(config), "dtype": config.dtype, "seed": SEED,
                    "histories": [pack_history(history) for history in found],
                })  # fmt: skip
    return results


def weights_of(config: EngineConfig) -> str | None:
    """Return the SHA-256 of a model's weights; None for dummy weights."""
    folder = read_checkpoint(config).path
    if folder is None or config.dummy_weights:
        return None
    digest = hashlib.sha256()
    for path in [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def parted(history: str) -> float:
    """Return the share of steps in which a beam is forked, so that another one ends."""
    words = history.split()
    return sum(word != "." and len(set(word)) < len(word) for word in words) / len(words)


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the recordings, one a line."""
    rows = []
    for r in results:
        shares = [parted(history) for history in r["histories"]]
        rows.append(
            (r["workload"], r["beam_width"], r["prompts"], r["steps"], f"{100 * sum(shares) / len(shares):.1f}")
        )
    return table(("workload", "beams", "prompts", "steps", "steps that fork %"), rows)
