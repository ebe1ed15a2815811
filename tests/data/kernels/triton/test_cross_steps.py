"""Steps of a model whose layers attend to pictures, through the kernels: chunks of prompts say what transformers says,
and the step that a CUDA graph captures what eager ones do, padding and rows that see nothing included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mllama_models import PROMPTS, Saved, engine_of, run, shown, tokens_of
from test_unlike_logits import assert_said

import quire.shard
from quire import SamplingParams
from quire.control.engine import Engine
from quire.data.kernels.reference import ReferenceBackend
from quire.data.kernels.triton.attention import decode_scratch
from quire.data.kernels.triton.backend import TritonBackend
from quire.data.runner.inputs import Flat, batch_of
from quire.data.runner.step import Step, token_step
from quire.vocabulary.plan import Row

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CLOSE = {"atol": 2e-4, "rtol": 2e-4}


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


def decoding(model: Saved) -> Engine:
    """An engine whose requests all have a token or more."""
    engine = engine_of(model, page_size=4, max_num_batched_tokens=128, device=DEVICE.type, cuda_graphs=False)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for i, prompt in enumerate(PROMPTS):
        media, pixels = shown(prompt)
        engine.add(str(i), tokens_of(prompt), params, media=media, pixels=pixels)
    while any(seq.computed < seq.prompt_len for one in engine.requests.values() for seq in one.live):
        engine.step()
    return engine


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # NumPy's, in the interpreter
def test_the_step_that_graphs_capture(model: Saved) -> None:
    engine = decoding(model)
    runner, seqs = engine.runner, [seq for one in engine.requests.values() for seq in one.live]
    slots = [engine.scheduler.memory.slot(seq) for seq in seqs]
    starts = [seq.computed - 1 for seq in seqs]  # whose pages are there
    rows = tuple(Row(slot, (7,), start, 1) for slot, start in zip(slots, starts))
    flat, store, pictures = Flat.of(rows), runner.store, runner.pictures
    assert pictures.sees(rows)
    assert not pictures.sees(rows[1:2]), "text alone"
    with torch.inference_mode():
        batch = batch_of(flat, store, runner.last)
        step = Step.of(batch, store.caches, ReferenceBackend())
        step.crossing = pictures.crossing(flat, ReferenceBackend())
        expected = runner.model.logits(runner.model(batch.tokens, step))
        padded = [(7, slot, start) for slot, start in zip(slots, starts)] + [(0, 0, 0)] * 2
        tokens, named, positions = (x.contiguous() for x in torch.tensor(padded, device=DEVICE).T)
        cache = store.caches[0]
        for splits, deterministic in ((1, False), (4, False), (1, True)):
            scratch = decode_scratch(len(padded), cache.heads, cache.kv_heads, cache.head_dim, splits, DEVICE)
            backend = TritonBackend(deterministic=deterministic)
            context = token_step(store, backend, named, positions, scratch, splits)
            context.crossing = pictures.single(named, backend, scratch, splits)
            got = runner.model.logits(runner.model(tokens, context))
            assert got.isfinite().all(), "padding is finite"
            assert context.sees is not None
            assert context.sees.flatten().tolist() == [1, 0, 1, 1, 0, 0]
            torch.testing.assert_close(got[:4], expected, **CLOSE)
            blind = token_step(store, backend, named, positions, scratch, splits)
            without = runner.model.logits(runner.model(tokens, blind))
            torch.testing.assert_close(without[1], expected[1], **CLOSE)
            assert (without[0] - expected[0]).abs().max() > 0.1
    engine.close()
