"""Flags of `quire bench` that can't be: refused with the flag, its value and the limit."""

from __future__ import annotations

import pytest
import torch

from quire.bench import main
from quire.errors import StartupError

RANK = "kernels --model-config llama3-70b"
URL = "serve --url http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("throughput --repeat 0", "--repeat is 0"),
        ("throughput --workload fixed:4000:200@1 --kv-tokens 4096", "4200 tokens, but sequences may have"),
        ("throughput --n 3 --best-of 2", "best_of must be at least n"),
        ("throughput --beam-width 65", "beam_width must be between 1 and 64"),
        ("serve --rate -1", "--rate is -1.0"),
        ("serve --concurrency 0", "--concurrency is 0"),
        (f"{URL} --clients 0", "--clients is 0"),
        (f"{URL} --clients 65", "--clients is 65"),
        (f"{URL} --n 2", "Measure those in this process"),
        (f"{URL} --beam-width 1", "Measure those in this process"),
        (URL, "Start one with: quire serve"),
        ("serve --url ftp://x", "Expected http://HOST:PORT"),
        ("control --sequences 0", "--sequences is 0"),
        ("control --sequences 65536 --contexts 1000000", "tokens in all"),
        ("control --beams 3", "even number"),
        ("beams --beam-width 0", "between 1 and 64"),
        ("beams --repeat 0", "at least 1"),
        ("histories --beam-width 37", "between 1 and 36"),
        ("histories --prompts 0", "below 1"),
        ("histories --steps 0", "below 1"),
        ("allocator --repeats 0", "--repeats is 0"),
        ("memory --device cpu --max-model-len 1", r"no room for an output.*--max-model-len"),
        ("parallel --minutes 0", "--minutes is 0"),
        ("parallel --ranks 2 64", r"--ranks is \[2, 64\]. Give numbers between 1 and 63"),
        *((f"preemption --compare --load {load}", "there is no")
          for load in ("fixed:20:30@6", "fixed:20:30@6/", "fixed:20:30@6/x", "fixed:20@6/100", "/100")),
        ("wire --repeat 0", "--repeat is 0"),
        ("wire --ranks 64", "Give numbers between 1 and 63"),
        ("kernels --family norms", r"no family 'norms'.*copies"),
        (f"{RANK} --tp 3", "--tp is 3, which doesn't divide the model"),
        (f"{RANK} --tp 0", "--tp is 0"),
        (f"{RANK} --tp 2 --family copies", r"no family of --tp and --model-config 'copies'.*decodes, linears"),
        (f"{RANK} --tp 2 --family kv", r"no family of --tp and --model-config 'kv'.*decodes, linears"),
        ("kernels --model-config opt-13b", "products aren't those of a LlamaForCausalLM"),
        ("kernels --model-config llama", "there is no model config 'llama'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(flags: str, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        main(flags.split())


@pytest.mark.parametrize(
    ("entry", "message"),
    [("kernels", r"kernels measures a GPU.*Run it beside a GPU"), ("profile", "finds none"), ("mixed", "finds none")],
)
def test_what_needs_a_gpu_says_so(entry: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match=message):
        main([entry])
