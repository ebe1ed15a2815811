"""Seeded workloads that are independent of the engine, so that two engines can run the same work.

Lengths are those of PagedAttention (Figure 11, §6.4, §6.5) and Jenga (§7, Figures 15 and 17). The data sets are not
used: a comment at each workload says which numbers are the paper's; the rest is assumed.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.bench.copying import MAX_SENTENCES, random_text
from quire.errors import StartupError
from quire.protocol.images import ImageItem, ImagePixels

Counts = npt.NDArray[np.int64]

MAX_REQUESTS = 100_000
MAX_LENGTH = 2**21
MAX_PROMPT_TOKENS = 10**8
EDGE = 10  # token ids this close to either end of a vocabulary are not used: they are special tokens
BLOCK = 4096  # requests of a block of an endless workload
ARTICLES = 16  # documents of a block, for workloads where each request may have its own


class Job(NamedTuple):
    """One request: a prompt as token ids, the number of tokens to generate, the images in it and their pixels. For a
    server: images as PNG `files`, which precede the prompt."""

    prompt: list[int]
    output: int
    media: tuple[ImageItem, ...] = ()
    pixels: tuple[ImagePixels, ...] = ()
    files: tuple[bytes, ...] = ()


class ImageSpec(NamedTuple):
    """An image without pixels: its name, its size, and the number of tokens that replace it in prompts of models
    without vision (see quire.bench.pictured)."""

    name: str
    width: int
    height: int
    tokens: int


class RequestSpec(NamedTuple):
    """A request without tokens. Its prompt starts with the first `prefix_len` tokens of the text `prefix_id`, as do all
    prompts with that prefix. `arrival` is in seconds from the start, if the workload defines it. The tokens of its
    `pictures` are the first of `prompt_len`."""

    prompt_len: int
    output_len: int
    prefix_id: str = ""
    prefix_len: int = 0
    arrival: float | None = None
    pictures: tuple[ImageSpec, ...] = ()


class LogNormal(NamedTuple):
    """Lengths of mean `mean`; `sigma` is the deviation of their logarithm. `low` and `high` clip them."""

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Counts:
        """Return `count` whole lengths, not clipped."""
        mu = np.log(self.mean) - self.sigma**2 / 2
        return rng.lognormal(mu, self.sigma, count).astype(np.int64)

    def clip(self, lengths: Counts) -> Counts:
        """Clip every length to [low, high]."""
        return np.clip(lengths, self.low, self.high)


class Uniform(NamedTuple):
    """Lengths from `low` to `high`, inclusive."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator, count: int) -> Counts:
        return rng.integers(self.low, self.high + 1, count)

    def clip(self, lengths: Counts) -> Counts:
        return lengths


class After(NamedTuple):
    """Lengths of `start` tokens plus `rest`."""

    start: int
    rest: LogNormal

    def draw(self, rng: np.random.Generator, count: int) -> Counts:
        return self.start + self.rest.draw(rng, count)

    def clip(self, lengths: Counts) -> Counts:
        return self.start + self.rest.clip(lengths - self.start)


Length = LogNormal | Uniform | After


class Lengths(NamedTuple):
    """Lengths of prompts and outputs, at most `longest` tokens together. With `subjects` a prompt begins with the
    worked examples of one of that many subjects, which have `examples` tokens."""

    prompt: Length
    output: Length
    longest: int = MAX_LENGTH
    subjects: int = 0
    examples: Uniform = Uniform(0, 0)


DRAWN = {
    # PagedAttention, Figure 11: the means of what is served, 161 and 338; a context of 2,048 tokens. Assumed:
    # log-normal, the sigmas, the limits.
    "sharegpt": Lengths(LogNormal(183, 1.3, 4, 1024), LogNormal(353, 1.0, 4, 2044), 2048),
    "alpaca": Lengths(LogNormal(19, 0.6, 4, 128), LogNormal(58, 0.9, 2, 512)),
    # Jenga, Figure 15: all but "uniform".
    "longdoc": Lengths(Uniform(55_000, 110_000), Uniform(50, 100)),
    # Jenga, §4.4: ShareGPT's requests have 1085.04 tokens on average. Assumed: prompt and output together, in the
    # proportion of sharegpt above, after clipping; its sigmas.
    "sharegpt1085": Lengths(LogNormal(367, 1.3, 4, 4096), LogNormal(767, 1.0, 4, 4096)),
    # Jenga, §7.1: the longest of MMLU-pro has 3076 tokens. The data set has 14 subjects, each with five worked examples
    # for all of its questions. Assumed: prompt and output together, the lengths, subjects in random order.
    "mmlu-pro": Lengths(LogNormal(400, 0.6, 60, 1364), LogNormal(220, 0.6, 16, 512), 3076, 14, Uniform(800, 1200)),
    # Jenga, §3.2: MMMU-pro has 6193 image and 43 text tokens on average. Assumed: the same image tokens in each request
    # (ordinary tokens, for a model without vision), the spread of the text, outputs as above.
    "mmmu-pro": Lengths(After(6193, LogNormal(43.5, 0.5, 8, 256)), LogNormal(220, 0.6, 16, 512)),
}
# For a model with vision each request has its own image in place of the 6193 tokens. Assumed: image sizes, of
# which Llama 3.2 Vision makes four tiles of 1601 rows, or three; a share WIDER of the latter, so that 6193 is the mean.
PICTURED = {"mmmu-pro": 6193}
SQUARE, WIDE, WIDER = (1120, 1120), (1680, 560), (4 * 1601 - 6193) / 1601

