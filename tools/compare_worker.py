"""One engine, one process: runs the workloads of tools/compare_cpu.py on quire, vLLM or llama.cpp and writes what they
took. Runs in each peer's own environment, so it needs the standard library alone, and of the engine what it imports.

usage: compare_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Continues each prompt by so many tokens, the most likely ones."""
BATCH = 4096  # tokens that llama.cpp is given at once
SHARED = 64  # tokens at the start of all prompts from which on llama.cpp computes them once
TICKS = os.sysconf("SC_CLK_TCK")
QUIET = 0.25  # cores


class Workload(NamedTuple):
    """`requests` at once: `shared` tokens that all have, then `own` ones of each, `output` tokens. With `decode` the
    number of interest is the time of a step after the first token."""

    requests: int
    shared: int
    own: int
    output: int
    decode: bool = False

    def prompts(self, vocabulary: int, seed: str) -> list[list[int]]:
        """Random tokens; others for each seed, so that no cache of prefixes carries over."""
        draw = random.Random(seed)
        common = [draw.randrange(10, vocabulary) for _ in range(self.shared)]
        return [common + [draw.randrange(10, vocabulary) for _ in range(self.own)] for _ in range(self.requests)]


def greedy(llm: Any, sampling: Any) -> Generate:
    """Return the function of an LLM of quire or vLLM, whose SamplingParams are `sampling`."""

    def generate(prompts: list[list[int]], count: int) -> list[list[int]]:
        params = sampling(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]

    return generate


def quire(job: dict[str, Any]) -> Generate:
    """quire.LLM, in this process."""
    sys.path.insert(0, job["source"])
    from quire import LLM, SamplingParams

    llm = LLM(
        job["model"], threads=job["threads"], max_model_len=job["length"], max_num_seqs=job["sequences"],
        kv_gib=job["kv_gib"], skip_tokenizer_init=True, **job["settings"],
    )  # fmt: skip
    return greedy(llm, SamplingParams)


def vllm_engine(job: dict[str, Any], **settings: Any) -> Any:
    """vllm.LLM, its engine in this process, too, compiled unless `eager`. Its KV cache is whole GiB."""
    cores = sorted(os.sched_getaffinity(0))[: job["threads"]]
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": str(max(1, -int(-job["kv_gib"] // 1))), "OMP_NUM_THREADS": str(job["threads"]),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    }  # fmt: skip
    from vllm import LLM

    return LLM(
        job["model"], max_model_len=job["length"], max_num_seqs=job["sequences"], enforce_eager=job["eager"],
        disable_log_stats=True, **settings, **job["settings"],
    )  # fmt: skip


def vllm(job: dict[str, Any]) -> Generate:
    """vLLM with its cache of prefixes."""
    llm = vllm_engine(job, enable_prefix_caching=True, skip_tokenizer_init=True)
    from vllm import SamplingParams

    return greedy(llm, SamplingParams)


