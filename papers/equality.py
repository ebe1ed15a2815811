"""Compare the greedy tokens of configurations: memories, page sizes, batches, chunks, preemption by swapping and by
recomputation.

A memory decides where keys and values are, never their values. The bundled model runs in float32 on a CPU, and in
transformers if installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, cast

import quire
from papers.serving import in_parallel
from quire.bench.shapes import built
from quire.config import MEMORIES, PREEMPTIONS, RESERVED_MEMORIES, EngineConfig, Experiment
from quire.core.engine import Engine
from quire.models.named_configs import named_config
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import BuiltEngine

CHECKPOINT = Path(quire.__file__).parent / "assets" / "tiny"
PLENTY = 4096  # tokens of KV
CHUNKS = (16, 512)
TIE = 1e-5  # closer log-probabilities are equal up to rounding
# Ministral's kinds of layers: one of full attention, three with a window shorter than prompts and answers. Weights are
# dummies, the same for every way.
WINDOWED = {
    **named_config("ministral-8b"), "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 4096, "sliding_window": 24,
    "layer_types": ["full_attention", *["sliding_attention"] * 3], "max_position_embeddings": 1024,
}  # fmt: skip
CUTS = ("lcm", "max", "gcd", "own")  # page layouts of unlike layers


class Sweep(NamedTuple):
    """What is varied: `lengths` of prompts, `new` tokens after each, page and batch sizes. With `little` tokens of KV
    and `short_pages` requests are preempted: the longest fits, and not all at once."""

    lengths: Sequence[int] = (1, 5, 16, 23, 37, 64, 100, 190)
    new: int = 40
    pages: Sequence[int] = (1, 16, 64)
    short_pages: Sequence[int] = (1, 4, 16)
    batches: Sequence[int] = (1, 3, 8)
    little: int = 240  # and the most of a sequence


class Way(NamedTuple):
    """A configuration of the engine; `depth` is the number of steps in flight. Virtual memory has pages of 4, 16 and 64
    KiB where others have 1, 16 and 64 tokens; with little memory it chooses the page size. With `windows`, the model is
    WINDOWED, and `windows` is the layout of its pages."""

    memory: str = "paged"
    page: int = 16
    batch: int = 1
    chunk: int = 512
    tokens: int = PLENTY
    preemption: str = "recompute"
    depth: int = 1
    windows: str | None = None
    max_len: int = 240

    def build(self) -> AbstractContextManager[BuiltEngine]:
        """Open the engine; the context manager closes it."""
        plenty = self.memory == "virtual" and self.tokens == PLENTY
        config = EngineConfig(
            memory=self.memory, page_size=self.page, max_num_seqs=self.batch, max_num_batched_tokens=self.chunk,
            kv_tokens=self.tokens, max_model_len=self.max_len, preemption=self.preemption, depth=self.depth,
            swap_gib=0.1, dtype="float32", device="cpu", threads=1, enable_prefix_caching=False,
            experiment=Experiment(
                virtual_page_kib=max(self.page, 4) if plenty else None, page_sizes=self.windows or "lcm"
            ),
        )  # fmt: skip
        return built(config, WINDOWED if self.windows else None)

    def answers(self, prompts: Sequence[list[int]], new: int) -> tuple[list[Answer], dict[str, int]]:
        """Return the answers to all prompts, which come at once, and the number of preemptions by kind."""
        with self.build() as made:
            return answers_of(made.engine, prompts, new)

    @property
    def group(self) -> str:
        """Return the group that reports this way: a memory with plenty of room, or a kind of preemption with little."""
        name = self.memory if not self.windows else f"windows, {self.memory}"
        if self.windows and self.memory == "paged":
            name += f" {self.windows}"
        return name if self.tokens == PLENTY else f"{name}, preempted by {self.preemption}"


class Answer(NamedTuple):
    """Greedy tokens, and for each the margin of its log-probability over the second best token's."""

    tokens: list[int]
    margins: list[float]


def same_tokens(sweep: Sweep) -> list[dict[str, Any]]:
    """Compare every way with one request at a time in paged memory; return a point for each group of ways."""
    prompts = _prompts(sweep.lengths)
    plain, windowed = (Way(windows=windows, max_len=sweep.little) for windows in (None, "lcm"))
    references = {way.windows: way.answers(prompts, sweep.new)[0] for way in (plain, windowed)}
    oracle = _transformers(prompts, sweep.new) if find_spec("transformers") else None
    groups: dict[str, list[tuple[Way, dict[str, int]]]] = {}
    compared = [way._replace(max_len=sweep.little) for way in ways(sweep)]
    jobs = [
        (way, prompts, sweep.new, references[way.windows and "lcm"], None if way.windows else oracle)
        for way in compared
    ]
    for way, counts in zip(compared, in_parallel(_counts, jobs)):
        groups.setdefault(way.group, []).append((way, counts))
    return [group_point(name, members) for name, members in groups.items()]


def _counts(
    way: Way, prompts: Sequence[list[int]], new: int, reference: Sequence[Answer], oracle: Sequence[list[int]] | None
) -> dict[str, int]:
    """Return what `compare` counts of a way's answers, and its preemptions."""
    answers, preempted = way.answers(prompts, new)
    return compare(answers, reference, oracle) | preempted


