"""Ranks of several nodes, each behind an agent: the same tokens, what becomes of all when anything ends, and who is
refused. The agents are processes of this host, without Ray."""

from __future__ import annotations

import io
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from echo_ranks import started
from memories import VOCAB
from test_restart import ask, clean, heard, opened, undisturbed
from waiting import has_ended, wait_until
from wired import drain, open_engine

import quire
from bench.local_nodes import ADDRESS, LocalNodes
from quire import LLM, SamplingParams
from quire.distributed import node_agent, node_messages, remote_host, remote_runner
from quire.distributed.checkpoint_digest import SAMPLE_BYTES, checkpoint_digest
from quire.distributed.node_messages import HELLO, KINDS, START, NodeStart, RankState
from quire.distributed.rank_startup import smallest_host_memory
from quire.distributed.remote_runner import RemoteRunner
from quire.distributed.secure_channel import MAX_RECEIVED_BYTES, ChannelListener, ChannelLost, SecureChannel, connect
from quire.distributed.shared_ring import RingFull
from quire.errors import EngineDead, StartupError
from quire.ipc.frames import Frame, FrameCodec, write_json
from quire.protocol.columns import WireError
from quire.protocol.images import ImagePixels
from quire.protocol.parallel_layout import ParallelLayout

TESTS = Path(__file__).parents[1]
STAGES = ParallelLayout(1, 3)
THREE = (range(1), range(1, 2), range(2, 3))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the state of silent ranks read after 1 s instead of 2: agents report it each half second."""
    monkeypatch.setattr("quire.distributed.remote_runner.SILENCE_SECONDS", 1.0)


def on_nodes(
    layout: ParallelLayout = STAGES, stages: Sequence[range] = THREE, seconds: float = 60.0, **faults: Any
) -> tuple[RemoteRunner, LocalNodes]:
    """Return ranks on nodes, with faults as in `echo_ranks.processes`."""
    nodes = LocalNodes(stages, (str(TESTS / "echo_ranks.py"), json.dumps(faults)))
    return started(RemoteRunner(layout, seconds, open_hosts=nodes)), nodes


def wait_gone(pids: Sequence[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)), f"processes {pids} have ended")


def ranks_of(nodes: LocalNodes) -> list[int]:
    """Return the pids of all ranks."""
    return [child.pid for agent in nodes.agents for child in psutil.Process(agent.pid).children()]


@pytest.mark.parametrize(
    ("layout", "stages"),
    [(ParallelLayout(1, 3), THREE), (ParallelLayout(2, 3), (range(2), range(2, 3))), (ParallelLayout(2), (range(1),))],
    ids=str,
)  # fmt: skip
def test_ranks_of_nodes_do_what_one_rank_does(layout: ParallelLayout, stages: Sequence[range]) -> None:
    """Nothing is left after the end."""
    runner, nodes = on_nodes(layout, stages, all={"vocab_size": VOCAB})
    pids = [*ranks_of(nodes), *(agent.pid for agent in nodes.agents)]
    assert len(pids) == layout.world_size + len(stages)
    assert [host.name for host in runner.hosts] == [f"node-{number}" for number in range(len(stages))]
    engine = opened(runner)
    ask(engine)
    assert heard(engine) == undisturbed()
    clean(engine)
    assert runner.query("depth") == [1] * layout.world_size
    runner.close()
    assert [agent.returncode for agent in nodes.agents] == [0] * len(stages)
    wait_gone(pids)


def test_a_model_on_two_nodes_says_what_one_process_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is planned by the node with the least."""
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 4, "kv_tokens": 512}
    prompts, params = ["Once upon a time", "The dog", "A"], SamplingParams(max_tokens=8, temperature=0)

    def tokens_of(llm: LLM) -> list[list[int]]:
        with llm:
            return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    wanted = tokens_of(LLM("tiny", **settings))
    nodes = partial(RemoteRunner, open_hosts=LocalNodes((range(1), range(1, 2))))
    monkeypatch.setattr(remote_runner, "RemoteRunner", nodes)
    llm = LLM("tiny", tp=2, pp=2, **settings)
    total, _, where = smallest_host_memory(llm.engine.runner) or (0, 0, "")  # type: ignore[arg-type]
    assert total == psutil.virtual_memory().total // 2
    assert where in ("node node-0", "node node-1"), "the one that had less free memory when its agent looked"
    assert tokens_of(llm) == wanted


