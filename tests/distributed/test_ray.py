"""Ranks that Ray places: the same tokens, what becomes of all when anything ends, and that nothing is left. The first
test's are in a cluster of their own, the others in one of two nodes."""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
from echo_ranks import started
from test_restart import VOCAB, ask, clean, heard, opened, undisturbed
from waiting import has_ended, wait_until
from wired import drain, open_engine

from quire import LLM, SamplingParams
from quire.distributed.ray_driver import LOCAL_CLUSTER_ENVIRONMENT, list_processes
from quire.distributed.ray_launcher import RayLauncher, RayPlacement
from quire.distributed.remote_runner import RemoteRunner
from quire.errors import EngineDead, StartupError

TESTS = Path(__file__).parents[1]
SETTINGS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 4, "kv_tokens": 1024, "rank_timeout": 60.0,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0)

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed: pip install 'quire[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Yield the address of a cluster of two nodes, one with 2 CPUs and 2 GPUs. Its token is in the environment."""
    variables = {**LOCAL_CLUSTER_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory(dir="/tmp") as folder:  # paths of sockets are short
        for name, value in variables.items():
            patch.setenv(name, value)
        path = os.pathsep.join(filter(None, sys.path))
        program = [sys.executable, str(TESTS / "ray_cluster.py"), folder]
        with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "PYTHONPATH": path}) as process:  # fmt: skip
            said, _, _ = select.select([process.stdout], [], [], 90)
            assert said, "the cluster doesn't start"
            yield process.stdout.readline().strip()
            process.communicate(timeout=30)
        assert process.returncode == 0


def placed(address: str, seconds: float = 60.0, ranks: int = 2, gpus: float = 0.0, **faults: Any) -> RemoteRunner:
    """Return ranks that Ray placed, with faults as in `echo_ranks.processes`."""
    program = (str(TESTS / "echo_ranks.py"), json.dumps(faults))
    return started(RemoteRunner(ranks, seconds, open_hosts=RayLauncher(gpus, address, (), program)))


def placement_of(runner: Any) -> RayPlacement:
    """Return what has Ray place the ranks."""
    return runner.hosts[0]._describe_loss.func.__self__


def pids_of(runner: RemoteRunner) -> list[int]:
    """Return the pids of the ranks of one node, of its agent, of the actor that holds it, and of the driver."""
    placement: Any = placement_of(runner)
    port = placement._listener.port
    [agent] = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "quire.distributed.node_agent" in (process.info["cmdline"] or ())
        and any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp"))
    ]
    return [*(rank.pid for rank in agent.children()), agent.pid, agent.ppid(), placement.driver.process.pid]


def wait_gone(pids: list[int], seconds: float = 30.0) -> None:
    """Wait until all have ended."""
    wait_until(lambda: all(map(has_ended, pids)), f"processes {pids} have ended", seconds)


def test_a_cluster_of_their_own_and_what_is_left_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks in a cluster of their own give one rank's tokens; when Ray's raylet is killed, nothing is left."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    alone = LLM("tiny", **SETTINGS)
    llm = LLM("tiny", tp=2, executor="ray", **SETTINGS)
    runner: Any = llm.engine.runner
    placement = placement_of(runner)
    session = placement.driver.process.pid
    everything = [pid for pid, _, its, _ in list_processes() if its == session]
    assert len(everything) >= 7  # the driver, two servers, an actor, an agent, two ranks
    listening = [
        one.laddr.ip for one in psutil.net_connections("inet") if one.pid in everything and one.status == "LISTEN"
    ]
    assert set(listening) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert len(listening) > 1
    prompts = ["Once upon a time", "The"]
    said, meant = ([list(one.outputs[0].token_ids) for one in one.generate(prompts, GREEDY)] for one in (llm, alone))
    assert said == meant
    raylet = next(pid for pid in everything if psutil.Process(pid).name() == "raylet")
    os.kill(raylet, signal.SIGKILL)
    told = r"rank [01] was ended with Ray's raylet, which was ended by signal 9 \(SIGKILL\)"
    with pytest.raises(EngineDead, match=told):
        llm.generate(prompts, SamplingParams(max_tokens=1000, ignore_eos=True))
    wait_gone(everything)
    llm.close()
    alone.close()
    assert not os.path.exists(placement._folder)
    assert not list(tmp_path.iterdir())