class Llama:
    """llama.cpp through its C functions: all sequences in one context, a token of each a call, the most likely token
    taken by NumPy. What all prompts start with is computed once and copied, as its own server does."""

    def __init__(self, job: dict[str, Any]) -> None:
        import llama_cpp
        import numpy

        self.lib, self.numpy, lib = llama_cpp, numpy, llama_cpp
        self.silent = lib.llama_log_callback(lambda level, text, data: None)  # kept: llama.cpp calls it
        lib.llama_log_set(self.silent, None)
        lib.llama_backend_init()
        settings = lib.llama_model_default_params()
        settings.n_gpu_layers, settings.use_extra_bufts = 0, job["repack"]
        self.model = lib.llama_model_load_from_file(job["model"].encode(), settings)
        assert self.model, f"llama.cpp can't load {job['model']}"
        room = lib.llama_context_default_params()
        room.n_ctx, room.n_batch, room.n_ubatch = job["tokens"], BATCH, 512
        room.n_seq_max, room.kv_unified, room.swa_full = job["sequences"], True, False
        room.n_threads = room.n_threads_batch = job["threads"]
        self.context = lib.llama_init_from_model(self.model, room)
        assert self.context, "llama.cpp makes no context"
        self.memory = lib.llama_get_memory(self.context)
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(BATCH, 0, 1)

    def compute(self, tokens: Sequence[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Tokens as (token, position, sequence, whether its logits are wanted) -> the next token of each sequence."""
        batch, lib = self.batch, self.lib
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        code = lib.llama_decode(self.context, batch)
        assert code == 0, f"llama_decode says {code}"
        found = {}
        for i, (_, _, sequence, wanted) in enumerate(tokens):
            if wanted:
                logits = self.numpy.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, i), (self.vocabulary,))
                found[sequence] = self.pick(sequence, logits)
        return found

    def pick(self, sequence: int, logits: Any) -> int:
        """A sequence's next token: the likeliest."""
        return int(logits.argmax())

    def generate(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        self.lib.llama_memory_clear(self.memory, True)
        begun = self._common(prompts)
        latest: dict[int, int] = {}
        waiting: list[tuple[int, int, int, bool]] = []
        for sequence, prompt in enumerate(prompts):
            last = len(prompt) - 1
            own = [(prompt[at], at, sequence, at == last) for at in range(begun, len(prompt))]
            if len(waiting) + len(own) > BATCH:
                latest |= self.compute(waiting)
                waiting = []
            waiting += own
        latest |= self.compute(waiting)
        found = [[latest[sequence]] for sequence in range(len(prompts))]
        for step in range(1, count):
            rows = [(tokens[-1], len(prompts[i]) + step - 1, i, True) for i, tokens in enumerate(found)]
            latest = self.compute(rows)
            for i, tokens in enumerate(found):
                tokens.append(latest[i])
        return found

    def _common(self, prompts: list[list[int]]) -> int:
        """How many tokens all sequences have in their caches already."""
        if len(prompts) == 1:
            return 0
        same = next((at for at, tokens in enumerate(zip(*prompts)) if len(set(tokens)) > 1), len(prompts[0]) - 1)
        if same < SHARED:
            return 0
        self.compute([(token, at, 0, False) for at, token in enumerate(prompts[0][:same])])
        for sequence in range(1, len(prompts)):
            self.lib.llama_memory_seq_cp(self.memory, 0, sequence, -1, -1)
        return same


ENGINES: dict[str, Callable[[dict[str, Any]], Generate]] = {
    "quire": quire, "vllm": vllm, "llama": lambda job: Llama(job).generate,
}  # fmt: skip


def processes(without: int | None) -> Iterator[Path]:
    """/proc folders of this process and of those that it started, `without` and what that one started aside."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except OSError:
            continue
    left = [os.getpid()]
    while left:
        pid = left.pop()
        yield Path("/proc", str(pid))
        left += [child for child in children.get(pid, ()) if child != without]


def peak_bytes(without: int | None = None) -> int:
    """The most memory that each of them ever held, added up."""
    total = 0
    for folder in processes(without):
        try:
            lines = (folder / "status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    return total


def others_seconds(without: int | None = None) -> float:
    """CPU seconds that all processes but this one, what it started, and `without` have used."""
    user, nice, system, _idle, _waiting, *rest = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    busy = sum(map(int, (user, nice, system, *rest)))
    own = 0
    for folder in [*processes(without), *([Path("/proc", str(without))] if without else [])]:
        try:
            own += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:
            continue
    return (busy - own) / TICKS


def wait_for_quiet(most: float, without: int | None) -> None:
    """Until others use less than a quarter of a core, but not for more than `most` seconds."""
    end = time.monotonic() + most
    while time.monotonic() < end:
        before = others_seconds(without)
        time.sleep(0.5)
        if others_seconds(without) - before < QUIET * 0.5:
            return


def measure(generate: Generate, workload: Workload, job: dict[str, Any], name: str, busy: int | None) -> dict[str, Any]:
    """Each of the job's runs: seconds, those of the first tokens where decoding is measured, and what others used. On
    one thread that no neighbour shall disturb seconds are the process's own, which others don't lengthen."""
    clock = time.process_time if job["threads"] == 1 and busy is None else time.perf_counter
    generate(workload.prompts(job["vocabulary"], f"{name} warm {job['seed']}")[:4], 2)
    runs = []
    for run in range(job["repeats"]):
        prompts = workload.prompts(job["vocabulary"], f"{name} {job['seed']} {run}")
        wait_for_quiet(job["wait"], busy)
        before, wall, began = others_seconds(busy), time.perf_counter(), clock()
        found = generate(prompts, workload.output)
        seconds, wall = clock() - began, time.perf_counter() - wall
        others = (others_seconds(busy) - before) / wall
        assert [len(tokens) for tokens in found] == [workload.output] * workload.requests, "tokens are missing"
        result = {"seconds": seconds, "wall_s": wall, "others": max(0.0, others)}
        if workload.decode:
            prompts = workload.prompts(job["vocabulary"], f"{name} {job['seed']} {run} first")
            began = clock()
            generate(prompts, 1)
            result["first_s"] = clock() - began
        runs.append(result)
    return {"runs": runs, "peak_bytes": peak_bytes(busy)}


def main(job_path: str, result_path: str) -> None:
    """A job's engine, its workloads one after another."""
    job = json.loads(Path(job_path).read_text())
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    generate = ENGINES[job["engine"]](job)
    ready = time.time() - job["spawned"]
    generate([[5] * 16], 1)
    result: dict[str, Any] = {"ready_s": ready, "first_token_s": time.time() - job["spawned"], "workloads": {}}
    result["tokens"] = generate(Workload(1, 0, 16, 8).prompts(job["vocabulary"], "tokens"), 8)[0]
    command = [sys.executable, "-c", "while True: pass"]
    neighbour = subprocess.Popen(command) if job["busy"] else None
    try:
        for name, numbers in job["workloads"].items():
            found = measure(generate, Workload(*numbers), job, name, neighbour.pid if neighbour else None)
            result["workloads"][name] = found
            print(f"  {name}: {min(run['seconds'] for run in found['runs']):.3f} s", file=sys.stderr, flush=True)
    finally:
        if neighbour is not None:
            neighbour.kill()
    Path(result_path).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
