"""Pictures of workloads: rows and places of those that a model sees, and tokens for those that see none; and
what pictures cost, measured on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benching import results
from mllama_models import Saved

from bench.sights import ROUNDS
from quire.bench import main, simulate
from quire.bench.pictured import PLACE, Eyes, png, posted
from quire.bench.steps import Sample, encoder
from quire.bench.workloads import ImageSpec, RequestSpec, parse
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.models import read_spec
from quire.models.named_configs import named_config
from quire.models.vision.llava import LlavaOneVision
from quire.protocol.image_tiling import TileGrid
from quire.sim.cost_model import CostModel, ModelShape, StepWork, load_calibration
from quire.startup.checkpoint import read_checkpoint
from quire.text.images.decode import ImageLimits, read_checked_header

SEEING = ("llama3.2-vision-11b", "llava-onevision-7b", "internvl2-8b", "phi-3-vision-4b", "paligemma2-10b")


def eyes(name: str) -> Eyes:
    config = named_config(name)
    found = Eyes.of(config, read_spec(config))
    assert found is not None
    return found


def test_the_papers_means_are_those_of_its_model() -> None:
    """6,193 rows and 43 tokens, and as many tokens for a model that sees nothing."""
    specs = parse("mmmu-pro@1000").specs(3)
    placed = [eyes("llama3.2-vision-11b").placed(request) for request in specs]
    assert np.mean([medium.num_embeds for _, (medium,) in placed]) == pytest.approx(6193, abs=2)
    assert np.mean([length - 1 for length, _ in placed]) == pytest.approx(43, abs=1)
    assert [length - 1 for length, _ in placed] == [request.prompt_len - 6193 for request in specs]
    assert len({medium.key for _, (medium,) in placed}) == 1000


@pytest.mark.parametrize("name", SEEING)
def test_what_is_prepared_has_the_rows_that_are_planned(name: str) -> None:
    seeing = eyes(name)
    workload = parse("mmmu-pro@20")
    specs = [one for one in workload.specs() if one.pictures[0].width != one.pictures[0].height][:1]
    specs += workload.specs()[:1]
    plain = [job for request, job in zip(workload.specs(), workload.jobs(1000)) if request in specs]
    specs.sort(key=workload.specs().index)
    for job, before in zip(seeing.jobs(specs, plain), plain):
        (medium,), (pixels,) = job.media, job.pixels
        grid = TileGrid(*pixels.grid)
        assert (medium.num_embeds, medium.num_parts) == (seeing.tiling.num_embeds(grid), seeing.tiling.num_parts(grid))
        assert medium.num_tokens == (medium.num_embeds if seeing.in_places else 1)
        assert (medium.start, medium.key) == (1, pixels.key)
        assert len(pixels.data) == np.prod(pixels.shape)
        assert job.prompt[1 : medium.end] == [PLACE] * medium.num_tokens
        assert job.prompt[:1] + job.prompt[medium.end :] == before.prompt[6193:]


def test_pictures_of_one_name_are_the_same() -> None:
    seeing = eyes("paligemma2-10b")
    one, other = ImageSpec("a", 40, 30, 5), ImageSpec("b", 40, 30, 5)
    pixels = seeing.pixels(RequestSpec(20, 1, pictures=(one, other, one)))
    assert pixels[0] == pixels[2] != pixels[1]
    length, media = seeing.placed(RequestSpec(20, 1, pictures=(one, other, one)))
    assert length == 20 - 3 * 5 + 3 * 256
    assert [medium.start for medium in media] == [1, 257, 513]


def test_files_have_the_rows_that_are_planned() -> None:
    """A PNG of the size is prepared as what is drawn in this process is, and the prompt is the text alone."""
    workload, seeing = parse("mmmu-pro@20"), eyes("llava-onevision-7b")
    specs, plain = workload.specs(), workload.jobs(1000)
    jobs = posted(specs, plain)
    assert [job.prompt for job in jobs] == [job.prompt[6193:] for job in plain]
    assert len({file for job in jobs for file in job.files}) == 20
    for request, job in zip(specs, jobs):
        (picture,), (file,), (_, media) = request.pictures, job.files, seeing.placed(request)
        assert file == png(picture)
        assert len(file) < 20_000
        header = read_checked_header(file, ImageLimits(), "file")
        assert (header.width, header.height) == (picture.width, picture.height)
        assert seeing.tiling.num_embeds(seeing.tiling.choose_grid(header.height, header.width)) == media[0].num_embeds


def test_an_engine_in_this_process_is_sent_pictures(tmp_path: Path) -> None:
    """`quire bench throughput`: as many tokens as the model makes of pictures, not the 6,193 of others."""
    flags = ("--device", "cpu", "--kv-gib", "0.01", "--repeat", "1", "--warmup", "0")
    [result] = results(tmp_path, "throughput", "tiny-vision", *flags, "--workload", "mmmu-pro@3")
    source = read_checkpoint(EngineConfig(model="tiny-vision"))
    seeing = Eyes.of(source.config, source.spec)
    assert seeing is not None
    placed = [seeing.placed(request) for request in parse("mmmu-pro@3").specs()]
    assert result["median"]["prompt_tokens"] == sum(length for length, _ in placed)
    assert result["median"]["encoder_runs"] == 3
    assert min(medium.num_embeds for _, (medium,) in placed) > 16


def test_a_model_that_sees_is_simulated_with_pictures(tmp_path: Path) -> None:
    config = EngineConfig(model_config="llama3.2-vision-11b", kv_gib=4.0)
    assert simulate.read_deployment(config, "h200-llama3-8b").image_processor is not None
    assert (
        simulate.read_deployment(EngineConfig(model_config="llama3-8b", kv_gib=4.0), "h200-llama3-8b").image_processor
        is None
    )
    out = tmp_path / "out.json"
    args = ["--calibration", "h200-llama3-8b", "--model-config", "llama3.2-vision-11b", "--kv-gib", "4"]
    assert simulate.main([*args, "--workload", "mmmu-pro@4", "--rate", "5", "--out", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]
    assert run["finished"]


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


def test_an_encoder_is_timed_with_as_many_parts_as_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one launch, also with more than a step's launch takes, and than the picture's five."""
    parts = 16
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
    shape = ModelShape.from_spec(read_spec(named_config("llama3.2-vision-11b")), 2, tied=False)
    cost = CostModel(shape, load_calibration("h200-ministral-8b").coefficients)
    known = cost._replace(coefficients=cost.coefficients._replace(encoder=4.5))
    works = [StepWork(1, 40, 1e12, 1e6, 1e9, 0, 0, pictures=1e9, encoded=parts) for parts in (2, 4, 8)]
    samples = [Sample("pictures", work, known.device_seconds(work)) for work in works]
    assert encoder(cost, samples) == pytest.approx(4.5, abs=1e-3)
    assert encoder(cost, [sample._replace(seconds=1e9) for sample in samples]) == pytest.approx(64, abs=1e-3)
