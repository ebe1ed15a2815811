"""Registered prefixes: the admin routes and their key, the file at start, and what requests find of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import echo_service
import httpx
import pytest
from asking import ADMIN, KEY, as_admin, bearer, cached, run
from echo_service import VOCAB, Placement, Running, Servers
from waiting import wait_until_async

from quire.async_llm import AsyncLLM
from quire.errors import EngineDead, PrefixesFull, PrefixTaken, StartupError, UnknownPrefix
from quire.server.errors import OVERFLOW
from quire.server.prefixes import read_prefixes, register_prefixes

pytestmark = pytest.mark.xdist_group(name="prefixes")

IDS = list(range(100, 122))  # 22 tokens: five pages and a half


@pytest.fixture
def shop(servers: Servers, placement: Placement) -> Running:
    """No automatic caching: every hit is one of a registered prefix."""
    model = {"prefix_tokens": 40, "enable_prefix_caching": False}
    return servers(model, keys=[KEY], admin_keys=[ADMIN], placement=placement)


@pytest.fixture
def http(shop: Running) -> Iterator[httpx.Client]:
    with as_admin(shop) as client:
        yield client
        for entry in client.get("/v1/prefixes").json()["data"]:
            assert client.delete(f"/v1/prefixes/{entry['id']}").status_code == 200
        assert asyncio.run(shop.llm.prefixes()) == ({}, frozenset())
        assert shop.idle()
        assert shop.llm.account.usage.free == shop.llm.account.usage.total


def test_register_use_and_release(shop: Running, http: httpx.Client) -> None:
    prompt = [*IDS, 5, 6, 7]
    assert cached(http, prompt) == 0
    answer = http.post("/v1/prefixes", json={"name": "rules", "token_ids": IDS})
    assert answer.json() == {"id": "rules", "object": "prefix", "tokens": 22, "status": "ready"}
    listed = http.get("/v1/prefixes").json()
    assert listed["data"] == [answer.json()]
    assert listed["capacity_tokens"] == 40
    assert cached(http, prompt) == 22  # the partial last page too
    assert cached(http, prompt, n=2) == 22
    assert cached(http, IDS) == 20  # one token is always computed: whole pages below it
    assert cached(http, [*IDS[:9], 1, 2]) == 8
    assert cached(http, prompt, cache_salt="tenant") == 0
    sharing = shop.llm.account.sharing
    assert (sharing.prefixes, sharing.prefix_tokens, sharing.prefix_capacity) == (1, 22, 40)
    assert http.delete("/v1/prefixes/rules").json()["deleted"] is True
    assert cached(http, prompt) == 0
    assert http.get("/v1/prefixes").json()["data"] == []


def test_errors(shop: Running, http: httpx.Client) -> None:
    assert shop.idle()
    before = shop.llm.metrics.stats.computed_tokens
    assert http.post("/v1/prefixes", json={"name": "a", "token_ids": IDS}).status_code == 200
    for body, status, param in (
        ({"name": "a", "token_ids": [1]}, 409, "name"),
        ({"name": "b", "token_ids": [1] * 41}, 413, "token_ids"),
        ({"name": "b", "token_ids": [1] * 17}, 413, "token_ids"),  # five more pages; four are left
        ({"name": "b", "token_ids": []}, 400, "token_ids"),
        ({"name": "b", "token_ids": [VOCAB]}, 400, "token_ids"),
        ({"name": "b", "token_ids": [-1]}, 400, "token_ids"),
        ({"name": "b", "token_ids": "abc"}, 400, "token_ids"),
        ({"name": "b", "text": 5}, 400, "text"),
        ({"name": "b", "text": ""}, 400, "text"),
        ({"name": "b", "text": "x", "token_ids": [1]}, 400, "text"),
        ({"name": "b"}, 400, "text"),
        ({"token_ids": [1]}, 400, "name"),
        ({"name": 5, "token_ids": [1]}, 400, "name"),
        ({"name": "", "token_ids": [1]}, 400, "name"),
        ({"name": "a/b", "token_ids": [1]}, 400, "name"),
        ({"name": "x" * 65, "token_ids": [1]}, 400, "name"),
        ({"name": "b", "text": "\U0001f600" * 100_000}, 400, "text"),
    ):
        answer = http.post("/v1/prefixes", json=body)
        error = answer.json()["error"]
        code = OVERFLOW if len(str(body.get("text"))) > 1000 else status
        assert (answer.status_code, error["code"], error["param"]) == (status, code, param), (body, answer.text)
        assert len(answer.content) < 1000
    assert http.delete("/v1/prefixes/b").status_code == 404
    assert http.delete(f"/v1/prefixes/{'x' * 5000}").status_code == 404
    assert [entry["id"] for entry in http.get("/v1/prefixes").json()["data"]] == ["a"]
    assert cached(http, [*IDS, 1]) == 22
    assert http.delete("/v1/prefixes/a").status_code == 200
    assert shop.idle()
    computed = shop.llm.metrics.stats.computed_tokens - before
    assert computed == 22 + 1 + 2, "something else was queued"  # of three output tokens two are taken in


def test_without_an_admin_key_the_routes_are_shut(echo: Running) -> None:
    for headers in ({}, bearer(ADMIN)):
        assert echo.http.get("/v1/prefixes", headers=headers).status_code == 403


# On the engine's thread


def test_two_at_once_never_exceed_the_capacity(placement: Placement) -> None:
    async def work(llm: AsyncLLM) -> None:
        found = await asyncio.gather(
            *(llm.register_prefix(f"p{i}", [i + 1] * 30) for i in range(4)), return_exceptions=True
        )
        assert sum(item == 30 for item in found) == 1
        assert sum(isinstance(item, PrefixesFull) for item in found) == 3
        lengths, ready = await llm.prefixes()
        assert len(lengths) == len(ready) == 1
        with pytest.raises(PrefixTaken):
            await llm.register_prefix(next(iter(lengths)), [1])
        await llm.release_prefix(next(iter(lengths)))
        with pytest.raises(UnknownPrefix):
            await llm.release_prefix("p0")
        assert await llm.register_prefix("p9", [9] * 40) == 40

    run(work, placement, pause=0.001, prefix_tokens=40)


def test_released_or_left_while_computed(placement: Placement) -> None:
    async def work(llm: AsyncLLM) -> None:
        long = asyncio.ensure_future(llm.register_prefix("a", [1] * 40))
        assert await begun(llm) == ({"a": 40}, frozenset())
        await llm.release_prefix("a")
        with pytest.raises(PrefixTaken, match="released while"):
            await long
        left = asyncio.ensure_future(llm.register_prefix("b", [1] * 40))
        assert await begun(llm) == ({"b": 40}, frozenset())
        left.cancel()
        await wait_until_async(lambda: not llm.active, "no request is left")
        assert await llm.prefixes() == ({}, frozenset())
        assert llm.num_aborted == 0  # no client's request
        if placement == "thread":
            memory = llm.engine.scheduler.memory
            assert not memory.prefix_cache.registered_prefixes
            memory.check()

    run(work, placement, pause=0.1, prefix_tokens=40, max_num_batched_tokens=4)


def test_a_closed_engine_says_so(placement: Placement) -> None:
    async def work(llm: AsyncLLM) -> None:
        late = asyncio.ensure_future(llm.register_prefix("a", [1] * 40))
        await begun(llm)
        llm.close()
        with pytest.raises(EngineDead):
            await late
        for call in (llm.prefixes(), llm.release_prefix("a"), llm.register_prefix("b", [1])):
            with pytest.raises(EngineDead):
                await call

    run(work, placement, pause=0.1, prefix_tokens=40, max_num_batched_tokens=4)


async def begun(llm: AsyncLLM) -> object:
    while not (found := await llm.prefixes())[0]:
        pass
    return found


# The file


def test_read_and_register(tmp_path: Path, placement: Placement) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps({"rules": {"text": "once upon"}, "ids": {"token_ids": [1, 2, 3]}}))
    found = read_prefixes(str(file))
    assert found == {"rules": "once upon", "ids": [1, 2, 3]}
    assert read_prefixes(None) == {}

    async def work(llm: AsyncLLM) -> None:
        assert await register_prefixes(llm, found) == 3 + len(echo_service.tokenizer().encode("once upon"))
        for name, prefix, words in (("big", [1] * 41, "'big' can't be registered: a prefix of 41 tokens"),
                                    ("bad", [VOCAB], "'bad' can't be registered: prompt token 0 is 512")):  # fmt: skip
            with pytest.raises(StartupError, match=words):
                await register_prefixes(llm, {name: prefix})

    run(work, placement, prefix_tokens=40)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[]", "holds a list"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": {"text": "x"}, "a": {"text": "y"}}', "'a' is there twice"),
        ('{"a b": {"text": "x"}}', "entry 'a b'"),
        ('{"ok": {"text": "x"}, "a": {"text": 5}}', "entry 'a' holds neither"),
        ('{"a": "x"}', "entry 'a' holds neither"),
        ('{"a": {"text": "x", "token_ids": [1]}}', "entry 'a' holds neither"),
        ('{"a": {"token_ids": [1, "2"]}}', "entry 'a' holds neither"),
        ('{"a": {"token_ids": [true]}}', "entry 'a' holds neither"),
        ('{"a": {}}', "entry 'a' holds neither"),
        ("\xff", "is not JSON"),
        ('{"a": {"token_ids": [' + "9" * 5000 + "]}}", "is not JSON"),
        (" " * (8 << 20) + "{}", "more than 8388608 bytes"),
    ],
)
def test_bad_files_name_the_entry(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "prefixes.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(StartupError) as failure:
        read_prefixes(str(file))
    assert words in failure.value.cause
    assert len(str(failure.value)) < 500
    with pytest.raises(StartupError, match="can't be read"):
        read_prefixes(str(tmp_path))
