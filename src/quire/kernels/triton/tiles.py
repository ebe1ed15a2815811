"""Tiles of the kernels that the memory bandwidth or the number of multiprocessors limits: a table for each measured
card, in the folder `cards`. A card without one uses the table of the nearest.

`quire bench kernels --tune` measures a table. An entry is named family/format/shape/most. Its tile is for numbers up to
`most` ("more": any number), beyond the `most` of the entry before it:

- linear, by the rows of x. Shapes are the weights of Llama-3-8B: down is "deep", o "square", qkv "middle", gate_up
  "tall", the head "vocabulary". Narrow tiles occupy every multiprocessor, wide ones read x less often. Formats: "half";
  "fp8", for one row; "rounded", FP8 weights and rows that are rounded to FP8 too.
- experts, by the mean pairs of an expert; low_bit, by the rows of x or these pairs. "gated" has two weights, gate and
  up, "plain" one. "one_token" is for the experts of a single token; "narrow" for weights of few columns, by the number
  of columns.
- decode, by the programs of a multiprocessor: attention with heads of up to the size that is the shape.

Tiles on which the bits of results depend are not here. They are in the kernels' modules and the same on every card:
those of prompts, and those of --deterministic, where a row's bits must not depend on the number of rows.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import NamedTuple

import torch

from quire.errors import StartupError

CARDS = Path(__file__).with_name("cards")
MORE = sys.maxsize
_SHAPES = ("deep", "square", "middle", "tall")
ENTRIES: dict[str, tuple[int, ...]] = {
    **{f"linear/half/{shape}": (1, 8, 16, 32) for shape in (*_SHAPES, "vocabulary")},
    **{f"linear/fp8/{shape}": (1,) for shape in _SHAPES},
    **{f"linear/rounded/{shape}": (16, 32, 64) for shape in _SHAPES},
    **{f"experts/half/{shape}": (8, 16, 32, 128, MORE) for shape in ("gated", "plain")},
    "experts/one_token/narrow": (2048, MORE),
    **{f"low_bit/half/{shape}": (8, 16, 32, 64, MORE) for shape in ("gated", "plain")},
    **{f"low_bit/one_token/{shape}": (MORE,) for shape in ("gated", "plain")},
    "decode/half/64": (2, MORE), "decode/half/128": (2, 9, MORE), "decode/half/256": (MORE,),
}  # fmt: skip
"""The entries of every table: name without `most` -> the values of `most`. A warm-up runs these numbers."""


class Tile(NamedTuple):
    """The tile of one program, and its launch options. A size that the kernel has no choice of is 0: `rows` of one row,
    which is computed without tensor cores; `rows` and `depth` of attention, which are the queries and the size of a
    head."""

    rows: int  # of x, or pairs of an expert
    columns: int  # of the result: rows of the weight, or tokens
    depth: int  # of the dot products
    stages: int
    warps: int
    prefetch: int = 0  # tiles of the weight that are loaded before the wait for the preceding kernels


class Card(NamedTuple):
    """A GPU: its name, compute capability and memory bandwidth, and its tiles by entry without `most`, then by `most`,
    ascending."""

    gpu: str
    capability: tuple[int, int]
    bytes_per_s: float
    tiles: dict[str, dict[int, Tile]]


def card_tile(device: torch.device, entry: str, number: int) -> Tile:
    """Return the tile of an entry, named without `most`, for `number` rows, pairs, columns or programs."""
    return next(tile for most, tile in measured_card(device).tiles[entry].items() if number <= most)


@lru_cache
def measured_card(device: torch.device) -> Card:
    """Return the card whose tiles a GPU uses; for a CPU, where kernels are interpreted, an H200."""
    if device.type != "cuda":
        return next(card for card in shipped_cards() if card.gpu == "NVIDIA H200")
    return nearest(own_card(device), shipped_cards())


def own_card(device: torch.device) -> Card:
    """Return the properties of a GPU, without tiles."""
    from triton.runtime import driver

    number = torch.cuda.current_device() if device.index is None else device.index
    limits = driver.active.utils.get_device_properties(number)
    bandwidth = 2e3 * limits["mem_clock_rate"] * limits["mem_bus_width"] / 8  # kHz, bits; data moves twice a cycle
    return Card(torch.cuda.get_device_name(number), torch.cuda.get_device_capability(number), bandwidth, {})


def nearest(own: Card, cards: Sequence[Card]) -> Card:
    """Return the card of the same name, else that of the nearest compute capability; among equal ones, that of the
    nearest bandwidth."""

    def distance(card: Card) -> tuple[bool, int, float]:
        (major, minor), (own_major, own_minor) = card.capability, own.capability
        ratio = max(own.bytes_per_s, 1.0) / card.bytes_per_s
        return card.gpu != own.gpu, abs(10 * (major - own_major) + minor - own_minor), abs(math.log(ratio))

    return min(cards, key=distance)


@lru_cache
def shipped_cards() -> tuple[Card, ...]:
    """Return all measured cards."""
    return tuple(map(read_card, sorted(CARDS.glob("*.json"))))


def read_card(path: Path) -> Card:
    """Return the card of a file. Raise StartupError if the file is malformed."""
    tiles: dict[str, dict[int, Tile]] = {}
    try:
        content = json.loads(path.read_text())
        gpu, (major, minor), bandwidth = (content["card"][name] for name in Card._fields[:3])
        for line in content["results"]:
            entry, _, most = line["entry"].rpartition("/")
            tile = Tile(*(index(line.get(name, 0)) for name in Tile._fields))
            tiles.setdefault(entry, {})[MORE if most == "more" else int(most)] = tile
            _check_tile(entry, most, tile)
        if {entry: tuple(by_most) for entry, by_most in tiles.items()} != ENTRIES:
            raise ValueError("entries are missing, unknown or not in order")
        if not 0 < float(bandwidth) < math.inf:
            raise ValueError(f"bytes_per_s is {bandwidth}: it is above 0")
        return Card(str(gpu), (int(major), int(minor)), float(bandwidth), tiles)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(
            f"{path.name} is not a table of tiles: {type(error).__name__}: {error}",
            "Write it with quire bench kernels --tune --out FILE",
        ) from error


def _check_tile(entry: str, most: str, tile: Tile) -> None:
    """Raise ValueError if the entry's kernel cannot have this tile."""
    least = min(tile.columns, tile.stages, tile.warps, tile.prefetch + 1, tile.depth or entry.startswith("decode"))
    if least < 1 or any(size & (size - 1) for size in (*tile[:3], tile.warps)):
        raise ValueError(f"{entry}/{most} is {tile}: numbers are at least 1; sizes and warps are powers of two")
    if entry.startswith("linear") and tile.rows < int(most) and (most, tile.rows) != ("1", 0):
        raise ValueError(f"{entry}/{most} is {tile}: a tile holds all rows")
