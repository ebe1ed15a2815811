"""Replicas that compute prompts for others: requests are served as by one engine, and whatever ends, is aborted or is
full, nothing is lost and nothing is held for ever."""

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
from quire.errors import EngineDead, InputError, StartupError
from quire.ipc.messages import AbortRequests, EngineMetrics
from quire.ipc.replicas import ReplicatedEngineClient
from quire.protocol.sampling_params import SamplingParams
from quire.server.options import ServeOptions, check_prefill_replicas

SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
LONG = SamplingParams(max_tokens=120, ignore_eos=True, seed=1)
MORE = ("at once", "after tokens", "all at once")
SWAP_GIB = echo_service.HOST_BYTES / 2**30
Work = Callable[[AsyncLLM, ReplicatedEngineClient], Awaitable[None]]


def separated(
    work: Work, num_prefill: int = 1, restart: bool = False, pause: float = 0.0, policy: str = "prefix",
    **built: object,
) -> None:  # fmt: skip
    """Run a coroutine function with an AsyncLLM over three engines, of which the first ones compute prompts; check that
    all is released at the end."""
    settings = {"kv_tokens": 1024, "swap_gib": SWAP_GIB, **built}
    model = echo_service.built(Echo(pause=pause), **settings)  # type: ignore[arg-type]
    llm = echo_service.linked(model, placement="replicas", policy=policy, restart=restart, num_prefill=num_prefill)
    client = llm.engine_client
    assert isinstance(client, ReplicatedEngineClient)

    async def checked() -> None:
        await work(llm, client)
        await released(llm, client)

    try:
        asyncio.run(checked())
    finally:
        assert llm.close()
    memory = client.replicas[0].child.shared_memory
    assert memory is not None
    assert memory.closed


def metrics(client: ReplicatedEngineClient) -> list[EngineMetrics]:
    return [client.replicas[i].metrics for i in sorted(client._alive)]


