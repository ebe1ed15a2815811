"""The process that tries grammars: what takes too much is refused, whatever ends the process is another's, and nothing
is left behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import echo_service
import pytest
from grammar_walks import grammars_of
from waiting import wait_until

from quire.errors import EngineDead, InputError, Overloaded
from quire.protocol.structured_output import StructuredOutputsParams
from quire.text import isolated_process
from quire.text.grammars import trial_process, trial_worker
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.trial_worker import MAX_SECONDS

TESTS = Path(__file__).parent.parent
BOMB = {"allOf": [{"type": "integer", "multipleOf": number} for number in (5, 7, 11, 13, 17, 19)]}
GREEDY = {"type": "integer", "multipleOf": 1_000_003}  # takes 300 MiB in time


@pytest.fixture
def grammars() -> Iterator[GrammarCompiler]:
    made = grammars_of(echo_service.tokenizer(), echo_service.VOCAB)
    yield made
    made.close()


def get(grammars: GrammarCompiler, **asked: Any) -> Any:
    return grammars.get(StructuredOutputsParams(**asked).structured())


def process(grammars: GrammarCompiler) -> subprocess.Popen[bytes]:
    return grammars._trial_process._process


def state(pid: int) -> str:
    """Return the state of a process in /proc, "X" once it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def wait_gone(pid: int, states: str = "XZ") -> None:
    """Wait until a process has ended, or is in one of other states; it may be a zombie."""
    wait_until(lambda: state(pid) in states, f"process {pid} is in one of the states {states}")


def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> None:
    """Have another program try: this one, changed."""
    text = Path(trial_worker.__file__).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "trial.py").write_text(text)
    boot = f"import sys; sys.path += sys.argv[1:]; exec(open({str(tmp_path / 'trial.py')!r}).read()); main()"
    monkeypatch.setattr(isolated_process, "BOOT", boot)


@pytest.mark.parametrize("asked", [
    {"json": {"properties": {"a": BOMB}}},
    {"grammar": "start: X\nX: " + " & ".join(f"/(.{{{number}}})*/" for number in (5, 7, 11, 13, 17, 19))},
])  # fmt: skip
def test_what_takes_too_long_is_refused_and_others_are_not(grammars: GrammarCompiler, asked: dict[str, Any]) -> None:
    get(grammars, regex="a")
    began, first = time.process_time(), process(grammars)
    [kind] = asked
    with pytest.raises(InputError, match=f"{kind}: it is too complex: making its grammar takes more than 0.5 s of a"):
        get(grammars, **asked)
    assert time.process_time() - began < MAX_SECONDS, "this process has made it too"
    wait_gone(first.pid)
    get(grammars, regex="b")
    assert process(grammars).pid != first.pid


def nested(depth: int) -> list[dict[str, Any]]:
    """Forms of so many parts, each of which is within the one before."""
    rules = "\n".join(f"r{i}: r{i + 1}" for i in range(depth)) + f'\nr{depth}: "a"\nstart: r0'
    terminals = "\n".join(f"T{i}: T{i + 1} /b/" for i in range(depth)) + f'\nT{depth}: "a"\nstart: T0'
    parts = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(depth)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**parts, f"d{depth}": {"type": "null"}}}
    return [{"grammar": rules}, {"grammar": terminals}, {"json": schema}]


def test_what_is_nested_too_deep_is_refused(grammars: GrammarCompiler) -> None:
    """It would take all of a thread's stack, and the process with it."""
    for asked in nested(60):
        get(grammars, **asked)
    for asked in nested(3000):
        with pytest.raises(InputError, match="it is nested too deep"):
            get(grammars, **asked)
    get(grammars, regex="a")


def test_tokens_that_are_named_are_the_models(grammars: GrammarCompiler) -> None:
    """A grammar may name tokens by number, and special ones by name: the process knows of them."""
    get(grammars, grammar=f'start: "a" <[{echo_service.VOCAB - 1}]>')
    with pytest.raises(InputError, match="Token range end too large"):
        get(grammars, grammar=f'start: "a" <[{echo_service.VOCAB}]>')
    assert process(grammars).poll() is None


