"""Steps with prompts that are replayed as CUDA graphs have the logits of eager ones, in every mix of rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gpu_serving
import pytest
import torch

from quire.core.engine import Engine
from quire.models.named_configs import named_config
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.seq_slices import SeqSlices
from quire.protocol.step_plan import StepPlan
from quire.worker.inputs import FlatInputs, build_flat_batch
from quire.worker.step_context import StepContext

pytestmark = pytest.mark.gpu

KINDS = (
    {"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.9, "top_p": 0.8, "top_k": 50},
    {"temperature": 0.0, "logprobs": 2}, {"n": 2}, {"repetition_penalty": 1.2, "temperature": 0.0},
)  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"model_config": "llama-125m", "dtype": "bfloat16"},
    {"model_config": "llama-125m", "dtype": "float32"},
    {"model_config": "opt-125m", "dtype": "float16"},
    {"model_config": "gpt2", "dtype": "float32"},
    {"model_config": "mistral-7b", "dtype": "bfloat16", "small": True},
    {"model_config": "qwen3-8b", "dtype": "bfloat16", "small": True},
    {"model_config": "llama-125m", "dtype": "bfloat16", "deterministic": True},
    {"model_config": "mistral-7b", "dtype": "bfloat16", "small": True, "deterministic": True},
    {"model_config": "qwen3-8b", "dtype": "bfloat16", "small": True, "deterministic": True},
    {"model_config": "llama-125m", "dtype": "bfloat16", "kv_tokens": 2048, "preemption": "swap"},
    {"model_config": "llama-125m", "dtype": "bfloat16", "kv_tokens": 2048, "preemption": "recompute"},
    {"model_config": "llama-125m", "dtype": "bfloat16", "enable_prefix_caching": True},
]
SMALL = {"num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8,
         "num_key_value_heads": 2, "head_dim": 128, "sliding_window": 50}  # fmt: skip


def engine_of(folder: Path, **settings: Any) -> Engine:
    if settings.pop("small", False):
        config = {**named_config(settings.pop("model_config")), **SMALL}
        (folder / "config.json").write_text(json.dumps(config))
        settings |= {"model": str(folder)}
    defaults = {"kv_tokens": 65536, "swap_gib": 0.25, "max_num_seqs": 300, "max_num_batched_tokens": 600,
                "enable_prefix_caching": False, "max_model_len": 1024}  # fmt: skip
    return gpu_serving.engine_of(**{**defaults, **settings})


class Compared:
    """A runner's rows that replay: run eagerly first, then replayed for their logits alone, then served."""

    def __init__(self, engine: Engine, exact: bool) -> None:
        self.runner: Any = engine.runner
        self.exact, self.sizes = exact, set()
        self.worst = 0.0
        self.real, self.runner._run_slices = self.runner._run_slices, self.rows

    @torch.inference_mode()
    def rows(self, plan: StepPlan, began: float, mark: Any) -> Any:
        runner = self.runner
        rows = SeqSlices.from_slices(plan.slices)
        if plan.slices and not runner.decode_graphs.can_run(rows):
            flat = FlatInputs.from_slices(rows)
            sizes = runner.mixed_graphs.choose_sizes(rows, flat)
            if sizes is not None:
                batch = build_flat_batch(flat, runner.store, runner.sampled_tokens)
                step = StepContext.from_batch(
                    batch, runner.store.caches, runner.backend, len(batch.sampled_rows) < len(batch.tokens)
                )
                hidden = runner.model(batch.tokens, step)
                expected = runner.model.logits(
                    hidden if step.query_batch else hidden.index_select(0, batch.logits_indices)
                )
                got = runner.mixed_graphs.run(flat, sizes, "")[: len(expected)]
                assert expected.isfinite().all()
                assert got.isfinite().all()
                if self.exact:
                    assert torch.equal(got, expected), sizes
                else:
                    difference = (got.float() - expected.float()).abs().max() / expected.float().std()
                    self.worst = max(self.worst, float(difference))
                self.sizes.add(sizes)
        return self.real(plan, began, mark)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logits_of_replayed_steps_are_those_of_eager_ones(settings: dict[str, Any], tmp_path: Path) -> None:
    engine = engine_of(tmp_path, **settings)
    compared = Compared(engine, settings.get("deterministic", False))
    chance = random.Random(5)
    added = 0
    while added < 260 or engine.has_unfinished_requests:
        for _ in range(chance.choice((0, 0, 0, 1, 1, 2, 6)) if added < 260 else 0):
            length = chance.choice((1, 2, 7, 30, 64, 200, 333, 590))
            params = SamplingParams(
                max_tokens=chance.randint(1, 60), ignore_eos=True, seed=added, **KINDS[added % len(KINDS)]
            )
            engine.add(str(added), [chance.randint(10, 5000) for _ in range(length)], params)
            added += 1
        assert all(output.finish_reason in (None, "length") for output in engine.step())
    assert (engine.scheduler.num_preemptions > 0) == ("preemption" in settings)
    engine.close()
    few = "preemption" in settings
    assert len({sizes.num_tokens for sizes in compared.sizes}) > (4 if few else 8)
    assert len({sizes.num_decode_rows for sizes in compared.sizes}) > (0 if few else 1)
    assert len({sizes.num_sampled for sizes in compared.sizes}) > (2 if few else 6)
    # Rounding differs by the sizes of products and by the parts of contexts; a wrong token or key shows as 1 or more.
    assert compared.worst < {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}[settings["dtype"]]
