"""500 mutated checkpoints: each starts or is a StartupError, soon and in bounded memory, and no code of it runs. From a
seed comes a folder that differs from the bundled model's in what a stranger may have changed.

As a program it loads each folder that a line of its input names and answers with a line of JSON: what came of it, the
seconds, and the most memory so far.
"""

from __future__ import annotations

import json
import os
import random
import resource
import select
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import quire

COUNT = 500
SECONDS = 10.0
PEAK_KIB = 2 << 20  # for torch, and for one model after another
SECRET = "canary-of-the-environment"
SOURCE = Path(quire.__file__).parent / "assets" / "tiny"
CONFIGS = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json",
           "special_tokens_map.json", "model.safetensors.index.json")  # fmt: skip
ODD: list[Any] = [
    [], {}, [[]], {"a": {}}, None, True, False, -1, 0, 1, 2**31 - 1, 2**63, 10**4000, -(10**400), 1e308, 1e-320, -1.5,
    float("nan"), float("inf"), "", "x" * 100_000, "\ud800", "\x00", "a/b", "../../etc/passwd", "9" * 5000,
    ["a", ["b"]], [1, None], "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{% for a in range(65536) %}{% for b in range(65536) %}{% endfor %}{% endfor %}",
    "{{ '%.1999999999f' | format(1.0) }}", ["x"] * 10_000,
]  # fmt: skip
MORE = {  # what the bundled model's files don't say, and others' do
    "config.json": {
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0},
        "rope_theta": 1e4, "layer_types": ["full_attention"], "sliding_window": 8, "head_dim": 8, "dtype": "float32",
        "max_window_layers": 1, "use_sliding_window": True, "quantization_config": {}, "attention_bias": False,
        "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, "eos_token_id": [1, 2],
    },
    "generation_config.json": {"temperature": 0.5, "top_p": 0.5, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.5,
                               "eos_token_id": [1]},
    "tokenizer_config.json": {
        "added_tokens_decoder": {"9" * 5000: {"content": "<a>"}, "7": {"content": "<b>", "special": True}},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"template": "x"}],
        "auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil", "bos_token": {"content": "<s>"},
    },
    "special_tokens_map.json": {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": "<p>"},
    "model.safetensors.index.json": {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}},
}  # fmt: skip


