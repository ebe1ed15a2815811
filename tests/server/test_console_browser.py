"""The console in a real Chromium, in `make test-full`, which installs Playwright, axe and Debian's `chromium`. Without
them these tests fail: `make .venv/.browser`.

QUIRE_CONSOLE_FRAMES=FILE keeps the frames a second beside a crowd.
"""

from __future__ import annotations

import base64
import functools
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from served_process import served

import quire
from quire.bench.machine import machine

CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.xdist_group(name="console_browser"),
]
FRAMES_FILE = os.environ.get("QUIRE_CONSOLE_FRAMES")
MOMENTS, CROWD, FRAMES, SECONDS = 20, 200, 30, 4
SMALL = ("--kv-tokens", "4096", "--swap-gib", "0.01")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


Scenes = Callable[[], dict[str, Any]]
OFTEN = """import sys
from quire.cli import main
from quire.server import console
console.MIN_POLL_SECONDS, console.ENGINE_SHARE = 0.02, 1.0
sys.exit(main())"""
"""A quire whose console looks often, so that it soon sees moments that /metrics sees too."""


@contextmanager
def serving(*options: str, program: tuple[str, str] = ("-m", "quire")) -> Iterator[str]:
    """A server of the bundled model, or of what `options` name, whose memory is small: its address."""
    command = (sys.executable, *program, "serve", "--port", "0")
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), *options, *SMALL, command=command) as server:
        yield server.ready().url


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as found:
        yield found


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The bundled model, of whose layers two attend to all and four to the last 64 tokens: two groups of pages."""
    folder = tmp_path_factory.mktemp("models") / "unlike"
    shutil.copytree(Path(quire.__file__).parent / "assets" / "tiny", folder)
    config = json.loads((folder / "config.json").read_text())
    types = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    (folder / "config.json").write_text(json.dumps({**config, "layer_types": types, "sliding_window": 64}))
    with serving(str(folder), "--page-sizes", "own", "--preemption", "swap", program=("-c", OFTEN)) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    assert CHROMIUM is not None, "there is no chromium: make .venv/.browser installs it, with apt-get"
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def seeing_url() -> Iterator[str]:
    with serving(str(Path(quire.__file__).parent / "assets" / "tiny-vision")) as found:
        yield found


@contextmanager
def console(
    chromium: Any, url: str, width: int = 1360, scheme: str = "light", scene: Scenes | None = None, status: int = 200
) -> Iterator[Any]:
    """The console, live, or with the events that `scene` returns. What it logs or throws, and whoever it asks
    elsewhere, fails the test; answers of `status` may be logged."""
    opened, faults, asked = chromium.new_page(viewport={"width": width, "height": 844}), list[str](), set[str]()
    opened.emulate_media(color_scheme=scheme)
    expected = f"Failed to load resource: the server responded with a status of {status} "
    opened.on("console", lambda message: faults.append(message.text))
    if scene:
        told = functools.partial(json.dumps, separators=(",", ":"))
        opened.route(
            "**/console/events",
            lambda route: route.fulfill(body=f"data: {told(scene())}\n\n", content_type="text/event-stream"),
        )
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: asked.add(re.sub(r"(//[^/]+)/.*", r"\1", request.url)))
    opened.goto(f"{url}/console")
    opened.wait_for_selector("body[data-scenes]")
    yield opened
    opened.close()
    assert asked <= {url, "data:,"}
    assert [fault for fault in faults if not fault.startswith(expected)] == []


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    with console(chromium, url) as opened:
        yield opened


def post(url: str, body: dict[str, Any]) -> None:
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=120).status_code == 200


SHARED = "Once upon a time there was a fox who lived in a forest with many other animals and liked to run. " * 2
LONG = {"ignore_eos": True, "temperature": 0.8}


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def answered(page: Any) -> None:
    page.wait_for_selector("#send:not([disabled])")


def test_a_conversation_by_the_keyboard_alone(page: Any) -> None:
    page.keyboard.press("Tab")  # the link that skips to the message
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("What colour is the sky?")
    page.keyboard.press("Enter")
    answered(page)
    assert "blue" in page.inner_text("#log").lower()


def test_text_is_never_html(page: Any) -> None:
    say(page, "<img src=x onerror=alert(1)><b>bold</b>")
    answered(page)
    assert "<b>bold</b>" in page.inner_text("#log")
    assert page.locator("#log img, #log b b").count() == 0


def answering(page: Any, *deltas: dict[str, str]) -> None:
    """The next answer consists of `deltas`, which the model didn't write."""
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    body = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"), times=1
    )


