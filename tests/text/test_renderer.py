"""The process of chat templates: what it can reach, what it may take, and that it comes back after it was killed."""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import wait_until

from quire.errors import EngineDead, InputError, Overloaded, StartupError
from quire.text import template_process as renderer_module
from quire.text.chat_template import ChatTemplate
from quire.text.template_process import MAX_FRAME, RenderError, RenderTimeout, TemplateProcess

ASK = [{"role": "user", "content": "x" * 1000}]


def process(template: ChatTemplate) -> int:
    """The process's id; it is the only child that a test has."""
    return int(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()[-1])


SLOW_CALLS = [  # one call into C each, which nothing within the process can interrupt
    "{% set ns = namespace(x=[], y=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    "{{ ('x' * 1000).join(['y'] * 1000000) }}",
    "{{ ('a' * 500000 in 'b') }}{{ ('ab' * 500000) | sort | unique | list | length }}"
    "{% for i in range(60000) %}{{ ('ab' * 500000).count('ab' * 10) }}{% endfor %}",
]


@pytest.mark.parametrize("source", SLOW_CALLS)
def test_a_render_ends_in_its_time_whatever_it_calls(source: str) -> None:
    template = ChatTemplate("{% if slow %}" + source + "{% else %}fast{% endif %}", {}, max_seconds=1.0)
    began = time.monotonic()
    with pytest.raises(InputError, match="chat template: "):
        template.render(ASK, slow=True)
    assert time.monotonic() - began < 15
    assert template.render(ASK) == "fast"


@pytest.mark.parametrize(
    "source", ["{% for i in range(65536) %}{% for j in range(65536) %}{% endfor %}{% endfor %}", SLOW_CALLS[0]]
)
def test_a_template_that_is_late_is_told_from_one_that_fails(source: str) -> None:
    """Whether it is stopped by itself or killed."""
    template = ChatTemplate(source, {}, max_seconds=1.0)
    with pytest.raises(InputError, match="ran longer than") as late:
        template.render(ASK)
    assert isinstance(late.value.__cause__, RenderTimeout)


def test_a_render_has_so_much_memory() -> None:
    source = (
        "{% if much %}{% set ns = namespace(x=[]) %}{% for i in range(600) %}"
        "{% set ns.x = ns.x + ['x' * 1000000 ~ i] %}{% endfor %}{{ ns.x | length }}{% else %}little{% endif %}"
    )
    template = ChatTemplate(source, {}, max_seconds=20)
    with pytest.raises(InputError, match="more than 224 MiB of memory"):
        template.render(ASK, much=True)
    assert template.render(ASK) == "little"


def test_the_process_has_no_secrets_and_no_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    monkeypatch.setenv("TZ", "UTC")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        template = ChatTemplate("x", {})
        child = Path(f"/proc/{process(template)}")
        assert b"secret" not in child.joinpath("environ").read_bytes()
        assert {int(entry.name) for entry in child.joinpath("fd").iterdir()} == {0, 1, 2}
        assert os.getsid(int(child.name)) == int(child.name)  # a terminal's Ctrl-C goes elsewhere
        limits = child.joinpath("limits").read_text()
        assert "Max open files            3 " in limits
        assert os.readlink(child / "cwd") == "/"
    template.close()
    assert not child.exists()


def test_it_ends_with_close_and_with_the_template() -> None:
    templates = [ChatTemplate("x", {}), ChatTemplate("x", {})]
    ends = [template._process._kill for template in templates]
    templates[0].close()
    assert not ends[0].alive
    with pytest.raises(EngineDead, match="closed"):
        templates[0].render(ASK)
    other = templates.pop().with_special_tokens({"bos_token": "<s>"})
    gc.collect()
    assert ends[1].alive
    assert other.render(ASK) == "x"
    del other
    gc.collect()
    assert not ends[1].alive


def test_it_ends_within_its_time_though_nobody_is_left_to_end_it() -> None:
    code = (
        "import os, signal, threading; from quire.text.chat_template import ChatTemplate\n"
        f"t = ChatTemplate({SLOW_CALLS[0]!r}, {{}}, max_seconds=1)\n"
        "signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "t._process._restart()\n"  # with what it inherits now
        "print(t._process._kill.peek()[2][0].pid, flush=True)\n"
        "t._process._compile()\n"
        "threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()\n"
        "t.render([{'role': 'user', 'content': 'x'}])"
    )
    program = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
    assert program.returncode == -signal.SIGKILL
    child = Path(f"/proc/{program.stdout.strip()}/cmdline")
    try:
        wait_until(lambda: ended(child), "the template's process ends")
    finally:
        if child.exists() and child.read_bytes():
            os.kill(int(child.parent.name), signal.SIGKILL)


