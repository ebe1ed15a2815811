"""Frames between an engine and its ranks: read as they were said, and an error for whatever else."""

from __future__ import annotations

import random
from contextlib import suppress

import pytest
from geometries import one_size

from quire.config import EngineConfig
from quire.distributed import rank_messages
from quire.distributed.rank_messages import FAILED, KINDS, InitMessage, RankFailure
from quire.distributed.rendezvous import Meeting
from quire.errors import StartupError
from quire.ipc.frames import Frame, FrameCodec
from quire.protocol.columns import WireError
from quire.protocol.images import ImagePixels
from quire.protocol.parallel_layout import MAX_RANKS, Shard

CONFIG = EngineConfig.of(model="x", device="cpu", dtype="float32", page_sizes="max", state_tokens=64)
HELLO = InitMessage(CONFIG, Shard(1, 4), (0, 2), 128, 60.0, Meeting(0, 1, (7, 8, 9)))
GEOMETRY = one_size(((0, 1), None), ((2,), 9), pages=20, page_bytes=256, slots=5, width=8, tokens=4, host=3)
PIXELS = ImagePixels(b"k" * 32, (1, 2, 2, 3), bytes(12), (1, 2))
FAILURE = RankFailure("RuntimeError: gone", "Use another", True)
BODIES = {
    "hello": (rank_messages.read_init, rank_messages.write_init(HELLO), HELLO),
    "bind": (rank_messages.read_bind, rank_messages.write_bind(GEOMETRY), GEOMETRY),
    "see": (rank_messages.read_add_image, rank_messages.write_add_image(PIXELS), PIXELS),
    "forget": (rank_messages.read_remove_image, b"k" * 32, b"k" * 32),
    "sleep": (rank_messages.read_sleep, b"\2", 2),
    "wake": (rank_messages.read_wake, b'{"tags":["weights"]}', ["weights"]),
    "warm": (rank_messages.read_warm_up, rank_messages.WARM_UP_BODY.pack(2048, 99), (2048, 99)),
    "failed": (
        lambda body: rank_messages.read_failure(Frame(FAILED, body)),
        rank_messages.write_failure(FAILURE),
        FAILURE,
    ),
    "answer": (
        rank_messages.read_step_result,
        rank_messages.STEP_RESULT_HEAD.pack(3, 2**64 - 1, 7) + b"rest",
        (3, 2**64 - 1, 7, b"rest"),
    ),
}


@pytest.mark.parametrize(
    "part", [(4, 4, 0, 1), (0, 1, 2, 2), (-1, 4, 0, 1), (0, 1, -1, 2), (0, MAX_RANKS, 0, 2)], ids=str
)
def test_parts_that_there_can_not_be_are_refused(part: tuple[int, int, int, int]) -> None:
    with pytest.raises(WireError, match="is not a rank and number of ranks, stage and number of stages"):
        rank_messages.read_init(memoryview(rank_messages.write_init(HELLO._replace(part=Shard(*part)))))
    with pytest.raises(WireError, match="kind: 18 is not a kind of frame"):
        list(FrameCodec(KINDS).decode(FrameCodec().encode(18, b"")))


@pytest.mark.parametrize("count", [300, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", BODIES)
def test_mutated_bodies_are_refused_or_read(name: str, count: int) -> None:
    """Unchanged ones are read as they were written."""
    read, body, said = BODIES[name]
    assert read(memoryview(body)) == said
    rng = random.Random(name)
    for _ in range(count):
        mutated = bytearray(body)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(mutated))
            mutated[at : at + rng.choice((0, 1, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 2)))
            mutated = mutated or bytearray(b"x")
        with suppress(WireError, StartupError):
            read(memoryview(mutated))
