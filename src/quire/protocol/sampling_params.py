"""Sampling parameters of a request: how tokens are chosen and when to stop. Every value is checked; errors name the
value and the limit.

A number or boolean is declared once, by the annotation of its field (`Param`). Its check, its place in step plans and
on the wire, the field of HTTP requests, the flag and the row of docs/reference.md follow from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from quire.errors import InputError, short_repr
from quire.protocol.device_params import (
    DEVICE_NUMBERS,
    MAX_TOKENS,
    DeviceNumbers,
    DeviceSamplingParams,
    Param,
    declared_params,
)
from quire.protocol.method import Method
from quire.protocol.structured_output import Grammar, Structured, StructuredOutputsParams

MAX_N = 128
MAX_BEAM_WIDTH = 64
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_LOGPROBS = 20
MAX_LOGPROB_IDS = 128
MAX_BIASES = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 1024  # of all bad words together
MAX_TOKEN_IDS = 2**20
MAX_STOP_IDS = 1024
POOLINGS = ("auto", "mean", "last")


def _check_int(name: str, value: Any, low: int, high: int) -> int:
    """Return `value`, checked. `name` may have more than the parameter's name: "stop_token_ids[3]"."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name} must be an integer, got {type(value).__name__}", _param_name(name))
    if not low <= value <= high:
        raise InputError(f"{name} must be between {low} and {high}, got {short_repr(value)}", _param_name(name))
    return value


def _param_name(name: str) -> str:
    return name.split("[")[0].split(" ")[0]


def _check_float(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name} must be a number, got {type(value).__name__}", _param_name(name))
    if (isinstance(value, int) and abs(value) > 2**53) or not math.isfinite(value) or not low <= value <= high:
        raise InputError(f"{name} must be between {low} and {high}, got {short_repr(value)}", _param_name(name))
    return float(value)


def _check_bool(name: str, value: Any, *_: None) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} must be true or false, got {type(value).__name__}", name)
    return value


def _check_strings(name: str, value: Any, count: int, chars: int) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else value
    if not isinstance(items, Iterable) or isinstance(items, bytes | Mapping):
        raise InputError(f"{name} must be a string or a list of strings, got {type(value).__name__}", name)
    texts = tuple(items)
    if len(texts) > count:
        raise InputError(f"{name} may have at most {count} entries, got {len(texts)}", name)
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"{name} must hold strings, got {type(text).__name__}", name)
        if not 1 <= len(text) <= chars:
            raise InputError(f"each entry of {name} must have 1 to {chars} characters, got {len(text)}", name)
    return texts


