"""The pixels that an engine's host holds: each picture once, as long as one of its requests is there, and bounded."""

from __future__ import annotations

import pytest

from quire.errors import Overloaded
from quire.link.gallery import Gallery
from quire.vocabulary.media import Pixels


def pixels(name: int, size: int = 12) -> Pixels:
    return Pixels(bytes([name]) * 32, (1, 1, size // 3, 3), bytes(size))


def test_a_picture_is_held_once() -> None:
    gallery = Gallery()
    first, again = pixels(1), pixels(1)
    assert gallery.hang([first]) == (first,)
    assert gallery.hang([again, pixels(2)])[0] is first
    assert (len(gallery), gallery.bytes) == (2, 24)
    gallery.drop([first.key])
    assert (len(gallery), gallery.bytes) == (2, 24)
    gallery.drop([first.key, pixels(2).key])
    assert (len(gallery), gallery.bytes) == (0, 0)


def test_two_users_in_one_request() -> None:
    gallery = Gallery()
    gallery.hang([pixels(1), pixels(1)])
    gallery.drop([pixels(1).key])
    assert len(gallery) == 1
    gallery.drop([pixels(1).key])
    assert len(gallery) == 0


def test_it_is_bounded() -> None:
    gallery = Gallery(most=30)
    gallery.hang([pixels(1), pixels(2)])
    with pytest.raises(Overloaded, match="have 24 bytes; with the 12 of this one they are more than 30"):
        gallery.hang([pixels(1), pixels(3)])
    gallery.hang([pixels(1)])
    assert (len(gallery), gallery.bytes) == (2, 24)
    gallery.drop([pixels(1).key] * 2)
    gallery.hang([pixels(3)])
    assert gallery.bytes == 24
