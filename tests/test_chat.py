"""`quire chat` in a terminal: its commands, the keys that recall lines, and how it ends."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from quire.cli import chat

TESTS = Path(__file__).parent
PROGRAM = f"""
import os, signal, sys, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # it is ignored, by inheritance, where tests run in background
os.close(os.open(os.ttyname(0), os.O_RDWR))  # a session's first terminal controls it: Ctrl-C interrupts
sys.path.insert(0, {str(TESTS)!r})
import echo_service
stand_in = types.ModuleType("quire.build")
stand_in.build = lambda config, progress=False: echo_service.built()
sys.modules["quire.build"] = stand_in
from quire.cli import chat, main
chat.answer = lambda llm, history, params: print([said["content"] for said in history]) or history
if len(sys.argv) > 1:
    chat.MOST_RECALLED = int(sys.argv[1])
sys.exit(main(["chat"]))
"""
UP, CONTROL_D, CONTROL_C = "\x1b[A", "\x04", "\x03"


class Terminal:
    """A chat in a terminal of its own. It repeats what it was told so far in place of an answer."""

    def __init__(self, *arguments: str) -> None:
        self.end, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
        self.child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.shown = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What is shown up to the first match of `pattern`, which is taken away."""
        end = time.monotonic() + seconds
        while not (found := re.search(pattern, self.shown)):
            ready, _, _ = select.select([self.end], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"waited for {pattern!r}, and there is only {self.shown!r}"
            try:
                self.shown += os.read(self.end, 4096).decode()
            except OSError as error:  # the other end is closed
                raise AssertionError(f"it ended before {pattern!r}: {self.shown!r}") from error
        before, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def say(self, line: str, answer: str) -> str:
        """Type a line at the prompt and wait for the answer."""
        self.type(line + "\r")
        return self.until(answer)

    def status(self, last: str) -> int:
        """The exit status after typing `last`; once more where readline wasn't ready for it yet, which Ctrl-C needs."""
        for _ in range(20):
            self.type(last)
            with suppress(subprocess.TimeoutExpired):
                return self.child.wait(timeout=5)
        raise AssertionError(f"{last!r} doesn't end it")


@contextmanager
def terminal(*arguments: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments)
    try:
        yield opened
    finally:
        opened.child.kill()
        opened.child.wait()
        os.close(opened.end)


def prompted(opened: Terminal) -> str:
    return opened.until(r"> ")


@pytest.mark.parametrize("last", ["/quit\r", "/exit\r", CONTROL_D, CONTROL_C])
def test_commands_are_said_at_start_and_each_ends_it(last: str) -> None:
    with terminal() as opened:
        shown = prompted(opened)
        for word in ("/quit", "/exit", "/reset", "/help", "arrow keys", "//"):
            assert word in shown
        assert opened.status(last) == 0


def test_arrow_keys_recall_and_edit_what_was_said() -> None:
    with terminal() as opened:
        prompted(opened)
        opened.say("first", r"\['first'\]")
        prompted(opened)
        opened.say("/reset", "> ")
        opened.say(UP * 2, r"\['first'\]")
        prompted(opened)
        opened.say("/reset", "> ")
        opened.say(UP * 2 + "\x7f\x7fe!", r"\['fire!'\]")


def test_only_the_last_lines_are_recalled() -> None:
    with terminal("2") as opened:
        prompted(opened)
        for line in ("one", "two", "three"):
            opened.say(line, rf"'{line}'\]")
            prompted(opened)
        opened.say("/reset", "> ")
        opened.say(UP * 9, r"\['three'\]")


def test_an_unknown_command_is_not_said_to_the_model() -> None:
    with terminal() as opened:
        prompted(opened)
        assert "/quit or /exit ends it" in opened.say("/clear all", r"(?s)/clear is not a command.*\r\n")
        prompted(opened)
        opened.say("//clear", r"\['/clear'\]")
        prompted(opened)
        opened.say("/help", "/reset forgets")
        prompted(opened)
        opened.say("a / b", r"\['/clear', 'a / b'\]")


def test_a_long_unknown_command_is_cut() -> None:
    assert chat.unknown("/" + "x" * 500).index(" is not a command: ") == 80
