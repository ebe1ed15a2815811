"""The real openai client over a real socket."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from echo_service import Running, tokenizer
from openai import OpenAI

from quire.sim.echo import expected
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.seeds import branch_seed

VOCAB = 512
PROMPT = "once upon a time"


def tokens_of(prompt: str, seed: int, count: int) -> list[int]:
    """What the echo engine must say."""
    return expected(tokenizer().encode(prompt), SamplingParams(max_tokens=count), seed, vocab_size=VOCAB,
                    eos_ids=frozenset({0}))  # fmt: skip


def text_of(prompt: str, seed: int, count: int) -> str:
    return tokenizer().decode(tokens_of(prompt, seed, count))


def test_completion(client: OpenAI, echo: Running) -> None:
    done = client.completions.create(model="echo", prompt=PROMPT, seed=3, max_tokens=12)
    ids = tokenizer().encode(PROMPT)
    assert done.choices[0].text == text_of(PROMPT, 3, 12)
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(ids), 12)
    assert done.object == "text_completion"
    assert done.id.startswith("cmpl-")
    assert echo.idle()


def test_completion_defaults_to_16_tokens(client: OpenAI) -> None:
    assert client.completions.create(model="echo", prompt=PROMPT, seed=3).usage.completion_tokens == 16


def test_cached_tokens_are_told(client: OpenAI) -> None:
    for _ in range(2):
        done = client.completions.create(model="echo", prompt=[7] * 21, max_tokens=1)
    assert done.usage.prompt_tokens_details.cached_tokens == 20
    salted = client.completions.create(model="echo", prompt=[7] * 21, max_tokens=1, extra_body={"cache_salt": "x"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0


def test_streamed_completion_equals_the_whole(placed_client: OpenAI, placed: Running) -> None:
    stream = placed_client.completions.create(
        model="echo", prompt=PROMPT, seed=3, max_tokens=40, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == text_of(PROMPT, 3, 40)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 40
    assert len({chunk.id for chunk in chunks}) == 1
    assert placed.idle()


def test_prompts_and_branches_are_numbered(placed_client: OpenAI) -> None:
    client = placed_client
    prompts = [PROMPT, "a reader"]
    done = client.completions.create(model="echo", prompt=prompts, seed=5, n=2, max_tokens=6)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    wanted = [text_of(prompt, branch_seed(5, branch), 6) for prompt in prompts for branch in (0, 1)]
    assert [choice.text for choice in done.choices] == wanted
    streamed = ["", "", "", ""]
    for chunk in client.completions.create(model="echo", prompt=prompts, seed=5, n=2, max_tokens=6, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == wanted


def test_echo_scores_the_prompt(placed_client: OpenAI) -> None:
    client = placed_client
    ids = tokenizer().encode(PROMPT)
    done = client.completions.create(model="echo", prompt=PROMPT, seed=3, max_tokens=4, echo=True, logprobs=2)
    scores = done.choices[0].logprobs
    words = [tokenizer().convert_id(id) for id in [*ids, *tokens_of(PROMPT, 3, 4)]]
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
    client = placed_client
    asked = {"model": "echo", "prompt": PROMPT, "seed": 4, "max_tokens": 9, "logprobs": 1, "echo": True}
    whole = client.completions.create(**asked).choices[0].logprobs
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, name)] == getattr(whole, name)


def test_every_branch_echoes_the_scored_prompt(client: OpenAI) -> None:
    asked = {"model": "echo", "prompt": [5, 6, 7], "seed": 4, "n": 3, "max_tokens": 2, "logprobs": 0, "echo": True}
    choices = client.completions.create(**asked).choices
    assert all(len(choice.logprobs.tokens) == 5 for choice in choices)
    assert len({tuple(choice.logprobs.token_logprobs[:3]) for choice in choices}) == 1
    streamed = [0, 0, 0]
    for chunk in client.completions.create(**asked, stream=True):
        streamed[chunk.choices[0].index] += len(chunk.choices[0].logprobs.tokens)
    assert streamed == [5, 5, 5]


def test_prompt_logprobs(client: OpenAI) -> None:
    done = client.completions.create(model="echo", prompt=[5, 6, 7], max_tokens=1, extra_body={"prompt_logprobs": 2})
    first, *others = done.choices[0].model_extra["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in others] == ["6", "7"]
    assert [[one["rank"] for one in entry.values()][1:] for entry in others] == [[1, 2], [1, 2]]


def test_stop_string_ends_and_is_named(placed_client: OpenAI) -> None:
    client = placed_client
    whole = text_of(PROMPT, 11, 60)
    stop = whole[20:23]
    done = client.completions.create(model="echo", prompt=PROMPT, seed=11, max_tokens=60, stop=[stop])
    assert done.choices[0].text == whole[: whole.index(stop)]
    assert done.choices[0].finish_reason == "stop"
    assert done.choices[0].model_extra["stop_reason"] == stop


MESSAGES = [{"role": "user", "content": "once"}]
RENDERED = "<|im_start|>user\nonce<|im_end|>\n<|im_start|>assistant\n"


def test_chat(client: OpenAI, echo: Running) -> None:
    done = client.chat.completions.create(model="echo", messages=MESSAGES, seed=2, max_completion_tokens=9)
    assert done.choices[0].message.role == "assistant"
    assert done.choices[0].message.content == text_of(RENDERED, 2, 9)
    assert done.usage.prompt_tokens == len(tokenizer().encode(RENDERED))
    assert echo.idle()


def test_chat_without_max_tokens_fills_the_context(client: OpenAI) -> None:
    done = client.chat.completions.create(model="echo", messages=MESSAGES, extra_body={"ignore_eos": True})
    assert done.usage.total_tokens == 256


def test_chat_stream(placed_client: OpenAI) -> None:
    client = placed_client
    chunks = list(
        client.chat.completions.create(
            model="echo", messages=MESSAGES, seed=2, n=2, max_tokens=9, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert [chunk.choices[0].delta.role for chunk in chunks[:2]] == ["assistant", "assistant"]
    texts, ends = ["", ""], [[], []]
    for chunk in chunks[:-1]:
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        ends[choice.index].append(choice.finish_reason)
    assert texts == [text_of(RENDERED, 2, 9), text_of(RENDERED, branch_seed(2, 1), 9)]
    assert all(end[-1] == "length" and not any(end[:-1]) for end in ends)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 18


def test_chat_logprobs(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model="echo", messages=MESSAGES, seed=2, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = done.choices[0].logprobs.content
    ids = tokens_of(RENDERED, 2, 5)
    assert [entry.token for entry in content] == [tokenizer().convert_id(id) for id in ids]
    assert [bytes(entry.bytes) for entry in content] == [tokenizer().token_bytes(id) for id in ids]
    assert all(len(entry.top_logprobs) == 3 for entry in content)


def test_template_variables(client: OpenAI) -> None:
    plain, loud = (
        client.chat.completions.create(model="echo", messages=MESSAGES, max_tokens=1, extra_body=extra).usage
        for extra in ({}, {"chat_template_kwargs": {"shout": True}})
    )
    assert loud.prompt_tokens == plain.prompt_tokens + 1
    with pytest.raises(openai.BadRequestError, match="no variable 'tokenize'"):
        client.chat.completions.create(
            model="echo", messages=MESSAGES, extra_body={"chat_template_kwargs": {"tokenize": True}}
        )


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["echo", "parrot"]
    assert client.models.retrieve("parrot").model_extra["max_model_len"] == 256
    assert client.completions.create(model="parrot", prompt="a", max_tokens=1).model == "echo"


def test_errors_have_openais_classes(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt", prompt="a")
    assert missing.value.body == {"message": "the model 'gpt' does not exist; this server has 'echo'",
                                  "type": "NotFoundError", "param": "model", "code": 404}  # fmt: skip
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="echo", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    for extra in ({"tools": [{"type": "function"}]}, {"response_format": {"type": "xml"}},
                  {"guided_json": {}, "structured_outputs": {"json": {}}}, {"chat_template": "x"}):  # fmt: skip
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="echo", messages=MESSAGES, extra_body=extra)


def test_unknown_fields_are_ignored(client: OpenAI) -> None:
    done = client.completions.create(model="echo", prompt="a", max_tokens=1, extra_body={"colour": "blue"})
    assert done.usage.completion_tokens == 1


def test_usage_is_null_until_the_last_chunk(echo: Running) -> None:
    for options, known in ({"include_usage": True}, True), ({}, False):
        body = {"messages": MESSAGES, "max_tokens": 3, "stream": True, "stream_options": options}
        lines = httpx.post(f"{echo.url}/v1/chat/completions", json=body).text.split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert len(chunks) > 1
        assert ["usage" in chunk for chunk in chunks] == [known] * len(chunks)
        if known:
            assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]


def test_bytes_of_a_stream(echo: Running) -> None:
    """Every event is `data: JSON`, there is one [DONE], and it is the last."""
    body = {"prompt": "once", "max_tokens": 5, "stream": True}
    raw = httpx.post(f"{echo.url}/v1/completions", json=body)
    assert raw.headers["content-type"].startswith("text/event-stream")
    *events, rest = raw.text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    assert all(json.loads(event[6:])["choices"] for event in events[:-1])


def test_tokenize_and_back(echo: Running) -> None:
    asked = {"prompt": "once upon", "return_token_strs": True}
    found = httpx.post(f"{echo.url}/tokenize", json=asked).json()
    assert found["tokens"] == tokenizer().encode("once upon")
    assert found["count"] == len(found["tokens"])
    assert "".join(found["token_strs"]) == "once\u0120upon"  # as the vocabulary spells them
    assert found["max_model_len"] == 256
    assert httpx.post(f"{echo.url}/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "once upon"}
    chat = httpx.post(f"{echo.url}/tokenize", json={"messages": MESSAGES}).json()
    assert chat["tokens"] == tokenizer().encode(RENDERED)
    history = httpx.post(f"{echo.url}/tokenize", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
    assert history["tokens"] == tokenizer().encode("<|im_start|>user\nonce<|im_end|>\n")


def test_facts(echo: Running) -> None:
    assert httpx.get(f"{echo.url}/health").status_code == 200
    assert httpx.get(f"{echo.url}/health").content == b""
    assert httpx.post(f"{echo.url}/ping").status_code == 200
    assert httpx.get(f"{echo.url}/version").json() == {"version": "0.1.0"}
    assert httpx.get(f"{echo.url}/load").json() == {"server_load": 0}
    nothing = httpx.get(f"{echo.url}/nothing").json()["error"]
    assert (nothing["code"], nothing["type"]) == (404, "NotFoundError")
    assert "/openapi.json" in nothing["message"]
    assert "/v1/completions" in httpx.get(f"{echo.url}/openapi.json").json()["paths"]
    assert httpx.get(f"{echo.url}/v1/completions").json()["error"]["code"] == 405