@contextmanager
def bodies(page: Any) -> Iterator[list[Any]]:
    """The bodies of chats that the page sends."""
    sent = list[Any]()

    def keep(request: Any) -> None:
        if request.url.endswith("/v1/chat/completions"):
            sent.append(request.post_data_json)

    page.on("request", keep)
    yield sent
    page.remove_listener("request", keep)


def test_thoughts_stand_apart_and_are_never_html(page: Any) -> None:
    thoughts = [{"reasoning_content": text} for text in ("<b>let me", " see</b>")]
    answering(page, *thoughts, {"content": "It is blue."})
    say(page, "What colour is the sky?")
    page.wait_for_selector("#log .markdown p")
    assert page.locator("#log details:not([open]) summary").inner_text() == "thoughts"
    page.click("#log summary")
    assert page.inner_text("#log .thoughts .text") == "<b>let me see</b>"
    assert page.inner_text("#log .markdown") == "It is blue."
    with bodies(page) as sent:
        say(page, "And then?")
        answered(page)
    assert sent[0]["messages"][1] == {"role": "assistant", "content": "It is blue."}


def test_only_parameters_that_were_set_are_sent(page: Any) -> None:
    with bodies(page) as sent:
        say(page, "What colour is the sky?")
        answered(page)
        page.click("summary")
        for name, value in (("temperature", "0"), ("max_tokens", "5"), ("seed", "7")):
            page.fill(f"#{name}", value)
        say(page, "And the sea?")
        answered(page)
    assert {**sent[0], "messages": len(sent[0]["messages"])} == {"messages": 1, "stream": True}
    assert {**sent[1], "messages": len(sent[1]["messages"])} == {
        "messages": 3, "stream": True, "temperature": 0, "max_tokens": 5, "seed": 7
    }  # fmt: skip


LINK = 'rel="noopener noreferrer" target="_blank"'
MARKDOWN = [
    ("# One\n###### Six `c`", "<h3>One</h3><h6>Six <code>c</code></h6>"),
    ("a **b** *c* ***d*** ~~e~~ _g_ `h*i*`", "<p>a <strong>b</strong> <em>c</em> <strong><em>d</em></strong> "
     "<del>e</del> <em>g</em> <code>h*i*</code></p>"),
    ("*it **bold** more* snake_case_name 2 * 3 * 4 \\*no\\* **no", "<p><em>it <strong>bold</strong> more</em> "
     "snake_case_name 2 * 3 * 4 *no* **no</p>"),
    ("text\n1. a\n2. b\n   - c\n   - d\n\n3. e", '<p>text</p><ol start="1"><li><p>a</p></li><li><p>b</p><ul><li>'
     "<p>c</p></li><li><p>d</p></li></ul></li><li><p>e</p></li></ol>"),
    ("In\n1984. it was\n\n7) so", '<p>In\n1984. it was</p><ol start="7"><li><p>so</p></li></ol>'),
    ("| a | b |\n|---|:-:|\n| **1** | x \\| y |\nafter", '<div class="scroll" tabindex="0"><table><thead><tr>'
     '<th style="text-align: left;">a</th><th style="text-align: center;">b</th></tr></thead><tbody><tr>'
     '<td style="text-align: left;"><strong>1</strong></td><td style="text-align: center;">x | y</td></tr></tbody>'
     "</table></div><p>after</p>"),
    ("- see:\n  ```js\n  a<b>\n\n    c\n  ```\n- end", '<ul><li><p>see:</p><div class="code"><div><span>js</span>'
     '<button type="button">Copy</button></div><pre tabindex="0"><code>a&lt;b&gt;\n\n  c</code></pre></div></li>'
     "<li><p>end</p></li></ul>"),
    ("[`k` it](https://a.b/c_(d)) https://a.b/c. ![p](http://a.b/i.png)", f'<p><a href="https://a.b/c_(d)" {LINK}>'
     f'<code>k</code> it</a> <a href="https://a.b/c" {LINK}>https://a.b/c</a>. '
     f'<a href="http://a.b/i.png" {LINK}>p</a></p>'),
    ("[x](javascript:alert(1)) [y](data:text/html,z) [z](//a.b)", "<p>[x](javascript:alert(1)) [y](data:text/html,z) "
     "[z](//a.b)</p>"),
    ("<img src=x onerror=alert(1)>\n\n---\n> q", "<p>&lt;img src=x onerror=alert(1)&gt;</p><hr><blockquote><p>q</p>"
     "</blockquote>"),
    ("> " * 9 + "deep", "<blockquote>" * 8 + "<p>&gt; deep</p>" + "</blockquote>" * 8),
]  # fmt: skip


