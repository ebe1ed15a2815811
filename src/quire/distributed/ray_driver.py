"""Ray's driver: a process between the engine and Ray, which keeps Ray's threads, signal handlers, environment and
crashes out of the engine's process. It has Ray place an actor for each stage; one actor of a node runs the node's agent
(quire.distributed.node_agent) as its child. It reports to the engine where stages are and how each agent ended. It ends
with the engine's process.

Only numbers and texts go through Ray, which pickles the arguments of calls; messages between engine and agents never
do."""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from quire.errors import StartupError, first_line
from quire.ipc.channel import READ_SIZE
from quire.ipc.child_process import describe_exit_code, exit_now, ignore_signals
from quire.ipc.frames import Frame, FrameCodec, read_json, write_json
from quire.protocol.columns import WireError

KINDS = range(1, 7)
PLACE, PLACED, RUN, AGENT_EXITED, AGENT_LOST, PLACEMENT_FAILED = KINDS
PR_SET_PDEATHSIG = 1
MIN_RAY_VERSION = (2, 54)  # older versions run other users' code: CVE-2026-27482
POLL_SECONDS = 0.5  # timeout of one wait
RUN_POLL_SECONDS = 0.01  # timeout of one wait for the engine's RUN
KILL_WAIT_SECONDS = 5.0  # seconds for killed processes to end
CLOSE_SECONDS = 15.0  # seconds for all of Ray to end
OBJECT_STORE_BYTES = 80 << 20  # of Ray's object store, which stays empty: about the minimum
LOOPBACK = "127.0.0.1"
QUIET: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
LOCAL_CLUSTER_ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # makes Ray listen on the loopback interface only
}
"""The environment of a cluster started here."""


class PlacementRequest(NamedTuple):
    """The stages to place: `pp` of `tp` ranks with `gpus` of a GPU each (0: on a CPU), each stage on one node, in the
    cluster at `address`, or, if that is "", in a new cluster with its files in `folder`. Python with the arguments
    `program` is a node's agent. Placement may take `patience` seconds."""

    tp: int
    pp: int
    gpus: float
    address: str
    folder: str
    program: list[str]
    patience: float

    @property
    def resource(self) -> str:
        """The resource of Ray that a stage takes."""
        return "GPU" if self.gpus else "CPU"

    @property
    def amount(self) -> float:
        """How much of it a stage takes."""
        return self.tp * (self.gpus or 1.0)

    def __str__(self) -> str:
        each = self.gpus or 1.0
        ranks = f"{self.tp} rank{'s' * (self.tp > 1)} of {each:g} {self.resource}{' each' * (self.tp > 1)}"
        return ranks if self.pp == 1 else f"{self.pp} stages of {ranks} (a stage's on one node)"


class Node(NamedTuple):
    """A node with stages: its id in Ray, its address, the numbers of its actors, and the GPUs that Ray assigned."""

    id: str
    address: str
    actors: list[int]
    gpus: list[str]


def main() -> None:
    """Run the driver. The argument is the descriptor of the engine's connection."""
    os.setsid()  # signals of a terminal do not reach Ray's processes
    os.dup2(2, 1)  # Ray prints what becomes of nodes, and the engine's standard output is for its own
    # A stopped driver continues when the engine's process ends, and sees the end of the connection.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    connection = socket.socket(fileno=int(sys.argv[1]))
    frames, outgoing = FrameCodec(KINDS), FrameCodec(KINDS)
    gone = threading.Event()

    def send(kind: int, **body: Any) -> None:
        with suppress(OSError):  # the engine has ended, which ends this process
            connection.sendall(outgoing.encode(kind, write_json(body)))

    inbox = SimpleQueue[Frame]()
    reader = threading.Thread(target=_read_engine, args=(connection, frames, inbox, gone), name="quire-parent")
    reader.daemon = True
    reader.start()
    request = PlacementRequest(**read_json(inbox.get().body))
    try:
        _run_driver(request, send, inbox, gone)
    except StartupError as error:
        send(PLACEMENT_FAILED, text=error.cause, remedy=error.remedy)
    except BaseException as error:
        send(PLACEMENT_FAILED, text=f"Ray failed: {type(error).__name__}: {first_line(error)}", remedy="")
    gone.wait()
    exit_now(0)


