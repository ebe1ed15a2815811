"""AsyncLLM without HTTP: merging, aborting, draining, closing."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise
from typing import Any

import echo_service
import psutil
import pytest
from asking import run
from echo_service import VOCAB, Placement
from waiting import wait_until_async

from quire.async_llm import AsyncLLM
from quire.errors import EngineDead, InputError, Overloaded, PromptTooLong
from quire.ipc.messages import QueueSizes, Reply
from quire.ipc.thread_client import ThreadEngineClient
from quire.llm import LLM
from quire.protocol.sampling_params import SamplingParams
from quire.text.chat_template import ChatTemplate
from quire.text.outputs import RequestOutput

LONG = SamplingParams(max_tokens=100, seed=1, ignore_eos=True)

PROMPTS: list[Any] = ["once upon a time", [1, 2, 3], {"prompt": "a quire"}, {"prompt_token_ids": [4, 5]}]


@pytest.mark.parametrize("asked", [{"logprobs": 1}, {"logprob_token_ids": [9, 4, 70]}], ids=str)
def test_results_are_those_of_the_offline_twin(placement: Placement, asked: dict[str, Any]) -> None:
    params = SamplingParams(n=2, max_tokens=12, seed=3, prompt_logprobs=1, ignore_eos=True, **asked)
    talk = [{"role": "user", "content": "a quire of pages"}]
    with LLM.of(echo_service.built()) as offline:  # type: ignore[arg-type]
        wanted = [offline.generate(prompt, sampling_params=params, use_tqdm=False)[0] for prompt in PROMPTS]
        wanted += offline.chat(talk, sampling_params=params, use_tqdm=False)

    async def work(llm: AsyncLLM) -> None:
        calls = [llm.generate(prompt, sampling_params=params) for prompt in PROMPTS]
        for call, twin in zip([*calls, llm.chat(talk, sampling_params=params)], wanted):
            results = [result async for result in call]
            assert [result.finished for result in results] == [False] * (len(results) - 1) + [True]
            last = results[-1]
            assert (last.prompt, last.prompt_token_ids) == (twin.prompt, twin.prompt_token_ids)
            assert (last.outputs, last.prompt_logprobs) == (twin.outputs, twin.prompt_logprobs)
            assert last.metrics is not None
            for before, after in pairwise(results):  # cumulative, and what was yielded stays as it was
                for old, new in zip(before.outputs, after.outputs):
                    assert new.text.startswith(old.text)
                    assert new.token_ids[: len(old.token_ids)] == old.token_ids
            partial.extend(r for r in results if len(r.outputs[0].token_ids) < 12)

    partial: list[RequestOutput] = []
    run(work, placement, pause=0.005)
    assert partial


def test_many_are_taken_in_one_step_or_none() -> None:
    async def work(llm: AsyncLLM) -> None:
        await llm.submit([1], LONG)
        steps = llm.engine.stats.steps
        named = [(f"many-{i}", [i + 1]) for i in range(14)]
        streams = await llm.submit_all(named, SamplingParams(max_tokens=2, ignore_eos=True))
        assert llm.engine.stats.steps - steps < 12  # each in a step of its own: 14
        assert [[output.done async for output in stream][-1] for stream in streams] == [True] * 14
        assert not any(stream.id in llm.engine.requests for stream in streams)
        for bad, error in (("many-5", [VOCAB]), ("many-3", [7]), ("late", [])):
            with pytest.raises(InputError):
                await llm.submit_all([*named, (bad, error)], LONG)
        with pytest.raises(InputError, match="at most 48 may wait"):
            await llm.submit_all([(str(i), [1]) for i in range(49)], LONG)
        blocking = await llm.submit_all([(f"wait-{i}", [1]) for i in range(30)], LONG)
        with pytest.raises(Overloaded):
            await llm.submit_all([(str(i), [1]) for i in range(40)], LONG)
        assert llm.active == 1 + len(blocking)
        assert llm.num_rejected == 1

    run(work, "thread", pause=0.03, max_num_queued_reqs=3)


def test_a_salt_that_is_no_text_is_refused() -> None:
    async def work(llm: AsyncLLM) -> None:
        for salt in ("\ud800", "x" * 1025, 5):
            with pytest.raises(InputError, match="cache_salt"):
                await llm.submit([1], LONG, salt=salt)  # type: ignore[arg-type]
        assert [output.done async for output in await llm.submit([1], LONG, salt="x" * 1024)][-1]

    run(work)


def test_refusals_come_from_submit(placement: Placement) -> None:
    async def work(llm: AsyncLLM) -> None:
        for id in ("", "x" * 1025):
            with pytest.raises(InputError, match=f"a request id has 1 to 1024 characters, got {len(id)}"):
                await llm.submit_all([(id, [1])], LONG)
        for prompt in ([], [VOCAB], [1] * 300):
            with pytest.raises(InputError):
                await llm.submit(prompt, LONG)
        assert llm.active == 0

    run(work, placement)


def test_leaving_the_iterator_aborts(placement: Placement) -> None:
    async def work(llm: AsyncLLM) -> None:
        outputs = llm.generate([1, 2, 3], LONG)
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        await wait_until_async(lambda: not llm.active, "no request is left")
        assert llm.num_aborted == 1

    run(work, placement, pause=0.05)


def test_close_ends_the_chat_templates_process() -> None:
    async def work(llm: AsyncLLM) -> None:
        llm.prompts.replace_chat_template(ChatTemplate(echo_service.TEMPLATE, {}))  # that of all echoes stays
        process, _ = llm.prompts.chat_template._process._kill.peek()[2]  # type: ignore[union-attr]
        assert process.poll() is None
        llm.close()
        assert process.poll() is not None
        with pytest.raises(EngineDead):
            await anext(llm.chat([{"role": "user", "content": "a"}], LONG))

    run(work)


def test_an_idle_engine_uses_no_time(placement: Placement) -> None:
    def used(llm: AsyncLLM) -> float:
        """Seconds of processor time, of this process and of the engine's."""
        times = psutil.Process(llm.engine_client.child.process.pid).cpu_times() if placement == "process" else None
        return time.process_time() + (times.user + times.system if times else 0)

    async def work(llm: AsyncLLM) -> None:
        spent = []
        for _ in range(3):  # others' threads may have something to do
            before = used(llm)
            await asyncio.sleep(0.3)  # the span that is measured
            spent.append(used(llm) - before)
        assert min(spent) < 0.06
        assert llm.heartbeat().alive
        assert not llm.heartbeat().stalled

    run(work, placement)


