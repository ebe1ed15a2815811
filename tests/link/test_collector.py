"""The garbage collector while a model is loaded."""

from __future__ import annotations

import gc

import pytest

from quire.link.collector import paused


@pytest.mark.parametrize("running", [True, False])
def test_a_pause_leaves_the_collector_as_it_was(running: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if running else gc.disable)()
        with pytest.raises(KeyError), paused():
            failing()
        assert gc.isenabled() == running
    finally:
        (gc.enable if before else gc.disable)()


def failing() -> None:
    assert not gc.isenabled()
    raise KeyError
