"""The decoders' path under a limit of memory: no mutated picture does more than be read or refused. As a program,
`test_picture_fuzz.py SEED COUNT MEBIBYTES [whole]`, it says what came of them as JSON; anything but a picture or a
refusal ends it. With `whole` each goes all the way to an engine's edge, by the eyes of a family of models: decoded from
a data: URI, resized, cut, keyed, placed and checked.
"""

from __future__ import annotations

import json
import math
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from picture_files import decode_file, drawn, mutated, small_files, uri, written
from published_processors import TEXT_CONFIGS, published_processor

from quire.core.validation import EngineLimits, check_pixels
from quire.errors import InputError
from quire.protocol.images import ImagePixels
from quire.text.chat_messages import ImageSource
from quire.text.images.decode import ImageLimits
from quire.text.images.loader import ImageLoader, merge_adjacent

LIMITS = ImageLimits(pixels=1 << 20)
KINDS = {b"\xff": "jpeg", b"R": "webp", b"G": "gif"}


def decoded(data: bytes, rng: random.Random) -> None:
    image = decode_file(data, LIMITS)
    assert image.mode == "RGB"
    assert 0 < image.width * image.height <= LIMITS.pixels


def taken(sight: ImageLoader, pixels: Seq[ImagePixels]) -> None:
    """Pictures that were seen have places in a prompt, and pass where an engine looks at them."""
    eyes, tiling = sight.processor, sight.processor.preprocessor.tiling  # type: ignore[attr-defined]
    ids, media = sight.expand_placeholders(
        [5, *[eyes.image_token_id] * len(pixels), 6], pixels, EngineLimits(100, 1 << 14, 1)
    )
    assert len(ids) >= 2 + len(pixels)
    for one, medium in zip(pixels, media, strict=True):
        tiles = max(40, getattr(tiling, "max_tiles", 0))
        assert len(one.data) == math.prod(one.shape) <= tiles * 3 * tiling.tile_size**2
        assert medium.num_embeds <= tiling.max_embeds
    if eyes.joins_adjacent:
        media, pixels = merge_adjacent(media, pixels)
    for i, (one, medium) in enumerate(zip(pixels, media, strict=True)):
        check_pixels(i, medium, one, tiling, eyes.joins_adjacent)


def all_the_way(sights: dict[str, ImageLoader]) -> Callable[[bytes, random.Random], None]:
    def whole(data: bytes, rng: random.Random) -> None:
        name, sight = rng.choice(list(sights.items()))
        if rng.random() < 0.25:  # a good one of a size that may be odd
            wide = round(math.exp(rng.uniform(0, math.log(1 << 13))))
            high = round(math.exp(rng.uniform(0, math.log(LIMITS.pixels / wide))))
            data = written(drawn().resize((wide, high)))
        kind = KINDS.get(data[:1], "png") if rng.random() < 0.95 else rng.choice(("png", "jpeg", "webp", "gif"))
        others = [uri(written(drawn(9, 7)))] * rng.choice((0, 0, 0, 1))
        given = [ImageSource(f"image[{i}]", one) for i, one in enumerate([uri(data, kind), *others])]
        pixels = sight.load(given, rng.choice(("", "salt")))
        try:
            taken(sight, pixels)
        except InputError as error:
            raise AssertionError(f"{name}: what was seen is refused later") from error

    return whole


def main() -> None:
    """Every file once as it is, so that all that is needed is loaded, then mutations of them under the limit."""
    seed, count, mebibytes = map(int, sys.argv[1:4])
    path = (
        all_the_way({name: ImageLoader(published_processor(name), LIMITS) for name in TEXT_CONFIGS})
        if sys.argv[4:] == ["whole"]
        else decoded
    )
    rng = random.Random(seed)
    for data in small_files().values():
        for _ in range(8):
            path(data, random.Random(0))
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20),) * 2)
    found, slowest = Counter[str](), 0.0
    for data in mutated(seed, count):
        began = time.process_time()
        try:
            path(data, rng)
            found["read"] += 1
        except InputError:
            found["refused"] += 1
        slowest = max(slowest, time.process_time() - began)
    print(json.dumps({**found, "slowest": slowest}))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory are Linux's")
@pytest.mark.parametrize(
    ("seeds", "count", "most", "how", "least"),
    [
        ([1], 300, 64, (), 10),  # MiB beyond what the program has at start; a picture of the fuzz has 20 at the most
        ([2], 200, 96, ("whole",), 40),  # and 16 where it is cut into tiles, twice while they are put together
        pytest.param(range(100, 110), 30_000, 64, (), 0, marks=[pytest.mark.soak, pytest.mark.timeout(1800)]),
        pytest.param(range(200, 210), 3000, 96, ("whole",), 600, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_mutated_pictures_are_read_or_refused(
    seeds: Seq[int], count: int, most: int, how: Seq[str], least: int
) -> None:
    """Where they go all the way, by the eyes of all families, as they are published."""
    for seed in seeds:
        command = [sys.executable, "-W", "error", __file__, str(seed), str(count), str(most), *how]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
        found = json.loads(done.stdout)
        assert found["read"] + found["refused"] == count
        assert min(found["read"], found["refused"]) > least
        assert found["slowest"] < 5


if __name__ == "__main__":
    main()
