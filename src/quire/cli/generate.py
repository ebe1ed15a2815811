"""`quire generate`: prompts from the command line, a file or stdin. Continuations go to stdout, messages to stderr."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from quire.cli.flags import config_from, sampling_from
from quire.errors import InputError, StartupError


def generate(args: argparse.Namespace) -> int:
    """Continue the given prompts."""
    config = config_from(args)
    prompts = read_prompts(args)
    from quire.llm import LLM
    from quire.startup.build import build

    with LLM.of(build(config, progress=sys.stderr.isatty())) as llm:
        for notice in llm.built.notices:
            print(notice, file=sys.stderr)
        params = llm.prompts.make_params(**{"max_tokens": 128, **sampling_from(args)})
        results = llm.generate(prompts, params, use_tqdm=len(prompts) > 1)
    for prompt, result in zip(prompts, results):
        texts = [output.text for output in result.outputs]
        if args.json:
            line = {
                "prompt": prompt,
                "texts": texts,
                "finish_reasons": [output.finish_reason for output in result.outputs],
                "cumulative_logprobs": [output.cumulative_logprob for output in result.outputs],  # None unless ranked
            }
            print(json.dumps(line))
        else:
            print("\n---\n".join(prompt + text for text in texts))
    return 0


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Return the prompts of --prompt and that of --prompt-file; without either, the prompt on stdin if it is a pipe."""
    prompts = list(args.prompt or ())
    file = args.prompt_file or ("-" if not prompts and not sys.stdin.isatty() else None)
    if file is not None:
        try:
            text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
            prompts.append(text.removesuffix("\n"))  # the line break that echo and editors add
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--prompt-file {file} can't be read", "Give a UTF-8 text file") from error
    if not prompts:
        raise InputError("There is no prompt. Give --prompt TEXT or --prompt-file FILE")
    return prompts