def _read_engine(
    connection: socket.socket, frames: FrameCodec, inbox: SimpleQueue[Frame], gone: threading.Event
) -> None:
    """Put the engine's frames into `inbox`. Set `gone` when the engine's process has ended or closed the connection;
    then end the process after CLOSE_SECONDS at the latest."""
    with suppress(OSError, WireError):
        while data := connection.recv(READ_SIZE):
            for frame in frames.decode(data):
                inbox.put(frame)
    gone.set()
    time.sleep(CLOSE_SECONDS)
    os._exit(1)


def _run_driver(
    order: PlacementRequest, send: Callable[..., None], inbox: SimpleQueue[Frame], gone: threading.Event
) -> None:
    """Place the stages, run agents, report their ends, and clean up. Raise StartupError if there is no room."""
    with ExitStack() as last, ExitStack() as undo:
        last.callback(shutil.rmtree, order.folder, ignore_errors=True)
        last.callback(end_session, os.getpid())
        ray = connect_ray(order)
        undo.callback(ray.shutdown)
        ignore_signals()
        group = create_placement_group(ray, order, gone)
        undo.callback(ray.util.remove_placement_group, group)
        actors = create_actors(ray, order, group)
        for actor in actors:
            undo.callback(ray.kill, actor)
        here, nodes = group_by_node(ray, ray.get([actor.seat.remote() for actor in actors], timeout=order.patience))
        send(PLACED, here=here, nodes=[{"address": node.address, "stages": len(node.actors)} for node in nodes])
        silence_output()
        task: dict[str, Any] = {}
        while not task and not gone.wait(RUN_POLL_SECONDS):
            with suppress(Empty):
                task = read_json(inbox.get_nowait().body)
        if gone.is_set():
            return
        running: dict[Any, int] = {}
        for number, node in enumerate(nodes):
            first, *others = (actors[index] for index in node.actors)
            host = node.address if number else ""  # the first node has no stage before its own
            own = {**task, "number": number, "host": host, "gpus": node.gpus}
            running[first.hold.remote(order.program, own)] = number
            running |= {other.reserve.remote(): number for other in others}
        if not watch_agents(ray, running, send, gone):
            undo.pop_all()  # the cluster is gone


def group_by_node(ray: Any, seats: Sequence[tuple[str, list[str]]]) -> tuple[str, list[Node]]:
    """Return this node's address, and the nodes with stages, this one first. `seats` are the node id and the GPUs of
    each actor."""
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    here = ray.get_runtime_context().get_node_id()
    nodes: dict[str, Node] = {}
    for actor, (node_id, gpus) in enumerate(seats):
        node = nodes.setdefault(node_id, Node(node_id, addresses[node_id], [], []))
        node.actors.append(actor)
        node.gpus.extend(one for one in gpus if one not in node.gpus)
    return addresses[here], sorted(nodes.values(), key=lambda node: (node.id != here, node.id))


def connect_ray(order: PlacementRequest) -> Any:
    """Connect to a cluster, or start one, and return the module ray."""
    if not order.address:
        set_cluster_environment()
        return start_cluster(order.folder, order.tp * order.pp, None if order.gpus else 0)
    ray = import_ray()
    ray.init(address=order.address, **QUIET)
    return ray


def set_cluster_environment() -> None:
    """Set the environment of a new cluster, with a token of its own. Ray must not be imported yet."""
    for name in [name for name in os.environ if name.startswith("RAY_") and not name.startswith("RAY_SERVE_")]:
        del os.environ[name]
    os.environ.update(LOCAL_CLUSTER_ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))


def import_ray() -> Any:
    """Return the module ray. Raise StartupError if it is too old."""
    ray = import_module("ray")
    if tuple(map(int, re.findall(r"\d+", ray.__version__)[:2])) < MIN_RAY_VERSION:
        raise StartupError(f"Ray is {ray.__version__}, in which other users can run code (CVE-2026-27482)",
                           f"pip install 'ray>={'.'.join(map(str, MIN_RAY_VERSION))}'")  # fmt: skip
    return ray


