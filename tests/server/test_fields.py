"""No field is silent: each one acts, is on the list of those that are dropped, is refused, or is named in a header."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import echo_service
import httpx
import pytest
from asking import ADMIN, TALK, bearer, events, ids_of, refusal, tokens_of
from echo_service import MAX_LEN, Echo, Servers, built, serving, tokenizer
from tokenizers.processors import TemplateProcessing

from quire.protocol.step_plan import SeqSlice, SliceResult
from quire.server import request_models
from quire.server.request_params import PASSED_FIELDS
from quire.text.chat_template import ChatTemplate
from quire.text.tokenizer import Tokenizer

# Token ids and usage


def test_token_ids_and_usage_are_exact(http: httpx.Client) -> None:
    """80 requests of all kinds: the ids joined are what was drawn, and each chunk's usage counts those so far."""
    chance = random.Random(7)
    for number in range(80):
        n, count, seed = chance.choice((1, 1, 2, 4)), chance.randrange(1, 20), chance.randrange(1 << 30)
        chat, stream = chance.random() < 0.5, chance.random() < 0.7
        common = {
            "n": n, "max_tokens": count, "seed": seed, "ignore_eos": True, "return_token_ids": True, "stream": stream,
            "skip_special_tokens": chance.random() < 0.5, "echo": chance.random() < 0.3,
        }  # fmt: skip
        if stream:
            common["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        if chat:
            path, body = "/v1/chat/completions", {**common, "messages": TALK}
            prompts = [ids_of(http, messages=TALK)]
        else:
            prompts = [
                [chance.randrange(1, 400) for _ in range(chance.randrange(1, 40))] for _ in range(chance.choice((1, 3)))
            ]
            path, body = "/v1/completions", {**common, "prompt": prompts}
        wanted = {at * n + i: tokens_of(prompt, seed, i, count) for at, prompt in enumerate(prompts) for i in range(n)}
        found: dict[int, list[int]] = {index: [] for index in wanted}
        shown: list[int] = []
        answers = events(http, path, body) if stream else [http.post(path, json=body).json()]
        for answer in answers:
            for choice in answer["choices"]:
                index, prompt = choice["index"], prompts[choice["index"] // n]
                found[index] += choice.get("token_ids") or []
                if stream:
                    usage, so_far = answer["usage"], len(found[index])
                    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), so_far), number
                    assert usage["total_tokens"] == len(prompt) + so_far
                for given in (answer.get("prompt_token_ids"), choice.get("prompt_token_ids")):
                    if given is not None:
                        assert given == prompt, number
                        shown.append(index)
        # A stream says them in a choice's first chunk only, and that of a chat in the first of all.
        assert sorted(shown) == ([0] if chat and stream else sorted(wanted)), number
        total = answers[-1]["usage"]
        assert found == wanted, number
        assert total["prompt_tokens"] == sum(map(len, prompts))
        assert total["completion_tokens"] == sum(map(len, wanted.values()))


def test_tokens_as_ids(http: httpx.Client) -> None:
    common = {"max_tokens": 4, "seed": 3, "ignore_eos": True, "return_tokens_as_token_ids": True}
    wanted = [f"token_id:{id}" for id in tokens_of([5, 6], 3, 0, 4)]
    answer = http.post("/v1/completions", json={**common, "prompt": [5, 6], "logprobs": 2, "echo": True}).json()
    scores = answer["choices"][0]["logprobs"]
    assert scores["tokens"] == ["token_id:5", "token_id:6", *wanted]
    assert all(name.startswith("token_id:") for top in scores["top_logprobs"][1:] for name in top)
    assert scores["text_offset"][:3] == [0, 10, 20]
    chat = {**common, "messages": TALK, "logprobs": True, "top_logprobs": 2}
    [choice] = http.post("/v1/chat/completions", json=chat).json()["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{id}" for id in tokens_of(ids_of(http, messages=TALK), 3, 0, 4)
    ]
    plain = http.post(
        "/v1/completions", json={**common, "prompt": [5, 6], "logprobs": 0, "return_tokens_as_token_ids": False}
    )
    assert plain.json()["choices"][0]["logprobs"]["tokens"] != wanted