# PagedAttention, §6.4: prefixes of 80 tokens (one example) and 341 (five). Assumed: the lengths of WMT16's sentences.
TRANSLATION = {"wmt1shot": 80, "wmt5shot": 341}
SENTENCE, TRANSLATED = LogNormal(28, 0.5, 4, 96), LogNormal(36, 0.5, 4, 128)

# PagedAttention, §6.5: prompts are the last 1024 tokens of history and query, most have all 1024, outputs at most 1024,
# no KV is kept between rounds. Assumed: turns as long as sharegpt's, a round of 1 to ROUNDS, each as likely.
CHAT = 1024
ROUNDS = 8

# Jenga, §7.2: arXiv-QA's requests have 92,408 tokens on average; Figure 17: several questions at the end of an article.
# Assumed: articles uniform and short enough for a context of 131,072, the number and lengths of the questions, their
# random order, outputs as in Figure 15. docqa is the same with documents by choice.
ARTICLE = Uniform(54_586, 130_000)
ASKED = 4
QUESTION, ANSWER = Uniform(16, 64), Uniform(50, 100)

# Jenga, §7.3, Figure 16: in the dynamic trace "the average length forms a uniform distribution over time". ramp has the
# means of the first and the last request by choice. Assumed: they change evenly from one request to the next, lengths
# lie within RAMPED of the mean, outputs as in Figure 15.
RAMPED = 0.1

RATIO = re.compile(r"0?\.[0-9]{1,6}|0", re.ASCII)  # of a range: below 1
NUMBERS = {
    "docqa": 2, "fixed": 2, "ramp": 2, "range": 3, "shared": 3,
    **dict.fromkeys((*DRAWN, *TRANSLATION, "chat", "arxiv-qa"), 0),
}  # fmt: skip
EXPECTED = ", ".join((
    "sharegpt@N, alpaca@N, longdoc@N, fixed:IN:OUT@N, range:IN:OUT:RATIO@N, shared:PREFIX:OWN:OUT@N",
    "docqa:DOCUMENTS:TOKENS@N, ramp:FIRST:LAST@N, copy:SENTENCES@N",
    *(f"{kind}@N" for kind, count in NUMBERS.items() if not count and kind not in ("sharegpt", "alpaca", "longdoc")),
))  # fmt: skip


class Workload(ABC):
    """Requests as lengths and, from a seed, as tokens. `arrivals` are their times in seconds from the start, if the
    workload defines them."""

    name: str
    requests: int
    arrivals: tuple[float, ...] | None = None

    @abstractmethod
    def specs(self, seed: int = 0) -> Sequence[RequestSpec]:
        """Return every request, without its tokens."""

    def lengths(self, seed: int = 0) -> list[tuple[int, int]]:
        """Return the (prompt, output) lengths of every request."""
        return [(request.prompt_len, request.output_len) for request in self.specs(seed)]

    def jobs(self, vocab_size: int, seed: int = 0) -> list[Job]:
        """Return the requests, for a model of `vocab_size` tokens. `seed` gives the lengths, `seed` + 1 the tokens."""
        low, high = EDGE, vocab_size - EDGE
        if high <= low:
            raise StartupError(f"{self.name} needs a vocabulary of more than {2 * EDGE} tokens, this has {vocab_size}")
        specs = self.specs(seed)
        total = sum(request.prompt_len for request in specs)
        if total > MAX_PROMPT_TOKENS:
            raise StartupError(
                f"the prompts of {self.name} have {total:,} tokens", f"At most {MAX_PROMPT_TOKENS:,}: ask for fewer"
            )
        rng = np.random.default_rng(seed + 1)
        prefixes: dict[str, list[int]] = {}
        jobs = []
        for prompt, output, name, length, *_ in specs:
            prefix = prefixes.setdefault(name, [])
            if len(prefix) < length:
                prefix += rng.integers(low, high, size=length - len(prefix)).tolist()
            jobs.append(Job(prefix[:length] + rng.integers(low, high, size=prompt - length).tolist(), output))
        return jobs


