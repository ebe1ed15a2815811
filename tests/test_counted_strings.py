"""Strings of counted characters through an engine, over a vocabulary so large that their masks are made in parts: each
is the one that plain llguidance makes, which is told of every token and walks through the whole vocabulary, short of
memory, with branches, at any temperature; what ends is of its form; and rows that have none don't change.

Much of the vocabulary is marked, with quotes, escapes, parts of these and of characters."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import tokenizers
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire import LLM, SamplingParams
from quire.protocol.sampling_params import Structured, StructuredOutputsParams
from quire.text.decoder_rules import DecoderRules
from quire.text.grammars.backend import PARSER_LIMITS
from quire.text.grammars.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from quire.text.grammars.counted_strings import MIN_VOCAB
from quire.text.grammars.source import make_grammar_source
from quire.text.grammars.vocabulary import GrammarVocabulary
from quire.text.outputs import RequestOutput
from quire.text.tokenizer import Tokenizer

SIZE, PADDED, END = 16_500, 16_503, 0
PARTS: dict[int, list[Any]] = {
    0: [*"abceknquz ßéΩ日😀\u2028\u0301", *map(chr, range(0x4E00, 0x4E40)), "st", "ing", "Quire", "0041", "x" * 9],
    1: ['"', '",', '", "', '":', '"}', '"]', '","', '":"', ",", "[", "]", "{", "}", ":", "1", "-2", "null", " \n "],
    2: ["\\n", '\\"', "\\\\", "\\u0041", "\\u001f", "\\ud83d\\ude00", "\\ud83d", "\\/", "\\", "\\u", "\\u0", "\\u00"],
    3: ["日".encode()[:1], "日".encode()[:2], "日".encode()[1:], "😀".encode()[:1], "😀".encode()[:3], b"\x80",
        "😀".encode()[3:], "é".encode()[:1], "é".encode()[1:], b"\xff", b"\xc0\x80", b"\xed\xa0\x80"],
    4: ["\n", "\t", "\x00", "\x1f", "\x7f", "\x80"],
}  # fmt: skip
"""Of which tokens are made: characters that stand for themselves, ends and what is between strings, escapes and parts
of these, bytes that aren't whole characters or never are, and characters that stand for themselves nowhere."""
WORDS = ["nacre", "Quire", "-" * 64, "=" * 70]
"""Whole tokens too: letters of which the first may be an escape's, letters that schemas have, and long runs."""
KINDS = [0] * 12 + [1] * 4 + [2] * 3 + [3] * 2 + [4]
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": PADDED,
    "max_position_embeddings": 512, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": END, "dtype": "float32",
}  # fmt: skip