def test_logprobs_of_named_tokens(http: httpx.Client) -> None:
    """They come in place of the likeliest, in their order, after the generated token's."""
    chat_tokens = tokens_of(ids_of(http, messages=TALK), 3, 0, 3)
    named = [9, chat_tokens[1], 7]
    common = {"max_tokens": 3, "seed": 3, "ignore_eos": True, "return_tokens_as_token_ids": True}
    common |= {"logprob_token_ids": named}
    drawn = tokens_of([5, 6], 3, 0, 3)
    for given in ({}, {"logprobs": 1}, {"echo": True}):
        answer = http.post("/v1/completions", json={**common, **given, "prompt": [5, 6]}).json()
        scores = answer["choices"][0]["logprobs"]["top_logprobs"][-3:]
        assert [list(top) for top in scores] == [
            [f"token_id:{id}" for id in dict.fromkeys([token, *named])] for token in drawn
        ]
    for given in ({}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}):
        chat = {**common, **given, "messages": TALK}
        [choice] = http.post("/v1/chat/completions", json=chat).json()["choices"]
        for token, entry in zip(chat_tokens, choice["logprobs"]["content"], strict=True):
            leaders = entry["top_logprobs"]
            assert [top["token"] for top in leaders] == [f"token_id:{id}" for id in dict.fromkeys([token, *named])]
            assert leaders[0] == {key: entry[key] for key in ("token", "logprob", "bytes")}


def test_what_ended_an_output_is_told(http: httpx.Client) -> None:
    """A stop string, of which nothing is shown unless that is asked for, or a token; whichever comes first."""
    asked = {"prompt": [5, 6], "seed": 3, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}

    def choices(**more: Any) -> list[dict[str, Any]]:
        return http.post("/v1/completions", json=asked | more).json()["choices"]

    [plain] = choices()
    stop = plain["text"][6:9]
    at = plain["text"].index(stop)
    for included in (False, True):
        [found] = choices(stop=["never", stop], include_stop_str_in_output=included)
        assert found["text"] == plain["text"][: at + included * len(stop)]
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", stop)
    drawn = tokens_of([5, 6], 3, 0, 12)
    [found] = choices(stop_token_ids=[drawn[5]])
    assert found["token_ids"] == drawn[: drawn.index(drawn[5]) + 1]
    assert (found["finish_reason"], found["stop_reason"]) == ("stop", drawn[5])
    best = choices(n=2, best_of=6)
    stop = best[0]["text"][-2:]
    stopped = choices(n=2, best_of=6, stop=[stop])
    assert [one["text"] for one in stopped] == [one["text"].split(stop)[0] for one in best], "samples are whole"
    assert (stopped[0]["finish_reason"], stopped[0]["stop_reason"]) == ("stop", stop)


def test_seeds_are_drawn_from_the_servers() -> None:
    said = []
    for seed in (7, 7, 8):
        with echo_service.serving(echo_service.built(seed=seed), placement="thread") as running:
            body = {"prompt": [5, 6], "max_tokens": 9, "ignore_eos": True}
            said.append([running.http.post("/v1/completions", json=body).json()["choices"] for _ in range(2)])
    assert said[0] == said[1] != said[2]
    assert said[0][0] != said[0][1]


def test_what_is_not_given_is_the_models_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "quire.server")
    model = echo_service.built()._replace(default_sampling={"temperature": 0.5, "top_k": 7})
    with echo_service.serving(model, log_requests=True, placement="thread") as running:
        for path, body in (("completions", {"prompt": [5]}), ("chat/completions", {"messages": TALK})):
            running.http.post(f"/v1/{path}", json={**body, "max_tokens": 1, "top_k": 9})
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert len(lines) == 2
    assert all("temperature=0.5" in line and "top_k=9" in line for line in lines)


# Chat


def test_max_completion_tokens_wins(http: httpx.Client) -> None:
    asked = {"messages": TALK, "ignore_eos": True, "max_tokens": 9, "max_completion_tokens": 3}
    assert http.post("/v1/chat/completions", json=asked).json()["usage"]["completion_tokens"] == 3


