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
METHODS = ("json_schema", "function_calling", "json_mode")


def by_parallel_tools(url: str, model: str) -> Any:
    import instructor
    from extraction import MESSAGES, Recipe
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="unused") as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
        made = client.create(
            model=model, messages=MESSAGES, response_model=Iterable[Recipe], max_tokens=400, max_retries=0
        )
        [recipe] = made
    return recipe


def asked(url: str, model: str) -> dict[str, Callable[[], Any]]:
    import extraction

    extraction.MODEL = model
    ways: dict[str, Callable[[], Any]] = {"openai": partial(extraction.by_openai, url)}
    for mode in MODES:
        ways[f"instructor {mode}"] = partial(extraction.by_instructor, url, mode)
    ways["instructor PARALLEL_TOOLS"] = partial(by_parallel_tools, url, model)
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
