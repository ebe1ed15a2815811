"""What each rank is told to build."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.data.kernels.cpu import cores
from quire.parallel import starting
from quire.parallel.frames import Hello
from quire.vocabulary.layout import Part


class Told:
    """Stands for ranks: what they are told."""

    seconds, meeting = 60.0, SimpleNamespace(descriptors=(9, 8))

    def hello(self, hellos: list[Hello]) -> None:
        self.hellos = hellos

    def wait(self) -> None:
        """They are there."""


def test_each_rank_has_its_part_and_its_share_of_threads() -> None:
    ranks: Any = Told()
    starting.build(ranks, EngineConfig(model="x", tp=3, threads=8, revision="r"), "/folder", (5,), 99, True)
    assert [hello.part for hello in ranks.hellos] == [Part(0, 3), Part(1, 3), Part(2, 3)]
    assert [hello.progress for hello in ranks.hellos] == [True, False, False]
    for hello in ranks.hellos:
        assert (hello.config.model, hello.config.revision, hello.config.threads) == ("/folder", None, 2)
        assert (hello.eos_ids, hello.max_len, hello.seconds, hello.meeting) == ((5,), 99, 60.0, (9, 8))


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "cores", lambda: cores.Cores(16, 8, None))
    assert [starting.shared_out(None, ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
    assert starting.shared_out(2, 4) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert starting.shared_out(None, 2) is None
    assert starting.shared_out(4, 2) == 2


def test_sums_over_ranks_are_shared_out() -> None:
    config = EngineConfig(tp=4, kv_gib=8.0, swap_gib=2.0).of_rank()
    assert (config.kv_gib, config.swap_gib) == (2.0, 0.5)
    assert EngineConfig(tp=4, kv_tokens=8).of_rank().kv_gib is None
