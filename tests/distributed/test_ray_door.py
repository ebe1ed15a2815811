"""How ranks that others start come by their descriptors, and which clusters are used: without Ray."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from waiting import IDLE

from quire.distributed import ray_address
from quire.distributed.ray_address import listening_users, resolve_ray_address
from quire.distributed.ray_driver import PlacementRequest, connect_ray
from quire.distributed.ray_fd_server import RankFdServer
from quire.distributed.ray_launcher import LAUNCHER, PidfdProcess, RayLauncher
from quire.errors import StartupError

SHOWS = """
import json, os, sys
print(json.dumps({"arguments": sys.argv[1:], "folder": os.getcwd(), "environment": dict(os.environ),
                  "said": os.read(int(sys.argv[1]), 9).decode(), "open": list(map(int, os.listdir("/proc/self/fd")))}),
      file=os.fdopen(int(sys.argv[2]), "w"), flush=True)
import time; time.sleep(60)  # until it is killed
"""


@pytest.fixture
def door() -> Iterator[RankFdServer]:
    made = RankFdServer(2)
    yield made
    made.close()


@contextmanager
def launched(door: RankFdServer, **other: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a rank's bootstrap as Ray's actor does; kill it in the end."""
    child = subprocess.Popen([sys.executable, *LAUNCHER], env={}, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    said = {"name": door.name, "token": door.token, "rank": 1, "parent": os.getpid(), **other}
    child.stdin.write(json.dumps(said).encode() + b"\n")
    child.stdin.flush()
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_a_rank_has_what_it_would_inherit(door: RankFdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors keep their numbers, even if these are in use; environment and folder are those given, and no more."""
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    told, tells = os.pipe()
    low = fcntl.fcntl(read, fcntl.F_DUPFD, 60)  # a free number: others' descriptors stay
    with launched(door) as child:
        door.accept()
        arguments = [sys.executable, "-c", SHOWS, str(low), str(tells)]
        os.write(write, b"something")
        began = PidfdProcess(*door.send_program(1, arguments, {"WHAT": "this"}, [low, tells]))
        os.close(tells)
        with os.fdopen(told) as answer:
            said = json.loads(answer.readline())
        assert began.pid == child.pid
        assert began.poll() is None
        began.kill()
        began.wait(30)
        assert began.poll() is not None
        assert child.wait(30) == -signal.SIGKILL
    assert said["arguments"] == [str(low), str(tells)]
    assert (said["said"], said["folder"], said["environment"].get("WHAT")) == ("something", str(tmp_path), "this")
    assert "HOME" not in said["environment"]
    assert set(said["open"]) == {0, 1, 2, 3, low, tells}  # 3: to list them
    for descriptor in (read, write, low):
        os.close(descriptor)


@pytest.mark.parametrize(
    "said",
    [b"", b"\n", b"[1]\n", b'{"token": "", "rank": 0}\n', b'{"rank": 0}\n', b'{"token": "TOKEN", "rank": "x"}\n',
     b"x" * 5000 + b"\n", b"[" * 4000 + b"\n"],
)  # fmt: skip
def test_strangers_are_sent_away(door: RankFdServer, said: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(30)
        one.connect(f"\0{door.name}")
        one.sendall(said.replace(b"TOKEN", door.token.encode()))
        one.shutdown(socket.SHUT_WR)
        door.accept()
        assert not door.pending
        with suppress(ConnectionResetError):  # where what it said wasn't read to the end
            assert one.recv(1) == b""


def test_another_user_is_sent_away_though_it_has_the_token(door: RankFdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(f"\0{door.name}")
        one.sendall(json.dumps({"token": door.token, "rank": 0}).encode() + b"\n")
        door.accept()
        assert not door.pending


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"name": "quire-nobody"}, "the engine's process isn't on the host, or in the container, of Ray's worker"),
        ({"token": "guess"}, "the engine's process refused this rank"),
        ({"parent": 1}, "the actor is gone"),
    ],
)
def test_a_rank_that_can_not_begin_says_why(door: RankFdServer, other: dict[str, Any], told: str) -> None:
    with launched(door, **other) as child:
        if "token" in other:
            door.accept()
        assert told in child.stderr.read().decode()
        assert child.wait(30) == 1


def test_a_rank_ends_with_the_actor_that_holds_it(door: RankFdServer) -> None:
    code = (
        "import json, os, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, *sys.argv[2:]], stdin=subprocess.PIPE)\n"
        "said = {**json.loads(sys.argv[1]), 'parent': os.getpid()}\n"
        "child.stdin.write(json.dumps(said).encode() + b'\\n'); child.stdin.close()\n"
        "child.wait()"
    )
    said = json.dumps({"name": door.name, "token": door.token, "rank": 0})
    with subprocess.Popen([sys.executable, "-c", code, said, *LAUNCHER]) as actor:
        door.accept()
        rank = PidfdProcess(*door.send_program(0, [sys.executable, *IDLE], {}, []))
        os.kill(rank.pid, signal.SIGSTOP)
        actor.kill()
    rank.wait(30)
    with launched(door) as child:
        door.accept()
        child.kill()
        child.wait()
        with pytest.raises(OSError):  # it ended while it waited
            door.send_program(1, [sys.executable], {}, [])


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_addresses(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RAY_ADDRESS is used for this user's cluster on this host, other users' clusters only by --ray-address."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert resolve_ray_address("") == resolve_ray_address("local") == ""
    assert listening_users(port) == {os.getuid()}
    where = f"127.0.0.1:{port}"
    monkeypatch.setenv("RAY_ADDRESS", where)
    assert resolve_ray_address("") == where
    assert resolve_ray_address("local") == ""
    monkeypatch.setattr(ray_address, "listening_users", lambda port: {os.getuid() + 1})
    assert resolve_ray_address(where) == where
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(StartupError, match=f"--ray-address is 127.0.0.1:{free}, which does not answer: Connection ref"):
        resolve_ray_address(f"127.0.0.1:{free}")


def test_an_address_where_strangers_listen_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if only others listen, or no listener is known."""
    where = f"127.0.0.1:{port}"
    monkeypatch.setenv("RAY_ADDRESS", where)
    for users in ({os.getuid(), os.getuid() + 1}, {os.getuid() + 1}, set()):
        monkeypatch.setattr(ray_address, "listening_users", lambda port, users=users: users)
        with pytest.raises(StartupError, match=f"RAY_ADDRESS is {where}, which isn't known to be this user's .*unset"):
            resolve_ray_address("")


@pytest.mark.parametrize("said", ["auto", "ray://127.0.0.1:10001", "127.0.0.1", ":1", "a:b", "a:99999"])
def test_what_is_no_address(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match=r"--ray-address is .*, which is not HOST:PORT\. Give HOST:PORT"):
        resolve_ray_address(said)
    monkeypatch.setenv("RAY_ADDRESS", said)
    with pytest.raises(StartupError, match=r"RAY_ADDRESS is .*, which is not HOST:PORT"):
        resolve_ray_address("")


def test_without_ray_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.distributed.ray_launcher.find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"Ray isn't installed. pip install 'quire\[ray\]'"):
        RayLauncher(2, 0.0)


def test_what_the_system_refuses_is_told_and_leaves_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Mock()
    group.start_rank.side_effect = OSError(errno.EMFILE, "Too many open files")
    monkeypatch.setattr("quire.distributed.ray_launcher.find_spec", lambda name: True)
    monkeypatch.setattr("quire.distributed.ray_launcher.RayRankGroup", lambda *_: group)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(StartupError, match=r"ranks can't be started by Ray: .*Too many open files"):
        RayLauncher(2, 0.0)(0, ())
    group.close.assert_called_once()


def test_a_ray_that_is_old_or_listens_to_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(__version__="2.9.3", init=lambda **settings: None, shutdown=lambda: None,
                          nodes=lambda: [{"NodeManagerAddress": "10.0.0.1"}])  # fmt: skip
    order = PlacementRequest(2, 0.0, "127.0.0.1:1", "/nonexistent", [], "", "", 1.0)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(os, "environ", {"RAY_ADDRESS": "x", "HOME": "/"})
    with pytest.raises(StartupError, match=r"Ray is 2\.9\.3, in which .*\. pip install 'ray>=2\.54'"):
        connect_ray(order)
    ray.__version__ = "2.54.0"
    assert connect_ray(order) is ray
    assert os.environ == {"RAY_ADDRESS": "x", "HOME": "/"}
    with pytest.raises(StartupError, match=r"Ray 2\.54\.0 listens on 10\.0\.0\.1, not on the loopback interface alone"):
        connect_ray(order._replace(address=""))
    assert "RAY_ADDRESS" not in os.environ
