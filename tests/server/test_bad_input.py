"""The table of bad inputs by route: each is refused with a short 4xx that names the parameter and the place, or served
if it is fine after all; nothing is queued, and a canary request gives the same tokens afterwards."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from asking import TALK
from echo_service import VOCAB, Running, tokenizer
from test_structured_http import BOMB, LATE, TAG
from test_tools_http import CALLED, MADE, TOOLS, tools_of
from waiting import wait_until

from quire.protocol.sampling_params import PARAMS
from quire.server.errors import OVERFLOW, Failure
from quire.text.tools import MAX_TOOLS

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
CANARY = "once upon a time"


def canary(http: httpx.Client) -> str:
    body = {"prompt": CANARY, "seed": 1, "max_tokens": 6, "logprobs": 1}
    return json.dumps(http.post("/v1/completions", json=body).json()["choices"])


def post(http: httpx.Client, path: str, body: str | bytes) -> httpx.Response:
    return http.post(path, content=body, headers={"Content-Type": "application/json"})


def refused(answer: httpx.Response) -> dict[str, Any]:
    """Check that an answer is an error in OpenAI's shape, and return it."""
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert len(answer.content) <= 4096
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] in (answer.status_code, OVERFLOW)
    assert error["message"]
    assert "0x" not in error["message"]
    assert "Traceback" not in error["message"]
    return error


@pytest.mark.parametrize("field", NUMERIC)
def test_numbers(http: httpx.Client, field: str) -> None:
    before = canary(http)
    for value in VALUES:
        rest = "" if field == "max_tokens" else ', "max_tokens": 2'
        answer = post(http, "/v1/completions", f'{{"prompt": "a", "{field}": {value}{rest}}}')
        if value in FINE.get(field, {"null"}):
            assert answer.status_code == 200, (field, value, answer.text)
        else:
            named = refused(answer)["param"] in (field, None)
            assert named or field == "n" or (field, value) == ("max_tokens", "2147483648"), (field, value)
        assert canary(http) == before, (field, value)


def test_numbers_may_be_texts(http: httpx.Client) -> None:
    """As pydantic's lax mode reads them."""
    for value in ("8", 8.0):
        answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": value, "ignore_eos": True})
        assert answer.json()["usage"]["completion_tokens"] == 8
    answer = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2, "stream": "true"})
    assert answer.text.endswith("data: [DONE]\n\n")


DEEP = "[" * 100_000 + "]" * 100_000
WIDE = {"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}}
NESTED = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(5000)) + '\nr5000: "a"'
ENDLESS = {"type": "array", "minItems": 1, "prefixItems": [{"$ref": "#"}]}
BEHIND = {"properties": {"a": {"enum": [{"not": 1}]}, "b": {"not": {}}}}
UNENFORCED = {"begin": "<f=b>", "schema": {"properties": {"x": {"not": {}}}}, "end": "</f>"}
ARGUMENTS = "messages[1].tool_calls[0].function.arguments"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def called(**function: Any) -> dict[str, Any]:
    """A conversation whose assistant calls."""
    return {"messages": [*TALK, {"role": "assistant", "tool_calls": [{"function": function}]}]}


def form(schema: Any, **more: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema, **more}}}


