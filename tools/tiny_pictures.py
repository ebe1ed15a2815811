"""Pictures for the bundled vision model: groups of simple shapes on a background, and what is true of them.

It knows nothing of models and tokens. `python tools/tiny_pictures.py FOLDER` draws a few pictures to look at.
"""

from __future__ import annotations

import io
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from tiny_tiles import TILES, prepared_size, tile_count

Pixels = NDArray[np.uint8]  # [height, width, 3]
Field = NDArray[np.floating[Any]]  # in fact float32, which numpy's types lose in operations with numbers

# A colour is drawn between its anchors, which hold the values that drawing programs know by its name.
COLOURS = {
    "red": ((255, 0, 0), (200, 20, 20), (230, 45, 45)),
    "green": ((0, 128, 0), (0, 255, 0), (40, 170, 60), (20, 100, 30)),
    "blue": ((0, 0, 255), (40, 80, 220), (20, 40, 160), (60, 120, 240)),
    "yellow": ((255, 255, 0), (245, 220, 30), (255, 235, 80)),
    "orange": ((255, 165, 0), (255, 128, 0), (240, 120, 30)),
    "purple": ((128, 0, 128), (150, 50, 200), (110, 30, 140)),
    "white": ((255, 255, 255), (240, 240, 240)),
    "black": ((0, 0, 0), (30, 30, 30)),
}
GROUNDS = {**COLOURS, "grey": ((128, 128, 128), (100, 100, 100), (160, 160, 160), (190, 190, 190))}
PATTERNS = ("flat", "gradient", "stripes", "checks", "grain")
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
QUARTERS = ("top left", "top right", "bottom left", "bottom right")
PLACES = (*QUARTERS, "middle")
MOST = 4  # of a group
LEAST_PIXELS = 9.0  # of a shape's width, as drawn and as the model sees it
GAP_PIXELS = 1.5  # between two of them, likewise


class Group(NamedTuple):
    """`number` like shapes in one place."""

    number: int
    colour: str
    shape: str
    place: str


class Item(NamedTuple):
    """One shape: its centre and half its width in pixels, and the index of its group."""

    x: float
    y: float
    radius: float
    group: int


class Picture(NamedTuple):
    """`owners[y, x]` is 0 on the background, else 1 + the index of the group drawn there."""

    pixels: Pixels
    owners: NDArray[np.uint8]
    groups: tuple[Group, ...]  # as one reads: top to bottom, left to right
    items: tuple[Item, ...]
    ground: str
    pattern: str


@dataclass(frozen=True, slots=True)
class Split:
    """Which pictures may be drawn: training's, or held-out ones, each of which differs from all of training's in its
    size, in its background and in a pair of colour and shape, or of number, shape and place."""

    held_out: bool = False

    def size(self, height: int, width: int) -> bool:
        return ((height + width) % 7 == 0) == self.held_out

    def ground(self, ground: str, pattern: str) -> bool:
        held = (list(GROUNDS).index(ground) + PATTERNS.index(pattern)) % 5 == 0
        return held == self.held_out

    def groups(self, groups: list[Group]) -> bool:
        return any(map(held_out_group, groups)) == self.held_out


TRAIN, HELD_OUT = Split(), Split(held_out=True)


def held_out_pair(colour: str, shape: str) -> bool:
    """One pair of colour and shape in eight never meets in training."""
    return (list(COLOURS).index(colour) + 3 * SHAPES.index(shape)) % 8 == 0


def held_out_group(group: Group) -> bool:
    """Such a pair, or one triple of number, shape and place in eleven."""
    triple = group.number + 5 * SHAPES.index(group.shape) + 3 * PLACES.index(group.place)
    return held_out_pair(group.colour, group.shape) or triple % 11 == 0


# -- what is in it ---------------------------------------------------------------------------------------------------


def draw_size(rng: random.Random, split: Split) -> tuple[int, int]:
    """Height and width: sides of 32 to 400 pixels, one at most 2.5 times the other."""
    while True:
        long = round(math.exp(rng.uniform(math.log(32), math.log(400))))
        short = long if rng.random() < 0.3 else round(long / rng.uniform(1, 2.5))
        height, width = (long, short) if rng.random() < 0.5 else (short, long)
        if short >= 30 and split.size(height, width):
            return height, width


