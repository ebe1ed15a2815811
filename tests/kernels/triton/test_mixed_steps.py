"""Steps with prompts, padded to what graphs are captured for: their numbers cover every token once, and what the
halves compute from them is what eager steps compute. Without a GPU a graph is its launches, made anew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from grids import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from small_models import SMALL, a_model, a_runner, pages_of
from triton.runtime.interpreter import InterpretedFunction

from quire.kernels.triton import backend
from quire.kernels.triton.backend import TritonBackend
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import LAST_SAMPLED, SeqSlice, SlotInit, StepPlan, TableWrite
from quire.worker import mixed_graphs
from quire.worker.cuda_graphs import CapturedGraph
from quire.worker.inputs import FlatInputs
from quire.worker.mixed_graphs import MixedGraphInputs, MixedGraphs, PaddedSizes
from quire.worker.model_runner import ModelRunner

CPU = torch.device("cpu")
SLOTS = 9
Chunk = tuple[int, int]
"""Tokens of a sequence so far, and how many a step computes."""


def rows_of(chunks: list[Chunk], unsampled: int = 0) -> tuple[SeqSlice, ...]:
    """Rows of slots 1, 2, ...; the first ones don't sample."""
    return tuple(
        SeqSlice(i + 1, tuple(range(10, 10 + count)), start, int(i >= unsampled))
        for i, (start, count) in enumerate(chunks)
    )


CHUNKS = st.lists(st.tuples(st.integers(0, 3000), st.one_of(st.just(1), st.integers(1, 300))), min_size=1, max_size=60)


def numbers(inputs: MixedGraphInputs, flat: FlatInputs, sizes: PaddedSizes) -> dict[str, np.ndarray]:
    """What graphs of these sizes find on the device."""
    inputs.buffer.fill_(-7)
    inputs.region(sizes).copy_(torch.from_numpy(inputs.build_array(flat, sizes)))
    ids, step = inputs.padded_batch(sizes.num_tokens, sizes.num_decode_rows)
    found = {"ids": ids, "sampled": inputs.sampled_region(sizes.num_sampled), **step._asdict()}
    found |= {f"tiles {queries}": tiles for queries, tiles in step.tiles.items()}
    return {name: tensor.numpy() for name, tensor in found.items() if name != "tiles" and tensor is not None}


@pytest.mark.parametrize("deterministic", [False, True])
@given(chunks=CHUNKS, unsampled=st.integers(0, 5))
def test_every_token_is_one_rows_or_padding(deterministic: bool, chunks: list[Chunk], unsampled: int) -> None:
    inputs = MixedGraphInputs([1, 2, 4, 8, 40, 61], (32, 5), deterministic, CPU)
    rows = rows_of(chunks, unsampled)
    flat = FlatInputs.from_slices(rows)
    sizes = inputs.choose_sizes(flat)
    total, prompts = sum(count for _, count in chunks), sum(count > 1 for _, count in chunks)
    if total > 1024 or prompts > mixed_graphs.MAX_PROMPT_ROWS or len(chunks) <= unsampled:
        assert sizes is None
        return
    assert sizes is not None
    found = numbers(inputs, flat, sizes)
    assert total <= sizes.num_tokens == len(found["ids"]) == len(found["token_slots"])
    for name, padding, expected in (
        ("ids", 0, [token for row in rows for token in row.tokens]),
        ("positions", 0, [row.start + i for row in rows for i in range(len(row.tokens))]),
        ("token_slots", 0, [row.slot for row in rows for _ in row.tokens]),
    ):
        assert found[name].tolist() == expected + [padding] * (sizes.num_tokens - total)
    ends = np.cumsum([len(row.tokens) for row in rows]) - 1
    sampled = [
        (end, row.slot, row.start + len(row.tokens) - 1) for end, row in zip(ends.tolist(), rows) if row.num_samples
    ]
    assert found["sampled"].T.tolist() == [list(one) for one in sampled] + [[0] * 3] * (
        sizes.num_sampled - len(sampled)
    )
    seen = np.zeros(sizes.num_tokens, dtype=int)
    for slot, length, place in zip(found["slots"], found["lengths"], found["rows"]):
        if place < 0:
            assert (slot, length, place) == (0, 0, -1)
        else:
            seen[place] += 1
            assert (slot, length) == (found["token_slots"][place], found["positions"][place] + 1)
    assert len(found["slots"]) == (0 if deterministic else sizes.num_decode_rows)
    for queries in inputs.tile_queries:
        covered = seen.copy()
        for slot, token, many, position in found[f"tiles {queries}"].tolist():
            assert 0 <= many <= queries
            covered[token : token + many] += 1
            assert (found["token_slots"][token : token + many] == slot).all()
            if slot:
                assert found["positions"][token : token + many].tolist() == list(range(position, position + many))
            else:
                assert many == 0 or token >= total
        assert (covered == 1).all()


