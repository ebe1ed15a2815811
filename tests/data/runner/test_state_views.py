"""Running states in pages: each layer's parts are bytes of their own, aligned, of the dtypes that were asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.config import EngineConfig
from quire.control.memory import Size, build_memory
from quire.data.runner.store import Store
from quire.data.runner.views import check_geometry, state_caches
from quire.errors import StartupError
from quire.vocabulary.plan import Copy, In, Out, Poison
from quire.vocabulary.specs import ALIGNED, Geometry, LayerSpec, ModelSpec, StatePart

CPU = torch.device("cpu")
INNER, CONV, STATE = 24, 4, 5
DTYPES = [
    (torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float32), (torch.float16, torch.bfloat16),
]  # fmt: skip


def spec_of(dtype: torch.dtype, ssm: torch.dtype) -> ModelSpec:
    state = StatePart("conv", (INNER, CONV - 1), 2), StatePart("ssm", (INNER, STATE + 3), 4)
    layers = [LayerSpec(0, 0, state=state), LayerSpec(2, 8)] * 2 + [LayerSpec(0, 0, state=state)]
    spec = ModelSpec("jamba", tuple(layers), 64, 256, 32, 4, 48, 10**4)
    return spec.stored(dtype.itemsize, ssm.itemsize)


def a_store(dtype: torch.dtype, ssm: torch.dtype, **settings: object) -> tuple[Store, ModelSpec, Geometry]:
    spec = spec_of(dtype, ssm)
    config = EngineConfig(
        **{"page_size": 4, "state_tokens": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, **settings}
    )  # type: ignore[arg-type]
    geometry = build_memory(config, spec, Size(256, 64, dtype.itemsize)).geometry
    return Store(geometry, spec, dtype, CPU, state_dtype=ssm), spec, geometry


@pytest.mark.parametrize("page_sizes", ["lcm", "max", "own"])
@pytest.mark.parametrize(("dtype", "ssm"), DTYPES)
def test_the_states_of_a_group_are_bytes_of_their_own(dtype: torch.dtype, ssm: torch.dtype, page_sizes: str) -> None:
    store, spec, geometry = a_store(dtype, ssm, page_sizes=page_sizes)
    assert list(store.caches) == [1, 3]
    assert list(store.states) == [0, 2, 4]
    plain, marks = store.buffer.view(torch.uint8), torch.zeros(len(store.buffer) * dtype.itemsize, dtype=torch.int32)
    (g,) = [g for g, group in enumerate(geometry.groups) if group.kind == "state"]
    page = geometry.groups[g].ids.stop - 1
    for layer, cache in store.states.items():
        assert (cache.group, cache.run_tokens) == (g, 8)
        assert (cache.conv.dtype, cache.ssm.dtype) == (dtype, ssm)
        assert cache.conv.shape[1:] == (INNER, CONV - 1)
        assert cache.ssm.shape[1:] == (INNER, STATE + 3)
        for view in (cache.conv, cache.ssm):
            assert (view[page].data_ptr() - store.buffer.data_ptr()) % ALIGNED == 0
            plain.zero_()
            view[page] = layer + 1.5
            written = plain != 0
            marks += written
            at = written.nonzero()
            assert at.min() >= page * store.sizes[g]
            assert at.max() < (page + 1) * store.sizes[g]
    assert marks.max() == 1, "no byte is of two"
    assert spec.layers[0].state_bytes * 3 <= store.sizes[g]


@pytest.mark.parametrize(("dtype", "ssm"), DTYPES)
def test_poison_is_no_number_in_any_dtype(dtype: torch.dtype, ssm: torch.dtype) -> None:
    store, _, _ = a_store(dtype, ssm)
    g = store.states[0].group
    store.replay((Poison(g, 9),))
    for cache in store.states.values():
        assert cache.conv[9].isnan().all()
        assert cache.ssm[9].isnan().all()
        assert not cache.ssm[8].any()
    for view in (store.states[2].conv, store.states[2].ssm):
        view[10] = 3.0
    store.replay((Copy(g, 10, 9), Out(g, 10, 1), Poison(g, 10), In(g, 1, 11)))
    for page in (9, 11):
        assert (store.states[2].conv[page] == 3).all()
        assert (store.states[2].ssm[page] == 3).all()


def test_pages_too_small_or_not_aligned_are_refused() -> None:
    spec = spec_of(torch.float32, torch.float32)
    _, _, geometry = a_store(torch.float32, torch.float32, page_sizes="own")
    for bytes_ in (2 * spec.layers[0].state_bytes, 3 * spec.layers[0].state_bytes + 8):
        groups = tuple(replace(g, page_bytes=bytes_) if g.kind == "state" else g for g in geometry.groups)
        with pytest.raises(StartupError, match=f"a page of {bytes_:,} bytes doesn't hold states of"):
            check_geometry(replace(geometry, groups=groups), spec)


def test_states_of_other_numbers_than_planned_are_a_mistake() -> None:
    store, spec, geometry = a_store(torch.float32, torch.float32)
    with pytest.raises(AssertionError, match="ssm is of numbers of 4 bytes, and the runner's have 2"):
        state_caches(store.buffer, geometry, spec, torch.bfloat16)
