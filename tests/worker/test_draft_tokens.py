"""Draft tokens change no sample: plans with drafts, known or proposed by a draft model, against steps of one token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from geometries import one_size

from quire.kernels.cpu.library_loader import library
from quire.models import read_spec, resolve_model_class
from quire.models.named_configs import named_config
from quire.protocol.model_spec import ModelSpec
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import (
    FIRST_DRAFT,
    SeqSlice,
    SliceResult,
    SlotInit,
    StepPlan,
    TableWrite,
    TokenBitmask,
    TopLogprobs,
)
from quire.weights.dummy import fill_dummy_weights
from quire.worker.model_runner import ModelRunner
from quire.worker.verification import Verification

pytestmark = pytest.mark.xdist_group(name="draft_tokens")  # they share what takes seconds to make

PAGE, WIDTH, SLOTS, VOCAB, EOS = 4, 16, 5, 64, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = {
    **named_config("llama-125m"), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48, "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}  # fmt: skip
OTHER = {**CONFIG, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
NATIVE = pytest.mark.skipif(library() is None, reason="no kernels are built")
BACKENDS = (
    [pytest.param("triton", True), pytest.param("triton", False)]
    if DEVICE.type == "cuda"
    else [("reference", False), ("sdpa", False), *(pytest.param("native", on, marks=NATIVE) for on in (False, True))]
)
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(temperature=0.9),
    "cut": SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=0),
    "min_tokens": SamplingParams(temperature=1.5, min_tokens=12, logprobs=3),
    "masked": SamplingParams(temperature=1.1),
    "masked penalties": SamplingParams(temperature=0, presence_penalty=0.9, logprobs=2),
}


@cache
def a_model(draft: bool = False) -> tuple[Any, ModelSpec]:
    config = OTHER if draft else CONFIG
    model = resolve_model_class(config)(config, torch.float32, DEVICE)
    fill_dummy_weights(model, 3 + draft)
    for parameter in model.parameters():
        parameter.mul_(8)
    model.prepare(64)
    return model, read_spec(config)


def a_runner(backend: str, graphs: bool, draft: tuple[Any, ModelSpec] | None = None) -> ModelRunner:
    """A runner whose draft model, if any, is `draft`; pages that nothing was written to hold NaN."""
    model, spec = a_model()
    given: dict[str, Any] = {} if draft is None else {"draft_model": draft[0], "draft_spec": draft[1]}
    runner = ModelRunner(
        model, spec, torch.float32, DEVICE, backend, (EOS,), use_graphs=graphs, max_drafts=4, **given
    )  # fmt: skip
    layers = spec.layers if draft is None else spec.with_draft(draft[1]).layers
    sets = [[i for i, layer in enumerate(layers) if layer.is_draft == is_draft] for is_draft in (False, True)]
    config = one_size(
        *((tuple(layers), None) for layers in sets if layers), pages=1 + 2 * SLOTS * WIDTH,
        page_bytes=PAGE * spec.token_bytes(4), slots=SLOTS, width=WIDTH, tokens=PAGE,
    )  # fmt: skip
    groups = tuple(replace(group, is_draft=i > 0) for i, group in enumerate(config.groups))
    runner.bind(replace(config, groups=groups))
    runner.store.group_pages[0][1:].fill_(torch.nan)
    return runner


def pages(slot: int, groups: int) -> list[TableWrite]:
    firsts = [1 + (group * SLOTS + slot) * WIDTH for group in range(groups)]
    return [TableWrite(slot, group, 0, tuple(range(first, first + WIDTH))) for group, first in enumerate(firsts)]


class Served(NamedTuple):
    """A sequence's tokens and the log-probabilities of its samples."""

    tokens: list[int]
    logprobs: list[TopLogprobs]


def mask_at(slot: int, position: int) -> TokenBitmask:
    bits = np.random.default_rng(100 * slot + position).integers(0, 2, VOCAB, dtype=np.uint8)
    return TokenBitmask(slot, np.packbits(bits, bitorder="little").tobytes())


Drafts = Callable[[int, list[int]], tuple[int, ...]]
Verified = Callable[[int, list[int], list[int], SliceResult], None]


