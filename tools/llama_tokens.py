"""llama.cpp's likeliest tokens for tools/compare_tokens.py, in llama.cpp's environment: greedy, or behind given tokens.

usage: llama_tokens.py JOB.json RESULT.json

Each prompt is one batch, each token behind it one call. A margin is how far the likeliest token's logit is above the
next one's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy

CONTEXT = 1024


class Llama:
    """A file's model. `defaults`: KV in F16 and flash attention, as llama.cpp chooses; else KV in F32 and neither.
    Weights aren't repacked: this version's products of repacked ones break on processors with AMX."""

    def __init__(self, path: str, threads: int, defaults: bool) -> None:
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: llama.cpp calls it
        llama_cpp.llama_log_set(self.silent, None)
        llama_cpp.llama_backend_init()
        settings = llama_cpp.llama_model_default_params()
        settings.n_gpu_layers, settings.use_extra_bufts = 0, False
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), settings)
        assert self.model, f"llama.cpp can't load {path}"
        room = llama_cpp.llama_context_default_params()
        room.n_ctx = room.n_batch = CONTEXT
        room.n_threads = room.n_threads_batch = threads
        if not defaults:
            room.type_k = room.type_v = llama_cpp.GGML_TYPE_F32
            room.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.context = llama_cpp.llama_init_from_model(self.model, room)
        assert self.context, "llama.cpp makes no context"
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)

    def ids(self, text: str) -> list[int]:
        """A text's tokens, those of control among them."""
        data = text.encode()
        found = (llama_cpp.llama_token * (len(data) + 8))()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), found, len(found), True, True)
        return list(found[:count])

    def next(self, tokens: Sequence[int], begin: int) -> tuple[int, float]:
        """The likeliest token behind these, which begin at this position, and its margin."""
        self.batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self.batch.token[i], self.batch.pos[i], self.batch.n_seq_id[i] = token, begin + i, 1
            self.batch.seq_id[i][0], self.batch.logits[i] = 0, i == len(tokens) - 1
        code = llama_cpp.llama_decode(self.context, self.batch)
        assert code == 0, f"llama_decode says {code}"
        size = llama_cpp.llama_vocab_n_tokens(self.vocab)
        found = llama_cpp.llama_get_logits_ith(self.context, len(tokens) - 1)
        logits = numpy.ctypeslib.as_array(found, (size,))
        second, first = numpy.partition(logits, -2)[-2:]
        return int(logits.argmax()), float(first - second)

    def continued(self, ids: Sequence[int], count: int, given: Sequence[int] | None) -> dict[str, Any]:
        """Up to `count` tokens, greedy, to the first that ends a text; or what is likeliest behind those given."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        token, margin = self.next(ids, 0)
        tokens, margins = [token], [margin]
        while len(tokens) < (count if given is None else len(given)):
            last = tokens[-1] if given is None else given[len(tokens) - 1]
            if given is None and llama_cpp.llama_vocab_is_eog(self.vocab, last):
                break
            token, margin = self.next([last], len(ids) + len(tokens) - 1)
            tokens.append(token)
            margins.append(margin)
        return {"ids": list(ids), "tokens": tokens, "margins": margins}


def main(job_path: str, result_path: str) -> None:
    job = json.loads(Path(job_path).read_text())
    model = Llama(job["model"], job["threads"], job["defaults"])
    prompts = [model.ids(prompt) if isinstance(prompt, str) else prompt for prompt in job["prompts"]]
    given = job["behind"] or [None] * len(prompts)
    found = [model.continued(ids, job["count"], tokens) for ids, tokens in zip(prompts, given, strict=True)]
    Path(result_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
