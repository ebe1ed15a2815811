"""torch's attention over mapped pages beside ordinary memory: every shape runs, and both verdicts are told."""

from __future__ import annotations

import pytest

from quire.reproduce import mapped_views
from quire.reproduce.result import DIFFERS, HOLDS


def test_every_shape_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_views, "CONTEXTS", (48, 160))
    monkeypatch.setattr(mapped_views, "QUERIES", (1, 16))
    monkeypatch.setattr(mapped_views, "PAGES", (4, 64))
    monkeypatch.setattr(mapped_views, "TURNS", 4)
    done = mapped_views.views()
    assert len(done.data) == 16
    assert all(point["plain"] > 0 < point["mapped"] for point in done.data)
    assert len(done.results) == 4
    assert done.draw().axes


@pytest.mark.parametrize(("mapped", "verdict"), [(100.0, HOLDS), (104.0, DIFFERS)])
def test_verdicts(mapped: float, verdict: str) -> None:
    point = {"dtype": "float32", "kib": 64, "context": 1024, "queries": 1, "plain": 100.0, "mapped": mapped}
    assert [result.verdict for result in mapped_views.judged([point])] == [verdict]