def _check_token_ids(name: str, value: Any, most: int = MAX_TOKEN_IDS) -> tuple[int, ...]:
    """Return the distinct token ids of a list, in order."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise InputError(f"{name} must be a list of token ids, got {type(value).__name__}", name)
    ids = tuple(value)
    if len(ids) > most:
        raise InputError(f"{name} may have at most {most} entries, got {len(ids)}", name)
    for i, item in enumerate(ids):
        if type(item) is not int or not 0 <= item <= MAX_TOKENS:
            _check_int(f"{name}[{i}]", item, 0, MAX_TOKENS)
    return tuple(dict.fromkeys(ids))


def _check_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InputError(f"logit_bias must map token ids to numbers, got {type(value).__name__}", "logit_bias")
    if len(value) > MAX_BIASES:
        raise InputError(f"logit_bias may have at most {MAX_BIASES} entries, got {len(value)}", "logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and len(key) <= 12 and key.isascii() and key.isdigit() else key
        _check_int(f"logit_bias key {short_repr(key)}", token, 0, MAX_TOKENS)
        biases[token] = _check_float(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return biases


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(DeviceNumbers):
    """How to choose tokens and when to stop, with vLLM's names. Raises InputError, which names the limit, for invalid
    values.

    `temperature` 0 is greedy. `top_k` 0 or -1 keeps all tokens. `max_tokens` None means as many as the model's length
    allows; with 0 nothing is generated, and the prompt may have the model's length. `logprobs` k returns the
    log-probabilities of the sampled token and of the k most likely ones. With `logprob_token_ids` those of exactly
    these tokens are returned instead of the most likely ones; `logprobs` must then be None or their number (an empty
    list means None). `seed` makes the result a function of (seed, prompt), whatever else is in the batch. With
    `pooling` nothing is generated: hidden states of the prompt are returned, their "mean", the "last" token's, or the
    engine's setting ("auto"). `structured` is the form of the output, which may also be given with vLLM's names as
    `structured_outputs`. Before the request is queued, the tokenizer fills `bad_word_ids` and `stop_automaton` from
    `bad_words` and `stop`, and `grammar` is compiled from `structured`.
    """

    n: Annotated[int, Param("continuations of each prompt", 1, MAX_N, "engine", shared=False)] = 1
    best_of: Annotated[
        int | None,
        Param("generate this many continuations, and return the n most likely", 1, MAX_N, "engine", shared=False),
    ] = None
    beam_width: Annotated[
        int | None,
        Param("beam search with this many beams; the best n are returned", 1, MAX_BEAM_WIDTH, "engine", shared=False),
    ] = None
    length_penalty: Annotated[
        float,
        Param("of beam search: above 0 favours long outputs, below 0 short ones", -10.0, 10.0, "engine", shared=False),
    ] = 1.0
    early_stopping: bool | str = False
    method: Callable[[], Method] | None = None
    seed: Annotated[int | None, Param("without one, drawn from --seed", -(2**63), 2**63 - 1, "engine", flag=False)] = (
        None
    )
    stop: tuple[str, ...] | list[str] | str | None = ()
    stop_token_ids: tuple[int, ...] | list[int] | None = ()
    bad_words: tuple[str, ...] | list[str] | None = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    ignore_eos: Annotated[bool, Param("continue after end tokens", owner="engine")] = False
    speculate: Annotated[bool, Param("verify draft tokens, if the engine has a source of them", owner="engine")] = True
    max_tokens: Annotated[int | None, Param("tokens to generate", 0, MAX_TOKENS, "engine", shared=False)] = 16
    logprobs: Annotated[
        int | None, Param("most likely tokens to return", 0, MAX_LOGPROBS, "engine", flag=False, shared=False)
    ] = None
    logprob_token_ids: tuple[int, ...] | list[int] | None = None
    prompt_logprobs: Annotated[
        int | None, Param("the same for the prompt", 0, MAX_LOGPROBS, "device", flag=False, shared=False)
    ] = None
    skip_special_tokens: Annotated[
        bool, Param("leave special tokens out of the text", owner="text", flag=False, shared=False)
    ] = True
    include_stop_str_in_output: Annotated[
        bool, Param("keep the stop string in the text", owner="text", flag=False, shared=False)
    ] = False
    detokenize: Annotated[bool, Param("make the text", owner="text", flag=False, shared=False)] = True
    pooling: str | None = None
    structured: Structured | None = None
    structured_outputs: StructuredOutputsParams | None = None
    stop_automaton: Any = field(default=None, compare=False, repr=False)
    grammar: Grammar | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        def put(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)  # the dataclass is frozen

        for name, kind, optional, _, param in PARAMS:
            value = getattr(self, name)
            if value is not None or not optional:
                put(name, CHECKS[kind](name, value, param.low, param.high))
        if self.top_p == 0.0:
            raise InputError("top_p must be above 0 and at most 1, got 0", "top_p")
        put("top_k", max(self.top_k, 0))
        self._check_branches()
        put("stop", _check_strings("stop", self.stop, MAX_STOPS, MAX_STOP_CHARS))
        stop_ids = () if self.stop_token_ids is None else self.stop_token_ids
        put("stop_token_ids", _check_token_ids("stop_token_ids", stop_ids, MAX_STOP_IDS))
        put("bad_words", _check_strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_CHARS))
        if (total := sum(map(len, self.bad_word_ids))) > MAX_BAD_WORD_IDS:
            raise InputError(
                f"bad_word_ids may have at most {MAX_BAD_WORD_IDS} tokens in all, got {total}", "bad_word_ids"
            )
        if self.allowed_token_ids is not None:
            put("allowed_token_ids", _check_token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InputError("allowed_token_ids must not be empty", "allowed_token_ids")
        if self.logit_bias is not None:
            put("logit_bias", _check_logit_bias(self.logit_bias))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}", "min_tokens"
            )
        self._check_logprob_ids()
        if self.stop and not self.detokenize:
            raise InputError("stop strings need detokenize=True", "stop")
        if self.max_tokens == 0 and (self.beam_width is not None or self.method is not None):
            raise InputError("max_tokens must be at least 1 with beam search or a method, got 0", "max_tokens")
        put("structured", self._resolve_structured())
        if self.pooling is not None:
            self._check_pooling()
            put("max_tokens", 0)
            put("min_tokens", 0)

    def _check_pooling(self) -> None:
        if self.pooling not in POOLINGS:
            raise InputError(f"pooling must be one of {', '.join(POOLINGS)}, got {short_repr(self.pooling)}", "pooling")
        for name, plain in (("n", 1), ("best_of", None), ("beam_width", None), ("method", None), ("logprobs", None),
                            ("logprob_token_ids", None), ("prompt_logprobs", None), ("structured", None)):  # fmt: skip
            if getattr(self, name) != plain:
                raise InputError(f"{name} can't be combined with pooling, which generates nothing", name)

    def _resolve_structured(self) -> Structured | None:
        """Return the form of the output, from either parameter. Beams and methods can't have one: they choose among the
        likeliest tokens, which a grammar would have to restrict before."""
        structured, name = self.structured, "structured_outputs"
        if structured is not None and not isinstance(structured, Structured):
            raise InputError(f"structured must be Structured, got {type(structured).__name__}", "structured")
        if (other := self.structured_outputs) is not None:
            if not isinstance(other, StructuredOutputsParams):
                raise InputError(f"{name} must be StructuredOutputsParams, got {type(other).__name__}", name)
            if structured not in (None, other.structured()):
                raise InputError(f"{name} and structured ask for different forms: give one", name)
            structured = other.structured()
        for what, clash in (("beam search", self.beam_width), ("a method", self.method)):
            if structured is not None and clash is not None:
                raise InputError(f"{name} can't be combined with {what}", name)
        for what, given in (("min_tokens", self.min_tokens > 0), ("ignore_eos", self.ignore_eos)):
            if structured is not None and given:
                raise InputError(f"{what} can't be combined with {name}: a grammar says when an output ends", what)
        return structured

    def _check_branches(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise InputError(f"best_of must be at least n ({self.n}), got {self.best_of}", "best_of")
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise InputError(
                f'early_stopping must be true, false or "never", got {short_repr(self.early_stopping)}',
                "early_stopping",
            )
        if self.beam_width is None:
            return
        if self.n > self.beam_width:
            raise InputError(f"n must be at most beam_width ({self.beam_width}), got {self.n}", "n")
        for name, clash in (
            ("best_of", self.best_of not in (None, self.beam_width)),
            ("stop", bool(self.stop)),
            ("method", self.method is not None),
        ):
            if clash:
                hint = "; stop_token_ids works" if name == "stop" else ""
                raise InputError(f"{name} can't be combined with beam search{hint}", name)

    def _check_logprob_ids(self) -> None:
        if self.logprob_token_ids is None:
            return
        ids = _check_token_ids("logprob_token_ids", self.logprob_token_ids, MAX_LOGPROB_IDS) or None
        object.__setattr__(self, "logprob_token_ids", ids)
        if ids is None:
            return
        if self.logprobs not in (None, len(ids)):
            limit = f"None or the number of logprob_token_ids ({len(ids)})"
            raise InputError(f"logprobs must be {limit}, got {self.logprobs}", "logprobs")
        for name, what in (("beam_width", "beam search"), ("method", "a method")):
            if getattr(self, name) is not None:
                raise InputError(f"logprob_token_ids can't be combined with {what}", "logprob_token_ids")

    @property
    def width(self) -> int:
        """The most sequences that the request has at once: one if nothing is generated."""
        return 1 if self.max_tokens == 0 else self.beam_width or self.best_of or self.n

    @property
    def min_output(self) -> int:
        """The fewest tokens that an output needs room for: 0 if nothing is generated, else 1."""
        return int(self.max_tokens != 0)

    @property
    def returns_best_of(self) -> bool:
        """True for best_of above n: which branches are returned is known only at the end."""
        return self.beam_width is None and self.best_of is not None and self.best_of > self.n and self.max_tokens != 0

    @property
    def num_logprobs(self) -> int:
        """How many of the most likely tokens have their log-probabilities returned with each sampled token; 0 with
        `logprob_token_ids`. -1: no log-probabilities, not even that of the sampled token."""
        if self.logprob_token_ids:
            return 0
        return -1 if self.logprobs is None else self.logprobs

    @property
    def needs_history(self) -> bool:
        """True if the sampler must know the tokens so far."""
        return self.to_device_params().needs_history

    def to_device_params(self) -> DeviceSamplingParams:
        """Return the part of the parameters that the runner needs to sample tokens."""
        return DeviceSamplingParams(
            **{declared.name: getattr(self, declared.name) for declared in DEVICE_NUMBERS},
            stop_token_ids=tuple(self.stop_token_ids or ()),
            allowed_token_ids=None if self.allowed_token_ids is None else tuple(self.allowed_token_ids),
            logit_bias=tuple((self.logit_bias or {}).items()),
            bad_word_ids=tuple(map(tuple, self.bad_word_ids)),
            candidates_only=self.beam_width is not None or self.method is not None,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
            logprob_token_ids=tuple(self.logprob_token_ids or ()),
            pooling=self.pooling or "",
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError for a token id outside the vocabulary."""
        assert self.stop_token_ids is not None
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", tuple(self.logit_bias or ())),
            ("logprob_token_ids", self.logprob_token_ids or ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise InputError(f"{name} holds token {token}, but the vocabulary has {vocab_size}", name)


PARAMS = declared_params(SamplingParams)
CHECKS: dict[type, Callable[..., Any]] = {int: _check_int, float: _check_float, bool: _check_bool}
