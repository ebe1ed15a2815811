"""vAttention's interface as `quire reproduce` calls it: what the paper says holds, and another library would differ."""

from __future__ import annotations

from typing import Any

import pytest

from quire.reproduce.reqids import figure_7, table_4
from quire.reproduce.result import DIFFERS
from quire.vattention import VAttention


def test_a_library_that_reclaims_at_once_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = VAttention.free_reqid

    def reclaims(self: VAttention, reqid: int) -> None:
        free(self, reqid)
        self._reclaim(self.pages, [(reqid, 0)])

    monkeypatch.setattr(VAttention, "free_reqid", reclaims)
    differing = [result.what for result in figure_7().results if result.verdict == DIFFERS]
    assert differing == ["(d) R1 has completed: pages under reqIds 0 and 1"]
    assert "V-M11" in {result.row for result in table_4().results if result.verdict == DIFFERS}


def test_a_library_that_maps_nothing_ahead_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VAttention, "map_ahead", lambda self: None)
    rows = {result.row: result for result in table_4().results if result.verdict == DIFFERS}
    assert set(rows) == {"V-M10", "V-M12"}
    ours: dict[str, Any] = {row: result.ours for row, result in rows.items()}
    assert ours == {"V-M10": 1, "V-M12": 1}