# By route: fields beside those of BASE, or a whole body; the parameter that the error names; a part of its message.
BASE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"}, "/v1/chat/completions": {"messages": TALK, "max_tokens": 1},
    "/tokenize": {}, "/detokenize": {},
}  # fmt: skip
ANY = "any"
REFUSED: dict[str, list[tuple[Any, str | None, str]]] = {
    "/v1/completions": [
        ({"prompt": ""}, "prompt", ""), ({"prompt": []}, "prompt", ""), ({"prompt": [""]}, ANY, ""),
        ({"prompt": ["a", 1]}, "prompt", ""), ({"prompt": [VOCAB]}, ANY, ""), ({"prompt": [2**63]}, ANY, ""),
        ('{"prompt": [' + "9" * 5000 + "]}", ANY, ""), ({"prompt": [[1], [VOCAB]]}, ANY, ""),
        ({"prompt": [1] * 257}, "prompt", ""), ({"prompt": "a" * 100_000}, "prompt", ""),
        (json.dumps({"prompt": "\U0001f600" * 1_000_000}, ensure_ascii=False), "prompt", ""),
        ({"prompt": ["a"] * 257}, "prompt", ""), ({"prompt": [[1]] * 1_000_000}, ANY, ""),
        ({"prompt": [None] * 1_000_000}, ANY, ""), ({"prompt": "\ud800"}, "prompt", ""),
        (f'{{"prompt": {DEEP}}}', ANY, ""), (f'{{"prompt": "a", "x": {DEEP}}}', ANY, ""), ("[1, 2]", None, ""),
        (b"\xff\xfe\x00", ANY, ""), (b'{"prompt": "\xff"}', ANY, ""), ("{}".encode("utf-16"), ANY, ""),
        (b"\x1f\x8b\x08\x00", ANY, ""),
        ({"n": 16, "max_tokens": 200}, ANY, ""),  # too many for the memory
        ({"bad_words": [" "]}, "bad_words", ""), ({"stream": "sure"}, "stream", ""),
        ({"stream_options": {"include_usage": True}}, "stream_options", ""), ({"model": 5}, "model", ""),
        ({"suffix": "b"}, "suffix", ""), ({"n": 3, "best_of": 2}, ANY, ""), ({"best_of": 2, "stream": True}, ANY, ""),
        ({"use_beam_search": True, "beam_width": 0}, "beam_width", ""), ({"beam_width": 65}, "beam_width", ""),
        ({"beam_width": 17}, ANY, ""),  # more than sequences
        ({"prompt": [1] * 40, "beam_width": 16, "max_tokens": 200}, ANY, ""),  # more than memory
        ({"beam_width": 2, "n": 3}, ANY, ""), ({"beam_width": 2, "best_of": 3}, ANY, ""),
        ({"beam_width": 2, "use_beam_search": False}, ANY, ""), ({"use_beam_search": 2}, "use_beam_search", ""),
        ({"beam_width": 2, "stop": "x"}, ANY, ""), ({"length_penalty": 2}, ANY, ""),
        ('{"prompt": "a", "beam_width": 2, "length_penalty": 1e999}', "length_penalty", ""),
        ({"beam_width": 2, "length_penalty": 11}, "length_penalty", ""), ({"early_stopping": "never"}, ANY, ""),
        ({"beam_width": 2, "early_stopping": "sometimes"}, "early_stopping", ""),
        ({"cache_salt": ""}, "cache_salt", ""), ({"cache_salt": 1}, "cache_salt", ""),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
        ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids", ""),
        ({"logprob_token_ids": [9], "echo": True, "max_tokens": 0}, "logprob_token_ids", ""),
        ({"logprob_token_ids": [9], "beam_width": 2}, "logprob_token_ids", ""),
        *(({"truncate_prompt_tokens": wrong}, "truncate_prompt_tokens", str(wrong)[:40])
          for wrong in (0, -2, 2**31, 10**30)),
        ({"truncation_side": "top"}, "truncation_side", ""),
        ({"prompt": [1] * 1000, "truncate_prompt_tokens": 300}, "prompt", ""),
        ({"multi_modal_data": {"image": "data:"}}, ANY, "reads only text"),
        ({"tools": TOOLS}, "tools", ""), ({"tool_choice": "required"}, "tool_choice", ""),
        ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json", '["not"], at #/properties/a/not'),
        ({"guided_json": {"items": {"$ref": "https://x/y"}}}, "guided_json", "at #/items/$ref"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "refers to itself for ever, at #/$ref"),
        ({"guided_json": {"properties": {"a": {"format": "zip"}}}}, "guided_json", "format: zip, at #/properties/a"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": "a{1000000000}"}, "guided_regex", "too many expressions"),
        ({"guided_grammar": "x" * 300_000}, "guided_grammar", "300000 characters; at most 262144"),
        ({"guided_choice": ["a"] * 4097}, "guided_choice", "1 to 1999 entries, got 4097"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"lua": "a"}}, "structured_outputs", "has no 'lua'"),
        (form([]), "response_format", ".schema must"),
        ({"response_format": TAG | {"triggers": ["<g="]}}, "response_format", "structures[0].begin"),
        ({"response_format": TAG | {"structures": [*TAG["structures"], UNENFORCED]}}, "response_format",
         'structural_tag: Unimplemented keys: ["not"], at structures[1].schema#/properties/x/not'),
        ({"guided_json": BEHIND}, "guided_json", "at #/properties/b/not"),
        ({"guided_json": ENDLESS}, "guided_json", "refers to itself for ever, at #/prefixItems/0/$ref"),
        ({"guided_regex": "a", "use_beam_search": True}, "structured_outputs", "beam search"),
        ({"guided_json": {"properties": {f"k{i}": {} for i in range(3000)}}}, "guided_json", "3000 properties"),
        ({"guided_grammar": NESTED}, "guided_grammar", "it is too complex: it is nested too deep"),
        ({"guided_json": BOMB}, "guided_json", "making its grammar takes more than 0.5 s of a processor"),
    ],
    "/v1/chat/completions": [
        ("{}", "messages", ""), ({"messages": "hi"}, "messages", ""), ({"messages": [5]}, "messages", "messages.0"),
        ({"messages": [{"role": "user"}]}, "messages", ""),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ANY, "reads only text"),
        ({"messages": [{"role": "user", "content": "a" * 1000}]}, "messages", ""),
        ({"messages": [{"role": "user", "content": "a" * 1_000_000}]}, "messages", ""),
        ({"messages": TALK * 1025}, "messages", ""),
        ({"chat_template": "x"}, "chat_template", ""), ({"documents": [{"text": "b"}]}, "documents", ""),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ""),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ""),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs", "'tools'"),
        (f'{{"messages": {json.dumps(TALK)}, "chat_template_kwargs": {{"shout": {"[" * 500 + "]" * 500}}}}}', ANY, ""),
        ({"response_format": {"type": "xml"}}, "response_format", ""),
        (form({}, strict="yes"), "response_format", ""), (form("x"), "response_format", ""),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, ANY, ""),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", ""),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", ""), ({"guided_json": "{"}, "guided_json", ""),
        ({"guided_json": {"$ref": "file:///etc/passwd"}}, "guided_json", ""),
        ({"guided_json": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "guided_json", ""),
        ({"guided_json": {"type": "string", "enum": []}}, "guided_json", ""),
        ({"guided_grammar": "a: b"}, "guided_grammar", ""), ({"guided_regex": "a", "min_tokens": 2}, ANY, ""),
        ({"guided_regex": "a", "ignore_eos": True}, ANY, ""), ({"top_logprobs": 2}, "top_logprobs", ""),
        ({"logprobs": 2}, "logprobs", ""), ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "got 21"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ""),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be"),
        ({"logit_bias": {"the": 1}}, "logit_bias", "logit_bias key 'the'"),
        ({"logit_bias": {"7": 101}}, "logit_bias", "logit_bias[7] must be between"),
        ({"stop_token_ids": [5, -1]}, "stop_token_ids", "stop_token_ids[1] must be"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids.0"),
        ({"stream_options": {"include_usage": 5}}, "stream_options", "stream_options.include_usage"),
        ({"allowed_token_ids": [5] * 32_769}, "allowed_token_ids", "allowed_token_ids"),
        ({"modalities": ["text", "audio"]}, "modalities", "modalities"),
        ({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", "can't be false"),
        ({"request_id": "a b"}, "request_id", "request_id"), ({"request_id": ""}, "request_id", "request_id"),
        ({"thinking_token_budget": 4}, ANY, "see --reasoning-parser"),
        ({"tools": {}}, "tools", "list"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "tools[0].function.name"),
        ({"tools": tools_of(name="a b")}, "tools", "got 'a b'"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "tools[2].function.name is 'weather', which another tool has"),
        ({"tools": TOOLS * MAX_TOOLS}, "tools", "at most 128 entries, got 256"),
        ({"tools": tools_of(parameters=WIDE)}, "tools",
         "tools[0].function.parameters.properties has 10000 entries; the limit is 1024"),
        ({"tools": tools_of(parameters=[])}, "tools", "be a JSON schema"),
        ({"tools": tools_of(parameters={"enum": [0] * 10_000})}, "tools", "8192 JSON values"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": tools_of(name="x")[0]}, "tool_choice", "names 'x'"),
        ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice", "got 'maybe'"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "tool_choice", "guided_regex"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "xml"}}, "response_format", ""),
        ({"messages": [{**CALLED, "role": "user"}]}, "messages", "only the assistant calls"),
        (called(), "messages", "function.name"),
        *((called(name="f", arguments={"a": number}), ANY, f"{ARGUMENTS} is no JSON value")
          for number in (float("nan"), float("-inf"))),
        ({"tools": tools_of(parameters={"maximum": float("inf")})}, ANY, "tools[0] has the number inf"),
        ({"messages": [*TALK, {"role": "assistant", "tool_calls": [MADE] * 200}]}, "messages", "got 200"),
    ],
    "/tokenize": [
        ("{}", ANY, ""), ({"prompt": "a", "messages": []}, ANY, ""), ({"prompt": "a" * 100_000}, "prompt", ""),
        ({"prompt": "a", "chat_template": "x"}, "chat_template", ""),
        ({"messages": TALK, "chat_template": "x"}, "chat_template", ""),
        ({"messages": TALK, "documents": [{"text": "b"}]}, "documents", ""),
        ({"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message", ""),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, ANY, "reads only text"),
    ],
    "/detokenize": [({"tokens": "a"}, "tokens", ""), ({"tokens": [2**70]}, ANY, ""), ("{}", "tokens", "")],
}  # fmt: skip


def test_structure(http: httpx.Client, echo: Running) -> None:
    assert echo.idle()
    before, queued = canary(http), 1
    start = echo.metric("quire_prompt_tokens_total") - len(tokenizer().encode(CANARY))
    for path, rows in REFUSED.items():
        for asked, param, words in rows:
            body = json.dumps(BASE[path] | asked) if isinstance(asked, dict) else asked
            began, row = time.monotonic(), (path, str(asked)[:300])
            answer = post(http, path, body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body)
            assert time.monotonic() - began < LATE, row
            assert 400 <= answer.status_code < 500, (row, answer.text[:300])
            error = refused(answer)
            assert error["param"] == (error["param"] if param == ANY else param), row
            assert words in error["message"], row
            assert canary(http) == before, row
            queued += 1
    total = queued * len(tokenizer().encode(CANARY))
    wait_until(lambda: echo.metric("quire_prompt_tokens_total") - start == total, "the canaries alone are counted", 20)


def test_a_body_without_its_content_type_is_told_so(http: httpx.Client) -> None:
    """What curl's -d sends by itself."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    for body, kind in (('{"prompt": "a"}', headers), ("[1, 2]", {"Content-Type": "application/json"})):
        answer = http.post("/v1/completions", content=body, headers=kind)
        assert "a JSON object, sent with Content-Type: application/json" in refused(answer)["message"]
    nested = http.post("/v1/completions", json={"prompt": "a", "stream_options": 5})
    assert nested.json()["error"]["param"] == "stream_options"


def test_a_clients_own_names_are_no_param(http: httpx.Client) -> None:
    for name in ("\\ud800", "x" * 5000):
        body = f'{{"messages": {json.dumps(TALK)}, "logit_bias": {{"{name}": 1}}}}'
        answer = post(http, "/v1/chat/completions", body)
        assert refused(answer)["param"] == "logit_bias"
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
