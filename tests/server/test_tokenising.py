"""Tokenising: lengths are looked at before any text is read, the longest text is read first, and very long texts have
threads of their own, so that chats don't queue behind them."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import echo_service
import pytest
from waiting import wait_until_async

from quire.errors import Overloaded, PromptTooLong
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.structured_output import Structured
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.input_processor import (
    CHARS_PER_TOKEN,
    INLINE_CHARS,
    LONG_CHARS,
    LONG_THREADS,
    InputProcessor,
    Prompt,
    PromptTruncation,
)

MOST = CHARS_PER_TOKEN * echo_service.MAX_LEN


class Noting:
    """A tokenizer that notes what it was given, and on which thread; `hold` makes long texts wait."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: list[str] = []
        self.hold = threading.Event()
        self.hold.set()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.read.append(len(text))
        self.threads.append(threading.current_thread().name)
        if len(text) > LONG_CHARS:
            assert self.hold.wait(60)
        return [1] * max(len(text) // 1000, 1)


@pytest.fixture
def prompts() -> InputProcessor:
    found = echo_service.prompts()
    found.tokenizer = Noting()  # type: ignore[assignment]
    found.limits = found.limits._replace(max_len=200_000 // CHARS_PER_TOKEN)
    return found


def noted(prompts: InputProcessor) -> Noting:
    assert isinstance(prompts.tokenizer, Noting)
    return prompts.tokenizer


@pytest.mark.parametrize("long", ["x" * 200_001, [1] * 6250])
def test_a_prompt_that_is_too_long_is_found_before_others_are_read(prompts: InputProcessor, long: Any) -> None:
    with pytest.raises(PromptTooLong):
        asyncio.run(prompts.process_prompts(["a" * 5000] * 5 + [long]))
    assert noted(prompts).read == []


def test_the_longest_text_is_read_first(prompts: InputProcessor) -> None:
    """So one that has too many tokens ends it before the others are read."""
    found = asyncio.run(prompts.process_prompts(["a" * 2000, "b" * 9000, [5], "c" * 4000]))
    assert noted(prompts).read == [9000, 4000, 2000]
    assert [len(prompt.ids) for prompt in found] == [2, 9, 1, 4]
    assert [prompt.text is None for prompt in found] == [False, False, True, False]
    noted(prompts).read.clear()
    prompts.limits = prompts.limits._replace(max_len=9)
    prompts._check_num_chars = lambda count: None  # type: ignore[method-assign]
    with pytest.raises(PromptTooLong, match="9 tokens"):
        asyncio.run(prompts.process_prompts(["a" * 2000, "b" * 9000, "c" * 4000]))
    assert noted(prompts).read == [9000]


def test_short_texts_stay_and_long_ones_go_to_threads(prompts: InputProcessor) -> None:
    for size, where in (
        (INLINE_CHARS, "MainThread"),
        (INLINE_CHARS + 1, "asyncio"),
        (LONG_CHARS + 1, "quire-long-text"),
    ):
        asyncio.run(prompts.process_prompts(["a" * size]))
        assert noted(prompts).threads[-1].startswith(where)


def test_chats_do_not_queue_behind_long_texts(prompts: InputProcessor) -> None:
    """Ten long texts are held up; the chat beside them is not."""

    async def both() -> float:
        noted(prompts).hold.clear()
        long = [asyncio.create_task(prompts.process_prompts(["a" * 150_000])) for _ in range(10)]
        await wait_until_async(
            lambda: noted(prompts).read.count(150_000) >= LONG_THREADS, "long texts fill their threads"
        )
        began = time.perf_counter()
        await prompts.process_prompts(["b" * 5000])
        took = time.perf_counter() - began
        assert noted(prompts).read.count(150_000) == LONG_THREADS
        noted(prompts).hold.set()
        await asyncio.gather(*long)
        return took

    assert asyncio.run(both()) < 30
    names = [name for name in noted(prompts).threads if name.startswith("quire-long-text")]
    assert (len(names), len(set(names))) == (10, LONG_THREADS)


def test_conversations_wait_for_the_template_alone() -> None:
    """On a thread that nothing else needs, a bounded number of them; and not at all if they are too long."""
    prompts = echo_service.prompts()
    prompts._template_threads.max_items = 3
    talk: list[dict[str, Any]] = [{"role": "user", "content": "once upon a time"}]
    go, threads = threading.Event(), []

    def written(*args: Any, **kwargs: Any) -> tuple[str, list[Any], list[str]]:
        threads.append(threading.current_thread().name)
        assert go.wait(60)
        return "once", [], []

    async def all_of_them() -> None:
        waiting = [asyncio.create_task(prompts.process_chat_async(talk, variables={})) for _ in range(3)]
        await wait_until_async(lambda: len(prompts._template_threads.items) == 3, "3 conversations wait")
        assert [len(prompt.ids) for prompt in await prompts.process_prompts(["b" * (INLINE_CHARS + 1)])]
        with pytest.raises(Overloaded, match="3 conversations"):
            await prompts.process_chat_async(talk, variables={})
        go.set()
        assert len({tuple(prompt.ids) for prompt in await asyncio.gather(*waiting)}) == 1
        await prompts.process_chat_async(talk, variables={})

    assert asyncio.run(prompts.process_chat_async(talk, variables={})) == prompts.process_chat(talk)
    parts = [{"type": "text", "text": "b" * MOST}, {"type": "text", "text": "c"}]
    with pytest.raises(PromptTooLong):
        asyncio.run(prompts.process_chat_async([{"role": "user", "content": parts}], variables={}))
    prompts.limits = prompts.limits._replace(max_len=10_000)  # the texts beside them are longer than the model
    prompts.render_chat = written  # type: ignore[method-assign]
    asyncio.run(all_of_them())
    assert threads == [threads[0]] * 4
    assert threads[0].startswith("quire-chat-template")


def test_forms_wait_for_their_grammars_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """On threads that long texts don't need, a bounded number of them."""
    go, threads = threading.Event(), []
    get = GrammarCompiler.get

    def held_up(self: GrammarCompiler, asked: Structured) -> Any:
        threads.append(threading.current_thread().name)
        assert go.wait(60)
        return get(self, asked)

    monkeypatch.setattr(GrammarCompiler, "get", held_up)
    llm = echo_service.linked(echo_service.built())
    llm.prompts._grammar_threads.max_items = 3

    def ask(number: int) -> Any:
        form = Structured("regex", "a" * number)
        return llm.submit([1], SamplingParams(max_tokens=20, structured=form))

    async def all_of_them() -> None:
        waiting = [asyncio.ensure_future(ask(number)) for number in range(1, 4)]
        await wait_until_async(lambda: len(llm.prompts._grammar_threads.items) == 3, "3 grammars wait")
        assert [prompt.ids for prompt in await llm.prompts.process_prompts(["b" * (LONG_CHARS + 1)])]
        with pytest.raises(Overloaded, match="3 outputs of some form wait for their grammars"):
            await ask(4)
        go.set()
        for stream in await asyncio.gather(*waiting):
            assert [output async for output in stream][-1].finish_reason == "stop"
        await ask(4)

    try:
        llm.prompts.limits = llm.prompts.limits._replace(max_len=10_000_000)  # of the long text
        asyncio.run(all_of_them())
    finally:
        llm.close()
    assert {name.split("_")[0] for name in threads} == {"quire-forms"}


def test_forms_wait_for_few_of_another_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short ones overtake long ones, those of a client keep their order otherwise, and those of another don't wait for
    all of them."""
    go, order = threading.Event(), list[str]()
    get = GrammarCompiler.get

    def held_up(self: GrammarCompiler, asked: Structured) -> Any:
        order.append(asked.source)
        assert go.wait(60)
        return get(self, asked)

    monkeypatch.setattr(GrammarCompiler, "get", held_up)
    llm = echo_service.linked(echo_service.built())
    llm.prompts._grammar_threads.count = 1
    items = llm.prompts._grammar_threads.items

    async def all_of_them() -> None:
        waiting = []
        many = [("one", text * 4000) for text in "abcdef"]
        for number, (client, source) in enumerate([*many, ("one", "short"), ("other", "g" * 4000)]):
            params = SamplingParams(max_tokens=1, structured=Structured("regex", source))
            ask = llm.submit_all([(f"r{number}", [1])], params, client=client)
            waiting.append(asyncio.ensure_future(ask))
            await wait_until_async(lambda: len(items) == len(waiting) and bool(order), "it waits")
        go.set()
        await asyncio.gather(*waiting)

    try:
        asyncio.run(all_of_them())
    finally:
        llm.close()
    assert "".join(source[0] for source in order if source[0] not in "sg") == "abcdef"
    assert max(order.index("short"), order.index("g" * 4000)) <= 3


def test_cuts() -> None:
    prompt = Prompt("abc", [1, 2, 3])
    assert PromptTruncation(3).apply(prompt) is prompt
    assert PromptTruncation(2).apply(prompt) == Prompt(None, [2, 3])
    assert PromptTruncation(2, keep_first=True).apply(prompt) == Prompt(None, [1, 2])
