"""Strings of counted characters through an engine, over a vocabulary so large that their masks are made in parts: each
is the one that plain llguidance makes, short of memory, with branches, at any temperature; what ends is of its form;
and rows that have none don't change."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
from llguidance import LLExecutor
from marked_words import Plain, save, schema

from quire import LLM, SamplingParams
from quire.text.grammar_counted import LEAST
from quire.text.grammars import Grammars
from quire.text.outputs import RequestOutput
from quire.vocabulary.params import Structured, StructuredOutputsParams

BATCHES = 60
FREE, DRAWN, LONGEST = 2, 5, 40  # rows without a form, forms that each batch has for itself, tokens of an output
LETTERS = range(1 + ord("a"), 1 + ord("z"))
ROOMY: dict[str, Any] = {"dtype": "float32", "deterministic": True, "device": "cpu", "dummy_weights": True,
                         "max_model_len": 128}  # fmt: skip
SHORT: dict[str, Any] = {"max_num_seqs": 12, "page_size": 8, "kv_tokens": 320, "swap_gib": 0.1}
GIVEN = [
    {"type": "object", "properties": {"name": {"type": "string", "minLength": 2, "maxLength": 6},
     "of": {"enum": ["Quire", "a", 'a"b']}, "é": {"type": "string"}, "nam": {"type": "string", "maxLength": 30}},
     "required": ["name", "of", "é"], "additionalProperties": {"type": "string", "maxLength": 99}},
    {"type": "array", "prefixItems": [{"type": "string", "pattern": "^[a-z]{2,9}$", "maxLength": 6},
     {"type": "string", "maxLength": 40}], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 99}], "items": {"type": "string", "maxLength": 9},
     "minItems": 3},
    {"type": "object", "properties": {"of": {"enum": ["Quire", "nacre"]}, "é": {"type": "string"}}, "required": ["of"]},
]  # fmt: skip
"""The second one has a pattern: nothing is known of its strings. Those of the last two may end anywhere."""
WAYS: list[dict[str, Any]] = [
    {"temperature": 0}, {"temperature": 0.05, "n": 2}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1},
    {"temperature": 1, "n": 2}, {"temperature": 1, "best_of": 3}, {"temperature": 2, "n": 3},
    {"temperature": 1, "n": 2, "repetition_penalty": 1.2}, {"temperature": 1, "logprobs": 1},
]  # fmt: skip


class Case(NamedTuple):
    """A request."""

    prompt: list[int]
    form: dict[str, Any] | None
    asked: Structured | None
    more: dict[str, Any]

    def params(self, grammar: Callable[[Structured], Any]) -> SamplingParams:
        made = None if self.asked is None else grammar(self.asked)
        return SamplingParams(max_tokens=LONGEST, ignore_eos=made is None, structured=self.asked, grammar=made,
                              **self.more)  # fmt: skip

    def check(self, output: Any) -> None:
        """What ended is of the form."""
        assert output.finish_reason in ("stop", "length"), (self, output.stop_reason)
        if self.form is not None and output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), self.form)


def cases(number: int) -> list[Case]:
    """Of a batch: some that are held to a form, and behind them those that are not. All prompts begin alike."""
    rng = random.Random(number)
    stem, found = rng.choices(LETTERS, k=40), list[Case]()
    drawn = [schema(rng) for _ in range(DRAWN)]
    ways = [{"temperature": 1, "n": 2}, *(rng.choice(WAYS) for _ in (*GIVEN, *drawn)), *[{"temperature": 1}] * FREE]
    for form, more in zip((GIVEN[0], *GIVEN, *drawn, *[None] * FREE), ways, strict=True):
        prompt, asked = stem + rng.choices(LETTERS, k=8), None
        if form is not None:
            asked = StructuredOutputsParams(json=form, disable_any_whitespace=rng.random() < 0.7).structured()
        found.append(Case(prompt, form, asked, {**more, "seed": rng.randrange(1 << 30)}))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("marked")
    save(made)
    return made


@pytest.fixture(scope="module")
def roomy(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ROOMY) as found:
        yield found


@pytest.fixture(scope="module")
def swapping(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **ROOMY, **SHORT, preemption="swap") as found:
        yield found


@pytest.fixture(scope="module")
def recomputing(folder: Path) -> Iterator[LLM]:
    """With two steps in flight: masks come late."""
    with LLM(str(folder), **ROOMY, **SHORT, preemption="recompute", depth=2) as found:
        yield found


@pytest.fixture(scope="module")
def plain(roomy: LLM) -> Plain:
    assert roomy.built.tokenizer is not None
    return Plain(roomy.built.tokenizer)


def grammars(llm: LLM, one_by_one: bool) -> Grammars:
    """Those of an engine, which makes masks `one_by_one` as tokens come, or all of a step's at once on threads."""
    text = llm.prompts.text
    assert text is not None
    assert text.grammars is not None
    masker = text.grammars._made_masker()
    assert masker.vocab_size > LEAST
    assert masker.counted is not None
    masker.one_by_one = one_by_one
    masker._executor = None if one_by_one else LLExecutor(2)
    return text.grammars


def answers(llm: LLM, asked: list[Case], grammar: Callable[[Structured], Any]) -> list[RequestOutput]:
    return llm.generate([one.prompt for one in asked], [one.params(grammar) for one in asked], use_tqdm=False)


def tokens(answered: list[RequestOutput]) -> list[list[list[int]]]:
    return [[list(one.token_ids) for one in output.outputs] for output in answered]


def run(number: int, roomy: LLM, short: LLM, plain: Plain, one_by_one: bool) -> Counter[str]:
    """A batch in an engine that is short of memory; AssertionError unless outputs are those of one that isn't, and each
    row without a form says what it says alone. What there was of that which is to be tested."""
    asked, seen, scheduler = cases(number), Counter[str](), short.engine.scheduler
    made, before = grammars(short, one_by_one), scheduler.preempted[scheduler.preemption]
    found = answers(short, asked, lambda form: plain.beside(made.get(form), seen))
    for case, answer in zip(asked, found, strict=True):
        for output in answer.outputs:
            case.check(output)
            seen["ended"] += case.form is not None and output.finish_reason == "stop"
    seen["preempted"] = scheduler.preempted[scheduler.preemption] - before
    seen["tokens found again"] = sum(answer.num_cached_tokens or 0 for answer in found)
    others = grammars(roomy, not one_by_one).get
    assert tokens(answers(roomy, asked, others)) == tokens(found)
    for i in range(len(asked) - FREE, len(asked)):
        assert tokens(answers(roomy, asked[i : i + 1], others)) == tokens(found[i : i + 1])
    return seen


def check(seen: Counter[str]) -> None:
    """All of it was there."""
    for what in ("preempted", "ended", "tokens found again", "copies", "in free strings"):
        assert seen[what] > 0, (what, seen)
    assert seen["in counted strings"] > 30, seen


@pytest.mark.share(30)
@pytest.mark.parametrize("number", range(0, BATCHES, 2))
def test_swapped(number: int, roomy: LLM, swapping: LLM, plain: Plain) -> None:
    check(run(number, roomy, swapping, plain, one_by_one=True))


@pytest.mark.share(30)
@pytest.mark.parametrize("number", range(1, BATCHES, 2))
def test_recomputed(number: int, roomy: LLM, recomputing: LLM, plain: Plain) -> None:
    check(run(number, roomy, recomputing, plain, one_by_one=False))
