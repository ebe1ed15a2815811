"""Validation of requests before they are queued. Every error names the value and the limit."""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from quire.errors import InputError, Overloaded, PromptTooLong, short_repr
from quire.protocol.image_tiling import MAX_IMAGE_SIDE, ImageTiling, TileGrid
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.kv_cache_config import KVCacheConfig
from quire.protocol.sampling_params import SamplingParams

MAX_SALT = 1024
PROMPTS_PER_REQUEST = 16  # the average that the queue has room for
# Token ids after the vocabulary that only stand for images; the embedding has rows for them (Mllama).
EXTRA_TOKEN_IDS = 8
NEEDS_OUTPUT = ", and the output needs at least one more"

FitsFunction = Callable[[list[int], int], bool]
"""Returns True if branches of these lengths, with a common prompt of this length, fit into an empty memory."""


class EngineLimits(NamedTuple):
    """The limits of an engine."""

    vocab_size: int
    max_len: int
    max_queued: int
    held_by: str = "the model"  # what limits max_len: the model, the memory or an option
    hidden: int = 0  # dimensions of an embedding; 0: no embeddings

    def check_queue(self, more: int, batches: int, waiting: int) -> None:
        """Check that a batch of `more` requests may join the `waiting` requests of `batches` batches. Raise Overloaded
        if the queue is too full now, InputError if the batch is too large for an empty queue."""
        most = self.max_queued * PROMPTS_PER_REQUEST
        if 1 < more > most:
            each = f"{PROMPTS_PER_REQUEST} for each of --max-num-queued-reqs"
            raise InputError(
                f"there are {more} prompts, but at most {most} may wait ({each}): send fewer at once", "prompt"
            )
        if batches >= self.max_queued:
            raise Overloaded(f"the queue is full: {batches} of {self.max_queued} requests are waiting")
        if waiting + more > most:
            raise Overloaded(f"the queue is full: {waiting} of {most} prompts are waiting")

    def check_length(self, length: int, min_output: int = 1) -> None:
        """Raise InputError (PromptTooLong) for an empty prompt, or one that leaves no room for `min_output` tokens."""
        if length == 0:
            raise InputError("the prompt is empty: it must have at least one token", "prompt")
        if length + min_output > self.max_len:
            detail = NEEDS_OUTPUT if min_output else ""
            raise self.length_error(f"{length} tokens", f"{self.max_len}", detail)

    def length_error(self, length: str, limit: str, detail: str, param: str = "prompt") -> PromptTooLong:
        """Return the error for a prompt of `length`, such as "300 tokens", above the `limit`. `detail` follows the
        length in the message. Clients recognize this error by its first and last words, which are OpenAI's."""
        held_by = "" if self.held_by == "the model" else f" ({self.held_by} holds no more)"
        return PromptTooLong(
            f"This model's maximum context length is {self.max_len} tokens{held_by}. However, the prompt has "
            f"{length}{detail}. Please reduce the length of the input prompt",
            param, length, limit,
        )  # fmt: skip

    def resolved(self, params: SamplingParams, pooling: str, keeps_partial_prompt: bool) -> SamplingParams:
        """Return the parameters with `pooling` as the default. Raise InputError if the engine can't follow them.
        `keeps_partial_prompt`: layers keep only a part of each prompt, or all tokens of a prompt see one another."""
        params.check_vocabulary(self.vocab_size)
        if params.prompt_logprobs is not None and keeps_partial_prompt:
            raise InputError(
                f"prompt_logprobs is {params.prompt_logprobs}, and this model can't score prompts: its layers keep "
                "only a part of each prompt, or prompt tokens attend to later ones",
                "prompt_logprobs",
            )
        if params.pooling is not None:
            self.check_embedding()
            kind = pooling if params.pooling == "auto" else params.pooling
            params = replace(params, pooling=kind)
        if params.bad_words:
            raise InputError("bad_words need a tokenizer to make token ids of them", "bad_words")
        if params.structured is not None and params.grammar is None:
            raise InputError("structured output needs a tokenizer to make a grammar of it", "structured_outputs")
        return params

    def check_embedding(self, dimensions: int | None = None) -> None:
        """Raise InputError if the model has no embeddings, or none with this number of dimensions."""
        if not self.hidden:
            why = (
                "its runner has no hidden states, its layers keep only a part of each prompt, or prompt tokens attend "
                "to later ones"
            )
            raise InputError(f"this model has no embeddings: {why}", "model")
        if dimensions is not None and not 1 <= dimensions <= self.hidden:
            raise InputError(
                f"dimensions must be between 1 and {self.hidden}, got {str(dimensions)[:40]}", "dimensions"
            )

    def check_prompt(self, prompt: Sequence[int], images: Sequence[ImageItem] = (), min_output: int = 1) -> list[int]:
        """Return the prompt's tokens. Raise InputError (PromptTooLong) if there are none, if they leave no room for
        `min_output` tokens, or if an id is invalid. Tokens that stand for `images` may have the extra ids after the
        vocabulary, which no output has."""
        self.check_length(len(prompt), min_output)
        if {*map(type, prompt)} == {int} and min(prompt) >= 0 and max(prompt) < self.vocab_size:
            return list(prompt)
        for i, token in enumerate(prompt):
            if type(token) is not int or not 0 <= token < self.vocab_size:
                beyond = type(token) is int and 0 <= token < self.vocab_size + EXTRA_TOKEN_IDS
                if beyond and any(image.start <= i < image.end for image in images):
                    continue
                shown, most = repr(token)[:40], self.vocab_size - 1
                raise InputError(f"prompt token {i} is {shown}; token ids are integers from 0 to {most}", "prompt")
        return list(prompt)

    def resolve_max_tokens(
        self, prompt_len: int, params: SamplingParams, width: int, max_seqs: int, fits: FitsFunction
    ) -> int:
        """Return how many tokens a request of `width` branches may generate: its max_tokens, at most the model's
        length; by default also at most what the memory holds. Raise InputError for more than `max_seqs` branches,
        PromptTooLong if the memory is too small."""
        room = self.max_len - prompt_len
        wanted = room if params.max_tokens is None else min(params.max_tokens, room)
        if width > max_seqs:
            name = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
            what, name = (name, name) if params.method is None else ("the width of the method", "method")
            raise InputError(f"{what} is {width}, but at most {max_seqs} sequences run at once", name)

        def fits_output(output: int) -> bool:
            return fits([prompt_len + output] * width, prompt_len)

        if params.max_tokens is None and not fits_output(wanted):
            wanted = bisect(range(1, wanted + 1), False, key=lambda output: not fits_output(output))
        if wanted < params.min_output or not fits_output(wanted):
            raise PromptTooLong(
                f"{width} x ({prompt_len} prompt + {wanted} output) tokens don't fit into the KV memory; "
                "ask for fewer branches or a smaller max_tokens, or start with a larger --kv-gib",
                "max_tokens",
            )
        return wanted


