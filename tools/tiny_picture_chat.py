"""What may be asked about a picture, and the answers; and what is said where there is no picture.

`python tools/tiny_picture_chat.py` prints a few. An answer depends on nothing but the picture's facts and the question.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from tiny_pictures import COLOURS, PLACES, SHAPES, Group, Picture, draw_pictures, held_out_pair

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
           "thirteen", "fourteen", "fifteen", "sixteen")  # fmt: skip
GREETINGS = ("Hello!", "Hello", "Hi!", "Hi", "Hey!", "Good morning!", "Good evening!", "Hello there!", "How are you?")
OTHERS = (
    "Who are you?", "What can you do?", "What are you?", "Can you help me?", "Help!", "Tell me a story.", "Thank you!",
    "Tell me a story about a fox.", "What is the capital of France?", "What is two plus three?", "Tell me a joke.",
    "What day is it today?", "What is the opposite of tall?", "Write a poem.", "What is your name?", "Why?", "Thanks!",
    "Where is Mia?", "What does a dog say?", "How old are you?", "What is the weather like?", "Can you see?", "Test",
    "What is the colour of the sky?", "Count to ten.", "Do you see pictures?", "What is a triangle?", "Goodbye!",
)  # fmt: skip
HELLO = "Hello! Please send me a picture. I can tell you what is in it."
NO_PICTURE = "Please send me a picture. I can tell you about shapes, their colours, numbers and places."


class Turn(NamedTuple):
    kind: str
    question: str
    answer: str


def plural(shape: str) -> str:
    return shape + ("es" if shape == "cross" else "s")


def named(number: int, colour: str, shape: str) -> str:
    """ "a red circle", "two red circles", "no red circle"; colour may be empty."""
    words = f"{colour} {shape if number < 2 else plural(shape)}".strip()
    if number == 1:
        return f"an {words}" if words[0] in "aeiou" else f"a {words}"
    return f"{NUMBERS[number]} {words}"


def at(place: str) -> str:
    return "in the middle" if place == "middle" else f"at the {place}"


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def there(number: int, words: str) -> str:
    return f"There {'is' if number < 2 else 'are'} {words}."


def colour_word(rng: random.Random) -> str:
    return "color" if rng.random() < 0.25 else "colour"


def total(groups: tuple[Group, ...] | list[Group]) -> int:
    return sum(group.number for group in groups)


# -- kinds of questions; each gives a turn, or None where the picture does not allow it -------------------------------


def describe(rng: random.Random, picture: Picture) -> Turn:
    question = rng.choice((
        "Describe the picture.", "What is in the picture?", "What do you see?", "Describe this picture.",
        "What is in this picture?", "Tell me what you see.", "Describe the image.", "What is in this image?",
        "Describe this image.", "What can you see in the picture?", "What do you see in this image?",
    ))  # fmt: skip
    parts = [f"{named(group.number, group.colour, group.shape)} {at(group.place)}" for group in picture.groups]
    return Turn("describe", question, capital(join(parts)) + ".")


def whole(rng: random.Random, picture: Picture) -> Turn | None:
    """What shape and colour the only group has."""
    if len(picture.groups) > 1:
        return None
    (group,) = picture.groups
    one, word, style = group.number == 1, colour_word(rng), rng.randrange(3)
    it, this, is_ = ("it", "this", "is") if one else ("they", "these", "are")
    if style == 0:
        shape = "What shape is" if one else "What shapes are"
        question = rng.choice((f"{shape} {this}?", f"{shape} {it}?", f"{shape} in the picture?"))
        things = named(1, "", group.shape) if one else plural(group.shape)
        return Turn("shape", question, capital(f"{this} {is_} {things}."))
    if style == 1:
        things = "the shape" if one else "the shapes"
        question = f"What {word} {is_} {rng.choice((this, it, things))}?"
        return Turn("colour", question, capital(f"{it} {is_} {group.colour}."))
    question = rng.choice((
        f"What {is_} {this}?", f"What {word} and shape {is_} {this}?", f"What shape and {word} {is_} {this}?",
        f"Which shape and {word} {is_} {it}?",
    ))  # fmt: skip
    return Turn("both", question, capital(f"{this} {is_} {named(group.number, group.colour, group.shape)}."))


def colour_of(rng: random.Random, picture: Picture) -> Turn | None:
    groups, shape = _of_a_shape(rng, picture)
    word, things = colour_word(rng), f"the {shape}" if total(groups) < 2 else f"the {plural(shape)}"
    is_ = "is" if total(groups) < 2 else "are"
    question = rng.choice((f"What {word} {is_} {things}?", f"Which {word} {is_} {things}?",
                           f"What is the {word} of {things}?", f"Tell me the {word} of {things}."))  # fmt: skip
    if not groups:
        return Turn("absent", question, there(0, f"no {shape}"))
    colours = list(dict.fromkeys(group.colour for group in groups))
    return Turn("colour", question, capital(f"{things} {is_} {join(colours)}."))


def place_of(rng: random.Random, picture: Picture) -> Turn | None:
    if rng.random() < 0.5:
        groups, shape = _of_a_shape(rng, picture)
        things, none = f"the {shape}" if total(groups) < 2 else f"the {plural(shape)}", f"no {shape}"
    else:
        chosen = rng.choice(picture.groups)
        groups = [group for group in picture.groups if group[1:3] == chosen[1:3]]
        things = f"the {named(2 if total(groups) > 1 else 0, chosen.colour, chosen.shape).split(' ', 1)[1]}"
        none = ""
    is_ = "is" if total(groups) < 2 else "are"
    question = rng.choice((f"Where {is_} {things}?", f"Where {is_} {things} in the picture?",
                           f"Where do you see {things}?"))  # fmt: skip
    if not groups:
        return Turn("absent", question, there(0, none))
    return Turn("place", question, capital(f"{things} {is_} {join([at(group.place) for group in groups])}."))


def count_shape(rng: random.Random, picture: Picture) -> Turn:
    groups, shape = _of_a_shape(rng, picture)
    return _count(rng, "number", total(groups), plural(shape), shape)


def count_colour(rng: random.Random, picture: Picture) -> Turn:
    colour = rng.choice(picture.groups).colour if rng.random() < 0.85 else rng.choice(list(COLOURS))
    number = total([group for group in picture.groups if group.colour == colour])
    return _count(rng, "number", number, f"{colour} shapes", f"{colour} shape")


def count_pair(rng: random.Random, picture: Picture) -> Turn:
    colour, shape = _pair(rng, picture)
    number = total([group for group in picture.groups if (group.colour, group.shape) == (colour, shape)])
    return _count(rng, "number", number, f"{colour} {plural(shape)}", f"{colour} {shape}")


def count_all(rng: random.Random, picture: Picture) -> Turn:
    return _count(rng, "total", total(picture.groups), "shapes", "shape")


def _count(rng: random.Random, kind: str, number: int, many: str, one: str) -> Turn:
    question = rng.choice((
        f"How many {many} are there?", f"How many {many} do you see?", f"How many {many} are in the picture?",
        f"Count the {many}.",
    ))  # fmt: skip
    return Turn(kind, question, there(number, f"{NUMBERS[number]} {one if number < 2 else many}"))


def what_at(rng: random.Random, picture: Picture) -> Turn:
    place = rng.choice(picture.groups).place if rng.random() < 0.75 else rng.choice(PLACES)
    question = rng.choice((f"What is {at(place)}?", f"What do you see {at(place)}?", f"What is there {at(place)}?"))
    for group in picture.groups:
        if group.place == place:
            return Turn("at", question, there(group.number, f"{named(*group[:3])} {at(place)}"))
    return Turn("at", question, f"There is nothing {at(place)}.")


def exists(rng: random.Random, picture: Picture) -> Turn:
    colour, shape = _pair(rng, picture)
    question = rng.choice((f"Is there {named(1, colour, shape)}?", f"Do you see {named(1, colour, shape)}?",
                           f"Are there {colour} {plural(shape)}?"))  # fmt: skip
    number = total([group for group in picture.groups if (group.colour, group.shape) == (colour, shape)])
    said = there(number, named(number, colour, shape))
    return Turn("exists", question, f"{'Yes' if number else 'No'}, t{said[1:]}")


def ground(rng: random.Random, picture: Picture) -> Turn:
    word = colour_word(rng)
    question = rng.choice((f"What {word} is the background?", f"What is the {word} of the background?",
                           f"Which {word} does the background have?"))  # fmt: skip
    return Turn("background", question, f"The background is {picture.ground}.")


def _of_a_shape(rng: random.Random, picture: Picture) -> tuple[list[Group], str]:
    """A shape, mostly one that is there, and its groups."""
    shape = rng.choice(picture.groups).shape if rng.random() < 0.88 else rng.choice(SHAPES)
    return [group for group in picture.groups if group.shape == shape], shape


def _pair(rng: random.Random, picture: Picture) -> tuple[str, str]:
    """A colour and a shape: of a group, of two groups, or any. What is held out is never asked for where it is not,
    or training would teach that it never is."""
    first, second, style = rng.choice(picture.groups), rng.choice(picture.groups), rng.random()
    if style < 0.55:
        return first.colour, first.shape
    pair = first.colour, second.shape
    if style >= 0.8:
        pair = rng.choice(((first.colour, rng.choice(SHAPES)), (rng.choice(list(COLOURS)), first.shape)))
    return (first.colour, first.shape) if held_out_pair(*pair) else pair


Ask = Callable[[random.Random, Picture], Turn | None]
KINDS: dict[Ask, float] = {
    describe: 4, whole: 3, colour_of: 2, place_of: 2, count_shape: 2, count_colour: 1.5, count_pair: 1, count_all: 1.5,
    what_at: 2, exists: 1.5, ground: 1,
}  # fmt: skip


def draw_turns(rng: random.Random, picture: Picture, number: int) -> list[Turn]:
    """So many questions of different kinds (fewer where the picture allows fewer); a description mostly comes last,
    so that the other answers can't be copied from it."""
    turns: list[Turn] = []
    left = dict(KINDS)
    while left and len(turns) < number:
        ask = rng.choices(list(left), list(left.values()))[0]
        del left[ask]
        turn = ask(rng, picture)
        if turn is not None:
            turns.append(Turn(turn.kind, spoken(rng, turn.question), turn.answer))
    if rng.random() < 0.7:
        turns.sort(key=lambda turn: turn.kind == "describe")
    return turns


