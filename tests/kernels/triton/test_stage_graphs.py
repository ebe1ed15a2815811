"""Stages whose steps of one token a row are graphs draw what the undivided model draws, launch by launch. Without a GPU
a graph is its launches, made anew."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from grids import DEVICE
from small_models import SMALL, bind, pages_of
from test_mixed_steps import Again
from torch import Tensor

from quire.kernels.triton import backend
from quire.models import read_spec, resolve_model_class
from quire.models.named_configs import named_config
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.protocol.pipeline_stages import largest_stage_spec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SeqSlice, SlotInit, StepPlan
from quire.startup.loader import meta_model
from quire.weights.dummy import fill_dummy_weights
from quire.worker import cuda_graphs
from quire.worker.model_runner import ModelRunner
from quire.worker.stage_runner import StageRunner

SLOTS, STAGES = 5, 3


class Ends:
    """A stage's pipes from the one before and to the one behind, which compute one after another."""

    def __init__(self, before: deque[Any], behind: deque[Any]) -> None:
        self.before, self.behind = before, behind

    def send(self, x: Tensor, delta: Tensor | None) -> None:
        self.behind.append((x.clone(), None if delta is None else delta.clone()))

    def receive(self, rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        x, delta = self.before.popleft()
        assert (x.shape, x.dtype) == ((rows, columns), dtype), "the rows that were sent, without padding"
        return x, delta


def made(name: str, part: Shard, attention: str, pipes: Any = None, replays: bool = False) -> ModelRunner:
    config = {**named_config(name), **SMALL[name], "num_hidden_layers": 3}
    kind = resolve_model_class(config)
    model = kind(config, torch.float32, DEVICE, shard=part)
    fill_dummy_weights(model, 3, full_model=meta_model(config, torch.float32, part))
    for parameter in model.parameters():
        parameter.mul_(8)  # logits that differ
    model.prepare(64)
    spec = read_spec(config)
    given = (model, spec, torch.float32, DEVICE, attention)
    runner = ModelRunner(*given) if pipes is None else StageRunner(*given, shard=part, pipes=pipes, use_graphs=replays)
    bind(runner, largest_stage_spec(spec, part.pp_size), SLOTS)
    return runner


def answers(runners: list[ModelRunner]) -> list[list[int]]:
    """What the last of these stages draws for some prompts and the tokens behind; rows come and go."""

    def step(plan: StepPlan) -> list[int]:
        tickets = [runner.submit(plan) for runner in runners]
        results = [runner.collect(ticket) for runner, ticket in zip(runners, tickets)]
        assert all(not one.tokens for result in results[:-1] for one in result.slice_results)
        return [one.tokens[0] for one in results[-1].slice_results]

    lengths = {slot: 2 + 3 * slot for slot in range(1, SLOTS - 1)}
    drawn: dict[int, list[int]] = {}
    for slot, length in lengths.items():
        birth = SlotInit(
            slot, slot, -1, SamplingParams(temperature=(slot % 2) * 0.8, seed=slot).to_device_params(), slot, length
        )
        tokens = tuple(5 + (7 * slot + i * i) % 50 for i in range(length))
        drawn[slot] = step(StepPlan((birth,), tuple(pages_of(slot)), (SeqSlice(slot, tokens, 0, 1),)))
    for gone in (0, 1, 2):
        slots = list(lengths)[gone:]
        rows = tuple(SeqSlice(slot, (drawn[slot][-1],), lengths[slot] + len(drawn[slot]) - 1, 1) for slot in slots)
        for slot, token in zip(slots, step(StepPlan((), (), rows))):
            drawn[slot].append(token)
    return list(drawn.values())


@pytest.mark.parametrize("name", ["llama-125m", "opt-125m"])
def test_stages_replay_what_one_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    again = Again()
    monkeypatch.setattr(cuda_graphs, "GraphCapturer", lambda device: again)
    monkeypatch.setattr(backend, "multiprocessors", lambda device: 9)
    pipes = [deque[Any]() for _ in range(STAGES + 1)]
    stages = [
        made(name, Shard(0, 1, stage, STAGES), "triton", Ends(pipes[stage], pipes[stage + 1]), replays=True)
        for stage in range(STAGES)
    ]
    assert answers(stages) == answers([made(name, UNSHARDED, "reference")])
    assert again.replays == 3 * (STAGES + 1), "each step of a token a row is a graph on every stage, and a tail"
    assert not any(pipes)