def test_paths_are_relative_to_the_engines_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agents have another one. The draft model is compared like the model; the requests' defaults are not read."""
    for name in ("model", "draft"):
        shutil.copytree(Path(quire.__file__).parent / "assets" / "tiny", tmp_path / name)
    (tmp_path / "defaults").mkdir()
    (tmp_path / "defaults" / "generation_config.json").write_text('{"temperature": 0}')
    monkeypatch.chdir(tmp_path)
    started: list[LocalNodes] = []

    def launcher(gpus: float, address: str, checkpoints: Sequence[str]) -> LocalNodes:
        started.append(LocalNodes((range(1),), checkpoints=checkpoints))
        return started[-1]

    monkeypatch.setattr("quire.distributed.ray_launcher.RayLauncher", launcher)
    settings: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "threads": 1, "max_num_seqs": 4, "kv_tokens": 512,
        "executor": "ray", "generation_config": "defaults", "speculative_model": "draft", "num_speculative_tokens": 2,
    }  # fmt: skip
    with LLM("./model", **settings) as llm:
        assert len(llm.generate(["Once upon a time"], SamplingParams(max_tokens=4))[0].outputs[0].token_ids) == 4
    assert started[0].checkpoints == [str(tmp_path / "model"), str(tmp_path / "draft")]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"how": "kill", "place": "collect", "step": 3}, r"rank \d was ended by signal 9 \(SIGKILL\) in step \d"),
        ({"how": "stop", "place": "collect", "step": 3}, r"rank \d was stopped \(SIGSTOP\) in step \d"),
        ({"how": "raise", "place": "collect", "step": 3}, r"rank \d failed: RuntimeError: the device is gone"),
        ({"how": "hang", "place": "collect", "step": 2}, r"rank \d has not answered for 2 s in step \d \("),
    ],
    ids=["kill", "stop", "raise", "hang"],
)  # fmt: skip
def test_a_rank_that_fails_is_named(fault: dict[str, Any], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    runner, nodes = on_nodes(seconds=2.0 if fault["how"] == "hang" else 60.0, all=fault)
    pids = ranks_of(nodes)
    with pytest.raises(EngineDead, match=f"^{told}"):
        drain(open_engine(runner))
    wait_gone([*pids, *(agent.pid for agent in nodes.agents)])
    if fault["how"] == "raise":
        assert "RuntimeError: the device is gone" in capfd.readouterr().err, "a rank's traceback is in the engine's log"


def test_a_rank_that_fails_at_start_is_named() -> None:
    with pytest.raises(StartupError, match=r"rank [012] failed: RuntimeError: the device is gone at start"):
        on_nodes(all={"how": "raise", "place": "start"})


@pytest.mark.parametrize("stopped", [False, True])
def test_an_agent_that_ends_takes_its_ranks_along(stopped: bool) -> None:
    """Also ranks that are stopped."""
    runner, nodes = on_nodes()
    drain(open_engine(runner))
    pids = ranks_of(nodes)
    if stopped:
        os.kill(pids[1], signal.SIGSTOP)
    nodes.agents[1].kill()
    with pytest.raises(EngineDead, match=r"^rank 1 was lost with the connection to node node-1 \(it was closed\) betw"):
        wait_until(runner.check, "the agent is missed")
    wait_gone(pids)


def test_an_agent_that_is_stopped_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while there is nothing to do."""
    monkeypatch.setattr("quire.distributed.remote_runner.NODE_SILENCE_SECONDS", 4.0)
    runner, nodes = on_nodes()
    drain(open_engine(runner))
    os.kill(nodes.agents[1].pid, signal.SIGSTOP)
    told = r"^the agent of node node-1 has been silent for 4 s between steps$"
    with pytest.raises(EngineDead, match=told):
        wait_until(runner.check, "the agent is missed")


def test_ranks_of_nodes_are_started_anew(caplog: pytest.LogCaptureFixture) -> None:
    def start(**fault: Any) -> RemoteRunner:
        return on_nodes(rank0={"vocab_size": VOCAB, **fault}, all={"vocab_size": VOCAB})[0]

    engine = opened(start(how="kill", place="collect", step=3), start)
    ask(engine)
    assert heard(engine) == undisturbed()
    clean(engine)
    assert re.search(r"was ended by signal 9 \(SIGKILL\) in step \d; ranks are started anew", caplog.text)
    engine.close()


def test_all_end_with_the_engines_process() -> None:
    code = (
        "import os, sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_nodes import on_nodes, ranks_of\n"
        "runner, nodes = on_nodes()\n"
        "pids = ranks_of(nodes)\n"
        "os.kill(pids[0], 19)\n"
        "print(*pids, *(agent.pid for agent in nodes.agents), flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    program = [sys.executable, "-c", code, *filter(None, sys.path)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=100)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 6, done.stderr
    wait_gone(pids)


def test_a_node_that_reads_nothing_is_given_up() -> None:
    runner, nodes = on_nodes(seconds=1.0)
    os.kill(nodes.agents[2].pid, signal.SIGSTOP)
    images = [ImagePixels(bytes([i]) * 32, (1, 1024, 1024, 3), bytes(3 << 20), (1, 2)) for i in range(64)]
    with pytest.raises(EngineDead, match=r"^rank 2 has not taken what it was sent for 1 s"):
        deque(map(runner.add_image, images))


def test_of_a_nodes_ranks_the_slowest_is_named() -> None:
    host: Any = object.__new__(remote_host.RemoteHost)
    host.ranks, host.channel = [None] * 3, Mock(send=Mock(side_effect=TimeoutError))
    host.states = [RankState(False, False, 7), RankState(False, False, 6), RankState(False, True, 5)]
    with pytest.raises(RingFull) as full:
        host.write(b"orders", 1.0)
    assert full.value.reader == 1


# The start


def test_nodes_must_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On versions and on the checkpoint; both are named."""
    (tmp_path / "config.json").write_text("{}")
    layout = ParallelLayout(1, 2)
    stages = (range(1), range(1, 2))
    with monkeypatch.context() as patch:
        ours = dict(node_messages.installed_versions(), torch="1.0")
        patch.setattr(node_messages, "installed_versions", lambda: ours)
        with pytest.raises(StartupError, match=r"node node-0 has torch 2.*, and this one has 1\.0\. Install the same"):
            LocalNodes(stages)(layout)
    with monkeypatch.context() as patch:
        patch.setattr(remote_host, "checkpoint_digest", lambda path: "other")
        with pytest.raises(StartupError, match=rf"{tmp_path} on node .* is not the engine's.*Copy the same model"):
            LocalNodes(stages, checkpoints=[str(tmp_path)])(layout)
    with monkeypatch.context() as patch:
        patch.setattr(remote_host, "checkpoint_digest", lambda path: "any")
        with pytest.raises(StartupError, match=r"node .* has no /nonexistent. Put the model under the same path"):
            LocalNodes(stages, checkpoints=["/nonexistent"])(layout)


def test_digests_of_checkpoints(tmp_path: Path) -> None:
    """A changed name, size, first or last block changes the digest; a file of another kind does not."""
    weights, seen = tmp_path / "model.safetensors", set()
    contents = [
        b"a" * 9 * SAMPLE_BYTES,
        b"b" + b"a" * (9 * SAMPLE_BYTES - 1),
        b"a" * (9 * SAMPLE_BYTES - 1) + b"b",
        b"",
    ]
    for content in contents:
        weights.write_bytes(content)
        seen.add(checkpoint_digest(tmp_path))
    weights.rename(tmp_path / "other.safetensors")
    seen.add(checkpoint_digest(tmp_path))
    assert len(seen) == len(contents) + 1
    (tmp_path / "README.md").write_text("x")
    assert checkpoint_digest(tmp_path) in seen
    with pytest.raises(StartupError, match="can't be read: No such file"):
        checkpoint_digest(tmp_path / "gone.gguf")


def test_an_error_of_an_agent_is_in_the_engines_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_host, "engine_environment", lambda: {"QUIRE_X": "a\0b"})
    nodes = LocalNodes((range(1),))
    with pytest.raises(StartupError, match="a rank on node node-0 was lost with the connection to node node-0"):
        nodes(ParallelLayout(1))
    assert "ValueError: embedded null byte" in capfd.readouterr().err
    assert nodes.agents[0].returncode == 1


