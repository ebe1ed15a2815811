"""`quire bench wire`: every message's sizes and times, as a table and as a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench import main
from quire.bench.wire import ROWS
from quire.errors import StartupError


def test_every_message_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "wire.json"
    assert main(["wire", "--repeat", "2", "--ranks", "1", "--out", str(out)]) == 0
    results = {one["message"]: one for one in json.loads(out.read_text())["results"]}
    assert results["plan of a fork"]["bytes"] < 64
    assert results["plan of 256 rows"]["bytes"] < 18 * 256
    there = [one for one in results.values() if "round_us" in one]
    assert len(there) == len(ROWS)
    for one in there:
        assert 0 < one["submit_us"]["best"] < one["round_us"]["best"] <= one["round_us"]["p50"]
    for one in (results["order without contents to 1 rank"], *there):
        assert 0 < one["arrays_us"]["best"] <= one["arrays_us"]["p50"] < 1e6
    for one in (one for one in results.values() if "encode_us" in one):
        assert 0 < one["encode_us"]["best"] <= one["encode_us"]["p50"]
        assert 0 < one["decode_us"]["best"] <= one["decode_us"]["p50"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in results)


def test_nonsense_is_refused() -> None:
    with pytest.raises(StartupError, match="--repeat is 0"):
        main(["wire", "--repeat", "0"])
    with pytest.raises(StartupError, match="Give numbers between 1 and 63"):
        main(["wire", "--ranks", "64"])
