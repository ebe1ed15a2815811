"""Requests as strangers may send them: strategies for every route and field, made from the requests' own models.

A value is JSON text, so that there may be what no library would write: NaN, keys that come twice, half a document.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hypothesis import strategies as st
from pydantic import BaseModel

from quire.server.request_models import (
    IGNORED_FIELDS,
    REFUSED_FIELDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PrefixRequest,
    TokenizeRequest,
)

Texts = st.SearchStrategy[str]
SAY = '[{"role":"user","content":"What is a quire?"}]'


class Route(NamedTuple):
    """A way to ask: the method and path, and the model of the body with what a small request has in it."""

    method: str
    path: str
    model: type[BaseModel] | None = None
    base: Mapping[str, str] = MappingProxyType({})

    @property
    def fields(self) -> frozenset[str]:
        """What an error may name."""
        return frozenset() if self.model is None else frozenset(self.model.model_fields) | REFUSED_FIELDS


SMALL = {"max_tokens": "3", "seed": "1"}
POSTS = (
    Route("POST", "/v1/completions", CompletionRequest, {"prompt": '"a quire of"', **SMALL}),
    Route("POST", "/v1/chat/completions", ChatRequest, {"messages": SAY, **SMALL}),
    Route("POST", "/tokenize", TokenizeRequest, {"prompt": '"a quire of"'}),
    Route("POST", "/tokenize", TokenizeRequest, {"messages": SAY}),
    Route("POST", "/detokenize", DetokenizeRequest, {"tokens": "[5,6,70]"}),
    Route("POST", "/v1/prefixes", PrefixRequest, {"name": '"rules"', "token_ids": str([*range(9, 50)])}),
)
OTHERS = (
    *(Route("GET", path) for path in ("/health", "/ping", "/version", "/load", "/metrics", "/openapi.json")),
    *(Route("GET", path) for path in ("/v1/models", "/v1/models/tiny", "/v1/models/{name}", "/v1/prefixes")),
    Route("DELETE", "/v1/prefixes/{name}"),
    Route("DELETE", "/v1/prefixes/rules"),
    Route("POST", "/ping"),
)
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "FROB")
NAMES = ("rules", "a", "other", "%00", "%ff", "..%2f", "a" * 65, "%F0%9F%98%80", "{name}", "'", "-", "echo", "%2e%2e")
PATHS = ("/", "//", "/nothing", "/v1", "/v1/", "/v1/completions/", "/V1/COMPLETIONS", "/v1//completions", "*", "/%",
         "/v1/../health", "/health/", "/%2e%2e/%2e%2e/etc/passwd", "/docs", "/redoc", "/v1/embeddings", "/x" * 2000,
         "/v1/completions?stream=true", "/v1/models/%00%ff", "/x" * 5000, "/health?" + "a=b&" * 500)  # fmt: skip
KEYS = ("user", "admin", "wrong", None)
TYPES = ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/JSON",
         "application/json; charset=utf-16", "application/vnd.x+json", "a" * 300, "/", "text/json")  # fmt: skip
HEADERS = ("X-Request-Id: a b\t", f"X-Request-Id: {'i' * 200}", "Origin: http://evil", "Content-Encoding: gzip",
           "Expect: 100-continue", "Accept: text/html", "Range: bytes=0-1", "Transfer-Encoding: gzip, chunked",
           "X-Forwarded-For: ::1", "Authorization: Bearer twice", "Host: other", "Upgrade: websocket", "Cookie: a=b",
           "Connection: upgrade", "If-None-Match: *", "X: " + "y" * 8000)  # fmt: skip
HOSTILE = (
    "null", "true", "false", "0", "-1", "1", "2", "129", "1.5", "-0.0", "1e400", "-1e400", "5e-324", "NaN", "Infinity",
    str(2**31), str(2**63), str(-(2**63) - 1), str(2**64), "9" * 400, "9" * 700, "9" * 5000, "1e5", "0." + "3" * 5000,
    '""', '" "', '"a"', r'"\u0000"', r'"\ud800"', r'"\udfff\ud800"', r'"\u202e"', '"\x00"', '"\n"', '"\x7f"', '"😀"',
    f'"{"a" * 70_000}"', f'"{"😀" * 5000}"', rf'"{chr(92)}ud800{"a" * 999}"', '"<|im_start|>"', '"{{ messages }}"',
    "[]", "[[]]", "[[],[]]", "[null]", "[true]", "[1.0]", "[-1]", "[0]", "[5,6]", f"[{2**70}]", '["a",1]', '[1,"a"]',
    '[""]', r'["\ud800"]', '[{"a":1}]', "[[5],[6,7]]", "[[5],[]]", '["a","b","c"]', "[5]" * 2, str([7] * 3000),
    json.dumps([[7] * 3] * 300), json.dumps(["a"] * 2000), "[" * 60 + "]" * 60, "[" * 5000 + "]" * 5000, "[" * 5000,
    "{}", '{"":""}', '{"a":{"a":{}}}', '{"type":"text"}', '{"type":"json_object"}', '{"5":1,"5":2}', '{"5":1e999}',
    r'{"\ud800":1}', '{"include_usage":true,"continuous_usage_stats":true}', '{"-1":0,"x":1,"99999999999999":3}',
    json.dumps({str(at): at % 9 for at in range(1500)}), '{"a":' * 900 + "1" + "}" * 900,
    '[{"role":"user"}]', '[{"role":5,"content":"a"}]', '[{"role":"assistant","content":"I am"}]', '[{"content":"a"}]',
    '[{"role":"user","content":[{"type":"text","text":"a"},{"type":"image_url","image_url":"x"}]}]',
    '[{"role":"user","content":[{"type":"text","text":"a"}]},{"role":"assistant","content":"So, "}]',
    r'[{"role":"user","content":"\ud800"}]', '[{"role":"<|im_start|>","content":"a"}]', SAY, "[" + "{}," * 1500 + "{}]",
)  # fmt: skip
ODD_NAMES = ("", "x", "self", "__class__", "model_config", "N", r"\ud800", r"\u0000", "a" * 5000, "stream_options.x",
             "method", "bad_word_ids", "stop_automaton", "detokenize", "tools", "suffix", "loc", "body")  # fmt: skip
LITTLE = {  # fields whose sensible values would make long answers
    "max_tokens": st.integers(-1, 40),
    "max_completion_tokens": st.integers(0, 40),
    "n": st.integers(0, 12),
    "best_of": st.integers(0, 12),
    "beam_width": st.integers(0, 8),
    "prompt": st.sampled_from(["a quire of pages", [5, 6, 7], ["a", "of pages"], [[5], [6, 7]], [7] * 400]),
    "tokens": st.lists(st.integers(-1, 600), max_size=9),
    "token_ids": st.integers(1, 300).map(lambda size: [size] * size),
    "messages": st.sampled_from([json.loads(text) for text in HOSTILE[-8:] if "ud800" not in text]),
}


class Wanted(NamedTuple):
    """A request, made for `route`, but maybe not sent to it. `leave`: its client goes when it read so many bytes of the
    answer."""

    route: Route
    method: str
    path: str
    key: str | None
    kind: str
    headers: tuple[str, ...]
    body: bytes
    chunked: bool
    leave: int | None

    @property
    def fields(self) -> frozenset[str]:
        """What an error may name."""
        asked = self.path.partition("?")[0]
        return frozenset({"name", "model"}).union(*(to.fields for to in POSTS if to.path == asked))


def sensible(schema: dict[str, Any], known: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values as the OpenAPI document allows them, at its limits too."""
    if "$ref" in schema:
        return sensible(known[schema["$ref"].rpartition("/")[2]], known)
    if "anyOf" in schema:
        shared = {name: value for name, value in schema.items() if name not in ("anyOf", "default", "title")}
        return st.one_of([sensible({**shared, **one}, known) for one in schema["anyOf"]])
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    low, high = schema.get("minimum"), schema.get("maximum")
    match schema.get("type"):
        case "integer":
            return st.integers(-2 if low is None else low, 600 if high is None else high)
        case "number":
            return st.floats(-2 if low is None else low, 2 if high is None else high, allow_nan=False)
        case "boolean":
            return st.booleans()
        case "string":
            return st.text(max_size=20) | st.sampled_from(["tiny", "a", "page", "left"])
        case "array":
            return st.lists(sensible(schema["items"], known), max_size=5)
        case "object" if "properties" in schema:
            fields = {name: sensible(one, known) for name, one in schema["properties"].items()}
            return st.fixed_dictionaries({}, optional=fields)
        case "object":
            return st.dictionaries(st.integers(0, 600).map(str), st.floats(-100, 100), max_size=4)
    return st.none()


