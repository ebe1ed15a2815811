"""The program of a rank: build a part of a model, and carry out the orders of the engine."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from typing import Any

from quire.distributed.rank_messages import InitMessage
from quire.distributed.rank_worker import NO_MULTICAST_ENVIRONMENT, PR_SET_PDEATHSIG, RunnerBuilder, serve
from quire.distributed.shared_ring import RingReader
from quire.distributed.triton_cache import triton_cache_environment
from quire.ipc.child_process import exit_now, ignore_signals
from quire.ipc.garbage_collection import freeze_loaded_objects


def build_runner(hello: InitMessage, rank_device: Any = None) -> Any:
    """Build the runner of a rank's part of a model, on the GPU `rank_device` if there is one."""
    from quire.startup.loader import build_rank_runner

    return build_rank_runner(hello, rank_device)


def open_device(hello: InitMessage) -> Any:
    """Open the rank's GPU."""
    from quire.distributed.rank_devices import RankDevice

    os.environ.update(triton_cache_environment())
    return RankDevice(hello)


def main(build: RunnerBuilder | None = None, device_opener: Callable[[InitMessage], Any] | None = None) -> None:
    """Run the rank. The arguments are its number, and the descriptors of its connection, of the ring and of its event.
    By default a model is built: then torch is imported while the engine's process reads the checkpoint."""

    def built(hello: InitMessage, **kwargs: Any) -> Any:
        runner = (build or build_runner)(hello, **kwargs)
        freeze_loaded_objects()
        return runner

    gc.disable()  # while loading
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with suppress(AttributeError, OSError):  # the signal ends a stopped process too
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    ignore_signals()
    if build is None:
        threading.Thread(target=import_module, args=("torch",), name="quire-imports", daemon=True).start()
    os.environ.update(NO_MULTICAST_ENVIRONMENT)
    rank, connection, ring, event = map(int, sys.argv[1:5])
    reader = RingReader(ring, event, rank)
    exit_now(serve(built, socket.socket(fileno=connection), reader, partial(os._exit, 1), device_opener or open_device))
