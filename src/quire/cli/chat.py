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
from quire.vocabulary.params import SamplingParams

HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C stops an answer"


def chat(args: argparse.Namespace) -> int:
    """Read lines and answer each, until /exit or the end of input."""
    config = config_from(args)
    interactive = sys.stdin.isatty()
    from quire.build import build

    with LLM.of(build(config, progress=sys.stderr.isatty())) as llm:
        for notice in llm.built.notices:
            print(notice, file=sys.stderr)
        if interactive:
            print(f"{llm.built.name}: {HELP}", file=sys.stderr)
        params = llm.prompts.params(**{"max_tokens": None, **sampling_from(args)})
        opening = [{"role": "system", "content": args.system}] if args.system else []
        history: list[dict[str, str]] = list(opening)
        for line in _lines(interactive):
            if line == "/reset":
                history = list(opening)
            elif line == "/help":
                print(HELP)
            elif line:
                history = answer(llm, [*history, {"role": "user", "content": line}], params)
    return 0


def answer(llm: LLM, history: list[dict[str, str]], params: SamplingParams) -> list[dict[str, str]]:
    """Print the answer as it comes; returns the conversation with it. An answer that fails leaves its question out. Of
    several answers the first is printed so, the others follow, and the conversation goes on with the first."""
    said: list[list[str]] = [[] for _ in range(params.n)]
    try:
        for output in llm.stream(llm.prompts.chat(history), params):
            said[output.branch].append(output.text)
            if output.branch == 0:
                print(output.text, end="", flush=True)
        for other in said[1:]:
            print("\n---\n" + "".join(other), end="", flush=True)
    except InputError as error:
        print(f"{error} (/reset starts anew)", file=sys.stderr)
        return history[:-1]
    except KeyboardInterrupt:
        pass
    print(flush=True)
    return [*history, {"role": "assistant", "content": "".join(said[0])}]


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, until /exit or the end of input."""
    if interactive:
        _history()
    with suppress(EOFError, KeyboardInterrupt):
        while (line := _ask(interactive)) != "/exit":
            yield line


def _ask(interactive: bool) -> str:
    if interactive:
        return input("> ").strip()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.strip()


def _history() -> Any:
    """Arrow keys recall earlier lines, where the terminal library is there."""
    with suppress(ImportError):
        import readline

        return readline