def start_cluster(
    folder: str, num_cpus: int | None, num_gpus: int | None, store_bytes: int = OBJECT_STORE_BYTES
) -> Any:
    """Start a cluster on the loopback interface with its files in `folder`, connect to it, and return the module ray.
    The environment is `set_cluster_environment`'s. None: all CPUs or GPUs of this host. Raise StartupError if the
    cluster listens on other interfaces."""
    ray = import_ray()
    ray.init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, include_dashboard=False,
             object_store_memory=store_bytes, _node_ip_address=LOOPBACK, _temp_dir=str(Path(folder, "r")),
             _plasma_directory=folder, _system_config={"memory_monitor_refresh_ms": 0}, **QUIET)  # fmt: skip
    listens = {node["NodeManagerAddress"] for node in ray.nodes()}
    if listens != {LOOPBACK}:
        ray.shutdown()
        cause = f"Ray {ray.__version__} listens on {', '.join(listens)}, not on the loopback interface alone"
        raise StartupError(cause, "Start a cluster of your own, and name it by --ray-address")
    return ray


def watch_agents(ray: Any, running: dict[Any, int], send: Callable[..., None], gone: threading.Event) -> bool:
    """Report the end of each call of an actor, given with its node's number, until the engine's process closes the
    connection. Return False if instead a process of a cluster started here has ended; all agents end with it."""
    ray_processes = find_ray_processes()
    while not gone.is_set():
        if failure := next(filter(None, map(describe_process_end, ray_processes.items())), ""):
            for number in running.values():
                send(AGENT_LOST, number=number, told=failure)
            end_session(os.getpid())
            return False
        ended, _ = ray.wait(list(running), timeout=POLL_SECONDS) if running else ([], gone.wait(POLL_SECONDS))
        for one in ended:
            number = running.pop(one)
            try:
                code, errors = ray.get(one)
                send(AGENT_EXITED, number=number, code=code, told=errors)
            except ray.exceptions.RayError as error:
                send(AGENT_LOST, number=number, told=f"Ray's actor: {first_line(error)}")
    return True


def create_placement_group(ray: Any, order: PlacementRequest, gone: threading.Event) -> Any:
    """Return a placement group with a bundle for each stage, on as few nodes as possible, of which this is one if there
    is room. Raise StartupError if there is no room in time."""
    pin = find_node_resource(ray, order)
    for pinned in ({pin: 0.001}, {}) if pin else ({},):
        bundles: list[dict[str, float]] = [{order.resource: order.amount} for _ in range(order.pp)]
        bundles[0] |= pinned
        group = ray.util.placement_group(bundles, strategy="PACK")
        end = time.monotonic() + order.patience / (2 if pin else 1)
        while not gone.is_set() and time.monotonic() < end:
            if group.wait(POLL_SECONDS):
                return group
        ray.util.remove_placement_group(group)
    free = ray.available_resources().get(order.resource, 0.0)
    raise StartupError(
        f"Ray found no room for {order} within {order.patience:g} s: others use it "
        f"({free:g} {order.resource}s are free); there are {describe_nodes(ray)}",
        "Wait for them to end, or use fewer ranks (--tp, --pp)",
    )


def create_actors(ray: Any, order: PlacementRequest, group: Any) -> list[Any]:
    """Create an actor in each bundle."""
    strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
    made = make_actor_class(ray)
    takes = {"num_cpus": 0, "num_gpus": order.amount} if order.gpus else {"num_cpus": order.amount, "num_gpus": 0}
    return [
        made.options(**takes, scheduling_strategy=strategy(group, placement_group_bundle_index=stage)).remote()
        for stage in range(order.pp)
    ]


