"""What stands for a picture in a prompt: the mark in its text, and the token ids that take the mark's place, one
function a family. It sees no picture.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from quire.errors import StartupError

TokenLookup = Callable[[str], int | None]
"""The id of a token in the tokenizer's vocabulary, by its text."""


class ImagePlaceholder(NamedTuple):
    """A picture's mark in the text becomes `before`, then `token` once a row (or `single_token`, where rows stand
    elsewhere), then `after`. It is one of `markers`; where they are `is_numbered` it has the picture's number, from 1
    on.

    With `images_first` (PaliGemma) pictures have no place in the text: they stand before all of it, and the prompt is
    their ids, `bos`, then the text and `prompt_suffix`.
    """

    markers: tuple[str, ...]
    token: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    single_token: bool = False
    is_numbered: bool = False
    images_first: bool = False
    bos: int | None = None
    prompt_suffix: str = ""

    def token_ids(self, rows: int) -> list[int]:
        """What the picture's mark becomes."""
        return [*self.before, *[self.token] * (1 if self.single_token else rows), *self.after]

    @property
    def row_offset(self) -> int:
        """How far behind the first of these ids the first row stands."""
        return len(self.before)

    @property
    def reserved_ids(self) -> frozenset[int]:
        """Ids that only a picture may bring into a prompt."""
        return frozenset((self.token, *self.before, *self.after))

    def find_markers(self, text: str) -> list[tuple[int, int, int]]:
        """The marks in `text`: where each begins and ends, and the picture (from 0 on) that it stands for."""
        if self.is_numbered:
            pattern = "|".join(re.escape(mark).replace("1", r"(\d{1,6})") for mark in self.markers)
            return [(*match.span(), int(match.group(1)) - 1) for match in re.finditer(pattern, text)]
        pattern = "|".join(map(re.escape, self.markers))
        return [(*match.span(), number) for number, match in enumerate(re.finditer(pattern, text))]


def llava(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """LLaVA-OneVision: as many <image> as rows."""
    return ImagePlaceholder(("<image>",), _placeholder_id(find, "<image>", token))


def internvl(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """InternVL: <img>, as many <IMG_CONTEXT> as rows, </img>. Published templates write <image> for them."""
    ends = (_placeholder_id(find, "<img>"),), (_placeholder_id(find, "</img>"),)
    return ImagePlaceholder(("<IMG_CONTEXT>", "<image>"), _placeholder_id(find, "<IMG_CONTEXT>", token), *ends)


def phi3(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """Phi-3-Vision: as many <|image|> as rows, for pictures that the text numbers."""
    return ImagePlaceholder(("<|image_1|>",), _placeholder_id(find, "<|image|>", token), is_numbered=True)


def mllama(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """Llama 3.2 Vision: one <|image|>. The rows are attended to from layers of their own."""
    return ImagePlaceholder(("<|image|>",), _placeholder_id(find, "<|image|>", token), single_token=True)


def paligemma(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """PaliGemma: as many <image> as rows, before <bos>; the prompt ends with a newline."""
    bos = _placeholder_id(find, "<bos>")
    return ImagePlaceholder(
        ("<image>",), _placeholder_id(find, "<image>", token), images_first=True, bos=bos, prompt_suffix="\n"
    )


PLACEHOLDERS: dict[str, Callable[[TokenLookup, int | None], ImagePlaceholder]] = {
    "llava": llava,
    "internvl": internvl,
    "phi3": phi3,
    "mllama": mllama,
    "paligemma": paligemma,
}


def read_placeholder(kind: str, find: TokenLookup, token: int | None = None) -> ImagePlaceholder:
    """Of the models of this kind. `token`: the id that config.json names. StartupError if the tokenizer lacks what
    stands for pictures, or means another id by it."""
    return PLACEHOLDERS[kind](find, token)


def expand_text(
    pieces: Sequence[Sequence[int]], image_rows: Sequence[int], placeholder: ImagePlaceholder
) -> tuple[list[int], list[int]]:
    """Ids of the text before, between and behind the pictures, and the pictures' rows -> the prompt, and where each
    picture's first row stands in it."""
    assert len(pieces) == len(image_rows) + 1, f"{len(pieces)} pieces of text around {len(image_rows)} pictures"
    ids, places = list(pieces[0]), []
    for rows, piece in zip(image_rows, pieces[1:], strict=True):
        places.append(len(ids) + placeholder.row_offset)
        ids += placeholder.token_ids(rows)
        ids += piece
    return ids, places


def _placeholder_id(find: TokenLookup, text: str, token: int | None = None) -> int:
    found = find(text)
    if found is None and token is None:
        raise StartupError(f"the tokenizer has no {text}, which stands for pictures", "Use the model's own tokenizer")
    if found is not None and token is not None and found != token:
        cause = f"{text} is token {found} of the tokenizer, and config.json says {token}"
        raise StartupError(cause, "Both must be of one model")
    known = token if found is None else found
    assert known is not None, "either knows it"
    return known
