"""A front that lies about pictures is refused by its request, whatever it says: the engine goes on, a neighbour gets
the tokens that it gets without it, and an honest request is answered after it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from loop_driver import LoopDriver

from quire.config import EngineConfig
from quire.errors import InputError
from quire.ipc.frames import Frame, read_client_message, write_client_message
from quire.ipc.messages import AddRequests, NewRequest
from quire.protocol.columns import WireError
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.sampling_params import SamplingParams
from quire.startup.build import BuiltEngine, build
from quire.text.chat_messages import ImageSource

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, detokenize=False)
NUMBERS = (0, 1, 2, 3, 4, 5, 46, 48, 49, 96, 1000, 2**14, 2**31, 2**32 - 1)
ENTRIES = (*NUMBERS, -1, -(2**31), 2**63 - 1, -(2**63))


@pytest.fixture(scope="module")
def seeing() -> Iterator[BuiltEngine]:
    config = EngineConfig(
        model="tiny-vision", device="cpu", kv_tokens=2048, max_num_seqs=4, max_num_batched_tokens=64, swap_gib=0
    )
    made = build(config)
    yield made
    made.engine.close()


class Fronts(LoopDriver):
    """A host of that engine, and what its fronts send."""

    def __init__(self, built: BuiltEngine) -> None:
        super().__init__(built)
        self.built, self.sent = built, 0

    def asked(self, seed: int = 0, size: tuple[int, int] = (60, 80)) -> tuple[NewRequest, tuple[ImagePixels, ...]]:
        """Return a request with an image, and its pixels, as a correct client sends them."""
        array = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
        pixels = self.built.image_loader.load([ImageSource("here", array)], "")
        ids = [9, self.built.image_loader.processor.image_token_id, 10, 11]
        prompt, media = self.built.image_loader.expand_placeholders(ids, pixels, self.engine.limits)
        self.sent += 1
        return NewRequest(self.sent, f"r{self.sent}", tuple(prompt), media), tuple(pixels)

    def ask(self, asked: NewRequest, pixels: tuple[ImagePixels, ...], turns: int = 0) -> Exception | None:
        """Return the error of a request, after `turns` more iterations."""
        kind, body = write_client_message(AddRequests(self.sent, (asked,), PARAMS, "", pixels))
        self.run((0, read_client_message(Frame(kind, memoryview(body)))), most=1 + turns)
        return self.replies()[-1].error

    def tokens(self, number: int) -> list[int]:
        """Run the loop until nothing is left, and return the tokens of a request."""
        self.run()
        assert self.is_empty()
        assert (len(self.engine.image_registry.runner_pixels), self.loop.pixels.total_bytes) == (0, 0)
        return [token for output in self.outputs(number) for token in output.tokens]


def lied(rng: random.Random, medium: ImageItem, pixels: ImagePixels) -> tuple[ImageItem, ImagePixels]:
    """Change some numbers of an image. It has as many bytes as its shape says, as frames check that."""
    grid, shape = list(pixels.grid), list(pixels.shape)
    for _ in range(rng.randint(1, 3)):
        what = rng.randrange(5)
        if what == 0:
            grid[rng.randrange(len(grid))] = rng.choice(ENTRIES)
        elif what == 1:
            grid = grid * rng.randint(0, 3) if rng.random() < 0.5 else grid[: rng.randrange(4)]
        elif what == 2:
            shape[rng.randrange(3)] = rng.choice((1, 2, 3, 5, 47, 48, 49, 96))
        elif what == 3:
            medium = medium._replace(**{rng.choice(("num_embeds", "num_parts")): rng.choice(NUMBERS)})
        else:
            medium = medium._replace(num_tokens=rng.choice((1, 2, medium.num_tokens - 1, medium.num_tokens + 1)))
        grid = grid or [0]
    size = shape[0] * shape[1] * shape[2] * 3
    data = (pixels.data * (size // len(pixels.data) + 1))[:size]
    return medium, pixels._replace(grid=tuple(grid), shape=tuple(shape), data=data)


def test_lies_are_refused_and_neighbours_undisturbed(seeing: BuiltEngine) -> None:
    fronts = Fronts(seeing)
    asked, pixels = fronts.asked()
    assert fronts.ask(asked, pixels) is None
    alone = fronts.tokens(asked.number)
    rng, refused, passed = random.Random(7), 0, 0
    for round in range(25):
        neighbour, own = fronts.asked()
        assert fronts.ask(neighbour, own, turns=round % 3) is None
        for number in range(12):
            liar, honest = fronts.asked(seed=1 + number % 2, size=(48, 90))
            medium, seen = lied(rng, liar.media[0], honest[0])
            if (medium, seen) == (liar.media[0], honest[0]):
                continue
            try:
                error = fronts.ask(liar._replace(media=(medium,)), (seen,))
            except WireError:
                continue
            if error is None:  # a picture of another size, which takes as much
                passed += 1
                continue
            assert isinstance(error, InputError), (medium[1:], seen.shape, seen.grid)
            assert liar.id not in fronts.engine.requests
            refused += 1
        assert fronts.tokens(neighbour.number) == alone
    assert refused > 150
    assert passed < 20


def test_a_key_in_use_brings_no_other_pixels_in(seeing: BuiltEngine) -> None:
    fronts = Fronts(seeing)
    asked, pixels = fronts.asked(3)
    other, wider = fronts.asked(4, (48, 200))
    assert asked.media[0].num_embeds != other.media[0].num_embeds
    key = pixels[0].key
    liar: dict[str, Any] = {"media": (other.media[0]._replace(key=key),)}
    assert fronts.ask(asked, pixels) is None
    error = fronts.ask(other._replace(**liar), (wider[0]._replace(key=key),))
    assert isinstance(error, InputError)
    assert "with its tile grid" in str(error)
    assert len(fronts.tokens(asked.number)) == 6
