"""The table of bad inputs: each is refused with a short 4xx, or served if it is fine after all, and a canary request
gives the same tokens afterwards."""

from __future__ import annotations

import json

import httpx
import pytest

from quire.protocol.sampling_params import PARAMS
from quire.server.errors import OVERFLOW, Failure

NUMERIC = tuple(one.name for one in PARAMS if one.kind is not bool)
VALUES = ("null", '""', '"x"', "[1]", "{}", "-1", "0", "1e309", "NaN", "Infinity", "-Infinity", "2147483648",
          "9223372036854775808", "1e-320")  # fmt: skip
# Which of the values a field may take, if it is more than null; everything else is an error.
FINE = {
    "temperature": {"null", "0", "1e-320"},
    "top_p": {"null", "1e-320"},
    "top_k": {"null", "-1", "0"},
    "min_p": {"null", "0", "1e-320"},
    "presence_penalty": {"null", "-1", "0", "1e-320"},
    "frequency_penalty": {"null", "-1", "0", "1e-320"},
    "seed": {"null", "-1", "0", "2147483648"},
    "min_tokens": {"null", "0"},
    "logprobs": {"null", "0"},
    "prompt_logprobs": {"null", "0"},
}
DEEP = "[" * 100_000 + "]" * 100_000


def canary(http: httpx.Client) -> str:
    body = {"prompt": "once upon a time", "seed": 1, "max_tokens": 6, "logprobs": 1}
    return json.dumps(http.post("/v1/completions", json=body).json()["choices"])


def post(http: httpx.Client, path: str, body: str | bytes) -> httpx.Response:
    return http.post(path, content=body, headers={"Content-Type": "application/json"})


def refused(answer: httpx.Response) -> None:
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert len(answer.content) <= 4096
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (answer.status_code, OVERFLOW)
    assert error["message"]
    assert "0x" not in error["message"]
    assert "Traceback" not in error["message"]


@pytest.mark.parametrize("field", NUMERIC)
def test_numbers(http: httpx.Client, field: str) -> None:
    before = canary(http)
    for value in VALUES:
        rest = "" if field == "max_tokens" else ', "max_tokens": 2'
        answer = post(http, "/v1/completions", f'{{"prompt": "a", "{field}": {value}{rest}}}')
        if value in FINE.get(field, {"null"}):
            assert answer.status_code == 200, (field, value, answer.text)
        else:
            refused(answer)
            named = answer.json()["error"]["param"] in (field, None)
            assert named or field == "n" or (field, value) == ("max_tokens", "2147483648"), (field, value)
        assert canary(http) == before, (field, value)


def test_numbers_may_be_texts(http: httpx.Client) -> None:
    """As pydantic's lax mode reads them."""
    for value in ("8", 8.0):
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": value, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 8
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": "true"})
    assert answer.text.endswith("data: [DONE]\n\n")


