"""A prompt whose continuation is up to the caller, token by token: fork, append, free (PagedAttention §5.2), and the
log-probabilities of what may come next. `LLM.session` opens one; a vocabulary.method.Method says the same to a server.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from types import TracebackType

from quire.core.engine import Engine
from quire.core.request import Request, RequestStatus
from quire.errors import EngineDead, InputError
from quire.protocol.method import Advance, Branch, Context
from quire.protocol.sampling_params import MAX_N, SamplingParams
from quire.protocol.sequence import Sequence
from quire.protocol.step_plan import TopLogprobs

MAX_TOP = 4096


class SessionMethod:
    """The method of a session: it never decides, so that the branches wait for the caller."""

    def __init__(self, width: int, top: int) -> None:
        self.width, self._top = width, top

    def top(self, context: Context) -> int:
        """See quire.protocol.method."""
        return self._top

    def advance(self, branches: Seq[Branch], context: Context) -> Advance | None:
        """Not yet."""
        return None

    def keep(self) -> int:
        """No results."""
        return 0


def session_params(width: int, max_tokens: int, top: int) -> SamplingParams:
    """The parameters of a session's request. InputError names a limit."""
    for name, value, most in (("width", width, MAX_N), ("top", top, MAX_TOP)):
        if type(value) is not int or not 1 <= value <= most:
            raise InputError(f"{name} must be an integer from 1 to {most}, got {str(value)[:20]}", name)
    return SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        method=lambda: SessionMethod(width, top),
    )


class Node:
    """One continuation of the prompt: a branch of the request. Nodes share the pages of what they have in common."""

    def __init__(self, engine: Engine, step: Callable[[], object], request: Request, seq: Sequence) -> None:
        self._engine, self._step, self._request, self._seq = engine, step, request, seq

    @property
    def tokens(self) -> list[int]:
        """What was appended, by this node and its ancestors."""
        return self._seq.tokens[self._seq.prompt_len :]

    def next(self, k: int) -> TopLogprobs:
        """The `k` most likely next tokens and their log-probabilities, most likely first; at most the session's `top`.
        What was appended since the last call is computed now, in one go."""
        top = self._compute_candidates()
        return top._replace(ids=top.ids[:k], logprobs=top.logprobs[:k])

    def append(self, *tokens: int) -> None:
        """Continue with `tokens`. InputError for one that the model doesn't have, or beyond the session's length."""
        self._check_open()
        vocab, room = self._engine.limits.vocab_size, self._request.max_tokens - len(self.tokens)
        for token in tokens:
            if type(token) is not int or not 0 <= token < vocab:
                raise InputError(f"{str(token)[:20]} is no token id from 0 to {vocab - 1}", "token")
        if len(tokens) > room:
            raise InputError(
                f"{len(tokens)} more tokens exceed the session's max_tokens by {len(tokens) - room}", "token"
            )
        if tokens:
            while self._seq.pending_samples or not self._seq.not_in_flight:
                self._step()  # a step in flight still draws for what was appended before
                self._check_open()
            self._request.candidates.pop(self._seq.id, None)
            self._seq.tokens += tokens

    def fork(self) -> Node:
        """A node that goes on from here. InputError beyond the session's width."""
        self._check_open()
        assert self._request.method is not None
        if len(self._request.live_seqs) == self._request.method.width:
            raise InputError(
                f"the session has {len(self._request.live_seqs)} branches, its width: free one first", "width"
            )
        top = self._compute_candidates()
        while self._request.status is not RequestStatus.RUNNING:
            self._step()
            top = self._compute_candidates()
        child = self._engine.scheduler.method_driver.fork(self._request, self._seq)
        if self._request.status is RequestStatus.RUNNING:
            self._request.candidates[child.id] = top
        return Node(self._engine, self._step, self._request, child)

    def free(self) -> None:
        """End this node; its descendants go on. Freeing twice is fine."""
        if self._seq.finish_reason is None:
            if any(other.prefix_source is self._seq for other in self._request.live_seqs):
                self._compute_candidates()  # others wait for what this one computes for them
            self._request.candidates.pop(self._seq.id, None)
            self._engine.scheduler.finish(self._request, self._seq, "stop")

    def _compute_candidates(self) -> TopLogprobs:
        self._check_open()
        while self._seq.id not in self._request.candidates:
            self._step()
            self._check_open()
        return self._request.candidates[self._seq.id]

    def _check_open(self) -> None:
        if self._seq.finish_reason == "error":
            raise EngineDead(str(self._seq.stop_reason))
        if self._seq.finish_reason is not None or self._request.aborted:
            raise InputError("this branch was freed, or its session closed")

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()
