"""Many clients at once, good and bad, on a memory that is too small for them: everybody is answered."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import echo_service
import httpx
from asking import tokens_of
from echo_service import VOCAB, Echo, Placement, Running


async def client(running: Running, number: int, answers: list[int]) -> None:
    """Ten requests: whole, streamed, wrong, or left midway."""
    chance = random.Random(number)
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        for _ in range(10):
            prompt = [chance.randrange(1, VOCAB) for _ in range(chance.choice((1, 5, 40, 120)))]
            body = {"prompt": prompt, "max_tokens": chance.randrange(1, 30), "ignore_eos": True, "seed": number}
            kind = chance.choices(("whole", "stream", "wrong", "leave"), (4, 4, 1, 1))[0]
            if kind == "wrong":
                answers.append((await http.post("/v1/completions", json={**body, "temperature": -1})).status_code)
                assert answers[-1] == 400
            elif kind == "leave":
                with suppress(httpx.ReadTimeout):  # unless this machine is so busy that the answer comes first
                    await http.post(
                        "/v1/completions", json={**body, "max_tokens": 100}, timeout=httpx.Timeout(60, read=0.02)
                    )
                    answers.append(200)
                    continue
                answers.append(499)
            elif kind == "whole":
                answer = await http.post("/v1/completions", json={**body, "logprobs": 0})
                answers.append(answer.status_code)
                wanted = tokens_of(prompt, number, 0, body["max_tokens"])
                choice = answer.json()["choices"][0]
                words = [echo_service.tokenizer().convert_id(token) for token in wanted]
                assert [word for word, id in zip(choice["logprobs"]["tokens"], wanted) if id < 400] == [
                    word for word, id in zip(words, wanted) if id < 400
                ]
            else:
                async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                    answers.append(answer.status_code)
                    assert (await answer.aread()).endswith(b"data: [DONE]\n\n")


def test_32_clients_on_64_pages(placement: Placement) -> None:
    model = echo_service.built(Echo(pause=0.001), kv_tokens=256, max_num_seqs=8)
    with echo_service.serving(model, placement=placement) as running:

        async def all_of_them() -> list[int]:
            answers: list[int] = []
            await asyncio.gather(*(client(running, number, answers) for number in range(32)))
            return answers

        answers = asyncio.run(all_of_them())
        assert len(answers) == 320
        assert set(answers) == {200, 400, 499}
        assert running.idle()
        assert running.metric("quire_num_preemptions_total") > 0, "the memory was meant to be too small"