def test_a_log_that_cannot_be_written_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    host: Any = object.__new__(remote_host.RemoteHost)
    host.ranks = []
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    host._handle_message(Frame(node_messages.LOG, memoryview(b"text")))


# Strangers


@pytest.fixture
def listener() -> Iterator[ChannelListener]:
    with closing(ChannelListener(ADDRESS, 2, KINDS, HELLO)) as made:
        yield made


def hello(listener: ChannelListener, **changed: Any) -> bytes:
    """Return the body of a HELLO."""
    info = node_agent.node_info(0)
    return write_json({"number": 0, "token": listener.token, **info._asdict(), **changed})


def closes(listener: ChannelListener, data: bytes) -> bool:
    """Return True if a connection that sends this within TLS is closed, and is no agent's."""
    channel = connect(ADDRESS, listener.port, listener.certificate, KINDS)
    channel.connection.settimeout(30)
    with closing(channel), suppress(OSError):
        channel.connection.sendall(data)
        return channel.connection.recv(1) == b"" and not listener.accepted
    return not listener.accepted


def test_an_agent_is_admitted_once(listener: ChannelListener) -> None:
    """The port is closed after the last one."""
    channels = []
    for number in range(2):
        channels.append(connect(ADDRESS, listener.port, listener.certificate, KINDS))
        channels[-1].send(HELLO, hello(listener, number=number))
        wait_until(lambda number=number: number in listener.accepted, "it is admitted")
    with pytest.raises(OSError):
        connect(ADDRESS, listener.port, listener.certificate, KINDS)
    for channel in channels:
        channel.close()


