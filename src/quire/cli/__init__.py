"""The command line: `quire generate | chat | serve | deploy | run-batch | plan | replay | simulate | bench |
reproduce | env`.

Commands import what they need when they run, so that `quire --help` is fast. A failure ends with one last line with the
cause and the remedy, and exit status 2.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher, get_close_matches
from importlib import import_module
from typing import NoReturn

from quire.cli.checkout import import_from_checkout
from quire.cli.flags import add_batch_flags, add_deploy_flags, add_engine_flags, add_sampling_flags, add_serve_flags
from quire.cli.parser import USAGE_ERROR, Parser, fail
from quire.cli.vllm_flags import no_effect_notices, unsupported_reason
from quire.errors import QuireError, StartupError

INTERRUPTED = 130
CONFIG_HELP = "a YAML file of settings: names of flags without dashes; the command line overrides them"
# Similarity of an unknown flag to a known one, above which that is suggested, or taken for what was meant.
SUGGEST_RATIO, MISSPELT_RATIO = 0.8, 0.9
MEASURING_COMMANDS = {"bench": "quire.bench", "simulate": "quire.bench.simulate"}
"""Commands that parse their own arguments, and their modules, which are imported late: they import quire.cli.flags."""
COMMANDS = {
    "generate": "continue prompts",
    "chat": "talk to a model in the terminal",
    "serve": "serve OpenAI's API over HTTP",
    "deploy": "run engines in a cluster: quire deploy ray, an application of Ray Serve",
    "run-batch": "answer a file of requests, in OpenAI's batch format",
    "plan": "show how memory would be used, without loading the model",
    "replay": "check a log of plans (--log-plans), or compare two",
    "simulate": "simulate serving a model on a device: quire simulate --help",
    "bench": "run a benchmark: quire bench NAME",
    "reproduce": "reproduce a figure or table of a paper: quire reproduce NAME, or --list",
    "env": "show versions and hardware, for bug reports",
}


def build_parsers() -> tuple[Parser, dict[str, Parser]]:
    """Return the top-level parser, and the parsers of the commands by name."""
    top = Parser(prog="quire", description="Serve large language models.", allow_abbrev=False)
    top.add_argument("--version", action="store_true", help="print quire's version")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    named: dict[str, Parser] = {}
    for name, help in COMMANDS.items():
        command = commands.add_parser(name, help=help, description=help[:1].upper() + help[1:], allow_abbrev=False)
        named[name] = command
        if name == "deploy":
            command.add_argument("target", choices=("ray",), help="ray: Ray Serve")
        if name in ("generate", "chat", "serve", "deploy", "run-batch", "plan"):
            command.add_argument("--config", metavar="FILE", help=CONFIG_HELP)
            add_engine_flags(command)
        if name in ("generate", "chat"):
            add_sampling_flags(command)
        if name == "generate":
            command.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be repeated")
            command.add_argument("--prompt-file", metavar="FILE", help="a file with one prompt; - is stdin")
            command.add_argument("--json", action="store_true", help="print one JSON object per prompt")
        if name == "chat":
            command.add_argument("--system", metavar="TEXT", help="a system message to begin with")
        if name == "plan":
            command.add_argument("--device-gib", type=float, metavar="GIB", help="plan for GPUs with this much memory "
                                 "each, which need not exist; with --device cpu, for such a machine")  # fmt: skip
        if name == "replay":
            command.add_argument("file", metavar="FILE", help="a log written by --log-plans")
            command.add_argument("--against", metavar="FILE2", help="another log: print the first difference")
            command.add_argument("--debug", action="store_true", help="show tracebacks")
        if name == "serve":
            add_serve_flags(command)
        if name == "deploy":
            add_deploy_flags(command)
        if name == "run-batch":
            add_batch_flags(command)
    return top, named


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, with those of a --config file. For an unknown flag, exit with the nearest known one, or the
    reason why it is not supported."""
    top, named = build_parsers()
    args, unknown = top.parse_known_args(arguments)
    if not unknown and getattr(args, "config", None) is not None:
        args, unknown = top.parse_known_args(with_config_file(list(arguments), args.config, named[args.command]))
    if unknown:
        fail_unknown_argument(unknown[0].split("=")[0], named.get(args.command, top))
    if args.command is None and not args.version:
        top.print_help()
        raise SystemExit(USAGE_ERROR)
    return args


