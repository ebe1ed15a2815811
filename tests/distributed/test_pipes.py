"""Pipes between stages on CPUs: what one stage sends the next one receives, and who waits is known."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from wired import slowest

from quire.distributed.rendezvous import RankRendezvous
from quire.distributed.stage_pipes import StagePipes
from quire.errors import PeerLost
from quire.protocol.parallel_layout import ParallelLayout

Stages = tuple[RankRendezvous, StagePipes, StagePipes]


@pytest.fixture
def stages() -> Iterator[Stages]:
    """Yield the rendezvous of two stages of one rank each, and their pipes."""
    layout = ParallelLayout(1, 2)
    meeting = RankRendezvous(layout)
    first, last = (StagePipes(part, meeting.meeting.fds(part), 5.0) for part in layout.shards())
    yield meeting, first, last
    meeting.close()


def test_a_stage_receives_what_the_one_before_sent(stages: Stages) -> None:
    _, first, last = stages
    x, delta = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]])
    first.send(x, delta)
    first.send(delta, None)
    got = [None if one is None else one.tolist() for _ in range(2) for one in last.receive(1, 2, torch.float32)]
    assert got == [[[1.0, 2.0]], [[3.0, 4.0]], [[3.0, 4.0]], None]


def test_a_host_that_cannot_be_reached_is_another_rank_s_failure(stages: Stages) -> None:
    _, first, _ = stages
    first._next = Mock(sendall=Mock(side_effect=OSError(errno.EHOSTUNREACH, "No route to host")))
    with pytest.raises(PeerLost, match="another stage has left"):
        first.send(torch.ones(1, 2), None)


def test_a_rank_that_waits_for_another_stage_is_not_the_one_behind(stages: Stages) -> None:
    meeting, first, _ = stages
    assert slowest(meeting, 2) == 0
    with first._marked_as_waiting():
        assert slowest(meeting, 2) == 1
