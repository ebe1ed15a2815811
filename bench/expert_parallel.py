r"""Measure a layer of experts as ranks compute it: with columns of every expert, and with whole experts.

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296 \
        python -m bench.expert_parallel --out FILE.json

With these variables glibc keeps freed memory, so that no time depends on what was measured before.
The layer is that of a named shape, in bf16 with random weights; on a CPU each rank has one thread. Sums over ranks are
not measured: they are the same. A step waits for its slowest rank, so with whole experts the largest time of the ranks
counts, as a mean over some steps. Tokens choose experts by random logits, to which `skew` times a random number of each
expert is added: with 0, all experts are equally popular.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from quire.bench.document import document, write
from quire.layers.experts_config import ExpertsConfig
from quire.layers.moe import SparseMLP
from quire.models.architectures import read_model_config
from quire.models.named_configs import named_config
from quire.protocol.parallel_layout import ParallelLayout, Shard

RANKS, TOKENS, SKEWS = (2, 4, 8), (1, 8, 64, 512), (0.0, 0.5, 1.0)
ATTEMPTS, STEPS = 6, 8
WAIT_CYCLES = 10**8  # of a GPU, while calls are queued
CACHE_BYTES = 1 << 28  # more than any cache has


def main() -> None:
    """Print the measurements, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-config", default="qwen3-30b-a3b", help="a shape with experts")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, results = read_model_config(named_config(args.model_config)), list[dict[str, Any]]()
    assert model.experts is not None, "the shape has experts"
    for ranks in args.ranks:
        experts = replace(model.experts, shared_intermediate=0)
        by_columns, by_experts = (
            make_layer(model.hidden, experts, model.activation, layout.shards()[0], device)
            for layout in (ParallelLayout(ranks), ParallelLayout(ranks, expert_parallel=True))
        )
        for tokens in args.tokens:
            for skew in SKEWS:
                results.append(measure(by_columns, by_experts, model.hidden, tokens, ranks, skew, device))
                print(results[-1], flush=True)
    if args.out is not None:
        variables = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("MALLOC_")]
        program = " ".join([*variables, "python -m bench.expert_parallel"])
        write(args.out, document("expert parallel", program, sys.argv[1:], results))


def make_layer(hidden: int, experts: ExpertsConfig, activation: str, shard: Shard, device: torch.device) -> SparseMLP:
    """Return a rank's prepared layer."""
    layer = SparseMLP(hidden, experts, activation, torch.bfloat16, device, shard)
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.02)
    layer.prepare()
    return layer


def measure(
    by_columns: SparseMLP, by_experts: SparseMLP, hidden: int, tokens: int, ranks: int, skew: float,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    """Return the mean microseconds of some steps: by columns, and by experts those of the slowest rank. `busiest`: the
    number of that rank's pairs beside an equal share. All ranks' experts have the same weights."""
    generator, count = torch.Generator().manual_seed(0), by_experts.experts
    assert count % ranks == 0, f"{ranks} ranks have unequal numbers of {count} experts"
    x = torch.randn(tokens, hidden, generator=generator).to(device, torch.bfloat16)
    popular = skew * torch.randn(STEPS, 1, count, generator=generator)
    logits = (torch.randn(STEPS, tokens, count, generator=generator) + popular).to(device, torch.bfloat16)
    chosen = logits.float().topk(by_experts.top_k).indices.flatten(1)
    each, pairs = list[list[float]](), list[list[int]]()
    for shard in ParallelLayout(ranks, expert_parallel=True).shards():
        own = by_experts.own = shard.expert_range(count)
        if by_experts.packed is not None:
            by_experts.packed.first = own.start
        each.append(step_times(by_experts, x, logits))
        pairs.append(((chosen >= own.start) & (chosen < own.stop)).sum(1).tolist())
    return {
        "ranks": ranks, "tokens": tokens, "skew": skew, "columns_us": mean(step_times(by_columns, x, logits)),
        "experts_us": mean(map(max, zip(*each))), "experts_mean_us": mean(map(mean, each)),
        "busiest": mean(max(step) * ranks / sum(step) for step in zip(*pairs)),
    }  # fmt: skip


def step_times(layer: SparseMLP, x: Tensor, logits: Tensor) -> list[float]:
    """Return the microseconds of a step with each of `logits` [steps, tokens, experts] of the router: the least of some
    attempts. A CPU's clock is the process's own time, which other processes don't lengthen."""
    attempts = [_gpu_times(layer, x, logits) if x.is_cuda else _cpu_times(layer, x, logits) for _ in range(ATTEMPTS)]
    return [min(step) for step in zip(*attempts)]


def _cpu_times(layer: SparseMLP, x: Tensor, logits: Tensor) -> list[float]:
    found = []
    for step in logits:
        layer.router.packed = lambda _, step=step: step
        began = time.process_time()
        layer(x)
        found.append((time.process_time() - began) * 1e6)
    return found


def _gpu_times(layer: SparseMLP, x: Tensor, logits: Tensor) -> list[float]:
    """As above: with calls that wait in the GPU's queue, and weights that are in no cache."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in logits]
    other = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=x.device)
    torch.cuda._sleep(WAIT_CYCLES)
    for step, (begin, end) in zip(logits, events):
        layer.router.packed = lambda _, step=step: step
        other.zero_()
        begin.record()
        layer(x)
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 for begin, end in events]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        main()
