"""The memories that the conformance suite runs over: one entry of EVERY each. A new memory is one more entry; those in
pages, which share, swap and register prefixes, are MEMORIES."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from quire.config import EngineConfig
from quire.control.memory import KVMemory, Size, build_memory
from quire.control.memory.paged import PagedMemory
from quire.control.memory.reserved import ReservedMemory
from quire.control.request import Request, Sequence
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.specs import LayerSpec, ModelSpec

VOCAB = 64
MAX_LEN = 48


class Build(NamedTuple):
    """What a test asks of a memory; each entry of EVERY adds its own settings."""

    tokens: int = 256
    chunk: int = 64
    max_seqs: int = 8
    max_len: int = MAX_LEN
    host: int = 0  # host pages, for swapping
    prefix_tokens: int = 0


def spec(windows: tuple[int | None, ...], max_len: int) -> ModelSpec:
    layers = tuple(LayerSpec(1, 4, window) for window in windows)
    return ModelSpec("echo", layers, VOCAB, max_len, 4, 1, 4, 1)


def paged(windows: tuple[int | None, ...] = (None, None), **settings: Any) -> Callable[[Build], PagedMemory]:
    def make(build: Build) -> PagedMemory:
        config = EngineConfig(
            max_num_seqs=build.max_seqs,
            max_num_batched_tokens=build.chunk,
            prefix_tokens=build.prefix_tokens,
            swap_gib=0,
            **settings,
        )
        size = Size(build.tokens, build.max_len, 2)
        memory = build_memory(config, spec(windows, build.max_len), size)
        if build.host:
            config = replace(config, swap_gib=build.host * memory.geometry.page_bytes / 2**30)
            memory = build_memory(config, spec(windows, build.max_len), size)
        assert isinstance(memory, PagedMemory)
        return memory

    return make


class Alone(ReservedMemory):
    """A reserved memory with the insides of a paged one that tests look at, as far as it has such things: none of its
    pages is cached, shared, swapped or pinned."""

    swapped: tuple[int, ...] = ()
    host_pages: tuple[int, ...] = ()
    prefix_pages = pinned_pages = evictions = 0

    @property
    def pages(self) -> Alone:
        return self

    @property
    def prefixes(self) -> Alone:
        return self

    @property
    def available(self) -> int:
        return self.pool.available * self.groups


def reserved(rule: str, windows: tuple[int | None, ...] = (None, None), **settings: Any) -> Callable[[Build], Alone]:
    def make(build: Build) -> Alone:
        config = EngineConfig(
            memory=rule, max_num_seqs=build.max_seqs, max_num_batched_tokens=build.chunk, **settings
        )  # fmt: skip
        return Alone.build(config, spec(windows, build.max_len), build.tokens, build.max_len, 2)

    return make


MEMORIES: dict[str, Callable[[Build], PagedMemory]] = {
    "paged-1": paged(page_size=1),
    "paged-4": paged(page_size=4),
    "paged-16": paged(page_size=16),
    "uncached": paged(page_size=4, enable_prefix_caching=False),
    "poisoned": paged(page_size=4, debug=True),
    "layer-tables": paged(page_size=4, table_scope="layer"),
    "window": paged((6, 6), page_size=4),
    "mixed": paged((None, 6, None, 2), page_size=4),
    "mixed-16": paged((None, 2), page_size=16),
    "mixed-uncached": paged((6, None), page_size=4, enable_prefix_caching=False),
}
CACHED = [name for name in MEMORIES if "uncached" not in name]
RESERVED: dict[str, Callable[[Build], Alone]] = {
    "orca-oracle": reserved("orca-oracle", page_size=4),
    "orca-pow2": reserved("orca-pow2", page_size=1),
    "orca-max": reserved("orca-max", page_size=4, debug=True),
    "ft": reserved("ft", page_size=4),
    "oracle-mixed": reserved("orca-oracle", (None, 6, None, 2), page_size=4),
    "pow2-layer-tables": reserved("orca-pow2", page_size=16, table_scope="layer"),
}
EVERY: dict[str, Callable[[Build], Any]] = {**MEMORIES, **RESERVED}


def tell(memory: KVMemory, seq: Sequence, length: int) -> None:
    """Sequences get that long: what an engine's queue tells a memory that reserves."""
    if isinstance(memory, ReservedMemory):
        output = length - seq.prompt_len
        memory.queue = [Request(str(seq.id), seq, SamplingParams(), arrival=0.0, max_tokens=output)]


def connect(memory: KVMemory, waiting: deque[Request]) -> bool:
    """Let a memory that reserves see the queue. Returns whether it is for static batches."""
    if isinstance(memory, ReservedMemory):
        memory.queue = waiting
        return memory.static
    return False


def check_published(memory: KVMemory, seqs: Iterable[Sequence]) -> None:
    """A page that can be found by its key is full, and all of its tokens are confirmed."""
    if isinstance(memory, ReservedMemory):
        return
    assert isinstance(memory, PagedMemory)
    for seq in seqs:
        for table in memory.place(seq).tables:
            for page in table[seq.computed // memory.page_tokens :]:
                assert not page or memory.pages.keys[page] is None, f"page {page} is published before it is computed"


def insides(memory: KVMemory) -> tuple[object, ...]:
    """All state that later calls could tell apart: equal before and after a call that reports shortage."""
    if isinstance(memory, ReservedMemory):
        return (
            sorted(memory.pool.taken.items()),
            memory.pool.available,
            tuple(memory.slots),
            tuple(memory.entries),
            {id: (r.slot, r.base, r.held, r.family) for id, r in memory.residents.items()},
            [(f.members, f.coming, tuple(f.spares)) for f in (r.family for r in memory.residents.values())],
            (memory.batch, memory.padding, tuple(memory.prompts)),
        )
    assert isinstance(memory, PagedMemory)
    pages = memory.pages
    return (
        memory.usage(),
        tuple(pages.empty),
        tuple(pages.cached),
        tuple(pages.refs),
        tuple(pages.keys),
        tuple(memory.slots),
        tuple(memory.entries),
        {id: (r.slot, r.capacity, r.committed, tuple(map(tuple, r.tables))) for id, r in memory.residents.items()},
        {id: tuple(map(tuple, r.tables)) for id, r in memory.swapped.items()},
        tuple(memory.host_pages),
        tuple(memory.prefixes.registered),
        (memory.queries, memory.hits, pages.evictions),
    )
