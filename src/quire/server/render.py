"""Outputs as OpenAI's JSON: one renderer makes a stream's chunks and, from all outputs merged, a whole response."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from quire.control.outcomes import Output
from quire.server.protocol import ChatRequest, CompletionRequest
from quire.text.prompts import Prompt, Prompts
from quire.vocabulary.plan import Top

LOWEST = -9999.0  # what -inf becomes: JSON has no infinities
Json = dict[str, Any]


class Usage:
    """Tokens of one HTTP request, over its prompts and branches."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompt = sum(len(prompt.ids) for prompt in prompts)
        self.completion = 0
        self.cached: dict[int, int] = {}

    def add(self, at: int, tokens: int, cached: int) -> None:
        """`tokens` more of an output of prompt `at`, of which `cached` tokens were reused."""
        self.completion += tokens
        self.cached[at] = cached

    def json(self) -> Json:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
        }


class Scored(NamedTuple):
    """A token beside its Top; None for a prompt's first token, which has no probability."""

    token: int
    top: Top | None


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def _leaders(top: Top, k: int) -> dict[int, float]:
    """The chosen token and the k most likely ones."""
    return {top.token: top.logprob, **dict(zip(top.ids[:k], top.logprobs[:k]))}


class CompletionRenderer:
    """/v1/completions: choice `at * n + branch` continues prompt `at`."""

    objects = ("text_completion", "text_completion")

    def __init__(self, id: str, model: str, request: CompletionRequest, prompts: list[Prompt], text: Prompts) -> None:
        self.id, self.model, self.request, self.prompts, self.text = id, model, request, prompts, text
        self.created = int(time.time())
        self.usage = Usage(prompts)
        self.n = request.n or 1
        self.silent = bool(request.echo) and request.max_tokens == 0
        self._offsets: dict[int, int] = {}  # where the next token's text begins, a choice
        self._prompt_tops: dict[int, tuple[Top, ...]] = {}  # a prompt is scored once, before its branches

    def opening(self) -> list[Json]:
        """Chunks that come before any output."""
        return []

    def choice(self, at: int, output: Output, whole: bool) -> Json | None:
        """What `output` adds to its choice; None when there is nothing to show."""
        index = at * self.n + output.branch
        first = index not in self._offsets
        if output.prompt_tops is not None:
            self._prompt_tops.setdefault(at, output.prompt_tops)
        if self.silent:
            output = output._replace(tokens=(), text="", tops=(), finish_reason="length")
        self.usage.add(at, len(output.tokens), output.cached_tokens)
        scored = [Scored(token, top) for token, top in zip(output.tokens, output.tops)]
        text = output.text
        self._offsets.setdefault(index, 0)
        if first and self.request.echo:
            ids = self.prompts[at].ids
            text = self._prompt_text(at) + text
            if self.request.logprobs is not None:
                scored = [Scored(ids[0], None), *map(Scored, ids[1:], self._prompt_tops.get(at, ())), *scored]
        if not (text or scored or output.finish_reason):
            return None
        logprobs = self._logprobs(index, scored) if self.request.logprobs is not None else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": output.finish_reason}
        choice["stop_reason"] = output.stop_reason
        if whole and self.request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_tops.get(at, ()), self.text.decode_token)
        return choice

    def _prompt_text(self, at: int) -> str:
        prompt, tokenizer = self.prompts[at], self.text.tokenizer
        if prompt.text is not None:
            return prompt.text
        return tokenizer.decode(prompt.ids, skip_special_tokens=False) if tokenizer is not None else ""

    def _logprobs(self, index: int, scored: list[Scored]) -> Json:
        """The legacy format: four parallel lists."""
        k = self.request.logprobs or 0
        tokens = [self.text.decode_token(item.token) for item in scored]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(token)
        named = [
            None
            if item.top is None
            else {self.text.decode_token(id): _finite(value) for id, value in _leaders(item.top, k).items()}
            for item in scored
        ]
        chosen = [None if item.top is None else _finite(item.top.logprob) for item in scored]
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": named, "text_offset": offsets}


class ChatRenderer:
    """/v1/chat/completions."""

    objects = ("chat.completion", "chat.completion.chunk")

    def __init__(self, id: str, model: str, request: ChatRequest, prompts: list[Prompt], text: Prompts) -> None:
        self.id, self.model, self.request, self.text = id, model, request, text
        self.created = int(time.time())
        self.usage = Usage(prompts)
        self.n = request.n or 1

    def opening(self) -> list[Json]:
        """The first chunk of each choice carries the role."""
        delta = {"role": "assistant", "content": ""}
        return [{"index": i, "delta": dict(delta), "logprobs": None, "finish_reason": None} for i in range(self.n)]

    def choice(self, at: int, output: Output, whole: bool) -> Json | None:
        """What `output` adds to its choice; None when there is nothing to show."""
        self.usage.add(at, len(output.tokens), output.cached_tokens)
        wanted = bool(self.request.logprobs)
        if not (output.text or (wanted and output.tops) or output.finish_reason):
            return None
        content = [self._entry(token, top) for token, top in zip(output.tokens, output.tops)] if wanted else []
        said = {"role": "assistant", "content": output.text} if whole else {"content": output.text}
        return {
            "index": output.branch,
            "message" if whole else "delta": said,
            "logprobs": {"content": content, "refusal": None} if wanted else None,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _entry(self, token: int, top: Top) -> Json:
        k = self.request.top_logprobs or 0
        leaders = [self._named(id, logprob) for id, logprob in list(zip(top.ids, top.logprobs))[:k]]
        return {**self._named(token, top.logprob), "top_logprobs": leaders}

    def _named(self, token: int, logprob: float) -> Json:
        tokenizer = self.text.tokenizer
        raw = tokenizer.token_bytes(token) if tokenizer is not None else b""
        return {"token": self.text.decode_token(token), "logprob": _finite(logprob), "bytes": list(raw)}


Renderer = CompletionRenderer | ChatRenderer


def prompt_logprobs(tops: Sequence[Top], decode: Callable[[int], str]) -> list[Json | None]:
    """vLLM's prompt_logprobs: for each prompt token {id: {logprob, rank, decoded_token}}, None for the first."""
    entries: list[Json | None] = [None]
    for top in tops:
        ranked = {id: (value, rank) for rank, (id, value) in enumerate(zip(top.ids, top.logprobs), 1)}
        named = {top.token: (top.logprob, top.rank), **ranked}
        entries.append(
            {
                str(id): {"logprob": _finite(value), "rank": rank, "decoded_token": decode(id)}
                for id, (value, rank) in named.items()
            }
        )
    return entries


def envelope(renderer: Renderer, choices: list[Json], *, whole: bool) -> Json:
    """A response, or a chunk of one, around its choices."""
    return {
        "id": renderer.id,
        "object": renderer.objects[0 if whole else 1],
        "created": renderer.created,
        "model": renderer.model,
        "choices": choices,
    }
