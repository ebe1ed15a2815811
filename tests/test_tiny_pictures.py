"""The vision model's pictures: what is said of them is what their pixels show, held-out ones differ from training's,
and they are prepared and placed in a prompt as transformers does it."""

from __future__ import annotations

import math
import random
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from transformers import AutoTokenizer, LlavaOnevisionForConditionalGeneration
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))  # scripts, not a part of the package

import tiny_picture_chat as chat
import tiny_pictures as pictures
import tiny_tiles as tiles
import tiny_vision_data as data
import tiny_vision_model as vision


def parts_of(mask: np.ndarray) -> list[np.ndarray]:
    """The pixels [n, 2] of each connected part."""
    image, parts = Image.fromarray(mask.astype(np.uint8)).copy(), []  # the copy can be drawn on
    while len(left := np.argwhere(np.asarray(image) == 1)):
        y, x = (int(at) for at in left[0])
        ImageDraw.floodfill(image, (x, y), 2 + len(parts))
        parts.append(np.argwhere(np.asarray(image) == 2 + len(parts)))
    return parts


def outline(shape: str, turn: float) -> np.ndarray:
    """A shape drawn by Pillow, cut to its box and made 40 pixels a side."""
    canvas = Image.new("L", (300, 300))
    pen = ImageDraw.Draw(canvas)

    def polygon(points: list[tuple[float, float]]) -> None:
        cos, sin = math.cos(turn), math.sin(turn)
        pen.polygon([(150 + 100 * (x * cos - y * sin), 150 + 100 * (x * sin + y * cos)) for x, y in points], fill=255)

    if shape in ("circle", "ring"):
        pen.ellipse((50, 50, 250, 250), fill=255)
        if shape == "ring":
            pen.ellipse((94, 94, 206, 206), fill=0)
    elif shape == "square":
        polygon([(-1, -1), (1, -1), (1, 1), (-1, 1)])
    elif shape == "triangle":
        polygon([(math.sin(a), -math.cos(a)) for a in (0, 2 * math.pi / 3, 4 * math.pi / 3)])
    elif shape == "star":
        radii = [(1.0, 0.42)[i % 2] for i in range(10)]
        polygon([(r * math.sin(i * math.pi / 5), -r * math.cos(i * math.pi / 5)) for i, r in enumerate(radii)])
    else:
        for x, y in ((1, 0.31), (0.31, 1)):
            polygon([(-x, -y), (x, -y), (x, y), (-x, y)])
    return np.asarray(canvas.crop(canvas.getbbox()).resize((40, 40))) > 127


OUTLINES = {shape: [outline(shape, turn) for turn in (-0.2, -0.1, 0, 0.1, 0.2)] for shape in pictures.SHAPES}


def likest_shape(part: np.ndarray) -> str:
    y, x = part.min(0)
    mask = np.zeros(part.max(0) - (y, x) + 1, bool)
    mask[part[:, 0] - y, part[:, 1] - x] = True
    seen = np.asarray(Image.fromarray(mask).convert("L").resize((40, 40))) > 127

    def overlap(shape: str) -> float:
        return max((seen & one).sum() / (seen | one).sum() for one in OUTLINES[shape])

    return max(OUTLINES, key=overlap)


def likest_colour(rgb: np.ndarray, among: dict[str, tuple[tuple[int, int, int], ...]]) -> str:
    def distance(name: str) -> float:
        ends = [np.array(anchor, float) for anchor in among[name]]
        return min(np.abs(a + t * (b - a) - rgb).sum() for a in ends for b in ends for t in np.linspace(0, 1, 6))

    return min(among, key=distance)


def place_at(y: float, x: float) -> str:
    return f"{'top' if y < 0.5 else 'bottom'} {'left' if x < 0.5 else 'right'}"


def facts_in(pixels: np.ndarray) -> tuple[Counter[tuple[str, str, str]], str]:
    """(colour, shape, place) of each thing on a flat background, and the background, from pixels alone."""
    height, width = pixels.shape[:2]
    ground = pixels[0, 0].astype(int)
    things = []
    for part in parts_of(np.abs(pixels - ground).sum(-1) > 40):
        if len(part) < 9:  # the end of a tip, which steps of a pixel have cut off
            continue
        box = (part.min(0) + part.max(0)) / 2 + 0.5
        colour = np.median(pixels[part[:, 0], part[:, 1]], axis=0)
        things.append((likest_colour(colour, pictures.COLOURS), likest_shape(part), box / (height, width)))
    middle = all(max(abs(y - 0.5), abs(x - 0.5)) < 0.16 for *_, (y, x) in things)
    named = [(colour, shape, "middle" if middle else place_at(*at)) for colour, shape, at in things]
    return Counter(named), likest_colour(ground, pictures.GROUNDS)