@pytest.mark.parametrize(("text", "html"), MARKDOWN)
def test_markdown_becomes_elements_however_it_came(page: Any, text: str, html: str) -> None:
    made = page.evaluate(
        """text => import('./markdown.js').then(({render}) => {
            const whole = document.createElement("div"), grown = document.createElement("div");
            render(whole, text);
            for (let length = 0; length <= text.length; length++) render(grown, text.slice(0, length));
            return [whole.innerHTML, grown.innerHTML];
        })""",
        text,
    )
    assert made == [html, html]


def test_an_answer_is_drawn_once_a_frame_and_what_is_done_stays(page: Any) -> None:
    """Frames are withheld: so however many events come, one frame is asked for, beside the engine's."""
    page.evaluate("() => { window.held = []; window.requestAnimationFrame = (draw) => held.push(draw); }")
    answering(page, *({"content": text} for text in ("# A", " tale\n\n", *["word "] * 200)))
    say(page, "Tell me a tale.")
    answered(page)
    assert page.inner_text("#log .turn:last-child") == "model"
    assert page.evaluate("held.length") <= 2
    page.evaluate("held.splice(0).forEach((draw) => draw())")
    assert page.inner_text("#log .markdown h3") == "A tale"
    assert page.inner_text("#log .markdown p").split() == ["word"] * 200
    kept = """import('./markdown.js').then(({render}) => {
        const place = document.querySelector("#log .markdown"), [head, last] = place.children;
        render(place, "# A tale\\n\\nword and more");
        return [place.children[0] === head, place.children[1] === last, place.children.length];
    })"""
    assert page.evaluate(kept) == [True, False, 2]


@pytest.mark.parametrize("secure", [True, False])
def test_code_is_copied(page: Any, secure: bool) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answering(page, {"content": f"```\nfirst {secure}\n  second\n```"})
    say(page, "Some code, please.")
    page.wait_for_selector("#log .code")
    if not secure:  # as over plain HTTP from another machine
        page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined, configurable: true})")
    page.click("#log .code button")
    page.wait_for_selector("#log .code button:text('Copied')")
    if not secure:
        page.evaluate("delete navigator.clipboard")
    assert page.evaluate("navigator.clipboard.readText()") == f"first {secure}\n  second"


def reloaded(page: Any) -> None:
    page.reload()
    page.wait_for_selector("body[data-scenes]")


def test_a_reload_keeps_the_conversation_until_a_new_one(page: Any) -> None:
    answering(page, {"content": "It is **blue**."})
    say(page, "What colour is the sky?")
    page.wait_for_selector("#log strong")
    before = page.inner_html("#log")
    reloaded(page)
    assert page.inner_html("#log") == before
    with bodies(page) as sent:
        say(page, "And the sea?")
        answered(page)
    assert [one["content"] for one in sent[0]["messages"]] == [
        "What colour is the sky?", "It is **blue**.", "And the sea?"
    ]  # fmt: skip
    page.click("#clear")
    reloaded(page)
    assert page.inner_text("#log") == ""


def test_what_is_kept_is_bounded(page: Any) -> None:
    for name in "abc":
        answering(page, {"content": name * 200_000})
        say(page, f"Many {name}, please.")
        answered(page)
    assert 400_000 < page.evaluate("sessionStorage.getItem('quire-conversation').length") <= 500_000
    reloaded(page)
    texts = page.locator("#log .turn").all_inner_texts()
    assert [text[:24].split()[:2] for text in texts] == [
        ["you", "Many"], ["model", "b" * 17], ["you", "Many"], ["model", "c" * 17]
    ]  # fmt: skip


