"""lm-eval-harness over a task of a local file: `python running_lm_eval.py URL TOKENIZER DATA`. Prints, as JSON, what
each of its models for HTTP got: log-likelihoods with whether they are the greedy ones, and texts."""

from __future__ import annotations

import json
import sys
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI


def evaluate(model: Any, data: str, *kinds: str, **more: Any) -> dict[str, Any]:
    """The responses to each kind of request."""
    task = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}, "test_split": "test"}
    question = {"doc_to_text": "{{question}}", "metadata": {"version": 1}}
    shapes = {
        "loglikelihood": {
            "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        },
        "generate_until": {
            "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
            "metric_list": [{"metric": "exact_match"}], "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
        },
    }  # fmt: skip
    tasks: Any = [{"task": kind, **task, **question, **shapes[kind]} for kind in kinds]
    samples = simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, **more)["samples"]
    return {kind: [sample["filtered_resps"] for sample in samples[kind]] for kind in kinds}


if __name__ == "__main__":
    url, tokenizer, data = sys.argv[1:]
    to: Any = {"model": "echo", "max_retries": 1, "max_length": 4096, "tokenizer": tokenizer}
    texts = LocalCompletionsAPI(base_url=f"{url}/completions", tokenizer_backend="huggingface", **to)
    chats = LocalChatCompletion(base_url=f"{url}/chat/completions", **to)
    found = evaluate(texts, data, "loglikelihood", "generate_until")
    found["chats"] = evaluate(chats, data, "generate_until", apply_chat_template=True)["generate_until"]
    print(json.dumps(found))
