"""Sizes computed before a call: each way to make much of little is refused at once, and honest use is not."""

from __future__ import annotations

import pytest
from jinja2.exceptions import SecurityError

from quire.text.template_bounds import BoundedFormatter
from quire.text.template_sandbox import Sandbox
from quire.text.template_worker import TemplateWorker

MESSAGES = [{"role": "user", "content": "x" * 1000}]


def rendered(source: str) -> list[object]:
    """What the program in the process answers; here, without its limits on memory and time."""
    work = TemplateWorker()
    assert work.handle(["compile", source])[0] == "done"
    return work.handle(["render", {"messages": MESSAGES}, 5.0, 1 << 20])


@pytest.mark.parametrize(
    "expression",
    [
        "'%.1999999999f' | format(1.0)",
        "'%2000000000s' | format('x')",
        "'%*d' | format(99999999, 1)",
        "'%.*f' | format(99999999, 1.0)",
        "('%(a)s' * 100000) | format(a='x' * 100000)",
        "'{:>2000000000}'.format('x')",
        "'{:{}}'.format('x', 99999999)",
        "'{:.2000000000f}'.format(1.0)",
        "('{0}' * 100000).format('x' * 100000)",
        "'{a:>99999999}'.format_map({'a': 1})",
        "('{:>99999999}' | escape).format('x')",
        "'{!r}'.format(['a' * 1000000] * 1000)",
        "('\t' * 9999).expandtabs(65000)",
        "('a\n' * 99999) | indent(60000)",
        "(range(60000) | list) | tojson(indent=60000)",
        "(range(60000) | list) | tojson(separators=('x' * 60000, ':'))",
        "([[1] * 1000] * 60000) | sum(start=[])",
        "([(1,) * 1000] * 60000) | sum(start=())",
        "('a' * 500000).replace('a', 'b' * 500000)",
        "'a'.replace('', 'b' * 1000000)",
        "('a' * 500000) | replace('a', 'b' * 500000)",
        "('a' * 500000).translate({97: 'b' * 500000})",
        "('a' * 500000).translate(['b' * 500000] * 99)",
        "(['a'] * 1000000) | batch(1) | list",
        "(['a'] * 60000) | join('x' * 1000)",
        "('x' * 1000).join(['a'] * 60000)",
        "(['a' * 100000] * 60000) | map('upper') | join",
        "('a' * 1000000).rfind('b' + 'a' * 400000)",
        "('a' * 1000000).strip('b' * 400000)",
        "('a' * 1000000).encode('utf-8')",
        "(1).to_bytes(60000, 'big')",
        "dict.fromkeys(range(60000), 'a' * 1000000) | string",
        "('<' * 1000000) | e | e",
        "('é' * 1000000) | urlencode",
    ],
)
def test_what_would_be_huge_is_refused(expression: str) -> None:
    kind, said = rendered("{{ (" + expression + ") | length }}")
    assert kind == "failed"
    assert any(word in str(said) for word in ("limit", "may be", "may not", "at most", "too long", "unsafe")), said


def test_fields_of_a_format_are_bounded_together() -> None:
    """As they are written, not when all of them have been."""
    with pytest.raises(SecurityError, match="a value of 1049000 elements; the limit is 1048576"):
        BoundedFormatter(Sandbox()).vformat("{0}" * 2000, ("x" * 1000,), {})


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("'%s has %5.1f%%' | format('a', 2.25)", "a has   2.2%"),
        ("'%(a)s-%(b)03d' | format(a=1, b=2)", "1-002"),
        ("'{0:>5}|{a!r}|{0}'.format('x', a='y')", "    x|'y'|x"),
        ("'{a}'.format_map({'a': 1})", "1"),
        ("('<b>' | escape + '{}').format('<')", "&lt;b&gt;&lt;"),
        ("'a\tb'.expandtabs(4)", "a   b"),
        ("'a\nb' | indent(2, true)", "  a\n  b"),
        ("'a\nb' | indent('> ')", "a\n> b"),
        ("[1, [2]] | tojson(indent=1)", "[\n 1,\n [\n  2\n ]\n]"),
        ("{'a': 1} | tojson(separators=(',', ':'))", '{"a":1}'),
        ("[[1], [2]] | sum(start=[])", "[1, 2]"),
        ("[1, 2] | sum", "3"),
        ("[{'a': 1}, {'a': 2}] | sum(attribute='a', start=10)", "13"),
        ("'aXbX'.replace('X', 'yy')", "ayybyy"),
        ("'aXbX' | replace('X', 'yy', 1)", "ayybX"),
        ("'ab'.translate({97: 'xy'})", "xyb"),
        ("[1, 2, 3] | batch(2, 0) | list", "[[1, 2], [3, 0]]"),
        ("[1, 2] | join(', ')", "1, 2"),
        ("[{'a': 1}, {'a': 2}] | join('+', attribute='a')", "1+2"),
        ("', '.join(['a', 'b'] | map('upper'))", "A, B"),
        ("' xax '.strip().strip('x')", "a"),
        ("' a ' | trim", "a"),
        ("'a-b'.rsplit('-', 1)", "['a', 'b']"),
        ("'</think>a'.split('</think>')[-1]", "a"),
        ("('x' * 1000000).rfind('</think>')", "-1"),
        ("'<b>a</b>' | striptags", "a"),
        ("'\\u00e9\\N{EM DASH}'", "é\N{EM DASH}"),
    ],
)
def test_honest_use_is_as_before(expression: str, expected: str) -> None:
    assert rendered("{{ " + expression + " }}") == ["done", expected]
