"""The application in a real cluster of four nodes: it follows the load without a failed request, survives the end of a
node and of the API server, and refuses what can't be."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import httpx
import psutil
import pytest
from waiting import wait_until, wait_until_async

from quire import LLM, SamplingParams
from quire.distributed.ray_driver import LOCAL_CLUSTER_ENVIRONMENT

TESTS = Path(__file__).parents[1]
PATH = os.pathsep.join(filter(None, [str(TESTS.parent / "src"), *sys.path]))
SETTINGS = ("--device", "cpu", "--dtype", "float32", "--kv-tokens", "8192", "--threads", "1", "--max-num-seqs", "2")
LOST = "the engine stopped: requests in progress are lost"

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed: pip install 'quire[ray-serve]'"),
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:Using extra keyword arguments on .Field.:DeprecationWarning"),  # Ray's
]


class Nodes:
    """The program ray_nodes.py, and the environment of those who use its cluster."""

    def __init__(self, folder: str) -> None:
        token = {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {
            **os.environ,
            **LOCAL_CLUSTER_ENVIRONMENT,
            **token,
            "PYTHONPATH": PATH,
            "OMP_NUM_THREADS": "1",
        }
        program = [sys.executable, str(TESTS / "deploy" / "ray_nodes.py"), folder]
        self.process = subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=self.environment
        )
        self.address = read_line(self.process.stdout, 120)

    def kill(self) -> None:
        """Kill a node with an engine."""
        assert self.process.stdin is not None
        self.process.stdin.write("kill\n")
        self.process.stdin.flush()
        assert read_line(self.process.stdout, 30) == "1", "no node has an engine alone"


def read_line(stream: IO[str] | None, seconds: float) -> str:
    """Return the next line of a program, which must come in time."""
    assert stream is not None
    assert select.select([stream], [], [], seconds)[0], "nothing is said"
    return stream.readline().strip()


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Yield a cluster."""
    with TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets are short
        cluster = Nodes(folder)
        try:
            yield cluster
        finally:
            cluster.process.communicate(timeout=60)


def deploy(cluster: Nodes, *flags: str, **environment: str) -> subprocess.Popen[str]:
    """Run `quire deploy ray`."""
    command = [sys.executable, "-m", "quire", "deploy", "ray", *SETTINGS, "--ray-address", cluster.address, *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**cluster.environment, **environment}
    )


@contextmanager
def application(cluster: Nodes, *flags: str) -> Iterator[str]:
    """Yield the URL of an application."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = deploy(cluster, "--http-port", str(port), *flags)
    try:
        line = read_line(process.stdout, 120)
        assert line.startswith(f"quire serves at http://127.0.0.1:{port}"), (line, process.stderr.read())
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=90)
        assert process.returncode == 0, errors


def num_up(url: str) -> int:
    """Return how many engines serve."""
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return sum(line.startswith("quire_engine_up{") and line.endswith(" 1.0") for line in text.splitlines())


async def complete(http: httpx.AsyncClient, prompt: str, tokens: int, begun: list[str]) -> tuple[int, list[str]]:
    """Return how many tokens a streamed request got according to its usage, and its errors. Add `prompt` to `begun`
    when the first token is there."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    count, errors = 0, []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return 0, [(await response.aread()).decode()]
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                data = json.loads(line.removeprefix("data: "))
                begun += [prompt] * (prompt not in begun)
                errors += [json.dumps(data["error"])] if "error" in data else []
                count = (data.get("usage") or {}).get("completion_tokens", 0)
    return count, errors


def call_without_token(port: int) -> str:
    """Return the error of a call to a port of a replica of Serve by a program that has no token."""
    import grpc
    from ray.serve.generated.serve_pb2 import ASGIRequest
    from ray.serve.generated.serve_pb2_grpc import ASGIServiceStub

    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            ASGIServiceStub(channel).HandleRequest(ASGIRequest(), timeout=20)
        except grpc.RpcError as error:
            return str(error.code())
    return "none"


def test_replicas_follow_the_load_and_no_request_fails() -> None:
    async def load(url: str) -> list[int]:
        """Keep 12 requests in flight until there are 3 replicas, then one until there is one. Return the numbers of
        replicas seen."""
        seen, failed, at_once, end = [1], list[str](), 12, time.monotonic() + 300

        async def client(http: httpx.AsyncClient, number: int) -> None:
            body = {"prompt": f"{number} Once upon a time", "max_tokens": 300, "ignore_eos": True}
            while number < at_once:
                response = await http.post("/v1/completions", json=body)
                if response.status_code != 200 or response.json()["usage"]["completion_tokens"] != 300:
                    failed.append(response.text)

        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            clients = [asyncio.ensure_future(client(http, i)) for i in range(12)]
            while at_once and time.monotonic() < end:
                await asyncio.sleep(1)
                up = await asyncio.to_thread(num_up, url)
                if up != seen[-1]:
                    seen.append(up)
                if up == 3:
                    at_once = 1
                elif up == 1 and len(seen) > 1:
                    at_once = 0
            at_once = 0
            await asyncio.gather(*clients)
        assert failed == []
        return seen

    with nodes() as cluster:
        flags = ("--min-replicas", "1", "--max-replicas", "3", "--target-waiting", "1", "--upscale-delay", "0",
                 "--downscale-delay", "5")  # fmt: skip
        with application(cluster, *flags) as url:
            seen = asyncio.run(load(url))
    assert seen[0] == seen[-1] == 1
    assert max(seen) == 3


