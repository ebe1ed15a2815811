"""`quire bench wire`: every message's sizes and times, as a table and as a document."""

from __future__ import annotations

from pathlib import Path

import pytest
from benching import results

from quire.bench.wire import ROWS


def test_every_message_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["message"]: one for one in results(tmp_path, "wire", "--repeat", "2", "--ranks", "1")}
    assert found["plan of a fork"]["bytes"] < 64
    assert found["plan of 256 rows"]["bytes"] < 18 * 256
    there = [one for one in found.values() if "round_us" in one]
    assert len(there) == len(ROWS)
    for one in there:
        assert 0 < one["submit_us"]["best"] < one["round_us"]["best"] <= one["round_us"]["p50"]
    for one in (found["order without contents to 1 rank"], *there):
        assert 0 < one["arrays_us"]["best"] <= one["arrays_us"]["p50"] < 1e6
    for one in (one for one in found.values() if "encode_us" in one):
        assert 0 < one["encode_us"]["best"] <= one["encode_us"]["p50"]
        assert 0 < one["decode_us"]["best"] <= one["decode_us"]["p50"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in found)
