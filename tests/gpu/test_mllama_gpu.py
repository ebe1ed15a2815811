"""Llama 3.2 Vision on a GPU: log-probabilities are transformers', and tokens are the same however the memory is cut
into pages, whichever is preempted, whether steps are graphs, and with what they share a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mllama_models import PROMPTS, Mixed, Saved, run, text
from test_unlike_logits import check_branches, engine_of, preempting, serving

from quire import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated:FutureWarning"),  # transformers, of itself
]

MANY: list[Mixed] = [
    *PROMPTS, *([*text(3 + i, i), str(i % 5), *text(30 + 9 * i, i + 1)] for i in range(12)), text(90, 8)
]  # fmt: skip
OUTPUT = 40
CUTS: list[dict[str, Any]] = [
    {"cuda_graphs": False},
    {"page_size": 4, "max_num_batched_tokens": 96},
    {"max_num_batched_tokens": 7},
    {"page_sizes": "max"},
    {"memory": "uniform"},
    {"enable_prefix_caching": False},
    {"preemption": "recompute", "depth": 1},
    {"preemption": "swap", "depth": 1},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(Path(tmp_path_factory.mktemp("mllama")))


@pytest.mark.parametrize("preemption", [None, "swap", "recompute"])
@pytest.mark.parametrize("chunk", [7, 64, 1024])
def test_logits(model: Saved, chunk: int, preemption: str | None) -> None:
    """To what fp32 sums in another order leave, and exponentials of another library."""
    with serving(model, preemption, device="cuda", max_num_batched_tokens=chunk) as engine:
        check_branches(engine, model, PROMPTS, within=2e-3, run=run)


def served(model: Saved, **settings: Any) -> list[list[int]]:
    """Twice the same requests, whose pictures are found the second time."""
    defaults = {"device": "cuda", "dtype": "bfloat16", "deterministic": True, "kv_tokens": 8192, "debug": False}
    engine = engine_of(model, **{**defaults, "max_num_batched_tokens": 128, "max_num_seqs": 32, **settings})
    if "preemption" in settings:
        preempting(engine, set(range(4, 200, 5)))
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    found = [tokens for _ in range(2) for _, tokens, _ in run(engine, MANY, params)]
    assert ("preemption" not in settings) or engine.scheduler.num_preemptions > 10
    if settings.get("cuda_graphs", True):
        kinds = {sees for _, sees in engine.runner.decode_graphs.model_graphs}
        assert kinds == {False, True}, "text alone, and with pictures"
    engine.close()
    return found


def test_tokens_are_the_same_in_every_memory(model: Saved) -> None:
    expected = served(model)
    assert len({tuple(tokens) for tokens in expected}) >= len(MANY) - 2
    differ = []
    for settings in CUTS:
        tokens = served(model, **settings)
        if sorted(tokens) != sorted(expected):
            differ.append(f"{settings}: {sum(a != b for a, b in zip(sorted(tokens), sorted(expected)))} differ")
    assert not differ


def test_nothing_is_captured_once_it_serves(model: Saved) -> None:
    engine = engine_of(model, device="cuda", dtype="bfloat16", max_num_batched_tokens=128, debug=False)
    captured = len(engine.runner.decode_graphs.epilogue_graphs)
    assert len(engine.runner.decode_graphs.model_graphs) == 2 * len(engine.runner.decode_graphs.capture_sizes)
    assert list(run(engine, PROMPTS, SamplingParams(max_tokens=5, ignore_eos=True)))
    assert len(engine.runner.decode_graphs.epilogue_graphs) == captured
    engine.close()
