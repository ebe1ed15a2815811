"""The console in a real Chromium: where Playwright and Chromium are there, in `make soak` alone.

QUIRE_CONSOLE_PICTURES=DIR keeps pictures of it. Chromium is looked for as `chromium`; Playwright's own isn't needed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
MOMENTS, CROWD, FRAMES = 20, 200, 30
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--kv-tokens", "4096", "--swap-gib", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = next(line for line in server.stdout if " at http://" in line)
        threading.Thread(target=server.stdout.read, daemon=True).start()
        yield re.findall(r"http://\S+", line)[0]
        server.terminate()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, url: str) -> Iterator[Any]:
    """The console, live. What it logs or throws, and whoever it asks elsewhere, fails the test."""
    opened, faults, asked = chromium.new_page(viewport={"width": 1360, "height": 900}), list[str](), set[str]()
    opened.on("console", lambda message: faults.append(message.text))
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: asked.add(re.sub(r"(//[^/]+)/.*", r"\1", request.url)))
    opened.goto(f"{url}/console")
    opened.wait_for_selector("body[data-scenes]")
    yield opened
    opened.close()
    assert asked <= {url, "data:,"}
    assert not faults


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), kind)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.loads(answer.read()))


def crowd(url: str, count: int, tokens: int) -> list[threading.Thread]:
    """Requests at once, every fourth with four samples; prompts share pages."""
    shared = "Once upon a time there was a fox who lived in a forest with many other animals and liked to run. " * 2
    same = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.8}
    bodies = [{"prompt": f"{shared}{i}", "n": 1 if i % 4 else 4, **same} for i in range(count)]
    threads = [threading.Thread(target=post, args=(url, body)) for body in bodies]
    for thread in threads:
        thread.start()
    return threads


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(r'quire_kv_bytes\{category="(\w+)".*?\} (\S+)', text)
    preempted = re.findall(r"\nquire_preemptions\w*\{.*?\} (\S+)", text)
    return {**{f"kv {name}": float(value) for name, value in found}, "preempted": sum(map(float, preempted))}


def picture(page: Any, name: str) -> None:
    folder = os.environ.get("QUIRE_CONSOLE_PICTURES")
    if folder:
        page.screenshot(path=str(Path(folder) / name))


def say(page: Any, text: str) -> None:
    page.fill("#message", text)
    page.press("#message", "Enter")


def test_a_conversation_by_the_keyboard_alone(page: Any) -> None:
    page.keyboard.press("Tab")  # the link that skips to the message
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "message"
    page.keyboard.type("What colour is the sky?")
    page.keyboard.press("Enter")
    page.wait_for_selector("#send:not([disabled])")
    assert "blue" in page.inner_text("#log").lower()


def test_text_is_never_html(page: Any) -> None:
    say(page, "<img src=x onerror=alert(1)><b>bold</b>")
    page.wait_for_selector("#send:not([disabled])")
    assert "<b>bold</b>" in page.inner_text("#log")
    assert page.locator("#log img, #log b b").count() == 0


def test_thoughts_stand_apart_and_are_never_html(page: Any) -> None:
    deltas = [{"reasoning_content": "<b>let me"}, {"reasoning_content": " see</b>"}, {"content": "It is blue."}]
    choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
    body = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    say(page, "What colour is the sky?")
    page.wait_for_selector("#log .tree")
    assert page.locator("#log details:not([open]) summary").inner_text() == "thoughts"
    page.click("#log summary")
    assert page.inner_text("#log .thoughts .text") == "<b>let me see</b>"
    assert page.inner_text("#log .tree") == "It is blue."
    asked = list[Any]()
    page.on("request", lambda request: asked.append(request.post_data_json))
    say(page, "And then?")
    page.wait_for_selector("#log .turn:nth-of-type(4) .tree")
    assert asked[0]["messages"][1] == {"role": "assistant", "content": "It is blue."}


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
    page.wait_for_selector("#send:not([disabled])")
    assert "stopped" in page.inner_text("#log")
    page.wait_for_selector("#more:text('none')")  # the engine gave it up too
    assert sorted(set(lengths)) == lengths


def test_a_new_conversation_leaves_the_answer_under_way(page: Any) -> None:
    asked = list[Any]()
    page.on("request", lambda request: "/v1/chat" in request.url and asked.append(request.post_data_json))
    endless(page)
    say(page, "Tell me a long story.")
    page.wait_for_selector("#log .tree")
    page.click("#clear")
    assert page.inner_text("#log") == ""
    page.fill("#max_tokens", "8")
    say(page, "What colour is the sky?")  # at once: the old answer holds nothing up
    page.wait_for_selector("#log .tree")
    page.wait_for_selector("#send:not([disabled])")
    say(page, "And the grass?")
    page.wait_for_selector("#log .turn:nth-of-type(4) .tree")
    page.wait_for_selector("#send:not([disabled])")
    assert [[turn["role"] for turn in body["messages"]] for body in asked] == [
        ["user"], ["user"], ["user", "assistant", "user"],
    ]  # fmt: skip
    assert asked[2]["messages"][0]["content"] == "What colour is the sky?"
    page.wait_for_selector("#more:text('none')")  # the engine gave it up


def test_samples_are_a_tree(page: Any) -> None:
    page.click("summary")
    page.fill("#n", "4")
    page.fill("#temperature", "1.5")
    page.check("#logprobs")
    say(page, "Tell me a story about a fox.")
    page.wait_for_selector("#send:not([disabled])")
    assert page.locator("#log .tree li").count() > 2
    assert page.locator("#log span[title$='%']").count() > 4
    picture(page, "console_chat.png")


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


@pytest.mark.parametrize("coloured", [True, False])
def test_beams_are_a_tree(page: Any, coloured: bool) -> None:
    """What beams have in common is said once, and each of them is there from the root to a leaf."""
    texts: dict[int, str] = {}

    def keep(route: Any) -> None:
        response = route.fetch()
        for line in response.text().splitlines():
            for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
        route.fulfill(response=response)

    page.click("summary")
    page.fill("#n", "4")
    page.fill("#max_tokens", "40")
    page.select_option("#how", "beams")
    if coloured:
        page.check("#logprobs")
    page.route("**/v1/chat/completions", keep)
    say(page, "Tell me a story about a fox.")
    page.wait_for_selector("#send:not([disabled])")
    page.wait_for_function("document.querySelectorAll('#log .tree .tree').length > 0")
    assert len(texts) == 4
    assert leaves(page) == [texts[at] for at in range(4)]
    root = page.locator("#log .tree > li > .text").first.inner_text()
    assert len(root) > 20
    assert all(text.startswith(root) for text in texts.values())
    assert (page.locator("#log span[title$='%']").count() > 4) is coloured
    picture(page, f"console_beams_{'coloured' if coloured else 'plain'}.png")


@pytest.mark.parametrize(
    ("said", "tree"),
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
def test_texts_part_at_words_however_they_came(page: Any, said: list[list[str]], tree: list[str]) -> None:
    samples = [{"said": [[text, None] for text in texts], "fate": ""} for texts in said]
    page.evaluate(
        "samples => import('./tree.js').then(({show}) => show(document.querySelector('#log'), samples))", samples
    )
    assert page.locator("#log .text").all_text_contents() == tree


def test_counts_are_those_of_the_metrics(page: Any, url: str) -> None:
    """At moments between bursts that preempt."""
    before = metrics(url)["preempted"]
    for moment in range(MOMENTS):
        for thread in crowd(url, 80, 100 + moment):
            thread.join()
        deadline = time.monotonic() + 10
        while True:
            counted = metrics(url)
            data = page.locator("#groups canvas").first.evaluate("canvas => ({...canvas.dataset})")
            told = {name: int(value) for name, value in data.items()}
            held = sum(counted[f"kv {name}"] for name in ("used", "reserved", "internal"))
            total = sum(size for name, size in counted.items() if name.startswith("kv "))
            size = total / told["pages"]
            if (told["used"] * size, told["cached"] * size) == (held, counted["kv cached"]):
                break
            assert time.monotonic() < deadline, (moment, told, counted)
    assert metrics(url)["preempted"] > before


def test_a_crowd_leaves_frames_enough(page: Any, url: str) -> None:
    threads = crowd(url, CROWD, 120)
    time.sleep(1)
    rate = page.evaluate(
        """() => new Promise((resolve) => {
            let frames = 0;
            const began = performance.now();
            const frame = () => {
                frames++;
                const seconds = (performance.now() - began) / 1000;
                if (seconds < 4) requestAnimationFrame(frame); else resolve(frames / seconds);
            };
            requestAnimationFrame(frame);
        })"""
    )
    picture(page, "console.png")
    page.emulate_media(color_scheme="dark")
    time.sleep(0.5)
    picture(page, "console_dark.png")
    for thread in threads:
        thread.join()
    print(f"{rate:.0f} frames a second")
    assert rate >= FRAMES


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(page: Any, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page.emulate_media(color_scheme=scheme)
    say(page, "What colour is the sky?")
    page.wait_for_selector("#send:not([disabled])")
    found = axe.run(page).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert not serious
