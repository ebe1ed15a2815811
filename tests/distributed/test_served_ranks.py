"""Servers with ranks: what is left where they are interrupted or killed, what they use while nothing is asked, and
where they run: beside one another, with little shared memory, a home that can't be written, no IPv6."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import idle_ranks
import psutil
import pytest
from served_process import Served, served
from waiting import wait_until

TEXT = ", there was a girl named Anna. Her best friend was"


def gone(processes: list[psutil.Process], seconds: float = 60.0) -> bool:
    return not psutil.wait_procs(processes, seconds)[1]


def started(server: Served, ranks: int) -> list[psutil.Process]:
    """Wait for the ranks of a server, which may still be loading, and return all its processes."""
    wait_until(lambda: len(server.ranks()) >= ranks, lambda: server.text, 100)
    return server.processes()


def test_an_interrupt_at_start_leaves_nothing(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to all processes."""
    with served(tmp_path, "--tp", "2") as server:
        processes = started(server, 2)
        os.killpg(server.child.pid, signal.SIGINT)
        server.child.wait(60)
        assert gone(processes)
        assert "quire serves" not in server.text
        assert "Traceback" not in server.text


@pytest.mark.parametrize("flags", [("--tp", "2"), ("--tp", "2", "--engine-process", "off")], ids=str)
def test_ranks_end_with_a_server_that_is_killed(flags: tuple[str, ...], tmp_path: Path) -> None:
    with served(tmp_path, *flags) as server:
        processes = started(server, 2)
        server.child.kill()
        assert gone(processes)


def test_a_script_with_ranks_needs_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from quire import LLM, SamplingParams\n"
        "print('it runs')\n"
        "with LLM('tiny', tp=2, device='cpu', dtype='float32', kv_tokens=512, threads=2) as llm:\n"
        "    params = SamplingParams(temperature=0, max_tokens=12)\n"
        "    print(llm.generate('Once upon a time', params, use_tqdm=False)[0].outputs[0].text)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, f"it runs\n{TEXT}\n"), done.stderr


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [2, 4])
def test_idle_processes_use_less_than_a_hundredth_of_a_core(ranks: int, tmp_path: Path) -> None:
    found = idle_ranks.measured(ranks, 20.0, tmp_path)
    assert {"front", "rank 0", f"rank {ranks - 1}"} < found.keys()
    assert len(found) >= ranks + 2  # the engine's process too
    assert max(found.values()) < 0.01, found


# Where they run


def within(script: str, *words: str) -> tuple[str, ...]:
    """Return a prefix for a command that runs `script` first, in mounts (and, with "-n", a network) of its own. Skip
    the test if this user may not create them."""
    if shutil.which("unshare") is None or os.geteuid() or subprocess.run(["unshare", "-m", *words, "true"]).returncode:
        pytest.skip("it needs root, and namespaces")
    return ("unshare", "-m", *words, "sh", "-ec", f'{script}; exec "$@"', "sh")


@pytest.mark.soak
def test_two_servers_with_ranks_run_beside_each_other(tmp_path: Path) -> None:
    with served(tmp_path, "--tp", "2") as one, served(tmp_path, "--tp", "2") as other:
        assert [each.ready().complete() for each in (one, other)] == [TEXT] * 2
        one.child.kill()
        assert gone(one.processes())
        assert other.complete() == TEXT


@pytest.mark.soak
def test_ranks_need_no_large_shared_memory_and_write_nothing_into_a_home(tmp_path: Path) -> None:
    """Containers have a /dev/shm of 64 MB."""
    home = tmp_path / "home"
    home.mkdir()
    before = within(f"mount -t tmpfs -o size=64m tmpfs /dev/shm; mount -t tmpfs -o ro tmpfs {home}")
    with served(tmp_path, "--tp", "4", before=before, env={"HOME": str(home)}) as server:
        assert server.ready().complete() == TEXT


@pytest.mark.soak
def test_ranks_need_no_ipv6(tmp_path: Path) -> None:
    before = within("echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; ip link set lo up", "-n")
    with served(tmp_path, "--tp", "2", before=before) as server:
        asked = f"import httpx; print(httpx.get('{server.ready().url}/health').status_code)"
        inside = ["nsenter", "-t", str(server.child.pid), "-n", sys.executable, "-c", asked]
        assert subprocess.run(inside, capture_output=True, text=True, timeout=60).stdout == "200\n"