def serve(
    runner: ModelRunner, kinds: list[str], drafts: Drafts, proposes: bool = False, verified: Verified | None = None
) -> list[Served]:
    """Serve a sequence of each kind in slots 1, 2, ... With `drafts` of a slot and its tokens; with `proposes` the
    draft model proposes as many for the slot's next step. `verified` gets a slot, its tokens, the draft model's and
    their result. Masks come after the logits in half of the steps that have some."""
    length = 40
    prompts = {slot: [(7 * slot + i) % VOCAB for i in range(3 + 2 * slot)] for slot in range(1, 1 + len(kinds))}
    served = {slot: Served(list(prompt), []) for slot, prompt in prompts.items()}
    drafted, proposed = dict.fromkeys(prompts, 0), dict.fromkeys(prompts, 0)
    inits = tuple(
        SlotInit(
            slot, slot, -1, params.to_device_params(), 11 * slot, len(prompts[slot]), tuple(prompts[slot]),
            params.num_logprobs,
        )
        for slot, params in zip(prompts, (KINDS[kind] for kind in kinds))
    )  # fmt: skip
    ops = tuple(op for slot in prompts for op in pages(slot, len(runner.store.tables)))
    computed = dict.fromkeys(prompts, 0)
    while active := [slot for slot in prompts if len(served[slot].tokens) < length]:
        slices, draft_slices, masks = [], [], []
        for slot in active:
            tokens = served[slot].tokens
            room = WIDTH * PAGE - len(tokens)
            guesses = drafts(slot, tokens)[:room] if computed[slot] or proposes else ()
            if proposes:
                count, guesses = len(guesses), tuple(FIRST_DRAFT - i for i in range(min(proposed[slot], room)))
                proposed[slot] = max(min(count, room - len(guesses) - 1), 0)
                if proposed[slot] or not computed[slot]:
                    known = tuple(tokens[drafted[slot] :])
                    draft_slices.append(SeqSlice(slot, known, drafted[slot], proposed[slot]))
            slices.append(SeqSlice(slot, tuple(tokens[computed[slot] :]), computed[slot], 1, (), guesses))
            if "masked" in kinds[slot - 1]:
                masks += [mask_at(slot, len(tokens) + i) for i in range(1 + len(guesses))]
        plan = StepPlan(inits, ops, tuple(slices), (), tuple(masks), tuple(draft_slices))
        proposals = {row.slot: runner.sampled_tokens[1:, row.slot].tolist()[: len(row.draft_tokens)] for row in slices}
        if masks and sum(computed.values()) % 2:
            ticket = runner.submit_without_masks(plan._replace(masks=()))
            with_drafts = {slot: tokens for slot, tokens in proposals.items() if tokens and proposes}
            assert runner.proposed_tokens(ticket) == with_drafts
            ticket = runner.submit_masks(ticket, plan.masks)
        else:
            ticket = runner.submit(plan)
        results = runner.collect(ticket).slice_results
        inits = ops = ()
        for seq_slice, result in zip(slices, results, strict=True):
            slot, end = seq_slice.slot, len(served[seq_slice.slot].tokens)
            assert not result.error
            assert 1 <= len(result.tokens) <= 1 + len(seq_slice.draft_tokens)
            assert runner.last_sampled[slot] == result.tokens[-1]
            if verified is not None and seq_slice.draft_tokens:
                verified(slot, served[slot].tokens, proposals[slot], result)
            served[slot].tokens.extend(result.tokens)
            served[slot].logprobs.extend(result.top_logprobs)
            computed[slot] = end + len(result.tokens) - 1
            if slot in {one.slot for one in draft_slices}:
                drafted[slot] = len(served[slot].tokens) if proposed[slot] else end
    return [Served(one.tokens[:length], one.logprobs[: length - len(prompts[slot])]) for slot, one in served.items()]


@pytest.fixture(scope="module")
def expected() -> dict[tuple[str, ...], list[Served]]:
    """What steps of one token serve, by the kinds of sequences."""
    runner = a_runner("triton" if DEVICE.type == "cuda" else "reference", False)
    sets = [("greedy", "random", "cut"), *((kind,) * 3 for kind in KINDS), tuple(KINDS)[3:7]]
    return {kinds: serve(runner, list(kinds), lambda *_: ()) for kinds in sets}


def assert_equal(got: list[Served], expected: list[Served]) -> None:
    assert [one.tokens for one in got] == [one.tokens for one in expected]
    for one, other in zip(got, expected):
        assert [(x.token, x.rank, x.ids) for x in one.logprobs] == [(x.token, x.rank, x.ids) for x in other.logprobs]
        a, b = ([x.logprob for x in served.logprobs] for served in (one, other))
        assert a == pytest.approx(b, abs=1e-3)


@pytest.mark.parametrize(("backend", "graphs"), BACKENDS)
def test_known_drafts_change_nothing(backend: str, graphs: bool, expected: dict[tuple[str, ...], list[Served]]) -> None:
    """Right ones, wrong ones, and right ones up to somewhere; several slices of different lengths in a step."""
    runner = a_runner(backend, graphs)
    for kinds, truth in expected.items():
        random = np.random.default_rng(len(kinds))

        def guess(slot: int, tokens: list[int], truth: Any = truth, random: Any = random) -> tuple[int, ...]:
            guesses = truth[slot - 1].tokens[len(tokens) :][: random.integers(0, 5)]
            if guesses and random.random() < 0.6:
                at = random.integers(len(guesses))
                guesses[at] = (guesses[at] + 1) % VOCAB
            return tuple(guesses)

        assert_equal(serve(runner, list(kinds), guess), truth)