def ways(sweep: Sweep) -> Iterator[Way]:
    """Return every memory at each page and batch size, then memories so small that requests are preempted; then the
    same of the model with windows: every page layout, uniform and virtual pages."""
    plain = [(memory, None) for memory in MEMORIES]
    windowed = [*(("paged", cut) for cut in CUTS), ("uniform", "lcm"), ("virtual", "lcm")]

    def roomy(kinds: Sequence[tuple[str, str | None]]) -> Iterator[Way]:
        for memory, windows in kinds:
            for page in sweep.pages:
                for batch in sweep.batches:
                    yield Way(memory, page, batch, CHUNKS[batch % 3 == 0], windows=windows)

    def short(kinds: Sequence[tuple[str, str | None]], depths: Sequence[int]) -> Iterator[Way]:
        for preemption in PREEMPTIONS:
            for memory, windows in kinds:
                for page in sweep.short_pages:
                    for depth in depths:
                        batch = sweep.batches[-1]
                        yield Way(memory, page, batch, CHUNKS[0], sweep.little, preemption, depth, windows)

    yield from roomy(plain)
    yield from short([kind for kind in plain if kind[0] not in RESERVED_MEMORIES], (1, 2))  # those never preempt
    yield from roomy(windowed)
    yield from short(windowed[:-1], (2,))  # virtual pages hold many tokens of a small model: it is never preempted


def answers_of(engine: Engine, prompts: Sequence[list[int]], new: int) -> tuple[list[Answer], dict[str, int]]:
    """Return an engine's answers to all prompts, which come at once, and the number of preemptions by kind."""
    params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, logprobs=2)
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    answers = [Answer([], []) for _ in prompts]
    while engine.has_unfinished_requests:
        for output in engine.step():
            answer = answers[int(output.request_id)]
            answer.tokens.extend(output.tokens)
            answer.margins.extend(top.logprobs[0] - top.logprobs[1] for top in output.top_logprobs)
    return answers, dict(engine.scheduler.preemption_counts)


def compare(
    answers: Sequence[Answer], reference: Sequence[Answer], oracle: Sequence[list[int]] | None
) -> dict[str, int]:
    """Count the tokens that are compared with the reference and those that are equal, answers that diverge at a tie,
    which are not compared further, and the same beside transformers' (`oracle`)."""
    beside = [_along(answer.tokens, other.tokens, other.margins) for answer, other in zip(answers, reference)]
    known = [_along(answer.tokens, theirs, answer.margins) for answer, theirs in zip(answers, oracle or ())]
    return {
        "tokens": sum(compared for compared, _ in beside), "equal": sum(same for _, same in beside),
        "ties": sum(compared < len(other.tokens) for (compared, _), other in zip(beside, reference)),
        "known": sum(compared for compared, _ in known), "known_equal": sum(same for _, same in known),
    }  # fmt: skip


def _along(ours: Sequence[int], theirs: Sequence[int], margins: Sequence[float]) -> tuple[int, int]:
    """Return how many tokens of one sequence are compared, and how many of them are equal. The comparison ends where
    the sequences diverge at a tie; after any other divergence no token is equal. A tie excuses this sequence only.
    `margins` are those of either sequence."""
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    tied = same < min(len(ours), len(theirs)) and margins[same] <= TIE
    return (same if tied else len(theirs)), same


def group_point(name: str, members: Sequence[tuple[Way, dict[str, int]]]) -> dict[str, Any]:
    """Return the point of a group: its settings and the sums of its counts. `missing`: requests should have been
    preempted in the group's way, and none was."""
    ways = [way for way, _ in members]
    settings = [f"pages {_span(way.page for way in ways)}", f"batches {_span(way.batch for way in ways)}"]
    if len({way.depth for way in ways}) > 1:
        settings.append(f"steps in flight {_span(way.depth for way in ways)}")
    sums = {count: sum(counts[count] for _, counts in members) for count in members[0][1]}
    kinds = {"swap", "recompute"} & {ways[0].preemption} or {"swap", "recompute"}
    short = ways[0].tokens < PLENTY
    return {
        "group": name, "ways": len(ways), "settings": ", ".join(settings), **sums, "short": short,
        "missing": short and not any(sums[kind] for kind in kinds),
    }  # fmt: skip


def _span(values: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(values))))


def _prompts(lengths: Sequence[int]) -> list[list[int]]:
    """Return prompts cut from the model's own text: its choices have larger margins there than after random tokens."""
    params = SamplingParams(
        temperature=1.0, n=len(lengths), max_tokens=max(lengths), ignore_eos=True, detokenize=False, seed=0
    )
    stories: list[list[int]] = [[] for _ in lengths]
    with Way(batch=len(lengths)).build() as made:
        made.engine.add("stories", [0], params)
        while made.engine.has_unfinished_requests:
            for output in made.engine.step():
                stories[output.branch] += output.tokens
    return [story[:length] for story, length in zip(stories, lengths)]


def _transformers(prompts: Sequence[list[int]], new: int) -> list[list[int]]:
    """Return the greedy tokens of the same checkpoint in transformers, in float32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = cast(Any, AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens, inputs, cache = list[int](), prompt, DynamicCache()
            while len(tokens) < new:
                # Positional arguments: the name of the cache has changed.
                out = model(torch.tensor([inputs]), None, None, cache, use_cache=True)
                inputs = [int(out.logits[0, -1].argmax())]
                tokens += inputs
            answers.append(tokens)
    return answers
