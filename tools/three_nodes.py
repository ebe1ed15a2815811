"""Show one model on three nodes, as a transcript: `python tools/three_nodes.py --out FILE.json` (as root).

The nodes are network namespaces of this host with a Ray cluster, and there is a spare one. First the model's layers are
divided among three nodes, and one node is cut off; then Ray Serve runs one to three engines as the load demands
(tools/follow_load.py), and one node is cut off again. FILE.png shows replicas and latencies over time."""

from __future__ import annotations

import argparse
import json
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests"), str(ROOT / "src")]

import psutil  # noqa: E402
from ray_namespaces import NamespaceCluster, can_make_namespaces  # type: ignore[import-not-found]  # noqa: E402

from quire.bench.document import write  # noqa: E402

CUT = "a node is cut off"
RAYS = r"\(raylet\)|^\t"  # what Ray prints of nodes that are gone
SECONDS = 120.0  # for a command, a start or a recovery
SERVE = "--device cpu --dtype float32 --threads 1 --ray-address {address}"
PROMPT = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


class Transcript:
    """Runs commands on node 0, and keeps what they are and print."""

    def __init__(self, cluster: NamespaceCluster) -> None:
        self.cluster, self.lines = cluster, list[str]()

    def say(self, text: str) -> None:
        """Add lines, and print them."""
        self.lines += text.rstrip().splitlines()
        print(text.rstrip(), flush=True)

    def run(self, command: str, seconds: float = SECONDS) -> str:
        """Run a command to its end."""
        self.say(f"$ {command}")
        arguments = self.cluster.inside(0, *program(command))
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=seconds, cwd=self.cluster.folder,
                              env=self.cluster.environment())  # fmt: skip
        self.say(done.stdout + done.stderr)
        return done.stdout

    @contextmanager
    def server(self, command: str) -> Iterator[Path]:
        """Run a server, and yield its log once it serves."""
        self.say(f"$ {command} &")
        log = self.cluster.folder / f"server{len(self.lines)}.log"
        with log.open("w") as errors:
            arguments = self.cluster.inside(0, *program(command))
            process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=errors, text=True,
                                       cwd=self.cluster.folder, env=self.cluster.environment())  # fmt: skip
        assert process.stdout is not None, "a pipe"
        try:
            line = ""
            while not line.startswith(("quire serves", "curl")):
                assert select.select([process.stdout], [], [], SECONDS)[0], log.read_text()
                line = process.stdout.readline()
                assert line, log.read_text()
                if not re.search(RAYS, line):
                    self.say(line)
            yield log
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(SECONDS)


def program(command: str) -> list[str]:
    """Return the arguments of a command, with the program that this checkout has."""
    first, *others = shlex.split(command)
    programs = {"quire": [sys.executable, "-m", "quire"], "python": [sys.executable]}
    return [*programs.get(first, [first]), *others]


def divided(shell: Transcript) -> None:
    """One model's layers on three nodes, one of which is cut off."""
    cluster = shell.cluster
    answer = (
        f"curl -s http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' -d '{json.dumps(PROMPT)}'"
    )
    flags = SERVE.format(address=cluster.cluster)
    with shell.server(f"quire serve --pp 3 --executor ray --on-rank-failure restart {flags}") as log:
        first = json.loads(shell.run(answer))["choices"]
        lost = next(node for node in range(1, cluster.count) if has_rank(cluster, node))
        shell.say(f"# The link of node {cluster.address(lost)} is cut")
        cluster.cut(lost)
        began = time.monotonic()
        while "ranks are started anew" not in log.read_text() and time.monotonic() < began + SECONDS:
            time.sleep(0.5)
        shell.say("\n".join(line for line in log.read_text().splitlines() if " ERROR " in f" {line}"))
        assert json.loads(shell.run(answer))["choices"] == first, "other tokens"
    cluster.kill(lost)
    cluster.cut(lost, down=False)
    cluster.start_node(lost, 1)


def replicated(shell: Transcript, out: Path) -> None:
    """One to three engines, one of which is cut off."""
    cluster = shell.cluster
    flags = SERVE.format(address=cluster.cluster)
    limits = "--kv-tokens 8192 --max-num-seqs 2 --target-waiting 1 --upscale-delay 0 --downscale-delay 5"
    deploy = f"quire deploy ray --min-replicas 1 --max-replicas 3 {limits} {flags}"
    with shell.server(deploy):
        load = "python tools/follow_load.py --url http://127.0.0.1:8000 --phases 1:40,12:180,1:80"
        shell.say(f"$ {load} --out {out.name}")
        arguments = [*program(load.replace("tools/", f"{ROOT}/tools/")), "--mark", "130", CUT, "--deployment",
                     f"{deploy}, on four nodes of one CPU each, which are network namespaces of this host",
                     "--out", str(out)]  # fmt: skip
        process = subprocess.Popen(cluster.inside(0, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, env=cluster.environment())  # fmt: skip
        assert process.stdout is not None, "a pipe"
        for line in process.stdout:
            if line.strip() == CUT:
                node = node_with_engine_alone(cluster)
                cluster.cut(node)
                line = f"# The link of node {cluster.address(node)} is cut"
            shell.say(line)
        process.wait(SECONDS)
    found = json.loads(out.read_text())
    found["results"][0]["transcript"] = shell.lines
    write(out, found)


def has_rank(cluster: NamespaceCluster, node: int) -> bool:
    """Return True if a rank of the model runs on a node."""
    return any("quire.startup.rank_program" in " ".join(cmdline(process)) for process in cluster.processes(node))


def node_with_engine_alone(cluster: NamespaceCluster) -> int:
    """Return a node that has an engine, and neither the API server nor Ray's head."""
    for node in range(1, cluster.count):
        commands = [" ".join(cmdline(process)) for process in cluster.processes(node)]
        engine = any("quire.startup.engine_program" in command for command in commands)
        if engine and not any("ServeReplica:quire:api" in command for command in commands):
            return node
    raise LookupError("no node has an engine alone")


def cmdline(process: psutil.Process) -> list[str]:
    """Return a process's arguments, none if it has ended."""
    try:
        found: list[str] = process.cmdline()
    except psutil.Error:
        return []
    return found


def main(arguments: list[str]) -> int:
    """Run all of it, and write the document and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(arguments)
    if not can_make_namespaces():
        parser.error("network namespaces can't be made: run this as root, with ip of iproute2")
    cluster = NamespaceCluster([1, 1, 1, 1])
    try:
        shell = Transcript(cluster)
        divided(shell)
        replicated(shell, args.out.resolve())
    finally:
        cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