def continuation(runner: ModelRunner, params: SamplingParams, seed: int, tokens: list[int], count: int) -> list[int]:
    """Return the tokens that steps of one token sample after `tokens`."""
    init, table = SlotInit(1, 0, -1, params.to_device_params(), seed, len(tokens)), tuple(range(1, WIDTH))
    plan = StepPlan((init,), (TableWrite(1, 0, 0, table),), (SeqSlice(1, tuple(tokens), 0, 1),))
    sampled: list[int] = []
    for position in range(len(tokens), len(tokens) + count):
        sampled += runner.collect(runner.submit(plan)).slice_results[0].tokens
        plan = StepPlan((), (), (SeqSlice(1, (sampled[-1],), position, 1),))
    return sampled


@pytest.mark.parametrize("kinds", [("greedy", "random", "cut"), ("masked", "masked", "masked")])
@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("backend", "graphs"), BACKENDS)
def test_a_draft_model_proposes_its_own_samples(
    backend: str, graphs: bool, same: bool, kinds: tuple[str, ...], expected: dict[tuple[str, ...], list[Served]]
) -> None:
    """And changes nothing. If it is the model itself, all of its drafts are accepted, unless the model's samples are
    masked. It lags behind by some tokens where a slot has no drafts for a while."""
    draft = a_model(draft=not same)
    runner, random = a_runner(backend, graphs, draft), np.random.default_rng(0)
    own = ModelRunner(*draft, torch.float32, DEVICE, "triton" if DEVICE.type == "cuda" else "sdpa")
    layers = (tuple(range(len(draft[1].layers))), None)
    page_bytes = PAGE * draft[1].token_bytes(4)
    own.bind(one_size(layers, pages=WIDTH, page_bytes=page_bytes, slots=2, width=WIDTH, tokens=PAGE))
    accepted: list[bool] = []

    def markers(slot: int, tokens: list[int]) -> tuple[int, ...]:
        return tuple(FIRST_DRAFT - i for i in range(random.choice((0, 0, 0, 1, 2, 3, 4))))

    def check(slot: int, tokens: list[int], proposals: list[int], result: SliceResult) -> None:
        assert continuation(own, KINDS[kinds[slot - 1]], 11 * slot, tokens, len(proposals)) == proposals
        accepted.extend(i < len(result.tokens) - 1 for i in range(len(proposals)))

    assert_equal(serve(runner, list(kinds), markers, True, check), expected[kinds])
    assert len(accepted) > 30
    assert all(accepted) == (same and "masked" not in kinds)
    assert any(accepted) or not same


def test_results_of_rows_are_joined() -> None:
    """An error is the last token's. That of a row that is not kept is none."""
    rows = (
        SeqSlice(1, (5,), 9, 1, (), (6, 7)), SeqSlice(2, (1, 2), 0, 0, (2,)), SeqSlice(3, (4, 5, 6), 2, 1, (), (8,)),
        SeqSlice(4, (3,), 7, 2), SeqSlice(5, (2,), 3, 1, (), (FIRST_DRAFT, FIRST_DRAFT - 1)),
    )  # fmt: skip
    verification = Verification.from_slices(SeqSlices.from_slices(rows))
    assert verification.rows == (
        SeqSlice(1, (5,), 9, 1), SeqSlice(1, (6,), 10, 1), SeqSlice(1, (7,), 11, 1), SeqSlice(2, (1, 2), 0, 0, (2,)),
        SeqSlice(3, (4, 5, 6), 2, 1), SeqSlice(3, (8,), 5, 1), SeqSlice(4, (3,), 7, 2), SeqSlice(5, (2,), 3, 1),
        SeqSlice(5, (FIRST_DRAFT,), 4, 1), SeqSlice(5, (FIRST_DRAFT - 1,), 5, 1),
    )  # fmt: skip
    table = torch.tensor([[0] * 6, [0, 0, 0, 0, 0, 20], [0, 0, 0, 0, 0, 21], [0] * 6])
    samples = torch.tensor([6, 9, 9, 8, 30, 40, 41, 20, 21, 22])
    accepted = verification.accept_on_host(samples.numpy(), table.numpy(), None).tolist()
    assert accepted == [1, 1, 2]
    assert table[0].tolist() == [0, 9, 0, 30, 0, 22]
    assert (table[1, [1, 3, 5]].tolist(), table[2, [1, 5]].tolist()) == ([6, 8, 20], [9, 21])
    results = [SliceResult((token,)) for token in samples.tolist()]
    results[5:7] = [SliceResult((40, 41))]
    for row, tokens, error in ((2, (6, 9), ""), (1, (6, 9), "bad"), (0, (6,), "bad")):
        broken = [one._replace(error="bad") if i == row else one for i, one in enumerate(results)]
        assert verification.merge(broken, accepted) == [
            SliceResult(tokens, error=error), SliceResult((8, 30)), SliceResult((40, 41)), SliceResult((20, 21, 22)),
        ]  # fmt: skip
