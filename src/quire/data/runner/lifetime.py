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

from quire.data.kernels.cpu.memory import memory
from quire.data.runner.parked import Parked
from quire.data.runner.rehearsal import rehearse
from quire.data.weights.mapped import trim
from quire.vocabulary.specs import Geometry


class Lifetime:
    """The part of a ModelRunner that outlives its pages. `make` makes its model anew: None where nobody can."""

    model: Any
    device: torch.device
    pictures: Any
    prompts: Any
    seen: Any
    graphs: Any
    mixed: Any
    make: Callable[[], Any] | None = None
    parked: Parked | None = None  # weights that are in host memory
    geometry: Geometry | None = None  # of the pages that it had when it fell asleep
    warmed: tuple[int, int] | None = None  # what it was warmed up for

    def warm_up(self, tokens: int, max_len: int) -> None:
        """On a GPU, run every kind of step once, the largest of `tokens` tokens in sequences of up to `max_len`: then
        no request waits for a kernel to be compiled or a graph to be captured. After `bind`, before the first step."""
        self.warmed = tokens, max_len
        if self.device.type == "cuda":
            rehearse(self, tokens, max_len)  # type: ignore[arg-type]

    def sleep(self, level: int) -> None:
        """See control.runners.Sleeping. One that sleeps already sleeps deeper."""
        store = getattr(self, "store", None)
        if store is not None:
            self.geometry = store.geometry
            del store
        self._let_go()
        if level == 2:
            assert self.make is not None, "a model that can be made again"
            self.model, self.parked = None, None
        elif self.device.type == "cuda" and self.parked is None and self.model is not None:
            self.parked = Parked(self.model, self.device)
        self._give_back()

    def wake(self, tags: Sequence[str]) -> None:
        """See control.runners.Sleeping. If there is no room, it sleeps on as before."""
        if "weights" in tags:
            if self.parked is not None:
                self.parked.back()
                self.parked = None
            if self.model is None:
                assert self.make is not None, "a model that can be made again"
                self.model = self.make()
        if "kv_cache" in tags:
            assert self.geometry is not None, "it fell asleep"
            try:
                self.bind(self.geometry)
                if self.warmed is not None:
                    self.warm_up(*self.warmed)
            except BaseException:
                self._let_go()
                self._give_back()
                raise
        if self.device.type == "cpu":
            trim()

    def bind(self, geometry: Geometry) -> None:
        """See ModelRunner."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Of the pages, once nothing moves them any more, and of all that was made over them."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        store = getattr(self, "store", None)
        self.pictures = self.prompts = self.seen = self.graphs = self.mixed = None  # they hold the store too
        for name in ("sampler", "last"):
            if hasattr(self, name):
                delattr(self, name)
        if store is not None:
            store.close()
            del self.store, store

    def _give_back(self) -> None:
        """What nobody holds any more goes back to the system."""
        frozen = gc.get_freeze_count() > 0  # what was loaded is spared by the collector, in programs of our own
        gc.unfreeze()
        gc.collect()
        if frozen:
            gc.freeze()
        memory().leave()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            trim()

    def close(self) -> None:
        """Let go of the pages."""
        self._let_go()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # another engine may follow

    def __del__(self) -> None:
        """Ordinary tensors go with whoever holds them; mapped pages are given back by somebody."""
        if hasattr(getattr(self, "store", None), "driver") and not sys.is_finalizing():
            with suppress(Exception):
                self.close()
