"""Pictures over HTTP: what the engine is shown of them, what counts, and that a bad one is refused alone."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import echo_service
import httpx
import pytest
import seeing
from picture_files import drawn, png_of, uri, written
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from seeing import END, PICTURE, Noted

from quire.async_llm import AsyncLLM
from quire.core.validation import EngineLimits
from quire.errors import InputError
from quire.protocol.images import ImageItem
from quire.server.guards import MAX_BODY

pytestmark = pytest.mark.xdist_group(name="pictures_http")

URL = uri(written(drawn(8, 8)))
ONE, WHOLE = "/v1/completions", "/v1/chat/completions"


class Served(NamedTuple):
    http: httpx.Client
    noted: Noted


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model, noted = seeing.built(limits={"count": 3})
    with echo_service.serving(model) as running:
        yield Served(running.http, noted)


def talk(*parts: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "what is it"}, *parts]
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "seed": 1, **more}


def part(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def canary(http: httpx.Client) -> str:
    bodies = (ONE, {"prompt": "once upon", "seed": 1, "max_tokens": 5}), (WHOLE, talk(part()))
    answers = [http.post(path, json={**body, "return_token_ids": True}) for path, body in bodies]
    assert all(answer.status_code == 200 for answer in answers), answers[1].text
    return json.dumps([[answer.json()["choices"], answer.json()["usage"]["prompt_tokens"]] for answer in answers])


def refusal(served: Served, body: dict[str, Any], path: str = WHOLE) -> dict[str, Any]:
    """What a bad request is told, while a neighbour gets the tokens that it always gets, and nothing else is queued."""
    known, shown = canary(served.http), len(served.noted.media)
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(canary, served.http)
        answer = served.http.post(path, json=body)
        assert neighbour.result() == known
    assert answer.status_code == 400, answer.text
    assert len(answer.content) <= 4096
    assert len(served.noted.media) == shown + 1, "something else than the neighbour's picture was queued"
    error: dict[str, Any] = answer.json()["error"]
    return error


def test_a_picture_in_a_chat(served: Served) -> None:
    before = len(served.noted.media)
    answer = served.http.post(WHOLE, json=talk(part(), return_token_ids=True, cache_salt="a")).json()
    ids = answer["prompt_token_ids"]
    assert served.http.post("/tokenize", json={"messages": talk(part())["messages"]}).json()["tokens"] == ids
    assert answer["usage"]["prompt_tokens"] == len(ids), "pictures count"
    at = ids.index(PICTURE)
    assert ids[at : at + 5] == [PICTURE] * 4 + [END]
    [[medium]] = served.noted.media[before:]
    assert medium[1:] == (at, 5, 5, 4)
    assert served.noted.pixels[-1].key == medium.key
    served.http.post(WHOLE, json=talk(part(), cache_salt="b"))
    assert served.noted.media[-1][0].key != medium.key
    served.http.post(WHOLE, json=talk(part(), cache_salt="a"))
    assert served.noted.media[-1][0].key == medium.key


def test_a_picture_s_token_may_lie_beyond_the_vocabulary() -> None:
    """As Llama 3.2's does: only where a picture stands."""
    limits, media = EngineLimits(100, 50, 1), [ImageItem(bytes(32), 1, 2, 4)]
    assert limits.check_prompt([5, 100, 107, 6], media) == [5, 100, 107, 6]
    for wrong in ([100, 5, 5, 5], [5, 5, 5, 100], [5, -1, 5, 5], [5, 108, 5, 5], [5, 2**31, 5, 5], [5, 100.0, 5, 5]):
        with pytest.raises(InputError, match="token ids are integers from 0 to 99"):
            limits.check_prompt(wrong, media)  # type: ignore[arg-type]
    with pytest.raises(InputError):
        limits.check_prompt([5, 100, 107, 6])


