"""Steps of models whose layers keep a running state, padded to what graphs are captured for: they draw what eager steps
do, and leave the same states. Without a GPU a graph is its launches, made anew."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from grids import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from small_models import built
from test_mixed_steps import CHUNKS, CPU, SLOTS, Chunk, rows_of, served, with_graphs

from quire.config import EngineConfig
from quire.kernels.mamba_states import CONV_TILE, state_pages
from quire.kernels.triton.backend import TritonBackend
from quire.memory.build import build_memory
from quire.memory.page_layout import MemorySize
from quire.models.named_configs import named_config
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.step_plan import TableWrite
from quire.worker.inputs import FlatInputs
from quire.worker.mixed_graphs import MixedGraphInputs
from quire.worker.model_runner import ModelRunner

LENGTH, RUN = 32, 4
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "state last": ("jamba-52b", {"num_hidden_layers": 3}),
    "attention last": ("jamba-52b", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "no attention": ("mamba-2.8b", {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}),
}
SHAPE = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
    "mamba_d_state": 8, "mamba_dt_rank": 4,
}  # fmt: skip


def a_model(name: str) -> tuple[Any, Any]:
    shape, more = SMALL[name]
    config = {**named_config(shape), **SHAPE, **more}
    model, spec = built(config, lambda name, parameter: parameter.dim() > 1 and "A_log" not in name)
    return model, spec.with_state_itemsize(4, 4)


def a_runner(model: Any, spec: Any, attention: str, debug: bool = False) -> tuple[ModelRunner, KVCacheConfig]:
    """Over poisoned pages, of which each group has its own."""
    config = EngineConfig.of(
        page_size=4, state_tokens=RUN, max_num_seqs=SLOTS - 1, max_num_batched_tokens=64, page_sizes="own", swap_gib=0
    )
    geometry = build_memory(config, spec, MemorySize(SLOTS * LENGTH, LENGTH, 4)).kv_config
    runner = ModelRunner(model, spec, torch.float32, DEVICE, attention, debug=debug)
    runner.bind(geometry)
    for group, view in zip(geometry.groups, runner.store.group_pages):
        view[group.ids.start :].fill_(torch.nan)
    return runner, geometry


def named(geometry: KVCacheConfig, slot: int) -> list[TableWrite]:
    widths = [group.table_width for group in geometry.groups]
    firsts = [group.ids.start + (slot - 1) * width for group, width in zip(geometry.groups, widths)]
    return [TableWrite(slot, g, 0, tuple(range(first, first + widths[g]))) for g, first in enumerate(firsts)]


@pytest.mark.share(2)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(("name", "deterministic"), [*((name, False) for name in SMALL), ("state last", True)])
def test_replayed_steps_compute_what_eager_ones_do(
    name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, spec = a_model(name)
    reference, geometry = a_runner(model, spec, "reference", debug=True)
    runner, _ = a_runner(model, spec, "triton")
    if deterministic:
        monkeypatch.setattr(runner, "backend", TritonBackend(deterministic=True))
    again = with_graphs(runner, monkeypatch)
    expected, got = served([reference, runner], seed=len(name), named=partial(named, geometry))
    assert got == expected
    assert again.replays >= 3 * 6, "most steps are replayed, each as three graphs"
    for group, mine, theirs in zip(geometry.groups, runner.store.group_pages, reference.store.group_pages):
        own = slice(group.ids.start, group.ids.stop)
        torch.testing.assert_close(mine[own], theirs[own], atol=1e-4, rtol=1e-4, equal_nan=True)
        assert mine[0].isfinite().all(), "padding is finite"


@given(chunks=CHUNKS, unsampled=st.integers(0, 5))
def test_every_token_is_of_one_row(chunks: list[Chunk], unsampled: int) -> None:
    """Padding is a row too; and states are read and written as a plan for these rows alone has it."""
    inputs = MixedGraphInputs([1, 8, 61], (), False, CPU, has_states=True)
    flat = FlatInputs.from_slices(rows_of(chunks, unsampled))
    sizes = inputs.choose_sizes(flat)
    if sizes is None:
        return
    inputs.buffer.fill_(-7)
    inputs.region(sizes).copy_(torch.from_numpy(inputs.build_array(flat, sizes)))
    table = torch.arange(62 * 7).view(62, 7)
    plan = inputs.state_plan(sizes.num_tokens, sizes.num_decode_rows, table, 512)
    rows, total = len(chunks), sum(count for _, count in chunks)
    seen = np.zeros(sizes.num_tokens, dtype=int)
    for offset, length in zip(plan.offsets.tolist(), plan.lengths.tolist()):
        seen[offset : offset + length] += 1
    assert (seen == 1).all()
    assert plan.lengths.sum() == sizes.num_tokens
    covered = np.zeros(sizes.num_tokens, dtype=int)
    assert plan.tiles is not None
    for row, first in plan.tiles.tolist():
        offset, length = int(plan.offsets[row]), int(plan.lengths[row])
        covered[offset + first : offset + min(first + CONV_TILE, length)] += 1
    assert (covered == 1).all()
    slots, starts, lengths = (torch.from_numpy(x) for x in (flat.slots, flat.starts, flat.lengths))
    reads, writes = state_pages(table, slots, starts, lengths, 512, 2)
    assert plan.read_pages[:rows].tolist() == reads.tolist()
    assert plan.write_pages[:rows, :2].tolist() == writes.tolist()
    assert plan.read_pages[rows:].tolist() == [-1] * (len(plan.read_pages) - rows), "padding reads nothing"
    assert (plan.write_pages[rows:] == table[0, 0]).all(), (
        f"padding of {sizes.num_tokens - total} tokens writes scratch alone"
    )
