"""Engines for measurements: small models, which are a shape with dummy weights, given to the engine as a folder with a
config.json; and the clock of an engine's device."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.config import EngineConfig
from quire.core.engine import Engine
from quire.models.named_configs import named_config
from quire.startup.build import BuiltEngine, build

if TYPE_CHECKING:
    from quire.worker.model_runner import ModelRunner


@contextmanager
def built(config: EngineConfig, shape: Mapping[str, Any] | None = None) -> Iterator[BuiltEngine]:
    """Return an engine for `config`; with `shape` (the differences from llama-125m) a model of that shape with dummy
    weights."""
    if shape is None:
        made = build(config)
    else:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps({**named_config("llama-125m"), **shape}))
            made = build(replace(config, model=folder, dummy_weights=True, skip_tokenizer_init=True))
    try:
        yield made
    finally:
        made.engine.close()


def local_runner(engine: Engine) -> ModelRunner:
    """Return the runner of an engine that runs its model in this process."""
    return cast("ModelRunner", engine.runner)


def clock_of(runner: Any) -> Callable[[], float]:
    """Return the process's CPU clock if a CPU runner uses one thread, else the wall clock: other processes don't affect
    the former."""
    import torch

    alone = runner.device.type == "cpu" and torch.get_num_threads() == 1
    return time.process_time if alone else time.perf_counter


def wait_for_device(device: Any) -> None:
    """Wait until a GPU has done all work; do nothing on a CPU."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