def with_config_file(arguments: list[str], file: str, command: Parser) -> list[str]:
    """Return `arguments` with those of a settings file that they do not set themselves."""
    from quire.cli.config_file import read_settings, settings_to_arguments

    bare, commands = build_parsers()
    for parser in commands.values():
        for action in parser._actions:
            action.default = argparse.SUPPRESS  # so that only given arguments are in the namespace
    given = vars(bare.parse_known_args(arguments)[0])
    try:
        more = settings_to_arguments(read_settings(file), command, given)
    except StartupError as error:
        fail(error.cause, error.remedy)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *more, *arguments[end:]]


def fail_unknown_argument(flag: str, command: Parser) -> NoReturn:
    """Exit because of an unknown argument, with a suggestion, or the reason why it is not supported."""
    name = flag.replace("_", "-")
    shown = [action for action in command._actions if action.help != argparse.SUPPRESS]
    known = [option for action in shown for option in action.option_strings]
    near, why = get_close_matches(name, known, n=1, cutoff=SUGGEST_RATIO), unsupported_reason(name)
    if near and (why is None or SequenceMatcher(None, name, near[0]).ratio() > MISSPELT_RATIO):
        fail(f"Unknown argument {flag[:60]!r}", f"Did you mean {near[0]}?")
    fail(f"Unknown argument {flag[:60]!r}", f"Not supported by quire: {why}" if why else f"See {command.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Return the exit status."""
    if sys.stderr is None:
        _reopen_stderr()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] in (["bench"], ["reproduce"], ["simulate"]):
        return run_guarded(lambda: _delegate(arguments[0], list(arguments[1:])), debug="--debug" in arguments)
    args = parse_arguments(arguments)
    if args.version:
        from quire import __version__

        print(f"quire {__version__}")
        return 0
    return run_guarded(lambda: _run(args), debug=getattr(args, "debug", False))


def _reopen_stderr() -> None:
    """Discard what is written to stderr, if it was closed. Child processes inherit this, and no other file gets its
    number."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 2)
    os.set_inheritable(2, True)  # dup2 does nothing if open returned 2
    sys.stderr = os.fdopen(2, "w", closefd=False)


def run_guarded(command: Callable[[], int], *, debug: bool) -> int:
    """Run `command` and return its exit status. An exception becomes one line on stderr, with a traceback only for
    --debug."""
    try:
        return command()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has closed the pipe, which is not an error
        return 0
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        known = isinstance(error, QuireError)
        cause = str(error) if known else f"{type(error).__name__}: {error}"[:300]
        line = " ".join(cause.split())
        hint = "" if known or debug else ". Run again with --debug to see where"
        print(f"quire: error: {line}{hint}", file=sys.stderr)
        return USAGE_ERROR


def _delegate(command: str, rest: list[str]) -> int:
    """Run a command that parses its own arguments."""
    if command != "reproduce":
        run: Callable[[list[str]], int] = import_module(MEASURING_COMMANDS[command]).main
        return run(rest)
    papers = import_from_checkout("papers")
    if papers is None:
        raise StartupError(
            "quire reproduce needs the repository, and this installation is not part of a checkout",
            "Clone the repository and run `pip install -e .` in it",
        )
    return int(papers.main(rest))


def _run(args: argparse.Namespace) -> int:
    """Run the function of the command's name in the module of that name."""
    for line in no_effect_notices(args):
        print(line, file=sys.stderr)
    name = args.command.replace("-", "_")
    run: Callable[[argparse.Namespace], int] = getattr(import_module(f"quire.cli.{name}"), name)
    return run(args)