def test_what_takes_too_much_memory_is_refused(
    grammars: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, ("SECONDS = 0.5", "SECONDS = 60.0"), ("MEMORY = 1 << 30", "MEMORY = 1 << 12"))
    with pytest.raises(InputError, match="takes more than 1024 MiB of memory"):
        get(grammars, json=GREEDY)
    get(grammars, regex="a")


def test_one_that_was_killed_is_another_one(grammars: GrammarCompiler) -> None:
    """By the system, say: no request is refused for it."""
    for number in (signal.SIGKILL, signal.SIGSEGV):
        get(grammars, regex=f"a{number}")
        first = process(grammars)
        first.send_signal(number)
        wait_gone(first.pid)
        get(grammars, regex=f"b{number}")
        assert process(grammars).pid != first.pid


def test_one_that_does_not_answer_is_left(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    get(grammars, regex="a")
    monkeypatch.setattr(trial_process, "WAIT_SECONDS", 0.2)
    first = process(grammars)
    first.send_signal(signal.SIGSTOP)
    wait_gone(first.pid, states="T")
    with pytest.raises(Overloaded, match=r"could not be tried within 0\.2 s"):
        get(grammars, regex="b")
    wait_gone(first.pid)
    monkeypatch.undo()
    get(grammars, regex="b")


@pytest.mark.parametrize(
    "change", [("import signal", "raise SystemExit(3)"), ('    write_frame("")', "    write_frame('x' * 9)")]
)
def test_one_that_does_not_come_up(
    change: tuple[str, str], grammars: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path, monkeypatch, change)
    with pytest.raises(Overloaded, match=r"the process that tries grammars .* at its start"):
        get(grammars, regex="a")
    monkeypatch.undo()
    get(grammars, regex="a")


def test_without_processes_nothing_is_made(grammars: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    none = Mock(side_effect=OSError(11, "Resource temporarily unavailable"))
    monkeypatch.setattr(subprocess, "Popen", none)
    with pytest.raises(Overloaded, match="no process can be started to try grammars: Resource temporarily"):
        get(grammars, regex="a")
    monkeypatch.undo()
    monkeypatch.setattr(socket, "socketpair", none)
    with pytest.raises(Overloaded, match="no socket can be had to try grammars: Resource"):
        get(grammars, regex="a")


def test_it_has_no_descriptor_of_ours(grammars: GrammarCompiler) -> None:
    with socket.socket() as ours:
        ours.set_inheritable(True)
        get(grammars, regex="a")
        assert sorted(os.listdir(f"/proc/{process(grammars).pid}/fd")) == ["0", "1", "2"]


def test_nothing_is_left() -> None:
    """After `close`, without it, and when the program is killed."""
    made, other = (grammars_of(echo_service.tokenizer(), echo_service.VOCAB) for _ in range(2))
    get(made, regex="a")
    first = process(made).pid
    made.close()
    made.close()
    wait_gone(first)
    with pytest.raises(EngineDead, match="closed"):
        get(made, regex="b")
    get(made, regex="a")  # is held
    get(other, regex="a")
    second = process(other).pid
    del other
    gc.collect()
    wait_gone(second)
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(TESTS)!r})
import echo_service
from quire.text.grammars.compiler import GrammarCompiler
from quire.protocol.structured_output import Structured
grammars = GrammarCompiler(echo_service.tokenizer(), echo_service.VOCAB, (0,))
grammars.get(Structured("regex", "a"))
print(grammars._trial_process._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    wait_gone(int(done.stdout))


def test_trusted_forms_are_not_tried() -> None:
    made = GrammarCompiler(echo_service.tokenizer(), echo_service.VOCAB, (0,), trusted=True)
    get(made, regex="a")
    assert made._trial_process._process is None
