"""What a runner holds of a device beside its steps' work: how it is warmed up, sleeps and wakes up, and is closed.

Asleep it has no pages, tables, graphs nor host pages: all that `bind` and the warm-up make is let go of, and made again
at wake-up by the very same calls, so no address of before is used. Weights stay where they are on a CPU; those on a GPU
go to host memory (`parked`), or, with level 2, there are none, and the model is made again as it was at the start.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from quire.kernels.cpu.weight_arena import weight_arena
from quire.protocol.model_spec import KVCacheConfig
from quire.weights.mapped_files import trim_memory
from quire.worker.offloaded_weights import OffloadedWeights
from quire.worker.warmup import warm_up


class RunnerLifecycle:
    """The part of a ModelRunner that outlives its pages. `make_model` makes its model anew: None where nobody can."""

    model: Any
    device: torch.device
    image_inputs: Any
    prompt_lengths: Any
    state_checker: Any
    decode_graphs: Any
    mixed_graphs: Any
    make_model: Callable[[], Any] | None = None
    offloaded_weights: OffloadedWeights | None = None  # weights that are in host memory
    kv_config: KVCacheConfig | None = None  # of the pages that it had when it fell asleep
    warmup_args: tuple[int, int] | None = None  # what it was warmed up for

    def warm_up(self, tokens: int, max_len: int) -> None:
        """On a GPU, run every kind of step once, the largest of `tokens` tokens in sequences of up to `max_len`: then
        no request waits for a kernel to be compiled or a graph to be captured. After `bind`, before the first step."""
        self.warmup_args = tokens, max_len
        if self.device.type == "cuda":
            warm_up(self, tokens, max_len)  # type: ignore[arg-type]

    def sleep(self, level: int) -> None:
        """See control.runners.Sleeping. One that sleeps already sleeps deeper."""
        store = getattr(self, "store", None)
        if store is not None:
            self.kv_config = store.kv_config
            del store
        self._release_pages()
        if level == 2:
            assert self.make_model is not None, "a model that can be made again"
            self.model, self.offloaded_weights = None, None
        elif self.device.type == "cuda" and self.offloaded_weights is None and self.model is not None:
            self.offloaded_weights = OffloadedWeights(self.model, self.device)
        self._release_memory()

    def wake(self, tags: Sequence[str]) -> None:
        """See control.runners.Sleeping. If there is no room, it sleeps on as before."""
        if "weights" in tags:
            if self.offloaded_weights is not None:
                self.offloaded_weights.restore()
                self.offloaded_weights = None
            if self.model is None:
                assert self.make_model is not None, "a model that can be made again"
                self.model = self.make_model()
        if "kv_cache" in tags:
            assert self.kv_config is not None, "it fell asleep"
            try:
                self.bind(self.kv_config)
                if self.warmup_args is not None:
                    self.warm_up(*self.warmup_args)
            except BaseException:
                self._release_pages()
                self._release_memory()
                raise
        if self.device.type == "cpu":
            trim_memory()

    def bind(self, kv_config: KVCacheConfig) -> None:
        """See ModelRunner."""
        raise NotImplementedError

    def _release_pages(self) -> None:
        """Of the pages, once nothing moves them any more, and of all that was made over them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        store = getattr(self, "store", None)
        self.image_inputs = self.prompt_lengths = self.state_checker = self.decode_graphs = self.mixed_graphs = (
            None  # they hold the store too
        )
        for name in ("sampler", "last_sampled"):
            if hasattr(self, name):
                delattr(self, name)
        if store is not None:
            store.close()
            del self.store, store

    def _release_memory(self) -> None:
        """What nobody holds any more goes back to the system."""
        frozen = gc.get_freeze_count() > 0  # what was loaded is spared by the collector, in programs of our own
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
        weight_arena().drop_block()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim_memory()

    def close(self) -> None:
        """Let go of the pages."""
        self._release_pages()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another engine may follow

    def __del__(self) -> None:
        """Ordinary tensors go with whoever holds them; mapped pages are given back by somebody."""
        if hasattr(getattr(self, "store", None), "driver") and not sys.is_finalizing():
            with suppress(Exception):
                self.close()
