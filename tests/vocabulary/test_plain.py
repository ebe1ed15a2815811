"""Plans are plain: numbers, strings, None and tuples of these, whatever was asked for; nothing large is said twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import quire
from quire.config import EngineConfig
from quire.control.edge import Limits
from quire.control.engine import Engine
from quire.control.memory import Size, build_memory
from quire.control.scheduler import Scheduler
from quire.data.runner.model_runner import ModelRunner
from quire.sim.echo import EchoRunner
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import Sampling, StepPlan
from quire.vocabulary.specs import LayerSpec, ModelSpec

VOCAB = 2**18
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1}
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0, "stop": ["the end", "no"], "stop_token_ids": [5], "min_tokens": 3},
    {"n": 3, "seed": -(2**63), "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    {"n": 2, "best_of": 4, "logprobs": 2, "prompt_logprobs": 3, **PENALTIES},
    {"n": 2, "allowed_token_ids": list(range(500)), "logit_bias": {3: 1.5, 4: -2}, "bad_words": ["once", "upon a"]},
    {"n": 3, "best_of": 4, "logprob_token_ids": range(9)},
    {"beam_width": 3, "n": 2, "early_stopping": "never", **PENALTIES},
)


def parts(value: object) -> Iterator[object]:
    """What a value holds that isn't a tuple."""
    if isinstance(value, tuple):
        for part in value:
            yield from parts(part)
    else:
        yield value


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """What the model's runner is given."""
    seen: list[StepPlan] = []
    submit = ModelRunner.submit

    def noted(runner: ModelRunner, plan: StepPlan) -> Any:
        seen.append(plan)
        return submit(runner, plan)

    monkeypatch.setattr(ModelRunner, "submit", noted)
    return seen


def test_plans_of_all_kinds_of_requests(plans: list[StepPlan]) -> None:
    with quire.LLM(dtype="float32", kv_tokens=600, page_size=4, threads=1, preemption="swap") as llm:
        params = [SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | values)) for values in KINDS]
        llm.generate(["Once upon a time, there was a"] * len(params), params, use_tqdm=False)
        with llm.session("Once upon a time", width=3, max_tokens=16) as root:
            root.append(root.next(2).ids[1])
            child = root.fork()
            child.append(child.next(1).ids[0], 7)
            child.next(1)
    assert any(birth.parent >= 0 for plan in plans for birth in plan.births)
    assert any(birth.sampling is not None and birth.sampling.chosen for plan in plans for birth in plan.births)
    for plan in plans:
        assert all(part is None or isinstance(part, int | float | str) for part in parts(plan)), plan
        for birth in plan.births:
            assert (birth.sampling is None) == (birth.parent >= 0)


def test_parameters_are_said_once_a_request_not_once_a_fork() -> None:
    spec = ModelSpec("none", (LayerSpec(1, 2),), VOCAB, 64, 4, 2, 8, 100)
    memory = build_memory(EngineConfig(), spec, Size(4096, 64, 2))
    scheduler = Scheduler(memory, budget=512, max_seqs=32, max_len=64)
    runner = EchoRunner(vocab_size=VOCAB)
    runner.bind(memory.geometry)
    engine = Engine(scheduler, runner, Limits(VOCAB, 64, 8), clock=lambda: 0.0)
    sent: list[StepPlan] = []
    submit = runner.submit
    runner.submit = lambda plan: sent.append(plan) or submit(plan)  # type: ignore[method-assign]
    allowed = tuple(range(200_000))
    engine.add("a", [1, 2, 3], SamplingParams(n=8, allowed_token_ids=allowed, max_tokens=4))
    engine.add("b", [4, 5], SamplingParams(beam_width=4, allowed_token_ids=allowed, max_tokens=8))
    while engine.unfinished:
        engine.step()
    births = [birth for plan in sent for birth in plan.births]
    assert sum(birth.parent >= 0 for birth in births) > 10
    assert sum(birth.sampling is not None for birth in births) == 2


def test_what_the_device_must_know_of_parameters() -> None:
    assert SamplingParams().sampling() == Sampling()
    params = SamplingParams(
        **PENALTIES, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, min_tokens=2, stop_token_ids=[7, 7, 8],
        allowed_token_ids=[3, 1], logit_bias={"4": 2}, bad_word_ids=((1,), (2, 3)), method=lambda: None,  # type: ignore[arg-type,return-value,dict-item]
        prompt_logprobs=0, stop=["x"],
    )  # fmt: skip
    assert params.sampling() == Sampling(
        0.5, 0.9, 0, 0.1, 0.1, 0.3, 1.2, 2, (7, 8), (3, 1), ((4, 2.0),), ((1,), (2, 3)), True, 0
    )
    assert SamplingParams(logprob_token_ids=[9, 1, 9]).sampling() == Sampling(logprob_token_ids=(9, 1))


@pytest.mark.parametrize(
    ("sampling", "greedy", "needs_history"),
    [
        (Sampling(), False, False),
        (Sampling(temperature=0.0), True, False),
        (Sampling(chosen=True), True, False),
        (Sampling(presence_penalty=-0.1), False, True),
        (Sampling(frequency_penalty=0.1), False, True),
        (Sampling(repetition_penalty=0.9), False, True),
        (Sampling(bad_word_ids=((1,), (2,))), False, False),
        (Sampling(bad_word_ids=((1,), (2, 3))), False, True),
    ],
)
def test_what_follows_from_it(sampling: Sampling, greedy: bool, needs_history: bool) -> None:
    assert (sampling.greedy, sampling.needs_history) == (greedy, needs_history)
