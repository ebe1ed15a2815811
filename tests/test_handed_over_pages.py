"""Prompts that one engine computes and another one finds cached, through host memory that both map: tokens and
log-probabilities are those of one engine, and no page or host page is lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import test_equality
import test_layer_kinds
import test_state_logits

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.errors import InputError
from quire.ipc.messages import HandOver, ImportPages
from quire.ipc.page_handover import PageHandover
from quire.memory.paged import PagedMemory
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.shared_host import SharedHostMemory, SharedPage
from quire.startup.build import build_engine
from quire.startup.checkpoint import read_checkpoint

PROMPT = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
VOCAB = 89
PROMPTS = [[(7 * i * i + 3 * k) % VOCAB for i in range(length)] for k, length in enumerate((75, 33, 64, 18))]
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "logprobs": 3},
    "sampled": {"temperature": 0.9, "seed": 11, "logprobs": 2},
    "penalised": {"temperature": 0.8, "seed": 12, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "parallel": {"n": 3, "seed": 13, "top_p": 0.9},
    "beams": {"n": 2, "beam_width": 3, "logprobs": 1},
    "least": {"temperature": 0.7, "seed": 5, "min_tokens": 6, "stop_token_ids": [*range(20)]},
}  # fmt: skip


class Pair:
    """A prefill engine and a decode engine of the model in `folder`, and a third one that does both."""

    def __init__(self, folder: Path, memory: FileIO, **settings: Any) -> None:
        options = {
            "kv_tokens": 1024, "max_num_batched_tokens": 32, "max_num_seqs": 8, "threads": 1, "dtype": "float32",
            "debug": True, "page_size": 4, "swap_gib": 2**-8, **settings,
        }  # fmt: skip
        self.config = EngineConfig.of(model=str(folder), skip_tokenizer_init=True, **options)
        parts = [SharedHostMemory(memory.fileno(), part, 2, int(self.config.swap_gib * 2**30)) for part in (0, 1)]
        self.prefill, self.decode, self.alone = (self._built(part) for part in (*parts, None))
        self.exports, self.imports = PageHandover(self.prefill), PageHandover(self.decode)

    def _built(self, part: SharedHostMemory | None) -> Engine:
        return build_engine(self.config, read_checkpoint(self.config), (), shared_host=part)[0]

    def computed(self, prompts: list[list[int]]) -> list[HandOver]:
        """What the prefill engine hands over of these prompts."""
        engine = self.prefill
        engine.add_all([(str(i), prompt) for i, prompt in enumerate(prompts)], PROMPT, hands_over=True)
        requests, found = dict(engine.requests), list[HandOver]()
        while engine.has_unfinished_requests:
            for output in engine.step():
                if output.done:
                    self.exports.export(0, int(output.request_id), requests[output.request_id], True)
            found += [message for _, message in self.exports.take_sendable() if isinstance(message, HandOver)]
            engine.scheduler.memory.check()
        return sorted(found)

    def hand_over(self, prompts: list[list[int]]) -> list[bool]:
        """Hand these prompts over. Return which ones the decode engine had room for."""
        found = []
        for message in self.computed(prompts):
            self.imports.import_pages(0, ImportPages(message.number, message.pages))
            self.decode.scheduler.memory.check()
            while not (replies := self.imports.take_sendable()):
                self.decode.step()
            found.append(bool(replies[0][1].value))  # type: ignore[union-attr]
            self.exports.release(0, message.number)
        self.check()
        return found

    def check(self) -> None:
        """Nothing is held in shared memory, and all counts are right."""
        for engine in (self.prefill, self.decode):
            memory = engine.scheduler.memory
            assert isinstance(memory, PagedMemory)
            memory.check()
            assert not any(memory.swap.exported_pages)
            assert not sum(memory.swap.host_pool.used)


def answers(engine: Engine, prompts: list[list[int]], **params: Any) -> list[Any]:
    """Tokens and log-probabilities of every branch of every prompt."""
    asked = {
        str(i): (prompt, SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **params}))
        for i, prompt in enumerate(prompts)
    }
    found: dict[tuple[str, int], list[Any]] = {}
    for id, outputs in test_equality.outputs_of(engine, asked).items():
        for output in outputs:
            branch = found.setdefault((id, output.branch), [])
            branch += zip(output.tokens, output.top_logprobs or [None] * len(output.tokens))
    return [found[at] for at in sorted(found)]


def same(one: list[Any], other: list[Any]) -> None:
    """The same tokens, and the same log-probabilities to 1e-4: steps of other sizes round differently."""
    assert [[token for token, _ in branch] for branch in one] == [[token for token, _ in branch] for branch in other]
    for branch, expected in zip(one, other):
        for (_, tops), (_, wanted) in zip(branch, expected):
            if tops is not None:
                assert tops.ids == wanted.ids
                assert tops.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The checkpoint of a model with random weights."""

    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp("handed")
        if name in test_equality.FAMILIES:
            test_equality.random_model(test_equality.FAMILIES[name]()).save_pretrained(path)
        elif name in test_layer_kinds.MODELS:
            test_layer_kinds.saved(path, test_layer_kinds.MODELS[name])
        else:
            return test_state_logits.Saved(name, path).folder
        return path

    return cache(folder)


@pytest.fixture
def memory() -> Iterator[FileIO]:
    with FileIO(os.memfd_create("pages", os.MFD_CLOEXEC), "r+b") as file:
        yield file