def test_sizes_are_the_least_with_room() -> None:
    inputs = MixedGraphInputs([1, 8, 64, 200, 256], (32,), False, CPU)

    def fit(*chunks: Chunk, unsampled: int = 0) -> PaddedSizes | None:
        return inputs.choose_sizes(FlatInputs.from_slices(rows_of(list(chunks), unsampled)))

    assert fit(*[(400, 1)] * 190, (0, 200)) == PaddedSizes(432, 256, 200)
    assert fit(*[(400, 1)] * 190, (0, 600)) == PaddedSizes(816, 256, 200)
    assert fit((0, 5)) == PaddedSizes(32, 32, 1)
    assert fit(*[(9, 1)] * 200, (0, 32)) == PaddedSizes(256, 256, 256)
    assert fit(*[(9, 1)] * 30, (0, 40), unsampled=29) == PaddedSizes(96, 32, 8)
    assert fit((0, 1024)) == PaddedSizes(1024, 32, 1)
    assert fit((0, 1025)) is None
    assert fit((0, 40), unsampled=1) is None, "nothing samples"
    assert fit(*[(0, 2)] * 16) == PaddedSizes(32, 32, 64)
    assert fit(*[(0, 2)] * 17) is None, "too many tiles"
    assert fit(*[(9, 1)] * 257, (0, 2)) is None, "more rows than graphs have"


class Again:
    """In place of a Recorder: a step's launches are made anew, and leave their results where the first time's are."""

    def __init__(self) -> None:
        self.replays = self.recorded = 0

    def capture(self, step: Callable[[], Any]) -> CapturedGraph:
        self.recorded += 1
        result = step()

        def replay() -> None:
            self.replays += 1
            anew = step()
            both = zip(result, anew) if isinstance(result, tuple) else [(result, anew)] * (result is not None)
            for kept, found in both:
                kept.copy_(found)

        return CapturedGraph(SimpleNamespace(replay=replay), result)  # type: ignore[arg-type]


def with_graphs(runner: ModelRunner, patch: pytest.MonkeyPatch, chosen: bool = True) -> Again:
    """Steps with prompts are replayed, their logits kept. Small sizes, so that all of them are met. As on a device of
    several multiprocessors; where parts are `chosen` here, contexts of few rows have four."""
    for module, name, value in (
        (mixed_graphs, "TOKEN_SIZES", [4, 8, 16, 24]), (mixed_graphs, "MAX_PROMPT_ROWS", 2),
        (mixed_graphs, "SMALL_DECODE_ROWS", 1), (mixed_graphs, "MEDIUM_DECODE_ROWS", 3),
        (backend, "multiprocessors", lambda device: 9),
        *[(backend, "choose_splits", lambda rows, *_: 4 if rows < 3 else 1)] * chosen,
    ):  # fmt: skip
        patch.setattr(module, name, value)
    again = Again()
    kept = torch.zeros((SLOTS, 64), device=DEVICE)
    tails = {"": lambda logits, slots: kept[: len(logits)].copy_(logits)}
    runner.mixed_graphs = MixedGraphs(
        runner.model, runner.model.logits, runner.store, runner.backend, runner.sampled_tokens, 32,
        [1, 2, 5, SLOTS - 1], tails, again,  # type: ignore[arg-type]
    )  # fmt: skip
    patch.setattr(runner.sampler, "epilogue_for", lambda rows: "")
    return again


