"""`quire env`: versions and hardware, for bug reports. Of the environment it shows only which of a few variables are
set."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from quire import __version__

PACKAGES = (
    "torch", "numpy", "safetensors", "tokenizers", "huggingface-hub", "jinja2", "transformers", "triton", "pydantic",
    "fastapi", "starlette", "uvicorn", "prometheus-client", "pyyaml",
)  # fmt: skip
CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8",
                "bf16", "sve")  # fmt: skip
VARIABLES = (
    "HF_HOME", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "QUIRE_CPU_KERNELS", "QUIRE_SHARE_GPU",
    "QUIRE_STAGE_NCCL", "TRITON_CACHE_DIR",
)  # fmt: skip


def env(args: argparse.Namespace) -> int:
    """Print facts, one per line."""
    for name, value in facts():
        print(f"{name:<18} {value}")
    return 0


def facts() -> list[tuple[str, str]]:
    """Return (name, value) pairs."""
    import psutil
    import torch

    rows = [("quire", __version__), ("python", sys.version.split()[0]), ("platform", platform.platform())]
    rows += [(package, installed_version(package) or "not installed") for package in PACKAGES]
    model, features = cpu(CPU_FEATURES)
    cores = f"{psutil.cpu_count(logical=False)} cores, {psutil.cpu_count()} threads"
    rows += [("cpu", f"{model} ({cores})"), ("cpu features", " ".join(features) or "-")]
    rows += [
        ("torch threads", f"{torch.get_num_threads()}"),
        ("torch cpu kernels", torch.backends.cpu.get_cpu_capability()),
        ("quire cpu kernels", _kernels()),
    ]
    rows += [("memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB")]
    rows += [("cuda", f"torch built for {torch.version.cuda or 'CPU only'}")]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            size = f"{device.total_memory / 2**30:.0f} GiB, sm_{device.major}{device.minor}"
            rows.append((f"gpu {i}", f"{device.name}, {size}, {_tiles(i)}"))
    rows += [("set", ", ".join(name for name in VARIABLES if name in os.environ) or "-")]
    return rows


def _kernels() -> str:
    from quire.kernels.cpu.library_loader import library, missing_reason

    kernels = library()
    return kernels.path.stem if kernels is not None else f"none: {missing_reason()}"


def _tiles(number: int) -> str:
    """Return the name of the card whose table of tiles a GPU uses, for the list of GPUs."""
    import torch

    try:
        from quire.kernels.triton.tiles import measured_card

        return f"tiles of {measured_card(torch.device('cuda', number)).gpu}"
    except ImportError:  # Triton
        return "no Triton"


def installed_version(package: str) -> str | None:
    """Return the version of a package, or None if it isn't installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu(features: Sequence[str]) -> tuple[str, list[str]]:
    """Return the name of the CPU, and those of `features` that it has, as Linux reports them."""
    info: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            info.setdefault(name.strip(), value.strip())
    except OSError:
        return platform.processor() or platform.machine(), []
    flags = set(info.get("flags", info.get("Features", "")).split())
    name = info.get("model name") or platform.processor() or platform.machine()
    return name, [feature for feature in features if feature in flags]
