"""A request's outputs as text: what its reader keeps beside the engine, which knows tokens alone.

A stop string is found here, in tokens that the engine took in already, and may take in a few more of before it hears of
it: what comes after the stop is dropped, so that no reader sees when that was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.core.outputs import BranchOutput
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.text.text_backend import StopAwareDetokenizer, TextBackend

StopCallback = Callable[[int, str], None]
"""Tells the engine that a branch's text has a stop string."""


class RequestDetokenizer:
    """The text of one request that continues `prompt`. Without a tokenizer, or where no text is asked for, outputs stay
    as they are."""

    __slots__ = ("_backend", "_detokenizers", "_ended_branches", "_params", "_prompt", "_stop", "_token_by_token")

    def __init__(
        self, text: TextBackend | None, prompt: Sequence[int], params: SamplingParams, stop: StopCallback
    ) -> None:
        self._backend = text if params.detokenize else None
        self._prompt, self._params, self._stop = prompt, params, stop
        # Tokens that come together were told apart once, and a stop drops those behind it; but those of ranked branches
        # and of a method are results as they are.
        self._token_by_token = bool(params.stop) and not params.returns_best_of and params.method is None
        self._detokenizers: dict[int, StopAwareDetokenizer] = {}
        self._ended_branches: set[int] = set()  # branches whose end was told

    def process(self, output: BranchOutput) -> BranchOutput | None:
        """The output with its text, which may end the branch; None for one of a branch that ended before."""
        if self._backend is None:
            return output
        id, branch, tokens, _, tops, finish, reason, done, logprob, scored, cached, _ = output
        if branch in self._ended_branches:
            return None
        # An end token itself is not text.
        bare, last = finish == "stop" and not self._params.include_stop_str_in_output, finish not in (None, "abort")
        flow = self._detokenizers.get(branch) or self._new_detokenizer(branch)
        if self._token_by_token and len(tokens) > 1:
            text, found, read = _push_one_by_one(flow, tokens, bare, last)
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
            self._detokenizers.pop(branch, None)
            self._ended_branches.add(branch)
            done = done or len(self._ended_branches) == self._params.n
        return BranchOutput(id, branch, tokens, text, tops, finish, reason, done, logprob, scored, cached)

    def _new_detokenizer(self, branch: int) -> StopAwareDetokenizer:
        assert self._backend is not None, "only outputs with a text are read"
        flow = self._detokenizers[branch] = self._backend.new_detokenizer(self._prompt, self._params)
        return flow


def _push_one_by_one(
    detokenizer: StopAwareDetokenizer, tokens: Sequence[int], bare: bool, last: bool
) -> tuple[str, str | None, int]:
    """The text of tokens, a stop string that was found, and how many tokens were read for it. `bare`: the last one
    isn't text; `last`: no more follow."""
    texts = ""
    for at, token in enumerate(tokens, 1):
        ends = at == len(tokens)
        text, found = detokenizer.push(() if bare and ends else (token,), last and ends)
        texts += text
        if found is not None:
            return texts, found, at
    return texts, None, len(tokens)
