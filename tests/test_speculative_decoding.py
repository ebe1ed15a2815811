"""Speculation with the bundled model: stop strings, log-probabilities, branches and grammars are those without it."""

from __future__ import annotations

from typing import Any

import pytest

import quire
from quire import SamplingParams
from quire.core.outputs import EngineStats
from quire.core.scheduler import Scheduler
from quire.protocol.step_plan import StepPlan
from quire.protocol.structured_output import StructuredOutputsParams

PROMPTS = ["The cat sat on the mat. The cat sat on the", "1 2 3 4 5 1 2 3 4 5 1 2", "Once upon a time there was"]
ITEM = {"type": "object", "properties": {"kind": {"enum": ["alpha", "beta"]}}, "required": ["kind"]}
SCHEMA = {"type": "array", "minItems": 5, "maxItems": 5, "items": ITEM}
TEXT = {"type": "string", "maxLength": 60}
NOTE = {"type": "object", "properties": {"name": TEXT, "text": TEXT}, "required": ["name", "text"]}
PARAMS: tuple[dict[str, Any], ...] = (
    {"stop": ["the", " a"]},
    {"stop": ["cat"], "min_tokens": 10, "n": 2},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"best_of": 2},
    {"frequency_penalty": 0.3, "structured_outputs": StructuredOutputsParams(json=SCHEMA), "max_tokens": 80},
    {"logprobs": 1, "structured_outputs": StructuredOutputsParams(regex="(the cat |a dog ){9}")},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z ,.]{99}"), "logprobs": 0},
    {"structured_outputs": StructuredOutputsParams(json=NOTE), "presence_penalty": 0.1, "max_tokens": 60},
    # ends with an error, as the grammar allows nothing but a banned word
    {"logprobs": 1, "structured_outputs": StructuredOutputsParams(regex="( 3 4 5 1 2){9}"), "bad_words": ["5 1"]},
)


def generate(kinds: tuple[dict[str, Any], ...] = PARAMS, **settings: Any) -> tuple[list[Any], EngineStats]:
    """Return all that is generated, greedily and not, and the engine's counts."""
    with quire.LLM(
        dtype="float32", threads=1, deterministic=True, debug=True, page_size=4, max_num_seqs=4, **settings
    ) as llm:
        params = [SamplingParams(**{"temperature": temperature, "max_tokens": 32, "seed": 3, **more})
                  for more in kinds for temperature in (0.0, 0.9)]  # fmt: skip
        prompts = PROMPTS * len(params)
        outputs = llm.generate(prompts, [one for one in params for _ in PROMPTS], use_tqdm=False)
        return [output.outputs for output in outputs], llm.engine.stats.copy()


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return generate(kv_tokens=4096)[0]


@pytest.mark.parametrize(
    "settings",
    [{"speculative_method": "ngram"}, {"speculative_model": "tiny-draft", "speculative_method": "both"}],
)
def test_outputs_are_those_without_it(settings: dict[str, Any], expected: list[Any]) -> None:
    outputs, stats = generate(kv_tokens=400, swap_gib=0.01, **settings)
    assert outputs == expected
    assert stats.accepted_tokens > 20


@pytest.mark.parametrize("kind", [6, 7])
def test_the_draft_model_drafts_under_grammars(kind: int, expected: list[Any]) -> None:
    """Their masks are made while its tokens are verified."""
    settings = {"speculative_model": "tiny-draft", "adaptive_speculation": False, "num_speculative_tokens": 3}
    outputs, stats = generate(PARAMS[kind : kind + 1], kv_tokens=4096, **settings)
    count = 2 * len(PROMPTS)
    assert outputs == expected[kind * count :][:count]
    assert stats.accepted_tokens > 20
    assert stats.accepted_per_pos[2] > 2


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("stages", [{"pp": 2}, {"pp": 3, "max_num_batched_tokens": 16}, {"pp": 2, "tp": 2}], ids=str)
def test_stages_verify_what_one_rank_does(stages: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps with drafts are in flight, of different sequences."""
    in_flight, inner = set[int](), Scheduler.schedule

    def schedule(scheduler: Scheduler) -> StepPlan | None:
        plan = inner(scheduler)
        if plan is not None and any(row.draft_tokens for row in plan.slices):
            in_flight.add(scheduler.num_in_flight)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", schedule)
    drafting = {"speculative_method": "ngram", "adaptive_speculation": False, "kv_tokens": 300, "swap_gib": 0.01}
    expected, _ = generate(PARAMS[:6], kv_tokens=4096)
    outputs, stats = generate(PARAMS[:6], **drafting, **stages, device="cpu")
    assert [[(one.text, one.token_ids) for one in each] for each in outputs] == [
        [(one.text, one.token_ids) for one in each] for each in expected
    ]
    assert stats.accepted_tokens > 20
    assert max(in_flight) == stages["pp"]
