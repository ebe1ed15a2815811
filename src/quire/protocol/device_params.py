"""The sampling parameters that the device applies, and how any sampling parameter is declared."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

MAX_TOKENS = 2**31 - 1


class Param(NamedTuple):
    """The declaration of a sampling parameter that is a number or a boolean: the annotation of its field.

    `doc` describes it in --help and docs/reference.md. `low` and `high` bound a number, both included. `owner` is
    the part that applies it: "device" (quire.worker), "engine" (quire.core) or "text" (quire.text, whose parameters are
    not sent to the engine). `flag`: commands have a flag of its name. `shared`: all HTTP APIs have a field of its name,
    which is passed on as it is. `model_default`: the model's generation_config.json may set it.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    owner: Literal["device", "engine", "text"] = "device"
    flag: bool = True
    shared: bool = True
    model_default: bool = False


class DeclaredParam(NamedTuple):
    """A declared parameter: its name, its type (int, float or bool) and default, and whether it may be None."""

    name: str
    kind: type
    optional: bool
    default: Any
    param: Param


def declared_params(of: type) -> tuple[DeclaredParam, ...]:
    """Return the parameters that the fields of a dataclass declare, in order."""
    hints, declared = get_type_hints(of, include_extras=True), []
    for field in fields(of):
        kind, *annotations = get_args(hints[field.name]) or (None,)
        if annotations and isinstance(annotations[0], Param):
            kinds = get_args(kind) or (kind,)
            declared.append(DeclaredParam(field.name, kinds[0], len(kinds) > 1, field.default, annotations[0]))
    return tuple(declared)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNumbers:
    """The numbers that the device applies when it samples a token. New ones go last, since they have this order on the
    wire."""

    temperature: Annotated[float, Param("0 is greedy", 0.0, 100.0, model_default=True)] = 1.0
    top_p: Annotated[
        float, Param("keep the most likely tokens up to this probability; above 0", 0.0, 1.0, model_default=True)
    ] = 1.0
    min_p: Annotated[
        float, Param("drop tokens below this share of the best one's probability", 0.0, 1.0, model_default=True)
    ] = 0.0
    presence_penalty: Annotated[float, Param("taken from the logits of tokens that the output has", -2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[
        float, Param("taken from a token's logit for each time that the output has it", -2.0, 2.0)
    ] = 0.0
    repetition_penalty: Annotated[
        float, Param("above 1 discourages tokens of the prompt and the output", 0.01, 100.0, model_default=True)
    ] = 1.0
    top_k: Annotated[int, Param("keep this many tokens; 0 or -1: all", -1, MAX_TOKENS, model_default=True)] = 0
    min_tokens: Annotated[
        int, Param("no end token before, and no stop string that ends before", 0, MAX_TOKENS, flag=False)
    ] = 0


DEVICE_NUMBERS = declared_params(DeviceNumbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSamplingParams(DeviceNumbers):
    """How tokens are sampled: the part of SamplingParams that the runner needs, as numbers and token ids. Methods, stop
    strings and the like stay with the engine and its clients."""

    stop_token_ids: tuple[int, ...] = ()  # masked, with the end tokens, below min_tokens
    allowed_token_ids: tuple[int, ...] | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids and the numbers to add to their logits
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    candidates_only: bool = False  # a method chooses among the likeliest tokens: none is sampled
    prompt_logprobs: int = -1  # likeliest tokens to return with each scored token; -1: no scoring
    logprob_token_ids: tuple[int, ...] = ()  # to return with each sample instead of the likeliest ones
    pooling: str = ""  # "mean" or "last": nothing is sampled, hidden states are returned (SliceResult.pooled)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is chosen, without noise."""
        return self.candidates_only or self.temperature < 1e-5

    @property
    def needs_history(self) -> bool:
        """True if the sampler must know the tokens so far: for penalties and bad words of several tokens."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
            or any(len(word) > 1 for word in self.bad_word_ids)
        )
