"""vAttention's kernel entries: with tiny shapes, interpreted, on a CPU, over real mapped pages; their verdicts can
fail; their pictures come from their documents alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from papers import attention_alone as alone
from papers import main
from papers import paged_or_contiguous as kernels
from papers.result import DIFFERS, HOLDS
from quire.errors import StartupError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton and memfd are Linux's")

SMALL = """
import gc, json, sys, time, torch
from quire.bench import replay
from quire.models.named_configs import named_config
from quire.models import read_spec
from papers import attention_alone as alone, paged_or_contiguous as kernels, long_prompts as prompts

def timed(calls, rounds=1):
    began = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - began) / len(calls)

replay.replayed, replay.need_gpu = timed, lambda what: None
torch.cuda.empty_cache = lambda: None
tiny = dict(num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, intermediate_size=64)
alone.spec_of = lambda name: read_spec({**named_config("llama-125m"), **tiny})
alone.ON, alone.KIB, alone.CONTEXT = "cpu", 4, 70
alone.MODELS = {"yi-6b": (1, 2)}
kernels.ON, kernels.HEADS, kernels.KV_HEADS, kernels.DIM, kernels.LAYERS = "cpu", 4, 2, 16, 2
kernels.BATCHES, kernels.CONTEXTS, kernels.LONG, kernels.MANY, kernels.PROMPTS = (1, 2), (33, 64), 70, (1, 2), (1, 2)
prompts.spec_of = alone.spec_of
prompts.ON, prompts.KIB, prompts.CHUNK, prompts.LENGTHS, prompts.TIMED = "cpu", 4, 32, (16, 32, 64, 150), (0, 1, 3)
prompts.MODELS, prompts.DTYPE = ("yi-6b",), "float32"  # the interpreter has no other that it computes right
torch.manual_seed(0)
figures = kernels.figure_3, kernels.figure_4, kernels.figure_5, alone.figure_9b, prompts.figure_8
done = {figure.__name__: figure() for figure in figures}
print(json.dumps({name: {"data": one.data, "text": one.text, "rows": [r.row for r in one.results]}
                  for name, one in done.items()}))
"""


@pytest.mark.timeout(300)
def test_every_entry_runs_interpreted(tmp_path: Path) -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SMALL], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert {name: set(one["rows"]) for name, one in found.items()} == {
        "figure_3": {"V-F3"}, "figure_4": {"V-F4"}, "figure_5": {"V-F5"}, "figure_9b": {"V-F9b"},
        "figure_8": {"V-F8"},
    }  # fmt: skip
    assert len(found["figure_3"]["data"]) == 4
    assert len(found["figure_5"]["data"]) == 8
    ways = {point["way"] for point in found["figure_4"]["data"]}
    assert {"prompt, paged", "prompt, contiguous"} <= ways
    assert "it is for a Hopper GPU" in found["figure_4"]["text"]
    assert {point["way"] for point in found["figure_9b"]["data"]} == {
        "paged, 16", *(f"{by}virtual, {layout}" for by in ("", "torch, ") for layout in ("layer", "sliced")),
    }  # fmt: skip
    assert {point["way"] for point in found["figure_8"]["data"]} == {
        "prompt, paged, 16-token pages",
        *(f"{by}, contiguous, layer" for by in ("prompt", "torch flash", "torch cuDNN")),
        *(f"{by}, contiguous, sliced" for by in ("prompt", "torch flash", "torch cuDNN")),
    }, "on a CPU its own fused kernel stands in for torch's"  # fmt: skip
    for name, one in found.items():
        entry = name.replace("figure_", "fig")
        content = {"name": f"vattention-{entry}", "results": [], "data": one["data"]}
        (tmp_path / f"{entry}.json").write_text(json.dumps(content))
    (tmp_path / "other.json").write_text(json.dumps({"name": "x1", "results": []}))  # has no data to draw
    assert main(["--draw", str(tmp_path)]) == 0
    drawn = sorted(path.stem for path in tmp_path.glob("*.png"))
    assert drawn == ["fig3", "fig4", "fig5", "fig8", "fig9b"]


def test_verdicts_of_decodes() -> None:
    points = [{"batch": batch, "context": 2048, "overhead": 12.0} for batch in kernels.BATCHES]
    assert [r.verdict for r in kernels.judged_3(points)] == [HOLDS] * 6
    points = [{"batch": batch, "context": 2048, "overhead": 12.1 + batch} for batch in kernels.BATCHES]
    assert [r.verdict for r in kernels.judged_3(points)] == [DIFFERS] * 6


def test_verdicts_of_page_sizes() -> None:
    def points(*us: float) -> list[dict[str, float]]:
        return [{"batch": batch, "page": page, "us": u} for batch in kernels.MANY for page, u in zip(kernels.PAGES, us)]

    assert [r.verdict for r in kernels.judged_5(points(10, 11, 20, 33))] == [HOLDS] * 3
    assert [r.verdict for r in kernels.judged_5(points(10, 12, 10, 10))] == [DIFFERS] * 3


def test_verdicts_of_prompts() -> None:
    def points(paged: float, twin: float, cudnn: float) -> list[dict[str, object]]:
        us = {"prompt, paged": paged, "prompt, contiguous": twin, "torch cuDNN, contiguous": cudnn}
        return [{"batch": 1, "context": 2048, "way": way, "us": value} for way, value in us.items()]

    assert [r.verdict for r in kernels.judged_4(points(110, 100, 105))] == [HOLDS] * 2
    assert [r.verdict for r in kernels.judged_4(points(110, 100, 50))] == [HOLDS, DIFFERS]
    assert [r.verdict for r in kernels.judged_4(points(120, 100, 130))] == [DIFFERS] * 2
    assert [r.verdict for r in kernels.judged_4(points(90, 100, 130))] == [HOLDS, DIFFERS], "paged is the faster one"


def test_verdicts_of_attention_alone() -> None:
    def judged(paged: float, layer: float, sliced: float) -> list[str]:
        ms = {"paged, 16": paged, "virtual, layer": layer, "virtual, sliced": sliced}
        points = [{"model": "yi-6b", "batch": 8, "way": way, "ms": value} for way, value in ms.items()]
        return [r.verdict for r in alone.judged(points)]

    assert judged(3.0, 1.0, 1.0) == [HOLDS] * 3
    assert judged(1.0, 1.0, 1.02) == [HOLDS, HOLDS, DIFFERS], "the paper's gain is gone"
    assert judged(1.0, 1.1, 1.1) == [DIFFERS] * 3


def test_what_cannot_be_drawn_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(StartupError, match=r"broken\.json is not a document"):
        main(["--draw", str(tmp_path)])