def draw_groups(rng: random.Random, ground: str, split: Split) -> list[Group]:
    """One to four groups in places of their own; the middle is for a group that is alone."""
    while True:
        number = rng.choices((1, 2, 3, 4), (4, 3, 2, 1))[0]
        alone = number == 1 and rng.random() < 0.35
        among = PLACES[-1:] if alone else rng.sample(QUARTERS, number)
        places = [place for place in PLACES if place in among]
        colours = [colour for colour in COLOURS if colour != ground]
        groups = [
            Group(rng.choices((1, 2, 3, 4), (10, 4, 3, 3))[0], rng.choice(colours), rng.choice(SHAPES), place)
            for place in places
        ]
        if split.groups(groups):
            return groups


def place_items(rng: random.Random, groups: list[Group], height: int, width: int) -> list[Item] | None:
    """Where each shape lies, none touching another; None where they would be too small to be told apart."""
    scale = prepared_size(height, width)[1] / width
    least, gap = (pixels / min(scale, 1.0) for pixels in (LEAST_PIXELS, GAP_PIXELS))
    items: list[Item] = []
    for index, group in enumerate(groups):
        if group.place == "middle":
            part = 0.95 if group.number == 1 else 0.4  # several there are not one in each quarter
            across, down = part * width, part * height
            left, top = (width - across) / 2, (height - down) / 2
        else:
            left = (0.55 if "right" in group.place else 0.03) * width
            top = (0.55 if "bottom" in group.place else 0.03) * height
            across, down = 0.42 * width, 0.42 * height
        placed = _fill(rng, group, index, (left, top, across, down), least, gap)
        if placed is None:
            return None
        items += placed
    return items


def _fill(
    rng: random.Random, group: Group, index: int, cell: tuple[float, float, float, float], least: float, gap: float
) -> list[Item] | None:
    """A group's shapes in its cell (left, top, width, height), each in a part of it."""
    left, top, across, down = cell
    most = 1 if group.number == 1 else MOST
    layouts = [(r, c) for r in range(1, 5) for c in range(1, 5) if group.number <= r * c <= most]
    rows, columns = max(layouts, key=lambda it: (min(down / it[0], across / it[1]), rng.random()))
    step_x, step_y = across / columns, down / rows
    widest = min(0.94 * min(step_x, step_y), min(step_x, step_y) - gap)
    if widest < least:
        return None
    low = max(least, (0.3 if group.number == 1 else 0.6) * widest)
    size = rng.uniform(low, widest) if low < widest else widest
    items = []
    for cell_index in rng.sample(range(rows * columns), group.number):
        row, column = divmod(cell_index, columns)
        width = min(widest, max(least, size * rng.uniform(0.85, 1.1)))
        slack_x, slack_y = (step_x - width - gap) / 2, (step_y - width - gap) / 2
        if group.number == 1:  # its centre stays clear of the lines between places
            slack_x = min(slack_x, across * (0.055 if group.place == "middle" else 0.2))
            slack_y = min(slack_y, down * (0.055 if group.place == "middle" else 0.2))
        x = left + (column + 0.5) * step_x + rng.uniform(-slack_x, slack_x)
        y = top + (row + 0.5) * step_y + rng.uniform(-slack_y, slack_y)
        items.append(Item(x, y, width / 2, index))
    return items


# -- how it looks ----------------------------------------------------------------------------------------------------


def tint(rng: random.Random, anchors: tuple[tuple[int, int, int], ...]) -> Field:
    """A colour between two of the anchors; a third of the time, an anchor itself."""
    first, second = (np.array(rng.choice(anchors), np.float32) for _ in range(2))
    if rng.random() < 0.35:
        return first
    mixed = first + rng.random() * (second - first)
    mixed += np.array([rng.uniform(-8, 8) for _ in range(3)], np.float32)
    return np.clip(mixed, 0, 255)


def inside(shape: str, x: Field, y: Field) -> Field:
    """Below zero inside of the shape, above outside; x and y are 1 at half its width, y grows downwards."""
    ax, ay = np.abs(x), np.abs(y)
    if shape == "circle":
        return np.hypot(x, y) - 1
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.78) - 0.22
    if shape == "square":
        return np.maximum(ax, ay) - 0.86
    if shape == "triangle":
        down = (y - 0.22) / 1.1
        edge: Field = np.maximum(down, 0.8660254 * ax / 1.1 - 0.5 * down) - 0.5
        return edge
    if shape == "cross":
        return np.minimum(np.maximum(ax - 0.96, ay - 0.3), np.maximum(ax - 0.3, ay - 0.96))
    assert shape == "star", f"no shape {shape}"
    fifth, inner = math.pi / 5, 0.42
    angle = np.abs((np.arctan2(x, -y) + fifth) % (2 * fifth) - fifth)
    distance = np.hypot(x, y)
    edge_x, edge_y = inner * math.cos(fifth) - 1, inner * math.sin(fifth)  # from a tip to the next hollow
    return ((distance * np.cos(angle) - 1) * edge_y - distance * np.sin(angle) * edge_x) / math.hypot(edge_x, edge_y)


