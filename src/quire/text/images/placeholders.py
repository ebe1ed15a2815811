"""Image placeholders in prompts: the marker in the text, and the token ids that replace it; one function per model
family. Independent of image data.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from quire.errors import StartupError

TokenLookup = Callable[[str], int | None]
"""Returns the id of a token in the tokenizer's vocabulary by its text."""


class ImagePlaceholder(NamedTuple):
    """An image's marker in the text is replaced by `before`, then one `token` per row (one in all with `single_token`,
    where rows are not in the prompt), then `after`. `markers` are the possible markers; with `is_numbered` they contain
    the image's number, from 1.

    With `images_first` (PaliGemma) images have no position in the text: the prompt is their ids, `bos`, the text and
    `prompt_suffix`. `surrounding`: the text before and after an image's ids (Gemma-3), tokenized with the other text.
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
    surrounding: str = ""

    def token_ids(self, rows: int) -> list[int]:
        """Return the ids that replace a marker."""
        return [*self.before, *[self.token] * (1 if self.single_token else rows), *self.after]

    @property
    def reserved_ids(self) -> frozenset[int]:
        """The ids that only images may put into a prompt."""
        return frozenset((self.token, *self.before, *self.after))

    def find_markers(self, text: str) -> list[tuple[int, int, int]]:
        """Return the markers in `text`: start, end, and the index of the image, from 0."""
        if self.is_numbered:
            pattern = "|".join(re.escape(mark).replace("1", r"(\d{1,6})") for mark in self.markers)
            return [(*match.span(), int(match.group(1)) - 1) for match in re.finditer(pattern, text)]
        pattern = "|".join(map(re.escape, self.markers))
        return [(*match.span(), number) for number, match in enumerate(re.finditer(pattern, text))]


def llava(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """LLaVA-OneVision: one <image> per row."""
    return ImagePlaceholder(("<image>",), _placeholder_id(find, "<image>", token))


def internvl(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """InternVL: <img>, one <IMG_CONTEXT> per row, </img>. Published templates write <image> instead."""
    ends = (_placeholder_id(find, "<img>"),), (_placeholder_id(find, "</img>"),)
    return ImagePlaceholder(("<IMG_CONTEXT>", "<image>"), _placeholder_id(find, "<IMG_CONTEXT>", token), *ends)


def phi3(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """Phi-3-Vision: one <|image|> per row; the text numbers the images."""
    return ImagePlaceholder(("<|image_1|>",), _placeholder_id(find, "<|image|>", token), is_numbered=True)


def mllama(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """Llama 3.2 Vision: a single <|image|>; the rows are read by cross-attention layers."""
    return ImagePlaceholder(("<|image|>",), _placeholder_id(find, "<|image|>", token), single_token=True)


def paligemma(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """PaliGemma: one <image> per row, before <bos>; the prompt ends with a newline."""
    bos = _placeholder_id(find, "<bos>")
    return ImagePlaceholder(
        ("<image>",), _placeholder_id(find, "<image>", token), images_first=True, bos=bos, prompt_suffix="\n"
    )


def gemma3(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """Gemma-3: <start_of_image>, one <image_soft_token> per row, <end_of_image>, between empty lines."""
    start, end = (_placeholder_id(find, f"<{name}_of_image>") for name in ("start", "end"))
    soft = _placeholder_id(find, "<image_soft_token>", token)
    return ImagePlaceholder(("<start_of_image>",), soft, (start,), (end,), surrounding="\n\n")


def gemma4(find: TokenLookup, token: int | None) -> ImagePlaceholder:
    """Gemma-4: <|image>, one <|image|> per row, <image|>."""
    ends = (_placeholder_id(find, "<|image>"),), (_placeholder_id(find, "<image|>"),)
    return ImagePlaceholder(("<|image|>",), _placeholder_id(find, "<|image|>", token), *ends)


PLACEHOLDERS: dict[str, Callable[[TokenLookup, int | None], ImagePlaceholder]] = {
    "llava": llava,
    "internvl": internvl,
    "phi3": phi3,
    "mllama": mllama,
    "paligemma": paligemma,
    "gemma3": gemma3,
    "gemma4": gemma4,
}


def read_placeholder(kind: str, find: TokenLookup, token: int | None = None) -> ImagePlaceholder:
    """Return the placeholder of the models of this kind. `token` is the id in config.json. Raise StartupError if the
    tokenizer lacks a placeholder token, or has it under another id."""
    return PLACEHOLDERS[kind](find, token)


def _placeholder_id(find: TokenLookup, text: str, token: int | None = None) -> int:
    id = find(text)
    if id is None and token is None:
        raise StartupError(f"the tokenizer has no {text}, which stands for images", "Use the model's own tokenizer")
    if id is not None and token is not None and id != token:
        cause = f"{text} is token {id} of the tokenizer, and config.json says {token}"
        raise StartupError(cause, "Both must be of one model")
    known = token if id is None else id
    assert known is not None, "the tokenizer or config.json has the id"
    return known
