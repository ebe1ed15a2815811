"""Sequences in virtual memory for measuring kernels: pages in random order, mapped by the runner's store, no
scheduler.
"""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable
from typing import TypeVar

import torch

from quire.bench.placed_kv import Placed
from quire.config import EngineConfig, Experiment
from quire.memory.page_layout import MemorySize
from quire.memory.virtual.virtual_memory import build_virtual_kv_config
from quire.protocol.model_spec import ModelSpec
from quire.protocol.step_plan import TableWrite
from quire.worker.virtual.store import open_store

Found = TypeVar("Found")


def on_mapped(
    spec: ModelSpec, batch: int, context: int, layout: str, work: Callable[[Placed], Found], on: str = "cuda",
    kib: int = 2048, dtype: torch.dtype = torch.bfloat16,
) -> Found:  # fmt: skip
    """Return the result of `work` over `batch` sequences of `context` random tokens in all layers of the model, each
    contiguous in addresses. `layout`: which layers share a buffer. `kib`: the KiB of a device page. `work` must not
    keep any of these tensors, or closing their memory raises DriverError."""
    config = EngineConfig(
        memory="virtual", max_num_seqs=batch, swap_gib=0.0,
        experiment=Experiment(virtual_layout=layout, virtual_page_kib=kib),
    )  # fmt: skip
    one = build_virtual_kv_config(config, spec, MemorySize(2**16 + 2 * context, context, dtype.itemsize)).groups[0]
    tokens = one.table_width * one.run_tokens // one.run_pages + one.run_tokens  # tokens of a sequence, in whole pages
    geometry = build_virtual_kv_config(config, spec, MemorySize(batch * tokens, context, dtype.itemsize))
    device = torch.device(on) if on == "cpu" else torch.device("cuda", torch.cuda.current_device())
    store = open_store(geometry, spec, dtype, device, False, is_contiguous=True)
    try:
        store.buffer.normal_()
        ids, width = list(geometry.groups[0].ids), geometry.groups[0].table_width
        assert len(ids) >= batch * width, f"{len(ids)} pages for {batch} sequences of {width}"
        random.Random(0).shuffle(ids)
        store.apply_page_ops(
            tuple(TableWrite(i + 1, 0, 0, tuple(ids[i * width : (i + 1) * width])) for i in range(batch))
        )
        slots, lengths = torch.arange(1, batch + 1, device=device), torch.full((batch,), context, device=device)
        return work(Placed(list(store.caches.values()), store.tables[0], slots, lengths))
    except RuntimeError as error:
        traceback.clear_frames(error.__traceback__)  # whose locals are tensors
        raise
    finally:
        gc.collect()
        store.close()
