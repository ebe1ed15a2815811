"""Compare the peak use of the device's memory with the plan for it (PagedAttention Figure 1, left).

Two loads are run: prompts that fill the largest step twice, in the maximum number of sequences, every other one with
sampling parameters that need more memory; then sequences of maximum length. If the model has vision, also the images
that one step encodes. On a GPU, use is what the driver reports, less the use before; on a CPU it is the process's
resident memory, with all KV pages touched.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from quire.bench.document import table
from quire.bench.shapes import built, local_runner
from quire.bench.workloads import Job, parse
from quire.cli.flags import config_from
from quire.config import EngineConfig
from quire.errors import StartupError
from quire.protocol.model_spec import max_parts_per_step
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import BuiltEngine
from quire.startup.checkpoint import Checkpoint, read_checkpoint
from quire.startup.dtypes import choose_device

TOKENS = 12  # tokens that each sequence generates, if they fit
PICTURE = "mmmu-pro@1"
LONG = 32_768  # maximum tokens of long sequences: a GPU's memory would take minutes to fill
PARTS = ("weights", "kv", "beside", "all")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one result: bytes, planned and measured. On a CPU, Linux only."""
    import torch

    import quire.worker.model_runner  # noqa: F401  so that imports aren't counted

    config = config_from(args)
    gpu = choose_device(config) == "cuda"
    if not gpu and sys.platform != "linux":
        raise StartupError("quire bench memory reads /proc/self", "Run it on Linux, or beside a GPU")
    seeing = _seeing(config.with_device_defaults("cuda" if gpu else "cpu"), read_checkpoint(config, weights=False))
    if gpu:
        torch.zeros(1, device="cuda")
        before = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
    else:
        from quire.weights.mapped_files import trim_memory

        trim_memory()  # as at the end of a start: memory released there would reduce the measured use
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        before = psutil.Process().memory_info().rss
    with built(config) as made:
        runner, plan = local_runner(made.engine), made.memory_plan
        runner.store.buffer.zero_()  # a CPU's untouched pages are not resident
        _serve(made)
        pictures = _see(made, seeing)
        if gpu:
            outside = before - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()
            most = torch.cuda.max_memory_reserved() + outside
        else:
            most = _highest() - before
        kept = {tensor.data_ptr(): tensor.nbytes for tensor in runner.model.state_dict().values()}
        weights = sum(kept.values()) if gpu else plan.weight_bytes  # packed by oneDNN on a CPU, same size
        kv = runner.store.buffer.nbytes
        measured = {"weights": weights, "kv": kv, "beside": most - weights - kv, "all": most}
        planned = {"weights": plan.weight_bytes, "kv": plan.kv_bytes, "beside": plan.activation_bytes}
        planned["all"] = sum(planned.values())
        return [{"model": made.name, "dtype": plan.dtype, "device": plan.device, "device_bytes": plan.device_bytes,
                 "pictures": pictures, "planned": planned, "measured": measured}]  # fmt: skip


def _serve(made: BuiltEngine) -> None:
    """Run both loads. Raise StartupError if a sequence has no room for an output."""
    engine, plan = made.engine, made.memory_plan
    if plan.max_len < 2:
        raise StartupError("sequences of 1 token have no room for an output", "Use a larger --max-model-len")
    engine.lift_queue_limit()
    output = min(TOKENS, plan.max_len - 1)
    plain = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    ruled = SamplingParams(
        temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1, frequency_penalty=0.1, logprobs=5,
        prompt_logprobs=None if engine.scheduler.clip_chunk else 5, logit_bias={1: 2.0}, seed=1, max_tokens=output,
        ignore_eos=True, detokenize=False,
    )  # fmt: skip
    longest = plan.max_len - output
    count = max(1, min(engine.scheduler.max_seqs, plan.kv_tokens // (4 * plan.page_tokens)))
    _run(made, count, min(max(2 * engine.scheduler.token_budget // count, 1), longest), (plain, ruled))
    held = min(plan.kv_tokens, LONG)
    count = max(1, min(engine.scheduler.max_seqs, held // plan.max_len))
    _run(made, count, min(held // count - output, longest), (plain,))


def _seeing(config: EngineConfig, source: Checkpoint) -> list[Job]:
    """Return requests with an image each, if the model has vision: one more than a step encodes, if that many may run.
    They are made before the measurement, and share one image under different names."""
    from quire.bench.pictured import Eyes

    eyes, vision = Eyes.of(source.config, source.spec), source.spec.vision
    if eyes is None or vision is None:
        return []
    assert config.max_num_batched_tokens is not None, "a sized config"
    assert config.max_num_seqs is not None, "a sized config"
    workload = parse(PICTURE)
    [job] = eyes.jobs(workload.specs(), workload.jobs(source.spec.vocab_size))
    ([medium], [pixels]) = job.media, job.pixels
    budget = config.max_num_batched_tokens
    count = (
        max_parts_per_step(budget, vision.part_tokens, vision.part_embeds, vision.max_embeds) // medium.num_parts + 1
    )
    keys = [hashlib.sha256(b"%d" % i).digest() for i in range(min(count, config.max_num_seqs))]
    return [job._replace(media=(medium._replace(key=key),), pixels=(pixels._replace(key=key),)) for key in keys]


def _see(made: BuiltEngine, jobs: Sequence[Job]) -> int:
    """Add as many of the images as fit, all at once, and return their number."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    jobs = [job for job in jobs if len(job.prompt) + TOKENS <= made.memory_plan.max_len]
    for i, job in enumerate(jobs):
        made.engine.add(str(i), job.prompt, params, images=job.media, pixels=job.pixels)
    while made.engine.has_unfinished_requests:
        made.engine.step()
    return len(jobs)


def _run(made: BuiltEngine, count: int, length: int, params: Sequence[SamplingParams]) -> None:
    """Run `count` sequences of `length` prompt tokens to completion."""
    for i in range(count):
        prompt = [(7 * i + j) % made.spec.vocab_size for j in range(max(length, 1))]
        made.engine.add(str(i), prompt, params[i % len(params)])
    while made.engine.has_unfinished_requests:
        made.engine.step()


def _highest() -> int:
    """Return the peak resident memory since its last reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise StartupError("/proc/self/status says no VmHWM", "Run it on Linux, or beside a GPU")


def show(results: Sequence[dict[str, Any]]) -> str:
    """Format the parts, one a line, in MiB."""
    rows = []
    for result in results:
        for part in PARTS:
            planned, measured = (result[name][part] for name in ("planned", "measured"))
            rows.append((part, f"{planned / 2**20:,.1f}", f"{measured / 2**20:,.1f}",
                         f"{100 * (measured - planned) / result['planned']['all']:+.1f}"))  # fmt: skip
    return table(("part", "planned MiB", "measured MiB", "off by, % of all"), rows)
