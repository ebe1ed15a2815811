"""A request's outputs as text: what its reader keeps beside the engine, which knows tokens alone.

A stop string is found here, in tokens that the engine took in already, and may take in a few more of before it hears of
it: what comes after the stop is dropped, so that no reader sees when that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.control.outcomes import Output
from quire.vocabulary.params import SamplingParams

if TYPE_CHECKING:
    from quire.text.stream import TextFlow, TokenText

Stop = Callable[[int, str], None]
"""Tells the engine that a branch's text has a stop string."""


class Transcript:
    """The text of one request that continues `prompt`. Without a tokenizer, or where no text is asked for, outputs stay
    as they are."""

    __slots__ = ("_apart", "_ended", "_flows", "_params", "_prompt", "_stop", "_text")

    def __init__(self, text: TokenText | None, prompt: Sequence[int], params: SamplingParams, stop: Stop) -> None:
        self._text = text if params.detokenize else None
        self._prompt, self._params, self._stop = prompt, params, stop
        # Tokens that come together were told apart once, and a stop drops those behind it; but those of ranked branches
        # and of a method are results as they are.
        self._apart = bool(params.stop) and not params.ranked and params.method is None
        self._flows: dict[int, TextFlow] = {}
        self._ended: set[int] = set()  # branches whose end was told

    def read(self, output: Output) -> Output | None:
        """The output with its text, which may end the branch; None for one of a branch that ended before."""
        if self._text is None:
            return output
        id, branch, tokens, _, tops, finish, reason, done, logprob, scored, cached, _ = output
        if branch in self._ended:
            return None
        # An end token itself is not text.
        bare, last = finish == "stop" and not self._params.include_stop_str_in_output, finish not in (None, "abort")
        flow = self._flows.get(branch) or self._flow(branch)
        if self._apart and len(tokens) > 1:
            text, found, read = _one_by_one(flow, tokens, bare, last)
            if found is not None:
                logprob -= sum(top.logprob for top in tops[read:])
                tokens, tops = tokens[:read], tops[:read]
        else:
            text, found = flow.push(tokens[:-1] if bare else tokens, last)
        if found is not None:
            if finish is None:
                self._stop(branch, found)
            finish, reason = "stop", found
        if finish is not None:
            self._flows.pop(branch, None)
            self._ended.add(branch)
            done = done or len(self._ended) == self._params.n
        return Output(id, branch, tokens, text, tops, finish, reason, done, logprob, scored, cached)

    def _flow(self, branch: int) -> TextFlow:
        assert self._text is not None, "only outputs with a text are read"
        flow = self._flows[branch] = self._text.stream(self._prompt, self._params)
        return flow


def _one_by_one(flow: TextFlow, tokens: Sequence[int], bare: bool, last: bool) -> tuple[str, str | None, int]:
    """The text of tokens, a stop string that was found, and how many tokens were read for it. `bare`: the last one
    isn't text; `last`: no more follow."""
    texts = ""
    for at, token in enumerate(tokens, 1):
        ends = at == len(tokens)
        text, found = flow.push(() if bare and ends else (token,), last and ends)
        texts += text
        if found is not None:
            return texts, found, at
    return texts, None, len(tokens)
