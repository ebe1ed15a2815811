"""Chat templates: equal to transformers' rendering; hostile templates and messages fail and have no effect."""

from __future__ import annotations

import json
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from quire.errors import InputError, StartupError
from quire.text.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATML = (
    "{% for message in messages %}\n    {{ '<|' + message['role'] + '|>' ~ message.content | trim }}{{ eos_token }}\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "  Héllo 'you' 😀 "},
    {"role": "assistant", "content": "Hi\n"},
    {"role": "user", "content": "Bye"},
]
TEMPLATES = {
    "chatml": CHATML,
    "llama2": "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if loop.first and system is defined %}{{ '<<SYS>>' ~ system ~ '<</SYS>>' }}{% endif %}"
    "{{ '[INST] ' + m['content'].strip() + ' [/INST]' if m.role == 'user' else ' ' ~ m.content ~ eos_token }}"
    "{% endfor %}",
    "tojson": "{{ messages | tojson }}"
    "{{ messages[0] | tojson(indent=2) }}{{ messages | map(attribute='role') | join }}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}"
    "{% if m.role != 'user' %}{% continue %}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% set ns.last = ns.last ~ m.content %}"
    "{% if ns.n > 1 %}{% break %}{% endif %}{% endfor %}{{ ns.n }}{{ ns.last }}{{ loop }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}\n  {% endgeneration %}"
    "{{ m.role }}{% endfor %}",
    "macro": "{% macro say(m) -%}[{{ m.role }}: {{ m.content }}]{%- endmacro %}{% for m in messages %}{{ say(m) }}"
    "{{ loop.length }}{{ loop.last }}{% endfor %}{% if tools is none %}none{% endif %}{{ strftime_now('%%') }}",
    "lists": "{% for a, b in [(1, 2), (3, 4)] %}{{ a * b + 2 ** 3 }}{% endfor %}{{ range(4) | list }}{{ 7 % 4 }}"
    "{{ '%s' | format(messages | length) }}{{ '-' * 5 }}{{ 'x'.join(['a', 'b']) }}{{ [1] + [2] }}{{ dict(a=1) }}"
    "{% for m in messages if m.role == 'user' %}{{ m.content[1:3] }}{% else %}empty{% endfor %}{{ undefined_thing }}",
    "keywords": "{{ enable_thinking }}{{ style.name }}{% if custom is defined %}{{ custom }}{% endif %}",
}


