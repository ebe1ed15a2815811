"""What clients that aren't ours get from a server whose model answers with RECIPE, as JSON: {what: the answer or the
error}. Run by a Python that has them: `python asking_clients.py URL MODEL [WHAT ...]`; test_clients.py reads it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "examples"))

RECIPE = {"title": "bread", "ingredients": [{"name": "flour", "grams": 500}], "minutes": 40}
MODES = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "PARALLEL_TOOLS", "JSON", "JSON_O1", "JSON_SCHEMA", "MD_JSON")
RESPONSES = ("RESPONSES_TOOLS", "RESPONSES_TOOLS_WITH_INBUILT_TOOLS")
ANTHROPIC = ("ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_JSON", "ANTHROPIC_PARALLEL_TOOLS")
METHODS = ("json_schema", "function_calling", "json_mode")


def created(client: Any, model: str, many: bool = False) -> Any:
    """The recipe by instructor; with `many` the only one of those that the model may call for."""
    from extraction import MESSAGES, Recipe

    kind = Iterable[Recipe] if many else Recipe
    made = client.create(model=model, messages=MESSAGES, response_model=kind, max_tokens=400, max_retries=0)
    if not many:
        return made
    [recipe] = made
    return recipe


def by_openai(url: str, model: str, mode: str) -> Any:
    import instructor
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="unused") as plain:
        return created(instructor.from_openai(plain, mode=instructor.Mode[mode]), model, "PARALLEL" in mode)


def by_anthropic(url: str, model: str, mode: str) -> Any:
    import instructor
    from anthropic import Anthropic

    with Anthropic(base_url=url.removesuffix("/v1"), api_key="unused") as plain:
        return created(instructor.from_anthropic(plain, mode=instructor.Mode[mode]), model, "PARALLEL" in mode)


def asked(url: str, model: str) -> dict[str, Callable[[], Any]]:
    import extraction

    extraction.MODEL = model
    ways: dict[str, Callable[[], Any]] = {"openai": partial(extraction.by_openai, url)}
    for mode in MODES:
        ways[f"instructor {mode}"] = partial(extraction.by_instructor, url, mode)
    for mode in ("PARALLEL_TOOLS", *RESPONSES):  # lists; no field for a seed
        ways[f"instructor {mode}"] = partial(by_openai, url, model, mode)
    for mode in ANTHROPIC:
        ways[f"instructor {mode}"] = partial(by_anthropic, url, model, mode)
    for method in METHODS:
        ways[f"langchain {method}"] = partial(extraction.by_langchain, url, method)
    return ways


def told(ask: Callable[[], Any]) -> Any:
    try:
        return ask().model_dump()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"


if __name__ == "__main__":
    url, model, *wanted = sys.argv[1:]
    print(json.dumps({name: told(ask) for name, ask in asked(url, model).items() if name in (wanted or [name])}))
