"""Measure structured output: rows of one schema, or one such row among others, against rows without a grammar; forced
tokens at once against one a step; and masks over a large vocabulary alone.

Any model will do, also one without weights or a tokenizer, since its text does not matter. In that case, and for masks
alone, the vocabulary is synthetic: bytes, and words of syllables with and without a leading space.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING, Any

from quire.bench.arguments import add_numbers
from quire.bench.document import short, table
from quire.bench.shapes import built
from quire.cli.flags import config_from
from quire.core import grammar_masks
from quire.core.engine import Engine
from quire.errors import StartupError
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import Structured, StructuredOutputsParams
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler

if TYPE_CHECKING:
    from quire.text.tokenizer import Tokenizer

SENTENCES: dict[str, Any] = {"type": "array", "minItems": 400, "items": {"type": "string"}}
"""Free text in an unconstrained form: almost no token is forced."""
BOUNDED = {"type": "array", "minItems": 400, "items": {"type": "string", "minLength": 20, "maxLength": 60}}
"""The same with counted characters, which need many more lexer states."""
KEYS = [f"the_measured_value_of_the_{name}_sensor" for name in ("first", "second", "third", "fourth", "fifth", "sixth")]
RECORD = {
    "type": "object",
    "properties": {key: {"type": "integer", "minimum": 0, "maximum": 9} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
"""Long keys, which are forced, and one digit each."""
WALKED = {"text": SENTENCES, "record": {"type": "array", "items": RECORD}, "counted": BOUNDED}
PROMPT = 32  # tokens
MARKED = 12  # one in MARKED synthetic words has a punctuation mark, every fifth of these a quote. So 2 % of tokens are
# invalid within a string (0.7 % of SmolLM2's vocabulary); they take most of the time of a mask within one


def flags(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments."""
    add_numbers(
        parser, "measurement", rows=(64, "rows with a schema"), tokens=(128, "tokens of each row"),
        repeat=(5, "runs of each kind"), vocabulary=(128_256, "tokens of the synthetic vocabulary for masks alone"),
    )  # fmt: skip


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a result for each of the four."""
    if min(args.rows, args.tokens, args.repeat) < 1 or not 1000 <= args.vocabulary <= 2**20:
        raise StartupError("--rows, --tokens, --repeat and --vocabulary", "Give positive numbers, 1000 to 2**20 tokens")
    with built(config_from(args)) as made:
        engine, size = made.engine, made.spec.vocab_size
        ends = tuple(engine.scheduler.eos_ids) or (0,)
        grammars = GrammarCompiler(made.tokenizer or made_up(size, ends[0]), size, ends)
        results = [
            {"what": "rows of one schema", "model": made.name, **_rows(engine, grammars, args, args.rows)},
            {"what": "one row of a schema, others free", "model": made.name, **_rows(engine, grammars, args, 1)},
            {"what": "forced tokens at once", "model": made.name, **_forced(engine, grammars, args)},
        ]
    return [*results, {"what": "masks alone", **_masks(args.vocabulary, args.rows)}]


def _rows(engine: Engine, grammars: GrammarCompiler, args: argparse.Namespace, held: int) -> dict[str, Any]:
    """Measure tokens a second of rows without a grammar, and of as many rows of which `held` have one, in turn."""
    grammar = grammars.get(form(SENTENCES))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(args.repeat + 1):
        for matched in (False, True):
            speed = _speed(engine, args.rows, args.tokens, grammar, held if matched else 0)
            if i:  # the first warms up
                speeds[matched].append(speed)
    free, constrained = median(speeds[False]), median(speeds[True])
    runs = {"free": speeds[False], "schema": speeds[True]}
    return {"rows": args.rows, "held": held, "lost": 1 - constrained / free,
            "tokens_per_second": {"free": free, "schema": constrained}, "runs": runs}  # fmt: skip


def _forced(engine: Engine, grammars: GrammarCompiler, args: argparse.Namespace) -> dict[str, Any]:
    """Measure tokens a second of a schema with long keys: forced tokens appended at once, and sampled one by one."""
    grammar = grammars.get(form(RECORD, compact=True))
    speeds: dict[bool, list[float]] = {False: [], True: []}
    for i in range(args.repeat + 1):
        for at_once in (False, True):
            with _jumping(at_once):
                speed = _speed(engine, args.rows, 2048, grammar, args.rows)
            if i:
                speeds[at_once].append(speed)
    slow, fast = median(speeds[False]), median(speeds[True])
    return {"rows": args.rows, "tokens_per_second": {"one by one": slow, "at once": fast}, "times": fast / slow,
            "runs": {"one by one": speeds[False], "at once": speeds[True]}}  # fmt: skip


@contextmanager
def _jumping(at_once: bool) -> Iterator[None]:
    least = grammar_masks.JUMP_AHEAD_MIN_TOKENS
    grammar_masks.JUMP_AHEAD_MIN_TOKENS = least if at_once else 1 << 30
    try:
        yield
    finally:
        grammar_masks.JUMP_AHEAD_MIN_TOKENS = least


def _speed(engine: Engine, rows: int, tokens: int, grammar: CompiledGrammar, held: int) -> float:
    """Return tokens a second of `rows` rows, `held` of them with the grammar, from the first token to the last."""
    for i in range(rows):
        matched = i < held
        params = SamplingParams(
            temperature=1, seed=i, max_tokens=min(tokens, engine.limits.max_len - PROMPT - 1), detokenize=False,
            ignore_eos=not matched, structured=form(SENTENCES) if matched else None,
            grammar=grammar if matched else None,
        )  # fmt: skip
        engine.add(str(i), [(5 * j) % 900 + 10 for j in range(PROMPT)], params)
    drawn, began = 0, 0.0
    while engine.has_unfinished_requests:
        drawn += sum(len(output.tokens) for output in engine.step()) if began else 0
        if not began:
            began = time.perf_counter()
    return drawn / (time.perf_counter() - began)


def form(schema: dict[str, Any], compact: bool = False) -> Structured:
    """Return a schema as a response format."""
    return StructuredOutputsParams(json=schema, disable_any_whitespace=compact).structured()


def _masks(vocabulary: int, rows: int, steps: int = 100) -> dict[str, Any]:
    """Measure random walks through schemas, on one thread: the time of a row's mask, and of accepting a token."""
    began = time.perf_counter()
    grammars = GrammarCompiler(made_up(vocabulary), vocabulary, (0,))
    grammars.get(form({"type": "null"})).backend.is_serial = False  # masks are timed separately from accepting tokens
    loaded = time.perf_counter() - began
    found: dict[str, Any] = {"vocabulary": vocabulary, "first_grammar_s": loaded}
    for name, schema in WALKED.items():
        began = time.perf_counter()
        grammar = grammars.get(form(schema))
        compiled = time.perf_counter() - began
        masking, going = _walked(grammar, rows, steps)
        found[name] = {"masks": len(masking), "mask_us": _spread(masking), "accept_us": _spread(going),
                       "grammar_s": compiled}  # fmt: skip
    return found


