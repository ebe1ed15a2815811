"""`quire bench wire`: every message's sizes and times, as a table and as a document."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.bench import main
from quire.errors import StartupError


def test_every_message_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "wire.json"
    assert main(["wire", "--repeat", "2", "--out", str(out)]) == 0
    results = {one["message"]: one for one in json.loads(out.read_text())["results"]}
    assert results["plan of a fork"]["bytes"] < 64
    assert results["plan of 256 rows"]["bytes"] < 16 * 256
    for one in results.values():
        assert 0 < one["encode_us"]["best"] <= one["encode_us"]["p50"]
        assert 0 < one["decode_us"]["best"] <= one["decode_us"]["p50"]
    shown = capsys.readouterr().out
    assert all(name in shown for name in results)


def test_nonsense_is_refused() -> None:
    with pytest.raises(StartupError, match="--repeat is 0"):
        main(["wire", "--repeat", "0"])
