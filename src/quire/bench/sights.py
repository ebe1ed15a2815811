"""What pictures cost: to encode one, and to decode with one in the prompt, beside the same text alone.

A picture of random colours is prepared as one of a user's would be, and each request has one of its own. Steps are
timed as they follow one another, so what is said is what a client would see.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from quire.bench.document import short, table
from quire.bench.shapes import built
from quire.cli.flags import config_from
from quire.control.engine import Engine
from quire.data.models.seeing_settings import PREPARATION
from quire.data.models.vision.settings import VisionSettings
from quire.errors import StartupError
from quire.source import read_source
from quire.vocabulary.media import Medium, Pixels
from quire.vocabulary.params import SamplingParams
from quire.vocabulary.pictures import Grid

if TYPE_CHECKING:
    from quire.text.pictures.preparation import Preparation

ROUNDS = 5
TEXT_FIRST = 8
"""Tokens in front of the picture."""


def flags(parser: argparse.ArgumentParser) -> None:
    """The entry's own arguments."""
    group = parser.add_argument_group("measurement")
    group.add_argument("--rows", type=int, nargs="+", default=[1], metavar="N", help="requests at once (default: 1)")
    group.add_argument("--text", type=int, default=43, metavar="N", help="tokens of each (default: %(default)s)")
    group.add_argument(
        "--picture", type=int, nargs=2, default=[1120, 1120], metavar=("HEIGHT", "WIDTH"),
        help="its pixels (default: 1120 1120)",
    )  # fmt: skip
    group.add_argument("--steps", type=int, default=100, metavar="N", help="that decode (default: %(default)s)")


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A result for each number of rows: with text alone, and with pictures."""
    from quire.text.pictures import read_preparation

    if min(*args.rows, *args.picture, args.steps) < 1 or args.text <= TEXT_FIRST:
        raise StartupError(
            "--rows, --picture, --steps and --text", f"Give numbers above 0, and {TEXT_FIRST} for --text"
        )
    config = config_from(args)
    source = read_source(config)
    said = source.config.get(PREPARATION) or {}
    vision = VisionSettings.read(source.config, said)
    how = read_preparation(said, vision.tiling, vision.normal.mean)
    with built(config) as made:
        results = []
        for rows in (1, *args.rows):  # the first isn't told: kernels of the encoder are compiled
            found: dict[str, Any] = {"model": made.name, "rows": rows, "text": args.text}
            found |= {f"text_{name}": value for name, value in _served(made.engine, rows, args, None).items()}
            sight = how, vision.cross, vision.token or 1
            found |= {f"picture_{name}": value for name, value in _served(made.engine, rows, args, sight).items()}
            found |= _encoded(made.engine, args.picture, *sight)
            results.append(found)
        return results[1:]


def _served(
    engine: Engine, rows: int, args: argparse.Namespace, sight: tuple[Preparation, bool, int] | None
) -> dict[str, Any]:
    """Seconds to each request's first token, of all requests together, and of a decoding step."""
    params = SamplingParams(temperature=0, max_tokens=args.steps + 2, ignore_eos=True, detokenize=False)
    count = 0
    prompts = []
    for i in range(rows):
        tokens = [(7 * i + 11 * j) % (engine.limits.vocab_size - 10) + 10 for j in range(args.text)]
        media, pixels = (), ()
        if sight is not None:
            tokens, media, pixels = _shown(tokens, args.picture, i, *sight)
            count = media[0].rows
        prompts.append((f"{i}", tokens, media, pixels))
    salt = f"{time.perf_counter_ns()}"  # nothing is found again
    began, times, first, seen = time.perf_counter(), list[float](), 0.0, 0
    for id, tokens, media, pixels in prompts:
        engine.add(id, tokens, params, salt=salt, media=media, pixels=pixels)
    while engine.unfinished:
        outputs = engine.step()
        seen += sum(bool(output.tokens) for output in outputs)
        if seen >= rows:
            first = first or time.perf_counter() - began
            times.append(time.perf_counter())
    gaps = [later - earlier for earlier, later in pairwise(times[2:-1])]
    return {"rows": count, "first_s": first, "step_ms": 1e3 * median(gaps) if gaps else None}


def _encoded(engine: Engine, size: Sequence[int], how: Preparation, cross: bool, token: int) -> dict[str, Any]:
    """The encoder alone, with as many parts of a picture at once as a step may have: parts, and the milliseconds that
    they take, of ROUNDS the median."""
    import torch

    from quire.data.kernels.limits import PARTS_AT_ONCE

    runner = engine.runner
    eyes, device = runner.model.eyes, runner.device
    _, _, (picture,) = _shown([0] * (TEXT_FIRST + 1), size, 0, how, cross, token)
    grid, times = Grid(*picture.grid), list[float]()
    data = torch.frombuffer(bytearray(picture.data), dtype=torch.uint8).view(picture.shape)
    with torch.inference_mode():
        parts = eyes.open(data.to(device), grid)[:PARTS_AT_ONCE]
        for _ in range(ROUNDS + 1):  # the first isn't told
            began = time.perf_counter()
            eyes.encode(parts, grid)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return {"encoded_parts": len(parts), "encode_ms": 1e3 * median(times[1:])}


def _shown(
    tokens: list[int], size: Sequence[int], number: int, how: Preparation, cross: bool, token: int
) -> tuple[list[int], tuple[Medium, ...], tuple[Pixels, ...]]:
    """A prompt with a picture of its own in it."""
    import numpy as np
    from PIL import Image

    height, width = size
    colours = np.random.default_rng(time.perf_counter_ns()).integers(0, 256, (height, width, 3), dtype=np.uint8)
    tiles, grid = how.prepare(Image.fromarray(colours))
    data, rows = tiles.tobytes(), how.tiling.rows(grid)
    pixels = Pixels(hashlib.sha256(data).digest(), tiles.shape, data, tuple(grid))
    places = 1 if cross else rows
    medium = Medium(pixels.key, TEXT_FIRST, places, rows, how.tiling.parts(grid))
    return [*tokens[:TEXT_FIRST], *[token] * places, *tokens[TEXT_FIRST:]], (medium,), (pixels,)


def show(results: Sequence[dict[str, Any]]) -> str:
    """A line a number of rows."""
    head = ("requests", "text", "rows of a picture", "parts", "ms to encode them", "ms a step, text", "picture",
            "s to all first tokens", "picture")  # fmt: skip
    names = ("rows", "text", "picture_rows", "encoded_parts", "encode_ms", "text_step_ms", "picture_step_ms",
             "text_first_s", "picture_first_s")  # fmt: skip
    return table(head, [[r[name] if i < 4 else short(r.get(name)) for i, name in enumerate(names)] for r in results])