def test_prompt_logprobs_of_a_chat(http: httpx.Client) -> None:
    ids = ids_of(http, messages=TALK)
    asked = {"messages": TALK, "max_tokens": 1, "prompt_logprobs": 2}
    scores = http.post("/v1/chat/completions", json=asked).json()["prompt_logprobs"]
    assert scores == http.post("/v1/completions", json={**asked, "prompt": ids}).json()["choices"][0]["prompt_logprobs"]
    assert scores[0] is None
    assert [next(iter(entry)) for entry in scores[1:]] == [str(id) for id in ids[1:]]


@pytest.mark.parametrize("n", [1, 2])
def test_echo_in_a_chat_begins_with_what_the_assistant_said(http: httpx.Client, n: int) -> None:
    said = [*TALK, {"role": "assistant", "content": "there was"}]
    asked = {"messages": said, "max_tokens": 3, "seed": 1, "n": n, "ignore_eos": True}
    plain = http.post("/v1/chat/completions", json=asked).json()["choices"]
    echoed = http.post("/v1/chat/completions", json={**asked, "echo": True}).json()["choices"]
    assert [choice["message"]["content"] for choice in echoed] == [
        "there was" + choice["message"]["content"] for choice in plain
    ]
    streamed = [""] * n
    for chunk in events(http, "/v1/chat/completions", {**asked, "echo": True, "stream": True}):
        [choice] = chunk["choices"]
        streamed[choice["index"]] += choice["delta"]["content"]
    assert streamed == [choice["message"]["content"] for choice in echoed]
    parts = [{"role": "assistant", "content": [{"type": "text", "text": text} for text in "ab"]}]
    for messages in (TALK, parts):
        given = {**asked, "messages": messages, "echo": True, "n": 1}
        text = http.post("/v1/chat/completions", json=given).json()["choices"][0]["message"]["content"]
        assert text.startswith("a\nb") == (messages is parts)


# Names and lists


def test_unknown_fields_are_named(http: httpx.Client) -> None:
    body = {"prompt": [5], "max_tokens": 1, "mirostat": 2, "top_a": 0.1, "user": "me", "metadata": {"a": "b"}}
    answer = http.post("/v1/completions", json=body)
    assert answer.headers["warning"] == '299 quire "fields were ignored: mirostat, top_a"'
    assert "warning" not in http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1, "user": "me"}).headers
    streamed = {"messages": TALK, "max_tokens": 1, "stream": True, "stream_options": {'x\n\u1234"': 1}}
    assert http.post("/v1/chat/completions", json=streamed).headers["warning"].endswith('ignored: stream_options.x???"')
    many = {"prompt": "a", **{f"field{at}" * 20: 1 for at in range(1000)}}
    assert len(http.post("/tokenize", json=many).headers["warning"]) < 500
    assert "and 992 more" in http.post("/tokenize", json=many).headers["warning"]


def test_unknown_fields_of_messages_are_named(http: httpx.Client) -> None:
    """What clients add for themselves, or for other servers: the prompt is the same without."""
    plain = [*TALK, {"role": "assistant", "content": "a"}, *TALK]
    talk = [{**message, "mood": {"a": 1}, "cache_control": None, "annotations": []} for message in plain]
    for path, more in (("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {})):
        answer = http.post(path, json={"messages": talk, **more})
        assert answer.headers["warning"] == '299 quire "fields were ignored: messages.mood"'
    assert ids_of(http, messages=talk) == ids_of(http, messages=plain)


def test_strict_refuses_unknown_fields(servers: Servers) -> None:
    http = servers(strict=True).http
    for path, body in (
        ("/v1/completions", {"prompt": [5]}), ("/v1/chat/completions", {"messages": TALK}),
        ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]}),
    ):  # fmt: skip
        error = refusal(http, path, {**body, "mirostat": 1})
        assert (error["param"], "mirostat" in error["message"]) == ("mirostat", True)
        assert http.post(path, json={**body, "user": "me"}).status_code == 200
    error = refusal(http, "/v1/chat/completions", {"messages": [{**TALK[0], "mood": 1}]})
    assert "messages.mood" in error["message"]


