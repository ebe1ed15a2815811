"""Fuzzed schemas and patterns through an engine with the bundled model: requests of all temperatures and several n, so
short of memory that some are preempted, some prompts twice, beside rows that may draw anything.

    python tests/structured_batches.py docs/measurements/cpu_structured_fuzzed.json
"""

from __future__ import annotations

import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
from fuzzed_forms import drawn, patterns, schemas

from quire import LLM, SamplingParams
from quire.bench.document import document, write
from quire.protocol.sampling_params import StructuredOutputsParams
from quire.text.outputs import CompletionOutput, RequestOutput

BATCHES = 50
SCHEMAS, PATTERNS = 11, 5  # of a batch; with some that another batch has too
TWICE, FREE = 3, 4
TEMPERATURES = (0.0, 0.7, 1.0, 2.0)
LONGEST = 120  # tokens of an output
WAYS = ("swap", "recompute")
ENGINE: dict[str, Any] = {"dtype": "float32", "deterministic": True, "max_model_len": 192, "device": "cpu"}
SHORT: dict[str, Any] = {"max_num_seqs": 12, "page_size": 16, "kv_tokens": 512, "swap_gib": 0.1}


class Case(NamedTuple):
    """A request: a schema, or a pattern's text, or nothing that it is held to. `compact`: JSON without white space."""

    prompt: str
    form: Any
    compact: bool
    temperature: float
    n: int
    seed: int

    def params(self) -> SamplingParams:
        form = None
        if self.form is not None:
            kind = "regex" if isinstance(self.form, str) else "json"
            form = StructuredOutputsParams(**{kind: self.form}, disable_any_whitespace=self.compact)
        return SamplingParams(temperature=self.temperature, n=self.n, seed=self.seed, max_tokens=LONGEST,
                              structured_outputs=form, ignore_eos=form is None)  # fmt: skip

    def check(self, output: CompletionOutput) -> None:
        """AssertionError or ValidationError: what ended isn't of the form."""
        assert output.finish_reason in ("stop", "length"), (self, output.stop_reason)
        if self.form is None or output.finish_reason == "length":
            assert len(output.token_ids) == LONGEST
        elif isinstance(self.form, str):
            assert re.fullmatch(self.form, output.text), (self, output.text)
        else:
            jsonschema.validate(json.loads(output.text), self.form)  # a grammar knows no leap years


def cases(number: int) -> tuple[list[Case], list[Case]]:
    """Of a batch: those with a form, the last ones of which are the first ones again; and those without."""
    rng = random.Random(number)
    forms = [*drawn(schemas, SCHEMAS, number), *drawn(patterns, PATTERNS, number)]
    rng.shuffle(forms)

    def case(i: int, form: Any) -> Case:
        prompt = f"Story {i} of evening {number}. Once upon a time there was a small dog who lived near the old mill."
        temperature = rng.choice(TEMPERATURES) if form is not None else 1.0
        n = rng.randint(1, 3) if form is not None else 1
        compact = isinstance(form, dict) and rng.random() < 0.5
        return Case(prompt, form, compact, temperature, n, rng.randrange(1 << 30))

    held = [case(i, form) for i, form in enumerate(forms)]
    return held + held[:TWICE], [case(len(held) + i, None) for i in range(FREE)]


def order(number: int, held: int) -> list[int]:
    """In which a batch's cases are asked: first the free rows, which together don't fit, so that they and whoever comes
    beside them are preempted; who asks again does it right behind."""
    mixed = list(range(held - TWICE))
    random.Random(number).shuffle(mixed)
    again = [each for i in mixed for each in ((i, held - TWICE + i) if i < TWICE else (i,))]
    return [*range(held, held + FREE), *again]


def answers(llm: LLM, asked: list[Case]) -> list[RequestOutput]:
    return llm.generate([one.prompt for one in asked], [one.params() for one in asked], use_tqdm=False)


def tokens(output: RequestOutput) -> list[list[int]]:
    return [list(one.token_ids) for one in output.outputs]


def run(number: int, roomy: LLM, short: LLM) -> Counter[str]:
    """A batch in an engine that is short of memory. AssertionError unless all that ended is of its form, outputs are
    those of an engine with room, prompts were found again, and requests were preempted its way. (One that has only just
    come back is recomputed either way.)"""
    held, free = cases(number)
    mixed = order(number, len(held))
    asked = [(held + free)[i] for i in mixed]
    way, preempted = short.engine.scheduler.preemption, dict(short.engine.scheduler.preemption_counts)
    found = dict(zip(mixed, answers(short, asked)))
    counts = {name: short.engine.scheduler.preemption_counts[name] - before for name, before in preempted.items()}
    assert counts[way] > 0, counts
    seen = Counter[str]({f"preempted, {way} wanted: {name}": count for name, count in counts.items()})
    seen["requests"] = len(asked)
    for i, one in enumerate(held + free):
        for output in found[i].outputs:
            one.check(output)
            name = "free" if one.form is None else "pattern" if isinstance(one.form, str) else "schema"
            seen[f"{name} {output.finish_reason} at {one.temperature:g}"] += 1
            seen["tokens"] += len(output.token_ids)
    assert [tokens(found[i]) for i in range(TWICE)] == [tokens(found[len(held) - TWICE + i]) for i in range(TWICE)]
    seen["tokens found again"] = sum(found[i].num_cached_tokens for i in range(len(held)))
    assert seen["tokens found again"] > 0
    for i, one in enumerate(free):  # each by itself
        assert tokens(answers(roomy, [one])[0]) == tokens(found[len(held) + i]), one
    assert [tokens(one) for one in answers(roomy, held)] == [tokens(found[i]) for i in range(len(held))]
    return seen


def main(path: Path) -> None:
    began, seen = time.perf_counter(), Counter[str]()
    with LLM(**ENGINE) as roomy:
        for way in WAYS:
            with LLM(**ENGINE, **SHORT, preemption=way) as short:
                for number in range(WAYS.index(way), BATCHES, len(WAYS)):
                    seen += run(number, roomy, short)
                    print(number, dict(seen), file=sys.stderr, flush=True)
    forms = {json.dumps(one.form) for number in range(BATCHES) for one in cases(number)[0]}
    texts = sum(form.startswith('"') for form in forms)
    counts = {
        "batches": BATCHES,
        "schemas, no two alike": len(forms) - texts,
        "patterns, no two alike": texts,
        "seconds": round(time.perf_counter() - began, 1),
        **{name: seen[name] for name in sorted(seen)},
    }
    write(path, document("structured_batches", "python tests/structured_batches.py", [str(path)], [counts]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
