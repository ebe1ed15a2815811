"""What a process on a CPU takes at most beside its weights and its KV memory, over four kinds of work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.cpu.library_loader import library

MOST = 250e6  # bytes beside weights and KV memory
WORK = """
import json, random
from pathlib import Path
from quire import LLM, SamplingParams

def kib(name):
    return int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

llm = LLM(model_config="llama-125m", dummy_weights=True, device="cpu", dtype="bfloat16", kv_gib=0.25, threads=2,
          max_model_len=2112, max_num_seqs=32, skip_tokenizer_init=True)
def draw(count):
    return [random.randrange(10, 32000) for _ in range(count)]

for requests, shared, own, output in ((1, 0, 128, 128), (1, 0, 2048, 1), (32, 0, 128, 128), (32, 512, 32, 32)):
    common = draw(shared)
    prompts = [{"prompt_token_ids": common + draw(own)} for _ in range(requests)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
    llm.generate(prompts, params, use_tqdm=False)
plan = llm.built.memory_plan
print(json.dumps([1024 * kib("VmHWM"), plan.weight_bytes, plan.kv_bytes]))
"""


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a process took at most")
@pytest.mark.skipif(library() is None, reason="there are no kernels for this CPU (no compiler?)")
def test_a_process_takes_little_beside_weights_and_kv(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    peak, weights, kv = json.loads(done.stdout.splitlines()[-1])
    beside = peak - weights - kv
    assert beside < MOST, f"{beside / 1e6:.0f} MB beside {weights / 1e6:.0f} of weights and {kv / 1e6:.0f} of KV"