MOVING = uri(written(Image.new("L", (4, 4)), "GIF", save_all=True, append_images=[Image.new("L", (4, 4), 255)]), "gif")
BAD: dict[str, tuple[Any, str]] = {
    "http": (part("http://127.0.0.1:1/x.png"), "nothing is ever fetched"),
    "a file": (part("file:///etc/passwd"), "nothing is ever fetched"),
    "no base64": (part("data:image/png;base64,!!!!"), "is no base64"),
    "cut short": (part(uri(written(drawn(8, 8))[:60])), "can't be read"),
    "moving": (part(MOVING), "it is animated"),
    "no pixels": (part(uri(png_of(0, 5))), "0 x 5 pixels"),
    "a bomb": (part(uri(png_of(100_000, 100_000))), "100000 x 100000 pixels"),
    "too small for the model": (part(uri(written(drawn(2, 2)))), "must have 4 pixels a side"),
    "too many tokens": (
        part(uri(written(drawn(64, 64)))),
        "262 of them for 2 images, with messages[0]",
    ),
    "a number": (part(5), "must be a data: URI, got int"),
    "another kind": ({"type": "video_url", "video_url": {"url": "data:"}}, "'text' and 'image_url' are supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_pictures_are_refused_with_their_place(served: Served, name: str) -> None:
    bad, says = BAD[name]
    error = refusal(served, talk(part(), bad))
    assert says in error["message"]
    assert "messages[0].content[2]" in error["message"]
    assert error["param"].startswith("messages[0].content[2]"), error


def test_the_first_picture_that_has_no_room_is_named(served: Served) -> None:
    """Also before others that are small, in a later message; and the text, where that has no room itself."""
    large = part(uri(written(drawn(48, 48))))
    first = {"role": "user", "content": [large]}
    second = {"role": "user", "content": [large, part()]}
    error = refusal(served, {"messages": [first, second], "max_tokens": 1})
    assert "However, the prompt has 3" in error["message"], error
    assert "with messages[1].content[0].image_url" in error["message"], error
    assert error["param"] == "messages[1].content[0].image_url"
    error = refusal(served, talk(*[part()] * 4))
    assert error["message"] == "messages[0].content[4].image_url is one of 4 images; the limit is 3 (--max-images)"
    assert error["param"] == "messages[0].content[4].image_url"
    body = {"prompt": "a " * 300 + "<image>", "multi_modal_data": {"image": URL}}
    error = refusal(served, body, ONE)
    assert error["param"] == "prompt"
    assert "However, the prompt has" in error["message"]


def test_places_that_do_not_match(served: Served) -> None:
    """Named is the first picture that has none, or the prompt that has too many."""
    for image in (URL, [URL]):
        given = {"prompt": "see <image> here", "max_tokens": 3, "multi_modal_data": {"image": image}}
        answer = served.http.post(ONE, json={**given, "return_token_ids": True}).json()
        assert answer["choices"][0]["prompt_token_ids"].count(END) == 1
        assert answer["usage"]["prompt_tokens"] == len(answer["choices"][0]["prompt_token_ids"])
    two = {**given, "prompt": ["<image>", "<image>"]}
    assert "images go with one prompt" in served.http.post(ONE, json=two).json()["error"]["message"]
    for body, param in (
        ({"prompt": [PICTURE]}, "prompt"),
        ({"prompt": [END]}, "prompt"),
        ({"prompt": "none", "multi_modal_data": {"image": URL}}, "multi_modal_data.image"),
        ({"prompt": "<image>", "multi_modal_data": {"image": [URL] * 3}}, "multi_modal_data.image[1]"),
        ({"prompt": [PICTURE, END], "multi_modal_data": {"image": URL}}, "prompt"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": URL}}, "prompt"),
        ({"prompt": "<image>", "multi_modal_data": {"image": ["http://x"]}}, "multi_modal_data.image[0]"),
        ({"prompt": "a", "multi_modal_data": {"audio": URL}}, "multi_modal_data"),
    ):
        assert refusal(served, {**body, "max_tokens": 1}, ONE)["param"] == param, body


def test_a_template_that_leaves_pictures_out(caplog: pytest.LogCaptureFixture) -> None:
    model, noted = seeing.built("{% for m in messages %}{{ m.role }}{% endfor %}")
    caplog.set_level("INFO", "quire.server")
    with echo_service.serving(model, log_requests=True) as running:
        http = running.http
        error = http.post(WHOLE, json=talk(part())).json()["error"]
        assert not noted.media
        given = {"prompt": "<image>", "max_tokens": 3, "multi_modal_data": {"image": URL}}
        assert http.post(ONE, json=given).status_code == 200
    assert any(", 1 images; " in record.getMessage() for record in caplog.records)
    assert "base64" not in caplog.text
    assert error["param"] == "messages[0].content[1].image_url"
    assert error["message"].endswith("1 images are given: messages[0].content[1].image_url has none")


@pytest.mark.parametrize("error", [RuntimeError, ZeroDivisionError, struct.error, KeyError, RecursionError])
def test_whatever_a_decoder_raises_is_the_picture_s_fault(
    served: Served, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """In a way that nobody foresaw: it was given a stranger's bytes. The neighbour's picture is another format."""

    def failing(*_: Any) -> None:
        raise error("a defect at 0x7f00")

    monkeypatch.setattr(JpegImageFile, "load", failing)
    told = refusal(served, talk(part(uri(written(drawn(8, 8), "JPEG"), "jpeg"))))
    place = "messages[0].content[1].image_url"
    assert told["message"] == f"{place} can't be read: its data is broken or cut short"
    assert told["param"] == place


def test_a_failure_that_is_not_the_picture_s_ends_its_own_request(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A defect of the server's own, behind the decoder; and no memory, in it or behind it."""
    before = canary(served.http)
    for where, error, status in (
        ("seeing.Dots.prepare", RuntimeError("a defect at 0x7f00"), 500),
        ("seeing.Dots.prepare", MemoryError(), 503),
        ("quire.text.images.decode._open_image", MemoryError(), 503),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(where, lambda *_, error=error: (_ for _ in ()).throw(error))
            answer = served.http.post(WHOLE, json=talk(part()))
        assert answer.status_code == status, where
        assert answer.headers.get("Retry-After") == ("1" if status == 503 else None)
        assert "0x7f" not in answer.text
        assert canary(served.http) == before


def test_a_model_that_reads_only_text_takes_no_larger_bodies(http: httpx.Client) -> None:
    answer = http.post(WHOLE, json=talk(part(uri(bytes(MAX_BODY)))))
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "PayloadTooLargeError")


def test_bodies_may_hold_pictures(served: Served) -> None:
    """As many bytes of them as the limits say, and texts as ever beside them; also where slashes are escaped."""
    most = 1 << 24
    for size, says in ((most, "it is no PNG"), (most + 3, "images may have 16777216 bytes")):
        text = json.dumps(talk(part(uri((bytes(range(256)) * (1 << 17))[:size])))).replace(
            "/", "\\/" if size == most else "/"
        )
        answer = served.http.post(WHOLE, content=text, headers={"Content-Type": "application/json"}, timeout=60)
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
    answer = served.http.post(WHOLE, content=b" " * (2 * most), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413


def test_anthropic_s_pictures(served: Served) -> None:
    """As blocks of messages, and of tools' results, whose pictures the user shows."""
    path, text = "/v1/messages", {"type": "text", "text": "what is it"}

    def block(data: str) -> dict[str, Any]:
        return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}

    picture = block(URL.partition(",")[2])
    body = {"max_tokens": 4, "messages": [{"role": "user", "content": [text, picture]}]}
    before = len(served.noted.media)
    usage = served.http.post(path, json=body).json()["usage"]
    wanted = served.http.post(WHOLE, json=talk(part())).json()["usage"]["prompt_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted
    assert (
        served.http.post(f"{path}/count_tokens", json={"messages": body["messages"]}).json()["input_tokens"] == wanted
    )
    (mine,), (theirs,) = served.noted.media[before:]
    assert mine == theirs
    use = {"type": "tool_use", "id": "a", "name": "see", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [text, picture]}
    history = [{"role": "user", "content": "see"}, {"role": "assistant", "content": [use]},
               {"role": "user", "content": [result, text]}]  # fmt: skip
    assert served.http.post(path, json={**body, "messages": history}).status_code == 200
    assert served.noted.media[-1][0].key == mine.key
    bad = [{"role": "user", "content": [block("AAAA"), text]}]
    error = served.http.post(path, json={**body, "messages": [*history, *bad]}).json()["error"]
    assert error["message"].startswith("messages[3].content[0].source"), error


def test_pictures_of_responses(served: Served) -> None:
    """Of calls' results they stand in the user's message after these, with the places where the client has them."""
    text, picture = {"type": "input_text", "text": "what is it"}, {"type": "input_image", "image_url": URL}
    call = {"type": "function_call", "name": "see", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "a", "output": [picture, text]}
    more = [{**call, "call_id": "a"}, {**call, "call_id": "b"}, result, {**result, "call_id": "b", "output": "none"}]
    shown = [{"role": "user", "content": [picture, text]}]

    def asked(*items: Any) -> httpx.Response:
        return served.http.post("/v1/responses", json={"input": [*shown, *items], "max_output_tokens": 4})

    for items in ([*more], [*more, *shown], [*more, {"role": "assistant", "content": "a"}, *shown]):
        answer = asked(*items)
        assert answer.status_code == 200, answer.text
        assert len(served.noted.media[-1]) == 2 + (items != more)
    error = asked(
        {"role": "user", "content": "a"}, *more, {**shown[0], "content": [text, {**picture, "image_url": "x"}]}
    )
    assert error.json()["error"]["message"].startswith("input[6].content[1].image_url must be"), error.text
    error = asked(*more[:2], {**result, "output": [text, {**picture, "image_url": "x"}]}, *shown)
    assert error.json()["error"]["message"].startswith("input[3].output[1].image_url must be"), error.text


def test_python_s_callers() -> None:
    """AsyncLLM, as the server: pictures in prompts and in chats, under the caller's salt."""

    async def ask(llm: AsyncLLM) -> None:
        given = {"prompt": "<image>", "multi_modal_data": {"image": drawn(8, 8)}}
        for asked in (llm.generate(given, salt="a"), llm.chat(talk(part())["messages"], salt="a")):
            assert [output.prompt_token_ids.count(END) async for output in asked][-1] == 1

    model, noted = seeing.built()
    llm = AsyncLLM.of(model)
    try:
        asyncio.run(ask(llm))
    finally:
        llm.close()
    first, second = noted.media
    assert [one.key for one in first] == [one.key for one in second]
