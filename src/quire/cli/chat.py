"""`quire chat`: a conversation in the terminal, or line by line from a pipe. Answers are streamed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from quire.cli.flags import config_from, sampling_from
from quire.errors import InputError
from quire.llm import LLM
from quire.protocol.sampling_params import SamplingParams

HELP = (
    "/reset forgets the conversation, /quit or /exit ends it, /help prints this; Ctrl-C stops an answer; "
    "arrow keys recall and edit lines; begin with // to send a line that begins with /"
)
QUIT_COMMANDS = ("/quit", "/exit")
MAX_HISTORY = 1000  # lines, in memory only


def chat(args: argparse.Namespace) -> int:
    """Read lines and answer each, until /quit or the end of input. A line that begins with / is a command and is not
    sent to the model; one that begins with // is sent without its first slash."""
    config = config_from(args)
    interactive = sys.stdin.isatty()
    from quire.startup.build import build

    with LLM.of(build(config, progress=sys.stderr.isatty())) as llm:
        for notice in llm.built.notices:
            print(notice, file=sys.stderr)
        if interactive:
            print(f"{llm.built.name}: {HELP}", file=sys.stderr)
        params = llm.prompts.make_params(**{"max_tokens": None, **sampling_from(args)})
        opening = [{"role": "system", "content": args.system}] if args.system else []
        history: list[dict[str, str]] = list(opening)
        for line in _read_lines(interactive):
            if line == "/reset":
                history = list(opening)
            elif line == "/help":
                print(HELP)
            elif line.startswith("/") and not line.startswith("//"):
                print(unknown_command_message(line), file=sys.stderr)
            elif line:
                history = stream_answer(llm, [*history, {"role": "user", "content": line.removeprefix("/")}], params)
    return 0


def unknown_command_message(line: str) -> str:
    """Return the message about a line that begins with / and is not a command."""
    return f"{line.split()[0][:80]} is not a command: {HELP}"


def stream_answer(llm: LLM, history: list[dict[str, str]], params: SamplingParams) -> list[dict[str, str]]:
    """Print the answer as it arrives, and return the conversation with it. If it fails, the question is removed too.
    Of several answers the first one is streamed, and the conversation continues with it; the others are printed
    after it."""
    texts: list[list[str]] = [[] for _ in range(params.n)]
    try:
        for output in llm.stream(llm.prompts.process_chat(history), params):
            texts[output.branch].append(output.text)
            if output.branch == 0:
                print(output.text, end="", flush=True)
        for other in texts[1:]:
            print("\n---\n" + "".join(other), end="", flush=True)
    except InputError as error:
        print(f"{error} (/reset starts anew)", file=sys.stderr)
        return history[:-1]
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return [*history, {"role": "assistant", "content": "".join(texts[0])}]


def _read_lines(interactive: bool) -> Iterator[str]:
    """Yield the user's lines, until /quit or the end of input."""
    readline: Any = None
    if interactive:
        with suppress(ImportError):
            import readline  # `input` uses it to edit and recall lines
    with suppress(EOFError, KeyboardInterrupt):
        while (line := _read_line(interactive)) not in QUIT_COMMANDS:
            if readline is not None and readline.get_current_history_length() > MAX_HISTORY:
                readline.remove_history_item(0)
            yield line
        return
    if interactive:
        print()  # the shell's prompt begins on a new line


def _read_line(interactive: bool) -> str:
    if interactive:
        return input("> ").strip()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
