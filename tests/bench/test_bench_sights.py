"""What pictures cost, measured on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benching import results
from mllama_models import Saved

from quire.bench import main
from quire.bench.sights import ROUNDS
from quire.bench.steps import Sample, encoder
from quire.data.models import read_spec
from quire.data.models.configs import named_config
from quire.data.models.vision.llava import LlavaOneVision
from quire.errors import StartupError
from quire.sim.cost import Cost, Shape, Work, load


def test_pictures_are_measured_beside_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    Saved(folder)
    flags = [str(folder), "--dtype", "float32", "--device", "cpu", "--kv-tokens", "2048", "--skip-tokenizer-init"]
    own = ["--rows", "1", "3", "--steps", "6", "--picture", "62", "31", "--text", "20"]
    own += ["--neighbours", "2", "--against", "h200-ministral-8b"]
    found = results(tmp_path, "sights", *flags, *own)
    assert [(one["rows"], one["text_rows"], one["picture_rows"]) for one in found] == [(1, 0, 34), (3, 0, 34)]
    assert all(
        one[f"{kind}_{name}"] > 0 for one in found for kind in ("text", "picture") for name in ("step_ms", "first_s")
    )
    said = found[-1]["neighbours"]
    assert said["alone"]["p50_ms"] < said["pictures"]["p100_ms"]
    assert said["prompts"]["p50_ms"] <= said["prompts"]["p99_ms"] <= said["prompts"]["p100_ms"]
    assert found[-1]["encoded_parts"] == 1, "its tower sees all tiles at once"
    assert 0 <= found[-1]["encoder"]["times"] <= 64  # by a device of another kind
    out_text = capsys.readouterr().out
    assert "rows of a picture" in out_text
    assert "2 that decode while others come" in out_text
    with pytest.raises(StartupError, match="above 0"):
        main(["sights", *flags, "--text", "8"])


@pytest.mark.parametrize("parts", [2, 16])
def test_an_encoder_is_timed_with_as_many_parts_as_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """In one launch, also with more than a step's launch takes, and than the picture's five."""
    seen, encode = list[int](), LlavaOneVision.encode

    def noted(eyes: LlavaOneVision, pixels: Any, *more: Any) -> Any:
        seen.append(len(pixels))
        return encode(eyes, pixels, *more)

    monkeypatch.setattr(LlavaOneVision, "encode", noted)
    flags = ["--dtype", "float32", "--device", "cpu", "--threads", "1", "--kv-tokens", "2048", "--steps", "4"]
    own = ["--picture", "96", "96", "--text", "12", "--parts", str(parts)]
    [found] = results(tmp_path, "sights", "tiny-vision", *flags, *own)
    assert found["encoded_parts"] == parts
    assert found["encode_ms"] > 0
    assert seen[-ROUNDS:] == [parts] * ROUNDS


def test_an_encoders_coefficient_is_found_again() -> None:
    shape = Shape.of(read_spec(named_config("llama3.2-vision-11b")), 2, tied=False)
    cost = Cost(shape, load("h200-ministral-8b").coefficients)
    known = cost._replace(coefficients=cost.coefficients._replace(encoder=4.5))
    works = [Work(1, 40, 1e12, 1e6, 1e9, 0, 0, pictures=1e9, encoded=parts) for parts in (2, 4, 8)]
    samples = [Sample("pictures", work, known.device(work)) for work in works]
    assert encoder(cost, samples) == pytest.approx(4.5, abs=1e-3)
    assert encoder(cost, [sample._replace(seconds=1e9) for sample in samples]) == pytest.approx(64, abs=1e-3)
