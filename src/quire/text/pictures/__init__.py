"""Pictures for models: resized, padded and cut into tiles as each family was trained with them; and the tokens that
stand for them in the text. Nothing is decoded here, and pixels stay bytes: numbers are the encoder's.
"""

from __future__ import annotations

from quire.text.pictures.family import FamilyEyes
from quire.text.pictures.placeholders import Placeholder, read_placeholder
from quire.text.pictures.preparation import Preparation, read_preparation

__all__ = ["FamilyEyes", "Placeholder", "Preparation", "read_placeholder", "read_preparation"]
