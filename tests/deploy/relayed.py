"""Replicas of Serve without Serve: its handle is replaced, calls are methods of this process."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import echo_service
import pytest
from echo_service import Echo

from quire.async_llm import AsyncLLM
from quire.config import EngineConfig
from quire.ipc.child_process import ChildProcess
from quire.ipc.handshake import EngineInitMessage
from quire.ipc.process_client import ProcessEngineClient
from quire.protocol.sampling_params import SamplingParams
from quire.protocol.shared_host import SharedHostMemory
from quire.startup.engine_process import create_shared_memory

ray_serve = pytest.importorskip("quire.deploy.ray_serve", exc_type=ImportError)
PROGRAM = str(Path(__file__).parents[1] / "echo_engine.py")
MODEL = {"model": "echo", "revision": "None"}


class Response:
    """What a call returns: a task, or a stream."""

    def __init__(self, work: Any) -> None:
        self.is_stream = hasattr(work, "__anext__")
        self.work = work if self.is_stream else asyncio.ensure_future(work)
        self.next: asyncio.Task[bytes] | None = None

    def __await__(self) -> Any:
        return self.work.__await__()

    def __aiter__(self) -> Response:
        return self

    async def __anext__(self) -> bytes:
        self.next = asyncio.ensure_future(anext(self.work))
        return await self.next

    def cancel(self) -> None:
        """Cancel the call."""
        target = self.next if self.is_stream else self.work
        if target is not None:
            target.cancel()


class Handle:
    """A DeploymentHandle whose router is NamedReplicaRouter."""

    def __init__(self, **replicas: Any) -> None:
        self.replicas, self.draining = replicas, set[str]()
        self.calls = list[str]()

    def options(self, method_name: str, stream: bool = False) -> Any:
        """Return a handle of a method."""
        handle = self

        class Method:
            def remote(self, name: str, *args: Any) -> Response:
                """Call the method of the named replica, or of any."""
                handle.calls.append(method_name)
                there = handle.replicas.keys() - handle.draining
                at = name if name in there else min(there)
                return Response(getattr(handle.replicas[at], method_name)(name, *args))

        return Method()


def replicas(names: str, role: str = "", address: str = "", **built: Any) -> dict[str, Any]:
    """Return replicas with an echo engine each, on the running loop. With a role they share host memory."""
    recipe = echo_service.built(Echo(**built.pop("echo", {})), **{"kv_tokens": 4096, **built}).recipe
    clients = list[ProcessEngineClient]()
    for _ in names:
        memory, shared = create_shared_memory() if role else None, None
        if memory is not None:
            shared = SharedHostMemory(memory.fileno(), 0, ray_serve.SHARED_PARTS[role], echo_service.HOST_BYTES)
        clients.append(ProcessEngineClient(ChildProcess(1, ("-P", PROGRAM, json.dumps(recipe)), shared_memory=memory)))
        clients[-1].send_init(EngineInitMessage(EngineConfig(), (), 60.0, False, logging.WARNING, True, 0, shared))
    for client in clients:
        client.wait_ready()
    over = ray_serve.EngineReplica.over
    return {name: over(name, client, MODEL, role, address) for name, client in zip(names, clients)}


async def complete(llm: AsyncLLM, prompt: list[int], tokens: int = 5) -> list[int]:
    """Return the tokens of a request."""
    found = list[int]()
    async for output in await llm.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)):
        found += output.tokens
    return found