def test_a_node_may_have_a_name_for_its_address() -> None:
    with closing(ChannelListener("localhost", 1, KINDS, HELLO)) as listener:
        channel = connect("localhost", listener.port, listener.certificate, KINDS)
        channel.send(HELLO, hello(listener))
        wait_until(lambda: listener.accepted, "it is admitted")
        channel.close()


def test_agents_are_admitted_beside_connections_that_send_nothing() -> None:
    with closing(ChannelListener(ADDRESS, 40, KINDS, HELLO)) as listener, ExitStack() as idle:
        for _ in range(39):
            idle.enter_context(socket.create_connection((ADDRESS, listener.port)))
        channel = connect(ADDRESS, listener.port, listener.certificate, KINDS)
        channel.send(HELLO, hello(listener))
        wait_until(lambda: listener.accepted, "it is admitted")
        channel.close()


def test_much_that_arrives_is_received_in_parts(listener: ChannelListener) -> None:
    """Nothing of it is left where polling does not see it."""
    channel = connect(ADDRESS, listener.port, listener.certificate, KINDS)
    channel.send(HELLO, hello(listener))
    wait_until(lambda: listener.accepted, "it is admitted")
    other, received = listener.accepted[0][0], 0
    sender = threading.Thread(target=lambda: [other.send(START, b"1" * (1 << 16)) for _ in range(256)])
    sender.start()
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    while received < 256 << 16:
        assert poll.poll(30_000), f"{received} bytes have arrived"
        sizes = [len(frame.body) for frame in channel.receive()]
        assert sum(sizes) < 2 * MAX_RECEIVED_BYTES
        received += sum(sizes)
    sender.join()
    channel.close()


@pytest.mark.parametrize(
    "changed",
    [{"token": "guess"}, {"token": ""}, {"token": 7}, {"token": "\ud800"}, {"number": 2}, {"number": -1},
     {"number": "0"}, {"number": None}, {"padding": "x" * (1 << 15)}],
    ids=str,
)  # fmt: skip
def test_strangers_are_sent_away(listener: ChannelListener, changed: dict[str, Any]) -> None:
    assert closes(listener, FrameCodec(KINDS).encode(HELLO, hello(listener, **changed)))


def test_a_stranger_without_the_certificate_hears_nothing(listener: ChannelListener) -> None:
    """Nor does one that speaks no TLS, or an older one. The engine's agents trust no other certificate."""
    with socket.create_connection((ADDRESS, listener.port)) as plain:
        plain.settimeout(30)
        with suppress(ConnectionResetError):
            plain.sendall(FrameCodec(KINDS).encode(HELLO, hello(listener)))
            assert len(plain.recv(1 << 16)) < 16, "an alert of TLS, and the end"
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode, old.maximum_version = False, ssl.CERT_NONE, ssl.TLSVersion.TLSv1_2
    with socket.create_connection((ADDRESS, listener.port)) as plain, pytest.raises(OSError):
        old.wrap_socket(plain)
    with closing(ChannelListener(ADDRESS, 1, KINDS, HELLO)) as other, pytest.raises(ssl.SSLError):
        connect(ADDRESS, listener.port, other.certificate, KINDS)
    assert not listener.accepted


def test_mutated_frames_on_the_port_are_refused(listener: ChannelListener) -> None:
    rng = random.Random(7)
    frame = FrameCodec(KINDS).encode(HELLO, hello(listener))
    for _ in range(40):
        changed = bytearray(frame)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        wrong = bytes(changed)
        with suppress(WireError, ValueError):
            [read] = FrameCodec(KINDS).decode(wrong)
            if json.loads(bytes(read.body)).get("token") == listener.token:
                continue  # what was mutated is not checked here
        assert closes(listener, wrong + bytes(1 << 14))


