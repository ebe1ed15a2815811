"""Pictures of workloads: rows and places of those that a model sees, and tokens for those that see none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from quire.bench.pictured import PLACE, Eyes
from quire.bench.workloads import Sketch, Sketched, parse
from quire.cli.simulate import main, plant_of
from quire.config import EngineConfig
from quire.data.models import read_spec
from quire.data.models.configs import named_config
from quire.vocabulary.pictures import Grid

SEEING = ("llama-3.2-11b-vision", "llava-onevision-7b", "internvl2-8b", "phi-3-vision-4b", "paligemma2-10b")


def eyes(name: str) -> Eyes:
    config = named_config(name)
    found = Eyes.of(config, read_spec(config))
    assert found is not None
    return found


def test_the_papers_means_are_those_of_its_model() -> None:
    """6,193 rows and 43 tokens, and as many tokens for a model that sees nothing."""
    sketches = parse("mmmu-pro@1000").sketches(3)
    placed = [eyes("llama-3.2-11b-vision").placed(sketch) for sketch in sketches]
    assert np.mean([medium.rows for _, (medium,) in placed]) == pytest.approx(6193, abs=2)
    assert np.mean([length - 1 for length, _ in placed]) == pytest.approx(43, abs=1)
    assert [length - 1 for length, _ in placed] == [sketch.prompt_len - 6193 for sketch in sketches]
    assert len({medium.key for _, (medium,) in placed}) == 1000


@pytest.mark.parametrize("name", SEEING)
def test_what_is_prepared_has_the_rows_that_are_planned(name: str) -> None:
    seeing = eyes(name)
    workload = parse("mmmu-pro@20")
    sketches = [one for one in workload.sketches() if one.pictures[0].width != one.pictures[0].height][:1]
    sketches += workload.sketches()[:1]
    plain = [job for sketch, job in zip(workload.sketches(), workload.jobs(1000)) if sketch in sketches]
    sketches.sort(key=workload.sketches().index)
    for job, before in zip(seeing.jobs(sketches, plain), plain):
        (medium,), (pixels,) = job.media, job.pixels
        grid = Grid(*pixels.grid)
        assert (medium.rows, medium.parts) == (seeing.tiling.rows(grid), seeing.tiling.parts(grid))
        assert medium.tokens == (medium.rows if seeing.in_places else 1)
        assert (medium.start, medium.key) == (1, pixels.key)
        assert len(pixels.data) == np.prod(pixels.shape)
        assert job.prompt[1 : medium.end] == [PLACE] * medium.tokens
        assert job.prompt[:1] + job.prompt[medium.end :] == before.prompt[6193:]


def test_pictures_of_one_name_are_the_same() -> None:
    seeing = eyes("paligemma2-10b")
    one, other = Sketched("a", 40, 30, 5), Sketched("b", 40, 30, 5)
    pixels = seeing.pixels(Sketch(20, 1, pictures=(one, other, one)))
    assert pixels[0] == pixels[2] != pixels[1]
    length, media = seeing.placed(Sketch(20, 1, pictures=(one, other, one)))
    assert length == 20 - 3 * 5 + 3 * 256
    assert [medium.start for medium in media] == [1, 257, 513]


def test_a_model_that_sees_is_simulated_with_pictures(tmp_path: Path) -> None:
    config = EngineConfig(model_config="llama-3.2-11b-vision", kv_gib=4.0)
    assert plant_of(config, "h200-llama3-8b").eyes is not None
    assert plant_of(EngineConfig(model_config="llama3-8b", kv_gib=4.0), "h200-llama3-8b").eyes is None
    out = tmp_path / "out.json"
    args = ["--calibration", "h200-llama3-8b", "--model-config", "llama-3.2-11b-vision", "--kv-gib", "4"]
    assert main([*args, "--workload", "mmmu-pro@4", "--rate", "5", "--out", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]
    assert run["finished"]
