"""An engine over a model that ranks share out, as threads: each is given the same plans, and draws the tokens that
transformers' logits say, whatever windows, chunks, hits and preemptions there are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_unlike_logits import NEW, Saved, assert_said, engine_of, preempting, run
from thread_ranks import Meeting, ThreadExchange
from torch import Tensor

from quire import SamplingParams, build
from quire.control.engine import Engine
from quire.data.kernels.cpu.loading import library
from quire.data.layers.prepare import join
from quire.data.models import read_spec
from quire.data.runner import model_runner
from quire.data.runner.drawn import Drawn
from quire.data.runner.model_runner import ModelRunner
from quire.data.runner.sampler import Sampler
from quire.data.runner.split_draws import SplitDraws
from quire.data.runner.split_sampler import SplitSampler
from quire.data.weights.fp8 import made
from quire.data.weights.loader import load
from quire.source import Source
from quire.vocabulary.layout import Part
from quire.vocabulary.plan import StepPlan, StepResult

CPU = torch.device("cpu")


class Ranks:
    """A runner that has one for each rank."""

    attention, depth = "auto", 1

    def __init__(self, ranks: int, make: Callable[[ThreadExchange], ModelRunner]) -> None:
        self.meeting = Meeting(ranks)
        self.runners = self.meeting.run(make)

    def bind(self, geometry: Any) -> None:
        for runner in self.runners:
            runner.bind(geometry)

    def warm_up(self, tokens: int, max_len: int) -> None: ...

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> StepResult:
        def work(exchange: ThreadExchange) -> StepResult:
            runner = self.runners[exchange.part.rank]
            return runner.collect(runner.submit(plan))

        first, *others = self.meeting.run(work)
        assert all(other.samples == first.samples for other in others), "ranks draw different tokens"
        return first

    def collect(self, ticket: StepResult) -> StepResult:
        return ticket


def shared_out(saved: Saved, ranks: int, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Engine:
    def runner_of(config: Any, source: Source, dtype: Any, device: Any, ends: tuple[int, ...], *_: Any) -> Ranks:
        attention = "sdpa" if library() is None else "native"

        def make(exchange: ThreadExchange) -> ModelRunner:
            model = made(source.config, torch.float32, CPU, None, exchange.part)
            load(model, saved.folder)
            model.prepare()
            join(model, exchange)
            return ModelRunner(model, source.spec, torch.float32, CPU, attention, ends, graphs=True, debug=True)

        return Ranks(ranks, make)

    def read(config: Any) -> Source:
        source = plain(config)
        return source._replace(spec=read_spec(source.config, Part(0, ranks)))

    plain = build.read_source
    with monkeypatch.context() as patched:
        patched.setattr(build, "read_source", read)
        patched.setattr(build, "_runner", runner_of)
        return engine_of(saved, **settings)


@pytest.mark.parametrize(
    ("case", "ranks", "preemption"),
    [("mistral, layer_types", 2, "swap"), ("gemma2", 4, "recompute"), ("gemma3", 2, "recompute")],
)
def test_ranks_draw_what_transformers_says(
    case: str, ranks: int, preemption: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Saved(case, tmp_path)
    settings = {"page_size": 4, "max_num_batched_tokens": 16, "preemption": preemption, "depth": 1}
    engine = shared_out(model, ranks, monkeypatch, **settings)
    one = engine_of(model, **settings)
    for params in (
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=NEW, ignore_eos=True, logprobs=20),
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=20, presence_penalty=0.5),
    ):
        for each in (engine, one):
            preempting(each, {3, 5, 8, 14})
        expected = {tuple(prompt): tokens for prompt, tokens, _ in run(one, params)}
        for prompt, tokens, tops in run(engine, params):
            if params.n == 1:
                assert tokens == expected[tuple(prompt)]
            assert_said(tops, model.logprobs(prompt + tokens)[len(prompt) - 1 : -1])
    assert engine.scheduler.preempted[preemption] > 0
    assert engine.scheduler.memory.account().sharing.hits > 0


class GatheringSampler(SplitSampler):
    """One that draws from whole logits."""

    def sample(self, logits: Tensor, rows: Any, last: Tensor | None = None) -> Drawn:
        return Sampler.sample(self, self.split.whole(logits), rows, last)


def test_ranks_draw_without_gathering_what_they_draw_from_gathered_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, settings = Saved("mistral, layer_types", tmp_path), {"page_size": 4, "depth": 1}
    asked = [
        SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, n=2, max_tokens=NEW, ignore_eos=True),
        SamplingParams(temperature=1.5, seed=4, top_k=30, top_p=0.9, max_tokens=NEW, ignore_eos=True),
    ]
    monkeypatch.setattr("quire.data.runner.sampler.take", lambda device, dtype: False)  # the definition
    with monkeypatch.context() as patched:
        patched.setattr(SplitDraws, "whole", None)
        engine = shared_out(model, 2, patched, **settings)
        split = [[tokens for _, tokens, _ in run(engine, params)] for params in asked]
    with monkeypatch.context() as patched:
        patched.setattr(model_runner, "SplitSampler", GatheringSampler)
        engine = shared_out(model, 2, patched, **settings)
        assert split == [[tokens for _, tokens, _ in run(engine, params)] for params in asked]