MODELS = ["llama", "ministral", "every kind", "jamba", "mamba"]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_engine(folders: Any, memory: FileIO, name: str) -> None:
    """Of full attention, of windows, of chunks, and of states beside it and alone, whose sizes of pages differ."""
    states = {"state_tokens": 16} if name in ("jamba", "mamba") else {}
    pair = Pair(folders(name), memory, **states)
    assert pair.hand_over(PROMPTS) == [True] * 4
    same(answers(pair.decode, PROMPTS, **ASKED["greedy"]), answers(pair.alone, PROMPTS, **ASKED["greedy"]))
    unit = pair.decode.scheduler.memory.prefix_cache.prefix_granularity  # type: ignore[union-attr]
    hits = pair.decode.scheduler.memory.account().sharing.hits
    assert hits == sum((len(prompt) - 1) // unit * unit for prompt in PROMPTS)
    assert pair.prefill.stats.generated_tokens == pair.prefill.stats.prompt_tokens == 0, "the decode engine counts them"
    assert not pair.prefill.stats.finished


@pytest.mark.full
@pytest.mark.parametrize("kind", ASKED)
def test_any_sampling_gives_the_tokens_of_one_engine(folders: Any, memory: FileIO, kind: str) -> None:
    pair = Pair(folders("llama"), memory)
    assert all(pair.hand_over(PROMPTS))
    same(answers(pair.decode, PROMPTS, **ASKED[kind]), answers(pair.alone, PROMPTS, **ASKED[kind]))
    assert pair.decode.scheduler.memory.account().sharing.hits


@pytest.mark.full
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_preemption_of_the_decode_engine(folders: Any, memory: FileIO, name: str, preemption: str) -> None:
    """Swapped pages and pages of others are in parts of one memory."""
    states = {"state_tokens": 16} if name == "jamba" else {}
    pair = Pair(folders(name), memory, kv_tokens=144, preemption=preemption, **states)
    prompts = [prompt[:30] for prompt in PROMPTS] * 2
    pair.hand_over(prompts)
    long = {"temperature": 0, "max_tokens": 40}
    assert answers(pair.decode, prompts, **long) == answers(pair.alone, prompts, **long)
    assert pair.decode.scheduler.preemption_counts[preemption]
    pair.check()


def test_hits_on_the_prefill_engine_and_pages_that_are_there_already(folders: Any, memory: FileIO) -> None:
    pair = Pair(folders("llama"), memory)
    first = PROMPTS[0]
    longer = [[*first[:64], *PROMPTS[1]], [*first[:64], *PROMPTS[3]]]
    [message] = pair.computed([first])
    assert message.cached_tokens == 0
    pair.exports.release(0, 0)
    assert [message.cached_tokens for message in pair.computed(longer)] == [64, 64]
    for i in range(2):
        pair.exports.release(0, i)
    swapped_in = pair.decode.scheduler.memory.account().sharing.swapped_in
    assert pair.hand_over(longer) == [True, True]
    assert pair.decode.scheduler.memory.account().sharing.swapped_in == swapped_in, "that counts preemption alone"
    same(answers(pair.decode, longer, **ASKED["greedy"]), answers(pair.alone, longer, **ASKED["greedy"]))


def test_too_little_room_on_either_side(folders: Any, memory: FileIO) -> None:
    """Without host pages nothing is handed over; without pages nothing is copied, and what runs goes on."""
    pair = Pair(folders("llama"), memory, swap_gib=2**-17)  # 8 pages
    assert [len(message.pages) for message in pair.computed([PROMPTS[0], PROMPTS[3]])] == [0, 4]
    assert [len(message.pages) for message in pair.computed([PROMPTS[1]])] == [0], "those are held"
    pair.exports.release(0, 1)
    assert [len(message.pages) for message in pair.computed([PROMPTS[1]])] == [8]
    pair.exports.release(0, 0)
    pair.exports.release(0, 0)  # which is unknown
    pair.check()

    full = Pair(folders("llama"), memory, kv_tokens=80)
    running = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    full.decode.add("runs", PROMPTS[2][:40], running)
    for _ in range(20):
        full.decode.step()
    before = full.decode.scheduler.memory.account()
    prompts = [PROMPTS[0][:60]]
    assert full.hand_over(prompts) == [False]
    assert full.decode.scheduler.memory.account().usage.used >= before.usage.used
    while full.decode.has_unfinished_requests:
        full.decode.step()
    assert answers(full.decode, prompts, temperature=0) == answers(full.alone, prompts, temperature=0)


def test_addresses_outside_of_the_memory_are_refused(folders: Any, memory: FileIO) -> None:
    pair = Pair(folders("llama"), memory)
    for page in (SharedPage(1, 1, b"k" * 32), SharedPage(0, 2**40, b"k" * 32), SharedPage(0, 0, b"k" * 32)):
        with pytest.raises(InputError, match="outside of the shared host memory"):
            pair.imports.import_pages(0, ImportPages(1, [page]))
    with pytest.raises(InputError, match="shares no host memory"):
        PageHandover(pair.alone).import_pages(0, ImportPages(1, [SharedPage(0, 1, b"k" * 32)]))


def test_an_engine_that_sleeps_copies_nothing(folders: Any, memory: FileIO) -> None:
    pair = Pair(folders("llama"), memory)
    pair.decode.sleep(1)
    [message] = pair.computed([PROMPTS[0]])
    pair.imports.import_pages(0, ImportPages(3, message.pages))
    assert [reply.value for _, reply in pair.imports.take_sendable()] == [0]  # type: ignore[union-attr]
    pair.decode.wake()
    pair.imports.import_pages(0, ImportPages(4, message.pages))
    pair.decode.step()
    assert [reply.value for _, reply in pair.imports.take_sendable()] == [1]  # type: ignore[union-attr]
    same(answers(pair.decode, PROMPTS[:1], **ASKED["greedy"]), answers(pair.alone, PROMPTS[:1], **ASKED["greedy"]))