def paint_ground(rng: random.Random, ground: str, pattern: str, height: int, width: int) -> Field:
    first, second = tint(rng, GROUNDS[ground]), tint(rng, GROUNDS[ground])
    if pattern == "flat":
        return np.broadcast_to(first, (height, width, 3)).copy()
    y, x = np.arange(height, dtype=np.float32)[:, None], np.arange(width, dtype=np.float32)
    angle = rng.uniform(0, math.pi)
    along = x * math.cos(angle) + y * math.sin(angle)
    period = rng.uniform(4, 40)
    share: Field
    if pattern == "gradient":
        share = (along - along.min()) / max(1.0, float(np.ptp(along)))
    elif pattern == "stripes":
        share = (along % period < period / 2).astype(np.float32)
    elif pattern == "checks":
        share = ((x // period + y // period) % 2).astype(np.float32)
    else:
        share = np.random.default_rng(rng.getrandbits(32)).random((height, width), np.float32)
    return first + share[..., None] * (second - first)


def paint_item(rng: random.Random, canvas: Field, owners: Pixels, item: Item, shape: str, colour: Field) -> None:
    """Draw one shape, a little turned, over what is there; edges are smooth, or in steps of a pixel."""
    height, width = owners.shape
    reach = 1.2 * item.radius + 1
    top, left = max(0, int(item.y - reach)), max(0, int(item.x - reach))
    bottom, right = min(height, int(item.y + reach) + 2), min(width, int(item.x + reach) + 2)
    y = ((np.arange(top, bottom, dtype=np.float32) + 0.5 - item.y) / item.radius)[:, None]
    x = (np.arange(left, right, dtype=np.float32) + 0.5 - item.x) / item.radius
    turn = 0.0 if rng.random() < 0.4 else rng.uniform(-0.2, 0.2)
    x, y = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    field = inside(shape, x, y) * item.radius
    cover = np.clip(0.5 - field, 0, 1) if rng.random() < 0.7 else (field < 0).astype(np.float32)
    part = canvas[top:bottom, left:right]
    part += cover[..., None] * (colour - part)
    owners[top:bottom, left:right][cover > 0.5] = item.group + 1


def spoil(rng: random.Random, canvas: Field) -> Pixels:
    """As a camera or a file format would: noise in one picture of three, JPEG in one of three."""
    if rng.random() < 0.33:
        noise = np.random.default_rng(rng.getrandbits(32)).standard_normal(canvas.shape, np.float32)
        canvas = canvas + noise * rng.uniform(1, 12)
    pixels: Pixels = np.clip(canvas + 0.5, 0, 255).astype(np.uint8)
    if rng.random() < 0.33:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=rng.randint(40, 95))
        pixels = np.array(Image.open(file))
    return pixels


def draw_picture(rng: random.Random, split: Split = TRAIN, most_tiles: int = TILES) -> Picture:
    """A picture of the split, of at most `most_tiles` tiles."""
    while True:
        height, width = draw_size(rng, split)
        if tile_count(height, width) > most_tiles:
            continue
        ground = rng.choice(list(GROUNDS))
        pattern = rng.choices(PATTERNS, (8, 3, 2, 2, 2))[0]
        if not split.ground(ground, pattern):
            continue
        groups = draw_groups(rng, ground, split)
        items = place_items(rng, groups, height, width)
        if items is not None:
            break
    canvas = paint_ground(rng, ground, pattern, height, width)
    owners = np.zeros((height, width), np.uint8)
    colours = [tint(rng, COLOURS[group.colour]) for group in groups]
    for item in items:
        paint_item(rng, canvas, owners, item, groups[item.group].shape, colours[item.group])
    return Picture(spoil(rng, canvas), owners, tuple(groups), tuple(items), ground, pattern)


def draw_pictures(seed: int, number: int, split: Split = TRAIN) -> Iterator[Picture]:
    rng = random.Random(seed)
    for _ in range(number):
        yield draw_picture(rng, split)


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for index, picture in enumerate(draw_pictures(0, 24)):
        Image.fromarray(picture.pixels).save(folder / f"{index}.png")
        print(index, picture.pixels.shape, picture.ground, picture.pattern, *map(tuple, picture.groups))


if __name__ == "__main__":
    main()
