"""Links between stages of two hosts over a backend of torch.distributed, here Gloo: the rows that arrive, which backend
both ends agree on, and what happens if one of them leaves."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from quire.distributed import nccl, nccl_stage_links, node_agent
from quire.distributed.device_stage_pipes import DeviceStagePipes
from quire.distributed.nccl_stage_links import NO_OFFER, SocketStore, StageLinks, make_offer, open_stage_links
from quire.distributed.rendezvous import RankFds, RankRendezvous
from quire.errors import PeerLost, StartupError
from quire.protocol.parallel_layout import ParallelLayout, Shard

CPU = torch.device("cpu")
LAYOUT = ParallelLayout(1, 2)
COLUMNS, MOST_ROWS = 16, 8
SLOT_BYTES = MOST_ROWS * COLUMNS * 4


class Ends(NamedTuple):
    """What the ranks of two stages on two hosts use."""

    shards: list[Shard]
    fds: list[RankFds]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr("quire.distributed.stage_pipes.TIMEOUT_MARGIN", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        earlier = socket.create_connection(listener.getsockname())
        later, _ = listener.accept()
    hosts = [RankRendezvous(LAYOUT, range(1), following=[earlier]), RankRendezvous(LAYOUT, range(1, 2), [later])]
    shards = list(LAYOUT.shards())
    yield Ends(shards, [host.meeting.fds(shard) for host, shard in zip(hosts, shards)])
    for host in hosts:
        host.close()


def at_once(*tasks: Callable[[], Any]) -> list[Any]:
    """Return the result of each task, or its exception."""
    results: list[Any] = [None] * len(tasks)

    def work(number: int) -> None:
        try:
            results[number] = tasks[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "an end hangs"
    return results


def open_links(ends: Ends, seconds: float = 10.0, backends: tuple[str, str] = ("gloo", "gloo")) -> list[Any]:
    return at_once(
        *(
            lambda shard=shard, fds=fds, backend=backend: open_stage_links(shard, fds, seconds, CPU, backend)
            for shard, fds, backend in zip(*ends, backends)
        )
    )


def open_pipes(
    ends: Ends, seconds: float = 10.0, backends: tuple[str, str] = ("gloo", "gloo")
) -> list[DeviceStagePipes]:
    links = open_links(ends, seconds, backends)
    assert all(isinstance(one, StageLinks) for one in links), links
    return [
        DeviceStagePipes(shard, fds, seconds, CPU, SLOT_BYTES, link)
        for shard, fds, link in zip(*ends, links)
    ]  # fmt: skip


def rows(seed: int, count: int = MOST_ROWS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, COLUMNS, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("backends", [("gloo", "gloo"), ("gloo", "nccl")], ids=["over gloo", "over TCP"])
def test_rows_arrive_in_order(ends: Ends, backends: tuple[str, str]) -> None:
    """With and without a delta, of several sizes and types. The tensors sent are overwritten at once, as graphs do."""
    first, last = open_pipes(ends, backends=backends)
    assert (first._links.next is None) == (last._links.previous is None) == ("nccl" in backends)
    steps = [(MOST_ROWS, torch.float32, True), (1, torch.float32, False), (3, torch.bfloat16, True)] * 5

    def send() -> None:
        for number, (count, dtype, has_delta) in enumerate(steps):
            x, delta = rows(number, count, dtype), rows(100 + number, count, dtype)
            first.send(x, delta if has_delta else None)
            x.zero_()
            delta.zero_()

    def receive() -> None:
        for number, (count, dtype, has_delta) in enumerate(steps):
            x, delta = last.receive(count, COLUMNS, dtype)
            assert torch.equal(x, rows(number, count, dtype))
            assert (delta is not None) == has_delta
            assert delta is None or torch.equal(delta, rows(100 + number, count, dtype))

    assert at_once(send, receive) == [None, None]


def test_a_step_is_sent_before_it_is_received(ends: Ends) -> None:
    """The sender goes on; only the next step waits until the buffer is free."""
    first, last = open_pipes(ends)
    first.send(rows(0), None)
    sender = threading.Thread(target=first.send, args=(rows(1), rows(2)), daemon=True)
    sender.start()
    sender.join(0.3)
    assert sender.is_alive(), "its rows would overwrite those of the step before"
    assert torch.equal(last.receive(MOST_ROWS, COLUMNS, torch.float32)[0], rows(0))
    sender.join(30)
    assert not sender.is_alive()
    x, delta = last.receive(MOST_ROWS, COLUMNS, torch.float32)
    assert torch.equal(x, rows(1))
    assert delta is not None
    assert torch.equal(delta, rows(2))


def test_rows_of_another_shape_are_refused(ends: Ends) -> None:
    first, last = open_pipes(ends)
    first.send(rows(0, 2), None)
    with pytest.raises(AssertionError, match=r"sent \(number, rows, columns, bytes\) \[1, 2, 16, 4\], not \[1, 3, 16"):
        last.receive(3, COLUMNS, torch.float32)
    with pytest.raises(AssertionError, match="640 bytes are more than the 512 of a step"):
        last._rows(torch.empty(0), 10, COLUMNS, torch.float32)


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is silent"])
def test_a_neighbour_that_leaves_is_noticed(ends: Ends, leaves: bool) -> None:
    """Also one that stays and does nothing, within the timeout."""
    first, last = open_pipes(ends, seconds=0.5)
    told = "has left" if leaves else "has received or sent nothing"
    if leaves:
        assert last._previous is not None
        last._previous.shutdown(socket.SHUT_RDWR)
        with pytest.raises(PeerLost, match=told):
            last.receive(1, COLUMNS, torch.float32)
    with suppress(PeerLost):  # a step is sent without waiting
        first.send(rows(0), None)
    with pytest.raises(PeerLost, match=told):
        first.send(rows(1), None)


def test_a_neighbour_that_leaves_at_start_is_noticed(ends: Ends) -> None:
    """Before the offers, and while the communicator is opened."""
    with socket.socket(fileno=os.dup(ends.fds[1].previous_stage)) as later:
        later.sendall(bytes(range(32)))
        later.shutdown(socket.SHUT_WR)
        with pytest.raises(PeerLost, match="has left"):
            open_stage_links(ends.shards[0], ends.fds[0], 5.0, CPU, "gloo")
        later.shutdown(socket.SHUT_RDWR)
    with pytest.raises(PeerLost, match="has left"):
        open_stage_links(ends.shards[0], ends.fds[0], 5.0, CPU, "gloo")


@pytest.mark.parametrize("number", [0, 1])
def test_one_end_without_the_backend_has_both_use_tcp(ends: Ends, number: int) -> None:
    backends = ("gloo", "nccl") if number else ("nccl", "gloo")  # on a CPU there is no NCCL
    for links in open_links(ends, backends=backends):
        assert links == StageLinks(None, None, ("rows between nodes go over TCP, by way of the CPU's memory",))


def test_the_start_says_what_is_used(ends: Ends) -> None:
    for links in open_links(ends):
        assert links.notices == ("rows between nodes go over NCCL",)


def test_one_gpu_is_not_connected_to_itself(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which NCCL refuses."""
    monkeypatch.setattr(nccl_stage_links, "make_offer", lambda device, backend: bytes(range(32)))
    assert [links[:2] for links in open_links(ends)] == [(None, None)] * 2


