"""Run a job of tools/compare_gpu.py on quire or vLLM, and write its times. Imports only the standard library and the
engine, since it runs in vLLM's own environment.

usage: compare_gpu_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

STD = 0.02  # the standard deviation of quire's dummy weights


def make_quire(job: dict[str, Any]) -> tuple[Any, Any]:
    """Return quire's LLM for a job, and its SamplingParams."""
    sys.path.insert(0, job["source"])
    from quire import LLM, SamplingParams

    settings = {"tp": job["tp"], **({"expert_parallel": True} if job["expert_parallel"] else {}), **job["settings"]}
    llm = LLM(
        job["folder"], dummy_weights=True, skip_tokenizer_init=True, max_model_len=job["max_model_len"],
        enable_prefix_caching=False, **settings,
    )  # fmt: skip
    return llm, SamplingParams


def make_vllm(job: dict[str, Any]) -> tuple[Any, Any]:
    """Return vLLM's LLM for a job, and its SamplingParams. On one GPU its weights are those of `fill_normal`."""
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if job["tp"] == 1:  # so that the model is made in this process, where the function can be replaced
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        import vllm.model_executor.model_loader.dummy_loader as dummy

        dummy.initialize_dummy_weights = fill_normal
    from vllm import LLM, SamplingParams

    llm = LLM(
        job["folder"], load_format="dummy", skip_tokenizer_init=True, max_model_len=job["max_model_len"],
        enable_prefix_caching=False, tensor_parallel_size=job["tp"], enable_expert_parallel=job["expert_parallel"],
        **job["settings"],
    )  # fmt: skip
    return llm, SamplingParams


def fill_normal(model: Any, *_: object) -> None:
    """Fill a model with normal weights, and norms with 1, as quire does. vLLM's own dummy weights are so small that all
    tokens choose the same experts."""
    import torch

    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if torch.is_floating_point(parameter):
                if parameter.dim() == 1 and "norm" in type(module).__name__.lower():
                    parameter.data.fill_(1.0)
                else:
                    for piece in parameter.data.view(-1).split(1 << 28):
                        piece.copy_(torch.randn(piece.numel(), device=piece.device) * STD)


ENGINES = {"quire": make_quire, "vllm": make_vllm}


def main(job_path: str, result_path: str) -> None:
    """Make the job's engine, run its first case as a warm-up, then all cases, one after the other. Write the seconds
    after each: `ready_s` from the start of this process until the engine was ready, and `seconds` of the cases."""
    job = json.loads(Path(job_path).read_text())
    llm, sampling_params = ENGINES[job["engine"]](job)
    result: dict[str, Any] = {"ready_s": time.time() - job["spawned"], "seconds": []}
    for number, case in enumerate([job["cases"][0], *job["cases"]]):
        choice = {"temperature": 1.0, "top_p": 0.95} if case["sampled"] else {"temperature": 0.0}
        params = [
            sampling_params(ignore_eos=True, max_tokens=output, min_tokens=output, **choice)
            for output in case["outputs"]
        ]
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": one} for one in case["prompts"]], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(one.outputs[0].token_ids) for one in outputs] == case["outputs"], "tokens are missing"
        if number:  # 0 is the warm-up
            result["seconds"].append(seconds)
            Path(result_path + ".new").write_text(json.dumps(result))
            os.replace(result_path + ".new", result_path)  # whole, whenever the process ends
        print(f"  {job['engine']} {case['name']}, seed {case['seed']}: {seconds:.3f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