async def released(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
    """Wait until no page and no host page is held by any engine, and nothing is remembered."""

    def idle() -> bool:
        sharing = [each.account.sharing for each in metrics(client)]
        usage = [each.account.usage for each in metrics(client)]
        is_free = not any(one.host_pages_used for one in sharing) and all(
            one.free + one.cached == one.total for one in usage
        )
        return is_free and not (llm.active or llm.running or llm.queued)

    while True:
        before = metrics(client)
        await llm.prefixes()  # after any reply an engine reports its state before it rests
        while any(now is old for now, old in zip(metrics(client), before)):
            await asyncio.sleep(0.01)
        if idle():
            break
    assert not client._computations
    assert not client._imports
    assert not client._requests
    assert not client._adds
    assert not client._aborted
    assert not client.router.requests
    assert all(not replica.prompt_tokens for replica in client.router.replicas)


async def complete(
    llm: AsyncLLM, prompt: list[int], params: SamplingParams = SHORT, salt: str = ""
) -> tuple[list[int], int]:
    """Return the tokens of a request, and how many of its prompt's were cached."""
    tokens, cached = list[int](), 0
    async for output in await llm.submit(prompt, params, salt=salt):
        tokens += output.tokens
        cached = output.cached_tokens
    return tokens, cached


def alone(prompts: list[list[int]], params: SamplingParams, **built: object) -> list[list[int]]:
    """The tokens of one engine."""
    engine = echo_service.built(**built).engine  # type: ignore[arg-type]
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    while engine.has_unfinished_requests:
        for output in engine.step():
            found[output.request_id] += output.tokens
    return list(found.values())


PROMPTS = [[(i * 7 + k) % 300 + 3 for i in range(80 + 9 * k)] for k in range(8)]


@pytest.mark.parametrize(
    ("num_prefill", "policy"),
    [
        (1, "prefix"),
        *(pytest.param(*each, marks=pytest.mark.full) for each in ((2, "least-loaded"), (1, "round-robin"))),
    ],
)
def test_tokens_are_those_of_one_engine(num_prefill: int, policy: str) -> None:
    """An echo computes its tokens from the pages: those of other engines are what it would have computed itself."""
    expected = alone(PROMPTS, SHORT)

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        found = await asyncio.gather(*(complete(llm, prompt) for prompt in PROMPTS))
        assert [tokens for tokens, _ in found] == expected
        assert [cached for _, cached in found] == [0] * 8, "nobody had computed them before"
        await released(llm, client)
        counts = client.handover_counts
        assert (counts.handovers, counts.fallbacks) == (8, 0)
        assert counts.page_bytes
        each = metrics(client)
        assert sum(one.stats.prompt_tokens for one in each) == sum(map(len, PROMPTS)), "each is counted once"
        assert sum(one.stats.generated_tokens for one in each) == 8 * 6
        assert sum(sum(one.stats.finished.values()) for one in each) == 8
        decoding = each[num_prefill:]
        assert sum(one.account.sharing.hits for one in decoding) == sum((len(one) - 1) // 4 * 4 for one in PROMPTS)
        assert sum(one.stats.computed_tokens for one in decoding) < 8 * (4 + 6)

    separated(work, num_prefill, policy=policy)


@pytest.mark.full
def test_the_prefix_is_found_by_the_prefill_engine() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        first = PROMPTS[0][:64]
        assert (await complete(llm, [*first, 5]))[1] == 0
        await released(llm, client)
        longer = [*first, *range(200, 240)]
        tokens, cached = await complete(llm, longer)
        assert [tokens] == alone([longer], SHORT)
        assert cached == 64
        await released(llm, client)
        before = client.handover_counts.handovers
        assert (await complete(llm, longer))[1] == 100, "its replica has it all"
        assert client.handover_counts.handovers == before
        assert (await complete(llm, longer, salt="other"))[1] == 0
        assert client.handover_counts.handovers == before + 1

    separated(work, num_prefill=2)


@pytest.mark.full
def test_what_a_decode_replica_serves_alone() -> None:
    """Scored prompts, and prompts of less than a page. Branches share a handover; the prompts of a batch do not."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        await complete(llm, PROMPTS[0], SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True))
        await complete(llm, [5, 6, 7])
        assert client.handover_counts.handovers == client.handover_counts.fallbacks == 0
        with pytest.raises(InputError, match="token ids are integers from 0 to 511"):
            await complete(llm, [*PROMPTS[1], 10**6])
        several = SamplingParams(n=3, max_tokens=5, ignore_eos=True, seed=3)
        found = {branch: list[int]() for branch in range(3)}
        async for output in await llm.submit(PROMPTS[2], several):
            found[output.branch] += output.tokens
        assert all(len(tokens) == 5 for tokens in found.values())
        streams = await llm.submit_all([("a", PROMPTS[3]), ("b", PROMPTS[4])], SHORT)
        for stream, expected in zip(streams, alone(PROMPTS[3:5], SHORT)):
            assert [token async for output in stream for token in output.tokens] == expected
        await released(llm, client)
        assert client.handover_counts.handovers == 3

    separated(work)


@pytest.mark.full
def test_preemption_of_a_decode_replica() -> None:
    """By swapping, to its own part of the memory that all share."""
    prompts = [prompt[:60] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        found = await asyncio.gather(*(complete(llm, prompt, params) for prompt in prompts))
        assert [tokens for tokens, _ in found] == alone(prompts, params)
        await released(llm, client)
        assert sum(one.preempted["swap"] for one in metrics(client))
        assert client.handover_counts.handovers

    separated(work, kv_tokens=240, preemption="swap")


@pytest.mark.full
def test_more_prompts_than_there_are_host_pages() -> None:
    """What finds none is computed by the replica that decodes."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        found = await asyncio.gather(*(complete(llm, prompt) for prompt in PROMPTS))
        assert [tokens for tokens, _ in found] == alone(PROMPTS, SHORT)
        await released(llm, client)
        assert client.handover_counts.fallbacks >= 1
        assert client.handover_counts.handovers + client.handover_counts.fallbacks == 8

    separated(work, swap_gib=SWAP_GIB / 24)


@pytest.mark.parametrize("restart", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_prefill_replica_is_killed_while_it_computes(restart: bool) -> None:
    """Its prompts are computed by those that decode; without it, all are."""
    expected = alone(PROMPTS, SHORT)

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        tasks = [asyncio.ensure_future(complete(llm, prompt)) for prompt in PROMPTS]
        await wait_until_async(lambda: client.replicas[0].queue_sizes.running > 0, "a prompt is being computed")
        first = client.replicas[0]
        first.child.process.send_signal(signal.SIGKILL)
        assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == expected
        assert client.handover_counts.fallbacks
        if restart:
            await wait_until_async(lambda: client.replicas[0] is not first, "another one is there")
            before = client.handover_counts.handovers
            assert [(await complete(llm, [9, *PROMPTS[0]]))[0]] == alone([[9, *PROMPTS[0]]], SHORT)
            await released(llm, client)
            assert client.handover_counts.handovers == before + 1
        else:
            assert client._alive == {1, 2}
            assert [(await complete(llm, [9, *PROMPTS[0]]))[0]] == alone([[9, *PROMPTS[0]]], SHORT)

    separated(work, restart=restart, pause=0.03, max_num_batched_tokens=16)


@pytest.mark.full
def test_decode_replicas_are_killed_and_the_prefill_replica_serves_alone() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        tasks = [asyncio.ensure_future(complete(llm, prompt, LONG)) for prompt in PROMPTS]
        running = lambda: sum(sent.message is None for sent in client._requests.values())  # noqa: E731
        await wait_until_async(lambda: running() >= 2, "some decode")
        victim = next(sent.replica for sent in client._requests.values() if sent.message is None)
        assert victim in (1, 2)
        client.replicas[victim].child.process.send_signal(signal.SIGKILL)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        failed = [end for end in ends if isinstance(end, BaseException)]
        assert failed
        assert all(isinstance(end, EngineDead) for end in failed)
        for end, expected in zip(ends, alone(PROMPTS, LONG)):
            assert isinstance(end, BaseException) or end[0] == expected
        client.replicas[3 - victim].child.process.send_signal(signal.SIGKILL)
        await wait_until_async(lambda: client._alive == {0}, "one is left")
        assert [(await complete(llm, PROMPTS[1]))[0]] == alone(PROMPTS[1:2], SHORT)

    separated(work, pause=0.02)


@pytest.mark.full
def test_a_decode_replica_that_hangs_holds_its_pages_until_it_ends() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        for i in (1, 2):
            client.replicas[i].child.process.send_signal(signal.SIGSTOP)
        tasks = [asyncio.ensure_future(complete(llm, prompt)) for prompt in PROMPTS[:3]]
        await wait_until_async(lambda: len(client._imports) == 3, "pages wait to be copied")
        await wait_until_async(
            lambda: metrics(client)[0].account.sharing.host_pages_used > 0, "they are in the shared memory"
        )
        client.replicas[1].child.process.send_signal(signal.SIGKILL)
        client.replicas[2].child.process.send_signal(signal.SIGCONT)
        assert [tokens for tokens, _ in await asyncio.gather(*tasks)] == alone(PROMPTS[:3], SHORT)

    separated(work)


@pytest.mark.parametrize(
    "when", ["while it is computed", *(pytest.param(when, marks=pytest.mark.full) for when in MORE)]
)
def test_aborts(when: str) -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        tasks = [asyncio.ensure_future(llm.submit(prompt, LONG)) for prompt in PROMPTS]
        if when == "at once":
            await asyncio.sleep(0)
        elif when == "after tokens":
            running = lambda: any(sent.message is None for sent in client._requests.values())  # noqa: E731
            await wait_until_async(running, "one decodes")
        else:
            await wait_until_async(lambda: client.replicas[0].queue_sizes.running > 0, "a prompt is being computed")
        if when == "all at once":
            client.send(AbortRequests(None))
            for stream in await asyncio.gather(*tasks):
                assert [output async for output in stream][-1].finish_reason == "abort"
            return
        for task in tasks[::2]:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for stream in ended:
            if isinstance(stream, asyncio.CancelledError):
                continue
            assert not isinstance(stream, BaseException)
            llm.abort(stream.id)
            assert [output async for output in stream][-1].finish_reason == "abort"

    separated(work, pause=0.02, max_num_batched_tokens=16)


@pytest.mark.full
def test_an_abort_of_one_of_several_prompts() -> None:
    """Also of one that is computed already, while another one isn't."""

    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        prompts = [("first", PROMPTS[0][:8]), ("second", PROMPTS[7])]
        task = asyncio.ensure_future(llm.submit_all(prompts, LONG))
        computed = lambda: any(len(one.numbers) == 1 for one in client._computations.values())  # noqa: E731
        await wait_until_async(computed, "the first prompt is computed")
        llm.abort("first")
        first, second = await task
        assert [output async for output in first][-1].finish_reason == "abort"
        assert [[token async for output in second for token in output.tokens]] == alone(PROMPTS[7:], LONG)

    separated(work, pause=0.03, max_num_batched_tokens=16)


@pytest.mark.full
def test_a_reset_drops_what_was_computed_before_it() -> None:
    async def work(llm: AsyncLLM, client: ReplicatedEngineClient) -> None:
        task = asyncio.ensure_future(complete(llm, PROMPTS[0]))
        await wait_until_async(lambda: bool(client._computations), "the prompt is being computed")
        await llm.reset_prefix_cache()
        assert [(await task)[0]] == alone(PROMPTS[:1], SHORT)
        await released(llm, client)
        assert client.handover_counts.handovers == 0
        assert (await complete(llm, PROMPTS[1]))[1] == 0
        assert (await llm.sleep())["level"] == 1
        await llm.wake_up()
        assert [(await complete(llm, PROMPTS[2]))[0]] == alone(PROMPTS[2:3], SHORT)

    separated(work, pause=0.03, max_num_batched_tokens=16)


def test_settings_that_do_not_go_together() -> None:
    for prefill, replicas, settings, cause in (
        (1, 1, {}, r"--prefill-replicas is 1, and --replicas is 1\. At least one .* use --replicas 2 or more"),
        (4, 3, {}, r"--prefill-replicas is 4, and --replicas is 3\. .* use --replicas 5 or more"),
        (1, 2, {"memory": "virtual"}, r"--prefill-replicas is 1, and --memory is virtual\. Use --memory paged"),
        (1, 2, {"swap_gib": 0.0}, r"--swap-gib is 0: pages are handed over in that memory\. Use 1 or more"),
        (1, 2, {"enable_prefix_caching": False}, r"prefix caching is off\. Leave --no-enable-prefix-caching out"),
        (1, 4, {"tp": 2}, r"--tp is 2, --pp is 1 .*leave these flags out"),
        (1, 2, {"speculative_model": "tiny-draft"}, "draft tokens come from a model or a head"),
        (1, 2, {"log_plans": "plans"}, "a replay has no memory that replicas share"),
        (
            1,
            2,
            {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "zmq"}},
            "without their tokens",
        ),
    ):
        options = ServeOptions(prefill_replicas=prefill, replicas=replicas)
        with pytest.raises(StartupError, match=cause):
            check_prefill_replicas(EngineConfig.of(**settings), options)
    check_prefill_replicas(EngineConfig.of(), ServeOptions(prefill_replicas=1, replicas=2))
    check_prefill_replicas(EngineConfig.of(tp=2), ServeOptions(replicas=2))


@pytest.mark.full
def test_a_model_whose_prompts_cannot_be_reused_is_refused() -> None:
    model = echo_service.built(Echo(), enable_prefix_caching=False, swap_gib=SWAP_GIB)
    with pytest.raises(StartupError, match="--prefill-replicas is 1, and no prompt of this model can be reused"):
        echo_service.linked(model, placement="replicas", num_prefill=1)
