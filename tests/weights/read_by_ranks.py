"""What ranks really read of a checkpoint: `read_by_ranks.py OUT`, a JSON document. Of each rank the bytes that it asks
for, as the loader counts them, and those that the system reads from the disk for its process (/proc/self/io), beginning
with nothing of the file in memory: of one rank alone, and of all at a time.

`read_by_ranks.py FOLDER RANK RANKS` is one rank.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.bench.machine import machine
from quire.models import resolve_model_class
from quire.models.named_configs import named_config
from quire.protocol.parallel_layout import UNSHARDED, Shard
from quire.weights.checkpoint_files import SINGLE_FILE, read_config
from quire.weights.loader import load_weights

SHAPE = {
    "num_hidden_layers": 6, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 4096,
}  # fmt: skip


def made(config: dict[str, Any], part: Shard = UNSHARDED) -> Any:
    return resolve_model_class(config)(config, torch.bfloat16, torch.device("cpu"), part)


def publish(folder: Path) -> int:
    """A random checkpoint; returns its bytes."""
    config: dict[str, Any] = {**named_config("llama-125m"), **SHAPE}
    model, tensors = made(config), {}
    parameters = dict(model.named_parameters())
    for name, stored in model.weight_sources().items():
        for tensor, rows in zip(stored.tensors, parameters[name].split(stored.rows)):
            tensors[tensor] = torch.randn(rows.shape, dtype=torch.bfloat16)
    save_file(tensors, folder / SINGLE_FILE)
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / SINGLE_FILE).stat().st_size


def forget(path: Path) -> None:
    """Nothing of the file is in memory."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def from_disk() -> int:
    """Bytes that the system has read from disks for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def loaded(folder: Path, part: Shard) -> dict[str, float]:
    """What a rank reads, as shares of the file."""
    size, model = (folder / SINGLE_FILE).stat().st_size, made(read_config(folder), part)
    before, began, faults = from_disk(), time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    files = load_weights(model, folder)
    for parameter in model.parameters():
        parameter.data.sum()  # what is mapped is read when it is used
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    return {
        "asked": files.read_bytes / size, "from_disk": (from_disk() - before) / size,
        "seconds": time.perf_counter() - began, "pages_mapped": faults,
    }  # fmt: skip


def together(folder: Path, ranks: int, which: range) -> list[dict[str, float]]:
    """The same of some ranks at a time."""
    forget(folder / SINGLE_FILE)
    command = [sys.executable, __file__, str(folder)]
    children = [
        subprocess.Popen([*command, str(rank), str(ranks)], stdout=subprocess.PIPE, text=True) for rank in which
    ]
    return [json.loads(child.communicate()[0]) for child in children]


def measured(folder: Path) -> dict[str, Any]:
    size = publish(folder)
    results = [
        {"ranks": ranks, "alone": together(folder, ranks, range(1))[0],
         "at_a_time": together(folder, ranks, range(ranks))}
        for ranks in (2, 4)
    ]  # fmt: skip
    device = os.stat(folder).st_dev
    ahead = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/queue/read_ahead_kb")
    return {
        "name": "read by ranks", "command": "python tests/weights/read_by_ranks.py OUT", "machine": machine(),
        "other_load": "other work on both cores meanwhile", "file_bytes": size,
        "read_ahead_kib": int(ahead.read_text()) if ahead.exists() else None, "results": results,
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    if len(sys.argv) == 4:
        print(json.dumps(loaded(Path(sys.argv[1]), Shard(int(sys.argv[2]), int(sys.argv[3])))))
    else:
        with tempfile.TemporaryDirectory() as place:
            document = measured(Path(place))
        Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
