"""The garbage collector while a model is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams
from quire.ipc.garbage_collection import gc_paused


@pytest.fixture
def thawed() -> Iterator[None]:
    """Nothing is frozen meanwhile: neither what conftest.py nor what benchmarks in this process have frozen."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


@pytest.mark.parametrize("running", [True, False])
def test_a_pause_leaves_the_collector_as_it_was(running: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if running else gc.disable)()
        with pytest.raises(KeyError), gc_paused():
            failing()
        assert gc.isenabled() == running
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.usefixtures("thawed")
def test_what_was_made_in_a_pause_is_old() -> None:
    """The next collection of the youngest generation does not search it; what a program froze stays frozen."""
    with gc_paused():
        made = [[index] for index in range(1000)]
    old = {id(one) for one in gc.get_objects(generation=2)}
    assert all(id(one) in old for one in made)
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with gc_paused():
            pass
        assert 0.99 * frozen < gc.get_freeze_count() <= frozen  # other tests' threads may let go of some
    finally:
        gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_a_programs_own_collector_stays() -> None:
    before = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    with LLM("tiny", device="cpu", kv_tokens=256, swap_gib=0) as llm:
        llm.generate("a", SamplingParams(max_tokens=2), use_tqdm=False)
        assert (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()) == before


def failing() -> None:
    assert not gc.isenabled()
    raise KeyError