def test_fields_of_prefixes_are_no_more_silent(servers: Servers) -> None:
    http, headers = servers({"prefix_tokens": 64}, admin_keys=[ADMIN]).http, bearer(ADMIN)
    body = {"name": "a", "token_ids": [5, 6, 7, 8], "pinned": True}
    answer = http.post("/v1/prefixes", json=body, headers=headers)
    assert answer.headers["warning"] == '299 quire "fields were ignored: pinned"'
    assert http.delete("/v1/prefixes/a", headers=headers).status_code == 200


def test_most_log_probabilities_are_the_operators(servers: Servers) -> None:
    http = servers(max_logprobs=3).http
    for path, name, body in (
        ("completions", "logprobs", {"prompt": [5]}), ("completions", "prompt_logprobs", {"prompt": [5]}),
        ("chat/completions", "top_logprobs", {"messages": TALK, "logprobs": True}),
    ):  # fmt: skip
        assert http.post(f"/v1/{path}", json={**body, name: 3, "max_tokens": 1}).status_code == 200
        error = refusal(http, f"/v1/{path}", {**body, name: 4})
        assert (error["param"], error["message"]) == (name, f"{name} must be between 0 and 3, got 4")


@pytest.mark.parametrize("name", sorted(request_models.REFUSED_FIELDS))
def test_what_changes_the_output_is_refused(http: httpx.Client, name: str) -> None:
    for path, body in (("completions", {"prompt": [5]}), ("chat/completions", {"messages": TALK})):
        assert refusal(http, f"/v1/{path}", {**body, name: {"a": 1}})["param"] == name
        for nothing in (None, False, 0, "", [], {}):
            assert http.post(f"/v1/{path}", json={**body, "max_tokens": 1, name: nothing}).status_code == 200


def test_a_request_id_is_the_answers(http: httpx.Client) -> None:
    asked = {"prompt": [[5], [6]], "max_tokens": 1, "request_id": "my/request.1"}
    assert http.post("/v1/completions", json=asked).json()["id"] == "cmpl-my/request.1"
    [event] = {chunk["id"] for chunk in events(http, "/v1/completions", {**asked, "stream": True})}
    assert event == "cmpl-my/request.1"
    chat = {"messages": TALK, "max_tokens": 1, "request_id": "7"}
    assert http.post("/v1/chat/completions", json=chat).json()["id"] == "chatcmpl-7"


def test_every_field_does_something() -> None:
    """A field in a model that nothing reads would be silent."""
    names = ("service", "generation", "render", "reasoning", "request_params", "tool_choice")
    source = "".join((Path(request_models.__file__).parent / f"{name}.py").read_text() for name in names)
    kinds = ("Completion", "Chat", "Tokenize", "Detokenize", "Prefix")
    for model in (getattr(request_models, f"{kind}Request") for kind in kinds):
        for name in model.model_fields:
            assert name in PASSED_FIELDS or f".{name}" in source or f'"{name}"' in source, (model, name)
        own = {"method", "stop_automaton"}  # code comes from the program's owner only
        assert not (request_models.IGNORED_FIELDS | request_models.REFUSED_FIELDS | own) & model.model_fields.keys()


def test_null_fields_that_typed_clients_read(http: httpx.Client) -> None:
    whole = http.post("/v1/completions", json={"prompt": [5], "max_tokens": 1}).json()
    chat = http.post("/v1/chat/completions", json={"messages": TALK, "max_tokens": 1, "logprobs": True}).json()
    own, said = whole["choices"][0], chat["choices"][0]
    for place, names in (
        (whole, ["system_fingerprint"]), (said, ["token_ids"]), (said["message"], ["refusal"]),
        (own, ["logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids", "stop_reason"]),
        (chat, ["system_fingerprint", "prompt_logprobs", "prompt_token_ids"]), (said["logprobs"], ["refusal"]),
    ):  # fmt: skip
        assert [place[name] for name in names] == [None] * len(names)


# Log-probabilities

FACE = "\U0001f642 a"


class Undefined(Echo):
    """An Echo whose model gives NaN for every token of a prompt."""

    def compute_row(self, row: SeqSlice) -> SliceResult:
        sampled = super().compute_row(row)
        return sampled._replace(
            prompt_logprobs=tuple(top._replace(logprob=math.nan) for top in sampled.prompt_logprobs)
        )