def test_an_answer_under_way_is_kept(page: Any) -> None:
    endless(page)
    say(page, "Tell me a long story.")
    page.wait_for_function("() => document.querySelector('#log .markdown')?.innerText.length > 20")
    reloaded(page)
    assert len(page.inner_text("#log .markdown")) > 20
    page.wait_for_selector("#more:text('none')")


PICTURE = Path(quire.__file__).parents[2] / "docs" / "console.png"
GIVE = """([how, data, name]) => {
    const given = new DataTransfer(), bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
    given.items.add(new File([bytes], name, {type: "image/png"}));
    const event = how === "paste" ? new ClipboardEvent(how, {clipboardData: given, bubbles: true, cancelable: true})
        : new DragEvent(how, {dataTransfer: given, bubbles: true, cancelable: true});
    return document.getElementById("message").dispatchEvent(event);
}"""
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def test_pictures_are_sent_and_not_kept(chromium: Any, seeing_url: str) -> None:
    with console(chromium, seeing_url) as page, bodies(page) as sent:
        page.wait_for_selector("#pictures:not([hidden])")
        page.set_input_files("#picture", PICTURE)
        page.wait_for_selector("#attached img")
        for count, how in ((2, "paste"), (3, "drop")):
            assert page.evaluate(GIVE, [how, DOT, "dot.png"]) is False  # the browser doesn't open it
            page.wait_for_selector(f"#attached img >> nth={count - 1}")
        page.click("#attached button[aria-label='Remove picture 2']")
        page.click("#attached button[aria-label='Remove picture 2']")
        say(page, "What is it?")
        answered(page)
        content = sent[0]["messages"][0]["content"]
        url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
        assert content == [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        assert page.locator("#log .error").count() == 0
        assert page.locator("#log img").count() == 1
        assert page.locator("#attached img").count() == 0
        reloaded(page)
        assert "Pictures that were not kept: 1" in page.inner_text("#log")
        assert "without pictures" in page.inner_text("#ask")
        assert page.locator("#log img").count() == 0


def test_a_refused_picture_stays_with_its_message(chromium: Any, seeing_url: str) -> None:
    with console(chromium, seeing_url, status=400) as page:
        page.wait_for_selector("#pictures:not([hidden])")
        page.set_input_files("#picture", {"name": "a.png", "mimeType": "image/png", "buffer": b"no picture"})
        page.wait_for_selector("#attached img")
        say(page, "What is it?")
        answered(page)
        assert "it is no PNG, JPEG, WebP or GIF" in page.inner_text("#log .error")
        assert page.input_value("#message") == "What is it?"
        assert page.locator("#attached img").count() == 1


def test_a_model_of_text_takes_no_pictures(page: Any) -> None:
    assert page.locator("#pictures").is_hidden()
    page.evaluate(GIVE, ["paste", DOT, "dot.png"])
    assert page.inner_text("#note") == "This model reads only text: it takes no pictures."
    assert page.locator("#attached img").count() == 0


def endless(page: Any) -> None:
    """The next answer ends at 3000 tokens, and not before."""
    page.click("summary")
    page.fill("#max_tokens", "3000")

    def go_on(route: Any) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", go_on, times=1)


def test_a_stream_grows_and_stops(page: Any) -> None:
    endless(page)
    say(page, "Tell me a long story.")
    lengths = [0]
    for _ in range(3):
        page.wait_for_function("before => document.getElementById('log').innerText.length > before", arg=lengths[-1])
        lengths.append(len(page.inner_text("#log")))
    page.click("#stop")
    answered(page)
    assert "stopped" in page.inner_text("#log")
    page.wait_for_selector("#more:text('none')")  # the engine gave it up too
    assert sorted(set(lengths)) == lengths


def test_the_log_follows_an_answer_unless_it_is_scrolled_up(page: Any) -> None:
    endless(page)
    say(page, "Tell me a long story.")
    long = "log.scrollHeight > log.clientHeight + more"
    page.wait_for_function(f"more => {{ const log = document.getElementById('log'); return {long}; }}", arg=200)
    assert page.evaluate("document.getElementById('log').scrollTop") > 0
    page.evaluate("document.getElementById('log').scrollTop = 0")
    page.wait_for_function(f"more => {{ const log = document.getElementById('log'); return {long}; }}", arg=600)
    assert page.evaluate("document.getElementById('log').scrollTop") == 0
    page.click("#stop")
    answered(page)
    page.wait_for_selector("#more:text('none')")


def leaves(page: Any) -> list[str]:
    """The texts of the last turn's branches, from the root to each end, in order of the choices."""
    found: list[list[str]] = page.evaluate(
        """() => [...document.querySelectorAll("#log .turn:last-child .tree li")]
            .filter((item) => !item.querySelector("ul")).flatMap((item) => {
                let text = "";
                for (let at = item; at && at.matches("li"); at = at.parentElement.parentElement)
                    text = at.querySelector(":scope > .text").textContent + text;
                return item.querySelector(":scope > .fate").textContent.match(/#\\d+/g).map((name) => [name, text]);
            })"""
    )
    return [text for _, text in sorted(found, key=lambda leaf: int(leaf[0][1:]))]


@pytest.mark.parametrize(("how", "coloured"), [("beams", True), ("beams", False), ("samples", True)])
def test_beams_are_a_tree(page: Any, how: str, coloured: bool) -> None:
    """What beams or samples have in common is said once, and each of them is there from the root to a leaf."""
    texts: dict[int, str] = {}

    def keep(route: Any) -> None:
        response = route.fetch()
        for line in response.text().splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        route.fulfill(response=response)

    page.click("summary")
    for name, value in (("#n", "4"), ("#max_tokens", "40"), ("#temperature", "1.5")):
        page.fill(name, value)
    page.select_option("#how", how)
    if coloured:
        page.check("#logprobs")
    page.route("**/v1/chat/completions", keep)
    say(page, "Tell me a story about a fox.")
    answered(page)
    items = ".tree .tree" if how == "beams" else ".tree li"  # samples may have nothing in common
    page.wait_for_function(f"() => document.querySelectorAll('#log {items}').length > 0")
    assert len(texts) == 4
    assert leaves(page) == [texts[at] for at in range(4)]
    if how == "beams":
        root = page.locator("#log .tree > li > .text").first.inner_text()
        assert len(root) > 20
        assert all(text.startswith(root) for text in texts.values())
    assert (page.locator("#log span[title$='%']").count() > 4) is coloured


@pytest.mark.parametrize(
    ("parts", "tree"),
    [
        ([["The sk", "y is blue."], ["The sky", " is", " grey."]], ["The sky is", " blue.", " grey."]),
        ([["The sky"], ["The skies"]], ["The", " sky", " skies"]),
        ([["空は青", "い"], ["空は灰色"]], ["空は", "青い", "灰色"]),
        ([["It is"], ["It is", " so"]], ["It is", "", " so"]),
        ([["It is so"], ["It ", "is so"]], ["It is so"]),
        ([["a b c"], ["a b d"], ["a e"]], ["a", " b", " c", " d", " e"]),
        ([["<b>a</b> c"], ["<b>a</b> d"]], ["<b>a</b>", " c", " d"]),
    ],
)
def test_texts_part_at_words_however_they_came(page: Any, parts: list[list[str]], tree: list[str]) -> None:
    samples = [{"parts": [[text, None] for text in texts], "fate": ""} for texts in parts]
    page.evaluate(
        "samples => import('./tree.js').then(({show}) => show(document.querySelector('#log'), samples))", samples
    )
    assert page.locator("#log .text").all_text_contents() == tree


def serious_faults(axe: Any, page: Any) -> list[tuple[str, str]]:
    found = axe.run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]


