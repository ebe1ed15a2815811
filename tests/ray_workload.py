"""A program for a node of a Ray cluster: `ray_workload.py ADDRESS JSON`. Compares 1,000 mixed requests over ranks of
several nodes with one process ("compare"), or serves until its ranks are lost ("serve")."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

from quire import LLM, SamplingParams
from quire.errors import QuireError
from quire.protocol.sampling_params import StructuredOutputsParams

SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 16, "kv_tokens": 640, "rank_timeout": 60.0,
    "swap_gib": 0.25, "speculative_method": "ngram", "num_speculative_tokens": 3, "adaptive_speculation": False,
    "max_model_len": 256,
}  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1, "n": 3}, {"temperature": 0, "beam_width": 2, "n": 2},
    {"temperature": 0.7, "structured_outputs": StructuredOutputsParams(regex="[a-z]{3,9}( [a-z]{2,8}){1,3}")},
    {"temperature": 0, "frequency_penalty": 0.5}, {"temperature": 1, "top_k": 20, "top_p": 0.9},
)  # fmt: skip


def requests(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, many of which share a prefix, and their parameters."""
    rng = random.Random(44)
    prefixes = [[rng.randrange(8, 500) for _ in range(48)] for _ in range(12)]
    prompts, params = [], []
    for i in range(count):
        start = rng.choice(prefixes)[: rng.choice((0, 16, 48))]
        prompts.append(start + [rng.randrange(8, 500) for _ in range(rng.randint(1, 40))])
        params.append(SamplingParams(seed=i, max_tokens=rng.randint(1, 24), **rng.choice(KINDS)))
    return prompts, params


def tokens_of(llm: LLM, count: int) -> list[list[list[int]]]:
    """Return the tokens of each branch of each request."""
    prompts, params = requests(count)
    return [[list(one.token_ids) for one in output.outputs] for output in llm.generate(prompts, params)]


def compare(address: str, count: int, **layout: Any) -> dict[str, Any]:
    """Compare ranks on several nodes with one process."""
    with LLM("tiny", **SETTINGS, preemption=layout["preemption"]) as alone:
        wanted = tokens_of(alone, count)
    with LLM("tiny", executor="ray", ray_address=address, **SETTINGS, **layout) as llm:
        begin = time.monotonic()
        found = tokens_of(llm, count)
        runner: Any = llm.engine.runner
        scheduler: Any = llm.engine.scheduler
        return {
            "differ": [i for i in range(count) if found[i] != wanted[i]], "seconds": time.monotonic() - begin,
            "nodes": [[host.name, len(host.ranks)] for host in runner.hosts],
            "preemptions": scheduler.num_preemptions, "hits": scheduler.memory.account().sharing.hits,
            "drafts": llm.engine.stats.drafts.num_drafts if hasattr(llm.engine.stats, "drafts") else None,
        }  # fmt: skip


def serve(address: str, **layout: Any) -> dict[str, Any]:
    """Generate until ranks are lost or were started anew; report when the first answer came, and how it ended."""
    with LLM("tiny", executor="ray", ray_address=address, **SETTINGS | layout) as llm:
        wanted = tokens_of(llm, 40)
        runner: Any = llm.engine.runner
        print(json.dumps({"nodes": [[host.name, len(host.ranks)] for host in runner.hosts]}), flush=True)
        begin = time.monotonic()
        while True:
            try:
                right = tokens_of(llm, 40) == wanted
            except QuireError as error:
                return {"error": str(error), "seconds": time.monotonic() - begin}
            if llm.engine.stats.restarts or time.monotonic() - begin > layout.get("rank_timeout", 60.0):
                return {"restarts": llm.engine.stats.restarts, "right": right, "seconds": time.monotonic() - begin}


if __name__ == "__main__":
    task = json.loads(sys.argv[2])
    work = {"compare": compare, "serve": serve}[task.pop("do")]
    print(json.dumps(work(sys.argv[1], **task)), flush=True)