COMPLETIONS = {
    "empty prompt": '{"prompt": ""}',
    "no prompts": '{"prompt": []}',
    "empty string in a list": '{"prompt": [""]}',
    "mixed list": '{"prompt": ["a", 1]}',
    "token V": '{"prompt": [512]}',
    "token 2^63": '{"prompt": [9223372036854775808]}',
    "token of 5000 digits": '{"prompt": [' + "9" * 5000 + "]}",
    "one bad prompt of two": '{"prompt": [[1], [512]]}',
    "longer than the context": '{"prompt": ' + json.dumps([1] * 257) + "}",
    "more characters than could fit": json.dumps({"prompt": "a" * 100_000}),
    "megabytes of emoji": json.dumps({"prompt": "\U0001f600" * 1_000_000}, ensure_ascii=False),
    "257 prompts": json.dumps({"prompt": ["a"] * 257}),
    "a million prompts": json.dumps({"prompt": [[1]] * 1_000_000}),
    "a million bad elements": json.dumps({"prompt": [None] * 1_000_000}),
    "lone surrogate": '{"prompt": "\\ud800"}',
    "deep nesting": f'{{"prompt": {DEEP}}}',
    "deep nesting in an ignored field": f'{{"prompt": "a", "x": {DEEP}}}',
    "n too large for the memory": '{"prompt": "a", "n": 16, "max_tokens": 200}',
    "blank bad word": '{"prompt": "a", "bad_words": [" "]}',
    "stream as text": '{"prompt": "a", "stream": "sure"}',
    "stream_options without stream": '{"prompt": "a", "stream_options": {"include_usage": true}}',
    "model is a number": '{"prompt": "a", "model": 5}',
    "suffix": '{"prompt": "a", "suffix": "b"}',
    "best_of below n": '{"prompt": "a", "n": 3, "best_of": 2}',
    "best_of above n, streamed": '{"prompt": "a", "best_of": 2, "stream": true}',
    "beam_width 0": '{"prompt": "a", "use_beam_search": true, "beam_width": 0}',
    "beam_width 65": '{"prompt": "a", "beam_width": 65}',
    "more beams than sequences": '{"prompt": "a", "beam_width": 17}',
    "more beams than memory": json.dumps({"prompt": [1] * 40, "beam_width": 16, "max_tokens": 200}),
    "fewer beams than n": '{"prompt": "a", "beam_width": 2, "n": 3}',
    "two widths": '{"prompt": "a", "beam_width": 2, "best_of": 3}',
    "beams, and none": '{"prompt": "a", "beam_width": 2, "use_beam_search": false}',
    "use_beam_search as a number": '{"prompt": "a", "use_beam_search": 2}',
    "beams with stop strings": '{"prompt": "a", "beam_width": 2, "stop": "x"}',
    "length_penalty without beams": '{"prompt": "a", "length_penalty": 2}',
    "length_penalty infinite": '{"prompt": "a", "beam_width": 2, "length_penalty": 1e999}',
    "length_penalty 11": '{"prompt": "a", "beam_width": 2, "length_penalty": 11}',
    "early_stopping without beams": '{"prompt": "a", "early_stopping": "never"}',
    "early_stopping sometimes": '{"prompt": "a", "beam_width": 2, "early_stopping": "sometimes"}',
    "empty salt": '{"prompt": "a", "cache_salt": ""}',
    "salt is a number": '{"prompt": "a", "cache_salt": 1}',
    "a list": "[1, 2]",
}
TALK = '{"messages": [{"role": "user", "content": "a"}], '
CHATS = {
    "no messages": "{}",
    "messages is text": '{"messages": "hi"}',
    "no content": '{"messages": [{"role": "user"}]}',
    "an image": '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]}',
    "messages as a template variable": TALK + '"chat_template_kwargs": {"messages": []}}',
    "deep template variable": TALK + '"chat_template_kwargs": {"shout": '
    + "[" * 500 + "]" * 500 + "}}",
    "unknown format": TALK + '"response_format": {"type": "xml"}}',
    "strict is text": TALK
    + '"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}}',
    "schema is text": TALK + '"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}}',
    "two forms": TALK + '"response_format": {"type": "json_object"}, "guided_regex": "a"}',
    "no choices": TALK + '"structured_outputs": {"choice": []}}',
    "a choice is a number": TALK + '"structured_outputs": {"choice": [1]}}',
    "schema is no JSON": TALK + '"guided_json": "{"}',
    "schema of a file": TALK + '"guided_json": {"$ref": "file:///etc/passwd"}}',
    "schema that needs itself": TALK
    + '"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}',
    "schema that nothing fulfils": TALK + '"guided_json": {"type": "string", "enum": []}}',
    "grammar without a start": TALK + '"guided_grammar": "a: b"}',
    "form and min_tokens": TALK + '"guided_regex": "a", "min_tokens": 2}',
    "form and ignore_eos": TALK + '"guided_regex": "a", "ignore_eos": true}',
    "top_logprobs alone": TALK + '"top_logprobs": 2}',
    "logprobs is a number": TALK + '"logprobs": 2}',
    "too long": json.dumps({"messages": [{"role": "user", "content": "a" * 1000}]}),
    "far too long": json.dumps({"messages": [{"role": "user", "content": "a" * 1_000_000}]}),
    "1025 messages": json.dumps({"messages": [{"role": "user", "content": "a"}] * 1025}),
}  # fmt: skip
NO_UTF8 = b"\xff\xfe\x00", b'{"prompt": "\xff"}', "{}".encode("utf-16"), b"\x1f\x8b\x08\x00"
OTHERS = {
    "tokenize nothing": ("/tokenize", "{}"),
    "tokenize both": ("/tokenize", '{"prompt": "a", "messages": []}'),
    "tokenize too much": ("/tokenize", json.dumps({"prompt": "a" * 100_000})),
    "detokenize text": ("/detokenize", '{"tokens": "a"}'),
    "detokenize 2^70": ("/detokenize", f'{{"tokens": [{2**70}]}}'),
    "detokenize nothing": ("/detokenize", "{}"),
}


def test_structure(http: httpx.Client) -> None:
    before = canary(http)
    cases = [(name, "/v1/completions", body) for name, body in COMPLETIONS.items()]
    cases += [(name, "/v1/chat/completions", body) for name, body in CHATS.items()]
    cases += [(name, path, body) for name, (path, body) in OTHERS.items()]
    encoded = [(name, path, body.encode("utf-8", "surrogatepass")) for name, path, body in cases]
    for name, path, body in [*encoded, *(("no UTF-8", "/v1/completions", body) for body in NO_UTF8)]:
        answer = post(http, path, body)
        assert 400 <= answer.status_code < 500, (name, answer.text[:300])
        refused(answer)
        assert canary(http) == before, name


def test_a_body_without_its_content_type_is_told_so(http: httpx.Client) -> None:
    """What curl's -d sends by itself."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, kind in (('{"prompt": "a"}', headers), ("[1, 2]", {"Content-Type": "application/json"})):
        answer = http.post("/v1/completions", content=body, headers=kind)
        refused(answer)
        assert "a JSON object, sent with Content-Type: application/json" in answer.json()["error"]["message"]
    nested = http.post("/v1/completions", json={"prompt": "a", "stream_options": 5})
    assert nested.json()["error"]["param"] == "stream_options"


def test_a_clients_own_names_are_no_param(http: httpx.Client) -> None:
    for name in ("\\ud800", "x" * 5000):
        answer = post(http, "/v1/chat/completions", TALK + f'"logit_bias": {{"{name}": 1}}}}')
        refused(answer)
        assert answer.json()["error"]["param"] == "logit_bias"
    body = Failure(400, "\ud800" * 2000, "\ud800" * 200).body()["error"]
    assert (body["message"], body["param"]) == ("?" * 1000, "?" * 100)


def test_errors_show_little_of_what_was_sent(http: httpx.Client) -> None:
    secret = "x" * 5000
    for body in ({"prompt": "a", "model": secret}, {"prompt": "a", "n": secret}, {"prompt": {secret: 1}},
                 {"prompt": "a", "stop": [[secret]]}, {"prompt": "a", "logit_bias": {secret: 1}}):  # fmt: skip
        message = http.post("/v1/completions", json=body).json()["error"]["message"]
        assert "x" * 61 not in message


def test_the_longest_prompt_is_served(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": [1] * 255, "max_tokens": 10})
    assert answer.json()["usage"]["completion_tokens"] == 1