def test_tokens_of_one_text_do_not_hide_each_other(http: httpx.Client) -> None:
    ids = tokenizer().encode(FACE)
    asked = {"prompt": FACE, "echo": True, "logprobs": 20, "max_tokens": 40, "seed": 1, "ignore_eos": True}
    [choice] = http.post("/v1/completions", json=asked).json()["choices"]
    scores = choice["logprobs"]
    assert scores["tokens"][: len(ids)] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x99", "bytes:\\x82", " a"]
    for token, logprob, top in zip(scores["tokens"][1:], scores["token_logprobs"][1:], scores["top_logprobs"][1:]):
        assert top[token] == logprob
        assert len(top) in (20, 21)


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"best_of": 2}, {"logprobs": None, "prompt_logprobs": 1}])
def test_a_prompt_of_the_model_s_length_is_scored(http: httpx.Client, more: dict[str, Any]) -> None:
    asked = {"prompt": [5] * MAX_LEN, "echo": True, "logprobs": 1, **more}
    answer = http.post("/v1/completions", json={**asked, "max_tokens": 0}).json()
    for choice in answer["choices"]:
        scores = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else choice["prompt_logprobs"]
        assert (len(scores), scores[0], None in scores[1:]) == (MAX_LEN, None, False)
        assert choice["finish_reason"] == "length"
    assert len(answer["choices"]) == more.get("n", 1)
    assert answer["usage"]["completion_tokens"] == 0
    for prompt, max_tokens in (([5] * MAX_LEN, 1), ([5] * (MAX_LEN + 1), 0)):
        error = refusal(http, "/v1/completions", {**asked, "prompt": prompt, "max_tokens": max_tokens})
        assert error["message"].startswith("This model's maximum context length is")


def test_nothing_is_asked_for(http: httpx.Client) -> None:
    """At least one token, unless the prompt is echoed."""
    for body in ({"max_tokens": 0}, {"max_tokens": 0, "echo": True, "beam_width": 2}):
        assert refusal(http, "/v1/completions", {"prompt": "a", **body})["param"] == "max_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        assert refusal(http, "/v1/chat/completions", {"messages": TALK, "echo": True, name: 0})["param"] == name


def test_what_is_not_a_number_is_null() -> None:
    with serving(built(Undefined()), placement="thread") as running:
        for path, asked in (
            ("completions", {"prompt": [5, 6, 7], "echo": True, "logprobs": 2, "max_tokens": 0}),
            ("completions", {"prompt": [5, 6, 7], "prompt_logprobs": 2, "max_tokens": 1}),
            ("chat/completions", {"messages": TALK, "prompt_logprobs": 1, "max_tokens": 1}),
        ):
            answer = running.http.post(f"/v1/{path}", json=asked)
            said = json.loads(answer.text, parse_constant=lambda name: 1 / 0)
            [choice] = said["choices"]
            if "echo" in asked:
                assert choice["logprobs"]["token_logprobs"] == [None] * 3
            else:
                scores = choice.get("prompt_logprobs") or said["prompt_logprobs"]
                assert all(None in [entry["logprob"] for entry in top.values()] for top in scores[1:])


