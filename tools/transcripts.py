"""Makes the transcripts in docs/: runs the commands that they show and writes what comes out below them.

python tools/transcripts.py                     # rewrites what has changed
python tools/transcripts.py --check --quick     # says what would change; not what is marked slow

A transcript stands between `<!-- transcript -->` and `<!-- end -->`, as an indented block. A line `$ COMMAND` is run by
bash, `quire` being this checkout's; `quire serve` stays until all is done. A fenced block of Python is run as well, and
what it prints to stdout is the indented block after it. In the first comment, `slow` leaves a transcript out of
--quick, as it takes long or is too long to be the same on every processor, and `cut=A,B` shows of each command's output
the first A lines and the last B. Servers listen on ports that are free, and the text says the ports that the commands
name.

What differs in every run (VARIES) is not compared, and a transcript that differs in nothing else is left as it is. All
else must be the same on any machine, so the commands ask for the CPU and float32. Of a stream only the end is compared:
a busy server sends several tokens in one chunk.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("docs/*.md"))
SECONDS = 120.0
MARKED = re.compile(r"<!-- transcript(?P<options>[^>]*) -->\n(?P<text>.*?)<!-- end -->", re.DOTALL)
FENCED = re.compile(r"```python\n(.*?)```\n", re.DOTALL)
VARIES = (
    (r'"id":"(cmpl|chatcmpl)-[0-9a-f]+"', r'"id":"\1-X"'),
    (r'"id":"msg_[0-9a-f]+"', '"id":"msg_X"'),
    (r'"created":\d+', '"created":0'),
    (r"ready in [\d.]+ s", "ready in X s"),
    (r"[\d.]+ GiB free of [\d.]+ GiB", "X GiB free of X GiB"),
    (r"left over +[\d.]+ GiB", "left over X GiB"),
    (r"activations +[\d.]+ [MG]iB", "activations X"),  # by the kernels that there are
    (r"^ *(\d+ ranks?, each: )?(CPU kernels|stock torch computes).*\n", ""),  # what the machine is
    (r'^ *data: .*"finish_reason":null.*\n', ""),
    (r'^( *data: .*"(?:text|content)":)"[^"]*"', r'\1"X"'),
    (r"^ *(\.\.\.)?\n", ""),
)


def compared(text: str) -> str:
    """The text without what differs in every run."""
    for pattern, replacement in VARIES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


class Options(NamedTuple):
    """What a marker says."""

    slow: bool
    cut: tuple[int, int] | None

    @classmethod
    def read(cls, text: str) -> Options:
        cut = re.search(r"cut=(\d+),(\d+)", text)
        return cls("slow" in text.split(), (int(cut[1]), int(cut[2])) if cut else None)

    def shown(self, output: str) -> str:
        """The output without trailing space, cut in the middle."""
        lines = [line.rstrip() for line in output.rstrip().splitlines()]
        if self.cut is None or len(lines) <= sum(self.cut):
            return "\n".join(lines)
        head, tail = self.cut
        return "\n".join([*lines[:head], "...", *lines[len(lines) - tail :]])


class Shell:
    """Runs the commands of one document, in a folder of its own, and keeps its servers until it is closed."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.servers: list[subprocess.Popen[bytes]] = []
        self.ports: dict[str, str] = {}  # those of the text, and what they are here
        bin = Path(self.folder.name) / "bin"
        bin.mkdir()
        (bin / "quire").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m quire "$@"\n', encoding="utf-8")
        (bin / "quire").chmod(0o755)
        self.work = Path(self.folder.name) / "work"
        self.work.mkdir()
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "LD_LIBRARY_PATH") if name in os.environ}
        path = f"{bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = {
            **kept, "PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore",
        }  # fmt: skip

    def close(self) -> None:
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            try:
                server.wait(timeout=30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        self.folder.cleanup()

    def run(self, command: str) -> str:
        """What the command prints; of a server, what it prints until it is ready."""
        if command.startswith("quire serve"):
            return self._serve(command)
        return self._there(self._output(["bash", "-c", self._here(command)], subprocess.STDOUT))

    def python(self, code: str) -> str:
        return self._there(self._output([sys.executable, "-c", self._here(code)], subprocess.PIPE))

    def _output(self, arguments: list[str], stderr: int) -> str:
        done = subprocess.run(
            arguments, cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, text=True, timeout=SECONDS,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{arguments[-1][:200]} ended with {done.returncode}:\n{done.stdout}{done.stderr or ''}")
        return done.stdout

    def _serve(self, command: str) -> str:
        named = re.search(r"--port (\d+)", command)
        words = [*shlex.split(command if named is None else command.replace(named[0], "")), "--port", "0"]
        words[0] = str(self.work.parent / "bin" / "quire")
        log = self.work.parent / f"server-{len(self.servers)}"
        with log.open("wb") as out:
            server = subprocess.Popen(
                words, cwd=self.work, env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip
        self.servers.append(server)
        end = time.monotonic() + SECONDS
        while not re.search(r"^curl .*\n", said := log.read_text(encoding="utf-8"), re.MULTILINE):
            if server.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{command} didn't start:\n{said}")
            time.sleep(0.05)
        found = re.search(r"http://127\.0\.0\.1:(\d+)", said)
        assert found, said
        self.ports[named[1] if named else "8000"] = found[1]
        return self._there(said)

    def _here(self, text: str) -> str:
        for written, real in self.ports.items():
            text = text.replace(f"127.0.0.1:{written}", f"127.0.0.1:{real}")
        return text

    def _there(self, text: str) -> str:
        for written, real in self.ports.items():
            text = text.replace(f"127.0.0.1:{real}", f"127.0.0.1:{written}")
        return text


def made(text: str, options: Options, shell: Shell) -> str:
    """A transcript's text with what its commands print now."""
    if fenced := FENCED.search(text):
        output = options.shown(shell.python(fenced[1]))
        return f"{text[: fenced.end()]}\n{indented(output)}" if output else text
    parts = []
    for command in re.findall(r"^    \$ (.+)$", text, re.MULTILINE):
        output = options.shown(shell.run(command))
        parts.append(indented(f"$ {command}\n{output}"))
    return "\n".join(parts)


def current(text: str, options: Options, shell: Shell) -> str:
    """The text itself where nothing has changed in it, else as it is made now."""
    now = made(text, options, shell)
    return text if compared(now) == compared(text) else now


def rewritten(document: str, quick: bool) -> str:
    """The document with its transcripts made anew."""
    shell = Shell()

    def replace(found: re.Match[str]) -> str:
        options = Options.read(found["options"])
        if options.slow and quick:
            return found[0]
        text = current(found["text"], options, shell)
        return f"<!-- transcript{found['options']} -->\n{text}<!-- end -->"

    with contextlib.closing(shell):
        return MARKED.sub(replace, document)


def differences(path: Path, quick: bool, write: bool) -> Iterator[str]:
    """How the document differs from what comes out, as a diff; it is written anew if `write`."""
    before = path.read_text(encoding="utf-8")
    if "<!-- transcript" not in before:
        return
    after = rewritten(before, quick)
    if write and after != before:
        path.write_text(after, encoding="utf-8")
    yield from difflib.unified_diff(before.splitlines(), after.splitlines(), str(path), "what comes out", lineterm="")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make the transcripts in docs/.")
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS)
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if something differs")
    parser.add_argument("--quick", action="store_true", help="leave out what is marked slow")
    options = parser.parse_args(arguments)
    found = [line for path in options.documents for line in differences(path, options.quick, not options.check)]
    print("\n".join(found) if found else "as they are written")
    return 1 if found and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
