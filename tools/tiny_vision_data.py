"""Pictures with conversations as rows for training: drawn by worker processes, read through shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import queue
import random
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from tiny_picture_chat import NUMBERS, Turn, draw_text_turns, draw_turns
from tiny_pictures import COLOURS, MOST, QUARTERS, SHAPES, TRAIN, Picture, Split, draw_picture
from tiny_text import ASSISTANT, BEGIN, END, SYSTEM, USER
from tiny_tiles import (
    MOST_FEATURES,
    NEWLINE,
    PATCH,
    SIDE,
    TILE,
    TILES,
    best_grid,
    features_of,
    prepared_size,
    tile_count,
    tiles_of,
)
from tiny_vision_model import IMAGE, shared_tokenizer
from tokenizers import Tokenizer

TEXT = 184  # tokens of a row that are not a picture's
LENGTH = MOST_FEATURES + TEXT
TURNS = 7  # of a picture, as far as they fit
UNKNOWN = 255  # a patch that has no label: its tile is not there
SYSTEMS = ("You are a helpful assistant.", "Answer shortly.", "You describe pictures.")
# `labels` holds for each patch the colour and the shape at its middle (0 for the background) and how many shapes have
# their middle in it; `answer` is 1 + a turn's index where a token of its answer stands, else 0.
ROW = np.dtype([
    ("tiles", np.uint8, (TILES, TILE, TILE, 3)),
    ("labels", np.uint8, (TILES, SIDE * SIDE, 3)),
    ("ids", np.int16, LENGTH),
    ("feature", np.int16, LENGTH),
    ("answer", np.uint8, LENGTH),
])  # fmt: skip


class Part(NamedTuple):
    """Turns of a conversation, and the features of the picture that opens them, in their order; none is no picture."""

    features: list[int]
    turns: list[Turn]


class Codec:
    """Text to tokens; questions and answers repeat, so they are kept."""

    def __init__(self) -> None:
        self.tokenizer: Tokenizer = shared_tokenizer()
        self.special = {t: self.tokenizer.token_to_id(t) for t in (BEGIN, SYSTEM, USER, ASSISTANT, END, IMAGE)}
        self.encode = lru_cache(maxsize=100_000)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def fill(self, row: Any, parts: list[Part], system: str = "") -> int:
        """Write a conversation, as the chat template puts it, into a row; how many of its turns fitted."""
        special = self.special
        ids, feature, answers = [special[BEGIN]], [-1], [0]
        if system:
            ids += [special[SYSTEM], *self.encode(system), special[END]]
        asked = [(turn, part.features * (i == 0)) for part in parts for i, turn in enumerate(part.turns)]
        fitted = 0
        for turn, picture in asked:
            question, answer = self.encode(turn.question), (*self.encode(turn.answer), special[END])
            if len(ids) + len(picture) + len(question) + len(answer) + 3 > LENGTH:
                break
            feature += [-1] * (len(ids) + 1 - len(feature)) + picture
            ids += [special[USER], *[special[IMAGE]] * len(picture), *question, special[END], special[ASSISTANT]]
            answers += [0] * (len(ids) - len(answers)) + [fitted + 1] * len(answer)
            ids += answer
            fitted += 1
        row["ids"], row["feature"], row["answer"] = special[END], -1, 0
        row["ids"][: len(ids)], row["feature"][: len(feature)], row["answer"][: len(answers)] = ids, feature, answers
        return fitted


def like_words() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each token that is a colour, a shape, a number or a place, those that are one too, itself among them [tokens,
    most], and how many these are [tokens]; of others none. And whether a token begins a word [tokens]."""
    tokenizer = shared_tokenizer()
    kinds = (COLOURS, SHAPES, NUMBERS[1 : MOST + 1], *zip(*map(str.split, QUARTERS)))
    likes = torch.zeros((tokenizer.get_vocab_size(), max(map(len, kinds))), dtype=torch.long)
    sizes = torch.zeros(len(likes), dtype=torch.long)
    for kind in kinds:
        for words in ([f" {word}" for word in kind], [word.capitalize() for word in kind]):
            said = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
            ids = torch.tensor([one[0] for one in said if len(one) == 1], dtype=torch.long).unique()
            likes[ids, : len(ids)], sizes[ids] = ids, len(ids)
    begins = [tokenizer.decode([token])[:1] == " " for token in range(len(likes))]
    return likes, sizes, torch.tensor(begins)


