"""The console in a real Chromium, in `make test-full`, which installs Playwright, axe and Debian's `chromium`. Without
them these tests fail: `make .venv/.browser`.

QUIRE_CONSOLE_FRAMES=FILE keeps the frames a second beside a crowd.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
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


@contextmanager
def console(chromium: Any, url: str) -> Iterator[Any]:
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
    answered(page)
    assert "stopped" in page.inner_text("#log")
    page.wait_for_selector("#more:text('none')")  # the engine gave it up too
    assert sorted(set(lengths)) == lengths


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
    found = Axe().run(page).response["violations"]
    serious = [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
    assert not serious
