"""Pictures of workloads: rows and places of those that a model sees, and tokens for those that see none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benching import results

from quire.bench.pictured import PLACE, Eyes, png, posted
from quire.bench.workloads import Sketch, Sketched, parse
from quire.cli.simulate import main, plant_of
from quire.config import EngineConfig
from quire.data.models import read_spec
from quire.data.models.configs import named_config
from quire.text.images import ImageLimits, checked_header
from quire.vocabulary.pictures import Grid

SEEING = ("llama3.2-vision-11b", "llava-onevision-7b", "internvl2-8b", "phi-3-vision-4b", "paligemma2-10b")


def eyes(name: str) -> Eyes:
    config = named_config(name)
    found = Eyes.of(config, read_spec(config))
    assert found is not None
    return found


def test_the_papers_means_are_those_of_its_model() -> None:
    """6,193 rows and 43 tokens, and as many tokens for a model that sees nothing."""
    sketches = parse("mmmu-pro@1000").sketches(3)
    placed = [eyes("llama3.2-vision-11b").placed(sketch) for sketch in sketches]
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


def test_files_have_the_rows_that_are_planned() -> None:
    """A PNG of the size is prepared as what is drawn in this process is, and the prompt is the text alone."""
    workload, seeing = parse("mmmu-pro@20"), eyes("llava-onevision-7b")
    sketches, plain = workload.sketches(), workload.jobs(1000)
    jobs = posted(sketches, plain)
    assert [job.prompt for job in jobs] == [job.prompt[6193:] for job in plain]
    assert len({file for job in jobs for file in job.files}) == 20
    for sketch, job in zip(sketches, jobs):
        (picture,), (file,), (_, media) = sketch.pictures, job.files, seeing.placed(sketch)
        assert file == png(picture)
        assert len(file) < 20_000
        header = checked_header(file, ImageLimits(), "file")
        assert (header.width, header.height) == (picture.width, picture.height)
        assert seeing.tiling.rows(seeing.tiling.grid(header.height, header.width)) == media[0].rows


TINY = {
    "architectures": ["LlavaOnevisionForConditionalGeneration"],
    "text_config": {
        "model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512, "max_position_embeddings": 1024,
        "use_sliding_window": False, "eos_token_id": 2,
    },
    "vision_config": {
        "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "patch_size": 14, "image_size": 56, "vision_use_head": False,
    },
    "image_token_index": 500,
    "image_grid_pinpoints": [[56, 112], [112, 112]],
    "tie_word_embeddings": False,
}  # fmt: skip


def test_an_engine_in_this_process_is_sent_pictures(tmp_path: Path) -> None:
    """`quire bench throughput`: as many tokens as the model makes of pictures, not the 6,193 of others."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    flags = ("--dummy-weights", "--skip-tokenizer-init", "--device", "cpu", "--kv-gib", "0.01", "--repeat", "1")
    [result] = results(tmp_path, "throughput", str(tmp_path), *flags, "--workload", "mmmu-pro@3", "--warmup", "0")
    prompts, rows = result["median"]["prompt_tokens"], []
    seeing = Eyes.of(TINY, read_spec(TINY))
    assert seeing is not None
    for sketch in parse("mmmu-pro@3").sketches():
        length, (medium,) = seeing.placed(sketch)
        rows.append(medium.rows)
        prompts -= length
    assert prompts == 0
    assert result["median"]["encoder_runs"] == 3
    assert min(rows) > 16


def test_a_model_that_sees_is_simulated_with_pictures(tmp_path: Path) -> None:
    config = EngineConfig(model_config="llama3.2-vision-11b", kv_gib=4.0)
    assert plant_of(config, "h200-llama3-8b").eyes is not None
    assert plant_of(EngineConfig(model_config="llama3-8b", kv_gib=4.0), "h200-llama3-8b").eyes is None
    out = tmp_path / "out.json"
    args = ["--calibration", "h200-llama3-8b", "--model-config", "llama3.2-vision-11b", "--kv-gib", "4"]
    assert main([*args, "--workload", "mmmu-pro@4", "--rate", "5", "--out", str(out)]) == 0
    [run] = json.loads(out.read_text())["results"]
    assert run["finished"]