# Prompts that are cut, and conversations: what is sent is what a sliced prompt or the template gives


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_truncated_prompt_is_a_sliced_one(http: httpx.Client, side: str | None) -> None:
    chance = random.Random(3)
    given: dict[str, Any] = {} if side is None else {"truncation_side": side}
    whole = ids_of(http, messages=TALK)
    for _ in range(20):
        ids = [chance.randrange(1, 400) for _ in range(chance.randrange(1, 60))]
        keep = chance.randrange(1, 60)
        cut = ids[:keep] if side == "right" else ids[-keep:]
        asked = {"max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True}
        answer = http.post("/v1/completions", json={**asked, **given, "prompt": ids, "truncate_prompt_tokens": keep})
        [choice] = answer.json()["choices"]
        assert choice["prompt_token_ids"] == cut
        assert choice["token_ids"] == tokens_of(cut, 1, 0, 3)
        text = "once upon a time there was a quire " * 3
        words = ids_of(http, prompt=text)
        assert ids_of(http, prompt=text, truncate_prompt_tokens=keep, **given) == (
            words[:keep] if side == "right" else words[-keep:]
        )
        chat = {**asked, **given, "messages": TALK, "truncate_prompt_tokens": keep}
        found = http.post("/v1/chat/completions", json=chat).json()["prompt_token_ids"]
        assert found == (whole[:keep] if side == "right" else whole[-keep:])
        assert found == ids_of(http, messages=TALK, truncate_prompt_tokens=keep, **given)


def test_truncating_to_what_fits(http: httpx.Client) -> None:
    long = [1 + at % 300 for at in range(1000)]
    asked = {"prompt": long, "truncate_prompt_tokens": -1, "return_token_ids": True, "ignore_eos": True}
    for count in (1, 7):
        [choice] = http.post("/v1/completions", json={**asked, "max_tokens": count}).json()["choices"]
        assert choice["prompt_token_ids"] == long[-(MAX_LEN - count) :]
        assert len(choice["token_ids"]) == count
    echoed = http.post("/v1/completions", json={**asked, "truncate_prompt_tokens": 4, "echo": True, "max_tokens": 0})
    assert echoed.json()["choices"][0]["text"] == tokenizer().decode(long[-4:])


def test_a_final_message_that_goes_on(http: httpx.Client) -> None:
    said = [*TALK, {"role": "assistant", "content": "there was"}]
    text = "<|im_start|>user\nonce upon a time<|im_end|>\n<|im_start|>assistant\nthere was"
    wanted = tokenizer().encode(text)
    assert ids_of(http, messages=said, continue_final_message=True) == wanted
    asked = {"messages": said, "continue_final_message": True, "max_tokens": 2, "return_token_ids": True}
    assert http.post("/v1/chat/completions", json=asked).json()["prompt_token_ids"] == wanted


def test_effort_is_for_templates_that_read_it(servers: Servers) -> None:
    """Clients send it to any model, so it is named, and refused only by a strict server."""
    body = {"messages": TALK, "reasoning_effort": "high"}
    for strict in (False, True):
        http = servers(strict=strict).http
        for path in ("/tokenize", "/v1/chat/completions"):
            if strict:
                assert refusal(http, path, body)["param"] == "reasoning_effort"
            else:
                assert "ignored: reasoning_effort" in http.post(path, json=body).headers["warning"]
    model = echo_service.built()
    reading = ChatTemplate("{{ messages[0].content }}{{ reasoning_effort }}", {})
    with echo_service.serving(model._replace(chat_template=reading)) as running:
        http = running.http
        assert ids_of(http, messages=TALK, reasoning_effort="high") == tokenizer().encode("once upon a timehigh")
        assert "warning" not in http.post("/v1/chat/completions", json=body).headers


@pytest.fixture
def bos() -> Iterator[httpx.Client]:
    """A server whose tokenizer puts <|im_start|> before each text."""
    backend = tokenizer()._backend
    adding = type(backend).from_str(backend.to_str())
    special = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    adding.post_processor = TemplateProcessing(single=f"{special[0]} $A", special_tokens=[special])
    names = {"eos_token": "<|end|>", "bos_token": special[0]}
    model = echo_service.built()._replace(tokenizer=Tokenizer(adding, names))
    with echo_service.serving(model) as running:
        yield running.http


def test_special_tokens_of_a_chat_are_the_templates(bos: httpx.Client) -> None:
    """The tokenizer's are added on request only."""
    plain = tokenizer().encode("<|im_start|>user\nonce upon a time<|im_end|>\n<|im_start|>assistant\n")
    for asked, wanted in ((None, plain), (False, plain), (True, [plain[0], *plain])):
        body = {"messages": TALK, "add_special_tokens": asked}
        assert ids_of(bos, **body) == wanted
        answer = bos.post("/v1/chat/completions", json={**body, "max_tokens": 1, "return_token_ids": True})
        assert answer.json()["prompt_token_ids"] == wanted


def test_two_bos_tokens_are_reported(bos: httpx.Client) -> None:
    """One that a completion's text names, after the one that the tokenizer puts before it."""
    for more, warned in (({}, True), ({"add_special_tokens": False}, False)):
        answer = bos.post("/v1/completions", json={"prompt": "<|im_start|>once", "max_tokens": 1, **more})
        assert ("two BOS tokens" in answer.headers.get("Warning", "")) is warned
