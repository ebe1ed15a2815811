"""Template programs, each within 1 s and 256 MB: from a seed, a chat template that does what templates can, too much.
As a program it renders each and prints a line of JSON: how many ended how, the longest render's seconds, and the most
memory of a process."""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import pytest

NUMBERS = ["2", "3", "60", "60", "1000", "1000", "60000", "65536", "99999999", "2 ** 64"]
STRINGS = ["'a'", "'<'", "'\\t'", "'a\\n'", "'é'", "'{}'", "messages[0].content", "'a,' * 60000", "ns.x", "ns.x"]
TO_TEXT = [  # of a text
    "{t}.replace({s}, {s})", "{t}.center({n})", "{t}.rjust({n})", "{t}.zfill({n})", "{t}.expandtabs({n})",
    "{t}.upper()", "{t}.join({i})", "{t}.format({s}, {n})", "{t}.translate({{97: {s}}})", "{t}.strip({s})",
    "{t}.title()", "({t} * {n})", "({t} | indent({n}))", "({t} | replace({s}, {s}))", "({t} | escape | string)",
    "({t} | urlencode)", "({t} | trim({s}))", "({t} | truncate({n}))", "({t} | title)", "({t} | striptags)",
    "({i} | join({s}))", "({i} | string)", "({i} | tojson)", "({i} | tojson(indent={n}))", "({t} ~ {s})",
    "({t} + {s})", "('%' ~ {n} ~ 's') | format({s})", "({i} | first | string)",
]  # fmt: skip
TO_ITEMS = [
    "(range({n}) | list)", "([{t}] * {n})", "({t}.split({s}))", "({t} | list)", "({i} + {i})",
    "({i} | map('string') | list)", "({i} | map('center', {n}) | list)", "({i} | map('replace', {s}, {s}) | list)",
    "({i} | batch({n}) | list)", "ns.y", "({i} | slice({n}) | list)", "({i} | sort)", "({i} | unique | list)",
    "({i} | reverse | list)", "([{i}] * {n})", "([{i}] | sum(start=[]))", "([{i}] * {n} | sum(start=[]))",
    "({i} | select('in', {i}) | list)", "[ns.y, ns.y]", "({i} | groupby(0) | list)", "({t}.splitlines())",
    "({t}.rsplit({s}))", "(dict(a={i}) | items | list)",
]  # fmt: skip
BLOCKS = [
    "{{% for a{d} in {i} %}}{b}{{% endfor %}}", "{{% set ns.x = {t} %}}", "{{% set ns.x = ns.x ~ ns.x %}}",
    "{{% set ns.y = [ns.y, ns.y, {t}] %}}", "{{% set ns.y = {i} %}}", "{{{{ {t} }}}}", "{{{{ {i} | length }}}}",
    "{{% if {i} == ns.y %}}{b}{{% endif %}}", "{{% set c{d} %}}{b}{{% endset %}}{{% set ns.x = c{d} %}}",
    "{{% filter escape %}}{b}{{% endfilter %}}", "{{{{ ns.y == [ns.y, ns.x] }}}}", "{{% set ns.y = ns.y + [{t}] %}}",
    "{{% macro m{d}(v) %}}{b}{{{{ m{d}(v) }}}}{{% endmacro %}}{{{{ m{d}(1) }}}}", "{{{{ {t}.rfind({s}) }}}}",
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "x y" * 3000}]


def made(rng: random.Random, ways: list[str], depth: int) -> str:
    """An expression for a text or a list, by one of `ways`."""
    if depth > 3:
        return rng.choice(STRINGS) if ways is TO_TEXT else "ns.y"
    return rng.choice(ways).format(
        t=rng.choice(STRINGS[:6]) if rng.random() < 0.3 else made(rng, TO_TEXT, depth + 1),
        i=made(rng, TO_ITEMS, depth + 1), s=rng.choice(STRINGS), n=rng.choice(NUMBERS),
    )  # fmt: skip


def program(seed: int) -> str:
    rng = random.Random(seed)

    def block(depth: int) -> str:
        body = "".join(block(depth + 1) for _ in range(rng.randint(1, 2))) if depth < 3 else "x"
        given = {"t": made(rng, TO_TEXT, 1), "i": made(rng, TO_ITEMS, 1), "s": rng.choice(STRINGS)}
        return rng.choice(BLOCKS).format(b=body, d=depth, **given)

    times = rng.choice(["1", "60", "60000"])
    start = "{% set ns = namespace(x='aaaaaaaa', y=['a']) %}{% for i in range(" + times + ") %}"
    return start + "".join(block(0) for _ in range(rng.randint(1, 4))) + "{% endfor %}"


def run(count: int) -> dict[str, Any]:
    """Render so many programs, a process after another."""
    from quire.errors import InputError, StartupError
    from quire.text.chat_template import ChatTemplate

    ends, worst = Counter[str](), (0.0, -1)
    for seed in range(count):
        try:
            template = ChatTemplate(program(seed), {})
        except StartupError:
            ends["not compiled"] += 1
            continue
        began = time.monotonic()
        try:
            template.render(MESSAGES)
            ends["rendered"] += 1
        except InputError as error:
            known = {"the template ran": "time", "it ran": "killed", "MiB of memory": "memory", "process": "ended",
                     "elements": "size", "may be": "size", "at most": "size"}  # fmt: skip
            ends[next((end for words, end in known.items() if words in str(error)), "failed")] += 1
        worst = max(worst, (time.monotonic() - began, seed))
        template.close()
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return {"ends": ends, "seconds": worst[0], "seed": worst[1], "peak_kib": peak}


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_template_programs() -> None:
    """In a program of its own, whose children are the templates' processes alone."""
    done = subprocess.run([sys.executable, __file__, "300"], capture_output=True, text=True, check=True)
    print(done.stdout)
    told = json.loads(done.stdout)
    assert told["seconds"] < 1.0
    assert told["peak_kib"] < 256 << 10
    assert told["ends"].get("rendered", 0) > 10
    assert told["ends"].get("size", 0) > 10


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
