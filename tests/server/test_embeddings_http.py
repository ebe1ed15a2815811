"""/v1/embeddings, /pooling, /score, /rerank and /generative_scoring over HTTP, and in a batch: the bundled model's, and
what they refuse."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import echo_service
import httpx
import numpy as np
import pytest
import torch
from asking import openai_of
from echo_service import Running

from quire import LLM
from quire.config import EngineConfig
from quire.errors import InputError
from quire.server.answer_size import AnswerBudget, embeddings_size
from quire.server.app import create_app
from quire.server.batch import run_batch
from quire.server.request_models import MAX_INPUTS
from quire.server.response_models import GenerativeScoringResponse, PoolingResponse

pytestmark = pytest.mark.xdist_group(name="embeddings_http")

TEXTS = ["Once upon a time", "The sky is blue.", "A cat sat on the mat."]
CPU = {"device": "cpu", "dtype": "float32", "kv_gib": 0.02}
HIDDEN = 256
BASE64 = {"input": TEXTS[0], "encoding_format": "base64"}
JUDGED = {"query": "Is this a fruit?", "items": [" apple", " stone"], "label_token_ids": [7, 5]}


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with echo_service.serving(EngineConfig(**CPU)) as found:
        yield found


@pytest.fixture(scope="module")
def http(running: Running) -> httpx.Client:
    return running.http


@pytest.fixture(scope="module")
def offline() -> tuple[np.ndarray, list[list[int]]]:
    with LLM("", **CPU) as llm:
        return np.array(llm.embed(TEXTS)), [llm.encode(text) for text in TEXTS]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_numbers_as_a_client_asks_for_them(http: httpx.Client) -> None:
    """Little-endian float32 unless it says otherwise."""
    plain = np.array(post(http, "/v1/embeddings", input=TEXTS[0])["data"][0]["embedding"], dtype=np.float32)
    for more, kind in (
        ({}, "<f4"), ({"endianness": "native"}, "=f4"), ({"endianness": "big"}, ">f4"),
        ({"embed_dtype": "float16"}, "<f2"), ({"embed_dtype": "float16", "endianness": "big"}, ">f2"),
    ):  # fmt: skip
        data = base64.b64decode(post(http, "/v1/embeddings", **BASE64, **more)["data"][0]["embedding"])
        assert np.frombuffer(data, kind).astype(np.float32) == pytest.approx(plain, abs=3e-4 if "2" in kind else 1e-6)
    for endianness, kind in (("little", "<i2"), ("big", ">i2")):
        told = {"embed_dtype": "bfloat16", "endianness": endianness}
        data = base64.b64decode(post(http, "/v1/embeddings", **BASE64, **told)["data"][0]["embedding"])
        found = torch.from_numpy(np.frombuffer(data, kind).astype(np.int16)).view(torch.bfloat16)
        assert torch.equal(found, torch.from_numpy(plain).bfloat16())


@pytest.mark.parametrize("name", ["normalize", "use_activation"])
def test_embeddings_of_any_length(http: httpx.Client, name: str) -> None:
    plain, long = (
        np.array(post(http, "/v1/embeddings", input=TEXTS[0], **{name: normal})["data"][0]["embedding"])
        for normal in (True, False)
    )
    assert np.linalg.norm(plain) == pytest.approx(1, abs=1e-5)
    assert abs(np.linalg.norm(long) - 1) > 0.1
    assert long / np.linalg.norm(long) == pytest.approx(plain, abs=1e-5)


def test_a_conversation_is_embedded_as_its_template_writes_it(http: httpx.Client) -> None:
    talk = [{"role": "user", "content": TEXTS[0]}]
    ids = post(http, "/tokenize", messages=talk, add_generation_prompt=False)["tokens"]
    found = post(http, "/v1/embeddings", messages=talk)
    assert found["data"][0]["embedding"] == post(http, "/v1/embeddings", input=ids)["data"][0]["embedding"]
    assert found["usage"]["prompt_tokens"] == len(ids)


def test_openai_client(running: Running, offline: tuple[np.ndarray, list[list[int]]]) -> None:
    wanted, ids = offline
    with openai_of(running) as client:
        for given in (TEXTS, ids):
            found = client.embeddings.create(model="echo", input=given, user="someone")
            assert np.allclose([one.embedding for one in found.data], wanted, atol=1e-5)
            assert [one.index for one in found.data] == [0, 1, 2]
            assert found.usage.prompt_tokens == found.usage.total_tokens == sum(map(len, ids))
        for given in (TEXTS[0], ids[0]):
            found = client.embeddings.create(model="echo", input=given, encoding_format="float", dimensions=16)
            short = wanted[0][:16] / np.linalg.norm(wanted[0][:16])
            assert np.allclose(found.data[0].embedding, short, atol=1e-5)


def test_score_and_rerank(http: httpx.Client, offline: tuple[np.ndarray, list[list[int]]]) -> None:
    wanted, ids = offline
    cosines = wanted @ wanted[0]
    found = post(http, "/score", text_1=TEXTS[0], text_2=TEXTS)
    assert np.allclose([one["score"] for one in found["data"]], cosines, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(map(len, ids)) + len(ids[0])
    found = post(http, "/score", text_1=TEXTS, text_2=TEXTS)
    assert np.allclose([one["score"] for one in found["data"]], 1, atol=1e-5)
    best = [int(at) for at in np.argsort(-cosines)]
    found = post(http, "/rerank", query=TEXTS[0], documents=TEXTS)
    assert [one["index"] for one in found["results"]] == best
    assert [one["document"]["text"] for one in found["results"]] == [TEXTS[at] for at in best]
    assert np.allclose([one["relevance_score"] for one in found["results"]], cosines[best], atol=1e-5)
    found = post(http, "/rerank", query=TEXTS[0], documents=TEXTS, top_n=1, return_documents=False)
    assert [set(one) for one in found["results"]] == [{"index", "relevance_score"}]
    for path in ("/v1/rerank", "/v2/rerank"):
        again = post(http, path, query=TEXTS[0], documents=TEXTS, top_n=1, return_documents=False)
        assert again["results"] == found["results"]
    scores = post(http, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)["data"]
    assert len(scores) == len(TEXTS)
    for names in (("queries", "documents"), ("data_1", "data_2")):
        assert post(http, "/score", **dict(zip(names, (TEXTS[0], TEXTS))))["data"] == scores


def test_pooling_is_embeddings_in_another_form(http: httpx.Client) -> None:
    for asked in ({"input": TEXTS}, {"input": TEXTS, "encoding_format": "base64", "dimensions": 16}):
        wanted = post(http, "/v1/embeddings", **asked)
        found = post(http, "/pooling", **asked, task="embed")
        assert [one["data"] for one in found["data"]] == [one["embedding"] for one in wanted["data"]]
        assert [(one["index"], one["object"]) for one in found["data"]] == [(at, "pooling") for at in range(3)]
        assert found["usage"] == wanted["usage"]
        PoolingResponse.model_validate(found, strict=True)


@pytest.mark.parametrize("item_first", [False, True])
def test_generative_scoring_is_a_completions_probability(http: httpx.Client, item_first: bool) -> None:
    query, items, labels = JUDGED["query"], JUDGED["items"], JUDGED["label_token_ids"]
    first = post(http, "/tokenize", prompt=query)["tokens"]
    prompts = []
    for item in items:
        ids = post(http, "/tokenize", prompt=item, add_special_tokens=False)["tokens"]
        prompts.append(ids + first if item_first else first + ids)
    asked = {"max_tokens": 1, "logprob_token_ids": labels, "return_tokens_as_token_ids": True}
    choices = post(http, "/v1/completions", prompt=prompts, **asked)["choices"]
    tops = [choice["logprobs"]["top_logprobs"][0] for choice in choices]
    for softmax in (True, False):
        found = post(http, "/generative_scoring", **JUDGED, item_first=item_first, apply_softmax=softmax)
        yes, no = (np.exp([top[f"token_id:{label}"] for top in tops]) for label in labels)
        wanted = yes / (yes + no) if softmax else yes
        assert [one["score"] for one in found["data"]] == pytest.approx(list(wanted), rel=1e-4)
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (sum(map(len, prompts)), 2)
        GenerativeScoringResponse.model_validate(found, strict=True)
    again = post(http, "/generative_scoring", **{**JUDGED, "items": [[5, 6]], "query": [7]}, item_first=item_first)
    assert again["usage"]["prompt_tokens"] == 3


def test_texts_of_the_model_s_length(http: httpx.Client) -> None:
    longest = http.get("/v1/models").json()["data"][0]["max_model_len"]
    assert post(http, "/v1/embeddings", input=[5] * longest)["usage"]["prompt_tokens"] == longest
    answer = http.post("/v1/embeddings", json={"input": [5] * (longest + 1)})
    message = answer.json()["error"]["message"]
    assert message.startswith(f"This model's maximum context length is {longest} tokens")
    assert message.endswith(f" the prompt has {longest + 1} tokens. Please reduce the length of the input prompt")


@pytest.mark.parametrize(
    ("path", "body", "param", "why"),
    [
        ("/v1/embeddings", {}, "input", "give either input or messages"),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input", ""),
        ("/v1/embeddings", {**BASE64, "embed_dtype": "nope"}, "embed_dtype", ""),
        ("/v1/embeddings", {**BASE64, "endianness": "middle"}, "endianness", ""),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", ""),
        ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize", ""),
        ("/v1/embeddings", {"input": ""}, "input", "at least one character"),
        ("/v1/embeddings", {"input": ["a"] * 2049}, "input", "1 to 2048 entries"),
        ("/v1/embeddings", {"input": {"a": 1}}, "input", "must be a string"),
        ("/v1/embeddings", {"input": [5, 10**6]}, "input", "token ids are integers"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", f"between 1 and {HIDDEN}, got 0"),
        ("/v1/embeddings", {"input": "a", "dimensions": HIDDEN + 1}, "dimensions", f"got {HIDDEN + 1}"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ("/v1/embeddings", {"input": "a", "cache_salt": ""}, "cache_salt", "not be empty"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "text_1 has 2 texts, text_2 has 3"),
        ("/score", {"text_1": "a", "text_2": ["a"] * 2048}, "text_2", "2049 texts"),
        ("/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2", "text_2[1] is empty"),
        ("/score", {"queries": "a", "documents": ["a", ""]}, "documents", "documents[1] is empty"),
        ("/score", {"data_1": ["a", "b"], "data_2": ["a"] * 3}, "data_1", "data_1 has 2 texts, data_2 has 3"),
        ("/score", {"queries": 5, "documents": "a"}, "queries", "a string or a list of strings"),
        ("/score", {"queries": "a", "text_1": "a", "text_2": "a"}, "text_1", "got 2 of them"),
        ("/score", {"queries": "a"}, "text_2", "give one of text_2, documents, data_2"),
        ("/pooling", {"input": "a", "task": "classify"}, "task", "got 'classify'"),
        ("/pooling", {"input": "a", "task": "token_embed"}, "task", "got 'token_embed'"),
        ("/generative_scoring", {**JUDGED, "items": []}, "items", "1 to 2048 entries"),
        ("/generative_scoring", {**JUDGED, "items": ["a", 5]}, "items", "strings, or lists of token ids"),
        ("/generative_scoring", {**JUDGED, "items": ["a", "a b " * 5000]}, "items", "items[1]: This model's maximum"),
        ("/generative_scoring", {**JUDGED, "items": [[5], [5] * 3487]}, "items", "items[1]: This model's maximum"),
        ("/generative_scoring", {**JUDGED, "query": "a b " * 5000}, "query", "This model's maximum"),
        ("/generative_scoring", {**JUDGED, "items": [[5], [3072]]}, "items", "token ids are integers from 0 to 3071"),
        ("/generative_scoring", {**JUDGED, "query": [5] * 3000, "items": [[5]] * 2000}, "items", "have 6002000 tokens"),
        ("/generative_scoring", {**JUDGED, "label_token_ids": []}, "label_token_ids", "at least 1"),
        ("/generative_scoring", {**JUDGED, "label_token_ids": [5, 3072]}, "label_token_ids", "from 0 to 3071"),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", "query is empty"),
        (
            "/rerank",
            {"query": "a", "documents": ["a", "a b " * 5000]},
            "documents",
            "documents[1]: This model's",
        ),
        ("/rerank", {"query": "a b " * 5000, "documents": ["a"]}, "query", "query: This model's maximum"),
        ("/v1/embeddings", {"input": [[7], [7], [7] * 5000]}, "input", "the prompt has 5000 tokens"),
        ("/v1/embeddings", {"input": ["a", "\ud800"]}, "input", "input[1]: text holds a lone surrogate"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "surrogate"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a b " * 5000}]}, "messages", "has 1000"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a b " * 5000}]}, "messages", "has 10004 tokens"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "at least one"),
        ("/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", "at least 1"),
    ],
)
def test_bad_input(http: httpx.Client, path: str, body: dict[str, Any], param: str, why: str) -> None:
    answer = http.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert why in error["message"]


def test_many_at_once(http: httpx.Client, offline: tuple[np.ndarray, list[list[int]]]) -> None:
    """As many as a request may have, each what it is alone, in order."""
    wanted, ids = offline
    given = [ids[at % 3] for at in range(MAX_INPUTS)]
    found = post(http, "/v1/embeddings", input=given, encoding_format="base64")["data"]
    vectors = np.array([np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in found])
    assert np.allclose(vectors, np.resize(wanted, (MAX_INPUTS, HIDDEN)), atol=1e-5)


def test_how_much_an_answer_may_hold() -> None:
    largest = embeddings_size(MAX_INPUTS, 4096, "input")
    assert largest.logprobs == MAX_INPUTS * 4096 // 8
    AnswerBudget(num_frontends=64).reserve(largest)
    with pytest.raises(InputError, match=r"numbers are 16777216, .*: give at most 1024 texts") as caught:
        embeddings_size(MAX_INPUTS, 8192, "input")
    assert caught.value.param == "input"


def test_salts_reach_the_engine(http: httpx.Client, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    salts, submit_all = list[str](), running.llm.submit_all

    def noted(*given: Any, salt: str, **more: Any) -> Any:
        salts.append(salt)
        return submit_all(*given, salt=salt, **more)

    monkeypatch.setattr(running.llm, "submit_all", noted)
    for path, body in (
        ("/v1/embeddings", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}), ("/generative_scoring", JUDGED),
    ):  # fmt: skip
        post(http, path, **body, cache_salt="mine")
    assert salts == ["mine"] * 4


def test_no_embeddings_here(echo: Running) -> None:
    answer = echo.http.post("/v1/embeddings", json={"input": "a"})
    assert answer.status_code == 400
    assert "has no embeddings" in answer.json()["error"]["message"]
    assert echo.http.post("/rerank", json={"query": "a", "documents": ["b"], "model": "x"}).status_code == 404


def test_in_a_batch(tmp_path: Path, http: httpx.Client) -> None:
    bodies = {
        "/v1/embeddings": {"input": TEXTS[0]}, "/score": {"text_1": TEXTS[0], "text_2": TEXTS[1]},
        **{url: {"query": TEXTS[0], "documents": TEXTS} for url in ("/rerank", "/v1/rerank")},
    }  # fmt: skip
    lines = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in bodies.items()]
    (tmp_path / "in").write_text("\n".join(map(json.dumps, lines)))

    def make() -> Any:
        llm = echo_service.linked(EngineConfig(**CPU), placement="thread")
        return llm, create_app(llm, ["tiny"])

    assert run_batch(make, tmp_path / "in", tmp_path / "out", in_flight=1).completed == len(lines)
    said = [json.loads(one) for one in (tmp_path / "out").read_text().splitlines()]
    found = {one["custom_id"]: one["response"]["body"] for one in said}
    wanted = {url: post(http, url, **body) for url, body in bodies.items()}
    for url, place, field in (
        ("/v1/embeddings", "data", "embedding"), ("/score", "data", "score"),
        ("/rerank", "results", "index"), ("/v1/rerank", "results", "index"),
    ):  # fmt: skip
        mine, theirs = ([one[field] for one in answers[url][place]] for answers in (found, wanted))
        assert np.allclose(mine, theirs, atol=1e-5)
