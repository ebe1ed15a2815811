"""Check that every configuration generates the same greedy tokens: memories, page sizes, batches, chunks, preemption by
swapping and by recomputation.

PagedAttention §4.5 and §4.6 and the other papers presuppose it: a memory decides where keys and values are, never their
values. The bundled model runs in float32 on a CPU, and in transformers if installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import quire
from papers.result import DIFFERS, HOLDS, Reproduction, Result
from quire.bench.document import table
from quire.bench.shapes import built
from quire.config import MEMORIES, PREEMPTIONS, RESERVED_MEMORIES, EngineConfig, Experiment
from quire.core.engine import Engine
from quire.models.named_configs import named_config
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import BuiltEngine, build

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CHECKPOINT = Path(quire.__file__).parent / "assets" / "tiny"
LENGTHS = (1, 5, 16, 23, 37, 64, 100, 190)  # of the prompts
NEW = 40  # tokens generated after each
PAGES, SHORT_PAGES = (1, 16, 64), (1, 4, 16)
BATCHES = (1, 3, 8)
PLENTY, LITTLE = 4096, 240  # tokens of KV: LITTLE holds the longest request, and not all at once
CHUNKS = (16, 512)
MOST_LEN = 240
TIE = 1e-5  # closer log-probabilities are equal up to rounding


# Ministral's kinds of layers: one of full attention, three with a window shorter than prompts and answers. Weights are
# dummies, the same for every way.
WINDOWED = {
    **named_config("ministral-8b"), "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 4096, "sliding_window": 24,
    "layer_types": ["full_attention", *["sliding_attention"] * 3], "max_position_embeddings": 1024,
}  # fmt: skip
CUTS = ("lcm", "max", "gcd", "own")  # page layouts of unlike layers


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

    def config(self) -> EngineConfig:
        plenty = self.memory == "virtual" and self.tokens == PLENTY
        return EngineConfig(
            memory=self.memory, page_size=self.page, max_num_seqs=self.batch, max_num_batched_tokens=self.chunk,
            kv_tokens=self.tokens, max_model_len=MOST_LEN, preemption=self.preemption, depth=self.depth,
            swap_gib=0.1, dtype="float32", device="cpu", threads=1, enable_prefix_caching=False,
            experiment=Experiment(
                virtual_page_kib=max(self.page, 4) if plenty else None, page_sizes=self.windows or "lcm"
            ),
        )  # fmt: skip

    def build(self) -> AbstractContextManager[BuiltEngine]:
        """Open the engine; the context manager closes it."""
        return built(self.config(), WINDOWED if self.windows else None)

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


class Compared(NamedTuple):
    """A way's tokens beside the reference's: the number compared, the number equal, and the answers that diverge at a
    tie, which are not compared further. Then the same numbers beside transformers; None without it."""

    way: Way
    tokens: int
    equal: int
    ties: int
    preempted: dict[str, int]
    asked: int | None
    transformers: int | None

    @property
    def same(self) -> bool:
        return self.tokens == self.equal


def same_tokens() -> Reproduction:
    """Compare every way of `ways` with one request at a time in paged memory."""
    prompts = _prompts()
    reference = run(Way(), prompts)[0]
    windowed = run(Way(windows="lcm"), prompts)[0]
    oracle = _transformers(prompts) if find_spec("transformers") else None
    compared: list[Compared] = []
    for way in ways():
        if not compared or compared[-1].way.group != way.group:
            print(f"c5: {way.group}", file=sys.stderr)
        answers, preempted = run(way, prompts)
        if way.windows:
            compared.append(compare(way, answers, windowed, None, preempted))
        else:
            compared.append(compare(way, answers, reference, oracle, preempted))
    return Reproduction(_verdicts(compared), _text(compared), partial(_draw, compared))


def ways() -> Iterator[Way]:
    """Return every memory at each page and batch size, then memories so small that requests are preempted."""
    for memory in MEMORIES:
        for page in PAGES:
            for batch in BATCHES:
                yield Way(memory, page, batch, CHUNKS[batch % 3 == 0])
    for preemption in PREEMPTIONS:
        for memory in MEMORIES:
            if memory in RESERVED_MEMORIES:
                continue  # these never preempt
            for page in SHORT_PAGES:
                for depth in (1, 2):
                    yield Way(memory, page, BATCHES[-1], CHUNKS[0], LITTLE, preemption, depth)
    yield from windowed_ways()


def windowed_ways() -> Iterator[Way]:
    """Return the ways of the model with windows: every page layout, uniform and virtual pages, each with plenty of
    memory and with little."""
    kinds = [("paged", cut) for cut in CUTS] + [("uniform", "lcm"), ("virtual", "lcm")]
    for memory, cut in kinds:
        for page in PAGES:
            for batch in BATCHES:
                yield Way(memory, page, batch, CHUNKS[batch % 3 == 0], windows=cut)
    for preemption in PREEMPTIONS:
        for memory, cut in kinds:
            if memory == "virtual":
                continue  # with LITTLE it never preempts: its pages hold many tokens of a small model
            for page in SHORT_PAGES:
                yield Way(memory, page, BATCHES[-1], CHUNKS[0], LITTLE, preemption, 2, cut)


def run(way: Way, prompts: Sequence[list[int]]) -> tuple[list[Answer], dict[str, int]]:
    """Return the answers to all prompts, which come at once, and the number of preemptions by kind."""
    with way.build() as made:
        return answers_of(made.engine, prompts)


def answers_of(engine: Engine, prompts: Sequence[list[int]]) -> tuple[list[Answer], dict[str, int]]:
    """Return the same as `run`, for a given engine."""
    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=2)
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
    way: Way,
    answers: Sequence[Answer],
    reference: Sequence[Answer],
    oracle: Sequence[list[int]] | None,
    preempted: dict[str, int],
) -> Compared:
    """Compare token by token with the reference and with transformers' (`oracle`)."""
    tokens = equal = ties = 0
    for answer, expected in zip(answers, reference):
        compared, same = _along(answer.tokens, expected.tokens, expected.margins)
        tokens += compared
        equal += same
        ties += compared < len(expected.tokens)
    asked = known = None
    if oracle is not None:
        found = [_along(answer.tokens, theirs, answer.margins) for answer, theirs in zip(answers, oracle)]
        asked, known = (sum(counts) for counts in zip(*found))
    return Compared(way, tokens, equal, ties, preempted, asked, known)