def test_ranks_are_placed_anew(cluster: str, caplog: pytest.LogCaptureFixture) -> None:
    """The cluster has room for the ranks of one engine only."""
    pids: list[list[int]] = []

    def start(**fault: Any) -> RemoteRunner:
        runner = placed(cluster, rank0={"vocab_size": VOCAB}, rank1={"vocab_size": VOCAB, **fault})
        pids.append(pids_of(runner))
        return runner

    engine = opened(start(how="kill", place="collect", step=3), start)
    ask(engine)
    assert heard(engine) == undisturbed()
    clean(engine)
    assert "rank 1 was ended by signal 9 (SIGKILL) in step 3; ranks are started anew" in caplog.text
    wait_gone(pids[0])
    assert not all(map(has_ended, pids[1]))
    engine.close()
    wait_gone(pids[1])


def test_an_actor_that_ends_is_named_and_nothing_is_left(cluster: str) -> None:
    runner = placed(cluster)
    pids = pids_of(runner)
    drain(open_engine(runner))
    os.kill(pids[3], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"^rank 0 was ended with Ray's actor: The actor died.* between steps$"):
        idle(runner)
    wait_gone(pids)


@pytest.mark.soak
def test_other_failures_are_named_and_nothing_is_left(cluster: str) -> None:
    runner = placed(cluster, 1.0, rank1={"how": "hang", "place": "collect", "step": 2})
    pids = pids_of(runner)
    with pytest.raises(EngineDead, match=r"rank . has not answered for 1 s in step 2 \(--rank-timeout\)"):
        drain(open_engine(runner))
    wait_gone(pids)

    runner = placed(cluster)
    pids = pids_of(runner)
    os.kill(pids[4], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"^rank . was ended with Ray's driver, which was ended by signal 9"):
        idle(runner)
    wait_gone(pids)

    with pytest.raises(StartupError, match="rank 0 failed: RuntimeError: the device is gone at start"):
        placed(cluster, rank0={"how": "raise", "place": "start"})


def idle(runner: RemoteRunner) -> None:
    """Wait until `check` raises because a rank is lost."""
    wait_until(runner.check, "a rank is missed")


def test_all_end_with_the_engine_s_process(cluster: str) -> None:
    """The engine's process is killed while a rank and Ray's driver are stopped."""
    code = (
        "import os, sys; sys.path[:0] = sys.argv[2:]\n"
        "from test_ray import placed, pids_of\n"
        "runner = placed(sys.argv[1])\n"
        "pids = pids_of(runner)\n"
        "os.kill(pids[0], 19); os.kill(pids[4], 19)\n"
        "print(*pids, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    program = [sys.executable, "-c", code, cluster, *filter(None, sys.path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 5, done.stderr
    wait_gone(pids)


def test_gpus_are_those_that_ray_chose_and_room_is_bounded(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(placed(cluster, gpus=1.0)) as runner:
        monkeypatch.setattr(
            "quire.distributed.ray_launcher.PLACEMENT_SECONDS", 1.0
        )  # in which actors must start, too, where there is room
        for pid in pids_of(runner)[:2]:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert {one for one in variables if one.startswith(b"CUDA_VISIBLE")} <= {
                b"CUDA_VISIBLE_DEVICES=0,1", b"CUDA_VISIBLE_DEVICES=1,0"
            }  # fmt: skip
        with pytest.raises(StartupError, match=r"found no room for 1 rank of 1 GPU within 1 s: others use it "
                                               r"\(0 GPUs are free\); there are 2 CPUs and 2 GPUs on"):  # fmt: skip
            placed(cluster, ranks=1, gpus=1.0)
    with pytest.raises(StartupError, match=r"no room for 5 ranks of 1 CPU each: there are .*4 CPUs and 0 GPUs"):
        placed(cluster, ranks=5)
    with pytest.raises(StartupError, match=r"no room for 3 ranks of 1 GPU each: there are .*2 CPUs and 2 GPUs on "
                                           r".*\. Use fewer ranks \(--tp, --pp\), or --device cpu"):  # fmt: skip
        placed(cluster, ranks=3, gpus=1.0)
