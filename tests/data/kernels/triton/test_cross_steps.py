"""Steps of a model whose layers attend to pictures, through the kernels: chunks of prompts say what transformers
says."""

from __future__ import annotations

from typing import Any

import pytest
from grids import DEVICE
from mllama_models import PROMPTS, Saved, engine_of, run
from test_unlike_logits import assert_said

import quire.shard
from quire import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also on a CPU, where kernels are interpreted."""
    monkeypatch.setattr(quire.shard, "attention_of", lambda *_: "triton")


@pytest.mark.share(4)
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
@pytest.mark.parametrize(
    ("page_size", "chunk", "more"),
    [(4, 7, {}), (16, 64, {}), (16, 33, {"deterministic": True}), (4, 64, {"memory": "uniform"})],
)
def test_logits(model: Saved, page_size: int, chunk: int, more: dict[str, Any]) -> None:
    settings = {"page_size": page_size, "max_num_batched_tokens": chunk, "device": DEVICE.type, **more}
    engine = engine_of(model, cuda_graphs=False, **settings)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=20)
    for prompt, tokens, tops in run(engine, PROMPTS, params):
        assert_said(tops, model.logprobs(prompt, tokens), 2e-4)
    engine.close()
