"""Conversion of a request's outputs to text, in the client. The engine handles only tokens.

Stop strings are detected here, in tokens that the engine has accepted already. The engine may add more tokens before it
learns of the stop; those are dropped, so the text does not depend on that delay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.core.outputs import BranchOutput
from quire.protocol.sampling_params import SamplingParams

if TYPE_CHECKING:
    from quire.text.text_backend import StopAwareDetokenizer, TextBackend

StopCallback = Callable[[int, str], object]
"""Reports a stop string in a branch's text to the engine: (branch, stop string)."""


class RequestDetokenizer:
    """The text of one request that continues `prompt`. Without a tokenizer, or with `detokenize` off, outputs pass
    unchanged."""

    __slots__ = (
        "_accepted", "_backend", "_detokenizers", "_ended_branches", "_params", "_prompt", "_stop", "_token_by_token",
    )  # fmt: skip

    def __init__(
        self, text: TextBackend | None, prompt: Sequence[int], params: SamplingParams, stop: StopCallback
    ) -> None:
        self._backend = text if params.detokenize else None
        self._prompt, self._params, self._stop = prompt, params, stop
        # A stop drops the tokens after it, so tokens of one output are decoded one by one. Ranked branches and those of
        # a method are final results and are kept whole.
        self._token_by_token = bool(params.stop) and not params.returns_best_of and params.method is None
        self._accepted = 0  # draft tokens in the outputs so far
        self._detokenizers: dict[int, StopAwareDetokenizer] = {}
        self._ended_branches: set[int] = set()  # branches whose end was reported

    def process(self, output: BranchOutput) -> BranchOutput | None:
        """Return the output with its text, which may end the branch, or None if its branch has ended before."""
        if self._backend is None:
            return output
        id, branch, tokens, _, tops, finish, reason, done, logprob, scored, cached, _, drafts = output
        if branch in self._ended_branches:
            return None
        # The end token is not part of the text.
        bare, last = finish == "stop" and not self._params.include_stop_str_in_output, finish not in (None, "abort")
        flow = self._detokenizers.get(branch) or self._new_detokenizer(branch)
        if self._token_by_token and len(tokens) > 1:
            text, stop, num_read = _push_one_by_one(flow, tokens, bare, last)
            if stop is not None:
                logprob -= sum(top.logprob for top in tops[num_read:])
                tokens, tops = tokens[:num_read], tops[:num_read]
                drafts = drafts._replace(accepted=min(drafts.accepted, self._accepted + num_read))
            self._accepted = drafts.accepted
        else:
            text, stop = flow.push(tokens[:-1] if bare else tokens, last)
        if stop is not None:
            if finish is None:
                self._stop(branch, stop)
            finish, reason = "stop", stop
        if finish is not None:
            self._detokenizers.pop(branch, None)
            self._ended_branches.add(branch)
            done = done or len(self._ended_branches) == self._params.n
        return BranchOutput(id, branch, tokens, text, tops, finish, reason, done, logprob, scored, cached, (), drafts)

    def _new_detokenizer(self, branch: int) -> StopAwareDetokenizer:
        assert self._backend is not None, "a request without text has no detokenizer"
        flow = self._detokenizers[branch] = self._backend.new_detokenizer(self._prompt, self._params)
        return flow


def _push_one_by_one(
    detokenizer: StopAwareDetokenizer, tokens: Sequence[int], bare: bool, last: bool
) -> tuple[str, str | None, int]:
    """Return the text of the tokens, the stop string found or None, and the number of tokens consumed. `bare`: the last
    token is not text; `last`: no more tokens follow."""
    texts = ""
    for at, token in enumerate(tokens, 1):
        ends = at == len(tokens)
        text, stop = detokenizer.push(() if bare and ends else (token,), last and ends)
        texts += text
        if stop is not None:
            return texts, stop, at
    return texts, None, len(tokens)
