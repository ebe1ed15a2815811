"""`quire chat`: a conversation in the terminal, or line by line from a pipe. Answers are streamed."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from contextlib import suppress
from typing import TextIO

from quire.cli.flags import config_from, sampling_from
from quire.errors import InputError
from quire.llm import LLM
from quire.protocol.sampling_params import SamplingParams

HELP = (
    "/reset forgets the conversation, /quit, /exit or Ctrl-D ends it, /help prints this; Ctrl-C stops an answer; "
    "arrow keys recall and edit lines; begin with // to send a line that begins with /"
)
INTERRUPT_HINT = "Ctrl-C again, Ctrl-D or /quit ends; the conversation is kept"
QUIT_COMMANDS = ("/quit", "/exit")
MAX_HISTORY = 1000  # lines, in memory only


def chat(args: argparse.Namespace) -> int:
    """Read lines and answer each, until /quit, the end of input or two Ctrl-C in a row at the prompt. A line that
    begins with / is a command and is not sent to the model; one that begins with // is sent without its first slash."""
    config = config_from(args)
    interactive = sys.stdin.isatty()
    from quire.startup.build import build

    with LLM.of(build(config, progress=sys.stderr.isatty())) as llm:
        for notice in llm.built.notices:
            print(notice, file=sys.stderr)
        if interactive:
            _print_wrapped(f"{llm.built.name}: {HELP}", sys.stderr)
        params = llm.prompts.make_params(**{"max_tokens": None, **sampling_from(args)})
        opening = [{"role": "system", "content": args.system}] if args.system else []
        history: list[dict[str, str]] = list(opening)
        interrupted = False  # True after a Ctrl-C at the prompt, until the next line
        while True:
            try:
                line = _read_line(interactive)
                interrupted = False
                if line in QUIT_COMMANDS:
                    return 0
                if line == "/reset":
                    history = list(opening)
                elif line == "/help":
                    _print_wrapped(HELP, sys.stdout)
                elif line.startswith("/") and not line.startswith("//"):
                    _print_wrapped(unknown_command_message(line), sys.stderr)
                elif line:
                    question = {"role": "user", "content": line.removeprefix("/")}
                    history = stream_answer(llm, [*history, question], params)
            except (EOFError, KeyboardInterrupt) as end:
                if interactive:
                    print()  # what follows begins on a new line
                if not interactive or interrupted or isinstance(end, EOFError):
                    return 0
                interrupted = True
                _print_wrapped(INTERRUPT_HINT, sys.stderr)


def _print_wrapped(text: str, file: TextIO) -> None:
    """Print text in lines of the terminal's width, without breaking words."""
    width = shutil.get_terminal_size().columns
    print(textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False), file=file)


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


def _read_line(interactive: bool) -> str:
    if interactive:
        with suppress(ImportError):
            import readline  # `input` uses it to edit and recall lines

            if readline.get_current_history_length() > MAX_HISTORY:
                readline.remove_history_item(0)
        return input("> ").strip()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()