def draw_text_turns(rng: random.Random) -> list[Turn]:
    """A conversation before any picture: greetings, questions about none, anything else."""
    turns = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        style = rng.random()
        if style < 0.3:
            turns.append(Turn("no picture", spoken(rng, rng.choice(GREETINGS)), HELLO))
        elif style < 0.6:
            turns.append(Turn("no picture", spoken(rng, rng.choice(OTHERS)), NO_PICTURE))
        else:
            picture = Picture(None, None, (Group(rng.choice((1, 2)), rng.choice(list(COLOURS)), rng.choice(SHAPES),  # type: ignore[arg-type]  # questions need no pixels
                                                 rng.choice(PLACES)),), (), "white", "flat")  # fmt: skip
            turns.append(Turn("no picture", draw_turns(rng, picture, 1)[0].question, NO_PICTURE))
    return turns


def spoken(rng: random.Random, question: str) -> str:
    """As people type: now and then without the mark at its end, or in small letters."""
    if rng.random() < 0.08:
        question = question.rstrip("?.!")
    return question.lower() if rng.random() < 0.08 else question


def main() -> None:
    rng = random.Random(0)
    for picture in draw_pictures(0, 8):
        print(*(tuple(group) for group in picture.groups), picture.ground)
        for turn in draw_turns(rng, picture, 12):
            print(f"  {turn.kind}: {turn.question} {turn.answer}")
    for _ in range(5):
        print(*draw_text_turns(rng), sep="\n")


if __name__ == "__main__":
    main()
