"""A real model from a package of the index, where that is installed: SmolLM2-135M-Instruct in blocks of four bits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.startup.checkpoint import read_checkpoint
from quire.weights.packaged_models import PACKAGED_MODELS

try:
    distribution(PACKAGED_MODELS["smollm2"].distribution)
except PackageNotFoundError:
    pytest.skip(f"not installed: {PACKAGED_MODELS['smollm2'].install_command}", allow_module_level=True)

GREEDY = SamplingParams(temperature=0, max_tokens=16)


def test_it_knows_the_capital_of_france() -> None:
    with LLM("smollm2", device="cpu", kv_tokens=1024, swap_gib=0) as llm:
        answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)[0].outputs[0]
    assert answer.text == "The capital of France is Paris."
    assert answer.finish_reason == "stop"


def test_its_name_and_what_suits_it() -> None:
    source = read_checkpoint(EngineConfig(model="smollm2"))
    assert (source.name, source.default_sampling) == ("smollm2", {"temperature": 0.0})
    assert source.spec.parameters == 134_515_008
