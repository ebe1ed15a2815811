"""Sessions: a prompt whose continuation the caller chooses token by token, by fork, append and free (PagedAttention
§5.2), given the log-probabilities of the next token. `LLM.session` opens one; a quire.protocol.method.Method does the
same in a server.
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
    """The decoding method of a session. It never decides, so the branches wait for the caller."""

    def __init__(self, width: int, top: int) -> None:
        self.width, self._top = width, top

    def top(self, context: Context) -> int:
        """See quire.protocol.method."""
        return self._top

    def advance(self, branches: Seq[Branch], context: Context) -> Advance | None:
        """Return None: the branches wait."""
        return None

    def keep(self) -> int:
        """Return 0: there are no results."""
        return 0


def session_params(width: int, max_tokens: int, top: int) -> SamplingParams:
    """Return the parameters of a session's request. Raise InputError for a value beyond its limit."""
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
    """One continuation of the prompt: a branch of the request. Nodes share the pages of their common prefix."""

    def __init__(self, engine: Engine, step: Callable[[], object], request: Request, seq: Sequence) -> None:
        self._engine, self._step, self._request, self._seq = engine, step, request, seq

    @property
    def tokens(self) -> list[int]:
        """The tokens that were appended, by this node and its ancestors."""
        return self._seq.tokens[self._seq.prompt_len :]

    def next(self, k: int) -> TopLogprobs:
        """Return the `k` most likely next tokens, at most the session's `top`, and their log-probabilities, most likely
        first. The tokens appended since the last call are computed now, at once."""
        top = self._compute_candidates()
        return top._replace(ids=top.ids[:k], logprobs=top.logprobs[:k])

    def append(self, *tokens: int) -> None:
        """Continue with `tokens`. Raise InputError for an invalid token, or beyond the session's length."""
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
                self._step()  # a step in flight still samples for the tokens before
                self._check_open()
            self._engine.append_tokens(self._request, self._seq, tokens)

    def fork(self) -> Node:
        """Return a new node that continues from here. Raise InputError beyond the session's width."""
        self._check_open()
        assert self._request.method is not None
        if len(self._request.live_seqs) == self._request.method.width:
            raise InputError(
                f"the session has {len(self._request.live_seqs)} branches, its width: free one first", "width"
            )
        self._compute_candidates()
        while self._request.status is not RequestStatus.RUNNING:
            self._step()
            self._compute_candidates()
        child = self._engine.fork_branch(self._request, self._seq)
        return Node(self._engine, self._step, self._request, child)

    def free(self) -> None:
        """End this node; its descendants remain. Freeing twice is allowed."""
        if self._seq.finish_reason is None:
            if any(other.prefix_source is self._seq for other in self._request.live_seqs):
                self._compute_candidates()  # others wait for the prefix that this node computes
            self._engine.free_branch(self._request, self._seq)

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