@contextmanager
def load(url: str, clients: int) -> Iterator[None]:
    """So many clients that ask one thing after another, every fourth for four samples; prompts share pages."""
    over = threading.Event()

    def ask(client: int) -> None:
        while not over.is_set():
            prompt = f"{SHARED}{client} {time.monotonic()}"
            post(url, {"prompt": prompt, "max_tokens": 120, "n": 1 if client % 4 else 4, **LONG})

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def scrape(url: str) -> dict[str, float]:
    """The numbers of /metrics, by name and by what distinguishes those of one name."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^quire_(\w+)\{(.*?)\} (\S+)$", text, re.MULTILINE)
    labels = [
        (name, re.findall(r'(?:category|layer_type|way)="([^"]+)"', given), value) for name, given, value in found
    ]
    return {" ".join([name, *given]): float(value) for name, given, value in labels}


WATCH = """() => {
    window.moments = [];
    new MutationObserver(() => {
        const canvases = [...document.querySelectorAll("#groups canvas")].map((canvas) => ({...canvas.dataset}));
        window.moments.push({...document.body.dataset, canvases});
    }).observe(document.body, {attributeFilter: ["data-scenes"]});
}"""
Moment = tuple[dict[str, Any], dict[str, float]]


def moments(page: Any, url: str) -> Iterator[Moment]:
    """What the page drew and what /metrics said of one and the same moment between two steps."""
    page.evaluate(WATCH)
    drawn, said = dict[tuple[float, float], Any](), dict[tuple[float, float], dict[str, float]]()
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline:
        for one in page.evaluate("window.moments.splice(0)"):
            drawn[float(one["steps"]), float(one["seconds"])] = one
        counted = scrape(url)
        said[counted["engine_steps_total"], counted["engine_step_seconds_total"]] = counted
        for both in drawn.keys() & said.keys():
            yield drawn.pop(both), said.pop(both)


def check_moment(drawn: dict[str, Any], counted: dict[str, float]) -> Counter[str]:
    """Every cell of every group is counted by /metrics. What was seen, in pages."""
    maps = [{name: int(value) for name, value in one.items() if name != "kind"} for one in drawn["canvases"]]
    kinds = [one["kind"] for one in drawn["canvases"]]
    devices, hosts, seen = maps[::2], maps[1::2], Counter[str]()
    assert kinds == ["full", "full", "window-64", "window-64"]
    for kind, one in zip(kinds[::2], devices):
        size, named = one["bytes"], one["shared"] + one["owned"] + one["pinned"]
        assert named == one["used"]
        assert named * size == counted[f"kv_layer_bytes used {kind}"] + counted[f"kv_layer_bytes internal {kind}"]
        assert one["cached"] * size == counted[f"kv_layer_bytes cached {kind}"]
        assert one["pages"] == named + one["cached"] + one["free"]
        assert one["shared"] <= one["saved"]
        assert bool(one["shared"]) == bool(one["saved"])
        seen.update({name: one[name] for name in ("owned", "shared", "cached", "free")})
    assert sum(one["free"] * one["bytes"] for one in devices) == counted["kv_bytes free"]
    assert sum(one["saved"] * one["bytes"] for one in devices) == counted["kv_sharing_saved_bytes"]
    assert sum(one["pages"] for one in hosts) == counted["host_pages"]
    assert sum(one["shared"] + one["owned"] for one in hosts) == counted["host_pages_used"]
    seen["swapped"] = sum(one["shared"] + one["owned"] for one in hosts)
    return seen


def test_counts_are_those_of_the_metrics(chromium: Any, unlike: str) -> None:
    """At moments of a load that preempts, of layers of two kinds."""
    before, checked, seen = scrape(unlike)["preemptions_total swap"], 0, Counter[str]()
    with console(chromium, unlike) as page, load(unlike, 40):
        for drawn, counted in moments(page, unlike):
            found = check_moment(drawn, counted)
            checked += found["owned"] > 0
            seen.update(name for name, pages in found.items() if pages)
            if checked >= MOMENTS and min(seen[name] for name in ("shared", "cached", "free", "swapped")) > 2:
                break
    print(f"{checked} moments, of which with such pages: {dict(seen)}")
    assert checked >= MOMENTS
    assert min(seen[name] for name in ("shared", "cached", "free", "swapped")) > 2
    assert scrape(unlike)["preemptions_total swap"] > before


def test_the_last_steps_are_told(page: Any, url: str) -> None:
    page.wait_for_selector("#more:text('none')")
    post(url, {"prompt": list(range(100, 140)), "max_tokens": 4, **LONG})
    page.wait_for_function("() => document.querySelector('#steps tr:nth-child(4)')?.cells[1].textContent === '40'")
    cells = [row.split("\t") for row in page.inner_text("#steps").splitlines()]
    assert [row[1:5] for row in cells[:4]] == [["0", "1", "0", "0"]] * 3 + [["40", "0", "0", "0"]]
    assert [int(row[0]) - int(cells[3][0]) for row in cells[:4]] == [3, 2, 1, 0]
    assert all(float(row[5]) > 0 for row in cells[:4])


def snapshot(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/console/events") as answer:
        return dict(json.loads(next(line for line in answer if line.startswith(b"data: "))[6:]))


REQUEST = {"state": "running", "branches": 1, "colour": 4, "prompt": 9, "tokens": 1, "computed": 9, "pages": 1,
           "found": 0, "preempted": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("count", "unlisted"), [(0, ""), (12, ""), (50, ""), (200, "and 72 more, which are not listed")]
)
def test_a_table_says_how_many_requests_there_are_more(chromium: Any, url: str, count: int, unlisted: str) -> None:
    requests = [{**REQUEST, "id": f"one-{i}"} for i in range(min(count, 128))]
    told = {**snapshot(url), "requests": requests, "requests_in_all": count}
    with console(chromium, url, scene=lambda: told) as page:
        rows, all_ = page.locator("#requests tr"), page.locator("#all")
        assert page.inner_text("#count") == str(count)
        assert rows.count() == min(count, 12)
        assert page.inner_text("#more") == ("" if count else "none")
        assert page.locator("#engine table:has(#requests)").is_visible() is (count > 0)
        assert all_.is_visible() is (count > 12)
        if count > 12:
            assert all_.inner_text() == f"{count - 12} more"
            all_.click()
            assert rows.count() == min(count, 128)
            assert page.inner_text("#more") == unlisted
            all_.click()
            assert rows.count() == 12


def test_a_layer_type_of_states_and_a_table_of_full_width(chromium: Any, url: str) -> None:
    told = snapshot(url)
    [group] = told["groups"]
    told["groups"] = [group, {**group, "kind": "state", "layers": 1, "page_tokens": 128}]
    told |= {"requests": [{**REQUEST, "id": "cmpl-" + "8" * 32, "prompt": 100_000}], "requests_in_all": 1}
    with console(chromium, url, scene=lambda: told) as page:
        captions = page.locator("#groups figcaption").all_inner_texts()
        assert re.match(r"full, 6 layers: \d+ pages of 16 tokens, ", captions[0])
        states = re.compile(r"state, 1 layer: \d+ pages of a state, cached after every 128 tokens, ")
        assert any(map(states.match, captions))
        table = page.locator("[aria-label=Requests]")
        assert table.evaluate("(area) => area.scrollWidth - area.clientWidth") == 0


def test_colours_of_requests_are_unlike_those_of_shared_pages_and_prefixes(page: Any) -> None:
    hues = page.evaluate("""async () => {
      const { palette } = await import("/console/draw.js");
      return palette.slice(4).map((text) => Number(/hsl\\(([\\d.]+)/.exec(text)[1]));
    }""")
    assert len(set(hues)) > 100
    assert all(40 <= hue < 240 or 310 <= hue < 360 for hue in hues)


def test_charts_have_a_scale_and_a_time(chromium: Any, url: str) -> None:
    """Events come a second apart, as the page connects anew after each."""
    told, running = snapshot(url), itertools.chain([3, 17], itertools.repeat(5))
    with console(chromium, url, scene=lambda: {**told, "running": next(running)}) as page:
        page.wait_for_function("() => Number(document.body.dataset.scenes) >= 3")
        texts = page.locator("#charts figure").all_inner_texts()
        [text] = [text for text in texts if text.startswith("running")]
        assert re.fullmatch(r"running: 5\s+min 3, max 17, last [2-9] s", text)
        label = page.get_attribute("#charts figure:has-text('running') canvas", "aria-label")
        assert label.startswith("running: 5; min 3, max 17, last ")
        assert page.locator("#charts figure:visible").count() == 4  # there were no latencies: no empty charts


def test_all_numbers_are_explained(page: Any) -> None:
    found = page.evaluate(
        """() => [...document.querySelectorAll("#numbers > div, #charts > figure")].map((one) => {
            const name = one.querySelector("dt, figcaption").textContent.split(":")[0];
            const term = [...document.querySelectorAll("#help dt")].find((dt) => !name || dt.textContent === name);
            return [name, one.title, term?.nextSibling.textContent];
        })"""
    )
    assert len(found) == 18
    assert [(name, title) for name, title, text in found if name and (not title or title != text)] == []
    assert "prefix hit rate, %" in [name for name, _, _ in found]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone(chromium: Any, url: str, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    requests = [{**REQUEST, "id": f"a-request-with-a-long-name-{i}"} for i in range(50)]
    told = {**snapshot(url), "requests": requests, "requests_in_all": 50}
    with console(chromium, url, 390, scheme, scene=lambda: told) as page:
        answering(page, {"content": "\n\n".join(text for text, _ in MARKDOWN) + "\n\n" + "word" * 200})
        say(page, "What colour is the sky?")
        page.wait_for_selector("#log table")
        assert page.locator("#engine details[open]").count() == 0
        width, height = page.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        assert width == 390
        assert height <= 1500
        for summary in page.locator("#engine summary").all():
            summary.click()
        page.wait_for_function("() => document.querySelector('#groups canvas').clientWidth > 300")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("[...document.querySelectorAll('.scroll')].every((one) => one.clientWidth <= 390)")
        assert serious_faults(Axe(), page) == []


PAINTED = """name => {
    const canvas = document.querySelector("#groups canvas"), {width, height} = canvas;
    const copy = new OffscreenCanvas(width, height).getContext("2d", {willReadFrequently: true});
    copy.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    copy.fillRect(0, 0, 1, 1);
    const wanted = copy.getImageData(0, 0, 1, 1).data.join();
    copy.clearRect(0, 0, 1, 1);
    copy.drawImage(canvas, 0, 0);
    const {data} = copy.getImageData(0, 0, width, height);
    let found = 0;
    for (let at = 0; at < data.length; at += 4) found += data.slice(at, at + 4).join() === wanted;
    return found;
}"""


def test_four_samples_are_seen_to_share(page: Any, url: str) -> None:
    page.wait_for_selector("#more:text('none')")
    assert page.evaluate(PAINTED, "--shared") == 0
    body = {"prompt": SHARED, "n": 4, "max_tokens": 900, **LONG}
    asking = threading.Thread(target=post, args=(url, body))
    asking.start()
    page.wait_for_function("() => Number(document.querySelector('#groups canvas').dataset.shared) > 0")
    assert page.evaluate(PAINTED, "--shared") > 0
    asking.join()
    page.wait_for_selector("#more:text('none')")
    assert page.evaluate(PAINTED, "--shared") == 0


def test_a_crowd_leaves_frames_enough(chromium: Any, page: Any, url: str) -> None:
    with load(url, CROWD):
        time.sleep(1)  # all of the crowd is under way when frames are counted
        frames = page.evaluate(
            """seconds => new Promise((resolve) => {
                const times = [performance.now()];
                const frame = (now) => {
                    times.push(now);
                    if (now < times[0] + 1000 * seconds) return requestAnimationFrame(frame);
                    const gaps = times.slice(1).map((time, i) => time - times[i]).sort((a, b) => a - b);
                    resolve({
                        a_second: gaps.length / ((now - times[0]) / 1000), median_ms: gaps[gaps.length >> 1],
                        longest_ms: gaps[gaps.length - 1],
                    });
                };
                requestAnimationFrame(frame);
            })""",
            SECONDS,
        )
    print(frames)
    told = {
        "what": f"frames of the console in {SECONDS} s while {CROWD} requests of 120 tokens run on the same cores",
        "command": "QUIRE_CONSOLE_FRAMES=FILE python -m pytest -m full tests/server/test_console_browser.py -k crowd",
        "browser": chromium.version, "load_average": os.getloadavg()[0], "machine": machine(), "frames": frames,
    }  # fmt: skip
    if FRAMES_FILE:
        Path(FRAMES_FILE).write_text(json.dumps(told, indent=1) + "\n")
    assert frames["a_second"] >= FRAMES


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Any, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page.emulate_media(color_scheme=scheme)
    say(page, "What colour is the sky?")
    answered(page)
    assert serious_faults(Axe(), page) == []
