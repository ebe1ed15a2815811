"""Pictures on their way into prompts: keys, places, limits, and what Python's callers may give."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import seeing
from picture_files import drawn, png_of, uri, written
from PIL import Image
from seeing import END, PARTS, PICTURE, Dots, sight
from waiting import wait_until_async

from quire.errors import InputError, Overloaded, PromptTooLong
from quire.protocol.images import ImagePixels
from quire.text.chat_messages import ContentFormats, ImageSource, read_messages
from quire.text.chat_template import ChatTemplate
from quire.text.images import loader as sights
from quire.text.images.loader import image_key, split_multi_modal

PNG = written(drawn(8, 8))


def see(*sources: Any, salt: str = "", **limits: int) -> list[ImagePixels]:
    return sight(**limits).load([ImageSource(f"image[{i}]", one) for i, one in enumerate(sources)], salt)


def test_a_picture_is_the_same_however_it_comes() -> None:
    array = np.asarray(drawn(8, 8))
    ways = [uri(PNG), PNG, bytearray(PNG), memoryview(PNG), array, Image.open(io.BytesIO(PNG)), drawn(8, 8),
            written(drawn(8, 8), "WEBP", lossless=True)]  # fmt: skip
    found = see(*ways)
    assert len(set(found)) == 1
    assert found[0].shape == (4, 4, 4, 3)
    assert found[0].grid == (2, 2)
    assert len(found[0].key) == 32
    assert np.frombuffer(found[0].data, np.uint8).reshape(4, 4, 4, 3)[1].tolist() == array[:4, 4:].tolist()


def test_what_a_key_is_made_of() -> None:
    """Content, size, preparation and salt: each alone makes another key."""
    one = Image.new("RGB", (8, 4), (1, 2, 3))
    changed = one.copy()
    changed.putpixel((7, 3), (1, 2, 4))
    keys = [image_key(one, "a", ""), image_key(changed, "a", ""), image_key(Image.new("RGB", (4, 8), (1, 2, 3)), "a",
    ""),
            image_key(one, "b", ""), image_key(one, "a", "b"), image_key(one, "", "a"), image_key(one, "ab",
            "")]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert image_key(one.copy(), "a", "b") == keys[4]


def test_salts_part_pictures() -> None:
    [mine], [yours], [mine_again] = see(PNG, salt="mine"), see(PNG, salt="yours"), see(PNG, salt="mine")
    assert mine == mine_again
    assert mine.key != yours.key
    assert mine.data == yours.data
    with pytest.raises(InputError, match="cache_salt"):
        see(PNG, salt="x" * 2000)


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 3), (8, 8, 4)])
def test_arrays(shape: tuple[int, ...]) -> None:
    assert see(np.full(shape, 255, np.uint8))[0].data == b"\xff" * 192


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (np.zeros((8, 8, 3)), "is an array of float64 of shape"),
        (np.zeros((3, 8, 8), np.uint8), "must be uint8 of"),
        (np.zeros(8, np.uint8), "must be uint8 of"),
        (np.zeros((2, 8, 8, 3), np.uint8), "must be uint8 of"),
        (np.zeros((0, 8, 3), np.uint8), "0 pixels"),
        (np.zeros((1, 20_000, 3), np.uint8), "20000 x 1 pixels"),
        (Image.new("RGB", (0, 5)), "0 x 5 pixels"),
        (Image.new("L", (5000, 5000)), "5000 x 5000 pixels"),
        (Image.new("La", (8, 8)), "can't be read as RGB"),
        (Image.open(io.BytesIO(PNG[:60] + b"\0" * 20)), "can't be read as RGB"),
        (5, "must be a data: URI, bytes, an array or a PIL image, got int"),
        ([PNG], "got list"),
        ({"url": uri(PNG)}, "got dict"),
        (io.BytesIO(PNG), "got BytesIO"),
        ("/etc/passwd", "nothing is ever fetched"),
        (b"", "it is empty"),
        (Image.new("RGB", (3, 8)), "must have 4 pixels a side"),
    ],
)
def test_what_is_no_picture(source: Any, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        see(PNG, source)
    assert str(caught.value.param) == "image[1]"
    assert "image[1]" in str(caught.value)


def test_every_header_is_read_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sights, "decode_image", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(InputError, match=r"image\[1\] is an image of 9000 x 9000"):
        see(PNG, png_of(9000, 9000))


def test_limits_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(see(*[PNG] * 3, count=3, bytes=3 * len(PNG))) == 3
    with pytest.raises(InputError, match=r"image\[3\] is one of 4 images; the limit is 3 \(--max-images\)"):
        see(*[PNG] * 4, count=3)
    with pytest.raises(InputError, match=rf"image\[2\] the request's images have {3 * len(PNG)} bytes"):
        see(*[PNG] * 3, bytes=3 * len(PNG) - 1)
    monkeypatch.setattr(sights, "MAX_PIXEL_BYTES", 400)
    with pytest.raises(InputError, match=r"with image\[2\] the request's images have 576 bytes, prepared"):
        see(*[PNG] * 3)


def test_who_is_cancelled_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures wait for threads of their own, and the event loop turns meanwhile. Those that nobody has begun with are
    gone at once, so that others may wait in their place; what a thread is at counts until it is done, since it takes
    the thread that long."""
    monkeypatch.setattr(sights, "MAX_WAITING", 4)
    eyes, go, begun = sight(), threading.Event(), threading.Semaphore(0)
    prepare = eyes.processor.prepare

    def slowly(*given: Any) -> ImagePixels:
        assert threading.current_thread().name.startswith("quire-pictures")
        begun.release()
        assert go.wait(60)
        return prepare(*given)

    def looks(arrays: list[Any]) -> list[asyncio.Task[Any]]:
        return [asyncio.create_task(eyes.load_async([ImageSource("a", one)], "")) for one in arrays]

    async def all_of_them() -> None:
        arrays = [np.zeros((8, 8, 3), np.uint8) for _ in range(4)]
        tasks, there = looks(arrays), list(map(weakref.ref, arrays))
        arrays.clear()
        for _ in range(2):
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        assert len(eyes._threads.items) == 4
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        del task
        tasks.clear()
        gc.collect()
        assert [one() is None for one in there] == [False, False, True, True]
        more = looks([np.zeros((8, 8, 3), np.uint8) for _ in range(3)])  # beside the two whose threads go on
        await wait_until_async(lambda: any(task.done() for task in more), "one is refused")
        [refused] = [task for task in more if task.done()]
        with pytest.raises(Overloaded, match="the images of 4 requests wait"):
            refused.result()
        go.set()
        assert sum(isinstance(found, list) for found in await asyncio.gather(*more, return_exceptions=True)) == 2
        assert len(await eyes.load_async([ImageSource("a", PNG)], "")) == 1
        await wait_until_async(lambda: not eyes._threads.items, "the thread of a cancelled request is done")

    monkeypatch.setattr(eyes.processor, "prepare", slowly)
    asyncio.run(all_of_them())


