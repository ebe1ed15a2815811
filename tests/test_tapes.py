"""Decode steps on tapes give what eager steps give, whatever the model, the batch, the memory pressure or the sampling;
and what can't be recorded is run eagerly."""

from __future__ import annotations

import logging
import subprocess
import sys
from itertools import chain
from typing import Any

import pytest
import test_equality
import torch
from test_equality import FAMILIES, FRAMED, MORE, Oracle, assert_equal, outputs_of

from quire.core.engine import Engine
from quire.kernels.cpu.library_loader import library
from quire.layers.norm import RMSNorm
from quire.protocol.sampling_params import SamplingParams
from quire.worker.recorded_steps import RecordedDecodeSteps

pytestmark = pytest.mark.skipif(library() is None, reason="there are no kernels for this CPU (no compiler?)")
ALL = [*FAMILIES, *MORE, *FRAMED]
Answers = dict[tuple[str, int], list[Any]]
oracle = test_equality.oracle


def an_engine(oracle: Oracle, tapes: bool = True, **settings: object) -> Engine:
    return test_equality.engine_of(oracle, **{"attention": "native", "cuda_graphs": tapes} | settings)


def tapes_of(engine: Engine) -> RecordedDecodeSteps:
    tapes = engine.runner.decode_graphs
    assert isinstance(tapes, RecordedDecodeSteps)
    return tapes


def all_of(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Answers:
    """The tokens of each request's sequences, with their log-probabilities where there are any."""
    found: Answers = {}
    for output in chain(*outputs_of(engine, {str(i): (prompt, params) for i, prompt in enumerate(prompts)}).values()):
        tops = [(top.token, top.logprob, top.ids, top.logprobs) for top in output.top_logprobs]
        found.setdefault((output.request_id, output.branch), []).extend([*output.tokens, *tops])
    return found


@pytest.mark.share(6)
@pytest.mark.parametrize("family", ALL)
def test_every_family_is_recorded_and_gives_transformers_tokens(oracle, family: str) -> None:
    model = oracle(family)
    engine = an_engine(model)
    assert_equal(model, engine, model.prompts)
    tapes = tapes_of(engine)
    assert not tapes.is_unsupported
    assert (6, "greedy") in tapes.programs, "the prompts' steps of six rows were replayed"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 3, 8, 11])
def test_all_sizes_equal_eager_steps(oracle, rows: int, dtype: str) -> None:
    model = oracle("llama")
    prompts = [[(7 * i + j) % 97 for j in range(3 + i)] for i in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings = {"max_num_seqs": 20, "dtype": dtype}
    engine, eager = an_engine(model, **settings), an_engine(model, False, **settings)
    assert eager.runner.decode_graphs is None
    assert all_of(engine, prompts, params) == all_of(eager, prompts, params)
    size = 12 if rows == 11 else rows
    assert (size, "greedy") in tapes_of(engine).programs, "of eleven rows one is padding"


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 5, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0, "logprobs": 4},
        {"temperature": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"temperature": 1.0, "logit_bias": {3: 4.0}, "min_tokens": 4},
        {"beam_width": 3, "n": 2},
    ],
    ids=["random", "cut", "branches", "logprobs", "penalties", "rules", "beams"],
)
def test_all_sampling_equals_eager_steps(oracle, asked: dict[str, Any]) -> None:
    model = oracle("qwen2")
    params = SamplingParams(max_tokens=12, ignore_eos=True, seed=5, **asked)
    engine = an_engine(model)
    answers = all_of(engine, model.prompts[:3], params)
    assert answers == all_of(an_engine(model, False), model.prompts[:3], params)
    assert tapes_of(engine).programs, "some steps were replayed"


def test_what_torch_would_compute_is_refused_and_said_once(
    oracle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A norm that squares by torch would be left out of a tape, and every replay would be wrong."""
    plain = RMSNorm.forward

    def planted(self: RMSNorm, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return plain(self, x, *rest).mul_(1.0)

    monkeypatch.setattr(RMSNorm, "forward", planted)
    model = oracle("llama")
    engine = an_engine(model)
    with caplog.at_level(logging.DEBUG, logger="quire.worker.recorded_steps"):
        assert_equal(model, engine, model.prompts)
    assert tapes_of(engine).is_unsupported
    assert not tapes_of(engine).programs
    assert "aten::mul_" in caplog.text
    said = [record for record in caplog.records if record.name == "quire.worker.recorded_steps"]
    assert len(said) == 1, "it is said once"


def test_recording_imports_no_compiler() -> None:
    """Nor do the first tokens need what else is large: torch imports its compiler when it first sees some modes."""
    heavy = ("torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "matplotlib", "pydantic", "fastapi")
    code = f"""
import sys
from quire.bench.shapes import built
from quire.config import EngineConfig
from quire.protocol.sampling_params import SamplingParams

with built(EngineConfig(device="cpu", kv_tokens=512, skip_tokenizer_init=True)) as made:
    made.engine.add("0", [1, 2, 3], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False))
    while made.engine.has_unfinished_requests:
        made.engine.step()
    print(sorted(made.engine.runner.decode_graphs.model_ops), [name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.stdout.strip() == "[1] []", done.stderr
