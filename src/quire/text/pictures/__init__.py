"""Pictures for models: resized, padded and cut into tiles as each family was trained with them; and the tokens that
stand for them in the text. Nothing is decoded here, and pixels stay bytes: numbers are the encoder's.
"""

from __future__ import annotations

from quire.text.pictures.family import ModelImageProcessor
from quire.text.pictures.placeholders import ImagePlaceholder, read_placeholder
from quire.text.pictures.preparation import ImagePreprocessor, read_image_preprocessor

__all__ = [
    "ImagePlaceholder",
    "ImagePreprocessor",
    "ModelImageProcessor",
    "read_image_preprocessor",
    "read_placeholder",
]
