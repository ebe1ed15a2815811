"""Groups whose pages differ in size: a journal has the effect of its entries one after another on the bytes, launches
are as few as hazards allow, and a model computes what it computes over pages of one size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from geometries import one_size
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.data.models import resolve
from quire.data.models.configs import named_config
from quire.data.runner import hazards, store
from quire.data.runner.hazards import launches
from quire.data.runner.inputs import build_batch
from quire.data.runner.model_runner import ModelRunner
from quire.data.runner.step import Step
from quire.data.runner.store import Store
from quire.data.weights.dummy import fill_dummy
from quire.errors import StartupError
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.plan import LAST, Birth, Copy, Entry, In, Out, Poison, Row, StepPlan, Table
from quire.vocabulary.specs import Geometry, Group, LayerSpec, Layout, ModelSpec, lay_out

CPU = torch.device("cpu")
SLOTS, WIDTHS = 3, (4, 7)
Shapes = tuple[tuple[int, int, int], ...]
SHAPES: dict[str, Shapes] = {  # of each group's one layer: key heads, their size, tokens of a page
    "3:2": ((3, 1, 4), (2, 1, 4)),
    "84:1": ((21, 2, 2), (1, 1, 1)),
}


def geometry_of(shapes: Shapes, pages: int = 8) -> tuple[Geometry, ModelSpec]:
    """Groups that share all bytes, as pages of one memory that is divided in two ways."""
    layers = tuple(LayerSpec(kv, dim) for kv, dim, _ in shapes)
    sizes = [layer.token_bytes(4) * tokens for layer, (_, _, tokens) in zip(layers, shapes)]
    size = pages * max(sizes)
    groups = tuple(
        Group((i,), own, own // tokens, WIDTHS[i], range(1, size // own), range(1, size // 2 // own + 1), tokens)
        for i, (own, (_, _, tokens)) in enumerate(zip(sizes, shapes))
    )
    spec = ModelSpec("test", layers, vocab_size=9, max_len=8, hidden=4, heads=42, intermediate=4, parameters=1)
    return Geometry(Layout.PAGED, size, SLOTS, groups, 4, size // 2), spec


def filled(shapes: Shapes, device: torch.device) -> Store:
    """Every number of the device and of host memory is another one."""
    made = Store(*geometry_of(shapes), torch.float32, device)
    made.buffer.copy_(torch.arange(len(made.buffer)) + 1)
    for host in made.pool.host.values():  # views of the same bytes
        host.copy_(-torch.arange(host.numel()).view_as(host) - 1)
    return made


def one_at_a_time(journal: tuple[Entry, ...], made: Store, bytes_: np.ndarray, host: np.ndarray) -> list[np.ndarray]:
    """What a journal means: its effect on the bytes of the device and of host memory; and the tables."""
    tables = [t.copy() for t in made.host_tables]

    def of(memory: np.ndarray, group: int, page: int) -> np.ndarray:
        size = made.sizes[group]
        return memory[page * size : (page + 1) * size]

    for entry in journal:
        match entry:
            case Table(slot, group, at, pages):
                tables[group][slot, at : at + len(pages)] = pages
            case Copy(group, src, dst):
                of(bytes_, group, dst)[:] = of(bytes_, group, src).copy()
            case Out(group, page, place):
                of(host, group, place - 1)[:] = of(bytes_, group, page)
            case In(group, place, page):
                of(bytes_, group, page)[:] = of(host, group, place - 1)
            case Poison(group, page):
                of(bytes_, group, page)[:] = 255  # no number in any dtype
    return tables


def check(shapes: Shapes, *journals: tuple[Entry, ...], device: torch.device = CPU, late: bool = False) -> None:
    """`late`: swaps are held up, so that they come after whatever doesn't wait for them."""
    made = filled(shapes, device)
    host = max(made.pool.host.values(), key=torch.numel)

    def contents() -> list[np.ndarray]:
        if device.type != "cpu":
            torch.cuda.synchronize()
        return [x.reshape(-1).cpu().numpy().view(np.uint8).copy() for x in (made.buffer, host)]

    for journal in journals:
        bytes_, there = contents()
        tables = one_at_a_time(journal, made, bytes_, there)
        if late:
            with torch.cuda.stream(made.pool.side):
                torch.cuda._sleep(5_000_000)
        made.replay(journal)
        assert all((got == expected).all() for got, expected in zip(contents(), (bytes_, there)))
        for table, kept, expected in zip(made.tables, made.host_tables, tables):
            assert (table.cpu().numpy() == expected).all()
            assert (kept == expected).all()


