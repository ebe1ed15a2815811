"""Pictures in conversations: which parts are taken, and how templates of both kinds are given them."""

from __future__ import annotations

from typing import Any

import pytest
import seeing
from picture_files import drawn, uri, written
from seeing import PARTS, Dots

from quire.errors import InputError
from quire.text.chat import ChatTemplate
from quire.text.messages import Forms, Given, read_messages

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
        (BOTH, Forms(True, True), "[user]<image>what<image>else[assistant]no[user]<image>"),
        (STRINGS, Forms(True, False), "[user]<1>\n<2>\nwhat\nelse[assistant]no[user]<3>"),
        ("{{ raise_exception('never') }}", Forms(False, False), None),
    ],
)
def test_templates_are_given_what_they_take(template: str, forms: Forms, written: str | None) -> None:
    chat, eyes = ChatTemplate(template, {}), Dots()
    eyes.marker = "<{}>".format  # type: ignore[method-assign]
    assert chat.forms() == forms
    if written is not None:
        assert chat.write(read_messages(TALK, eyes), eyes, False) == written


def test_a_template_of_parts_only_gets_no_strings() -> None:
    """It would drop them: a template that selects parts by their type finds none in a string."""
    parts = (
        "{% for m in messages %}{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}"
        "{% endfor %}{% endfor %}"
    )
    chat = ChatTemplate(parts, {})
    assert chat.forms() == Forms(False, True)
    said = [{"role": "system", "content": "Be kind. "}, user(text("a"), text("b"))]
    assert chat.write(read_messages(said, Dots()), Dots(), False) == "Be kind. a\nb"
    assert chat.render(said, False) == "", "as ever where there are no eyes"


def test_messages_can_be_continued() -> None:
    said = [user(image(), text("what is it")), {"role": "assistant", "content": "It is"}]
    for template in (BOTH, STRINGS, PARTS):
        chat = ChatTemplate(template, {})
        found = chat.write(read_messages(said, Dots()), Dots(), False, True)
        assert found.endswith("It is")
        assert "what is it" in found
    with pytest.raises(InputError, match="the last message ends with a picture"):
        ChatTemplate(BOTH, {}).write(read_messages([user(image())], Dots()), Dots(), False, True)


def test_a_url_may_stand_alone() -> None:
    """As vLLM takes it."""
    part = {"type": "image_url", "image_url": URL}
    assert read_messages([user(part)], Dots()).pictures == [Given("messages[0].content[0].image_url", URL)]
    for detail in (None, "auto", "low", "high"):
        assert read_messages([user(image(detail=detail))], Dots()).pictures[0].source == URL


AT = r"messages\[0\]\.content\[1\]"


@pytest.mark.parametrize("said", ["<image>", "see <image> and <end_of_image>!", "a<image><image>b"])
def test_text_that_looks_like_a_picture_s_place_is_text(said: str) -> None:
    """In a chat with and without pictures, and in a completion without."""
    words = seeing.tokenizer()
    for content, count in ((said, 0), ([text(said)], 0), ([image(), text(said)], 1)):
        prompt = seeing.prompts().chat([{"role": "user", "content": content}])
        assert len(prompt.media) == count
        assert said in prompt.text
        assert words.decode(prompt.ids, skip_special_tokens=True).count(said) == 1
    prompt = seeing.prompts().prompt(said)
    assert (prompt.text, words.decode(prompt.ids), prompt.media) == (said, said, ())


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
        ({"role": "system", "content": [image()]}, "of the role 'system'; only those of 'user' may have pictures"),
        ({"role": "assistant", "content": [image()]}, "of the role 'assistant'"),
        (user(text("<ima"), text("ge>"), image()), "the prompt has 2 places for pictures"),
        (user(*[image()] * 9), r"content\[8\]\.image_url is one of 9 pictures; the limit is 8"),
    ],
)
def test_bad_parts_are_named(message: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        seeing.prompts().chat([message])