def served(
    runners: list[ModelRunner], seed: int, steps: int = 10, named: Callable[[int], list[TableWrite]] = pages_of
) -> list[list[Any]]:
    """Random steps of sequences that come, with prompts in chunks, decode and go: what each runner drew."""
    random = np.random.default_rng(seed)
    drawn: list[list[Any]] = [[] for _ in runners]
    left: dict[int, list[int]] = {}  # of each slot: positions done, tokens of the prompt
    for step in range(steps):
        births, tables, rows = [], [], []
        for slot in range(1, SLOTS):
            if slot not in left and random.random() < 0.35:
                left[slot] = [0, int(random.integers(1, 12))]
                params = SamplingParams(temperature=float(random.choice([0.0, 1.0])), seed=slot)
                births.append(
                    SlotInit(slot, slot, -1, params.to_device_params(), 100 * seed + 10 * step + slot, left[slot][1])
                )
                tables += named(slot)
        for slot in random.permutation(list(left)).tolist():
            done, prompt = left[slot]
            count = 1 if done >= prompt else min(int(random.integers(1, 9)), prompt - done)
            tokens = (LAST_SAMPLED,) if done >= prompt else tuple(random.integers(5, 60, count).tolist())
            ends = done + count >= prompt
            rows.append(SeqSlice(slot, tokens, done, (1 + (random.random() < 0.1)) * ends))
            left[slot][0] += count
            if left[slot][0] >= prompt + 6:
                del left[slot]
        plan = StepPlan(tuple(births), tuple(tables), tuple(rows))
        for runner, own in zip(runners, drawn):
            own.append([sample.tokens for sample in runner.collect(runner.submit(plan)).slice_results])
    return drawn


