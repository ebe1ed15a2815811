"""Messages between an engine and the agents of nodes (quire.distributed.node_agent). Messages between ranks and the
engine (quire.distributed.rank_messages) pass through as bytes."""

from __future__ import annotations

import struct
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from quire.distributed.rendezvous import Meeting
from quire.errors import StartupError
from quire.ipc.frames import read_field, read_json, read_uint32, write_json
from quire.protocol.columns import WireError
from quire.protocol.parallel_layout import MAX_RANKS, ParallelLayout

KINDS = range(1, 11)
(
    HELLO,  # agent: its number, the token, and a NodeInfo
    START,  # engine: a NodeStart
    STARTED,  # agent: the descriptors of a Meeting
    START_FAILED,  # agent: text and remedy
    ORDERS,  # engine: bytes for the ring
    TO_RANK,  # engine: a rank's number on the node, then bytes for its socket
    FROM_RANK,  # agent: a rank's number on the node, then bytes of its socket
    RANK_EXITED,  # agent: a rank's number on the node, and how it ended
    STATES,  # agent: for each rank of the node, True if it is stopped, and its RankRendezvous.progress
    LOG,  # agent: what the agent and its ranks wrote to standard output and errors
) = KINDS
RANK_HEAD = struct.Struct("<I")
MAX_ORDER_BYTES = 1 << 20  # of one ORDERS; longer orders are divided
PACKAGES = ("torch", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""Packages of which all nodes must have the same version, besides quire."""


class NodeInfo(NamedTuple):
    """An agent's report about its node: the port at which it waits for the ranks of the stage before, versions of
    packages by name ("": not installed), the CPU cores for ranks, and total and free bytes of RAM."""

    port: int
    versions: dict[str, str]
    cores: int
    total_bytes: int
    free_bytes: int


class NodeStart(NamedTuple):
    """What an agent is to start: the ranks of `num_stages` stages from `first_stage` on, of `pp` stages of `tp` ranks
    each, as Python with the arguments `program` and with these environment variables. `checkpoints` are the digests of
    the model's and the draft model's folder or file, by path. Agents of neighbouring stages connect for each rank: the
    earlier one to `next_address` and `next_port` of the later one. `previous_secrets` and `next_secrets` have two texts
    for each connection, with which the earlier agent begins and the later one answers, in hexadecimal."""

    tp: int
    pp: int
    first_stage: int
    num_stages: int
    program: list[str]
    environment: dict[str, str]
    checkpoints: dict[str, str]
    next_address: str
    next_port: int
    previous_secrets: list[str]
    next_secrets: list[str]

    @property
    def layout(self) -> ParallelLayout:
        """The layout of all ranks."""
        return ParallelLayout(self.tp, self.pp)

    @property
    def stages(self) -> range:
        """The stages of the node."""
        return range(self.first_stage, self.first_stage + self.num_stages)


def read_node_info(data: Mapping[str, Any]) -> NodeInfo:
    """Read the NodeInfo in a HELLO. Raise WireError if it is malformed."""
    versions = read_field(data, "versions", dict)
    if len(versions) > 32 or not all(isinstance(one, str) for one in versions.values()):
        raise WireError("versions", "not texts")
    port = read_uint32(data, "port")
    if port >= 1 << 16:
        raise WireError("port", f"{port} is none")
    sizes = [read_field(data, name, int) for name in ("total_bytes", "free_bytes")]
    return NodeInfo(port, versions, max(read_uint32(data, "cores"), 1), *sizes)


def read_start(body: memoryview) -> NodeStart:
    """Read a START. Raise WireError if it is malformed."""
    data = read_json(body)
    fields = {name: read_field(data, name, type_of) for name, type_of in START_TYPES.items()}
    start = NodeStart(**fields)
    values = *start.environment.values(), *start.checkpoints.values()
    texts = [*start.program, *values, *start.previous_secrets, *start.next_secrets]
    if not all(isinstance(text, str) for text in texts):
        raise WireError("START", "not texts")
    first, count = start.first_stage, start.num_stages
    if not (start.tp > 0 and 0 <= first < first + count <= start.pp and start.tp * start.pp <= MAX_RANKS):
        raise WireError("START", f"stages {first} and {count - 1} more of {start.pp} with {start.tp} ranks each")
    return start


START_TYPES: dict[str, type[Any]] = {
    "tp": int, "pp": int, "first_stage": int, "num_stages": int, "program": list, "environment": dict,
    "checkpoints": dict, "next_address": str, "next_port": int, "previous_secrets": list,
    "next_secrets": list,
}  # fmt: skip


def read_rank_head(body: memoryview, count: int) -> tuple[int, bytes]:
    """Return the rank's number and the bytes of a TO_RANK or FROM_RANK. Raise WireError unless the number is below
    `count`."""
    if len(body) < RANK_HEAD.size:
        raise WireError("rank", f"{len(body)} bytes")
    (number,) = RANK_HEAD.unpack_from(body)
    return _checked_number(number, count), bytes(body[RANK_HEAD.size :])


def read_exit(body: memoryview, count: int) -> tuple[int, str]:
    """Return the rank's number and the description of a RANK_EXITED. Raise WireError if it is malformed."""
    data = read_json(body)
    return _checked_number(read_uint32(data, "number"), count), read_field(data, "told", str)[:1000]


def _checked_number(number: int, count: int) -> int:
    if number >= count:
        raise WireError("rank", f"{number}, and the node has {count}")
    return number


class RankState(NamedTuple):
    """A rank is stopped by a signal; it waits for another stage; the count of its exchanges."""

    stopped: bool
    waiting: bool
    exchanges: int


def write_states(states: list[RankState]) -> bytes:
    """Return the body of a STATES."""
    return write_json({"states": states})


def read_states(body: memoryview, count: int) -> list[RankState]:
    """Read a STATES. Raise WireError if it is malformed."""
    states = read_field(read_json(body), "states", list)
    match states:
        case [*rows] if len(rows) == count and all(
            isinstance(row, list) and [*map(type, row)] == [bool, bool, int] for row in rows
        ):
            return [RankState(*row) for row in rows]
    raise WireError("states", f"{str(states)[:80]} is not of {count} ranks")


def read_started(body: memoryview, start: NodeStart) -> Meeting:
    """Read a STARTED. Raise WireError if it is malformed."""
    descriptors = read_field(read_json(body), "descriptors", list)
    if not all(type(one) is int and one >= 0 for one in descriptors):
        raise WireError("descriptors", "not numbers")
    return Meeting(start.first_stage, start.num_stages, tuple(descriptors))


def installed_versions() -> dict[str, str]:
    """Return the versions of quire and of PACKAGES here."""
    versions = {"quire": str(sys.modules["quire"].__version__)}  # an import would be circular
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = ""
    return versions


def check_versions(node: str, versions: Mapping[str, str]) -> None:
    """Raise StartupError if a node has other versions than this one."""
    for name, ours in installed_versions().items():
        theirs = versions.get(name, "")
        if theirs != ours:
            raise StartupError(
                f"node {node} has {name} {theirs or 'not installed'}, and this one has {ours or 'it not installed'}",
                "Install the same versions on all nodes",
            )
