"""The same tokens, texts and reasons offline, over a thread and over a process, whatever is asked for."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import echo_service
from echo_service import VOCAB, Echo, Placement

from quire.llm import LLM
from quire.protocol.sampling_params import SamplingParams
from quire.text.outputs import RequestOutput

MODEL: dict[str, Any] = {"kv_tokens": 4096, "max_num_seqs": 32, "max_num_queued_reqs": 4096}


def some_params(rng: random.Random, words: list[str]) -> dict[str, Any]:
    """Return random parameters. `words` are cut out of generated texts, across the borders of tokens."""
    given: dict[str, Any] = {"seed": rng.randrange(10_000), "max_tokens": rng.randrange(1, 40), "ignore_eos": True}
    given["temperature"] = rng.choice((0.0, 0.7, 1.0))
    kind = rng.randrange(8)
    if kind == 0:
        given["n"] = rng.randrange(2, 5)
    elif kind == 1:
        given |= {"n": 2, "best_of": 4}
    elif kind == 2:
        given |= {"n": 2, "beam_width": 3}
    if rng.random() < 0.5 and "beam_width" not in given:
        given["stop"] = rng.sample(words, rng.randrange(1, 4))
        given["include_stop_str_in_output"] = rng.random() < 0.3
    if rng.random() < 0.2:
        given["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(20)]
    if rng.random() < 0.2:
        given["min_tokens"] = rng.randrange(given["max_tokens"] + 1)
    if rng.random() < 0.2:
        given["logprobs"] = rng.randrange(4)
    if rng.random() < 0.1:
        given["prompt_logprobs"] = rng.randrange(3)
    if rng.random() < 0.1 and "stop" not in given:
        given["detokenize"] = False
    if rng.random() < 0.2:
        given["skip_special_tokens"] = False
    if rng.random() < 0.1:
        given["bad_words"] = ["once", "pages"]
    return given


def some_requests(count: int, seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 30))] for _ in range(count)]
    plain = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    with LLM.of(echo_service.built(**MODEL)) as llm:  # type: ignore[arg-type]
        said = [result.outputs[0].text for result in llm.generate(prompts[:40], plain, use_tqdm=False)]
    starts = [(text, rng.randrange(len(text))) for text in said if text]
    words = [text[at : at + rng.randrange(1, 6)] for text, at in starts]
    return [(prompt, some_params(rng, words)) for prompt in prompts]


def essence(result: RequestOutput) -> Any:
    return result.outputs, result.prompt_logprobs, result.prompt_token_ids, result.finished


def offline(requests: list[tuple[list[int], dict[str, Any]]]) -> list[Any]:
    with LLM.of(echo_service.built(**MODEL)) as llm:  # type: ignore[arg-type]
        params = [SamplingParams(**given) for _, given in requests]
        return list(map(essence, llm.generate([prompt for prompt, _ in requests], params, use_tqdm=False)))


def online(requests: list[tuple[list[int], dict[str, Any]]], placement: Placement) -> list[Any]:
    """Return the results of all requests, sent at once."""
    llm = echo_service.linked(echo_service.built(Echo(), **MODEL), placement=placement)

    async def one(prompt: list[int], given: dict[str, Any]) -> Any:
        results = [result async for result in llm.generate(prompt, SamplingParams(**given))]
        return essence(results[-1])

    async def work() -> list[Any]:
        return await asyncio.gather(*(one(*request) for request in requests))

    try:
        return asyncio.run(work())
    finally:
        llm.close()


def test_offline_and_all_links_say_the_same() -> None:
    requests = some_requests(80, seed=1)
    wanted = offline(requests)
    stopped = [out for outs, *_ in wanted for out in outs if isinstance(out.stop_reason, str)]
    assert len(stopped) > 10, "stop strings were meant to be found"
    placements: tuple[Placement, ...] = ("thread", "process", "replicas")
    for placement in placements:
        for (prompt, given), mine, twin in zip(requests, online(requests, placement), wanted):
            assert mine == twin, (placement, prompt, given)