def find_node_resource(ray: Any, order: PlacementRequest) -> str:
    """Return the resource that only this node has; "" if the node is too small for a stage even when idle. Raise
    StartupError if the cluster is too small when idle."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    rooms = {node["NodeID"]: int(node["Resources"].get(order.resource, 0.0) / order.amount + 1e-6) for node in nodes}
    if sum(rooms.values()) < order.pp:
        cause = f"Ray has no room for {order}: there are {describe_nodes(ray)}"
        fewer = "Use fewer ranks (--tp, --pp)"
        raise StartupError(cause, f"{fewer}, or --device cpu" if order.gpus else fewer)
    here = next(node for node in nodes if node["NodeID"] == ray.get_runtime_context().get_node_id())
    if not rooms[here["NodeID"]]:
        return ""
    return next(str(name) for name in here["Resources"] if name.startswith("node:") and "__" not in name)


def describe_nodes(ray: Any) -> str:
    """Describe the cluster's nodes in words, this node first."""
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != here)
    descriptions = (f"{node['Resources'].get('CPU', 0):g} CPUs and {node['Resources'].get('GPU', 0):g} GPUs on "
           f"{node['NodeManagerAddress']}" for node in nodes[:8])  # fmt: skip
    return ", ".join(descriptions) + (f" and {len(nodes) - 8} more nodes" if len(nodes) > 8 else "")


def find_ray_processes() -> dict[int, str]:
    """Return the names, by pid, of the children of this process without which a cluster started here fails."""
    names = {}
    for pid, parent, _, _ in list_processes():
        with suppress(OSError):
            name = os.path.basename(os.readlink(f"/proc/{pid}/exe"))
            if parent == os.getpid() and name in ("gcs_server", "raylet"):
                names[pid] = name
    return names


def describe_process_end(child: tuple[int, str]) -> str:
    """Describe how a child, given by pid and name, ended; "" if it is running. It is not reaped: its parent in Ray does
    that."""
    pid, name = child
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return ""
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return f"Ray's {name}, which {describe_exit_code(status)}"
    return f"Ray's {name}, which is gone"


def list_processes() -> Iterator[tuple[int, int, int, str]]:
    """Yield (pid, parent's pid, session, state) of every process of the system."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError, IndexError):
            state, parent, _, session = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:4]
            yield int(name), int(parent), int(session), state


def end_session(session: int) -> None:
    """Kill what is left of a session, except for its leader: processes that Ray started and did not end."""
    end = time.monotonic() + KILL_WAIT_SECONDS
    while time.monotonic() < end:
        left = [pid for pid, _, its, state in list_processes() if its == session != pid and state not in "ZX"]
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            return
        time.sleep(0.02)


def silence_output() -> None:
    """Redirect standard output and errors to /dev/null: Ray prints the ends of workers and nodes, which the engine's
    process reports in one line."""
    with open(os.devnull, "wb") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)


def make_actor_class(ray: Any) -> Any:
    """Return the actor's class. It is local and imports only the standard library, so Ray's workers do not import
    quire."""

    class Holder:
        """Holds the resources of a stage; may run a node's agent as its child, which dies with it."""

        def seat(self) -> tuple[str, list[str]]:
            """Return the id of this node, and the GPUs that Ray assigned."""
            context = ray.get_runtime_context()
            return context.get_node_id(), [str(one) for one in context.get_accelerator_ids().get("GPU", ())]

        def reserve(self) -> None:
            """Wait until the actor is ended."""
            import threading

            threading.Event().wait()

        def hold(self, program: list[str], task: dict[str, Any]) -> tuple[int, str]:
            """Run an agent. Return its exit status, and what it wrote to standard error before it was connected."""
            import json
            import os
            import subprocess
            import sys

            child = subprocess.Popen([sys.executable, *program], stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            assert child.stdin is not None, "a pipe"
            assert child.stderr is not None, "a pipe"
            try:
                child.stdin.write(json.dumps({**task, "parent": os.getpid()}).encode() + b"\n")
                child.stdin.close()
            except OSError:
                pass  # it has ended already
            errors = child.stderr.read().decode(errors="replace")
            return child.wait(), errors[-500:]

    return ray.remote(Holder)
