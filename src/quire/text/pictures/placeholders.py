"""What stands for a picture in a prompt: the mark in its text, and the token ids that take the mark's place, one
function a family. It sees no picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import StartupError

Find = Callable[[str], int | None]
"""The id of a token in the tokenizer's vocabulary, by its text."""


class Placeholder(NamedTuple):
    """A picture's mark in the text becomes `before`, then `token` once a row (or `once`, where rows stand elsewhere),
    then `after`. It is one of `marks`; where they are `numbered` it has the picture's number, from 1 on.

    With `leads` (PaliGemma) pictures have no place in the text: they stand before all of it, and the prompt is their
    ids, `bos`, then the text and `ending`.
    """

    marks: tuple[str, ...]
    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    once: bool = False
    numbered: bool = False
    leads: bool = False
    bos: int | None = None
    ending: str = ""

    def ids(self, rows: int) -> list[int]:
        """What the picture's mark becomes."""
        return [*self.before, *[self.token] * (1 if self.once else rows), *self.after]

    @property
    def start(self) -> int:
        """How far behind the first of these ids the first row stands."""
        return len(self.before)

    @property
    def reserved(self) -> frozenset[int]:
        """Ids that only a picture may bring into a prompt."""
        return frozenset((self.token, *self.before, *self.after))

    def found(self, text: str) -> list[tuple[int, int, int]]:
        """The marks in `text`: where each begins and ends, and the picture (from 0 on) that it stands for."""
        if self.numbered:
            pattern = "|".join(re.escape(mark).replace("1", r"(\d{1,6})") for mark in self.marks)
            return [(*match.span(), int(match.group(1)) - 1) for match in re.finditer(pattern, text)]
        pattern = "|".join(map(re.escape, self.marks))
        return [(*match.span(), number) for number, match in enumerate(re.finditer(pattern, text))]


def llava(find: Find, token: int | None) -> Placeholder:
    """LLaVA-OneVision: as many <image> as rows."""
    return Placeholder(("<image>",), _known(find, "<image>", token))


def internvl(find: Find, token: int | None) -> Placeholder:
    """InternVL: <img>, as many <IMG_CONTEXT> as rows, </img>. Published templates write <image> for them."""
    ends = (_known(find, "<img>"),), (_known(find, "</img>"),)
    return Placeholder(("<IMG_CONTEXT>", "<image>"), _known(find, "<IMG_CONTEXT>", token), *ends)


def phi3(find: Find, token: int | None) -> Placeholder:
    """Phi-3-Vision: as many <|image|> as rows, for pictures that the text numbers."""
    return Placeholder(("<|image_1|>",), _known(find, "<|image|>", token), numbered=True)


def mllama(find: Find, token: int | None) -> Placeholder:
    """Llama 3.2 Vision: one <|image|>. The rows are attended to from layers of their own."""
    return Placeholder(("<|image|>",), _known(find, "<|image|>", token), once=True)


def paligemma(find: Find, token: int | None) -> Placeholder:
    """PaliGemma: as many <image> as rows, before <bos>; the prompt ends with a newline."""
    bos = _known(find, "<bos>")
    return Placeholder(("<image>",), _known(find, "<image>", token), leads=True, bos=bos, ending="\n")


FAMILIES: dict[str, Callable[[Find, int | None], Placeholder]] = {
    "llava": llava,
    "internvl": internvl,
    "phi3": phi3,
    "mllama": mllama,
    "paligemma": paligemma,
}


def read_placeholder(kind: str, find: Find, token: int | None = None) -> Placeholder:
    """Of the models of this kind. `token`: the id that config.json names. StartupError if the tokenizer lacks what
    stands for pictures, or means another id by it."""
    return FAMILIES[kind](find, token)


def spread(
    pieces: Sequence[Sequence[int]], pictures: Sequence[int], placeholder: Placeholder
) -> tuple[list[int], list[int]]:
    """Ids of the text before, between and behind the pictures, and the pictures' rows -> the prompt, and where each
    picture's first row stands in it."""
    assert len(pieces) == len(pictures) + 1, f"{len(pieces)} pieces of text around {len(pictures)} pictures"
    ids, places = list(pieces[0]), []
    for rows, piece in zip(pictures, pieces[1:], strict=True):
        places.append(len(ids) + placeholder.start)
        ids += placeholder.ids(rows)
        ids += piece
    return ids, places


def _known(find: Find, text: str, token: int | None = None) -> int:
    found = find(text)
    if found is None and token is None:
        raise StartupError(f"the tokenizer has no {text}, which stands for pictures", "Use the model's own tokenizer")
    if found is not None and token is not None and found != token:
        cause = f"{text} is token {found} of the tokenizer, and config.json says {token}"
        raise StartupError(cause, "Both must be of one model")
    known = token if found is None else found
    assert known is not None, "either knows it"
    return known