def mutate(folder: Path, seed: int, canary: Path) -> str:
    """Make `folder` a mutated copy; code in it would create `canary`. Says what was done."""
    rng = random.Random(seed)
    shutil.copytree(SOURCE, folder)
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\nclass Evil: pass\n")
    (folder / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR.")
    done = []
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        change = rng.choice([_value, _value, _value, _value, _bytes, _bytes, _file])
        done.append(change(folder, rng, canary))
    return "; ".join(done)


def _value(folder: Path, rng: random.Random, canary: Path) -> str:
    name = rng.choice(CONFIGS)
    path = folder / name
    if os.path.lexists(path) and not _plain(path):
        return "nothing"
    try:
        value = json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:
        return "nothing"
    if isinstance(value, dict) and rng.random() < 0.7:
        value |= json.loads(json.dumps(MORE.get(name, {})))
    places = list(_places(value))
    if not places:
        return "nothing"
    holder, key = rng.choice(places)
    holder[key] = json.loads(json.dumps(rng.choice(ODD)).replace("CANARY", str(canary)))
    path.write_text(json.dumps(value))
    return f"{name}: {str(key)[:40]} is {str(holder[key])[:40]!r}"


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, inner in list(entries)[:40]:
        yield value, key
        yield from _places(inner)


def _plain(path: Path) -> bool:
    """A file that can be read and written here without harm."""
    return not path.is_symlink() and path.is_file() and path.stat().st_size < 64 << 20


def _bytes(folder: Path, rng: random.Random, canary: Path) -> str:
    path = rng.choice([path for path in sorted(folder.iterdir()) if _plain(path)])
    data = bytearray(path.read_bytes())
    how = rng.choice(["cut", "flip", "flip", "insert", "empty", "deep"])
    at = rng.randrange(min(len(data), rng.choice([16, 4096, 1 << 30])) or 1)
    if how == "cut":
        del data[at:]
    elif how == "flip" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif how == "insert":
        data[at:at] = rng.randbytes(rng.choice([1, 8, 1000]))
    elif how == "empty":
        data = bytearray()
    else:
        data = bytearray(b"[" * 100_000)
    path.write_bytes(data)
    return f"{path.name}: {how} at {at}"


def _file(folder: Path, rng: random.Random, canary: Path) -> str:
    name = rng.choice([*CONFIGS, "chat_template.jinja", "model.safetensors"])
    path = folder / name
    path.unlink(missing_ok=True)
    how = rng.choice(["gone", "environ", "zero", "fifo", "folder", "dangling", "circle", "sparse", "passwd"])
    targets = {"environ": "/proc/self/environ", "zero": "/dev/zero", "dangling": "absent", "circle": name,
               "passwd": "/etc/passwd"}  # fmt: skip
    if how in targets:
        path.symlink_to(targets[how])
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    return f"{name}: {how}"


def attempt(folder: str) -> dict[str, Any]:
    """Load a checkpoint and let it generate a token."""
    from quire.errors import InputError, StartupError
    from quire.llm import LLM
    from quire.protocol.sampling_params import SamplingParams

    began, kind, message = time.monotonic(), "StartupError", ""
    try:
        with LLM(folder, kv_gib=0.01, warm_up=False) as llm:
            kind = "started"
            llm.generate("Once", SamplingParams(max_tokens=1), use_tqdm=False)
            if llm.prompts.chat_template is not None:
                llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(max_tokens=1), use_tqdm=False)
    except (StartupError, InputError) as error:  # the latter of a template, or of a prompt without tokens
        message = str(error)
    except BaseException as error:
        kind, message = f"unknown {type(error).__name__} after {kind}", str(error)[:300]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"kind": kind, "message": message, "seconds": time.monotonic() - began, "peak_kib": peak}


class Loader:
    """A process that loads checkpoints, one after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "QUIRE_ADMIN_KEY": SECRET, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, env=environment)  # fmt: skip
        self.load(SOURCE, 60)  # imports torch

    def load(self, folder: Path, seconds: float) -> dict[str, Any]:
        """What came of it; a kind "hang" after so many seconds, "ended" for a process that did."""
        self._process.stdin.write(f"{folder}\n".encode())
        self._process.stdin.flush()
        there = select.select([self._process.stdout], [], [], seconds)[0]
        if there and (line := self._process.stdout.readline()):
            return json.loads(line)
        return {"kind": "ended" if there else "hang", "message": "", "seconds": 0 if there else seconds, "peak_kib": 0}

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_mutated_checkpoints(tmp_path: Path) -> None:
    loader = Loader()
    canary, kinds, worst, peak = tmp_path / "ran", Counter[str](), 0.0, 0
    failed = []
    for seed in range(COUNT):
        folder = tmp_path / "model"
        done = mutate(folder, seed, canary)
        told = loader.load(folder, SECONDS)
        kinds[told["kind"]] += 1
        worst, peak = max(worst, told["seconds"]), max(peak, told["peak_kib"])
        said = told["message"]
        if told["kind"] not in ("started", "StartupError") or SECRET in said or len(said) > 1000 or canary.exists():
            failed.append((seed, done, told))
            print(failed[-1], flush=True)
            if told["kind"] in ("hang", "ended"):
                loader.close()
                loader = Loader()
        shutil.rmtree(folder)
    loader.close()
    print(dict(kinds), f"worst {worst:.1f} s, peak {peak >> 10} MiB")
    assert not failed
    assert peak < PEAK_KIB


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    for line in sys.stdin:
        print(json.dumps(attempt(line.rstrip("\n"))), file=out, flush=True)