START_FIELDS = NodeStart(2, 3, 1, 1, ["x"], {"QUIRE_X": "1"}, {}, "10.0.0.1", 80, ["aa"] * 4, ["bb"] * 4)
READERS = {
    "start": (node_messages.read_start, write_json(START_FIELDS._asdict())),
    "states": (
        lambda body: node_messages.read_states(body, 2),
        node_messages.write_states([RankState(False, True, 7), RankState(True, False, 2**40)]),
    ),
    "exit": (lambda body: node_messages.read_exit(body, 2), write_json({"number": 1, "told": "ended with status 3"})),
    "rank": (lambda body: node_messages.read_rank_head(body, 2), node_messages.RANK_HEAD.pack(1) + b"bytes"),
    "started": (
        lambda body: node_messages.read_started(body, START_FIELDS), write_json({"descriptors": [3, 4, 5, 6]})
    ),
    "info": (
        lambda body: node_messages.read_node_info(remote_host.read_json(body)),
        write_json(node_agent.node_info(80)._asdict()),
    ),
}  # fmt: skip


def test_messages_are_read_as_they_were_written() -> None:
    values = {name: read(memoryview(body)) for name, (read, body) in READERS.items()}
    assert values["start"] == START_FIELDS
    assert values["states"] == [RankState(False, True, 7), RankState(True, False, 2**40)]
    assert values["exit"] == (1, "ended with status 3")
    assert values["rank"] == (1, b"bytes")
    assert values["started"].descriptors == (3, 4, 5, 6)
    assert values["info"].port == 80


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("times", [300, pytest.param(20_000, marks=pytest.mark.full)])
def test_mutated_messages_are_refused_or_read(name: str, times: int) -> None:
    """With nothing but a WireError."""
    read, body = READERS[name]
    rng = random.Random(times)
    for _ in range(times):
        changed = bytearray(body)
        for _ in range(rng.randint(1, 6)):
            match rng.randrange(3):
                case 0 if changed:
                    changed[rng.randrange(len(changed))] = rng.randrange(256)
                case 1:
                    changed.insert(rng.randint(0, len(changed)), rng.randrange(256))
                case _ if changed:
                    del changed[rng.randrange(len(changed))]
        with suppress(WireError):
            read(memoryview(bytes(changed)))


def test_stages_admit_no_stranger() -> None:
    """A connection with another secret is closed, and the agent goes on waiting for its neighbours."""
    listener = socket.create_server((ADDRESS, 0))
    pairs = [os.urandom(32).hex() for _ in range(4)]
    start = START_FIELDS._replace(tp=2, previous_secrets=pairs, next_secrets=[])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(node_agent.open_links(start, listener)[0]))
    thread.start()
    for secret in (os.urandom(32), b"short", bytes.fromhex(pairs[1])):
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(secret)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(30)
            assert stranger.recv(1) == b""
    earlier = start._replace(previous_secrets=[], next_secrets=pairs, next_address=ADDRESS,
                             next_port=listener.getsockname()[1])  # fmt: skip
    _, following = node_agent.open_links(earlier, None)
    thread.join(30)
    assert len(found) == len(following) == 2
    following[1].sendall(b"rows")
    assert found[1].recv(4) == b"rows"
    for link in (*found, *following):
        link.close()


def test_a_stage_that_does_not_come_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "LINK_START_SECONDS", 0.1)
    listener = socket.create_server((ADDRESS, 0))
    start = START_FIELDS._replace(previous_secrets=["aa"] * 4, next_secrets=[])
    with pytest.raises(StartupError, match=r"can't connect its stage within 0\.1 s: timed out\. Check that nodes"):
        node_agent.open_links(start, listener)


def test_a_channel_reports_its_end_after_its_frames(listener: ChannelListener) -> None:
    channel = connect(ADDRESS, listener.port, listener.certificate, KINDS)
    channel.send(HELLO, hello(listener))
    wait_until(lambda: listener.accepted, "it is admitted")
    other = listener.accepted[0][0]
    other.send(START, b"1" * (1 << 20))
    other.close()
    frames: list[Any] = []
    with pytest.raises(ChannelLost, match="closed"):
        frames.extend(frame for _ in count() for frame in channel.receive())
    assert [(frame.kind, len(frame.body)) for frame in frames] == [(START, 1 << 20)]
    channel.close()
    assert isinstance(other, SecureChannel)
    assert re.fullmatch("[0-9a-f]{64}", listener.token)
