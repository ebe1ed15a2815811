"""What the schemas of answers have in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """All fields, and no others. Those that have a default may be left out."""

    model_config = ConfigDict(extra="forbid")