def theirs(template: str, chat: list[dict[str, str]] = CHAT, **more: Any) -> Any:
    """What transformers renders."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), **SPECIAL)
    return tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **more)


@cache
def compiled(source: str) -> ChatTemplate:
    """Return the template, whose process all tests share."""
    return ChatTemplate(source, SPECIAL)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers_does(name: str, prompt: bool) -> None:
    values = {"enable_thinking": False, "style": {"name": "x"}} if name == "keywords" else {}
    expected = theirs(TEMPLATES[name], add_generation_prompt=prompt, **values)
    assert compiled(TEMPLATES[name]).render(CHAT, prompt, **values) == expected


PREFILLS = {
    "answer": "The answer is",
    "spaces": "The answer is  \n",
    "empty": "",
    "tag": "CONTINUE_FINAL_MESSAGE_TAG and",
    "twice": "Bye",
}
CONTINUED = {
    **{name: TEMPLATES[name] for name in ("chatml", "generation", "macro", "tojson")},
    "stripped": "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}</s>{% endfor %}",
    "kept": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    "twice": "{% for m in messages %}{{ m.content }}|{{ m.content }}{{ eos_token }}{% endfor %}",
}


@pytest.mark.parametrize("name", CONTINUED)
@pytest.mark.parametrize("prefill", PREFILLS)
def test_the_last_message_goes_on_as_with_transformers(name: str, prefill: str) -> None:
    chat = [*CHAT, {"role": "assistant", "content": PREFILLS[prefill]}]
    template = compiled(CONTINUED[name])
    try:
        expected = theirs(CONTINUED[name], chat, continue_final_message=True)
    except ValueError:
        with pytest.raises(InputError, match="can't be continued") as refused:
            template.render(chat, False, continue_final_message=True)
        assert refused.value.param == "continue_final_message"
    else:
        assert template.render(chat, False, continue_final_message=True) == expected
    assert chat[-1]["content"] == PREFILLS[prefill]


def test_what_cannot_go_on_is_refused() -> None:
    chat = [{"role": "assistant", "content": "The answer"}]
    for template in ("{{ messages[0].content | upper }}", "{{ messages[0].role }}"):
        with pytest.raises(InputError, match="as it is") as refused:
            ChatTemplate(template, {}).render(chat, False, continue_final_message=True)
        assert refused.value.param == "continue_final_message"
    with pytest.raises(InputError, match="needs add_generation_prompt to be false") as refused:
        compiled(CHATML).render(chat, True, continue_final_message=True)
    assert refused.value.param == "continue_final_message"


def test_documents_are_given_to_templates_that_read_them() -> None:
    source = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}; {% endfor %}{{ messages[0].content }}"
    documents = [{"title": "Grass", "text": "It is green."}, {"title": "Sky", "text": "It is blue."}]
    template = ChatTemplate(source, SPECIAL)
    assert template.render(CHAT, documents=documents) == theirs(source, documents=documents)
    assert template.render(CHAT) == CHAT[0]["content"]
    assert "documents" not in template.variables
    with pytest.raises(InputError, match="does not use documents") as refused:
        compiled(CHATML).render(CHAT, documents=documents)
    assert refused.value.param == "documents"
    for bad in ("x", [1], [{"title": 5}], [{"a": "b"}] * 1025, [{str(i): "" for i in range(65)}], {"a": "b"}):
        with pytest.raises(InputError, match="documents") as refused:
            template.render(CHAT, documents=bad)  # type: ignore[arg-type]
        assert refused.value.param == "documents"


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].popen(COMMAND).read() }}",
    "{{ '' | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ messages[0]['__class__'] | attr('x') | attr('__init__') }}",
    "{{ '{0.__class__.__mro__}'.format('') }}",
    "{{ '{m.__class__}'.format_map({'m': 1}) }}",
    "{{ self.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{% set f = ''.format %}{{ [f] | map('attr', '__self__') | map('attr', '__class__') | list }}",
    "{% macro m() %}{{ caller.__init__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ messages | tojson(indent=''.__class__) }}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_reaching_for_internals_raises_and_does_nothing(attack: str, tmp_path: Path) -> None:
    file = tmp_path / "ran"
    source = attack.replace("COMMAND", repr(f"touch {file}"))
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises((InputError, StartupError)):
        ChatTemplate("x" + source, SPECIAL).render(messages)
    assert not file.exists()
    assert messages == [{"role": "user", "content": "hi"}]


def test_templates_in_messages_are_only_text() -> None:
    content = "{{ 7 * 7 }}{% raw %}{{ ''.__class__ }}"
    assert ChatTemplate("{{ messages[0].content }}", {}).render([{"role": "user", "content": content}]) == content


BOMBS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(60000) %}{% for b in messages[0].content %}{% if b == 'x' %}{% endif %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{{ 'long text' * 1000 }}{% endfor %}",
    "{{ range(10 ** 9) | list }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 9 ** 64 ** 64 ** 64 ** 64 }}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 'x' | center(10 ** 9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(100) }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_templates_end_soon(bomb: str) -> None:
    template = ChatTemplate(bomb, SPECIAL, max_seconds=0.2)
    start = time.perf_counter()
    with pytest.raises(InputError):
        template.render([{"role": "user", "content": "x" * 1000}])
    assert time.perf_counter() - start < 15


def test_the_output_is_bounded_in_bytes() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {}, max_bytes=10)
    assert template.render([{"role": "user", "content": "ééé"}] * 1) == "ééé"
    with pytest.raises(InputError, match="at most 10 bytes"):
        template.render([{"role": "user", "content": "ééé"}] * 2)
    assert template.render([{"role": "user", "content": "again"}]) == "again"


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "1 to 1024 entries, got 0"),
        ([{"role": "user", "content": ""}] * 1025, "got 1025"),
        ("hello", "messages must be a list"),
        ([5], r"messages\[0\] must be an object"),
        ([{"content": "a"}], r"messages\[0\]\.role"),
        ([{"role": "us er", "content": "a"}], r"messages\[0\]\.role"),
        ([{"role": "user"}], r"content must be a string or a list of text parts, got NoneType"),
        ([{"role": "user", "content": 7}], "got int"),
        ([{"role": "user", "content": []}], "1 to 1024 parts, got 0"),
        ([{"role": "user", "content": ["a"]}], r"content\[0\] must be an object"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url is an image, and this model reads"),
        ([{"role": "user", "content": [{"type": "video_url"}]}], "'video_url'; only 'text' is supported"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "text must be a string, got int"),
        ([{"role": "user", "content": "a", "name": 5}], "name must be a string"),
        ([{"role": "user", "content": "a", "mood": {}}], "unsupported field 'mood'"),
    ],
)
def test_bad_messages_are_named(messages: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        compiled(CHATML).render(messages)


def test_what_a_template_raises_is_shown_cut_short() -> None:
    template = ChatTemplate("{{ raise_exception(messages[0].content) }}", {})
    with pytest.raises(InputError, match="roles must alternate"):
        template.render([{"role": "user", "content": "roles must alternate"}])
    with pytest.raises(InputError) as caught:
        template.render([{"role": "user", "content": "x" * 5000}])
    assert len(str(caught.value)) < 250


def test_fields_that_say_nothing_are_dropped() -> None:
    """As clients send back what a server answered."""
    template = ChatTemplate("{{ messages }}", {})
    said = {"role": "assistant", "content": "a", "name": "b"}
    empty = {"refusal": None, "tool_calls": [], "function_call": None, "audio": None, "reasoning_content": None}
    assert template.render([{**said, **empty}]) == template.render([said])


def test_only_variables_that_the_template_reads_can_be_set() -> None:
    source = "{{ bos_token }}{{ mode }}{{ messages | length }}{{ tools }}{{ raise_exception is defined }}"
    template = ChatTemplate(source, SPECIAL)
    assert template.variables == {"mode"}
    assert template.render(CHAT, mode="fast") == "<s>fast4NoneTrue"
    for name in ("bos_token", "raise_exception", "other", "range"):
        assert template.render(CHAT, **{name: "x"}) == template.render(CHAT)
    deep: list[Any] = []
    for _ in range(30):
        deep = [deep]
    for value in (object(), {1: 2}, float("nan"), [1] * 5000, deep, print):
        with pytest.raises(InputError, match="variables"):
            template.render(CHAT, mode=value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ ", "{% for x in y %}", "x" * (1 << 20) + "x", "{{ " + "(" * 5000])
def test_a_broken_template_stops_the_start(source: str) -> None:
    with pytest.raises(StartupError, match="chat template"):
        ChatTemplate(source, SPECIAL)


def test_where_templates_are_found(tmp_path: Path) -> None:
    config, one = tmp_path / "tokenizer_config.json", [{"role": "user", "content": "hi"}]

    def found(override: str | None = None) -> str | None:
        template = ChatTemplate.find(tmp_path, override)
        return None if template is None else template.render(one)

    assert found() is None
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D{{ eos_token }}"}]
    for value, expected in (("C{{ eos_token }}", "C</s>"), (named, "D</s>"), (named[:1], "T"), (None, None)):
        config.write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": value}))
        assert found() == expected
    config.write_text(json.dumps({"chat_template": [{"name": "a", "template": "A"}, {"name": "b", "template": "B"}]}))
    with pytest.raises(StartupError, match="no default"):
        found()
    for entries in ([{"name": ["default"], "template": "x"}, {"template": "y"}], [{"name": {}}], [{"name": "default"}],
                    [], [5], {"default": "x"}, 7):  # fmt: skip
        config.write_text(json.dumps({"chat_template": entries}))
        with pytest.raises(StartupError, match="no default"):
            found()
    (tmp_path / "chat_template.jinja").write_text("J")
    assert found() == "J"
    (tmp_path / "mine.jinja").write_text("M")
    assert found(str(tmp_path / "mine.jinja")) == "M"
    with pytest.raises(StartupError, match=re.escape("There is no chat template")):
        found(str(tmp_path / "absent.jinja"))
