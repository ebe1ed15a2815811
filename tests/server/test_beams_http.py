"""Beam search and best_of over HTTP, streamed and whole, with the openai client: what the echo model must say."""

from __future__ import annotations

from typing import Any

import echo_service
import pytest
from asking import choices_of, events
from echo_oracle import BeamResult, expected_beams, expected_tokens
from echo_service import VOCAB, Echo, Placement, Running, tokenizer
from openai import OpenAI

from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed

PROMPT = "once upon a time"
ENDS = frozenset({0})
COMMON = {"model": "echo", "prompt": PROMPT, "max_tokens": 12}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # OpenAI's fields and vLLM's -> ours
    "beam_width alone": ({"beam_width": 4}, {"beam_width": 4}),
    "the best two": ({"beam_width": 4, "n": 2, "use_beam_search": True}, {"beam_width": 4, "n": 2}),
    "vLLM: n": ({"use_beam_search": True, "n": 3}, {"beam_width": 3, "n": 3}),
    "vLLM: best_of": ({"use_beam_search": True, "best_of": 3}, {"beam_width": 3}),
    "both, equal": ({"beam_width": 3, "best_of": 3, "n": 2}, {"beam_width": 3, "n": 2}),
    "neither": ({"use_beam_search": True}, {"beam_width": 1}),
    "length penalty": ({"beam_width": 4, "n": 4, "length_penalty": 0, "early_stopping": True},
                       {"beam_width": 4, "n": 4, "length_penalty": 0.0, "early_stopping": True}),
    "never": ({"beam_width": 3, "length_penalty": 2, "early_stopping": "never"},
              {"beam_width": 3, "length_penalty": 2.0, "early_stopping": "never"}),
    "temperature and the like change nothing": (
        {"beam_width": 4, "temperature": 2, "top_p": 0.1, "top_k": 1, "seed": 5}, {"beam_width": 4}),
}  # fmt: skip


def beams(**params: Any) -> list[BeamResult]:
    return expected_beams(
        tokenizer().encode(PROMPT), SamplingParams(max_tokens=12, **params), vocab_size=VOCAB, eos_ids=ENDS
    )


def shown(found: BeamResult) -> str:
    return tokenizer().decode(found.tokens[:-1] if found.reason == "stop" else found.tokens)


@pytest.mark.parametrize("way", WAYS)
def test_beams_streamed_and_whole(echo: Running, client: OpenAI, way: str) -> None:
    asked, params = WAYS[way]
    wanted, before = beams(**params), echo.metric("quire_generation_tokens_total")
    done = client.completions.create(**COMMON, extra_body=asked)
    streamed = choices_of(client.completions.create(**COMMON, extra_body=asked, stream=True))
    assert [choice.index for choice in done.choices] == list(range(len(wanted)))
    ends = [(shown(beam), beam.reason) for beam in wanted]
    assert [(choice.text, choice.finish_reason) for choice in done.choices] == ends
    assert [(choice.text, choice.reason) for choice in streamed] == ends
    assert done.usage.completion_tokens == sum(len(beam.tokens) for beam in wanted)
    assert echo.idle()
    assert echo.metric("quire_generation_tokens_total") - before == 2 * done.usage.completion_tokens


def test_the_agreed_prefix_comes_before_the_end(placement: Placement) -> None:
    """With one beam every token is settled at once; with several what they agree on is, and only then the rest."""
    asked = {**COMMON, "stream": True, "ignore_eos": True}
    with echo_service.serving(echo_service.built(Echo(pause=0.02)), placement=placement) as running:
        http = running.http
        for width, tokens, least in ((1, 30, 3), (2, 60, 2)):
            chunks = events(http, "/v1/completions", {**asked, "max_tokens": tokens, "beam_width": width})
            ends = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert len(ends) >= least, "nothing was settled before the end"
            assert ends == [None] * (len(ends) - 1) + ["length"]


def test_beams_in_a_chat_with_logprobs(placed_client: OpenAI) -> None:
    client = placed_client
    asked = {"model": "echo", "messages": [{"role": "user", "content": "once"}], "n": 2, "max_tokens": 9,
             "logprobs": True, "top_logprobs": 2, "extra_body": {"beam_width": 3}}  # fmt: skip
    prompt = tokenizer().encode("<|im_start|>user\nonce<|im_end|>\n<|im_start|>assistant\n")
    params = SamplingParams(beam_width=3, n=2, max_tokens=9, logprobs=2)
    wanted = expected_beams(prompt, params, vocab_size=VOCAB, eos_ids=ENDS)
    done = client.chat.completions.create(**asked)
    assert [choice.message.content for choice in done.choices] == [shown(beam) for beam in wanted]
    for choice, beam in zip(done.choices, wanted):
        assert sum(entry.logprob for entry in choice.logprobs.content) == beam.logprob
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
    for choice, beam in zip(choices_of(client.chat.completions.create(**asked, stream=True)), wanted, strict=True):
        assert choice.text == shown(beam)
        assert sum(entry.logprob for some in choice.logprobs for entry in some.content) == beam.logprob


def test_beams_echo_the_scored_prompt(client: OpenAI) -> None:
    asked = {**COMMON, "logprobs": 1, "echo": True, "n": 2}
    plain = client.completions.create(**asked).choices[0].logprobs.token_logprobs
    length = len(tokenizer().encode(PROMPT))
    for choice in client.completions.create(**asked, extra_body={"beam_width": 3}).choices:
        assert choice.text.startswith(PROMPT)
        assert choice.logprobs.token_logprobs[:length] == plain[:length]
        assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)


def sampled(count: int, seed: int) -> list[str]:
    found = []
    for branch in range(count):
        params, own = SamplingParams(max_tokens=12), branch_seed(seed, branch)
        tokens = expected_tokens(tokenizer().encode(PROMPT), params, own, vocab_size=VOCAB, eos_ids=ENDS)
        found.append(tokenizer().decode(tokens[:-1] if tokens[-1] in ENDS else tokens))
    return found


def test_best_of_returns_the_likeliest(placed_client: OpenAI) -> None:
    client = placed_client
    everyone = client.completions.create(**COMMON, n=6, seed=3, logprobs=0).choices
    assert [choice.text for choice in everyone] == sampled(6, 3)
    order = sorted(everyone, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    best = client.completions.create(**COMMON, n=2, best_of=6, seed=3)
    assert [choice.text for choice in best.choices] == [choice.text for choice in order[:2]]
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage.completion_tokens == sum(len(choice.logprobs.tokens) for choice in order[:2])
    streamed = choices_of(client.completions.create(**COMMON, n=3, best_of=3, seed=3, stream=True))  # best_of is n
    assert [choice.text for choice in streamed] == sampled(3, 3)
    chat = client.chat.completions.create(
        model="echo", messages=[{"role": "user", "content": "once"}], max_tokens=4, extra_body={"best_of": 3}
    )
    assert len(chat.choices) == 1