def test_a_node_and_the_api_server_end() -> None:
    """Of a node's requests those without a token move, and the others get one error. A new API server finds the
    engines, and their requests of the former one are gone."""

    async def load(url: str, cluster: Nodes) -> list[tuple[int, list[str]]]:
        async with httpx.AsyncClient(base_url=url, timeout=300) as http:
            begun = list[str]()
            tasks = [asyncio.ensure_future(complete(http, f"{i} Once upon a time", 2500, begun)) for i in range(12)]
            await wait_until_async(lambda: len(begun) == 6, "each engine runs two", 60)
            await asyncio.to_thread(cluster.kill)
            return await asyncio.gather(*tasks)

    with nodes() as cluster, application(cluster, "--min-replicas", "3") as url:
        wait_until(lambda: num_up(url) == 3, "all engines serve", 60)
        replicas = [process for process in psutil.process_iter(["cmdline"])
                    if " ".join(process.info["cmdline"] or ()).startswith("ray::ServeReplica:quire")]  # fmt: skip
        sockets = [one for replica in replicas for one in replica.net_connections("tcp")]
        open_ports = [one.laddr.port for one in sockets
                      if one.status == psutil.CONN_LISTEN and one.laddr.ip in ("::", "0.0.0.0")]  # fmt: skip
        assert {call_without_token(port) for port in open_ports} == {"StatusCode.UNAUTHENTICATED"}
        ends = asyncio.run(load(url, cluster))
        failed = [errors for _, errors in ends if errors]
        assert len(failed) == 2, ends
        assert all(
            len(errors) == 1 and "the engine stopped: requests in progress are lost" in errors[0] for errors in failed
        ), failed
        assert [count for count, errors in ends if not errors] == [2500] * 10
        [server] = [process for process in psutil.process_iter(["cmdline"])
                    if " ".join(process.info["cmdline"] or ()).startswith("ray::ServeReplica:quire:api")]  # fmt: skip
        server.kill()
        body = {"prompt": "Once upon a time", "max_tokens": 5}

        def answers() -> bool:
            try:
                return httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(lambda: not server.is_running() and answers(), "a new API server answers", 90)


def test_prefill_replicas_hand_pages_over_between_nodes() -> None:
    """Tokens are those of an engine alone, before and after a prefill replica is lost."""
    prompts = [f"{i} Once upon a time, there was a " + "little bird who liked to sing. " * 20 for i in range(4)]

    def complete_all(url: str, salt: str) -> list[str]:
        bodies = [{"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, "cache_salt": salt}
                  for prompt in prompts]  # fmt: skip
        with ThreadPoolExecutor(4) as threads:
            answers = list(threads.map(lambda body: httpx.post(f"{url}/v1/completions", json=body, timeout=90), bodies))
        assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
        return [answer.json()["choices"][0]["text"] for answer in answers]

    def count(url: str, name: str) -> float:
        text = httpx.get(f"{url}/metrics", timeout=30).text
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"quire_prompt_{name}_total")
        )

    with LLM("tiny", device="cpu", dtype="float32", kv_tokens=8192, threads=1) as llm:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    with nodes() as cluster, application(cluster, "--prefill-replicas", "2", "--swap-gib", "0.5") as url:
        wait_until(lambda: num_up(url) == 3, "all engines serve", 60)
        assert complete_all(url, "first") == expected
        assert count(url, "handovers") == 4
        assert count(url, "handover_bytes") > 10**6
        assert count(url, "handover_fallbacks") == 0
        named = "ray::ServeReplica:quire:prefill"
        prefill = [process for process in psutil.process_iter(["cmdline"])
                   if " ".join(process.info["cmdline"] or ()).startswith(named)]  # fmt: skip
        assert len(prefill) == 2
        prefill[0].kill()
        assert complete_all(url, "second") == expected
        wait_until(lambda: num_up(url) == 2, "it is gone", 60)
        wait_until(lambda: num_up(url) == 3, "another one serves", 120)
        before = count(url, "handovers")
        assert complete_all(url, "third") == expected
        assert count(url, "handovers") == before + 4


def test_what_cannot_be_is_refused() -> None:
    with nodes() as cluster:
        started = time.monotonic()
        wrong, large = (
            deploy(cluster, RAY_AUTH_TOKEN="0" * 64),
            deploy(cluster, "--min-replicas", "3", "--prefill-replicas", "6"),
        )
        refusal = wrong.communicate(timeout=100)[1]
        assert "can't be used: " in refusal, refusal
        assert "set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN" in refusal
        errors = large.communicate(timeout=100)[1]
        assert wrong.returncode == large.returncode == 2
        assert "Ray has no room for 9 replicas of 1 CPUs each within 30 s" in errors
        assert "or use fewer replicas (--min-replicas or --prefill-replicas)" in errors
        assert errors.count("1 CPUs and 0 GPUs on 127.0.0.1") == 4, errors
        assert time.monotonic() - started < 60
