"""A data plane over a real store of virtual memory: states are the bytes of keys and values, in pages that the
operating system maps, and are written and read through the views that kernels get."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from memories import VOCAB, spec

from bench.echo_pages import EchoPages, States
from bench.echo_runner import EchoRunner
from quire.protocol.kv_cache_config import KVCacheConfig, KVCacheGroup
from quire.protocol.step_plan import PageOp, StepResult, TableWrite
from quire.worker.virtual.memfd import MemfdDriver
from quire.worker.virtual.store import VirtualStore

PAGE = 4096


def leftovers() -> tuple[int, int]:
    """Mappings of pages in this process, and open files of pages. Garbage of earlier tests is collected first, since it
    may hold some."""
    gc.collect()
    files = sum("quire-pages" in os.path.realpath(file) for file in Path("/proc/self/fd").iterdir())
    return Path("/proc/self/maps").read_text().count("quire-pages"), files


def store_of(geometry: KVCacheConfig, driver: MemfdDriver | None = None) -> VirtualStore:
    """Over real pages; a layer's keys of a token are one head's."""
    layers = sum(len(group.layers) for group in geometry.groups)
    windows = tuple(next(group.window for group in geometry.groups if i in group.layers) for i in range(layers))
    size = geometry.groups[0].token_bytes // (4 * len(geometry.groups[0].layers))
    driver = driver or MemfdDriver(PAGE)
    return VirtualStore(geometry, spec(windows, 48, size), torch.float16, torch.device("cpu"), driver, debug=True)


class Stored(EchoPages):
    """The keys and values of a group's layers: each number of a token's repeats its state."""

    def __init__(self, group: KVCacheGroup, number: int, slots: int, store: VirtualStore) -> None:
        super().__init__(group, number, np.zeros(0, np.uint8), np.zeros(0, np.uint8), slots)
        caches = [store.caches[layer] for layer in group.layers]
        sides = [side.view(torch.int64)[:, 0] for cache in caches for side in (cache.keys, cache.values)]
        self.words: list[npt.NDArray[np.int64]] = [side.numpy() for side in sides]  # [slots, tokens, words]

    def read_states(self, slot: int, first: int, last: int) -> States:
        states: States = self.words[0][slot, first:last, 0].copy()
        for words in self.words:
            assert (words[slot, first:last] == states[:, None]).all(), f"a token of slot {slot} is torn"
        return states ^ self.group_index

    def write_state(self, slot: int, position: int, state: int) -> None:
        for words in self.words:
            words[slot, position] = state ^ self.group_index


class StoredRunner(EchoRunner):
    """An EchoRunner in the memory of a VirtualStore, which replays plans as a model runner does."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth, vocab_size=VOCAB)

    def bind(self, geometry: KVCacheConfig) -> None:
        self.geometry, self.store = geometry, store_of(geometry)
        self.groups = [Stored(group, g, geometry.slots, self.store) for g, group in enumerate(geometry.groups)]

    def collect(self, ticket: int) -> StepResult:
        plan = self.queue[0]
        self.store.apply_page_ops(plan.page_ops)
        result = super().collect(ticket)
        self.store.apply_overlapped_page_ops(plan.overlapped_page_ops)
        return result

    def apply(self, entry: PageOp) -> None:
        if isinstance(entry, TableWrite):
            super().apply(entry)

    def sleep(self, level: int) -> None:
        super().sleep(level)
        self.store.close()

    def close(self) -> None:
        super().close()
        self.groups.clear()
        self.store.close()
