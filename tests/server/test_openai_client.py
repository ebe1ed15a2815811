"""The real openai client over a real socket."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from asking import choices_of, events, ids_of
from echo_oracle import expected_tokens
from echo_service import VOCAB, Running, tokenizer
from openai import OpenAI

from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seeds import branch_seed

PROMPT = "once upon a time"


def tokens_of(prompt: str, seed: int, count: int) -> list[int]:
    return expected_tokens(tokenizer().encode(prompt), SamplingParams(max_tokens=count), seed, vocab_size=VOCAB,
                    eos_ids=frozenset({0}))  # fmt: skip


def text_of(prompt: str, seed: int, count: int) -> str:
    return tokenizer().decode(tokens_of(prompt, seed, count))


def test_streamed_completion_equals_the_whole(placed_client: OpenAI, placed: Running) -> None:
    asked: Any = {"model": "echo", "prompt": PROMPT, "seed": 3, "max_tokens": 40}
    done = placed_client.completions.create(**asked)
    assert (done.choices[0].text, done.choices[0].finish_reason) == (text_of(PROMPT, 3, 40), "length")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(tokenizer().encode(PROMPT)), 40)
    assert (done.object, done.id[:5]) == ("text_completion", "cmpl-")
    assert placed_client.completions.create(model="echo", prompt=PROMPT, seed=3).usage.completion_tokens == 16
    chunks = list(placed_client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    [streamed] = choices_of(chunks)
    assert (streamed.text, streamed.reason) == (text_of(PROMPT, 3, 40), "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1
    assert placed.idle()


def test_cached_tokens_are_told(client: OpenAI) -> None:
    for _ in range(2):
        done = client.completions.create(model="echo", prompt=[7] * 21, max_tokens=1)
    assert done.usage.prompt_tokens_details.cached_tokens == 20
    salted = client.completions.create(model="echo", prompt=[7] * 21, max_tokens=1, extra_body={"cache_salt": "x"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_echo_scores_the_prompt(placed_client: OpenAI) -> None:
    client = placed_client
    ids = tokenizer().encode(PROMPT)
    done = client.completions.create(model="echo", prompt=PROMPT, seed=3, max_tokens=4, echo=True, logprobs=2)
    scores = done.choices[0].logprobs
    words = [tokenizer().token_text(id) for id in [*ids, *tokens_of(PROMPT, 3, 4)]]
    assert done.choices[0].text == PROMPT + text_of(PROMPT, 3, 4)
    assert scores.tokens == words
    assert scores.token_logprobs[0] is None
    assert all(value < 0 for value in scores.token_logprobs[1:])
    assert scores.top_logprobs[0] is None
    assert all(1 <= len(top) <= 3 for top in scores.top_logprobs[1:])
    assert scores.text_offset == [sum(map(len, words[:i])) for i in range(len(words))]
    only = client.completions.create(model="echo", prompt=ids, max_tokens=0, echo=True, logprobs=0)
    assert only.choices[0].text == PROMPT
    assert only.choices[0].logprobs.token_logprobs == scores.token_logprobs[: len(ids)]
    assert only.usage.completion_tokens == 0


def test_streamed_logprobs_equal_the_whole(placed_client: OpenAI) -> None:
    """Of each branch, which all echo the scored prompt."""
    asked: Any = {"model": "echo", "prompt": [5, 6, 7], "seed": 4, "n": 3, "max_tokens": 2, "logprobs": 1, "echo": True}
    whole = [choice.logprobs for choice in placed_client.completions.create(**asked).choices]
    assert [len(scores.tokens) for scores in whole] == [5] * 3
    assert len({tuple(scores.token_logprobs[:3]) for scores in whole}) == 1
    parts = [choice.logprobs for choice in choices_of(placed_client.completions.create(**asked, stream=True))]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        for found, scores in zip(parts, whole):
            assert [item for part in found for item in getattr(part, name)] == getattr(scores, name)


def test_prompt_logprobs(client: OpenAI) -> None:
    done = client.completions.create(model="echo", prompt=[5, 6, 7], max_tokens=1, extra_body={"prompt_logprobs": 2})
    first, *others = done.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in others] == ["6", "7"]
    assert [[one["rank"] for one in entry.values()][1:] for entry in others] == [[1, 2], [1, 2]]


MESSAGES = [{"role": "user", "content": "once"}]
RENDERED = "<|im_start|>user\nonce<|im_end|>\n<|im_start|>assistant\n"


def test_chat_stream(placed_client: OpenAI) -> None:
    asked: Any = {"model": "echo", "messages": MESSAGES, "seed": 2, "n": 2, "max_completion_tokens": 9}
    whole = placed_client.chat.completions.create(**asked)
    wanted = [text_of(RENDERED, 2, 9), text_of(RENDERED, branch_seed(2, 1), 9)]
    assert [(choice.message.role, choice.message.content) for choice in whole.choices] == [
        ("assistant", text) for text in wanted
    ]
    assert whole.usage.prompt_tokens == len(tokenizer().encode(RENDERED))
    options = {"include_usage": True}
    chunks = list(placed_client.chat.completions.create(**asked, stream=True, stream_options=options))
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    assert [(choice.text, choice.reason) for choice in choices_of(chunks)] == [(text, "length") for text in wanted]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 18


def test_chat_logprobs(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model="echo", messages=MESSAGES, seed=2, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = done.choices[0].logprobs.content
    ids = tokens_of(RENDERED, 2, 5)
    assert [entry.token for entry in content] == [tokenizer().token_text(id) for id in ids]
    assert [bytes(entry.bytes) for entry in content] == [tokenizer().token_bytes(id) for id in ids]
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_models_and_facts(client: OpenAI, http: httpx.Client) -> None:
    assert [model.id for model in client.models.list()] == ["echo", "parrot"]
    assert client.models.retrieve("parrot").model_extra["max_model_len"] == 256
    assert client.completions.create(model="parrot", prompt="a", max_tokens=1).model == "echo"
    assert http.post("/ping").status_code == 200
    assert http.get("/version").json() == {"version": "0.1.0"}
    assert http.get("/load").json() == {"server_load": 0}
    assert "/openapi.json" in http.get("/nothing").json()["error"]["message"]


def test_errors_have_openais_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.body == {"message": "the model 'gpt' does not exist; this server has 'echo'",
                                  "type": "NotFoundError", "param": "model", "code": 404}  # fmt: skip
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="echo", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"


def test_usage_is_null_until_the_last_chunk(http: httpx.Client) -> None:
    for options, known in ({"include_usage": True}, True), ({"continuous_usage_stats": True}, False), (None, False):
        body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": options}
        chunks = events(http, "/v1/chat/completions", body)
        assert len(chunks) > 1
        assert ["usage" in chunk for chunk in chunks] == [known] * len(chunks)
        if known:
            assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_tokenize_and_back(http: httpx.Client) -> None:
    text = "once upon<|im_end|>é"
    found = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer().encode(text)
    assert found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == "once\u0120upon<|im_end|>Ã©"  # as the vocabulary spells them
    assert found["max_model_len"] == 256
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": text}
    assert ids_of(http, messages=MESSAGES) == tokenizer().encode(RENDERED)
    history = "<|im_start|>user\nonce<|im_end|>\n"
    assert ids_of(http, messages=MESSAGES, add_generation_prompt=False) == tokenizer().encode(history)
