"""One engine, one process: runs the workloads of tools/compare_structured.py on quire, vLLM or llama.cpp. Runs in each
one's own environment, so it needs the standard library alone, and of the engine what it imports.

usage: compare_structured_worker.py JOB.json RESULT.json
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compare_worker import Llama, others_seconds, vllm_engine

Generate = Callable[[list[list[int]], Any, int], list[list[int]]]
"""Continues each prompt by so many tokens at most, the likeliest that the schema allows; the end token is the last."""
Engine = tuple[Generate, int]
"""And its end token."""


def held(llm: Any, sampling: Any, structured: Any, end: int) -> Generate:
    """Return the function of an LLM of quire or vLLM, of which quire's leaves out the end token."""

    def generate(prompts: list[list[int]], schema: Any, count: int) -> list[list[int]]:
        form = None if schema is None else structured(json=schema)
        params = sampling(temperature=0, max_tokens=count, structured_outputs=form, ignore_eos=form is None,
                          detokenize=False)  # fmt: skip
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        outputs = [(list(one.outputs[0].token_ids), one.outputs[0].finish_reason) for one in found]
        return [[*tokens, end] if why == "stop" and tokens[-1:] != [end] else tokens for tokens, why in outputs]

    return generate


def quire(job: dict[str, Any]) -> Engine:
    """quire.LLM, in this process."""
    sys.path.insert(0, job["source"])
    from quire import LLM, SamplingParams
    from quire.protocol.structured_output import StructuredOutputsParams

    llm = LLM(
        job["model"], device="cpu", threads=job["threads"], max_model_len=job["length"],
        max_num_seqs=job["sequences"], kv_gib=job["kv_gib"], swap_gib=0, enable_prefix_caching=False, **job["settings"],
    )  # fmt: skip
    end = min(llm.engine.scheduler.eos_ids)
    return held(llm, SamplingParams, StructuredOutputsParams, end), end


def vllm(job: dict[str, Any]) -> Engine:
    """vLLM with its own choice of what makes grammars."""
    llm = vllm_engine({**job, "eager": False}, enable_prefix_caching=False)
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    end = int(llm.get_tokenizer().eos_token_id)
    return held(llm, SamplingParams, StructuredOutputsParams, end), end


class Held(Llama):
    """llama.cpp with its own grammar of a schema: the likeliest token is taken if the grammar lets it follow, else the
    likeliest of all that may, as its server's sampler does it."""

    def __init__(self, job: dict[str, Any]) -> None:
        super().__init__(job)
        from llama_cpp import llama_grammar

        numpy, lib = self.numpy, self.lib
        self.written = llama_grammar.json_schema_to_gbnf
        self.words = lib.llama_model_get_vocab(self.model)
        self.end = lib.llama_vocab_eos(self.words)
        self.grammars: dict[str, Any] = {}  # samplers that nothing was drawn from, by schema
        self.samplers: dict[int, Any] = {}  # of sequences
        kind = numpy.dtype([("id", numpy.int32), ("logit", numpy.float32), ("p", numpy.float32)])
        self.all = numpy.zeros(self.vocabulary, kind)
        self.ids = numpy.arange(self.vocabulary, dtype=numpy.int32)
        self.one = numpy.zeros(1, kind)

    def pick(self, sequence: int, logits: Any) -> int:
        token = int(logits.argmax())
        sampler = self.samplers.get(sequence)
        if sampler is None:
            return token
        self.one["id"], self.one["logit"] = token, logits[token]
        self._mask(sampler, self.one)
        if self.one["logit"][0] == -float("inf"):
            self.all["id"], self.all["logit"] = self.ids, logits
            self._mask(sampler, self.all)
            token = int(self.all["logit"].argmax())
        self.lib.llama_sampler_accept(sampler, token)
        return token

    def _mask(self, sampler: Any, candidates: Any) -> None:
        data = candidates.ctypes.data_as(ctypes.POINTER(self.lib.llama_token_data))
        array = self.lib.llama_token_data_array(data, len(candidates), -1, False)
        self.lib.llama_sampler_apply(sampler, ctypes.byref(array))

    def _made(self, schema: str) -> Any:
        if schema not in self.grammars:
            made = self.lib.llama_sampler_init_grammar(self.words, self.written(schema).encode(), b"root")
            assert made, f"llama.cpp makes no grammar of {schema}"
            self.grammars[schema] = made
        return self.grammars[schema]

    def held(self, prompts: list[list[int]], schema: Any, count: int) -> list[list[int]]:
        """As `generate`, but sequences end."""
        for sampler in self.samplers.values():
            self.lib.llama_sampler_free(sampler)
        self.samplers = {}
        for sequence in range(len(prompts)) if schema is not None else ():
            self.samplers[sequence] = self.lib.llama_sampler_clone(self._made(json.dumps(schema)))
        self.lib.llama_memory_clear(self.memory, True)
        last = [len(prompt) - 1 for prompt in prompts]
        latest = self.compute([(token, at, i, at == last[i]) for i, prompt in enumerate(prompts)
                               for at, token in enumerate(prompt)])  # fmt: skip
        found = [[latest[i]] for i in range(len(prompts))]
        while rows := [
            (tokens[-1], last[i] + len(tokens), i, True) for i, tokens in enumerate(found)
            if len(tokens) < count and (schema is None or tokens[-1] != self.end)
        ]:  # fmt: skip
            for i, token in self.compute(rows).items():
                found[i].append(token)
        return found


def llama(job: dict[str, Any]) -> Engine:
    made = Held(job)
    return made.held, made.end


ENGINES: dict[str, Callable[[dict[str, Any]], Engine]] = {"quire": quire, "vllm": vllm, "llama": llama}


def main(job_path: str, result_path: str) -> None:
    """The fastest run of each workload, after one that isn't counted."""
    job = json.loads(Path(job_path).read_text())
    os.environ["OMP_NUM_THREADS"] = str(job["threads"])
    generate, end = ENGINES[job["engine"]](job)
    clock = time.process_time if job["threads"] == 1 else time.perf_counter
    results = []
    for one in job["workloads"]:
        generate(one["prompts"], one["schema"], 4)
        best: dict[str, Any] = {"seconds": float("inf")}
        for _ in range(job["repeats"]):
            before, wall, began = others_seconds(), time.perf_counter(), clock()
            found = generate(one["prompts"], one["schema"], job["count"])
            seconds, wall = clock() - began, time.perf_counter() - wall
            others = max(0.0, others_seconds() - before) / wall
            if seconds < best["seconds"]:
                best = {"seconds": seconds, "found": found, "end": end, "others": others}
        results.append(best)
        print(f"  {job['engine']}, {one['name']}: {best['seconds']:.3f} s", file=sys.stderr, flush=True)
    Path(result_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
