"""Images of workloads for a model with vision: each image has as many embeddings as the model makes for its size, and
stands after its prompt's first token. Pixels are random and preprocessed as a user's are; a server gets files.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from quire.bench.workloads import EDGE, ImageSpec, Job, RequestSpec
from quire.models.vision.settings import PREPROCESSOR_KEY, VisionSettings
from quire.protocol.image_tiling import ImageTiling
from quire.protocol.images import ImageItem, ImagePixels
from quire.protocol.model_spec import ModelSpec

BLOCK = 28  # pixels a side of one colour in a PNG file, which keeps it as small as a drawing
PLACE = EDGE  # placeholder token for an image's embeddings; its value is never read


class Eyes(NamedTuple):
    """The image format of a model by its config.json: split into tiles, with one token per embedding (`in_places`) or
    one token per image."""

    config: dict[str, Any]
    tiling: ImageTiling
    in_places: bool

    @classmethod
    def of(cls, config: dict[str, Any], spec: ModelSpec) -> Eyes | None:
        """Return the `Eyes` of a model; None if it has no vision."""
        if spec.vision is None:
            return None
        settings = VisionSettings.from_config(config, config.get(PREPROCESSOR_KEY))
        return cls(config, settings.tiling, spec.images_replace_tokens)

    def placed(self, request: RequestSpec) -> tuple[int, tuple[ImageItem, ...]]:
        """Return the length of a request's prompt, and its images with their positions."""
        at, media = 1, list[ImageItem]()
        for one in request.pictures:
            grid = self.tiling.choose_grid(one.height, one.width, is_only_image=len(request.pictures) == 1)
            rows = self.tiling.num_embeds(grid)
            media.append(ImageItem(_key(one), at, rows if self.in_places else 1, rows, self.tiling.num_parts(grid)))
            at = media[-1].end
        return request.prompt_len - sum(one.tokens for one in request.pictures) + at - 1, tuple(media)

    def jobs(self, specs: Sequence[RequestSpec], jobs: Sequence[Job], pixels: bool = True) -> list[Job]:
        """Return the requests with images, which were tokens in `jobs`; without `pixels` none are made."""
        found = []
        for request, job in zip(specs, jobs, strict=True):
            _, media = self.placed(request)
            text = job.prompt[sum(one.tokens for one in request.pictures) :]
            prompt = [*text[:1], *[PLACE] * sum(medium.num_tokens for medium in media), *text[1:]]
            found.append(Job(prompt, job.output, media, self.pixels(request) if pixels else ()))
        return found

    def pixels(self, request: RequestSpec) -> tuple[ImagePixels, ...]:
        """Return the encoder's input for a request's images. Images of the same name have the same pixels."""
        from PIL import Image

        from quire.text.images.preprocessor import read_image_preprocessor

        said = self.config.get(PREPROCESSOR_KEY) or {}
        how = read_image_preprocessor(
            said, self.tiling, VisionSettings.from_config(self.config, said).normalization.mean
        )
        found = []
        for one in request.pictures:
            rng = np.random.default_rng(list(_key(one)))
            image = Image.fromarray(rng.integers(0, 256, (one.height, one.width, 3), dtype=np.uint8))
            made, grid = how.prepare(image, only_image=len(request.pictures) == 1)
            found.append(ImagePixels(_key(one), made.shape, made.tobytes(), grid))
        return tuple(found)


def posted(specs: Sequence[RequestSpec], jobs: Sequence[Job]) -> list[Job]:
    """Return the requests for a server whose model has vision: prompts of text alone, and images as PNG files, which
    get as many embeddings as others of their sizes."""
    return [
        Job(job.prompt[sum(one.tokens for one in pictures) :], job.output, files=tuple(map(png, pictures)))
        for pictures, job in zip((request.pictures for request in specs), jobs, strict=True)
    ]


def png(one: ImageSpec) -> bytes:
    """Return an image of the given size of blocks in random colours, seeded by its name."""
    from PIL import Image

    blocks = -(-one.height // BLOCK), -(-one.width // BLOCK), 3
    colours = np.random.default_rng(list(_key(one))).integers(0, 256, blocks, dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(colours).resize((one.width, one.height), Image.Resampling.NEAREST).save(file, "PNG")
    return file.getvalue()


def _key(one: ImageSpec) -> bytes:
    # The class's first name stays in the text, so that images are those of earlier measurements.
    return hashlib.sha256(repr(one).replace("ImageSpec", "Sketched").encode()).digest()
