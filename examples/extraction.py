"""JSON out of a text: an answer that is always of this form, by OpenAI's client (`response_format`), instructor and
langchain. Start `make serve`, then run it: `python examples/extraction.py http://127.0.0.1:8000/v1 openai`.

The bundled model knows little of the world, but it can say nothing else than a recipe.
"""

from __future__ import annotations

import sys
from typing import Literal

from pydantic import BaseModel, Field

MODEL = "tiny"
TEXT = "Bread: 500 g of flour, 10 g of salt, 300 g of water. Bake it for 40 minutes."


class Ingredient(BaseModel):
    name: Literal["flour", "salt", "water", "yeast"]
    grams: int = Field(ge=0, le=5000)


class Recipe(BaseModel):
    """A recipe, as it is asked for."""

    title: str = Field(max_length=40)
    ingredients: list[Ingredient] = Field(min_length=1, max_length=4)
    minutes: int = Field(ge=0, le=600)


MESSAGES = [{"role": "user", "content": f"What does this recipe say? {TEXT}"}]


def by_openai(url: str) -> Recipe:
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="unused") as client:
        said = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Recipe, max_tokens=400, seed=1
        )
    recipe = said.choices[0].message.parsed
    assert recipe is not None, "neither cut nor refused"
    return recipe


def by_instructor(url: str, mode: str = "TOOLS") -> Recipe:
    import instructor
    from openai import OpenAI

    with OpenAI(base_url=url, api_key="unused") as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        return client.create(
            model=MODEL, messages=MESSAGES, response_model=Recipe, max_tokens=400, seed=1, max_retries=0
        )


def by_langchain(url: str, method: str = "json_schema") -> Recipe:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(base_url=url, api_key="unused", model=MODEL, max_tokens=400, seed=1)
    recipe = model.with_structured_output(Recipe, method=method).invoke(MESSAGES)
    assert isinstance(recipe, Recipe)
    return recipe


WAYS = {"openai": by_openai, "instructor": by_instructor, "langchain": by_langchain}

if __name__ == "__main__":
    print(WAYS[sys.argv[2]](sys.argv[1]).model_dump_json(indent=2))