def picture_labels(picture: Picture) -> NDArray[np.uint8]:
    """ROW's labels of a picture's own tiles [tiles, SIDE * SIDE, 3]."""
    owners = tiles_of(picture.owners, Image.Resampling.NEAREST)[:, PATCH // 2 :: PATCH, PATCH // 2 :: PATCH]
    colours = np.array([0, *(1 + list(COLOURS).index(group.colour) for group in picture.groups)], np.uint8)
    shapes = np.array([0, *(1 + SHAPES.index(group.shape) for group in picture.groups)], np.uint8)
    middles = np.zeros(owners.shape, np.uint8)
    height, width = picture.owners.shape
    (down, across), (high, wide) = best_grid(height, width), prepared_size(height, width)
    for item in picture.items:
        middles[0, int(item.y * SIDE / height), int(item.x * SIDE / width)] += 1
        x = (item.x * wide / width + (across - wide) // 2) / PATCH
        y = (item.y * high / height + (down - high) // 2) / PATCH
        tile = 1 + int(y // SIDE) * (across // TILE) + int(x // SIDE)
        middles[tile, int(y) % SIDE, int(x) % SIDE] += 1
    return np.stack((colours[owners], shapes[owners], np.minimum(middles, 2)), axis=-1).reshape(len(owners), -1, 3)


def clear(row: Any) -> None:
    row["tiles"], row["labels"] = 0, UNKNOWN


def fill_picture(row: Any, picture: Picture, first: int = 0) -> list[int]:
    """Write a picture's tiles and labels into a cleared row, from the tile `first` on; its features' order."""
    tiles = tiles_of(picture.pixels)
    row["tiles"][first : first + len(tiles)] = tiles
    row["labels"][first : first + len(tiles)] = picture_labels(picture)
    features = features_of(*picture.owners.shape)
    order: list[int] = np.where(features == NEWLINE, NEWLINE, features + first * SIDE * SIDE).tolist()
    return order


def draw_parts(rng: random.Random, row: Any) -> list[Part]:
    """A conversation for training. Most are about one picture; some have none, or talk before the picture comes, or
    have a second picture later (where both have few tiles)."""
    if rng.random() < 1 / 30:
        return [Part([], draw_text_turns(rng))]
    picture = draw_picture(rng, TRAIN)
    parts = [Part(fill_picture(row, picture), draw_turns(rng, picture, TURNS))]
    used = tile_count(*picture.owners.shape)
    if used + 2 <= TILES and rng.random() < 0.3:
        picture = draw_picture(rng, TRAIN, most_tiles=TILES - used)
        parts.append(Part(fill_picture(row, picture, used), draw_turns(rng, picture, TURNS)))
        for part in parts:
            del part.turns[TURNS // 2 :]
    elif rng.random() < 0.04:
        parts.insert(0, Part([], draw_text_turns(rng)))
    return parts


def fill_training(rows: NDArray[Any], rng: random.Random, codec: Codec) -> None:
    for row in rows:
        clear(row)
        codec.fill(row, draw_parts(rng, row), rng.choice(SYSTEMS) if rng.random() < 0.05 else "")


def judged_row(rng: random.Random, row: Any, codec: Codec, split: Split) -> tuple[Turn, Picture]:
    """One question about one picture of the split."""
    clear(row)
    picture = draw_picture(rng, split)
    turns = draw_turns(rng, picture, 1)
    assert codec.fill(row, [Part(fill_picture(row, picture), turns)]) == 1, "the question does not fit its row"
    return turns[0], picture


def judged_rows(seed: int, number: int, split: Split) -> tuple[NDArray[Any], list[Turn]]:
    rng, codec, rows = random.Random(seed), Codec(), np.zeros(number, ROW)
    return rows, [judged_row(rng, row, codec, split)[0] for row in rows]


def judged_rows_at_once(seed: int, number: int, split: Split, workers: int) -> tuple[NDArray[Any], list[Turn]]:
    """The same rows for any number of workers, which are forked."""
    parts = 16
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        drawn = pool.starmap(judged_rows, [(seed + i, number // parts, split) for i in range(parts)])
    return np.concatenate([rows for rows, _ in drawn]), [turn for _, turns in drawn for turn in turns]


def without_pictures(seed: int, number: int) -> tuple[NDArray[Any], list[Turn]]:
    """Conversations that hold no picture, all of whose answers count."""
    rng, codec, rows = random.Random(seed), Codec(), np.zeros(number, ROW)
    turns = [draw_text_turns(rng) for _ in rows]
    for row, said in zip(rows, turns):
        clear(row)
        codec.fill(row, [Part([], said)])
    return rows, [said[-1] for said in turns]


def _work(seed: int, memory: mmap.mmap, rows: int, free: Any, ready: Any) -> None:
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng, codec = random.Random(seed), Codec()
    slots = np.frombuffer(memory, ROW).reshape(-1, rows)
    while (slot := free.get()) is not None:
        fill_training(slots[slot], rng, codec)
        ready.put(slot)


class Drawers:
    """Worker processes that draw rows for training, in chunks. They are forked, so make it before a GPU is touched."""

    def __init__(self, workers: int, seed: int, rows: int = 256) -> None:
        context = multiprocessing.get_context("fork")
        memory = mmap.mmap(-1, 3 * workers * rows * ROW.itemsize)
        self.slots = np.frombuffer(memory, ROW).reshape(-1, rows)
        self.free, self.ready = context.Queue(), context.Queue()
        self.processes = [
            context.Process(target=_work, args=(seed + i, memory, rows, self.free, self.ready), daemon=True)
            for i in range(workers)
        ]
        for process in self.processes:
            process.start()
        for slot in range(len(self.slots)):
            self.free.put(slot)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
            process.join()


class Rows:
    """Drawn rows on the device: the latest `capacity` of them, of which batches are drawn."""

    def __init__(self, drawers: Drawers, capacity: int, device: str, seed: int) -> None:
        self.drawers, self.capacity = drawers, capacity
        self.held, self.drawn, self.device = 0, 0, device
        self.fields = to_device(np.zeros(0, ROW), device)
        self.fields = {
            name: torch.zeros((capacity, *field.shape[1:]), dtype=field.dtype, device=device)
            for name, field in self.fields.items()
        }
        self.random = torch.Generator(device).manual_seed(seed)

    def take(self, wait: bool = False) -> None:
        """Put what the workers have ready onto the device, in place of the oldest; with `wait`, at least a chunk."""
        while True:
            try:
                slot = self.drawers.ready.get(timeout=60) if wait else self.drawers.ready.get_nowait()
            except queue.Empty:
                assert not wait, "no worker drew a picture within a minute"
                return
            wait = False
            rows = self.drawers.slots[slot]
            at = self.drawn % (self.capacity // len(rows) * len(rows))
            for name, field in to_device(rows, self.device).items():
                self.fields[name][at : at + len(rows)] = field
            self.drawers.free.put(slot)
            self.drawn += len(rows)
            self.held = max(self.held, at + len(rows))

    def draw(self, number: int) -> dict[str, torch.Tensor]:
        at = torch.randint(self.held, (number,), generator=self.random, device=self.device)
        return {name: field[at] for name, field in self.fields.items()}


def to_device(rows: NDArray[Any], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(rows[name])).to(device) for name in ROW.names or ()}