@pytest.mark.share(6)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "plain") for name in SMALL),
        *(("llama-125m", how) for how in ("deterministic", "windows", "chunks", "unlike layers", "parts not chosen")),
    ],
)
def test_replayed_steps_compute_what_eager_ones_do(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = a_model(name)
    reference, runner = a_runner(model, spec, "reference", SLOTS), a_runner(model, spec, "triton", SLOTS)
    if how == "deterministic":
        monkeypatch.setattr(runner, "backend", TritonBackend(deterministic=True))
    for each in (reference, runner):
        caches = each.store.caches
        if how in ("windows", "chunks"):
            bound = {"window": 5} if how == "windows" else {"chunk": 6}
            caches = {layer: replace(cache, **bound) for layer, cache in caches.items()}
        if how == "unlike layers":
            caches = {**caches, 0: replace(caches[0], softcap=0.5)}
        monkeypatch.setattr(each.store, "caches", caches)
    again = with_graphs(runner, monkeypatch, how != "parts not chosen")
    expected, got = served([reference, runner], seed=len(name) + len(how))
    assert got == expected
    assert again.replays >= 3 * 6, "most steps are replayed, each as three graphs"
    for mine, theirs in zip(runner.store.group_pages, reference.store.group_pages):
        torch.testing.assert_close(mine[1:], theirs[1:], atol=2e-4, rtol=2e-4, equal_nan=True)
        assert mine[0].isfinite().all(), "padding is finite"


def test_a_rank_that_replays_a_graph_of_another_size_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = a_model("llama-125m")
    runners = [a_runner(model, spec, "triton", SLOTS) for _ in range(3)]
    for runner in runners:
        with_graphs(runner, monkeypatch)
        runner.store.op_checksum = 0
    monkeypatch.setattr(runners[2].mixed_graphs.inputs, "token_sizes", [16, 24])
    served(runners, seed=3, steps=4)
    first, second, other = (runner.op_checksum for runner in runners)
    assert first == second
    assert first != other


def test_all_that_a_server_needs_can_be_captured_at_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = a_model("llama-125m")
    runner = a_runner(model, spec, "triton", SLOTS)
    again = with_graphs(runner, monkeypatch)
    most = 14  # tokens a step
    firsts, seconds = runner.mixed_graphs.half_sizes(most)
    assert firsts == [(16, 8), (16, 3), (16, 1), (8, 8), (8, 3), (8, 1), (4, 4), (4, 3), (4, 1)]
    assert seconds == [8, 5, 2, 1]
    assert runner.mixed_graphs.half_sizes() == ([(24, 8), (24, 3), (24, 1), *firsts], seconds)
    with torch.inference_mode():
        for sizes in firsts:
            runner.mixed_graphs.capture_first_half(*sizes)
        for count in seconds:
            runner.mixed_graphs.capture_second_half(count)
    assert again.recorded == 9 + 4 + 4, "each second half has a tail"
    pages = runner.store.group_pages[0]
    assert pages[1:].isnan().all(), "only the scratch page is written"
    assert pages[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "deeper", "expected"),
    [
        ("llama-125m", {"num_hidden_layers": 6}, [0, 1, 5]),
        ("gemma-3-4b", {"num_hidden_layers": 8}, [0, 1, 2, 7]),
        ("gpt2", {"n_layer": 5}, [0, 1, 4]),
    ],
)
def test_one_layer_of_each_kind_launches_all_kernels_before_a_capture(
    name: str, deeper: dict[str, int], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALL, name, {**SMALL[name], **deeper})
    model, spec = a_model(name)
    runner = a_runner(model, spec, "triton", SLOTS)
    again = with_graphs(runner, monkeypatch)
    launched: list[set[Any]] = [set(), set()]  # before a capture, in it
    numbers: list[list[int]] = []
    run = InterpretedFunction.run

    def record(self: Any, *arguments: Any, **options: Any) -> Any:
        kinds = [x.dtype if isinstance(x, torch.Tensor) else x for x in arguments]
        launched[min(again.recorded, 1)].add((self.fn.__name__, str(kinds), str(options)))
        return run(self, *arguments, **options)

    def embed(*arguments: Any) -> Any:
        numbers.append([layers.index(layer) for layer in model.layers])
        return type(model).embed(model, *arguments)

    layers = list(model.layers)
    monkeypatch.setattr(InterpretedFunction, "run", record)
    monkeypatch.setattr(model, "embed", embed)
    with torch.inference_mode():
        runner.mixed_graphs.capture_first_half(8, 3)
    assert numbers == [expected, list(range(len(layers)))]
    assert launched[0] == launched[1] != set()
    model.exchange = object()
    with torch.inference_mode():
        runner.mixed_graphs.capture_first_half(4, 1)
    assert numbers[2] == numbers[3] == list(range(len(layers))), "other ranks must run the same"


def test_scored_and_long_steps_stay_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    model, spec = a_model("llama-125m")
    runner = a_runner(model, spec, "triton", SLOTS)
    again = with_graphs(runner, monkeypatch)
    rows = rows_of([(0, 5), (3, 1)])
    assert runner.mixed_graphs.choose_sizes(SeqSlices.from_slices(rows), FlatInputs.from_slices(rows)) == PaddedSizes(
        8, 1, 2
    )
    scored = (rows[0]._replace(score_tokens=(1, 2, 3, 4, 5)), rows[1])
    assert runner.mixed_graphs.choose_sizes(SeqSlices.from_slices(scored), FlatInputs.from_slices(scored)) is None
    monkeypatch.setattr(
        runner.backend, "use_long_kernel", lambda cache, lengths, contexts: (lengths, contexts) == ([5], [5])
    )
    assert runner.mixed_graphs.choose_sizes(SeqSlices.from_slices(rows), FlatInputs.from_slices(rows)) is None
    assert not again.replays