def check_images(images: Sequence[ImageItem], tokens: Sequence[int], kv_config: KVCacheConfig) -> None:
    """Raise InputError if the model takes no images, or if they overlap or are out of order in the prompt."""
    if images and not kv_config.has_images:
        raise InputError(f"the prompt has {len(images)} images, and this model or its memory takes none", "media")
    end = 0
    for i, image in enumerate(images):
        if not end <= image.start < image.end <= len(tokens) or min(image.num_embeds, image.num_parts) < 1:
            raise InputError(
                f"image {i} has tokens {image.start} to {image.end} of the prompt, {image.num_embeds} embeddings and "
                f"{image.num_parts} parts; it must have at least one of each, start at token {end} or later, and end "
                f"within the prompt's {len(tokens)} tokens",
                "media",
            )
        if kv_config.sight and image.num_embeds != image.num_tokens:
            raise InputError(
                f"image {i} has {image.num_embeds} embeddings for {image.num_tokens} tokens; this model needs "
                "one for each token",
                "media",
            )
        end = image.end


def check_pixels(i: int, image: ImageItem, pixels: ImagePixels, tiling: ImageTiling, is_joined: bool) -> None:
    """Raise InputError unless `tiling` tiles an image to this grid and these pixels, and image `i` of the prompt has as
    many tokens, embeds and parts. With `is_joined` the pixels may be those of several images that are encoded as
    one."""
    size, numbers = len(TileGrid._fields), pixels.grid
    grids = [TileGrid(*numbers[at : at + size]) for at in range(0, len(numbers) - size + 1, size)]
    known = 1 <= len(grids) == len(numbers) / size and (is_joined or len(grids) == 1)
    if not known or not all(_is_valid_grid(grid, tiling) for grid in grids):
        raise InputError(f"image {i} has the tile grid {short_repr(numbers)}, which this model doesn't use", "media")
    shape = sum(map(tiling.num_tiles, grids)), tiling.tile_size, tiling.tile_size, 3
    if pixels.shape != shape or len(pixels.data) != math.prod(shape):
        raise InputError(
            f"image {i} has {len(pixels.data)} bytes of shape {short_repr(pixels.shape)}; with its tile grid the shape "
            f"must be {shape}",
            "media",
        )
    rows, parts = sum(map(tiling.num_embeds, grids)), sum(map(tiling.num_parts, grids))
    takes = len(grids) if is_joined else rows, rows, parts
    if (image.num_tokens, image.num_embeds, image.num_parts) != takes:
        raise InputError(
            f"image {i} has {image.num_tokens} tokens, {image.num_embeds} embeddings and {image.num_parts} parts; with "
            f"its tile grid it must have {takes[0]}, {rows} and {parts}",
            "media",
        )


def _is_valid_grid(grid: TileGrid, tiling: ImageTiling) -> bool:
    """Return True if `tiling` tiles an image of this size to this grid."""
    sides = grid.height, grid.width
    if not all(1 <= side <= MAX_IMAGE_SIDE for side in sides):
        return False
    return any(tiling.choose_grid(*sides, alone) == grid for alone in (True, False))


def check_salt(salt: str) -> None:
    """Raise InputError for an invalid salt of the prefix cache."""
    if not isinstance(salt, str):
        raise InputError(f"cache_salt must be a string, got {type(salt).__name__}", "cache_salt")
    if len(salt) > MAX_SALT:
        raise InputError(f"cache_salt may have at most {MAX_SALT} characters, got {len(salt)}", "cache_salt")
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise InputError("cache_salt has half of a surrogate pair, which is no character", "cache_salt") from error
