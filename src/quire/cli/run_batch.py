"""`quire run-batch`: answer a file of requests into another file. Messages go to stderr."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from quire.cli.flags import config_from
from quire.errors import StartupError
from quire.server.batch import MAX_IN_FLIGHT
from quire.server.batch import run_batch as run
from quire.server.options import read_chat_template, set_chat_template

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM


def run_batch(args: argparse.Namespace) -> int:
    """Answer the file. Return 0 if every line was answered, else 1."""
    config, template = config_from(args), read_chat_template(getattr(args, "chat_template", None))
    if not 1 <= args.max_in_flight <= MAX_IN_FLIGHT:
        raise StartupError(f"--max-in-flight is {args.max_in_flight}", f"It must be between 1 and {MAX_IN_FLIGHT}")

    def make() -> tuple[AsyncLLM, ASGIApp]:
        from quire.async_llm import AsyncLLM
        from quire.server.app import create_app
        from quire.startup.build import build

        built = build(config, progress=sys.stderr.isatty())
        for notice in built.notices:
            print(notice, file=sys.stderr)
        llm = AsyncLLM.of(built)
        if template is not None:
            set_chat_template(llm.prompts, template)
        return llm, create_app(llm, getattr(args, "served_model_name", ()) or (built.name,), config=config)

    began = time.perf_counter()
    summary = run(
        make, Path(args.input_file), Path(args.output_file), in_flight=args.max_in_flight, resume=args.resume
    )  # fmt: skip
    kept = f", {summary.kept} kept of an earlier run" if summary.kept else ""
    print(
        f"{summary.completed} completed, {summary.failed} failed, {summary.invalid} lines no requests{kept}, in "
        f"{time.perf_counter() - began:.1f} s: {args.output_file}",
        file=sys.stderr,
    )
    return 1 if summary.failed or summary.invalid else 0