def entries_of(shapes: Shapes) -> st.SearchStrategy[Entry]:
    geometry, _ = geometry_of(shapes)
    kinds: list[st.SearchStrategy[Entry]] = []
    for g, group in enumerate(geometry.groups):
        # Few pages, so that they meet: those in the bytes of the large group's first three.
        page = st.integers(1, min(3 * geometry.groups[0].page_bytes // group.page_bytes, group.ids[-1]))
        place, own = st.integers(1, min(group.host_ids[-1], 9)), st.just(g)
        kinds += [st.builds(Copy, own, page, page)] * 2
        kinds += [st.builds(Out, own, page, place), st.builds(In, own, place, page), st.builds(Poison, own, page)]
        tables = st.lists(page, min_size=1, max_size=2).map(tuple)
        kinds.append(st.builds(Table, st.integers(0, SLOTS - 1), own, st.integers(0, WIDTHS[g] - 2), tables))
    return st.one_of(kinds)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_replay_is_one_entry_after_another_on_the_bytes(shapes: Shapes) -> None:
    journals = st.lists(st.lists(entries_of(shapes), max_size=14).map(tuple), min_size=1, max_size=2)

    @given(journals)
    @example([LOST])
    @example([(Copy(0, 1, 2), Copy(1, 3, 4))])  # in 3:2 the latter overwrites a part of the former
    @example([(Copy(1, 5, 1), Copy(0, 1, 3), Copy(1, 2, 9))])
    @example([(Out(0, 1, 1), Poison(1, 2), In(0, 1, 1), Out(1, 2, 3), In(1, 1, 6))])
    @example([(In(1, 2, 3), Out(1, 3, 2), In(0, 1, 2))])
    def replayed(journals: list[tuple[Entry, ...]]) -> None:
        check(shapes, *journals)

    replayed()


@pytest.mark.gpu
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_replay_on_a_gpu(shapes: Shapes) -> None:
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(entries_of(shapes), max_size=14).map(tuple), min_size=1, max_size=2), st.booleans())
    def replayed(journals: list[tuple[Entry, ...]], late: bool) -> None:
        check(shapes, *journals, device=torch.device("cuda"), late=late)

    replayed()


