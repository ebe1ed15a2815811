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
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import SeqSlice, SlotInit, StepPlan, TableWrite
from quire.worker.inputs import FlatInputs
from quire.worker.mixed_graphs import MixedGraphInputs
from quire.worker.model_runner import ModelRunner

LENGTH, RUN = 32, 4
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "state last": ("jamba-52b", {"num_hidden_layers": 3}),
    "attention last": ("jamba-52b", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
    "no attention": ("mamba-2.8b", {"num_hidden_layers": 2, "state_size": 8, "time_step_rank": 4}),
    "gated attention last": ("qwen3-next-80b-a3b", {"num_hidden_layers": 2, "full_attention_interval": 2}),
    "delta rule last": ("qwen3-next-80b-a3b", {"num_hidden_layers": 3, "full_attention_interval": 2}),
}
SHAPE = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
    "mamba_d_state": 8, "mamba_dt_rank": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 6, "rms_norm_eps": 1e-2,
}  # fmt: skip


def a_model(name: str) -> tuple[Any, Any]:
    shape, more = SMALL[name]
    config = {**named_config(shape), **SHAPE, **more}
    model, spec = built(config, lambda name, parameter: parameter.dim() > 1 and "A_log" not in name)
    return model, spec.with_state_itemsize(4, 4)


def a_runner(
    model: Any, spec: Any, attention: str, debug: bool = False, max_drafts: int = 0
) -> tuple[ModelRunner, KVCacheConfig]:
    """Over poisoned pages, of which each group has its own."""
    config = EngineConfig.of(
        page_size=4, state_tokens=RUN, max_num_seqs=SLOTS - 1, max_num_batched_tokens=64, page_sizes="own", swap_gib=0
    )
    geometry = build_memory(config, spec, MemorySize(SLOTS * LENGTH, LENGTH, 4)).kv_config
    runner = ModelRunner(model, spec, torch.float32, DEVICE, attention, debug=debug, max_drafts=max_drafts)
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


def states_at(runner: ModelRunner, slot: int, count: int) -> list[torch.Tensor]:
    """Return the states of all layers that a slot has after `count` tokens."""
    pages = [runner.store.tables[cache.group][slot, (count - 1) // RUN] for cache in runner.store.state_caches.values()]
    caches = zip(runner.store.state_caches.values(), pages)
    return [view[page].clone() for cache, page in caches for view in (cache.conv, cache.ssm)]


def served_singly(runner: ModelRunner, geometry: KVCacheConfig, prompts: dict[int, list[int]]) -> Any:
    """Return the greedy tokens of sequences that compute a token in each step, and their states after each of them."""
    texts, states = {slot: list(prompt) for slot, prompt in prompts.items()}, {}
    for slot, text in texts.items():
        for position in range(LENGTH):
            result = runner.collect(runner.submit(step_of(geometry, [SeqSlice(slot, (text[position],), position, 1)])))
            states[slot, position + 1] = states_at(runner, slot, position + 1)
            if position + 1 == len(text):
                text += result.slice_results[0].tokens
    return texts, states


def step_of(geometry: KVCacheConfig, slices: list[SeqSlice]) -> StepPlan:
    """Return a step of greedy sequences, whose slots are initialised at their first token."""
    params = SamplingParams(temperature=0).to_device_params()
    slots = [row.slot for row in slices if not row.start]
    inits = tuple(SlotInit(slot, slot, -1, params, slot, 1) for slot in slots)
    return StepPlan(inits, tuple(op for slot in slots for op in named(geometry, slot)), tuple(slices))


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(("attention", "replayed"), [("triton", True), ("triton", False), ("reference", False)])
@pytest.mark.parametrize("name", SMALL)
def test_draft_tokens_leave_the_states_of_single_steps(
    name: str, attention: str, replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step, of drafts of which any number is right, beside prompts; also at the ends of pages passed."""
    model, spec = a_model(name)
    rng, most = np.random.default_rng(len(name)), 5
    prompts = {slot: rng.integers(5, 60, 2 + 5 * slot).tolist() for slot in (1, 2, 3)}
    single, geometry = a_runner(model, spec, "reference")
    texts, states = served_singly(single, geometry, prompts)
    runner, _ = a_runner(model, spec, attention, debug=True, max_drafts=most)
    again = with_graphs(runner, monkeypatch) if replayed else None
    done, accepted = dict.fromkeys(prompts, 0), set()
    while active := [slot for slot, count in done.items() if count < LENGTH - 1]:
        slices = []
        for slot in rng.permutation(active[:2] if rng.random() < 0.3 else active).tolist():
            start, text, prompt = done[slot], texts[slot], len(prompts[slot])
            if start < prompt:
                count = min(int(rng.integers(1, 6)), prompt - start)
                slices.append(SeqSlice(slot, tuple(text[start : start + count]), start, int(start + count == prompt)))
                continue
            drafts = text[start + 1 : LENGTH][: int(rng.integers(0, most + 1))]
            wrong = int(rng.integers(0, most + 1))
            guesses = tuple((token + (i == wrong)) % 64 for i, token in enumerate(drafts))
            slices.append(SeqSlice(slot, (text[start],), start, 1, (), guesses))
        results = runner.collect(runner.submit(step_of(geometry, slices))).slice_results
        for row, result in zip(slices, results):
            slot, end = row.slot, row.start + len(row.tokens)
            if row.draft_tokens:
                accepted.add(len(result.tokens) - 1)
                end += len(result.tokens) - 1
            assert list(result.tokens) == texts[slot][end - len(result.tokens) + 1 : end + 1]
            for count in (end, *range(-(-(row.start + 1) // RUN) * RUN, end, RUN)):
                for got, wanted in zip(states_at(runner, slot, count), states[slot, count], strict=True):
                    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
            done[slot] = end
    assert len(accepted) >= most - 1, f"only {accepted} draft tokens are accepted"
    assert again is None or again.replays >= 3 * 6, "most steps are replayed, each as three graphs"


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