def test_refusals_of_all_threads_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller's thread refuses a request just when the engine's thread tells of one that it refused."""
    llm = AsyncLLM.of(echo_service.built(max_num_queued_reqs=5))  # type: ignore[arg-type]
    monkeypatch.setattr(type(llm.engine_client), "queue_sizes", QueueSizes(batches=5))

    def refuse() -> None:
        with pytest.raises(Overloaded):
            llm._check_open()

    class Slow(Exception):
        @property
        def __class__(self) -> Any:
            caller = threading.Thread(target=refuse)
            caller.start()
            caller.join()
            return Overloaded

    llm._receive(Reply(0, Slow()))
    llm.close()
    assert llm.num_rejected == 2


def test_another_engine_brings_its_own_limits() -> None:
    """One that was started again may have found less memory."""

    async def work(llm: AsyncLLM) -> None:
        model = echo_service.built()
        ready = llm.engine_client.ready._replace(limits=model.engine.limits._replace(max_len=100, max_queued=7))
        assert llm.engine_client.close(5)
        llm.connect(ThreadEngineClient(model.engine, ready))
        assert (llm.prompts.max_len, llm.limits.max_queued) == (100, 7)
        with pytest.raises(PromptTooLong, match="100"):
            await llm.submit([1] * 150, LONG)
        with pytest.raises(PromptTooLong, match="length is 100 tokens"):
            await llm.prompts.process_prompts(["x" * 5000])

    run(work)