# Places


def test_pictures_take_their_places() -> None:
    prompt = seeing.prompts().process_prompt({
        "prompt_token_ids": [5, PICTURE, 6, PICTURE], "multi_modal_data": {"image": [drawn(8, 8), drawn(8, 4)]},
    })  # fmt: skip
    assert prompt.ids == [5, *[PICTURE] * 4, END, 6, *[PICTURE] * 2, END]
    assert [medium[1:] for medium in prompt.images] == [(1, 5, 5, 4), (7, 3, 3, 2)]
    assert [medium.key for medium in prompt.images] == [one.key for one in prompt.pixels]


@pytest.mark.parametrize(
    ("ids", "number", "says"),
    [
        ([5], 1, "has 0 image placeholders .* and 1 images are given"),
        ([PICTURE], 0, "has 1 image placeholders .* and 0 images are given"),
        ([PICTURE] * 3, 2, "has 3 image placeholders"),
        ([PICTURE, END], 1, f"prompt token {END} stands for a part of an image"),
        ([END], 0, f"prompt token {END} stands for a part of an image"),
        ([PICTURE, "a"], 1, "prompt token 1 is 'a'"),
        ([PICTURE, []], 1, r"prompt token 1 is \[\]"),
        ([PICTURE, float(PICTURE)], 2, "prompt token 1 is"),
    ],
)
def test_places_must_match_pictures(ids: list[Any], number: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        seeing.prompts().process_prompt({"prompt_token_ids": ids, "multi_modal_data": {"image": [PNG] * number}})


def test_more_picture_tokens_than_fit() -> None:
    prompts = seeing.prompts()
    with pytest.raises(PromptTooLong, match=r"length is 256 .* has 258 tokens, 257 of them for 1 images"):
        prompts.process_prompt({"prompt_token_ids": [5, PICTURE], "multi_modal_data": {"image": drawn(64, 64)}})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([PNG], "multi_modal_data must be an object, got list"),
        ({"video": []}, "multi_modal_data has 'video'; only 'image' is supported"),
        ({"image": None, 5: None}, "has 5"),
    ],
)
def test_multi_modal_data_of_other_kinds(data: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        split_multi_modal({"prompt": "a", "multi_modal_data": data})


def test_what_else_pictures_may_not_do() -> None:
    prompts = seeing.prompts()
    given = {"prompt": "<image>", "multi_modal_data": {"image": PNG}}
    with pytest.raises(InputError, match="a registered prefix can't have images"):
        prompts.process_prefix("name", given)
    with pytest.raises(InputError, match="a prompt with images can't be truncated"):
        asyncio.run(
            prompts.process_prompts(["a <image>"], True, prompts.make_truncation(3, False, 1), [ImageSource("a", PNG)])
        )
    with pytest.raises(InputError, match="images go with one prompt, and there are 2 prompts"):
        asyncio.run(prompts.process_prompts(["<image>", "<image>"], True, None, [ImageSource("a", PNG)]))


def test_a_model_that_reads_only_text() -> None:
    prompts = seeing.prompts()
    prompts.image_loader = None
    given = {"prompt": "a", "multi_modal_data": {"image": PNG}}
    with pytest.raises(InputError, match=r"multi_modal_data.image is an image, and this model reads only text"):
        prompts.process_prompt(given)
    with pytest.raises(InputError, match="reads only text"):
        asyncio.run(prompts.process_prompt_async(given))
    assert prompts.process_prompt([PICTURE]).ids == [PICTURE], "there it is a token like others"


# Conversations


URL = uri(written(drawn(8, 8)))
STRINGS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(url: Any = URL, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


TALK = [user(image(), text("what"), image(), text("else")), {"role": "assistant", "content": "no"}, user(image())]


@pytest.mark.parametrize(
    ("template", "forms", "written"),
    [
        (BOTH, ContentFormats(True, True), "[user]<image>what<image>else[assistant]no[user]<image>"),
        (STRINGS, ContentFormats(True, False), "[user]<1>\n<2>\nwhat\nelse[assistant]no[user]<3>"),
        ("{{ raise_exception('never') }}", ContentFormats(False, False), None),
        (  # a string would be dropped: none of its parts is found
            "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}|"
            "{% endfor %}{% endfor %}",
            ContentFormats(False, True),
            "what|else|no|",
        ),
    ],
)
def test_templates_are_given_what_they_take(template: str, forms: ContentFormats, written: str | None) -> None:
    chat, eyes = ChatTemplate(template, {}), Dots()
    eyes.placeholder_text = "<{}>".format  # type: ignore[method-assign]
    assert chat.content_formats() == forms
    if written is not None:
        assert chat.render_parsed(read_messages(TALK, eyes), eyes, False) == written


def test_messages_can_be_continued() -> None:
    said = [user(image(), text("what is it")), {"role": "assistant", "content": "It is"}]
    for template in (BOTH, STRINGS, PARTS):
        chat = ChatTemplate(template, {})
        found = chat.render_parsed(read_messages(said, Dots()), Dots(), False, True)
        assert found.endswith("It is")
        assert "what is it" in found
    with pytest.raises(InputError, match="the last message ends with an image"):
        ChatTemplate(BOTH, {}).render_parsed(read_messages([user(image())], Dots()), Dots(), False, True)


def test_a_url_may_stand_alone() -> None:
    """As vLLM takes it."""
    part = {"type": "image_url", "image_url": URL}
    assert read_messages([user(part)], Dots()).images == [ImageSource("messages[0].content[0].image_url", URL)]
    for detail in (None, "auto", "low", "high"):
        assert read_messages([user(image(detail=detail))], Dots()).images[0].source == URL


AT = r"messages\[0\]\.content\[1\]"


@pytest.mark.parametrize("said", ["<image>", "see <image> and <end_of_image>!", "a<image><image>b"])
def test_text_that_looks_like_a_picture_s_place_is_text(said: str) -> None:
    """In a chat with and without pictures, and in a completion without."""
    words = seeing.tokenizer()
    for content, count in ((said, 0), ([text(said)], 0), ([image(), text(said)], 1)):
        prompt = seeing.prompts().process_chat([{"role": "user", "content": content}])
        assert len(prompt.images) == count
        assert said in prompt.text
        assert words.decode(prompt.ids, skip_special_tokens=True).count(said) == 1
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": said})}}
    talk = [{"role": "user", "content": [image(), text("a")]}, {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": said}]  # fmt: skip
    told = [{"type": "function", "function": {"name": "f", "description": said}}]
    assert len(seeing.prompts().process_chat(talk).images) == 1
    assert len(seeing.prompts().process_chat([{"role": "user", "content": [image()]}], tools=told).images) == 1
    prompt = seeing.prompts().process_prompt(said)
    assert (prompt.text, words.decode(prompt.ids), prompt.images) == (said, said, ())


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (user(text("a"), {"type": "image_url"}), AT + r"\.image_url must be a data: URI, got NoneType"),
        (user(text("a"), image(5)), AT + r"\.image_url must be a data: URI, got int"),
        (user(text("a"), image("https://example.com/cat.png")), AT + r".*nothing is ever fetched"),
        (user(text("a"), image("data:image/png;base64,####")), AT + r"\.image_url is no base64"),
        (user(text("a"), image(detail="huge")), AT + r"\.image_url\.detail is 'huge'"),
        (user(text("a"), {"type": "input_audio"}), "'input_audio'; 'text' and 'image_url' are supported"),
        (user(text("a"), {"type": "image"}), "'image'; 'text' and 'image_url' are supported"),
        ({"role": "system", "content": [image()]}, "of the role 'system'; only those of 'user' may have images"),
        ({"role": "assistant", "content": [image()]}, "of the role 'assistant'"),
        (user(text("<ima"), text("ge>"), image()), "the prompt has 2 image placeholders"),
        (user(*[image()] * 9), r"content\[8\]\.image_url is one of 9 images; the limit is 8"),
    ],
)
def test_bad_parts_are_named(message: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        seeing.prompts().process_chat([message])
