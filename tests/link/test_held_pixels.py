"""The pixels that an engine's host holds: each picture once, as long as one of its requests is there, and bounded."""

from __future__ import annotations

import pytest

from quire.errors import Overloaded
from quire.link.held_pixels import HeldPixels
from quire.vocabulary.media import Pixels


def pixels(name: int, size: int = 12) -> Pixels:
    return Pixels(bytes([name]) * 32, (1, 1, size // 3, 3), bytes(size))


def test_all_of_the_room_can_be_used() -> None:
    held = HeldPixels(most=24)
    held.hold([pixels(1)])
    held.hold([pixels(2)])
    assert held.bytes == 24


def test_it_is_bounded() -> None:
    held = HeldPixels(most=30)
    held.hold([pixels(1), pixels(2)])
    with pytest.raises(Overloaded, match="have 24 bytes; with the 12 of this one they are more than 30"):
        held.hold([pixels(1), pixels(3)])
    held.hold([pixels(1)])
    assert (len(held), held.bytes) == (2, 24)
    held.drop([pixels(1).key] * 2)
    held.hold([pixels(3)])
    assert held.bytes == 24