def ended(child: Path) -> bool:
    """Return True if the process whose cmdline in /proc is `child` is gone, or a zombie."""
    return not child.exists() or not child.read_bytes()


def kill(template: ChatTemplate) -> None:
    process, _ = template._process._kill.peek()[2]
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    ("place", "name", "value"),
    [
        (sys, "executable", "/nonexistent/python"), (sys, "executable", "/bin/false"),
        (renderer_module, "START_SECONDS", 0.001), (renderer_module, "COMPILE_SECONDS", 0.01),
        (socket, "socketpair", Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))),
    ],
)  # fmt: skip
def test_no_request_is_to_blame_for_a_process_that_does_not_come_up(
    place: object, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("x" + "{% if a %}{{ b }}{% endif %}" * 500, {})
    monkeypatch.setattr(place, name, value)
    kill(template)
    for _ in range(2):
        with pytest.raises(Overloaded, match=f"can't be started again.*{'Too many' if place is socket else ''}"):
            template.render(ASK)
    monkeypatch.undo()
    assert template.render(ASK) == "x"


def test_a_process_that_is_gone_when_its_time_is_over_was_late() -> None:
    template = ChatTemplate("x", {})
    kill(template)
    with pytest.raises(RenderError, match="it got no answer in 2 s"):
        template._process._read_answer(time.monotonic(), 2.0, 100)
    assert template.render(ASK) == "x"


def test_closing_ends_the_render_under_way() -> None:
    template = ChatTemplate(SLOW_CALLS[0], {}, max_seconds=30)
    timer = threading.Timer(0.5, template.close)
    timer.start()
    with pytest.raises(EngineDead, match="closed"):
        template.render(ASK)
    timer.join()
    assert not template._process._kill.alive


def test_what_it_is_given_is_bounded() -> None:
    template = ChatTemplate("x", {})
    with pytest.raises(InputError, match=f"{MAX_FRAME} are the most"):
        template.render([{"role": "user", "content": "x" * MAX_FRAME}])
    assert template.render(ASK) == "x"


def test_a_turn_is_waited_for_within_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "LOCK_SECONDS", 0.05)
    template = ChatTemplate("x", {})
    with template._process._exclusive(), pytest.raises(Overloaded, match="busy"):
        template.render(ASK)
    assert template.render(ASK) == "x"


def test_compiling_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="has 65537 bytes"):
        ChatTemplate("é" * (1 << 15) + "x", {})
    assert ChatTemplate("é" * (1 << 15), {}).render(ASK) == "é" * (1 << 15)
    monkeypatch.setattr(renderer_module, "COMPILE_SECONDS", 0.02)
    # The second where the machine is so busy that the process gets no processor time within the bound.
    with pytest.raises(StartupError, match=r"can't be compiled: it (ran longer than|got no answer in) 0\.02 s"):
        ChatTemplate("{% if a %}{{ b }}{% endif %}" * 2300, {})


def test_a_renderer_without_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(StartupError, match="no process can be started"):
        TemplateProcess()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    renderer = TemplateProcess()
    with pytest.raises(RenderError, match="its process ended"):
        renderer.compile("x")


@pytest.fixture
def stopped() -> Iterator[TemplateProcess]:
    """A process that does not run: it was stopped, or the machine is too busy."""
    renderer = TemplateProcess()
    renderer.compile("{{ a }}")
    os.kill(renderer._process.pid, signal.SIGSTOP)
    yield renderer
    renderer.close()


def test_a_process_that_does_not_run_costs_no_request(stopped: TemplateProcess) -> None:
    """Another one is asked."""
    assert stopped.render({"a": "said"}, 1.0, 100) == "said"


def test_a_request_without_processor_time_is_refused(stopped: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    start = TemplateProcess._start

    def start_stopped(self: TemplateProcess) -> None:
        start(self)
        self._is_up = True
        os.kill(self._process.pid, signal.SIGSTOP)

    monkeypatch.setattr(TemplateProcess, "_start", start_stopped)
    monkeypatch.setattr(TemplateProcess, "_recompile", lambda self: None)
    with pytest.raises(Overloaded, match="gets no processor time"):
        stopped.render({"a": "said"}, 0.4, 100)