def large_clean_pictures(split: pictures.Split, number: int) -> list[pictures.Picture]:
    """Their shapes are large enough to be told from their outlines."""
    rng, found = random.Random(5), []
    while len(found) < number:
        picture = pictures.draw_picture(rng, split, clean=True)
        if min(item.radius for item in picture.items) > 9 and max(picture.owners.shape) < 300:
            found.append(picture)
    return found


@pytest.mark.parametrize("split", [pictures.TRAIN, pictures.HELD_OUT])
def test_pixels_show_what_is_said(split: pictures.Split):
    for picture in large_clean_pictures(split, 40):
        want = Counter({(g.colour, g.shape, g.place): g.number for g in picture.groups})
        assert facts_in(picture.pixels) == (want, picture.ground)


def counted(text: str) -> int:
    first = text.split()[0].lower()
    return 1 if first in ("a", "an") else chat.NUMBERS.index(first)


def test_answers_follow_from_the_facts():
    rng, seen = random.Random(0), Counter()
    for picture in pictures.draw_pictures(3, 300):
        facts = Counter({(g.colour, g.shape, g.place): g.number for g in picture.groups})
        for turn in chat.draw_turns(rng, picture, 11):
            seen[turn.kind] += 1
            asked = turn.question.lower()
            of = Counter({key: n for key, n in facts.items() if re.search(rf"\b{key[1]}(e?s)?\b", asked)})
            if turn.kind == "describe":
                parts = re.split(r", | and ", turn.answer.rstrip("."))
                told = Counter()
                for part in parts:
                    number, colour, shape, place = re.fullmatch(
                        r"(\w+) (\w+) (\w+) (?:at|in) the ([\w ]+)", part
                    ).groups()
                    shape = next(one for one in pictures.SHAPES if shape.startswith(one))
                    told[colour, shape, place] += counted(number)
                assert told == facts
            elif turn.kind == "total":
                assert counted(turn.answer.split(" ", 2)[2]) == facts.total()
            elif turn.kind == "number":
                colour = next((one for one in pictures.COLOURS if re.search(rf"\b{one}\b", asked)), None)
                wanted = facts if "shapes" in asked else of
                number = sum(n for key, n in wanted.items() if colour in (None, key[0]))
                assert counted(turn.answer.split(" ", 2)[2]) == number
            elif turn.kind == "background":
                assert turn.answer == f"The background is {picture.ground}."
            elif turn.kind == "at":
                place = next(one for one in pictures.PLACES if one in asked)
                here = [(key, n) for key, n in facts.items() if key[2] == place]
                assert ("nothing" in turn.answer) == (not here)
                for (colour, shape, _), number in here:
                    assert counted(turn.answer.split(" ", 2)[2]) == number
                    assert f" {colour} {shape}" in turn.answer
            elif turn.kind == "place" and not any(colour in asked for colour in pictures.COLOURS):
                assert {one for one in pictures.PLACES if one in turn.answer} == {key[2] for key in of}
            elif turn.kind == "colour" and of:
                assert {one for one in pictures.COLOURS if one in turn.answer} == {key[0] for key in of}
            elif turn.kind == "absent":
                assert not of
            elif turn.kind == "exists":
                wanted = next(one for one in pictures.COLOURS if re.search(rf"\b{one}\b", asked))
                assert turn.answer.startswith("Yes" if any(key[0] == wanted for key in of) else "No")
    assert seen.keys() == {"describe", "total", "number", "background", "at", "place", "colour", "absent", "exists",
                           "shape", "both"}  # fmt: skip


def test_held_out_pictures_are_unlike_training_s():
    train, held = ([*pictures.draw_pictures(9, 300, split)] for split in (pictures.TRAIN, pictures.HELD_OUT))
    for of in (lambda p: p.owners.shape, lambda p: (p.ground, p.pattern)):
        assert not {of(picture) for picture in train} & {of(picture) for picture in held}
    pairs = {(group.colour, group.shape) for picture in train for group in picture.groups}
    triples = {(group.number, group.shape, group.place) for picture in train for group in picture.groups}
    for picture in held:
        new = [g for g in picture.groups if (g.colour, g.shape) not in pairs or (g[0], *g[2:]) not in triples]
        assert new, picture.groups
    assert len(pairs) == len(pictures.COLOURS) * len(pictures.SHAPES) * 7 // 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    vision.save(vision.build(3), folder)
    return folder