def save(folder: Path) -> None:
    """A model's folder without weights, of a byte-level vocabulary: an end token, all bytes, tokens of up to three
    parts, and one that is special."""
    alphabet = DecoderRules.from_decoder(decoders.ByteLevel()).alphabet
    assert alphabet is not None
    spelled = {byte: character for character, byte in alphabet.items()}
    first = ["<|end|>", *map(spelled.__getitem__, range(256)), *WORDS]
    vocabulary = {token: id for id, token in enumerate(first)}
    rng = random.Random(0)
    while len(vocabulary) < SIZE - 1:
        parts = [rng.choice(PARTS[rng.choice(KINDS)]) for _ in range(rng.choice((1, 2, 2, 2, 3)))]
        token = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
        vocabulary.setdefault("".join(map(spelled.__getitem__, token)), len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|other|>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (folder / "config.json").write_text(json.dumps(SHAPE))


def _leaf(rng: random.Random) -> dict[str, Any]:
    most = rng.choice((1, 3, 8, 24, 40, 70, 70))
    counted = {"type": "string", "minLength": rng.choice((0, 0, 1, most // 2, most)), "maxLength": most}
    others: list[dict[str, Any]] = [
        {"type": "string"}, {"type": "string", "minLength": rng.choice((1, 4, 9))}, {"type": "integer", "maximum": 99},
        {"enum": ["Quire", "a", 'a"b', "é", 3]}, {"type": ["string", "null"], "maxLength": most},
        {"anyOf": [counted, {"type": "null"}]},
    ]  # fmt: skip
    return counted if rng.random() < 0.7 else rng.choice(others)


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Of objects and arrays, whose strings are told apart."""
    kind = rng.choice(("object", "object", "array", "tuple", *["leaf"] * (4 * depth)))
    if kind == "leaf":
        return _leaf(rng)
    if kind == "object":
        names = rng.sample(["name", "of", "age", "nam", 'a"b', "é"], rng.randint(1, 4))
        return {"type": "object", "properties": {name: schema(rng, depth + 1) for name in names},
                "required": names[: rng.randint(1, 4)],
                "additionalProperties": _leaf(rng) if rng.random() < 0.2 else False}  # fmt: skip
    if kind == "array":
        return {"type": "array", "items": schema(rng, depth + 1), "minItems": 1, "maxItems": rng.randint(1, 4)}
    return {"type": "array", "prefixItems": [schema(rng, depth + 1) for _ in range(2)], "minItems": 2, "items": False}


class Told:
    """A Matcher: a place, and plain llguidance that was told of all tokens so far. AssertionError where they differ."""

    def __init__(self, place: GrammarMatcher, plain: LLMatcher, words: Sequence[bytes], seen: Counter[str]) -> None:
        self.place, self.plain, self.words, self.seen, self.text = place, plain, words, seen, b""

    def accept(self, token: int) -> str:
        why = self.place.accept(token)
        fits = self.plain.is_accepting() if token == END else self.plain.consume_token(token)
        self.text += b"" if token == END else self.words[token]
        assert not why, (self.text, why)
        assert fits, self.text
        return why

    def forced_tokens(self) -> tuple[int, ...]:
        run = self.place.forced_tokens()
        if run == (END,):
            assert self.plain.is_stopped(), self.text
        elif run:
            assert self.plain.compute_ff_bytes().startswith(b"".join(map(self.words.__getitem__, run))), self.text
        return run

    def is_unconstrained(self) -> bool:
        return self.place.is_unconstrained()

    def copy(self) -> Told:
        self.seen["copies"] += 1
        other = Told(self.place.copy(), self.plain.deep_copy(), self.words, self.seen)
        other.text = self.text
        return other

    def check(self, mask: bytes) -> None:
        """That of llguidance; of what must follow it is one of several spellings."""
        place, wanted = self.place, self.plain.compute_bitmask()[: len(mask)]
        assert not self.plain.is_error(), self.text
        run = self.forced_tokens()
        self.seen["masks"] += 1
        self.seen["in counted strings"] += place._chars_left > 0
        self.seen["in free strings"] += bool(place._in_free_string)
        if mask == wanted:
            return
        ours, theirs = allowed(mask), allowed(wanted)
        assert run[:1] == (*ours,), (self.text, self._some(ours - theirs), self._some(theirs - ours))
        assert ours <= theirs, self.text
        self.seen["forced"] += 1

    def _some(self, tokens: set[int]) -> list[bytes]:
        return [self.words[token] for token in sorted(tokens)[:5]]


class ToldGrammar:
    """A Grammar of Told. `seen` counts the masks that were compared, and of what kinds they were."""

    def __init__(self, grammar: CompiledGrammar, plain: LLMatcher, words: Sequence[bytes], seen: Counter[str]) -> None:
        self.grammar, self.plain, self.words, self.seen = grammar, plain, words, seen

    def new_matcher(self) -> Told:
        return Told(self.grammar.new_matcher(), self.plain.deep_copy(), self.words, self.seen)

    def compute_masks(self, matchers: Sequence[Told]) -> list[bytes]:
        masks = self.grammar.compute_masks([told.place for told in matchers])
        for told, mask in zip(matchers, masks, strict=True):
            told.check(mask)
        return masks


class Plain:
    """llguidance over the vocabulary, with nothing that makes it faster."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words = GrammarVocabulary(tokenizer, PADDED, (END,))
        self.tokenizer = LLTokenizer(TokenizerWrapper(self.words), n_vocab=PADDED, eos_token=[END], slices=[])
        self.limits = LLParserLimits(**PARSER_LIMITS)

    def beside(self, grammar: CompiledGrammar, seen: Counter[str]) -> ToldGrammar:
        """The same grammar."""
        source = make_grammar_source(grammar.structured, self.words.tokenizer)
        plain = LLMatcher(self.tokenizer, source, log_level=0, limits=self.limits)
        return ToldGrammar(grammar, plain, self.words.tokens, seen)


def allowed(mask: bytes) -> set[int]:
    """The tokens of a mask."""
    return {*np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()}


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
def engines(folder: Path) -> Iterator[Callable[[str], LLM]]:
    """By how they make room. One that recomputes has two steps in flight: masks come late."""
    more = {"roomy": {}, "swap": {**SHORT, "preemption": "swap"},
            "recompute": {**SHORT, "preemption": "recompute", "depth": 2}}  # fmt: skip
    with ExitStack() as stack:
        yield cache(lambda way: stack.enter_context(LLM(str(folder), **ROOMY, **more[way])))


@pytest.fixture(scope="module")
def plain(engines: Callable[[str], LLM]) -> Plain:
    tokenizer = engines("roomy").built.tokenizer
    assert tokenizer is not None
    return Plain(tokenizer)


def grammars(llm: LLM, one_by_one: bool) -> GrammarCompiler:
    """Those of an engine, which makes masks `one_by_one` as tokens come, or all of a step's at once on threads."""
    text = llm.prompts.text_backend
    assert text is not None
    assert text.grammars is not None
    masker = text.grammars._get_backend()
    assert masker.vocab_size > MIN_VOCAB
    assert masker.counted_strings is not None
    masker.is_serial = one_by_one
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
    made, before = grammars(short, one_by_one), scheduler.preemption_counts[scheduler.preemption]
    found = answers(short, asked, lambda form: plain.beside(made.get(form), seen))
    for case, answer in zip(asked, found, strict=True):
        for output in answer.outputs:
            case.check(output)
            seen["ended"] += case.form is not None and output.finish_reason == "stop"
    seen["preempted"] = scheduler.preemption_counts[scheduler.preemption] - before
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
def test_swapped(number: int, engines: Callable[[str], LLM], plain: Plain) -> None:
    check(run(number, engines("roomy"), engines("swap"), plain, one_by_one=True))


@pytest.mark.share(30)
@pytest.mark.parametrize("number", range(1, BATCHES, 2))
def test_recomputed(number: int, engines: Callable[[str], LLM], plain: Plain) -> None:
    check(run(number, engines("roomy"), engines("recompute"), plain, one_by_one=False))
