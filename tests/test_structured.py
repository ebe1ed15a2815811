"""Structured output with the bundled model: every output that ends is of its form, at any temperature, with branches,
penalties and log-probabilities, short of memory, beside rows that have no form and don't change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from quire import LLM, SamplingParams
from quire.errors import InputError
from quire.protocol.sampling_params import Structured, StructuredOutputsParams

SCHEMA = {
    "type": "object", "required": ["a_name_of_some_length", "years_that_have_passed"], "additionalProperties": False,
    "properties": {"a_name_of_some_length": {"type": "string", "maxLength": 16},
                   "years_that_have_passed": {"type": "integer", "minimum": 0, "maximum": 120}},
}  # fmt: skip
PROMPTS = ["Once upon a time", "The dog said", "In the garden", "One day"]
FORM = StructuredOutputsParams(json=SCHEMA)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_num_seqs=12) as found:
        yield found


def checked(outputs: list[Any]) -> int:
    """How many ended, each of them of the form."""
    ended = [one for output in outputs for one in output.outputs if one.finish_reason == "stop"]
    for one in ended:
        jsonschema.validate(json.loads(one.text), SCHEMA)
    assert all(one.finish_reason in ("stop", "length") for output in outputs for one in output.outputs)
    return len(ended)


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 2, "top_k": 50},
        {"temperature": 1, "n": 3},
        {"temperature": 1, "n": 2, "best_of": 3},
        {"temperature": 1, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
        {"temperature": 1, "logprobs": 2, "logit_bias": {"5": -2.0}},
    ],
)
def test_outputs_are_of_their_form(llm: LLM, more: dict[str, Any]) -> None:
    """In one batch with rows that have none, whose tokens are those that they have alone."""
    plain = [SamplingParams(temperature=1, seed=i, max_tokens=24) for i in range(2)]
    alone = llm.generate(PROMPTS[:2], plain)
    params = [SamplingParams(seed=i, max_tokens=160, structured_outputs=FORM, **more) for i in range(2)]
    outputs = llm.generate([*PROMPTS[:2], *PROMPTS[2:]], [*plain, *params])
    assert [one.outputs[0].token_ids for one in outputs[:2]] == [one.outputs[0].token_ids for one in alone]
    assert checked(outputs[2:]) >= len(outputs[2].outputs)
    if "logprobs" in more:
        for one in outputs[2].outputs:
            assert len(one.logprobs) == len(one.token_ids)


def test_forced_tokens_are_appended_at_once(llm: LLM) -> None:
    """Unless log-probabilities are wanted: then they are drawn, and the output is the same."""
    found = []
    for more in ({}, {"logprobs": 0}):
        before = llm.engine.stats.steps
        params = SamplingParams(temperature=0, max_tokens=160, structured_outputs=FORM, **more)
        [output] = llm.generate(PROMPTS[:1], params)
        found.append((output.outputs[0].token_ids, llm.engine.stats.steps - before))
    assert found[0][0] == found[1][0]
    assert found[0][1] < found[1][1] - 10


def test_refusals(llm: LLM) -> None:
    def refused(match: str, **more: Any) -> None:
        with pytest.raises(InputError, match=match):
            llm.generate(PROMPTS[0], SamplingParams(**more))

    refused("beam search", structured_outputs=FORM, beam_width=2)
    refused("min_tokens can't be combined", structured_outputs=FORM, min_tokens=2)
    refused("different forms", structured_outputs=FORM, structured=Structured("regex", "a"))
    refused(r"uniqueItems.*at #/uniqueItems", structured_outputs=StructuredOutputsParams(json={"uniqueItems": True}))
    assert not llm.engine.has_unfinished_requests


def test_without_a_tokenizer() -> None:
    with LLM(skip_tokenizer_init=True) as llm, pytest.raises(InputError, match="needs a tokenizer"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=FORM, detokenize=False))


@pytest.mark.parametrize("settings", [{"tp": 2}, {"executor": "process"}])
def test_ranks(llm: LLM, settings: dict[str, Any]) -> None:
    """Masks reach the ranks of a model that is divided, in the plan's frame."""
    params = SamplingParams(temperature=1, seed=1, max_tokens=80, structured_outputs=FORM)
    wanted = llm.generate(PROMPTS[0], params)[0].outputs[0].text
    with LLM(dtype="float32", max_num_seqs=4, device="cpu", threads=1, **settings) as ranks:
        found = ranks.generate([PROMPTS[0], PROMPTS[1]], [params, SamplingParams(seed=2, temperature=1, max_tokens=9)])
    jsonschema.validate(json.loads(found[0].outputs[0].text), SCHEMA)
    assert "tp" in settings or found[0].outputs[0].text == wanted