def _walked(grammar: CompiledGrammar, rows: int, steps: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each mask, and of each token."""
    rng, places = random.Random(0), [grammar.new_matcher() for _ in range(rows)]
    masking, going = [], []
    for _ in range(steps):
        for place in places:
            now = time.perf_counter()
            [mask] = grammar.compute_masks([place])
            masking.append(time.perf_counter() - now)
            token = rng.choice(grammar.backend.allowed_tokens(mask).tolist())
            now = time.perf_counter()
            place.accept(token)
            going.append(time.perf_counter() - now)
        places = [grammar.new_matcher() if place.forced_tokens() == (0,) else place for place in places]
    return masking, going


def _spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1e6 * each for each in seconds)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[int(0.99 * len(ordered))], "max": ordered[-1]}


def made_up(size: int, end: int = 0) -> Tokenizer:
    """Return a byte-level vocabulary of `size` tokens: an end token, all bytes, and words of syllables."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    from quire.text.tokenizer import Tokenizer

    rng = random.Random(size)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate(["<|end|>", *alphabet])}
    syllables = [first + then for first in "bcdfghklmnprstvw" for then in ("a", "e", "i", "on", "us", "er", "ing")]
    marks = ['"', '":', '",', "{", "}", "[", "]", ":", ",", "\n", " ", "  ", "0", "12", "_", "="]
    while len(vocabulary) < size:
        word = "".join(rng.choices(syllables, k=rng.randint(1, 4)))
        if not rng.randrange(MARKED):
            word += rng.choice(marks).strip() + "s"
        token = rng.choice(("Ġ", "")) + rng.choice((word, word.title()))
        vocabulary.setdefault(token.replace("\n", "Ċ").replace(" ", "Ġ"), len(vocabulary))
    other = next(token for token, id in vocabulary.items() if id == end)
    vocabulary[other], vocabulary["<|end|>"] = 0, end
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {"eos_token": "<|end|>"})


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the results, one a line."""
    lines = []
    for one in results:
        if "lost" in one:
            said = f"{one['rows']} rows: {100 * one['lost']:.1f} % fewer tokens a second"
        elif "times" in one:
            said = f"{one['rows']} rows: {one['times']:.2f} times as many tokens a second"
        else:
            masks = [f"{name} {one[name]['mask_us']['p50']:.0f} ({one[name]['mask_us']['p99']:.0f})" for name in WALKED]
            said = f"{one['vocabulary']} tokens: us a mask, p50 (p99): {', '.join(masks)}"
        lines.append(
            (one["what"], said, ", ".join(f"{k} {short(v)}" for k, v in one.get("tokens_per_second", {}).items()))
        )
    return table(("what", "result", "tokens/s"), lines)