LOST = (Copy(0, 3, 4), Copy(1, 5, 4))  # unlike pages of one number


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_launch_that_forgets_the_group_is_noticed(shapes: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "launches", lambda entries, sizes: hazards._alike(entries, sizes[0]))
    with pytest.raises(AssertionError):
        check(shapes, LOST)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_a_hazard_between_unlike_pages_that_is_overlooked_is_noticed(
    shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The large page 2 is read, then its first bytes are written as a small page, then it is read again."""
    large, small = (group.page_bytes for group in geometry_of(shapes)[0].groups)
    journal = (Copy(0, 2, 1), Copy(1, 6 * large // small, 2 * large // small), Copy(0, 2, 4))
    check(shapes, journal)
    monkeypatch.setattr(hazards, "_touched", lambda page, size, other: range(page, page + 1))
    with pytest.raises(AssertionError):
        check(shapes, journal)


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_the_later_write_stays(shapes: Shapes) -> None:
    """Where a small page is written, then the large one around it, by a launch that began before."""
    large, small = (group.page_bytes for group in geometry_of(shapes)[0].groups)
    check(shapes, (Copy(0, 4, 5), Copy(1, 6 * large // small, 3 * large // small), Copy(0, 4, 3)))
    check(shapes, (In(0, 1, 5), Poison(1, 3 * large // small), In(0, 2, 3)))


def test_work_of_unlike_groups_is_put_together() -> None:
    """Alternating groups and kinds, no two of which touch the same bytes: one launch for each kind and size."""
    first = [Copy(0, 10 + i, 20 + i) for i in range(4)]
    second = [Copy(1, 100 + i, 110 + i) for i in range(4)]
    mixed = [entry for pair in zip(first, second) for entry in pair]
    assert [(x.kind, x.size, len(x.moves)) for x in launches(mixed, (96, 64))] == [(Copy, 96, 4), (Copy, 64, 4)]
    outs = [Out(g, 200 + i, 1 + i) for i, g in ((0, 0), (3, 1), (3, 0), (9, 1))]
    both = [entry for pair in zip(outs, first) for entry in pair]
    assert [(x.kind, x.size, len(x.moves)) for x in launches(both, (96, 64))] == [
        (Out, 96, 2), (Copy, 96, 4), (Out, 64, 2),
    ]  # fmt: skip
    chain = [Copy(0, 10, 20), Copy(1, 100, 110), Copy(0, 20, 21), Copy(1, 101, 111)]
    assert [(x.size, x.moves) for x in launches(chain, (96, 64))] == [
        (96, {20: 10}), (64, {110: 100}), (96, {21: 20}), (64, {111: 101}),
    ]  # fmt: skip


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 7), st.integers(1, 7))
def test_overlap_is_that_of_the_bytes(page: int, other_page: int, size: int, other: int) -> None:
    ours, theirs = (set(range(p * s, (p + 1) * s)) for p, s in ((page, size), (other_page, other)))
    assert hazards.overlap({page}, size, {other_page}, other) == bool(ours & theirs)


@pytest.mark.parametrize(
    ("change", "numbers"),
    [
        ({"page_bytes": 98}, "a page of 98 bytes.* numbers of 4 bytes"),
        ({"run_tokens": 64, "run_pages": 15}, "64 tokens fill 15 pages"),
        ({"page_bytes": 64}, "a page of 64 bytes doesn't hold 4 tokens of 24 bytes"),
    ],
)
def test_what_cannot_be_viewed_is_refused_at_start(change: dict[str, int], numbers: str) -> None:
    geometry, spec = geometry_of(SHAPES["3:2"])
    geometry = replace(geometry, groups=(replace(geometry.groups[0], **change), geometry.groups[1]))
    with pytest.raises(StartupError, match=numbers):
        Store(geometry, spec, torch.float32, CPU)


def test_more_pages_than_have_numbers_are_refused() -> None:
    from quire.data.runner.views import check_geometry

    geometry, spec = geometry_of(SHAPES["84:1"])
    with pytest.raises(StartupError, match=r"pages of 8; at most 2,147,483,647"):
        check_geometry(replace(geometry, bytes=2**35), spec)


CONFIG = {
    **named_config("llama-125m"), "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 32,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
    "vocab_size": 64, "max_position_embeddings": 64, "use_sliding_window": True, "sliding_window": 6,
    "max_window_layers": 3,
}  # fmt: skip
PAGE, WIDTH = 4, 8


def runner_of(model: Any, spec: ModelSpec, geometry: Geometry, attention: str) -> ModelRunner:
    runner = ModelRunner(model, spec, torch.float32, CPU, attention)
    runner.bind(geometry)
    runner.store.buffer.fill_(torch.nan)  # recycled pages hold anything
    runner.store.clear_scratch()
    return runner


def unlike(spec: ModelSpec, sets: tuple[tuple[tuple[int, ...], int | None], ...], slots: int) -> Geometry:
    """Each group's pages have the bytes of its layers, and are behind those of the group before."""
    tokens = [sum(spec.layers[i].token_bytes(4) for i in layers) for layers, _ in sets]
    sizes = [PAGE * count for count in tokens]
    ids, end = lay_out([(size, slots * WIDTH) for size in sizes], max(sizes))
    groups = tuple(
        Group(layers, size, count, WIDTH, own, run_tokens=PAGE, window=window)
        for (layers, window), size, count, own in zip(sets, sizes, tokens, ids)
    )
    return Geometry(Layout.PAGED, end, slots, groups, 4)


@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_model_of_unlike_layers_computes_the_same(attention: str) -> None:
    """Three full layers and one with a window: in pages of 3:1, and in pages of one size."""
    kind = resolve(CONFIG)
    model = kind(CONFIG, torch.float32, CPU)
    fill_dummy(model, 3)
    for parameter in model.parameters():
        parameter.mul_(8)
    model.prepare(64)
    spec, slots = kind.spec(CONFIG), 4
    assert [layer.window for layer in spec.layers] == [None, None, None, 6]
    sets = (((0, 1, 2), None), ((3,), 6))
    size = 3 * PAGE * spec.layers[0].token_bytes(4)
    same = one_size(*sets, pages=2 * slots * WIDTH + 1, page_bytes=size, slots=slots, width=WIDTH, tokens=PAGE)
    params = SamplingParams(temperature=0, max_tokens=20)
    births = tuple(Birth(slot, slot, -1, params.sampling(), 0, 5) for slot in (1, 2))
    steps = [
        (Row(1, (5, 6, 7, 8, 9, 10, 11), 0, 1), Row(2, (11, 12, 13), 0, 1)),
        (Row(1, (LAST,), 7, 1), Row(2, (14, 15, 16, 17, 18), 3, 1)),
        (Row(1, (LAST,), 8, 1), Row(2, (LAST,), 8, 1)),
    ]
    seen = []
    for geometry in (same, unlike(spec, sets, slots)):
        runner = runner_of(model, spec, geometry, attention)
        tables = tuple(
            Table(slot, g, 0, tuple(group.ids[first : first + WIDTH]))
            for slot in (1, 2)
            for g, group in enumerate(geometry.groups)
            for first in [(2 * slot - 2 + g) * WIDTH if geometry is same else slot * WIDTH]
        )
        tokens = [
            runner.collect(runner.submit(StepPlan(births * (i == 0), tables * (i == 0), rows))).samples
            for i, rows in enumerate(steps)
        ]
        rows = (Row(2, (40,), 9, 1), Row(1, (41, 42), 9, 1))
        batch = build_batch(rows, runner.store, runner.last)
        with torch.inference_mode():
            step = Step.of(batch, runner.store.caches, runner.backend)
            seen.append((tokens, runner.model.logits(runner.model(batch.tokens, step))))
    assert seen[0][0] == seen[1][0]
    assert seen[0][1].isfinite().all()
    assert torch.equal(seen[0][1], seen[1][1])