@dataclass(frozen=True)
class Named(Workload):
    """A workload by its name: `kind` with its numbers, and the number of requests."""

    name: str
    kind: str
    numbers: tuple[int, ...]
    requests: int
    ratio: float = 0.0

    def specs(self, seed: int = 0) -> list[RequestSpec]:
        """Return every request, without its tokens; the same for the same seed."""
        rng = np.random.default_rng(seed)
        if self.kind in DRAWN:
            drawn = list(_named_requests(rng, self.kind, self.requests))
            return _pictured(drawn, PICTURED[self.kind], seed) if self.kind in PICTURED else drawn
        if self.kind == "range":
            prompts, outputs = (around(mean, self.ratio) for mean in self.numbers)
            return list(_drawn(rng, prompts, outputs, self.requests))
        if self.kind in TRANSLATION:
            prefix = TRANSLATION[self.kind]
            return [
                RequestSpec(prefix + own, output, self.kind, prefix)
                for own, output, *_ in _drawn(rng, SENTENCE, TRANSLATED, self.requests)
            ]
        if self.kind == "chat":
            return _chat(rng, self.requests)
        if self.kind == "arxiv-qa":
            return _questions(rng, -(-self.requests // ASKED), ARTICLE, self.requests)
        if self.kind == "docqa":
            documents, tokens = self.numbers
            lengths = Uniform(tokens - tokens // 4, tokens + tokens // 4)
            return _questions(rng, documents, lengths, self.requests)
        if self.kind == "ramp":
            first, last = self.numbers
            return _ramp(rng, first, last, self.requests)
        *prefix_and_own, output = self.numbers
        shared = ("shared", prefix_and_own[0]) if self.kind == "shared" else ()
        return [RequestSpec(sum(prefix_and_own), output, *shared)] * self.requests


@dataclass(frozen=True)
class Copying(Workload):
    """Requests to repeat a text of `sentences` sentences, for a model that follows instructions: their tokens are those
    of its tokenizer and chat template."""

    name: str
    sentences: int
    requests: int

    def specs(self, seed: int = 0) -> Sequence[RequestSpec]:
        raise StartupError(
            f"the requests of {self.name} are texts, whose lengths only a model's tokenizer gives",
            "Use it in quire bench throughput, latency or serve, without --url",
        )

    def texts(self, seed: int = 0) -> list[str]:
        """Return the text of every request."""
        rng = np.random.default_rng(seed)
        return [random_text(rng, self.sentences) for _ in range(self.requests)]


def around(mean: int, ratio: float) -> Uniform:
    """Return lengths within `ratio` of `mean`: the limits of vLLM's random data set."""
    return Uniform(max(1, math.floor(mean * (1 - ratio))), math.ceil(mean * (1 + ratio)))


def _drawn(rng: np.random.Generator, prompt: Length, output: Length, count: int) -> Iterator[RequestSpec]:
    prompts, outputs = (kind.clip(kind.draw(rng, count)).tolist() for kind in (prompt, output))
    return map(RequestSpec, prompts, outputs)


def _named_requests(rng: np.random.Generator, kind: str, count: int) -> Iterator[RequestSpec]:
    """Return the requests of a kind of DRAWN."""
    lengths = DRAWN[kind]
    drawn = list(_drawn(rng, lengths.prompt, lengths.output, count))
    examples, subjects = [0], [0] * count
    if lengths.subjects:
        examples = lengths.examples.draw(rng, lengths.subjects).tolist()
        subjects = rng.integers(0, lengths.subjects, count).tolist()
    for subject, (own, output, *_) in zip(subjects, drawn):
        prompt = examples[subject] + own
        name = f"subject {subject}" if lengths.subjects else ""
        yield RequestSpec(prompt, min(output, lengths.longest - prompt), name, examples[subject])


def _pictured(specs: list[RequestSpec], tokens: int, seed: int) -> list[RequestSpec]:
    """Return the requests with an image each. The wider images are spread evenly."""
    sizes = [WIDE if int((i + 1) * WIDER) > int(i * WIDER) else SQUARE for i in range(len(specs))]
    return [
        one._replace(pictures=(ImageSpec(f"picture {i}, seed {seed}", *size, tokens),))
        for i, (one, size) in enumerate(zip(specs, sizes))
    ]


def _chat(rng: np.random.Generator, count: int) -> list[RequestSpec]:
    """Return random rounds of conversations, each of its own: no KV outlives a round, so the round is irrelevant."""
    query, answer = DRAWN["sharegpt"].prompt, DRAWN["sharegpt"].output
    rounds = rng.integers(1, ROUNDS + 1, count)
    queries, answers = (kind.clip(kind.draw(rng, count * ROUNDS)).reshape(count, ROUNDS) for kind in (query, answer))
    turn = np.arange(ROUNDS)
    before = ((queries + answers) * (turn < rounds[:, None] - 1)).sum(1)
    last = rounds - 1, np.arange(count)
    prompts = np.minimum(before + queries.T[last], CHAT)
    outputs = np.minimum(answers.T[last], CHAT)
    return list(map(RequestSpec, prompts.tolist(), outputs.tolist()))


def _questions(rng: np.random.Generator, documents: int, length: Uniform, count: int) -> list[RequestSpec]:
    """Return `count` questions, spread evenly over `documents`, in random order: a document, then the question."""
    lengths = length.draw(rng, documents).tolist()
    which = rng.permutation(np.arange(count) % documents).tolist()
    asked = _drawn(rng, QUESTION, ANSWER, count)
    return [
        RequestSpec(lengths[document] + question, output, f"document {document}", lengths[document])
        for document, (question, output, *_) in zip(which, asked)
    ]


def _ramp(rng: np.random.Generator, first: int, last: int, count: int) -> list[RequestSpec]:
    """Return `count` requests whose mean length changes evenly from `first` to `last`."""
    means = np.linspace(first, last, count)
    prompts = np.maximum(1, means * rng.uniform(1 - RAMPED, 1 + RAMPED, count)).astype(np.int64)
    return list(map(RequestSpec, prompts.tolist(), ANSWER.draw(rng, count).tolist()))


def parse(name: str | Workload) -> Workload:
    """Return the workload of a name such as "sharegpt@1000", or a workload unchanged.

    Raise StartupError, with the expected form, if it is invalid.
    """
    if isinstance(name, Workload):
        return name
    what, at, count = name.partition("@")
    kind, *given = what.split(":")
    if at and kind == "copy" and len(given) == 1:
        return Copying(name, _number(name, given[0], MAX_SENTENCES), _number(name, count, MAX_REQUESTS))
    if not at or NUMBERS.get(kind) != len(given):
        raise StartupError(f"there is no workload {name[:60]!r}", f"Expected {EXPECTED}")
    ratio = _ratio(name, given.pop()) if kind == "range" else 0.0
    numbers = tuple(_number(name, text, MAX_LENGTH) for text in given)
    return Named(name, kind, numbers, _number(name, count, MAX_REQUESTS), ratio)


def _ratio(name: str, text: str) -> float:
    if not RATIO.fullmatch(text):
        raise StartupError(
            f"{text[:20]!r} in the workload {name[:60]!r} is not a ratio from 0 to below 1", f"Expected {EXPECTED}"
        )
    return float(text)


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12 and 1 <= int(text) <= most):
        raise StartupError(
            f"{text[:20]!r} in the workload {name[:60]!r} is not a whole number from 1 to {most:,}",
            f"Expected {EXPECTED}",
        )
    return int(text)


@dataclass(frozen=True)
class Endless(Workload):
    """The first `requests` requests of the endless workload `name`, which has no "@N": at a higher rate the same
    requests arrive faster, followed by more. `name@N` differs: it samples N prompts, then N outputs, so each N has
    other requests."""

    name: str
    requests: int

    @classmethod
    def lasting(cls, name: str, rate: float, seconds: float) -> Endless:
        """Return the requests that arrive in `seconds` at `rate` a second. Raise StartupError if
        these are more than MAX_REQUESTS."""
        wanted = rate * seconds
        if wanted > MAX_REQUESTS:
            raise StartupError(
                f"{rate:.6g} requests/s for {seconds:g} seconds are {wanted:,.0f} requests, more than {MAX_REQUESTS:,}",
                "Give a smaller --seconds",
            )
        return cls(name, max(1, -int(-wanted // 1)))

    @cached_property
    def block(self) -> int:
        """Return the number of requests of a block."""
        return ASKED * ARTICLES if self.name == "arxiv-qa" else BLOCK

    def specs(self, seed: int = 0) -> list[RequestSpec]:
        """Return the first requests, without their tokens; block i is drawn from `seed` + i and has documents of its
        own."""
        found: list[RequestSpec] = []
        for i in range(-(-self.requests // self.block)):
            for one in parse(f"{self.name}@{self.block}").specs(seed + i):
                own = i > 0 and one.prefix_id.startswith("document")
                found.append(one._replace(prefix_id=f"{one.prefix_id} of block {i}") if own else one)
        return found[: self.requests]
