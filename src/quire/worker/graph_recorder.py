"""Recording: what a step enqueues becomes a CUDA graph, to be launched again as a whole."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch


class CapturedGraph(NamedTuple):
    """What was captured, and what it leaves on the device."""

    graph: torch.cuda.CUDAGraph
    result: Any


class GraphCapturer:
    """Captures graphs on a stream of its own. They share one pool of memory, so no two may be under way at once, and
    what one leaves is valid until the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.memory_pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, step: Callable[[], Any]) -> CapturedGraph:
        """What `step` enqueues."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        collecting = gc.isenabled()
        gc.disable()  # a tensor that is freed while a stream is captured would spoil the capture
        try:
            with torch.cuda.stream(self.stream):
                graph.capture_begin(pool=self.memory_pool, capture_error_mode="thread_local")
                try:
                    result = step()
                except BaseException:
                    with suppress(RuntimeError):  # of a capture that failed: what failed is said instead
                        graph.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collecting:
                gc.enable()
        current.wait_stream(self.stream)
        return CapturedGraph(graph, result)