def values(model: type[BaseModel]) -> dict[str, Texts]:
    """For each field, what it may be given, as JSON text."""
    schema = model.model_json_schema()
    known = schema.get("$defs", {})
    return {name: LITTLE.get(name, sensible(one, known)).map(json.dumps) for name, one in schema["properties"].items()}


BROKEN: tuple[Callable[[bytes], bytes], ...] = (
    lambda body: body[: len(body) // 2], lambda body: b"\xef\xbb\xbf" + body, lambda body: b"[" + body + b"]",
    lambda body: body.decode("utf-8", "replace").encode("utf-16"), lambda body: body.replace(b'"', b"'"),
    lambda body: b"", lambda body: body + b"\xff\xfe\x00",
)  # fmt: skip


def bodies(route: Route) -> st.SearchStrategy[bytes]:
    """A small request in which some fields are changed, added, dropped or twice; some of them broken as a whole."""
    assert route.model is not None
    fields, hostile = values(route.model), st.sampled_from(HOSTILE)
    names = st.sampled_from([*fields])
    sound = names.flatmap(lambda name: st.tuples(st.just(name), fields[name]))
    wrong = st.tuples(names | st.sampled_from([*sorted(REFUSED_FIELDS), *sorted(IGNORED_FIELDS), *ODD_NAMES]), hostile)
    changes = st.lists(sound, max_size=6) | st.lists(sound | wrong, min_size=1, max_size=4)

    def written(drawn: tuple[list[tuple[str, str]], bool, str | None]) -> bytes:
        changed, twice, dropped = drawn
        pairs = {**route.base, **dict(changed)}
        items = [*route.base.items(), *changed] if twice else [*pairs.items()]
        text = ",".join(f'"{name}":{value}' for name, value in items if name != dropped)
        return f"{{{text}}}".encode("utf-8", "surrogatepass")

    dropped = st.none() | st.none() | st.none() | st.sampled_from([*route.base])
    whole = st.tuples(changes, st.booleans(), dropped).map(written)
    return st.one_of(*[whole] * 5, st.tuples(st.sampled_from(BROKEN), whole).map(lambda drawn: drawn[0](drawn[1])))


def requests() -> st.SearchStrategy[Wanted]:
    rarely = st.sampled_from((False,) * 9 + (True,))
    keys = st.sampled_from(KEYS + ("user",) * 16)

    @st.composite
    def one(draw: Any) -> Wanted:
        def pick(usual: Any, others: tuple[Any, ...]) -> Any:
            return draw(st.sampled_from(others)) if draw(rarely) else usual

        route = draw(st.sampled_from([*POSTS * 4, *OTHERS]))
        path = route.path.replace("{name}", draw(st.sampled_from(NAMES)))
        admin = path.startswith("/v1/prefixes")
        return Wanted(
            route,
            method=pick(route.method, METHODS),
            path=pick(path, PATHS),
            key=pick("admin", KEYS) if admin else draw(keys),
            kind=pick("application/json", TYPES),
            headers=tuple(draw(st.lists(st.sampled_from(HEADERS), max_size=3))) if draw(rarely) else (),
            body=draw(bodies(route)) if route.model is not None else pick(b"", (b"{}", b"x" * 9)),
            chunked=draw(rarely),
            leave=draw(st.integers(0, 2000)) if draw(rarely) else None,
        )

    return one()