def test_an_offer_identifies_the_gpu_and_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Found", (), {"uuid": "GPU-1"}))
    gpu = torch.device("cuda", 0)
    offer = make_offer(gpu, "nccl")
    assert offer == make_offer(gpu, "nccl") != NO_OFFER
    monkeypatch.setenv("NCCL_HOSTID", "another")
    assert make_offer(gpu, "nccl") != offer
    assert make_offer(CPU, "nccl") == NO_OFFER
    monkeypatch.setenv("QUIRE_STAGE_NCCL", "0")
    assert make_offer(gpu, "nccl") == NO_OFFER
    monkeypatch.delenv("QUIRE_STAGE_NCCL")
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert make_offer(gpu, "nccl") == NO_OFFER


def test_a_backend_that_fails_is_a_failed_start(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("no socket interface found")

    monkeypatch.setattr(nccl_stage_links, "_open_group", fail)
    for error in open_links(ends):
        assert isinstance(error, StartupError)
        assert "over gloo: no socket interface found. Set NCCL_SOCKET_IFNAME" in str(error)


def test_a_store_leaves_the_socket_to_others() -> None:
    """Keys that one end set and the other did not read are no rows."""
    with ExitStack() as stack:
        ends = [stack.enter_context(end) for end in socket.socketpair()]
        check_store(ends)


def check_store(ends: list[socket.socket]) -> None:
    stores = [SocketStore(end) for end in ends]
    stores[0].set("a", b"1")
    stores[0].set("b", "2")
    assert stores[1].get("a") == b"1"
    assert not stores[1].check(["b"])
    at_once(*(store.disconnect for store in stores))
    assert stores[1].check(["a"])
    assert stores[0].check(["a", "b"])
    stores[1].set("c", b"3")
    with pytest.raises(KeyError):
        stores[0].get("c")
    ends[0].sendall(b"rows")
    assert ends[1].recv(16) == b"rows"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without variables of NCCL, before and after."""
    names = ("NCCL_SOCKET_IFNAME", "NCCL_SOCKET_FAMILY", *nccl.TORCH_ENVIRONMENT)
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    yield
    for name in names:
        with suppress(KeyError):
            del os.environ[name]


@pytest.mark.usefixtures("environment")
def test_nccl_uses_the_interface_of_the_link(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = ends.fds[0]._replace(remote_next=False)
    nccl.set_nccl_environment(alone)
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    for fds in ends.fds:
        del os.environ["NCCL_SOCKET_IFNAME"]
        nccl.set_nccl_environment(fds)
        assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
        assert os.environ["NCCL_SOCKET_FAMILY"] == "AF_INET"
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    nccl.set_nccl_environment(ends.fds[0])
    assert os.environ["NCCL_SOCKET_IFNAME"] == "ib0", "the user's choice"


def test_nodes_keep_their_own_host_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_HOSTID", "engine")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert node_agent.engine_environment().get("NCCL_DEBUG") == "INFO"
    assert "NCCL_HOSTID" not in node_agent.engine_environment()
