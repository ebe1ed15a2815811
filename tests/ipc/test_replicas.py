"""Several engines behind one client: where requests go, and what becomes of them when an engine ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable

import echo_service
import pytest
from echo_service import Echo
from waiting import wait_until_async

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.errors import EngineDead, InputError, NotIdle, Overloaded, PrefixesFull, PrefixTaken, StartupError
from quire.ipc.child_process import ChildProcess
from quire.ipc.messages import AbortRequests
from quire.ipc.replicas import ReplicatedEngineClient
from quire.protocol.sampling_params import SamplingParams
from quire.router.router import FIRST_MEAN_OUTPUT
from quire.startup.engine_process import replica_gpus

LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True, seed=1)
Work = Callable[[AsyncLLM, ReplicatedEngineClient], Awaitable[None]]


def replicated(
    work: Work, policy: str = "prefix", restart: bool = False, pause: float = 0.0, fail_at: int | None = None,
    **built: object,
) -> None:  # fmt: skip
    """Run a coroutine function with an AsyncLLM over three engines, then close it."""
    model = echo_service.built(Echo(pause=pause, fail_at=fail_at), **built)  # type: ignore[arg-type]
    llm = echo_service.linked(model, placement="replicas", policy=policy, restart=restart)
    client = llm.engine_client
    assert isinstance(client, ReplicatedEngineClient)
    try:
        asyncio.run(work(llm, client))  # type: ignore[arg-type]
    finally:
        assert llm.close()
    assert all(replica.child.has_exited() for replica in client.replicas)


async def complete(llm: AsyncLLM, prompt: list[int], params: SamplingParams = SHORT, salt: str = "") -> list[int]:
    """Return the tokens of a request."""
    found = list[int]()
    async for output in await llm.submit(prompt, params, salt=salt):
        found += output.tokens
    return found


def hits(client: ReplicatedEngineClient) -> list[int]:
    return [replica.metrics.account.sharing.hits for replica in client.replicas]


async def settled(llm: AsyncLLM) -> None:
    """Wait until the engines have reported what they did."""
    await wait_until_async(lambda: not (llm.active or llm.running or llm.queued), "all requests have ended")
    await llm.prefixes()


def test_a_prefix_is_found_where_it_is_and_load_is_divided() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        prefix = [*range(3, 103)]
        await complete(llm, prefix)
        await settled(llm)
        where = [bool(replica.stored) for replica in client.router.replicas].index(True)
        for i in range(5):
            await complete(llm, [*prefix, 200 + i])
        await wait_until_async(lambda: sum(hits(client)) == 5 * 100, "hits are reported")
        assert hits(client)[where] == 5 * 100
        await asyncio.gather(*(complete(llm, [300 + i] * 100) for i in range(9)))
        assert sum(bool(replica.stored) for replica in client.router.replicas) == 3
        assert not client.router.requests
        assert not client._requests
        assert not client._adds

    replicated(work, kv_tokens=4096)


def test_another_salt_shares_nothing() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        for _ in range(3):
            await complete(llm, [*range(3, 103)], salt="a")
        await complete(llm, [*range(3, 103)], salt="b")
        await settled(llm)
        assert sum(map(bool, (replica.stored for replica in client.router.replicas))) == 2, "the salts are apart"

    replicated(work, kv_tokens=4096)


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
def test_other_policies_divide_alike_requests(policy: str) -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        await asyncio.gather(*(complete(llm, [5] * 50) for _ in range(9)))
        computed = lambda: [replica.metrics.stats.prompt_tokens for replica in client.replicas]  # noqa: E731
        await wait_until_async(lambda: sum(computed()) == 450, "all have reported")
        assert computed() == [150] * 3

    replicated(work, policy=policy, kv_tokens=4096)


def test_requests_move_before_their_first_token_and_fail_after_it() -> None:
    """Of an engine that runs one request at a time, one has tokens and another waits."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        died: list[bool] = []
        llm.set_death_callback(lambda: died.append(True))
        tasks = [asyncio.ensure_future(complete(llm, [i + 3], SamplingParams(max_tokens=40, ignore_eos=True)))
                 for i in range(6)]  # fmt: skip
        await wait_until_async(
            lambda: sum(sent.message is None for sent in client._requests.values()) == 3, "one of each engine runs"
        )
        client.replicas[1].child.process.send_signal(signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [end for end in ends if isinstance(end, BaseException)]
        assert len(failed) == 1, ends
        assert isinstance(failed[0], EngineDead)
        assert "replica 1 ended: its process was ended by signal 9 (SIGKILL)" in str(failed[0])
        assert all(len(end) == 40 for end in ends if isinstance(end, list))
        assert not died
        assert llm.heartbeat().alive
        assert not client.replicas[1].health().alive
        assert len(await complete(llm, [9])) == 3
        for i in (0, 2):
            client.replicas[i].child.process.send_signal(signal.SIGKILL)
        await wait_until_async(lambda: bool(died), "the last engine's end is the end")
        with pytest.raises(EngineDead):
            await llm.submit([1], SHORT)

    replicated(work, pause=0.02, max_num_seqs=1, policy="least-loaded")


def test_an_engine_is_started_again_with_its_prefixes_once() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        assert await llm.register_prefix("rules", [7] * 40) == 40
        first = client.replicas[0]
        first.child.process.send_signal(signal.SIGKILL)
        await wait_until_async(lambda: client.replicas[0] is not first, "another one is there")
        while (await llm.prefixes())[1] != {"rules"}:
            await asyncio.sleep(0.02)
        assert len(client._alive) == 3
        client.replicas[0].child.process.send_signal(signal.SIGKILL)
        await wait_until_async(lambda: len(client._alive) == 2, "it isn't started a second time")
        assert not client._restarting
        assert len(await complete(llm, [9])) == 3

    replicated(work, restart=True, prefix_tokens=128)


def test_prefixes_are_those_of_all_engines() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        assert await llm.register_prefix("a", [7] * 40) == 40
        assert await llm.prefixes() == ({"a": 40}, {"a"})
        held = lambda: [replica.metrics.account.sharing.prefixes for replica in client.replicas]  # noqa: E731
        await wait_until_async(lambda: held() == [1, 1, 1], "all have reported")
        assert llm.account.sharing.prefixes == 1
        with pytest.raises(PrefixTaken):
            await llm.register_prefix("a", [8] * 40)
        with pytest.raises(PrefixesFull):
            await llm.register_prefix("b", [8] * 200)
        await llm.release_prefix("a")
        assert await llm.prefixes() == ({}, set())
        assert not client._prefix_computations
        assert not client._broadcasts

    replicated(work, prefix_tokens=128)


def test_a_full_queue_is_passed_by() -> None:
    """Each engine takes one waiting request; the queue is full once all are."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        assert llm.limits.max_queued == 3
        found = await asyncio.gather(*(llm.submit([i + 3], LONG) for i in range(20)), return_exceptions=True)
        refused = [one for one in found if isinstance(one, BaseException)]
        assert all(isinstance(one, Overloaded) for one in refused)
        assert 3 <= len(found) - len(refused) <= 6, "each engine takes one that runs, at most, and one that waits"
        for one in found:
            if not isinstance(one, BaseException):
                llm.abort(one.id)
        await settled(llm)
        assert not client.router.requests

    replicated(work, pause=0.05, max_num_seqs=1, max_num_queued_reqs=1)


def test_all_sleep_or_none() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        stream = await llm.submit([5], LONG)
        with pytest.raises(NotIdle):
            await llm.sleep()
        await wait_until_async(lambda: llm.metrics.asleep == 0, "those that slept were woken up")
        llm.abort(stream.id)
        await settled(llm)
        assert (await llm.sleep())["level"] == 1
        with pytest.raises(Overloaded):
            await llm.submit([5], SHORT)
        assert not (await llm.wake_up())["is_sleeping"]
        assert len(await complete(llm, [5])) == 3
        assert await llm.reset_prefix_cache() >= 0

    replicated(work, pause=0.02)


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, given, count, wanted in (
        (["0", "1"], {}, 2, ["0", "1"]), (["3", "5", "6", "7"], {"tp": 2}, 2, ["3,5", "6,7"]), ([], {}, 3, [None] * 3),
        (["0"], {"device": "cpu"}, 2, [None] * 2),
    ):  # fmt: skip
        monkeypatch.setattr("quire.startup.engine_process.visible_gpus", lambda visible=visible: visible)
        assert replica_gpus(EngineConfig.of(**given), count) == wanted
    monkeypatch.setattr("quire.startup.engine_process.visible_gpus", lambda: ["0", "1", "2"])
    with pytest.raises(StartupError, match=r"--replicas is 2, of 2 GPUs each, and there are 3 GPUs\. Use --replicas 1"):
        replica_gpus(EngineConfig.of(tp=2), 2)


def test_unlike_models_are_refused() -> None:
    model = echo_service.built(Echo())
    llm = echo_service.linked(model, placement="replicas")
    client = llm.engine_client
    assert isinstance(client, ReplicatedEngineClient)
    try:
        limits = client.replicas[2].ready.limits._replace(vocab_size=7)
        client.replicas[2].ready = client.replicas[2].ready._replace(limits=limits)
        with pytest.raises(StartupError, match="replicas 0 and 2 have unlike models: their sizes of vocabulary differ"):
            ReplicatedEngineClient(client.replicas, "prefix")
    finally:
        llm.close()


def test_a_request_id_in_use_is_refused_by_no_engine() -> None:
    """It is one name for all engines."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        stream = await llm.submit([5], LONG, request_id="mine")
        with pytest.raises(InputError, match="in use"):
            await llm.submit([6], SHORT, request_id="mine")
        llm.abort(stream.id)

    replicated(work, pause=0.02)


def stop(client: ReplicatedEngineClient, replica: int, how: signal.Signals) -> None:
    client.replicas[replica].child.process.send_signal(how)


def test_the_end_of_all_ends_what_waits_for_a_reply() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        died: list[bool] = []
        llm.set_death_callback(lambda: died.append(True))
        for i in range(3):
            stop(client, i, signal.SIGSTOP)
        tasks = [asyncio.ensure_future(llm.submit([i + 3], SHORT)) for i in range(6)]
        tasks += [asyncio.ensure_future(llm.look()), asyncio.ensure_future(llm.prefixes())]  # type: ignore[arg-type]
        await wait_until_async(lambda: len(client._adds) == 6, "they are sent")
        for i in range(3):
            stop(client, i, signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [EngineDead] * 8
        await wait_until_async(lambda: bool(died), "the end is reported")
        assert not client._adds
        assert not client._requests

    replicated(work)


def test_a_request_that_ends_its_engine_is_moved_once() -> None:
    """Else it would end all of them."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        with pytest.raises(EngineDead, match="ended"):
            await complete(llm, [5])
        assert len(client._alive) == 1
        assert llm.heartbeat().alive

    replicated(work, fail_at=0)


def test_what_was_aborted_does_not_start_elsewhere() -> None:
    """The abort reaches a replica that has ended, before that is known."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        streams = [await llm.submit([i + 3], LONG) for i in range(6)]
        running = lambda: sum(sent.message is None for sent in client._requests.values())  # noqa: E731
        await wait_until_async(lambda: running() == 3, "one of each engine runs")
        waiting = next(stream for stream in streams if client._requests[stream.number].message is not None)
        child = client.replicas[client._requests[waiting.number].replica].child
        child.process.send_signal(signal.SIGKILL)
        child.process.wait()
        for stream in streams:
            llm.abort(stream.id)
        outputs = [output async for output in waiting]
        assert outputs[-1].finish_reason == "abort"
        assert sum(len(output.tokens) for output in outputs) == 0

    replicated(work, pause=0.02, max_num_seqs=1, policy="least-loaded")


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_prefix_that_one_replica_does_not_end(is_cancelled: bool) -> None:
    """The last one ends, and the prefix is there; or the caller leaves, and no replica keeps it."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        task = asyncio.ensure_future(llm.register_prefix("p", [7] * 200))
        await wait_until_async(lambda: bool(client._prefix_computations) and not client._broadcasts, "it is accepted")
        stop(client, 1, signal.SIGSTOP)
        [computation] = client._prefix_computations.values()
        await wait_until_async(lambda: computation.computing == {1}, "the others have computed it")
        if is_cancelled:
            task.cancel()
        await asyncio.sleep(0)
        stop(client, 1, signal.SIGKILL)
        if is_cancelled:
            with pytest.raises(asyncio.CancelledError):
                await task
            await wait_until_async(lambda: not client._prefix_computations, "its end is known")
            assert await llm.prefixes() == ({}, set())
            assert not client._prefixes
        else:
            assert await task == 200
            assert await llm.prefixes() == ({"p": 200}, {"p"})
        assert len(client._alive) == 2

    replicated(work, pause=0.1, prefix_tokens=512)


def test_a_replica_that_hangs_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChildProcess, "is_stopped", lambda self: False)

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        await complete(llm, [*range(3, 103)])
        await settled(llm)
        where = [bool(replica.stored) for replica in client.router.replicas].index(True)
        stop(client, where, signal.SIGSTOP)
        await wait_until_async(lambda: client.replicas[where].health().stalled, "it is silent")
        assert not llm.heartbeat().stalled
        assert len(await complete(llm, [*range(3, 103), 200])) == 3
        stop(client, where, signal.SIGCONT)

    replicated(work, kv_tokens=4096)


def test_refusals_are_not_ends() -> None:
    """They leave the mean output as it is."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        llm.limits = llm.limits._replace(max_queued=1000)  # the engines refuse, not the client
        found = await asyncio.gather(*(llm.submit([i + 3], LONG) for i in range(60)), return_exceptions=True)
        assert sum(isinstance(one, Overloaded) for one in found) > 40
        assert client.router.mean_output == FIRST_MEAN_OUTPUT
        client.send(AbortRequests(None))
        await settled(llm)

    replicated(work, pause=0.05, max_num_seqs=1, max_num_queued_reqs=1)


def test_a_replica_that_starts_again_among_sleepers_sleeps() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        await llm.register_prefix("rules", [7] * 40)
        await llm.sleep()
        first = client.replicas[0]
        stop(client, 0, signal.SIGKILL)
        await wait_until_async(lambda: client.replicas[0] is not first, "another one is there")
        await wait_until_async(lambda: client.replicas[0].metrics.asleep == 1, "it sleeps")
        with pytest.raises(Overloaded):
            await llm.submit([5], SHORT)
        await llm.wake_up()
        while (await llm.prefixes())[1] != {"rules"}:
            await asyncio.sleep(0.02)
        await asyncio.gather(*(complete(llm, [i + 3]) for i in range(6)))

    replicated(work, restart=True, prefix_tokens=128, policy="round-robin")
