"""What pictures cost, measured on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mllama_models import Saved

from quire.bench import main
from quire.errors import StartupError


def test_pictures_are_measured_beside_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "sights.json", tmp_path / "model"
    Saved(folder)
    flags = [str(folder), "--dtype", "float32", "--device", "cpu", "--kv-tokens", "2048", "--skip-tokenizer-init"]
    own = ["--rows", "1", "3", "--steps", "6", "--picture", "62", "31", "--text", "20", "--out", str(out)]
    assert main(["sights", *flags, *own]) == 0
    found = json.loads(out.read_text())["results"]
    assert [(one["rows"], one["text_rows"], one["picture_rows"]) for one in found] == [(1, 0, 34), (3, 0, 34)]
    assert all(
        one[f"{kind}_{name}"] > 0 for one in found for kind in ("text", "picture") for name in ("step_ms", "first_s")
    )
    assert "rows of a picture" in capsys.readouterr().out
    with pytest.raises(StartupError, match="above 0"):
        main(["sights", *flags, "--text", "8"])
