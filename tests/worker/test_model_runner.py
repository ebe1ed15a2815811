"""What a step does beside its rows: work ahead comes behind them, and no second of two steps in flight counts twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from geometries import one_size
from hypothesis import given
from hypothesis import strategies as st

from quire.models import read_spec, resolve_model_class
from quire.models.named_configs import named_config
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.step_plan import (
    LAST_SAMPLED,
    PageCopy,
    PageOps,
    Poison,
    SeqSlice,
    SlotInit,
    StepPlan,
    SwapIn,
    SwapOut,
    TableWrite,
)
from quire.weights.dummy import fill_dummy_weights
from quire.worker import model_runner
from quire.worker.model_runner import ModelRunner

PAGE, WIDTH, SLOTS, DIM = 4, 4, 3, 8
CONFIG = {
    **named_config("llama-125m"), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": DIM, "intermediate_size": 48, "vocab_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    kind = resolve_model_class(CONFIG)
    model = kind(CONFIG, torch.float32, DEVICE)
    fill_dummy_weights(model, 3)
    for parameter in model.parameters():
        parameter.mul_(8)
    model.prepare(64)
    spec = read_spec(CONFIG)
    made = ModelRunner(model, spec, torch.float32, DEVICE)
    page_bytes = PAGE * spec.token_bytes(4)
    made.bind(one_size(((0, 1), None), pages=13, page_bytes=page_bytes, slots=SLOTS, width=WIDTH, tokens=PAGE, host=3))
    return made


def served(runner: ModelRunner, *ahead: PageOps) -> list[tuple[int, ...]]:
    """The tokens of three steps of one sequence in pages 1 to 4, with this work ahead in each."""
    birth = SlotInit(1, 1, -1, SamplingParams(temperature=0, max_tokens=20).to_device_params(), 0, 5)
    runner.store.buffer.zero_()
    rows = (SeqSlice(1, (5, 6, 7, 8, 9), 0, 1), SeqSlice(1, (LAST_SAMPLED,), 5, 1), SeqSlice(1, (LAST_SAMPLED,), 6, 1))
    found = []
    for i, row in enumerate(rows):
        first = i == 0
        plan = StepPlan(
            (birth,) * first, (TableWrite(1, 0, 0, (1, 2, 3, 4)),) * first, (row,), (ahead[i : i + 1] or ((),))[0]
        )
        found.append(runner.collect(runner.submit(plan)).slice_results[0].tokens)
    return found


def test_work_ahead_is_done_behind_the_rows(runner: ModelRunner) -> None:
    usual = served(runner)
    pages = runner.store.group_pages[0]
    assert served(runner, (), (), (Poison(0, 1), Poison(0, 2), PageCopy(0, 2, 9), TableWrite(1, 0, 0, (9, 9)))) == usual
    assert pages[[1, 2, 9]].isnan().all(), "in order"
    assert runner.store.host_tables[0][1].tolist() == [9, 9, 3, 4]
    assert runner.store.tables[0][1].tolist() == [9, 9, 3, 4]
    # The sequence moves while its second step computes: out, away, and back elsewhere, as the rows left it.
    away = (
        SwapOut(0, 1, 1),
        SwapOut(0, 2, 2),
        Poison(0, 1),
        Poison(0, 2),
        SwapIn(0, 1, 7),
        SwapIn(0, 2, 8),
        TableWrite(1, 0, 0, (7, 8)),
    )
    assert served(runner, (), away) == usual
    assert pages[[1, 2]].isnan().all()
    assert served(runner, (Poison(0, 1),))[1:] != usual[1:]


def test_work_ahead_needs_no_rows(runner: ModelRunner) -> None:
    runner.collect(runner.submit(StepPlan((), (Poison(0, 5),), (), (PageCopy(0, 5, 6),))))
    assert runner.store.group_pages[0][6].isnan().all()


@given(st.lists(st.floats(0, 5), min_size=8, max_size=40))
def test_no_second_counts_twice(waits: list[float]) -> None:
    """Two steps are in flight: each is submitted before the one before is collected."""
    clock, now = iter(waits * 9), [0.0]

    def tick() -> float:
        now[0] += next(clock)
        return now[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "time", SimpleNamespace(perf_counter=tick))
        empty = ModelRunner(None, None, torch.float32, torch.device("cpu"))
        empty.sampler = empty.decode_graphs = None
        empty.store = SimpleNamespace(apply_page_ops=lambda journal: None)
        began, tickets, seconds = now[0], [], []
        for _ in range(4):
            tickets.append(empty.submit(StepPlan((), (), ())))
            if len(tickets) == 2:
                seconds.append(empty.collect(tickets.pop(0)).seconds)
        seconds.append(empty.collect(tickets.pop()).seconds)
        assert all(each >= 0 for each in seconds)
        assert sum(seconds) == pytest.approx(now[0] - began - waits[0]), "all of it, from the first submission on"