def test_prepared_and_read_as_transformers_does(saved: Path):
    theirs = LlavaOnevisionForConditionalGeneration.from_pretrained(saved, dtype=torch.float32).eval()
    processor = LlavaOnevisionImageProcessorPil.from_pretrained(saved)
    ours, image = vision.load(saved).eval(), theirs.config.image_token_id
    grids = set()
    for height, width in ((31, 47), (48, 48), (97, 61), (61, 97), (60, 150), (300, 121), (57, 200), (224, 224)):
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3)).astype(np.uint8)
        cut, places = tiles.tiles_of(pixels), tiles.features_of(height, width)
        given = processor(Image.fromarray(pixels), return_tensors="pt")
        shown = (torch.from_numpy(cut).permute(0, 3, 1, 2).float() / 255 - tiles.MEAN) / tiles.STD
        torch.testing.assert_close(given["pixel_values"][0], shown, atol=1e-6, rtol=0)
        ids = torch.tensor([[0, 3, *[image] * len(places), 300, 5, 4]])
        feature = torch.full_like(ids, -1)
        feature[0, 2:-3] = torch.from_numpy(places)
        padded = torch.zeros(1, tiles.TILES, tiles.TILE, tiles.TILE, 3)
        padded[0, : len(cut)] = torch.from_numpy(cut)
        with torch.inference_mode():
            want = theirs(ids, pixel_values=given["pixel_values"], image_sizes=given["image_sizes"]).logits
            got = vision.logits_at(ours, vision.read(ours, ids, feature, vision.see(ours, padded)))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        grids.add(tiles.best_grid(height, width))
    assert grids == set(tiles.GRIDS)


def test_a_row_is_the_chat_template_s_prompt(saved: Path):
    tokenizer, codec, row = AutoTokenizer.from_pretrained(saved), data.Codec(), np.zeros(1, data.ROW)[0]
    rng, image = random.Random(2), tokenizer.convert_tokens_to_ids(vision.IMAGE)
    for picture in pictures.draw_pictures(11, 20):
        turns = chat.draw_turns(rng, picture, 3)
        data.clear(row)
        places = data.fill_picture(row, picture)
        assert codec.fill(row, [data.Part(places, turns)]) == len(turns)
        said: list[dict[str, object]] = []
        for turn in turns:
            parts = [{"type": "text", "text": turn.question}, {"type": "image"}]  # its pictures go first all the same
            said.append({"role": "user", "content": turn.question if said else parts})
            said.append({"role": "assistant", "content": turn.answer})
        ids = tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
        at = ids.index(image)
        ids[at : at + 1] = [image] * len(places)
        assert row["ids"][: len(ids)].tolist() == ids
        assert row["feature"][at : at + len(places)].tolist() == places
        answers = [codec.tokenizer.decode(row["ids"][row["answer"] == 1 + i].tolist()) for i in range(len(turns))]
        assert answers == [turn.answer for turn in turns]


def test_labels_of_patches_name_every_shape():
    for picture in pictures.draw_pictures(4, 100):
        labels = data.picture_labels(picture)
        number = sum(group.number for group in picture.groups)
        assert labels[1:, :, 2].sum() == number
        colours = {1 + list(pictures.COLOURS).index(group.colour) for group in picture.groups}
        assert set(labels[..., 0].flat) - {0} <= colours
        assert ((labels[..., 0] > 0) == (labels[..., 1] > 0)).all()


def test_a_second_picture_has_tiles_and_features_of_its_own():
    rng, codec, row, found = random.Random(8), data.Codec(), np.zeros(1, data.ROW)[0], 0
    image = codec.special[vision.IMAGE]
    while found < 5:
        data.clear(row)
        parts = data.draw_parts(rng, row)
        assert (row["labels"] != data.UNKNOWN).any() == any(part.features for part in parts)
        if len(parts) == 2 and all(part.features for part in parts):
            assert codec.fill(row, parts) >= 2
            used, features = 0, row["feature"][row["ids"] == image].tolist()
            assert features == parts[0].features + parts[1].features
            for part in parts:
                own = [feature for feature in part.features if feature != tiles.NEWLINE]
                assert own[: tiles.SIDE**2] == list(range(used, used + tiles.SIDE**2))
                assert max(own) // tiles.SIDE**2 < tiles.TILES
                used = (max(own) // tiles.SIDE**2 + 1) * tiles.SIDE**2
            found += 1
