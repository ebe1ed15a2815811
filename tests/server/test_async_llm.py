"""AsyncLLM without HTTP: merging, aborting, draining, closing."""

from __future__ import annotations

import asyncio
import threading
import time

import echo_service
import pytest
from echo_service import VOCAB, Echo

from quire.async_llm import AsyncLLM
from quire.errors import EngineDead, InputError, Overloaded
from quire.request import SamplingParams
from quire.sim.echo import expected

LONG = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)


def run(work: object, **options: object) -> AsyncLLM:
    """Run a coroutine function with an AsyncLLM, then close that."""
    assert callable(work)
    llm = AsyncLLM.of(echo_service.built(Echo(**options)))  # type: ignore[arg-type]
    try:
        asyncio.run(work(llm))
    finally:
        llm.close()
    assert not any(thread.name == "quire-engine" for thread in threading.enumerate())
    return llm


def test_tokens_and_done() -> None:
    async def work(llm: AsyncLLM) -> None:
        outputs = [output async for output in llm.generate([1, 2, 3], LONG)]
        tokens = [token for output in outputs for token in output.tokens]
        assert tokens == expected([1, 2, 3], LONG, 1, vocab_size=VOCAB)
        assert [output.done for output in outputs] == [False] * (len(outputs) - 1) + [True]

    run(work)


def test_a_reader_that_sleeps_finds_one_output() -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = await llm.submit([1, 2, 3], LONG)
        while llm.active:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        outputs = [output async for output in stream]
        assert len(outputs) == 1
        assert outputs[0].done
        assert list(outputs[0].tokens) == expected([1, 2, 3], LONG, 1, vocab_size=VOCAB)
        assert outputs[0].text

    run(work)


def test_refusals_come_from_submit() -> None:
    async def work(llm: AsyncLLM) -> None:
        for prompt in ([], [VOCAB], [1] * 300):
            with pytest.raises(InputError):
                await llm.submit(prompt, LONG)
        assert llm.active == 0

    run(work)


def test_leaving_the_iterator_aborts() -> None:
    async def work(llm: AsyncLLM) -> None:
        outputs = llm.generate([1, 2, 3], LONG)
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        while llm.active:
            await asyncio.sleep(0.005)
        assert llm.aborted == 1

    run(work, pause=0.005)


def test_drain_waits_then_aborts() -> None:
    async def work(llm: AsyncLLM) -> None:
        quick = asyncio.ensure_future(_collect(llm, SamplingParams(max_tokens=5, ignore_eos=True)))
        await asyncio.sleep(0.02)
        assert await llm.drain(5)
        assert (await quick)[-1].finish_reason == "length"
        with pytest.raises(Overloaded, match="shutting down"):
            await llm.submit([1], LONG)
        llm.accepting = True
        slow = asyncio.ensure_future(_collect(llm, LONG))
        await asyncio.sleep(0.02)
        assert not await llm.drain(0.05)
        assert (await slow)[-1].finish_reason == "abort"

    run(work, pause=0.01)


async def _collect(llm: AsyncLLM, params: SamplingParams) -> list[object]:
    return [output async for output in llm.generate([1, 2], params)]


def test_close_fails_what_is_in_flight_and_what_comes_later() -> None:
    async def work(llm: AsyncLLM) -> None:
        stream = await llm.submit([1], LONG)
        llm.close()
        llm.close()
        with pytest.raises(EngineDead):
            async for _ in stream:
                pass
        with pytest.raises(EngineDead):
            await llm.submit([1], LONG)
        assert not llm.heartbeat().alive

    run(work, pause=0.01)


def test_an_idle_engine_uses_no_time() -> None:
    async def work(llm: AsyncLLM) -> None:
        await asyncio.sleep(0.1)
        before = time.process_time()
        await asyncio.sleep(0.5)
        assert time.process_time() - before < 0.1
        assert llm.heartbeat().alive
        assert not llm.heartbeat().stalled

    run(work)