def _along(ours: Sequence[int], theirs: Sequence[int], margins: Sequence[float]) -> tuple[int, int]:
    """Return how many tokens of one sequence are compared, and how many of them are equal. The comparison ends where
    the sequences diverge at a tie; after any other divergence no token is equal. A tie excuses this sequence only.
    `margins` are those of either sequence."""
    same = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
    tied = same < min(len(ours), len(theirs)) and margins[same] <= TIE
    return (same if tied else len(theirs)), same


def _prompts() -> list[list[int]]:
    """Return prompts of LENGTHS, cut from the model's own text: its choices have larger margins there than after random
    tokens."""
    params = SamplingParams(
        temperature=1.0, n=len(LENGTHS), max_tokens=max(LENGTHS), ignore_eos=True, detokenize=False, seed=0
    )
    engine = build(Way(batch=len(LENGTHS)).config()).engine
    engine.add("stories", [0], params)
    told: list[list[int]] = [[] for _ in LENGTHS]
    while engine.has_unfinished_requests:
        for output in engine.step():
            told[output.branch] += output.tokens
    engine.close()
    return [story[:length] for story, length in zip(told, LENGTHS)]


def _transformers(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Return the greedy tokens of the same checkpoint in transformers, in float32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    model = cast(Any, AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            tokens, new, cache = list[int](), prompt, DynamicCache()
            while len(tokens) < NEW:
                out = model(torch.tensor([new]), None, None, cache, use_cache=True)  # positional: the name has changed
                new = [int(out.logits[0, -1].argmax())]
                tokens += new
            answers.append(tokens)
    return answers


class Group(NamedTuple):
    """Ways that are reported in one line. `preemptions` are those of the group's kind, or of any kind if the engine may
    choose."""

    name: str
    ways: int
    settings: str
    tokens: int
    equal: int
    ties: int
    swapped: int
    recomputed: int
    transformers: int | None
    short: bool

    @property
    def holds(self) -> bool:
        """Return True if all compared tokens are equal and, for preemption, some request was preempted."""
        wanted = {"swap": self.swapped, "recompute": self.recomputed}.get(self.name.rpartition(" ")[2])
        happened = self.swapped + self.recomputed if wanted is None else wanted
        return self.tokens == self.equal and (happened > 0 or not self.short)


def groups(compared: Sequence[Compared]) -> Iterator[Group]:
    """Yield the sums over the ways of each group, in order."""
    for name in dict.fromkeys(one.way.group for one in compared):
        mine = [one for one in compared if one.way.group == name]
        ways = [one.way for one in mine]
        settings = [f"pages {_span(way.page for way in ways)}", f"batches {_span(way.batch for way in ways)}"]
        if len({way.depth for way in ways}) > 1:
            settings.append(f"steps in flight {_span(way.depth for way in ways)}")
        known = [one.transformers for one in mine if one.transformers is not None]
        yield Group(
            name, len(mine), ", ".join(settings),
            sum(one.tokens for one in mine), sum(one.equal for one in mine), sum(one.ties for one in mine),
            sum(one.preempted["swap"] for one in mine), sum(one.preempted["recompute"] for one in mine),
            sum(known) if known else None, ways[0].tokens < PLENTY,
        )  # fmt: skip


def _span(values: Iterable[int]) -> str:
    return "/".join(map(str, sorted(set(values))))


def _verdicts(compared: Sequence[Compared]) -> list[Result]:
    results = []
    for group in groups(compared):
        counts = f"; {group.swapped} swapped, {group.recomputed} recomputed" if group.short else ""
        ties = f"; {group.ties} ties" if group.ties else ""
        what = f"{group.name}: {group.settings}{counts}{ties}"
        verdict = HOLDS if group.holds else DIFFERS
        results.append(Result("C5", what, group.tokens, group.equal, "equal tokens", verdict))
    known = [one for one in compared if one.transformers is not None]
    if known:
        whole, equal = sum(one.asked or 0 for one in known), sum(one.transformers or 0 for one in known)
        verdict = HOLDS if equal == whole else DIFFERS
        results.append(Result("C5", "equal to transformers' tokens, up to ties", whole, equal, "tokens", verdict))
    return results


def _text(compared: Sequence[Compared]) -> str:
    head = ("memory and preemption", "runs", "settings", "tokens", "equal", "ties", "swapped", "recomputed",
            "transformers'", "the same")  # fmt: skip
    rows = [
        (*group[:8], "-" if group.transformers is None else group.transformers, "yes" if group.holds else "no")
        for group in groups(compared)
    ]
    about = (
        f"{len(LENGTHS)} prompts of {min(LENGTHS)} to {max(LENGTHS)} tokens, {NEW} greedy tokens after each; float32"
    )
    return f"{about}\n{table(head, rows)}"


def _draw(compared: Sequence[Compared]) -> Figure:
    """Draw a bar for each group: the share of equal tokens, and the number of preemptions."""
    from quire.bench.plots import COLOURS, figure

    found = list(groups(compared))
    fig = figure(9, 1.2 + 0.4 * len(found))
    axes = fig.add_subplot()
    shares = [100 * group.equal / group.tokens for group in found]
    bars = axes.barh([group.name for group in found], shares, color=[COLOURS[2 if g.holds else 1] for g in found])
    labels = [
        f"{group.equal:,} of {group.tokens:,} tokens, {group.ways} runs"
        + (f", {group.swapped} swapped, {group.recomputed} recomputed" if group.short else "")
        for group in found
    ]
    axes.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of greedy tokens that are equal")
    fig.suptitle("The same tokens by every way (bundled model, float32, CPU)")
    return fig
