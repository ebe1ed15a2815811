"""Which clusters of Ray are used, and what is asked of them: without Ray."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from quire.distributed import ray_address
from quire.distributed.ray_address import listening_users, resolve_ray_address
from quire.distributed.ray_driver import PlacementRequest, connect_ray, find_node_resource, group_by_node
from quire.distributed.ray_launcher import RayLauncher
from quire.errors import StartupError


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
        RayLauncher(0.0)


def test_a_ray_that_is_old_or_listens_to_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = SimpleNamespace(__version__="2.9.3", init=lambda **settings: None, shutdown=lambda: None,
                          nodes=lambda: [{"NodeManagerAddress": "10.0.0.1"}])  # fmt: skip
    order = PlacementRequest(2, 1, 0.0, "127.0.0.1:1", "/nonexistent", [], 1.0)
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


def cluster(*cpus: int) -> SimpleNamespace:
    """Return what stands for Ray with nodes of these CPUs, of which the second is this one."""
    nodes = [
        {"NodeID": str(i), "NodeManagerAddress": f"10.0.0.{i}", "Alive": True,
         "Resources": {"CPU": float(count), f"node:10.0.0.{i}": 1.0, "node:__internal_head__": 1.0}}
        for i, count in enumerate(cpus)
    ]  # fmt: skip
    context = SimpleNamespace(get_node_id=lambda: "1")
    return SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context)


def test_a_stage_is_on_one_node() -> None:
    """A cluster that has enough CPUs, but not for a whole stage on one node, is refused with what each node has."""
    order = PlacementRequest(2, 2, 0.0, "", "", [], 1.0)
    assert find_node_resource(cluster(2, 2), order) == "node:10.0.0.1"
    assert find_node_resource(cluster(5, 1), order) == "", "this node is too small"
    told = (
        r"no room for 2 stages of 2 ranks of 1 CPU each \(a stage's on one node\): there are 3 CPUs and 0 GPUs on "
        r"10\.0\.0\.1, 1 CPUs and 0 GPUs on 10\.0\.0\.0, 1 CPUs .* Use fewer ranks \(--tp, --pp\)"
    )
    with pytest.raises(StartupError, match=told):
        find_node_resource(cluster(1, 3, 1), order)
    one_stage = r"no room for 2 ranks of 0\.5 GPU each: .* Use fewer ranks \(--tp, --pp\), or --device cpu"
    with pytest.raises(StartupError, match=one_stage):
        find_node_resource(cluster(2, 2), order._replace(pp=1, gpus=0.5))


def test_stages_follow_one_another_on_a_node_and_the_first_are_here() -> None:
    here, nodes = group_by_node(cluster(2, 4, 2), [("2", ["0"]), ("1", ["1"]), ("0", []), ("1", ["0", "1"])])
    assert here == "10.0.0.1"
    assert [(node.address, node.actors, node.gpus) for node in nodes] == [
        ("10.0.0.1", [1, 3], ["1", "0"]), ("10.0.0.0", [2], []), ("10.0.0.2", [0], ["0"])
    ]  # fmt: skip
