"""Mixed load on a server over HTTP: many unlike clients at once, seeded. Knows no engine, only the API."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

VOCAB = 3000  # token ids below this are ordinary ones
PREFIXES = [random.Random(length).choices(range(10, VOCAB), k=length) for length in (40, 130, 300, 700)]
WORDS = ("the", "a", "small", "bright", "old", "ship", "garden", "river", "stone", "night", "and", "then", "she", "saw")


class Load:
    """Clients that ask until told to stop. `answers` counts statuses by kind, `health` holds /health's seconds."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self.seed, self.ends = seed, 0.0
        self.answers: Counter[str] = Counter()
        self.health: list[float] = []

    async def run(self, clients: int, seconds: float) -> None:
        """Have `clients` ask for `seconds`, and /health be asked all the while."""
        self.ends = time.monotonic() + seconds
        async with self.http:
            await asyncio.gather(self._watch(), *(self._client(number) for number in range(clients)))

    async def _watch(self) -> None:
        while time.monotonic() < self.ends:
            began = time.perf_counter()
            assert (await self.http.get("/health")).status_code == 200
            self.health.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)

    async def _client(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        while time.monotonic() < self.ends:
            kind = chance.choices(list(KINDS), [share for _, share in KINDS.values()])[0]
            status = await KINDS[kind][0](self, chance)
            assert status < 500 or status == 503, f"{kind}: {status}"
            self.answers[f"{kind} {status}"] += 1

    async def post(self, path: str, **body: Any) -> int:
        """The status of an answer that is read whole."""
        return (await self.http.post(path, json=body)).status_code

    async def whole(self, chance: random.Random) -> int:
        """A completion, sampled in some way."""
        return await self.post("/v1/completions", prompt=ids(chance), **sampling(chance))

    async def text(self, chance: random.Random) -> int:
        """Several texts in one body."""
        prompts = [sentence(chance) for _ in range(chance.randint(1, 3))]
        return await self.post("/v1/completions", prompt=prompts, **sampling(chance))

    async def chat(self, chance: random.Random) -> int:
        """A conversation of a few rounds."""
        messages = [
            {"role": ("user", "assistant")[i % 2], "content": sentence(chance)} for i in range(chance.choice((1, 3, 5)))
        ]
        return await self.post("/v1/chat/completions", messages=messages, **sampling(chance), logprobs=True)

    async def stream(self, chance: random.Random) -> int:
        """A stream that is read to its end."""
        return await self._streamed(chance, None)

    async def leave(self, chance: random.Random) -> int:
        """A stream that its reader leaves after a few pieces."""
        return await self._streamed(chance, chance.randint(0, 5))

    async def _streamed(self, chance: random.Random, pieces: int | None) -> int:
        body = {"prompt": ids(chance), **sampling(chance), "stream": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if pieces is not None and (pieces := pieces - 1) < 0:
                    break
                assert not line.startswith("data: {") or "error" not in json.loads(line[6:]), line
        return answer.status_code

    async def several(self, chance: random.Random) -> int:
        """n samples of one prompt, of more that were drawn."""
        n = chance.randint(2, 4)
        body = {"prompt": ids(chance), **sampling(chance), "n": n, "best_of": n + chance.randint(0, 2)}
        return await self.post("/v1/completions", **{**body, "temperature": 1.0})

    async def beams(self, chance: random.Random) -> int:
        """A beam search."""
        width = chance.randint(2, 5)
        return await self.post("/v1/completions", prompt=ids(chance, 300), max_tokens=chance.randint(1, 40), n=width,
                               use_beam_search=True)  # fmt: skip

    async def echo(self, chance: random.Random) -> int:
        """A prompt with the log-probabilities of its tokens."""
        return await self.post("/v1/completions", prompt=ids(chance, 700), max_tokens=chance.randint(0, 20), echo=True,
                               logprobs=chance.randint(0, 5))  # fmt: skip

    async def common(self, chance: random.Random) -> int:
        """A prompt that begins as others do."""
        prefix = chance.choice(PREFIXES)
        prompt = prefix[: chance.choice((len(prefix), chance.randint(1, len(prefix))))] + ids(chance, 100)
        return await self.post("/v1/completions", prompt=prompt, **sampling(chance))

    async def tokens(self, chance: random.Random) -> int:
        """A text there and back."""
        answer = await self.http.post("/tokenize", json={"prompt": sentence(chance), "return_token_strs": True})
        return await self.post("/detokenize", tokens=answer.json()["tokens"])

    async def wrong(self, chance: random.Random) -> int:
        """A request that is refused."""
        bad = chance.choice(({"temperature": -1}, {"prompt": [-1]}, {"n": 0}, {"logprobs": 99}, {"stop": 3}))
        return await self.post("/v1/completions", **{"prompt": "a", **bad})


KINDS: dict[str, tuple[Callable[[Load, random.Random], Awaitable[int]], int]] = {
    "whole": (Load.whole, 4),
    "text": (Load.text, 2),
    "chat": (Load.chat, 2),
    "stream": (Load.stream, 4),
    "leave": (Load.leave, 2),
    "several": (Load.several, 2),
    "beams": (Load.beams, 1),
    "echo": (Load.echo, 2),
    "common": (Load.common, 3),
    "tokens": (Load.tokens, 1),
    "wrong": (Load.wrong, 1),
}


def ids(chance: random.Random, most: int = 1500) -> list[int]:
    """A prompt: most are short, and any length up to `most` comes up."""
    return chance.choices(range(10, VOCAB), k=int(most ** chance.random()))


def sentence(chance: random.Random) -> str:
    """Words, one to a few hundred."""
    return " ".join(chance.choices(WORDS, k=int(300 ** chance.random())))


def sampling(chance: random.Random) -> dict[str, Any]:
    """Greedy or drawn, plainly or with rules; up to 200 tokens."""
    asked: dict[str, Any] = {"max_tokens": int(200 ** chance.random()), "ignore_eos": chance.random() < 0.5}
    for settings in (
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "seed": chance.randrange(10**6)},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {str(chance.randrange(VOCAB)): 5}},
        {"min_p": 0.05, "stop": ["the end", "."], "bad_words": ["ship"]},
    ):
        if chance.random() < 0.3:
            asked |= settings
    return asked
